"""The benchmark of a convolution's patches: what it counts, and the fit."""

from __future__ import annotations

import numpy as np

from benchmarks.convolution_patches import (
    FIGURES,
    counts_of,
    fitted,
    node_of,
    planner_s,
    random_convolutions,
)


def test_random_convolutions_cover_every_figure() -> None:
    nodes = [node_of(fn, shapes) for fn, shapes in random_convolutions(60)]
    counts = np.array([counts_of(graph, node) for graph, node in nodes])
    assert counts.shape == (60, len(FIGURES))
    assert ((counts > 0).sum(axis=0) >= 3).all()
    kinds = [node.work.kind for _, node in nodes if node.work is not None]
    assert set(kinds) == {"forward", "input-gradient", "kernel-gradient"}


def test_the_fit_recovers_the_figures_despite_outliers() -> None:
    counts = [counts_of(*node_of(fn, shapes)) for fn, shapes in random_convolutions(90)]
    figures = np.array([3e-4, 4e-11, 4e-9, 2e-9, 9e-9, 5e-9])
    seconds = np.array(counts) @ figures
    seconds[::10] *= 3  # other load
    np.testing.assert_allclose(fitted(counts, list(seconds)), figures, rtol=0.2)


def test_the_planner_counts_the_same_patches() -> None:
    """Its price of a convolution is one of the figures, without what a call takes."""
    nodes = [node_of(fn, shapes) for fn, shapes in random_convolutions(30)]
    counts = np.array([counts_of(graph, node) for graph, node in nodes])
    prices = [planner_s(graph, node) for graph, node in nodes]
    figures, *_ = np.linalg.lstsq(counts[:, 1:], prices, rcond=None)
    np.testing.assert_allclose(counts[:, 1:] @ figures, prices)

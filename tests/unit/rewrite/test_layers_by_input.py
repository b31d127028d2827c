"""Layers by where parameters lie: which stage runs what."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.single_microbatch import loop_single_microbatch
from autopar.tracer.trace_step import trace_step

X = np.ones((4, 8), np.float32)
W = np.ones((8, 8), np.float32)


def products_by_stage(fn: Any, params: Any, holders: dict[str, tuple[int, ...]]) -> dict[int, int]:
    """Stage -> how many products it runs; parameters by name."""
    step = loop_single_microbatch(trace_step(fn, (params, X)))
    paths = step.call.paths
    by_input = {i: holders[p] for i, p in enumerate(paths) if p in holders}
    layers, stages = layers_by_arguments(step, by_input)
    body = step.program.equations[step.loop].bodies[0]
    names = [[body.equations[i].name for i in layer.equations] for layer in layers]
    # Nothing reads what a later stage makes.
    made_at = {
        r: s
        for s, layer in zip(stages, layers, strict=True)
        for i in layer.equations
        for r in body.equations[i].results
    }
    for stage, layer in zip(stages, layers, strict=True):
        for i in layer.equations:
            read = [o for o in body.equations[i].operands if isinstance(o, int)]
            assert all(made_at.get(v, stage) <= stage for v in read)
    return {s: own.count("dot_general") for s, own in zip(stages, names, strict=True)}


def chain(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x.mean()


def test_equations_follow_their_parameters() -> None:
    params = {"a": W, "b": W, "c": W}
    holders = {"params['a']": (0,), "params['b']": (0,), "params['c']": (1,)}
    assert products_by_stage(chain, params, holders) == {0: 2, 1: 1}


def test_a_parameter_behind_what_it_is_multiplied_with_is_brought_there() -> None:
    params = {"a": W, "b": W, "c": W}
    holders = {"params['a']": (1,), "params['b']": (0,), "params['c']": (2,)}
    assert products_by_stage(chain, params, holders) == {1: 2, 2: 1}


def test_what_two_stages_hold_is_used_by_the_first_that_can() -> None:
    def tied(params, x):
        hidden = jnp.tanh((x @ params["e"]) @ params["w"])
        return (hidden @ params["e"]).sum()

    holders = {"params['e']": (0, 2), "params['w']": (1,)}
    assert products_by_stage(tied, {"e": W, "w": W}, holders) == {0: 1, 1: 1, 2: 1}


def test_what_reads_no_parameter_is_made_where_it_is_read() -> None:
    def masked(params, x):
        mask = x @ x.T > 0  # of the batch alone
        hidden = jnp.tanh(x @ params["a"])
        return (jnp.where(mask, 1.0, 0.0) @ (hidden @ params["b"])).sum()

    holders = {"params['a']": (0,), "params['b']": (1,)}
    assert products_by_stage(masked, {"a": W, "b": W}, holders) == {0: 1, 1: 3}


def test_casts_of_parameters_stand_before_the_loop() -> None:
    def cast(params, x):
        small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return chain(small, x.astype(jnp.bfloat16))

    holders = {"params['a']": (0,), "params['b']": (1,)}
    assert products_by_stage(cast, {"a": W, "b": W}, holders) == {0: 1, 1: 1}

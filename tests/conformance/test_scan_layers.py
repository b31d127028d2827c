"""A scan over layers is solved as the layers written out are: same objective, same collectives."""

from __future__ import annotations

from collections import Counter

import pytest

import autopar
from autopar.ir.plan import ParallelPlan
from examples.models import build

MESH = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
DEPTHS = (4, 6)


def solved(num_layers: int, scan: bool) -> ParallelPlan:
    example = build("gpt-tiny", num_layers=num_layers, scan_layers=scan)
    return autopar.solve_sharding(
        example.train_step, example.abstract_state(), example.abstract_batch(), mesh=MESH
    ).plan


def collectives(plan: ParallelPlan) -> Counter[str]:
    counts: Counter[str] = Counter()
    for module in plan.modules:
        counts.update(dict(module.collectives))
    return counts


@pytest.mark.slow
def test_scan_over_layers_is_solved_like_the_layers() -> None:
    unrolled, scanned = ([solved(depth, scan) for depth in DEPTHS] for scan in (False, True))
    for ours, theirs in zip(scanned, unrolled, strict=True):
        assert ours.solver.gap == theirs.solver.gap == 0
        assert ours.solver.objective == pytest.approx(theirs.solver.objective, rel=1e-6)
        assert collectives(ours) == collectives(theirs)
    per_layer = [
        second.solver.objective - first.solver.objective for first, second in (scanned, unrolled)
    ]
    assert per_layer[0] == pytest.approx(per_layer[1], rel=1e-6)
    # The body is solved once: the problem is as large for six layers as for four.
    assert scanned[0].solver.sizes["nodes"] == scanned[1].solver.sizes["nodes"]

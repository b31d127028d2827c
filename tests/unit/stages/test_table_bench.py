"""Which meshes are priced first."""

from __future__ import annotations

from typing import Any

from autopar.ir.mesh import last_axis
from autopar.stages.layer_tables import _promising_first, mesh_shapes
from autopar.stages.table_bench import TableBench

SUBMESHES = [(2, 8), (1, 8), (4, 8)]


class Known(TableBench):
    """A bench at which meshes are cheap whose last axis is near 4."""

    def __init__(self) -> None:
        self.known = {}

    def solve_on(self, submesh: Any, shape: Any) -> None:
        cost = 1.0 + abs(last_axis(shape) - 4)
        self.known[submesh, shape] = ({}, cost * submesh[0])


def test_every_submesh_has_its_best_mesh_before_any_has_all() -> None:
    bench, order = Known(), []
    for submesh, shape in _promising_first(
        SUBMESHES, {s: mesh_shapes(s) for s in SUBMESHES}, bench
    ):
        order.append((submesh, shape))
        bench.solve_on(submesh, shape)
    first = len(mesh_shapes(SUBMESHES[0]))
    assert [submesh for submesh, _ in order[:first]] == [SUBMESHES[0]] * first
    assert order[first : first + 2] == [((1, 8), (2, 4)), ((4, 8), (8, 4))]
    assert sorted(order) == sorted((s, shape) for s in SUBMESHES for shape in mesh_shapes(s))


def test_ratios_are_within_a_submesh() -> None:
    bench = Known()
    bench.known = {
        ((2, 8), (16,)): ({}, 3.0),
        ((2, 8), (8, 2)): ({}, 2.0),
        ((1, 8), (4, 2)): ({}, 8.0),
        ((1, 8), (8,)): ({}, 4.0),
    }
    assert bench.cost_by_last_axis() == {1: (1.5 + 1.0) / 2, 2: (1.0 + 2.0) / 2}


def test_the_last_axis_of_a_line_is_one() -> None:
    assert last_axis((8,)) == 1
    assert last_axis((4, 2)) == 2

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import SolverError
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MESH = LogicalMesh((4,))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def layers() -> Graph:
    def loss_of(params, x):
        for first, second in params:
            x = x + jnp.tanh(x @ first) @ second
        return (x**2).mean()

    def step(params, x):
        grads = jax.grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return build_graph(trace_step(step, ([(array(16, 32), array(32, 16))] * 8, array(8, 16))))


def input_layout(solution: GraphSharding, value: int) -> tuple[int, ...]:
    node, result = solution.graph.producer[value]
    return solution.layouts[node][1][result]


@pytest.mark.parametrize("fold", [True, False])
def test_equal_layers_can_be_asked_for_different_layouts(layers: Graph, fold: bool) -> None:
    paths = {layers.values[v].path: v for v in layers.inputs}
    pins = {
        paths["params[3][0]"]: (0,),
        paths["params[4][0]"]: (1,),
        paths["params[5][0]"]: (WHOLE,),
    }
    solution = solve_graph(layers, MESH, pins=pins, fold=fold)
    assert {v: input_layout(solution, v) for v in pins} == pins
    assert (solution.stats.num_classes < len(layers.nodes)) is fold


def test_equal_layouts_keep_layers_tied(layers: Graph) -> None:
    free = solve_graph(layers, MESH)
    pinned = solve_graph(layers, MESH, pins={v: (0,) for v in layers.inputs})
    assert pinned.stats.num_classes == free.stats.num_classes
    assert pinned.objective >= free.objective


def test_a_layout_that_no_strategy_gives_is_named_by_path(layers: Graph) -> None:
    with pytest.raises(SolverError, match=r"params\[0\]\[0\]: no strategy of input"):
        solve_graph(layers, MESH, pins={layers.inputs[0]: (7,)})


def test_a_filter_is_obeyed(layers: Graph) -> None:
    def whole_only(node, strategies):
        return [i for i, s in enumerate(strategies) if set(s.factors) == {-1}]

    solution = solve_graph(layers, MESH, keep=whole_only)
    assert {layout for own in solution.layouts for layouts in own for layout in layouts} == {
        (WHOLE,)
    }
    assert solution.gap == 0


def test_every_chosen_layout_is_one_the_node_can_have(layers: Graph) -> None:
    """Folded or not, partial sums only where a rule makes them."""
    for fold in (True, False):
        solution = solve_graph(layers, MESH, fold=fold)
        for node, strategy in zip(layers.nodes, solution.strategies, strict=True):
            for layout in strategy.results:
                assert PARTIAL not in layout or node.rule.linear or node.rule.reduction


def test_stats_say_what_was_solved(layers: Graph) -> None:
    stats = solve_graph(layers, MESH).stats
    assert stats.num_nodes == len(layers.nodes)
    assert 0 < stats.num_core_nodes <= stats.num_classes < stats.num_nodes
    assert stats.num_strategies >= stats.num_classes
    assert list(stats.seconds) == ["fold", "costs", "reduce", "solve"]


def test_gap_is_relative_and_never_negative(layers: Graph) -> None:
    solution = solve_graph(layers, MESH)

    def gap(objective: float, lower_bound: float) -> float:
        parts = (solution.problem, solution.choice)
        return GraphSharding(*parts, objective, lower_bound, solution.stats).gap

    assert gap(10.0, 9.0) == pytest.approx(0.1)
    assert gap(10.0, 10.0) == 0
    assert gap(0.0, 0.0) == 0
    assert gap(10.0, 10.0 + 1e-9) == 0

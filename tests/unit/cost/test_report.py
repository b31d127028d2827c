from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autopar.cost.compute import tie_break_s
from autopar.cost.report import (
    Step,
    cost_report,
    describe_step,
    edge_weight,
    parallelism,
)
from autopar.ir.graph import Graph, Node, NodeKind, Rule
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import PARTIAL, WHOLE, num_shards
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MESHES = [
    LogicalMesh((4,), alpha=(3.0,), beta=(0.1,)),
    LogicalMesh((2, 2), alpha=(3.0, 1.0), beta=(0.1, 0.2)),
    mesh_of_cluster(ClusterSpec(2, 2, "cpu"), (2, 2)),
    mesh_of_cluster(ClusterSpec(1, 4, "h100-sxm"), (4,)),
]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp_graph(in_loop: bool = False) -> Graph:
    def loss_of(params, x):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ params["w"])
        if in_loop:
            x, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["v"]), None), x, None, length=5)
        with jax.named_scope("second"):
            x = x @ params["v"]
        return (x**2).mean()

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"w": array(16, 64), "v": array(64, 64)}
    return build_graph(trace_step(step, (params, array(32, 16))))


def tie_breaks(solution: GraphSharding) -> float:
    """What the objective has beside compute and communication."""
    graph, mesh = solution.graph, solution.mesh
    return sum(
        node.weight * tie_break_s(mesh, graph.values[v].num_bytes / num_shards(s, mesh.shape))
        for node, strategy in zip(graph.nodes, solution.strategies, strict=True)
        for v, s in zip(node.results, strategy.results, strict=True)
    )


@pytest.mark.parametrize("in_loop", [False, True], ids=["straight", "loop"])
@pytest.mark.parametrize("mesh", MESHES, ids=["4", "2x2", "2x2-cpu", "4-h100"])
def test_report_adds_up_to_the_objective(mesh: LogicalMesh, in_loop: bool) -> None:
    graph = mlp_graph(in_loop)
    solution = solve_graph(graph, mesh, fold=False)
    report = cost_report(graph, mesh, solution.layouts)
    total = report.compute_s + report.communication_s
    assert total + tie_breaks(solution) == pytest.approx(solution.objective, rel=1e-9)
    assert tie_breaks(solution) < 1e-2 * solution.objective
    assert (report.compute_s > 0) == (mesh.device is not None)
    # The parts are the whole.
    modules = report.modules
    assert sum(m.compute_s for m in modules) == pytest.approx(report.compute_s)
    assert sum(m.communication_s for m in modules) == pytest.approx(report.communication_s)
    assert sum(m.communication_bytes for m in modules) == pytest.approx(report.communication_bytes)


@pytest.mark.parametrize("mesh", MESHES, ids=["4", "2x2", "2x2-cpu", "4-h100"])
def test_report_prices_any_plan_not_only_the_best(mesh: LogicalMesh) -> None:
    """With parameters whole and the batch split: data parallelism, with its known collectives."""
    graph = mlp_graph()
    whole = (WHOLE,) * len(mesh.shape)
    pins = {v: whole for v in graph.inputs[:2]} | {graph.inputs[2]: (0,) * len(mesh.shape)}
    solution = solve_graph(graph, mesh, pins=pins, fold=False)
    report = cost_report(graph, mesh, solution.layouts)
    total = report.compute_s + report.communication_s
    assert total + tie_breaks(solution) == pytest.approx(solution.objective, rel=1e-9)


def test_state_that_is_also_read_leaves_the_step_at_the_price_the_solver_paid() -> None:
    """A new state is on nobody's critical path on its way to the next step's input, even where
    the rest of the step reads it too."""
    mesh = mesh_of_cluster(ClusterSpec(1, 2, "cpu"), (2,))
    graph = build_graph(
        trace_step(lambda w, x: (w - 0.1 * w, x @ (w - 0.1 * w)), (array(64, 64), array(64, 64)))
    )
    graph = replace(graph, values=tuple(replace(v, deferred=False) for v in graph.values))
    # Pins put the state in by columns and out by rows.
    pins = {graph.inputs[0]: (1,), graph.outputs[0]: (0,)}
    solution = solve_graph(graph, mesh, pins=pins, fold=False)
    report = cost_report(graph, mesh, solution.layouts)
    total = report.compute_s + report.communication_s + tie_breaks(solution)
    assert total == pytest.approx(solution.objective, rel=1e-9)


def test_data_parallel_mlp_by_hand() -> None:
    """Gradients are reduced once, in their module's backward pass; nothing else is sent but the
    mean of the loss."""
    mesh = LogicalMesh((4,), ("data",), alpha=(1.0,), beta=(1.0,))
    graph = mlp_graph()
    pins = {v: (WHOLE,) for v in graph.inputs[:2]} | {graph.inputs[2]: (0,)}

    def keep(node: Node, strategies) -> list[int]:
        """The batch stays split; what has no batch stays whole."""
        split = [i for i, s in enumerate(strategies) if s.factors[0] == node.batch_factor]
        unsplit = [i for i, s in enumerate(strategies) if s.factors[0] < 0]
        return split if node.batch_factor is not None else unsplit

    solution = solve_graph(graph, mesh, pins=pins, keep=keep, fold=False)
    report = cost_report(graph, mesh, solution.layouts)
    by_module = {(m.module, m.region): m for m in report.modules if m.collectives}
    assert {key: dict(m.collectives) for key, m in by_module.items()} == {
        ("first", "backward"): {"all-reduce(data)": 1},
        ("second", "backward"): {"all-reduce(data)": 1},
    }
    ring = 2 * 3 / 4
    first, second = (by_module[name, "backward"] for name in ("first", "second"))
    assert first.communication_bytes == ring * 4 * 16 * 64
    assert second.communication_bytes == ring * 4 * 64 * 64
    assert first.communication_s == 1 + first.communication_bytes
    scalar_s = 1 + ring * 4
    expected = 2 + first.communication_bytes + second.communication_bytes + scalar_s
    assert report.communication_s == pytest.approx(expected)


def used_whole(node: Node, strategies) -> list[int]:
    """State is gathered on its way into its shared use."""
    whole = [i for i, s in enumerate(strategies) if s.factors == (-1,)]
    return whole if node.kind is NodeKind.USE else list(range(len(strategies)))


def modules_that_gather(graph: Graph) -> set[str]:
    mesh = LogicalMesh((4,), ("data",))
    pins = {v: (0,) for v in graph.inputs}
    solution = solve_graph(graph, mesh, pins=pins, keep=used_whole, fold=False)
    modules = cost_report(graph, mesh, solution.layouts).modules
    return {m.module for m in modules if "all-gather(data)" in dict(m.collectives)}


def test_gathered_parameters_are_paid_for_by_the_module_that_reads_them_first() -> None:
    assert modules_that_gather(mlp_graph()) == {"first", "second"}


def test_what_a_loop_only_reads_is_paid_for_by_the_module_inside_of_it() -> None:
    def step(w, x):
        with jax.named_scope("loop"):
            x, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)
        return w * 0.9, (x**2).sum()

    graph = build_graph(trace_step(step, (array(64, 64), array(32, 64))))
    assert modules_that_gather(graph) == {"loop"}


# -- steps


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        ((WHOLE, WHOLE), (0, WHOLE), Step("slice", (0,), 0.0)),
        ((0, WHOLE), (WHOLE, WHOLE), Step("all-gather", (0,), 512.0)),
        ((WHOLE, 1), (WHOLE, WHOLE), Step("all-gather", (1,), 768.0)),
        ((0, 0), (WHOLE, WHOLE), Step("all-gather", (0, 1), 896.0)),
        ((0, 1), (0, WHOLE), Step("all-gather", (1,), 384.0)),
        ((0, WHOLE), (1, WHOLE), Step("all-to-all", (0,), 256.0)),
        ((0, 0), (1, 1), Step("all-to-all", (0, 1), 112.0)),
        ((PARTIAL, WHOLE), (WHOLE, WHOLE), Step("all-reduce", (0,), 1024.0)),
        ((PARTIAL, PARTIAL), (WHOLE, WHOLE), Step("all-reduce", (0, 1), 1792.0)),
        ((PARTIAL, 0), (WHOLE, 0), Step("all-reduce", (0,), 256.0)),
        ((PARTIAL, WHOLE), (1, WHOLE), Step("reduce-scatter", (0,), 512.0)),
        ((PARTIAL, PARTIAL), (0, 0), Step("reduce-scatter", (0, 1), 896.0)),
    ],
)
def test_describe_step_names_the_collective_and_what_is_sent(before, after, step) -> None:
    """1024 bytes on 2 × 4 devices; what each device sends in a ring."""
    found = describe_step(LogicalMesh((2, 4)), before, after, 1024.0)
    assert (found.kind, found.axes) == (step.kind, step.axes)
    assert found.sent_bytes == pytest.approx(step.sent_bytes)


def test_parallelism_counts_axes_that_split_anything() -> None:
    mesh = LogicalMesh((2, 4))
    assert parallelism((((WHOLE, WHOLE),), ((WHOLE, WHOLE),)), mesh) == 1
    assert parallelism((((0, WHOLE),), ((PARTIAL, WHOLE),)), mesh) == 2
    assert parallelism((((0, 1),), ((0, WHOLE),)), mesh) == 8


def test_edge_weight_is_how_often_the_value_moves() -> None:
    def node(name: str, weight: float) -> Node:
        return Node(NodeKind.OP, name, Rule((), (), ()), (), (), weight=weight)

    outside, inside = node("dot_general", 1.0), node("dot_general", 5.0)
    slices, stack = node("scan_slice", 5.0), node("scan_stack", 5.0)
    assert edge_weight(outside, outside) == 1
    assert edge_weight(inside, inside) == 5
    assert edge_weight(outside, inside) == 5  # in the body, each time
    assert edge_weight(outside, slices) == 1  # the stack moves once, before the loop
    assert edge_weight(stack, outside) == 1  # and after it
    assert edge_weight(slices, inside) == 5
    assert edge_weight(inside, stack) == 5

"""Collectives under compute: which may hide, how much room they have, and what plans make of it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.collectives import all_gather_s
from autopar.cost.report import cost_report
from autopar.cost.reshard import deferred_alpha_share
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import is_slice
from autopar.measure.candidates import plan_candidates
from autopar.methods import ParallelMethod
from autopar.sharding.overlap import hidden, hideable, hides_collectives, rooms
from autopar.sharding.reduce import FORBIDDEN
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

GPUS = ClusterSpec(1, 4, "h100-sxm")
MESH = mesh_of_cluster(GPUS, (4,))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss_of(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return (x**2).mean()


def scanned_loss_of(params, x):
    w = params["w0"]
    x, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)
    return (x**2).mean()


def train_step_of(loss):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(depth: int, size: int = 64, rows: int = 32):
    return {f"w{i}": array(size, size) for i in range(depth)}, array(rows, size)


def graph_of(depth: int = 3, loss=loss_of, size: int = 64, rows: int = 32) -> Graph:
    return build_graph(trace_step(train_step_of(loss), arguments(depth, size, rows)))


def names(graph: Graph, numbers: set[int | None]) -> set[str]:
    return {graph.nodes[n].name for n in numbers if n is not None}


def test_weights_wait_at_their_products_and_sums_begin_at_their_gradients():
    graph = graph_of()
    found = list(hideable(graph))
    gathers = [one for one in found if one.before is not None]
    sums = [one for one in found if one.before is None]
    assert len({one.what for one in gathers}) == 3  # the weights
    assert {one.what for one in gathers} <= set(graph.inputs)
    assert names(graph, {one.before for one in gathers}) == {"dot_general"}
    gradients = [i for i, n in enumerate(graph.nodes) if n.is_heavy and n.region == "backward"]
    assert {one.after for one in sums} & set(gradients)
    assert "update" not in {graph.nodes[one.node].region for one in gathers}


def test_what_runs_in_a_loop_is_waited_for():
    graph = graph_of(1, scanned_loss_of)
    assert all(graph.nodes[one.node].weight == 1 for one in hideable(graph))
    products = [i for i, node in enumerate(graph.nodes) if node.name == "dot_general"]
    assert all(graph.nodes[i].weight == 5 for i in products)
    assert not [one for one in hideable(graph) if one.node in products]


def gather_rooms(graph: Graph, mesh: LogicalMesh) -> list[float]:
    """Of every weight's first gather, in the order of their uses."""
    found = list(hideable(graph))
    room = dict(zip(found, rooms(graph, mesh, found), strict=True))
    ordered = sorted((one for one in found if one.before is not None), key=lambda o: o.before or 0)
    first = {one.what: room[one] for one in reversed(ordered)}
    return [first[what] for what in dict.fromkeys(one.what for one in ordered)]


def test_the_first_weight_has_no_room_and_later_ones_what_is_computed_before_them():
    graph = graph_of(4, size=1024, rows=65536)
    room = gather_rooms(graph, MESH)
    assert room[0] == 0.0
    assert room == sorted(room) and room[-1] > 2 * room[1] > 0


def test_the_sum_of_the_last_gradient_has_no_room_but_the_update():
    graph = graph_of(4, size=1024, rows=65536)
    found = [one for one in hideable(graph) if one.before is None]
    room = dict(zip(found, rooms(graph, MESH, found), strict=True))
    made = {one.after or 0: room[one] for one in found}
    products = {at: seconds for at, seconds in made.items() if graph.nodes[at].is_heavy}
    in_order = [products[at] for at in sorted(products)]
    assert in_order == sorted(in_order, reverse=True)
    assert in_order[-1] < 0.1 * in_order[0]


def test_with_slow_links_a_gather_has_the_compute_since_the_one_before_it():
    slow = replace(MESH, alpha=(1e-6,), beta=(1e-9,))
    graph = graph_of(4, size=1024, rows=65536)
    size = 4 * 1024**2
    one_s = all_gather_s(slow, (0,), size, deferred_alpha_share(slow, size))
    room, fast = gather_rooms(graph, slow), gather_rooms(graph, MESH)
    assert max(room) < one_s  # links are the longer of the two
    assert room[1] == pytest.approx(room[3])
    assert sum(room) <= 1.01 * fast[-1] + one_s


def test_between_hosts_nothing_is_counted_as_hidden():
    assert hides_collectives(MESH)
    assert not hides_collectives(mesh_of_cluster(ClusterSpec(2, 2, "h100-sxm"), (4,)))
    assert not hides_collectives(mesh_of_cluster(ClusterSpec(1, 4, "cpu"), (4,)))


def test_a_collective_hides_as_far_as_its_room_goes():
    matrix = np.array([[0.0, 2.0], [1.0, FORBIDDEN]])
    both = hidden(matrix, [5.0, 1.5])
    assert both is not None
    share = both[1, 0] / 2  # both collectives have room for one second
    assert 0.8 < share <= 1
    assert both == pytest.approx(share * np.array([[0.0, 3.5], [2.0, 0.0]]))
    assert hidden(matrix, [0.0]) is None and hidden(0 * matrix[:, :1], [1.0]) is None


def solved(overlaps: bool, cluster: ClusterSpec = GPUS, **changes: int) -> GraphSharding:
    graph = graph_of(4, size=changes.get("size", 2048), rows=changes.get("rows", 16384))
    return solve_graph(graph, mesh_of_cluster(cluster, (4,)), overlaps=overlaps)


def test_the_objective_is_compute_and_communication_less_what_is_hidden():
    serial, found = solved(False), solved(True)
    report = cost_report(found.graph, found.mesh, found.layouts)
    assert serial.hidden_s is None and found.hidden_s is not None
    assert 0 < found.hidden_s < report.communication_s
    parts = report.compute_s + report.communication_s - found.hidden_s
    assert found.objective == pytest.approx(parts, rel=1e-3)
    assert found.objective < serial.objective
    assert found.gap == 0


def test_collectives_of_cpus_block():
    found = solved(True, ClusterSpec(1, 4, "cpu"), size=64, rows=64)
    assert found.hidden_s is None


def plan_of(method: ParallelMethod, device: str = "h100-sxm") -> autopar.ParallelPlan:
    step = train_step_of(loss_of)
    cluster = ClusterSpec(1, 4, device)
    return autopar.plan(step, *arguments(4, 2048, 16384), cluster=cluster, method=method)


OVERLAP = autopar.ShardingOptions(overlap=True)


def test_a_plan_says_what_it_hides():
    plan = plan_of(autopar.ShardParallel(options=OVERLAP))
    assert plan.hidden_s is not None and plan.hidden_s > 0
    parts = sum(module.compute_s + module.communication_s for module in plan.modules)
    assert plan.estimated_step_s == pytest.approx(parts - plan.hidden_s, rel=1e-6)
    assert "of communication under compute" in plan.explain()
    assert "assumed not to overlap" not in plan.explain()
    again = autopar.ParallelPlan.from_json(plan.to_json())
    assert again.hidden_s == plan.hidden_s
    assert plan_of(autopar.ShardParallel(options=OVERLAP), "cpu").hidden_s is None


def test_overlap_is_counted_only_where_it_is_asked_for():
    plan = plan_of(autopar.ShardParallel())
    assert plan.hidden_s is None
    assert "assumed not to overlap" in plan.explain()


def test_plans_to_choose_from_include_one_with_overlap():
    found = plan_candidates(
        train_step_of(loss_of),
        arguments(4, 2048, 16384),
        {},
        cluster=GPUS,
        method=autopar.ShardParallel(options=autopar.ShardingOptions(rerank=3)),
        options=None,
        num=3,
    )
    assert len(found) == 3
    assert {planned.plan.hidden_s is None for planned in found} == {True, False}


def test_stages_hide_nothing():
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2), options=OVERLAP)
    plan = plan_of(method)
    assert plan.is_pipeline
    assert all(stage.plan is not None and stage.plan.hidden_s is None for stage in plan.stages)


def test_the_filter_of_a_strided_convolutions_gradient_is_gathered_before_it_is_reversed():
    def loss(params, x):
        dims = ("NHWC", "HWIO", "NHWC")
        for name in sorted(params):
            x = jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=dims
            )
            x = jnp.tanh(x)
        return (x**2).mean()

    params = {"w0": array(3, 3, 64, 256), "w1": array(3, 3, 256, 256)}
    graph = build_graph(trace_step(train_step_of(loss), (params, array(64, 16, 16, 64))))
    found = solve_graph(graph, MESH, overlaps=True)
    edges = [
        (graph.producer[value], index, position)
        for index, node in enumerate(graph.nodes)
        if node.name == "conv_general_dilated"
        for position, value in enumerate(node.operands)
    ]
    reversed_filters = [edge for edge in edges if graph.nodes[edge[0][0]].name == "rev"]
    assert reversed_filters
    for (producer, result), index, position in reversed_filters:
        made = found.layouts[producer][1][result]
        read = found.layouts[index][0][position]
        assert made == read or is_slice(made, read)

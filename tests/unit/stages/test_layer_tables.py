"""Tables of layers: what they add up to, how they part time and memory, which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.node_layers import PER_STEP, SHARED, NodeLayers
from autopar.errors import SolverError
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import mesh_of_cluster
from autopar.ir.spec import PARTIAL
from autopar.ir.stages import LayerTable
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import LoopLayers, attach_layers, loop_batch
from autopar.rewrite.layers import find_layers
from autopar.rewrite.stage_slices import slice_step
from autopar.rewrite.step_source import StepSource
from autopar.sharding.solve import solve_graph
from autopar.stages.layer_tables import (
    mesh_shapes,
    node_places,
    stage_costs,
    stage_tables,
    submesh_cluster,
    undominated,
)
from autopar.stages.stage_memory import with_in_flight
from autopar.tracer.build import build_graph
from autopar.tracer.trace import StepOptions
from examples.models import build

CLUSTER = autopar.ClusterSpec(2, 4, "h100-sxm")


@dataclass(frozen=True)
class Case:
    step: TracedStep
    layers: LoopLayers
    graph: Graph
    places: NodeLayers
    num_micro_batches: int

    def tables(self, submeshes, **options) -> list[LayerTable]:
        return stage_tables(
            self.graph, self.places, CLUSTER, submeshes, self.num_micro_batches, **options
        )


def case(fn: Any, args: tuple, num_micro_batches: int, num_layers: int | None = None) -> Case:
    source = StepSource.of(fn, args, {}, StepOptions())
    step = source.with_recomputation((), num_micro_batches)
    assert step.loop is not None
    loop = step.program.equations[step.loop]
    found = find_layers(loop.bodies[0], num_layers, batch=loop_batch(loop))
    layers = attach_layers(loop.bodies[0], found)
    graph = build_graph(replace(step, is_stage=True))
    return Case(step, layers, graph, node_places(graph, step, layers), num_micro_batches)


@cache
def gpt() -> Case:
    sizes = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "seq_len": 64, "vocab_size": 512}
    example = build("gpt-1.3b", 64, dtype=jnp.bfloat16, **sizes)
    return case(example.train_step, (example.abstract_state(), example.abstract_batch()), 4)


WIDTH, ROWS, DEPTH = 64, 32, 3


@cache
def mlp(optimizer: str = "sgd") -> Case:
    chain = {
        "sgd": optax.sgd(0.1, momentum=0.9),
        "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    }[optimizer]

    def loss(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        return jnp.mean(x**2)

    def step(state, batch):
        params, moments = state
        grads = jax.grad(loss)(params, batch)
        updates, moments = chain.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    array = jax.ShapeDtypeStruct
    params = [array((WIDTH, WIDTH), jnp.float32)] * DEPTH
    state = (params, jax.eval_shape(chain.init, params))
    return case(step, (state, array((ROWS * 4, WIDTH), jnp.float32)), 4, DEPTH)


# -- places


@pytest.mark.parametrize("optimizer", ["sgd", "clipped"])
def test_parameters_and_moments_belong_to_their_layers(optimizer: str) -> None:
    graph, places = mlp(optimizer).graph, mlp(optimizer).places
    where = {
        graph.values[node.results[0]].path: places.layer[index]
        for index, node in enumerate(graph.nodes)
        if node.kind is NodeKind.INPUT
    }
    for number in range(DEPTH):
        assert where[f"state[0][{number}]"] == number
    traces = [layer for path, layer in where.items() if path and "trace" in path]
    assert sorted(traces) == list(range(DEPTH))


@pytest.mark.parametrize("optimizer", ["sgd", "clipped"])
def test_all_work_has_a_layer(optimizer: str) -> None:
    """With clipping, too, where an equation adds up the norms of all gradients."""
    graph, places = mlp(optimizer).graph, mlp(optimizer).places
    homeless = [graph.nodes[i] for i in np.flatnonzero(places.layer == SHARED)]
    assert {node.name for node in homeless} <= {"iota", "scan_slice"}  # numbers of micro-batches


@pytest.mark.ci
def test_products_run_for_every_micro_batch_and_updates_once() -> None:
    graph, places = gpt().graph, gpt().places
    for node, phase in zip(graph.nodes, places.phase, strict=True):
        if node.is_heavy:
            assert phase != PER_STEP
        if node.region == "update":
            assert phase == PER_STEP


# -- time


@pytest.mark.representatives("submesh2-shape2")
@pytest.mark.parametrize(("submesh", "shape"), [((1, 4), (2, 2)), ((2, 4), (8,)), ((1, 1), (1,))])
def test_layers_add_up_to_the_objective(submesh, shape) -> None:
    own = gpt()
    (table,) = own.tables([submesh], shapes={submesh: [shape]}, prices=(), remat=(False,))
    mesh = mesh_of_cluster(submesh_cluster(CLUSTER, submesh), shape)
    exact = solve_graph(own.graph, mesh)
    total = own.num_micro_batches * table.latency_s.sum() + table.once_s.sum()
    assert total == pytest.approx(exact.objective, rel=1e-9)
    assert (table.forward_s < table.latency_s).all()
    assert (table.forward_s > 0).all()


def test_equal_layers_cost_the_same() -> None:
    for table in gpt().tables([(1, 2)]):
        inner = slice(1, 3)  # neither the embedding's nor the last block
        for name in ("latency_s", "once_s", "held_bytes", "in_flight_bytes"):
            first, second = getattr(table, name)[inner]
            assert first == pytest.approx(second, rel=0.02), name


def test_forward_is_a_third_of_a_model_of_products() -> None:
    (table,) = gpt().tables([(1, 1)], remat=(False,))
    assert 0.2 < table.forward_s.sum() / table.latency_s.sum() < 0.45


# -- memory


def test_memory_of_a_single_device_is_what_the_program_says() -> None:
    """Per layer: weight, momentum and sum of gradients are held. A product is in flight in the
    layer that takes its sine, which is the one after it; the sine, which the backward pass reads,
    and its slope are made again when the layer's turn comes. What the first layer reads is a slice
    of the batch, which is held."""
    (table,) = mlp().tables([(1, 1)], remat=(False,))
    weight, rows = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    batch = 4 * rows
    extra = np.array([batch, 0, 0])
    assert table.held_bytes == pytest.approx(3 * weight + extra, rel=0.01)
    assert (table.working_bytes >= rows).all()
    # The last layer has two sines.
    assert table.in_flight_bytes == pytest.approx([0, rows, 2 * rows], rel=0.01)


def test_what_is_kept_is_what_the_backward_stage_program_reads() -> None:
    """The values that stage programs of a single stage hand on, each counted in one layer that
    reads it."""
    own = gpt()
    (stage,) = slice_step(own.step, own.layers, [0] * len(own.layers.layers)).stages
    backward = [stage.body.equations[i] for i in stage.backward]
    forward = [stage.body.equations[i] for i in stage.forward]
    made = {r for e in backward for r in e.results}
    read = {o for e in backward for o in e.operands if isinstance(o, int)}
    handed = {r for e in forward for r in e.results} & (read - made)
    assert own.places.residuals is not None
    assert set(own.places.residuals) == handed
    (table,) = own.tables([(1, 1)], remat=(False,))
    size = sum(own.graph.values[v].num_bytes for v in handed)
    assert table.in_flight_bytes.sum() == pytest.approx(size)


def test_a_layer_that_is_computed_again_keeps_its_input() -> None:
    kept, again = mlp().tables([(1, 1)])
    rows = 4 * ROWS * WIDTH
    assert (kept.remat, again.remat) == (False, True)
    assert again.in_flight_bytes == pytest.approx([0, rows, rows], rel=0.01)
    is_again = np.array([0, 0, 1])  # the others keep nothing but their input
    assert again.latency_s == pytest.approx(kept.latency_s + is_again * kept.forward_s)
    assert (again.working_bytes >= kept.in_flight_bytes).all()
    assert again.held_bytes == pytest.approx(kept.held_bytes)
    total = kept.held_bytes + kept.working_bytes + is_again * kept.in_flight_bytes
    assert again.held_bytes + again.working_bytes == pytest.approx(total)


def test_gradients_are_added_up_one_by_one() -> None:
    """No layer works with more than its own gradient and its activations."""
    (table,) = mlp().tables([(1, 1)], remat=(False,))
    weight, rows = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    assert table.working_bytes.max() <= weight + 4 * rows


def test_sums_that_are_reduced_after_the_loop_are_held_in_full() -> None:
    """Gradients of rows that are split are partial sums until the last micro-batch is done; then
    each device has its share of them."""
    own, graph = mlp(), mlp().graph
    state = {graph.inputs[i]: frozenset({(0,)}) for i, _ in graph.state}
    readers = [node for node in graph.nodes if node.kind is NodeKind.FINISH]
    sums = {
        value: frozenset({(PARTIAL,)})
        for node in readers
        for value in node.operands
        if graph.nodes[graph.producer[value][0]].kind is NodeKind.MERGE
    }
    assert len(sums) == DEPTH
    (table,) = own.tables(
        [(1, 4)],
        shapes={(1, 4): [(4,)]},
        constraints=lambda mesh: ({**state, **sums}, None),
        prices=(),
        remat=(False,),
    )
    weight = 4 * WIDTH * WIDTH
    moments = 2 * weight / 4  # parameters and momentum, split
    assert (table.held_bytes >= moments + weight).all()
    assert table.working_bytes.max() < moments + weight  # and nowhere else


def test_a_price_of_memory_buys_bytes_for_seconds() -> None:
    own = gpt()
    prices = (1.0, 100.0)
    tables = own.tables([(1, 4)], shapes={(1, 4): [(4,)]}, prices=prices, remat=(False,))
    n = own.num_micro_batches
    costs = [n * t.latency_s.sum() + t.once_s.sum() for t in tables]
    held = [t.held_bytes.sum() + t.in_flight_bytes.sum() for t in tables]
    assert len(tables) > 1
    assert costs == sorted(costs)
    assert held == sorted(held, reverse=True)
    assert held[-1] < 0.7 * held[0]
    assert [t.price_per_byte for t in tables] == sorted(t.price_per_byte for t in tables)


# -- which tables


def test_dominated_tables_are_dropped() -> None:
    (table,) = mlp().tables([(1, 1)], remat=(False,))
    worse = replace(table, latency_s=table.latency_s * 1.1)
    other = replace(worse, held_bytes=table.held_bytes * 0.5)
    assert undominated([worse, table, table]) == [table]
    assert undominated([table, worse, other]) == [table, other]


def test_later_axes_fit_into_hosts() -> None:
    assert mesh_shapes((1, 1)) == [(1,)]
    assert mesh_shapes((1, 2)) == [(2,)]
    assert set(mesh_shapes((1, 8))) == {(8,), (4, 2), (2, 4)}
    assert set(mesh_shapes((2, 8))) == {(16,), (8, 2), (4, 4), (2, 8)}


def test_half_of_each_host_has_half_of_its_network() -> None:
    whole, half = (submesh_cluster(CLUSTER, (2, m)).spec.host_bandwidth for m in (4, 2))
    assert half == whole / 2
    assert submesh_cluster(CLUSTER, (1, 2)).spec == CLUSTER.spec


def test_meshes_on_which_constraints_fail_are_left_out() -> None:
    def only_flat(mesh):
        if len(mesh.shape) == 2:
            raise SolverError("no such mesh")
        return {}, None

    tables = mlp().tables([(1, 4)], constraints=only_flat)
    assert {t.mesh_shape for t in tables} == {(4,)}

    def none(mesh):
        raise SolverError("no such mesh")

    with pytest.raises(SolverError, match="no such mesh"):
        mlp().tables([(1, 4)], constraints=none)


# -- ranges of layers


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(2,), (4,)])
def test_a_range_costs_what_its_stage_does_alone(shape) -> None:
    """The sums of a table against the stages' own steps, solved by themselves."""
    own = gpt()
    submesh = (1, int(np.prod(shape)))
    (table,) = own.tables([submesh], shapes={submesh: [shape]}, prices=(), remat=(False,))
    count = len(own.layers.layers)
    stage_of = [0] * 2 + [1] * (count - 2)
    stages = slice_step(own.step, own.layers, stage_of).stages
    mesh = mesh_of_cluster(submesh_cluster(CLUSTER, submesh), shape)
    for number, stage in enumerate(stages):
        part = [i for i, s in enumerate(stage_of) if s == number]
        alone = solve_graph(build_graph(stage.step), mesh).objective
        summed = own.num_micro_batches * table.latency_s[part].sum() + table.once_s[part].sum()
        assert summed == pytest.approx(alone, rel=0.2)


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(2,), (4,)])
def test_a_range_takes_the_memory_that_its_stage_does_alone(shape) -> None:
    own = gpt()
    submesh, count = (1, int(np.prod(shape))), len(own.layers.layers)
    (table,) = own.tables([submesh], shapes={submesh: [shape]}, prices=(), remat=(False,))
    mesh = mesh_of_cluster(submesh_cluster(CLUSTER, submesh), shape)
    stage_of = [0] * (count // 2) + [1] * (count - count // 2)
    for number, stage in enumerate(slice_step(own.step, own.layers, stage_of).stages):
        part = [i for i, s in enumerate(stage_of) if s == number]
        in_flight = 2 - number
        graph = with_in_flight(build_graph(stage.step), stage, in_flight)
        alone = replace(solve_graph(graph, mesh), refetch=True).memory.peak_bytes
        kept = table.held_bytes[part].sum() + in_flight * table.in_flight_bytes[part].sum()
        assert kept + table.working_bytes[part].max() == pytest.approx(alone, rel=0.15)


@pytest.mark.ci
def test_figures_of_a_stage_are_those_of_its_layers() -> None:
    """A stage that is solved alone, as a table of one layer, against the range's sums."""
    own = gpt()
    (table,) = own.tables([(1, 2)], prices=(), remat=(False,))
    count = len(own.layers.layers)
    stage_of = [0] * 2 + [1] * (count - 2)
    mesh = mesh_of_cluster(submesh_cluster(CLUSTER, (1, 2)), (2,))
    for number, stage in enumerate(slice_step(own.step, own.layers, stage_of).stages):
        part = [i for i, s in enumerate(stage_of) if s == number]
        alone = solve_graph(build_graph(stage.step), mesh)
        figures = stage_costs(alone, stage, (1, 2))
        total = own.num_micro_batches * figures.latency_s.sum() + figures.once_s.sum()
        assert total == pytest.approx(alone.objective, rel=1e-9)
        for name in ("latency_s", "forward_s", "in_flight_bytes"):
            summed = getattr(table, name)[part].sum()
            assert summed == pytest.approx(getattr(figures, name)[0], rel=0.25), name

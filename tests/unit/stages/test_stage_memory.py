"""What a stage holds of micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph, Life
from autopar.rewrite.stage_slices import StageSlice, slice_step
from autopar.stages.stage_memory import KnownInFlight, in_flight_of, with_in_flight
from autopar.tracer.build import build_graph
from autopar.tracer.dataflow import Dataflow
from autopar.tracer.regions import FORWARD
from tests.unit.stages.test_layer_tables import case

WIDTH, ROWS = 64, 32
Layer = tuple[jax.Array, jax.Array]


def stages(
    layer_of: Callable[[Layer, jax.Array], jax.Array], dtype: Any, rows: int = ROWS
) -> list[StageSlice]:
    """Two layers, a stage each, with four micro-batches."""

    def step(params: list[Layer], batch: jax.Array) -> Any:
        def loss(params: list[Layer]) -> jax.Array:
            x = batch
            for layer in params:
                x = layer_of(layer, x)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    array = jax.ShapeDtypeStruct
    layer = array((WIDTH, WIDTH), dtype), array((WIDTH,), dtype)
    own = case(step, ([layer] * 2, array((rows * 4, WIDTH), dtype)), 4, 2)
    return list(slice_step(own.step, own.layers, [0, 1]).stages)


def biased(layer: Layer, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ layer[0] + layer[1])


def lives_of(graph: Graph, made_by: str, value: int | None = None) -> list[Life]:
    return [
        life
        for life in graph.liveness.lives
        if graph.nodes[graph.producer[life.value][0]].name == made_by
        and value in (None, life.value)
    ]


def test_a_residual_is_counted_once_for_each_micro_batch_in_flight() -> None:
    """Also one that cuBLAS makes: a product with its bias."""
    stage = stages(biased, jnp.float32)[1]
    for count in (1, 3):
        graph = with_in_flight(build_graph(stage.step), stage, count)
        (life,) = [x for x in lives_of(graph, "add") if x.value in stage.residual_values()]
        assert life.count == count


def test_a_gradient_that_arrives_is_there_for_one_micro_batch() -> None:
    stage = stages(biased, jnp.float32)[0]
    ((arrival, _),) = stage.arrivals
    assert arrival in stage.residual_values()
    graph = with_in_flight(build_graph(stage.step), stage, 2)
    assert [x.count for x in lives_of(graph, "scan_slice", arrival)] == [1]


@pytest.mark.parametrize("count", [1, 2])
def test_all_slices_of_the_batch_are_cut_before_the_first_micro_batch(count: int) -> None:
    """A product's gradient reads its operand again; targets that only the forward pass reads are
    there as long as their micro-batch has not begun."""
    stage = stages(biased, jnp.float32)[0]
    (batch,) = stage.batch_slices()
    assert batch in stage.residual_values()
    graph = with_in_flight(build_graph(stage.step), stage, count)
    assert [life.count for life in lives_of(graph, "scan_slice", batch)] == [4]

    scaled = stages(lambda layer, x: jnp.sin(x) * jnp.sum(layer[0]), jnp.float32)[0]
    (batch,) = scaled.batch_slices()
    graph = with_in_flight(build_graph(scaled.step), scaled, count)
    assert batch not in scaled.residual_values()
    lives = lives_of(graph, "scan_slice", batch)
    assert [life.count for life in lives] == [4 - count + 1, 4 - count]
    assert lives[0].end < lives[1].start


def test_a_residual_is_there_while_either_program_runs() -> None:
    stage = stages(biased, jnp.float32)[1]
    graph = with_in_flight(build_graph(stage.step), stage, 1)
    (life,) = [x for x in lives_of(graph, "add") if x.value in stage.residual_values()]
    made = [graph.producer[v][0] for e in stage.body.equations for v in e.results]
    times = [graph.liveness.times[index] for index in made]
    assert life.start <= min(times) and life.end == max(times)


def test_what_is_no_residual_ends_in_the_forward_program() -> None:
    """With the last product there that reads it. The backward one makes an activation again, of the
    product that it reads, with the first kernel that reads it too: that of its gradient."""

    def three_products(layer: Layer, x: jax.Array) -> jax.Array:
        return (jnp.sin(x @ layer[0] + layer[1]) @ layer[0].T) @ layer[0]

    stage = stages(three_products, jnp.float32)[1]
    graph = with_in_flight(build_graph(stage.step), stage, 1)
    times, producer = graph.liveness.times, graph.producer
    equations = stage.body.equations
    end = max(times[producer[v][0]] for i in stage.forward for v in equations[i].results)
    residuals = stage.residual_values()
    activations = [x for x in lives_of(graph, "sin") if x.value not in residuals]
    assert len(activations) == 2
    assert activations[0].end < end < activations[1].start
    assert activations[1].start in {x.start for x in lives_of(graph, "mul")}


@pytest.mark.parametrize(("rows", "num_copies"), [(32, 0), (28, 1)])
def test_residuals_of_odd_sizes_are_copied_with_zeros(rows: int, num_copies: int) -> None:
    """For the products of the backward program, which may make the copies at its beginning."""

    def crossed(layer: Layer, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ layer[0]) @ layer[0].T + layer[1]

    stage = stages(crossed, jnp.bfloat16, rows)[1]
    graph = with_in_flight(build_graph(stage.step), stage, 2)
    residuals = stage.residual_values()
    read = [life for life in graph.liveness.lives if life.value in residuals and life.count == 1]
    shapes = [graph.values[life.value].shape for life in read]
    padded = [shape for shape in shapes if shape == (rows, WIDTH)]
    assert bool(padded) == bool(num_copies)


def test_what_is_made_of_an_arriving_gradient_is_not_recomputed() -> None:
    """A layer that is computed again waits for the gradient, behind the same barrier."""
    stage = stages(jax.checkpoint(biased), jnp.float32)[0]
    made_of_it = {arrival for arrival, _ in stage.arrivals}
    graph = build_graph(stage.step)
    flow = Dataflow(graph.nodes, graph.values)
    again = {graph.nodes[i].name for i in flow.recomputed}
    assert {"dot_general", "cos"} <= again
    assert len([i for i in flow.recomputed if graph.nodes[i].name == "dot_general"]) == 1
    found = set[int]()
    for index, node in enumerate(graph.nodes):
        if node.region == "backward" and not made_of_it.isdisjoint(node.operands):
            made_of_it.update(node.results)
            found.add(index)
    assert found and found.isdisjoint(flow.recomputed)


def test_a_stage_that_is_asked_for_again_has_one_graph() -> None:
    stage, other = stages(biased, jnp.float32)
    graph, known = build_graph(stage.step), KnownInFlight()
    first = in_flight_of(stage, 2, known)(graph)
    assert first == with_in_flight(graph, stage, 2)
    assert in_flight_of(stage, 2, known)(graph) is first
    for again in (
        in_flight_of(stage, 1, known)(graph),
        known.of(build_graph(stage.step), stage, 2),
    ):
        assert again is not first
    assert known.of(build_graph(other.step), other, 2) is not first


def test_copies_end_with_their_program() -> None:
    """A weight that a layer gathers is gathered again in the backward program; one that only the
    forward program reads is not there later."""
    stage = stages(biased, jnp.float32)[1]
    plain = build_graph(stage.step)
    graph = with_in_flight(plain, stage, 1)
    equations, producer, lives = stage.body.equations, graph.producer, graph.liveness
    made = {producer[v][0] for i in stage.forward for v in equations[i].results}
    end = max(lives.times[i] for i in made if graph.nodes[i].region == FORWARD)
    own = [i for i in made if graph.nodes[i].region == FORWARD]
    assert any(plain.liveness.node_ends[i] > end for i in own), "else there is nothing to cut"
    assert all(lives.node_ends[i] <= end for i in own)
    assert lives.again
    assert all(start > end and until >= start for _, start, until in lives.again)
    assert {node for node, _, _ in lives.again} <= set(own)

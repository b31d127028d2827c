"""Which layers of a stage will run as a loop, found before layouts are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph
from autopar.ir.pipeline import Phase
from autopar.ir.traced_step import TracedStep
from autopar.lower.roll_layers import roll_layers
from autopar.lower.stage_programs import cut_into_stage_programs
from autopar.rewrite.attach_layers import attach_layers, loop_batch
from autopar.rewrite.layers import find_layers
from autopar.rewrite.stage_slices import StageSlice, slice_step
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.known_graphs import KnownGraphs
from autopar.tracer.layer_runs import MIN_LAYERS
from autopar.tracer.regions import BACKWARD
from autopar.tracer.rolled_layers import rolled_layers
from autopar.tracer.trace import StepOptions

WIDTH, ROWS, MICRO_BATCHES = 4, 8, 2


def scanned(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, own: (jnp.tanh(x @ own), None), x, w)[0]


def written_out(x: Any, w: Any) -> Any:
    for number, own in enumerate(w):
        with jax.named_scope(f"layers_{number}"):
            x = jnp.tanh(x @ own)
    return x


def looped(forward: Callable[[Any, Any], Any], weights: Any) -> TracedStep:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(batch, p) ** 2))(params)
        return jax.tree.map(lambda w, grad: w - 0.1 * grad, params, grads), loss

    arguments = (weights, jnp.ones((ROWS, WIDTH)))
    return StepSource.of(step, arguments, {}, StepOptions()).as_loop(MICRO_BATCHES)


def stages(forward: Callable[[Any, Any], Any], weights: Any) -> list[StageSlice]:
    step = looped(forward, weights)
    assert step.loop is not None
    body = step.program.equations[step.loop].bodies[0]
    layers = find_layers(body, 2, batch=loop_batch(step.program.equations[step.loop]))
    return list(slice_step(step, attach_layers(body, layers), (0, 1), stacks=None).stages)


def trips(step: TracedStep) -> list[int]:
    graph = build_graph(step)
    backward = {n.equation for n in graph.nodes if n.region == BACKWARD and n.equation is not None}
    return [len(run) for run in rolled_layers(step, backward)]


def stack(num_layers: int) -> jax.Array:
    return jnp.ones((num_layers, WIDTH, WIDTH))


@pytest.mark.parametrize("num_layers", [12, 16, 17])
def test_as_the_stage_programs_are_rolled(num_layers: int) -> None:
    found = stages(scanned, stack(num_layers))
    shardings = [unsharded(stage.step.program) for stage in found]
    staged = cut_into_stage_programs(found, shardings, MICRO_BATCHES, stage_mesh=(0, 1))
    rolled = {
        body.stage_program.stage: [loop.num_trips for _, loop in body.loops]
        for body in roll_layers(staged).programs
        if body.stage_program.phase is Phase.BACKWARD
    }
    assert [trips(stage.step) for stage in found] == [rolled[0], rolled[1]]
    assert min(min(counts) for counts in rolled.values()) >= MIN_LAYERS


@pytest.mark.parametrize(
    ("forward", "weights"),
    [
        pytest.param(scanned, stack(2 * MIN_LAYERS - 2), id="few layers"),
        pytest.param(written_out, [stack(1)[0]] * 12, id="weights of their own"),
    ],
)
def test_others_stay_written_out(forward: Callable[[Any, Any], Any], weights: Any) -> None:
    assert [trips(stage.step) for stage in stages(forward, weights)] == [[], []]


def late_products(graph: Graph) -> list[int]:
    """How much later than their place in the program products of the backward pass run."""
    return [
        graph.liveness.times[index] - index
        for index, node in enumerate(graph.nodes)
        if node.region == BACKWARD and node.is_heavy
    ]


def test_gradients_wait_for_the_end_of_their_trip_at_most() -> None:
    """Written out, they wait for the second half of the backward pass, the longer the deeper, as
    those of the first and the last layer always do."""
    rolled, apart = (
        [sorted(late_products(build_graph(stages(forward, w)[0].step)))[-3] for w in both]
        for forward, both in (
            (scanned, (stack(12), stack(24))),
            (written_out, ([stack(1)[0]] * 12, [stack(1)[0]] * 24)),
        )
    )
    assert rolled[0] == rolled[1] < apart[0] < apart[1]


def test_a_graph_is_the_same_whichever_was_asked_for_first() -> None:
    step = looped(scanned, stack(12))
    one, other = KnownGraphs(), KnownGraphs()
    plain, staged = one.of(step), one.of(step, in_stages=True)
    assert staged.liveness != plain.liveness
    assert other.of(step, in_stages=True).liveness == staged.liveness
    assert other.of(step).liveness == plain.liveness

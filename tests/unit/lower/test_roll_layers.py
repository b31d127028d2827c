"""Equal layers of a stage become a loop, with stacks for what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.pipeline import PER_MICRO_BATCH, Phase
from autopar.lower.roll_layers import roll_layers
from autopar.lower.stage_bodies import LayerLoop, StagePrograms
from autopar.lower.stage_programs import cut_into_stage_programs
from autopar.rewrite.attach_layers import attach_layers, loop_batch
from autopar.rewrite.layers import find_layers
from autopar.rewrite.stage_slices import slice_step
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import unsharded
from autopar.tracer.layer_runs import MIN_LAYERS
from autopar.tracer.trace import StepOptions

WIDTH, ROWS, MICRO_BATCHES = 4, 8, 2


def layer(x: Any, own: Any) -> tuple[Any, None]:
    return jnp.tanh(x @ own), None


def scanned(x: Any, w: Any) -> Any:
    return jax.lax.scan(layer, x, w)[0]


def unlike(x: Any, w: Any) -> Any:
    """Every other layer is another one."""
    for number, own in enumerate(w):
        with jax.named_scope(f"layers_{number}"):
            x = jnp.tanh(x @ own) if number % 2 else jnp.sin(x @ own) + x
    return x


def staged(forward: Callable[[Any, Any], Any], num_layers: int) -> StagePrograms:
    """The stage programs of a train step on two stages of as many layers."""

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.mean(forward(batch @ params["first"], params["w"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda w, grad: w - 0.1 * grad, params, grads), loss

    params = {"first": jnp.ones((WIDTH, WIDTH)), "w": jnp.ones((num_layers, WIDTH, WIDTH))}
    arguments = (params, jnp.ones((ROWS, WIDTH)))
    looped = StepSource.of(step, arguments, {}, StepOptions()).as_loop(MICRO_BATCHES)
    assert looped.loop is not None
    loop = looped.program.equations[looped.loop]
    layers = find_layers(loop.bodies[0], 2, batch=loop_batch(loop))
    attached = attach_layers(loop.bodies[0], layers)
    sliced = slice_step(looped, attached, (0, 1), stacks=None)
    shardings = [unsharded(stage.step.program) for stage in sliced.stages]
    return cut_into_stage_programs(sliced.stages, shardings, MICRO_BATCHES, stage_mesh=(0, 1))


def loops(programs: StagePrograms) -> list[LayerLoop]:
    return [loop for body in programs.programs for _, loop in body.loops]


def sizes(programs: StagePrograms) -> list[tuple[int, int, int]]:
    """Of the stage programs that run for each micro-batch."""
    return [
        (len(b.equations), len(b.entries), len(b.exits))
        for b in programs.programs
        if b.stage_program.phase in PER_MICRO_BATCH
    ]


def test_stage_programs_do_not_grow_with_depth() -> None:
    few, many = (roll_layers(staged(scanned, num)) for num in (12, 24))
    assert sizes(few) == sizes(many)
    trips = [[loop.num_trips for loop in loops(staged)] for staged in (few, many)]
    assert len(trips[0]) == 4
    assert [own + 6 for own in trips[0]] == trips[1]
    for own, other in zip(loops(few), loops(many), strict=True):
        assert len(own.equations) == len(other.equations)


def test_backward_layers_run_in_reverse_and_update_sums_in_place() -> None:
    rolled = roll_layers(staged(scanned, 12))
    for body in rolled.programs:
        if body.stage_program.phase is Phase.BACKWARD:
            (_, loop), *_ = body.loops
            assert loop.is_reversed
            assert [write.start is not None for write in loop.writes] == [True]
            assert set(body.stage_program.reads) & set(body.stage_program.writes)


def test_a_loop_makes_arrays_of_constants_itself() -> None:
    def masked(x: Any, w: Any) -> Any:
        twos = jnp.full(x.shape, 2.0)  # as JAX hoists it out of a scan
        return jax.lax.scan(lambda x, own: (jnp.tanh((x @ own) * twos), None), x, w)[0]

    rolled = roll_layers(staged(masked, 12))
    assert len(loops(rolled)) == 4
    for body in rolled.programs:
        made = {v: e.name for e in body.equations for v in e.results}
        for _, loop in body.loops:
            assert {made[v] for v in loop.inputs if v in made} <= {"dot_general", "mul"}


def test_buffers_are_stacks_that_every_stage_program_knows() -> None:
    before = staged(scanned, 12)
    after = roll_layers(before)
    for body in after.programs:
        own = body.stage_program
        for ref in (*own.reads, *own.writes):
            assert (own.stage, ref.value) in after.layouts
    num_buffers = [sum(len(b.stage_program.writes) for b in p.programs) for p in (before, after)]
    assert num_buffers[1] < num_buffers[0]


def test_few_layers_and_unlike_layers_stay_written_out() -> None:
    few = staged(scanned, 2 * MIN_LAYERS - 2)
    assert loops(roll_layers(few)) == []
    assert sizes(roll_layers(few)) == sizes(few)
    assert loops(roll_layers(staged(unlike, 12))) == []


def test_arguments_and_what_is_sent_keep_their_buffers() -> None:
    rolled = roll_layers(staged(scanned, 12))
    assert loops(rolled)
    pipeline = rolled.pipeline
    written = {(p.stage, ref) for p in pipeline.stage_programs for ref in p.writes}
    read = {(p.stage, ref) for p in pipeline.stage_programs for ref in p.reads}
    for transfer in pipeline.transfers:
        assert (transfer.source, transfer.ref) in written
        assert (transfer.target, transfer.ref) in read
    assert any(p.phase in PER_MICRO_BATCH for p in pipeline.stage_programs)

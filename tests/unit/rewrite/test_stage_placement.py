from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from autopar.ir.traced_step import TracedStep
from autopar.rewrite.stage_placement import StagePlacement, place_stages
from autopar.rewrite.stage_slices import slice_step
from tests.unit.rewrite.staged_models import in_layers, looped, loss_fn

NUM_STAGES = 3


def placement_of(step: TracedStep) -> StagePlacement:
    """With a layer per stage."""
    attached = in_layers(step, NUM_STAGES)
    assert step.loop is not None
    return place_stages(step.program, step.loop, attached.layer_of, NUM_STAGES, step.state)


def owners(step: TracedStep, placement: StagePlacement, part: str) -> list[int]:
    """Owners of the arguments whose path has this in it."""
    paths = zip(step.call.paths, step.program.inputs, strict=True)
    return [placement.owner[value] for path, value in paths if part in path]


def received_shapes(step: TracedStep, placement: StagePlacement) -> list[list[Sequence[int]]]:
    return [[step.program.avals[v].shape for v in values] for values in placement.received]


def test_optimizer_state_lies_with_its_parameter() -> None:
    step = looped(optax.adam(1e-2))
    placement = placement_of(step)
    for name in ("['w']", "['b']"):
        assert owners(step, placement, name) == [0, 1, 2] * 3  # parameters and both moments
    by_path = dict(zip(step.out_paths, placement.outputs, strict=True))
    for (_, output), (given, _) in zip(step.state, step.state, strict=True):
        assert placement.outputs[output] == placement.owner[step.program.inputs[given]]
    assert by_path["result[1]"] == 2  # the loss is made by the last stage


def test_batch_lies_where_it_is_read() -> None:
    step = looped(optax.sgd(0.1))
    placement = placement_of(step)
    assert owners(step, placement, "['x']") == [0]
    assert owners(step, placement, "['y']") == [2]
    assert placement.received == ((), (), ())


def test_counters_and_schedules_are_made_by_every_stage() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    step = looped(optax.adam(schedule))
    placement = placement_of(step)
    shapes = received_shapes(step, placement)
    assert shapes[0] == []
    counters = [p for p in step.call.paths if p.endswith("count")]
    # No more than the counters themselves: powers and rates are computed where they are needed.
    assert shapes[1] == shapes[2] == [()] * len(counters)
    assert placement.num_parts == (1, 1)
    powers = [i for i, e in enumerate(step.program.equations) if e.name == "pow"]
    assert powers and all(placement.stages[i] == {0, 1, 2} for i in powers)


def test_norm_of_all_gradients_takes_scalars_there_and_back() -> None:
    step = looped(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    placement = placement_of(step)
    shapes = received_shapes(step, placement)
    assert all(shape == () for own in shapes for shape in own)
    assert any(shapes) and all(len(own) > 0 for own in shapes)
    assert placement.num_parts[1] > 1


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-2)])
def test_parts_follow_what_is_sent(optimizer: Any) -> None:
    """What a stage reads in a part was made there no later, or elsewhere in an earlier part."""
    step = looped(optax.chain(optax.clip_by_global_norm(1.0), optimizer))
    placement = placement_of(step)
    assert step.loop is not None
    made: dict[tuple[int, int], int] = {}
    for index in range(step.loop + 1, len(step.program.equations)):
        equation = step.program.equations[index]
        for stage in placement.stages[index]:
            part = placement.parts[index, stage]
            for value in (o for o in equation.operands if isinstance(o, int)):
                if (value, stage) in made:
                    assert made[value, stage] <= part
                elif value in placement.owner and (value, placement.owner[value]) in made:
                    assert made[value, placement.owner[value]] < part
            made.update(((r, stage), part) for r in equation.results)


def test_decay_in_the_loss_sends_scalars_alone() -> None:
    def loss(params: Any, batch: Any) -> Any:
        squares = sum(jnp.sum(own["w"] ** 2) for own in params)
        return loss_fn(params, batch) + 0.01 * squares

    step = looped(optax.sgd(0.1), loss)
    sliced = slice_step(step, in_layers(step, NUM_STAGES), range(NUM_STAGES))
    avals = sliced.program.avals
    sent = [avals[v].shape for stage in sliced.stages for v, _ in stage.received]
    assert sent and all(shape == () for shape in sent)

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.stage_slices import SlicedStep, slice_step
from tests.properties.staged_steps import body_of
from tests.unit.rewrite.staged_models import WIDTHS, in_layers, looped, reads

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def skipping_loss(params: Any, batch: Any) -> Any:
    first = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"])
    x = jnp.tanh(first @ params[1]["w"] + params[1]["b"])
    x = x @ params[2]["w"] + params[2]["b"] + jnp.sum(first, axis=1, keepdims=True)
    return jnp.mean((x - batch["y"]) ** 2)


@pytest.fixture(scope="module", params=[1, 2])
def case(request: Any) -> tuple[TracedStep, SlicedStep]:
    step = looped(CLIPPED, skipping_loss, num_micro_batches=request.param)
    return step, slice_step(step, in_layers(step, 3), [0, 1, 2])


def check_scope(program: Program) -> None:
    """Every value is made, given or captured before it is read."""
    made = set(program.inputs) | {v for v, _ in program.captured}
    for equation in program.equations:
        assert made.issuperset(reads(equation.operands)), equation
        made.update(equation.results)
        for body in equation.bodies:
            check_scope(body)
    assert made.issuperset(reads(program.outputs))


def test_every_argument_and_result_has_one_stage(case: tuple[TracedStep, SlicedStep]) -> None:
    step, sliced = case
    assert sorted(i for s in sliced.stages for i in s.inputs) == list(range(len(step.avals)))
    assert sorted(o for s in sliced.stages for o in s.outputs) == list(range(len(step.out_paths)))
    for stage in sliced.stages:
        paths = stage.step.call.paths[: len(stage.inputs)]
        assert paths == tuple(step.call.paths[i] for i in stage.inputs)


def test_stages_are_steps_of_their_own(case: tuple[TracedStep, SlicedStep]) -> None:
    _, sliced = case
    for stage in sliced.stages:
        check_scope(stage.step.program)
        assert stage.step.program.equations[stage.step.loop or 0] is stage.loop
        assert len(stage.parts) == len(stage.step.program.equations)
        assert len(stage.step.avals) == len(stage.step.call.paths)


def test_what_arrives_departs_from_where_it_is_said_to(
    case: tuple[TracedStep, SlicedStep],
) -> None:
    _, sliced = case
    for number, stage in enumerate(sliced.stages):
        for value, source in stage.arrivals:
            assert source != number and value in sliced.stages[source].departures
        for value, source in stage.received:
            assert source != number
            own = sliced.stages[source]
            assert value in own.sent or value in own.step.program.inputs
    # Every product of the loop is in one stage.
    step, _ = case
    whole = [e.results for e in body_of(step).equations if e.name == "dot_general"]
    parts = [e.results for s in sliced.stages for e in s.body.equations if e.name == "dot_general"]
    assert sorted(whole) == sorted(parts)


def test_passes_of_a_stage(case: tuple[TracedStep, SlicedStep]) -> None:
    """Both together are the whole body, and the forward pass reads nothing of the backward one."""
    _, sliced = case
    for stage in sliced.stages:
        equations = stage.body.equations
        assert set(stage.forward) | set(stage.backward) == set(range(len(equations)))
        later = set(stage.backward) - set(stage.forward)
        made_later = {r for i in later for r in equations[i].results}
        assert later
        for index in stage.forward:
            assert made_later.isdisjoint(reads(equations[index].operands))
        again = set(stage.forward) & set(stage.backward)
        assert not any(equations[i].name == "dot_general" for i in again)


def test_no_parameter_and_no_residual_is_sent() -> None:
    step = looped(optax.sgd(0.1))
    sliced = slice_step(step, in_layers(step, 3), [0, 1, 2])
    avals = sliced.program.avals
    assert [stage.received for stage in sliced.stages] == [(), (), ()]
    arriving = [[(source, avals[v].shape[1:]) for v, source in s.arrivals] for s in sliced.stages]
    first, second = (WIDTHS[1],), (WIDTHS[2],)
    assert list(map(sorted, arriving)) == [
        [(1, first)],
        [(0, first), (2, second)],
        [(1, second)],
    ]


def test_several_layers_in_one_stage() -> None:
    step = looped(optax.sgd(0.1))
    sliced = slice_step(step, in_layers(step, 3), [0, 0, 1])
    assert len(sliced.stages) == 2
    shapes = [
        [aval.shape for aval, path in zip(s.step.avals, s.step.call.paths, strict=True)
         if path.endswith("['w']")] for s in sliced.stages
    ]  # fmt: skip
    assert shapes == [[(4, 5), (5, 6)], [(6, 7)]]

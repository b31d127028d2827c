"""The timeline of one mesh by layer and collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.inspect.report_page.layer_timeline import COLLECTIVE, layer_timeline
from tests.report_plans import one_mesh, pipeline


@pytest.mark.parametrize("number", [1, 3])
def test_layers_and_their_collectives_fill_the_step(number: int) -> None:
    plan = replace(one_mesh(num_layers=3), num_micro_batches=number)
    coarse = plan.timeline()
    line = layer_timeline(plan, coarse)
    assert len(line.events) > len(coarse.events)
    assert line.step_s == plan.estimated_step_s and line.memory == coarse.memory
    ends = [event.end_s for event in line.events]
    starts = [event.start_s for event in line.events]
    assert starts == pytest.approx([0.0, *ends[:-1]])  # one after another, without gaps
    assert ends[-1] == pytest.approx(plan.estimated_step_s)
    layers = [e.name for e in line.events if e.kind == "run" and e.phase == "forward"]
    assert [f"GPT/layer_{n}" for n in range(3)] == list(dict.fromkeys(layers))
    assert {e.kind for e in line.events} == {"run", COLLECTIVE}
    assert any(" along " in e.name for e in line.events if e.kind == COLLECTIVE)
    batches = {event.micro_batch for event in line.events if event.phase == "forward"}
    assert batches == ({None} if number == 1 else set(range(number)))


def test_other_plans_keep_their_timeline() -> None:
    plan = pipeline(num_stages=2)
    coarse = plan.timeline()
    assert layer_timeline(plan, coarse) is coarse
    plain = replace(one_mesh(), details=None)
    assert layer_timeline(plain, coarse) is coarse

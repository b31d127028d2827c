"""What a plan file may say of a judged step."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from autopar.errors import PlanError
from autopar.ir.judged import JudgedStep
from autopar.ir.plan import ParallelPlan
from tests.report_plans import one_mesh

SOUND = JudgedStep(0.02, 0.015, 0.01, 0.005)


@pytest.mark.parametrize("name", ["step_s", "compute_s", "links_s", "exposed_s"])
@pytest.mark.parametrize("value", [-1.0, inf, nan])
def test_seconds_are_finite_and_not_negative(name: str, value: float) -> None:
    assert SOUND.is_sound
    assert not replace(SOUND, **{name: value}).is_sound


def test_a_step_takes_time_but_perhaps_no_collectives() -> None:
    assert replace(SOUND, links_s=0.0, exposed_s=0.0).is_sound
    assert not replace(SOUND, step_s=0.0).is_sound


def test_a_file_with_another_is_refused() -> None:
    plan = replace(one_mesh(), judged=SOUND)
    assert ParallelPlan.from_json(plan.to_json()).judged == SOUND
    wrong = replace(plan, judged=replace(SOUND, compute_s=-1.0))
    with pytest.raises(PlanError, match="judged"):
        ParallelPlan.from_json(wrong.to_json())


def test_a_file_with_options_that_are_none_of_xlas_is_refused() -> None:
    plan = replace(one_mesh(), xla_options=(("xla_a", "true"),))
    assert ParallelPlan.from_json(plan.to_json()).xla_options == (("xla_a", "true"),)
    wrong = replace(plan, xla_options=(("LD_PRELOAD", "x"),))
    with pytest.raises(PlanError, match="xla_options"):
        ParallelPlan.from_json(wrong.to_json())

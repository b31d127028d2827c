"""What planning hands to lowering: a traced step with its plan, `PlannedStep`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import ParallelPlan
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.stage_slices import SlicedStep


@dataclass(frozen=True)
class PlannedStep:
    """`sliced`: the stages of a pipeline; `made`: a planned step per stage, where each stage makes
    some of the results by itself. `cache_key`: of the plan cache's entry for this step, if it has
    one."""

    traced: TracedStep
    plan: ParallelPlan
    sliced: SlicedStep | None = None
    made: tuple[PlannedStep, ...] = ()
    cache_key: str = ""

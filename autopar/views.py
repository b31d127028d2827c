"""The methods of a plan that need the whole of autopar: `explain`, `report`, `with_pins`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.inspect.blocks import blocks_of
from autopar.inspect.blocks_text import blocks_text
from autopar.inspect.explain import explain_plan
from autopar.inspect.pins import with_pins
from autopar.inspect.report_page import write_report
from autopar.inspect.strategies_text import strategy_text
from autopar.inspect.why import why
from autopar.inspect.why_text import explain_why
from autopar.ir.blocks import Blocks
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline
from autopar.ir.views import provide
from autopar.sharding.origin import Origin
from autopar.stages.simulate import predicted_timeline


class Views:
    def explain(self, plan: ParallelPlan, path: str | None, depth: int | None) -> str:
        if path is not None:
            return explain_why(why(plan, path))
        origin = plan.origin
        is_known = isinstance(origin, Origin) and origin.choice is not None
        return explain_plan(plan, depth, origin.blocks if is_known else None)

    def report(self, plan: ParallelPlan, target: str | Path, measured: Timeline | None) -> None:
        write_report(plan, target, measured)

    def timeline(self, plan: ParallelPlan) -> Timeline:
        return predicted_timeline(plan)

    def with_pins(self, plan: ParallelPlan, pins: Any) -> ParallelPlan:
        return with_pins(plan, pins)

    def strategies(self, plan: ParallelPlan) -> str:
        return strategy_text(plan)

    def blocks(self, plan: ParallelPlan, stage: int) -> Blocks:
        return blocks_of(plan, stage)

    def blocks_text(self, blocks: Blocks) -> str:
        return blocks_text(blocks)


provide(Views())

"""The bodies of `ParallelPlan`'s and `Blocks`' methods that show, explain or solve a plan again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.inspect import pins as plan_pins
from autopar.inspect.blocks import blocks_of
from autopar.inspect.blocks_text import blocks_text as text_of_blocks
from autopar.inspect.explain import explain_plan
from autopar.inspect.report_page import write_report
from autopar.inspect.strategies_text import strategy_text
from autopar.inspect.why import why
from autopar.inspect.why_text import explain_why
from autopar.ir.blocks import Blocks
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline
from autopar.sharding.origin import Origin
from autopar.stages.simulate import predicted_timeline


def explain(plan: ParallelPlan, path: str | None, depth: int | None) -> str:
    if path is not None:
        return explain_why(why(plan, path))
    origin = plan.origin
    is_known = isinstance(origin, Origin) and origin.choice is not None
    return explain_plan(plan, depth, origin.blocks if is_known else None)


def report(plan: ParallelPlan, target: str | Path, measured: Timeline | None) -> None:
    write_report(plan, target, measured)


def timeline(plan: ParallelPlan) -> Timeline:
    return predicted_timeline(plan)


def with_pins(plan: ParallelPlan, pins: Mapping[str, Any]) -> ParallelPlan:
    return plan_pins.with_pins(plan, pins)


def strategies(plan: ParallelPlan) -> str:
    return strategy_text(plan)


def blocks(plan: ParallelPlan, stage: int) -> Blocks:
    return blocks_of(plan, stage)


def blocks_text(blocks: Blocks) -> str:
    return text_of_blocks(blocks)

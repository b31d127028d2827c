"""The fastest of the best few plans, by running them: `ShardingOptions(rerank=k)`.

    function, arguments, devices → the k best plans → their times → PlannedStep   (`plan_fastest`)

Each plan is compiled and run with made-up inputs on the devices at hand, unless the database knows
it. One that does not fit into memory is out, whatever was predicted. What was tried is part of the
plan: `plan.search.tried`, and `plan.explain()` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autopar.compiler import plan_step
from autopar.errors import MemoryBudgetError, PlanError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport, TriedPlan
from autopar.ir.text import format_bytes, format_seconds
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import plan_candidates
from autopar.measure.database import Database, default_database, key_of, where_and_with
from autopar.measure.time_step import StepTiming, time_executable
from autopar.methods import ParallelMethod
from autopar.progress import Progress, debugs, tell
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.trace import StepOptions, trace

MakeExecutable = Callable[[PlannedStep, Sequence[Any]], Any]


@dataclass(frozen=True, eq=False)
class Fastest:
    """`executable`: what was compiled to time the plan; None if the database knew it."""

    planned: PlannedStep
    executable: Any


def plan_fastest(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    devices: Sequence[Any],
    cluster: ClusterSpec,
    method: ParallelMethod,
    options: StepOptions,
    num: int,
    make_executable: MakeExecutable,
    database: Database | None = None,
) -> Fastest:
    """The fastest of the `num` best plans that the method's search finds; where the same was asked
    before, what was chosen then."""
    database = database or default_database()
    traced = trace(fn, args, kwargs, options)
    asked = _asked(traced, method, cluster, options, devices)
    text = database.find_choice(asked)
    if text is not None:
        try:
            known = ParallelPlan.from_json(text)
            planned = plan_step(fn, args, kwargs, cluster=cluster, method=known, options=options)
            return Fastest(_known(planned), None)
        except PlanError:  # of another version, or broken: it is searched anew
            pass
    candidates = plan_candidates(
        fn, args, kwargs, cluster=cluster, method=method, options=options, num=num
    )
    found = fastest(candidates, devices, make_executable, database)
    database.keep_choice(asked, found.planned.plan.to_json())
    return found


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _asked(
    traced: TracedStep,
    method: ParallelMethod,
    cluster: ClusterSpec,
    options: StepOptions,
    devices: Sequence[Any],
) -> str:
    """All that a choice depends on."""
    profile = cluster.profile
    costs = "" if profile is None or isinstance(profile, str) else profile.digest
    asked = (method, replace(cluster, profile=None), costs, options, traced.donated)
    program = program_fingerprint(traced.program)
    return _ADDRESS.sub("", repr((program, *where_and_with(devices), asked)))


def _known(planned: PlannedStep) -> PlannedStep:
    """What was tried then is known now."""
    plan = planned.plan
    assert plan.search is not None
    tried = tuple(replace(one, is_known=True) for one in plan.search.tried)
    return replace(planned, plan=replace(plan, search=replace(plan.search, tried=tried)))


@dataclass(frozen=True, eq=False)
class _Tried:
    """`executable`: None if the database knew the timing."""

    planned: PlannedStep
    timing: StepTiming
    executable: Any = None

    @property
    def is_known(self) -> bool:
        return self.executable is None

    @property
    def step_s(self) -> float:
        return inf if self.timing.step is None else self.timing.step.seconds

    @property
    def range_s(self) -> tuple[float, float]:
        """Where the middle half of the samples was."""
        spread = 0.0 if self.timing.step is None else self.timing.step.spread
        return self.step_s * (1 - spread), self.step_s * (1 + spread)


def fastest(
    candidates: Sequence[PlannedStep],
    devices: Sequence[Any],
    make_executable: MakeExecutable,
    database: Database | None = None,
) -> Fastest:
    """The plan whose step took least time, of those that fit; it says what was tried."""
    database = database or default_database()
    tried: list[_Tried] = []
    with Progress("timing plans", len(candidates)) as progress:
        for planned in candidates:
            tried.append(_timed(planned, devices, make_executable, database))
            if debugs("solver"):
                tell("solver", f"autopar rerank: {_text(tried[-1])}")
            progress.step()
    first = min(tried, key=lambda one: one.step_s)
    if first.timing.step is None:
        raise _none_fits(tried)
    near = [one for one in tried if one.range_s[0] <= first.range_s[1]]
    if len(near) > 1:
        tried = [_again(one, devices, database) if one in near else one for one in tried]
    winner = min(tried, key=lambda one: one.step_s)
    report = winner.planned.plan.search or SearchReport(0, 0, 0, 0)
    report = replace(report, tried=tuple(_record(one, one is winner) for one in tried))
    plan = winner.planned.plan
    plan = replace(plan, search=report, warnings=(*plan.warnings, *_busy(winner, near)))
    return Fastest(replace(winner.planned, plan=plan), winner.executable)


def _timed(
    planned: PlannedStep, devices: Sequence[Any], make: MakeExecutable, database: Database
) -> _Tried:
    key = key_of(planned.plan, planned.traced.donated, devices)
    known = database.find(key)
    if known is not None:
        return _Tried(planned, known)
    executable = make(planned, devices)
    timing = time_executable(executable, state=planned.traced.state)
    database.keep(key, timing, f"{planned.plan.name}: {in_few_words(planned.plan)}")
    return _Tried(planned, timing, executable)


def _again(one: _Tried, devices: Sequence[Any], database: Database) -> _Tried:
    """One that is nearly as fast as the fastest, timed once more. Other work only makes steps
    longer, so the shorter of both times counts."""
    if one.is_known:
        return one
    planned = one.planned
    timing = time_executable(one.executable, state=planned.traced.state)
    if timing.step is None or timing.step.seconds >= one.step_s:
        return one
    timing = replace(timing, compile_s=one.timing.compile_s)
    key = key_of(planned.plan, planned.traced.donated, devices)
    database.keep(key, timing, f"{planned.plan.name}: {in_few_words(planned.plan)}")
    return replace(one, timing=timing)


def _busy(winner: _Tried, near: Sequence[_Tried]) -> list[str]:
    """What to say of a choice among times that vary."""
    step = winner.timing.step
    if step is None or not step.is_noisy or len(near) < 2:
        return []
    return [
        f"the plan was chosen by running {len(near)} that are nearly as fast, and its step's time "
        f"varied by {step.spread:.0%}: the devices seem busy with other work. For a better choice, "
        "clear the database (autopar profile --forget) and plan again when they are not"
    ]


def _record(one: _Tried, is_chosen: bool) -> TriedPlan:
    plan, step = one.planned.plan, one.timing.step
    return TriedPlan(
        what=in_few_words(plan),
        predicted_s=plan.estimated_step_s,
        measured_s=None if step is None else step.seconds,
        spread=0.0 if step is None else step.spread,
        predicted_bytes=plan.estimated_peak_bytes,
        memory_bytes=one.timing.memory_bytes,
        failure=one.timing.failure,
        is_known=one.is_known,
        is_chosen=is_chosen,
    )


def in_few_words(plan: ParallelPlan) -> str:
    """`mesh 2×4, 12 × (x data y column), 3 × (x ZeRO y row)` by how parameters are used, or the
    stages of a pipeline."""
    parts = []
    if plan.is_pipeline:
        for stage in plan.stages:
            count = stage.layers[1] - stage.layers[0]
            layers = "1 layer" if count == 1 else f"{count} layers"
            parts.append(f"{layers} on {_shape(stage.mesh_shape)}")
        parts = [f"{len(plan.stages)} stages: {'; '.join(parts)}", plan.schedule]
    else:
        parts.append(f"mesh {_shape(plan.mesh_shape)}")
        if plan.details is not None:
            parts += _kinds(plan)
    if plan.num_micro_batches > 1:
        parts.append(f"{plan.num_micro_batches} micro-batches")
    if plan.remat:
        parts.append(f"{len(plan.remat)} layers recomputed")
    return ", ".join(parts)


def _kinds(plan: ParallelPlan) -> list[str]:
    """How parameters are used, and how many of each."""
    assert plan.details is not None
    counts: dict[str, int] = {}
    for own in plan.details.parallelism:
        words = " ".join(f"{axis} {word.replace('tensor, ', '')}" for axis, word in own.words)
        counts[words] = counts.get(words, 0) + 1
    return [f"{count} × ({words})" for words, count in counts.items()]


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _text(one: _Tried) -> str:
    plan = one.planned.plan
    took = one.timing.failure if one.timing.step is None else format_seconds(one.step_s)
    known = ", known" if one.is_known else ""
    return f"{in_few_words(plan)}: predicted {format_seconds(plan.estimated_step_s)}, {took}{known}"


def _none_fits(tried: Sequence[_Tried]) -> MemoryBudgetError:
    first = tried[0]
    needed = min(one.timing.memory_bytes for one in tried)
    budget = first.planned.plan.memory_budget_bytes
    lines = "\n".join(f"  - {_text(one)}" for one in tried)
    return MemoryBudgetError(
        f"{first.planned.plan.name}: ShardingOptions(rerank={len(tried)}) ran {len(tried)} plans, "
        f"and all of them ran out of memory; the smallest needs {format_bytes(needed)} per device "
        f"by XLA's figure.\n{lines}\nGive ShardingOptions(memory_budget_bytes=…) below what the "
        "devices have, or remat='all', or a smaller batch.",
        needed,
        budget,
    )

"""The fastest of the best few plans, by running or judging them: `ShardingOptions(rerank=k)`.

    function, arguments, devices → the k best plans → their times → PlannedStep   (`plan_fastest`)

Each plan is compiled and timed with synthetic inputs on this process's devices, unless the database
has its time. A plan that runs out of memory is out, whatever was predicted. The timings become part
of the plan: `plan.search.tried`, which `plan.explain()` shows.

With `rerank_by="program"` nothing runs: each plan is compiled, and its time is read from XLA's
schedule (`autopar.measure.judge`); what exceeds the budget by XLA's count is out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autopar.compiler import plan_step
from autopar.errors import MemoryBudgetError, PlanError
from autopar.executables import make_executable
from autopar.inspect.lines import counted
from autopar.inspect.search_text import stages_text
from autopar.ir.details import PlanDetails
from autopar.ir.judged import JudgedStep
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import Timing
from autopar.ir.stages import SearchReport, TriedPlan
from autopar.ir.text import format_bytes, format_seconds
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import plan_candidates
from autopar.measure.database import Database, default_database, key_of, where_and_with
from autopar.measure.judged_plan import judged_executable
from autopar.measure.time_step import StepTiming, time_executable
from autopar.methods import ParallelMethod, options_of
from autopar.progress import Progress, debugs, tell
from autopar.runtime.executable import Executable
from autopar.sharding.refit import limit_of
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.trace import StepOptions, trace


@dataclass(frozen=True, eq=False)
class Fastest:
    """`executable`: None if the time came from the database."""

    planned: PlannedStep
    executable: Executable | None


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
    database: Database | None = None,
) -> Fastest:
    """The fastest of the `num` best plans of the method's search, or the database's choice for the
    same step, method and devices."""
    database = database or default_database()
    traced = trace(fn, args, kwargs, options)
    key = _choice_key(traced, method, cluster, options, devices)
    text = database.find_choice(key)
    if text is not None:
        try:
            chosen = ParallelPlan.from_json(text)
            planned = plan_step(fn, args, kwargs, cluster=cluster, method=chosen, options=options)
            return Fastest(_as_known(planned), None)
        except PlanError:  # from another version, or damaged: search again
            pass
    candidates = plan_candidates(
        fn, args, kwargs, cluster=cluster, method=method, options=options, num=num
    )
    if options_of(method).rerank_by == "program":
        winner = best_judged(candidates, devices, cluster)
    else:
        winner = fastest(candidates, devices, database)
    database.keep_choice(key, winner.planned.plan.to_json())
    return winner


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _choice_key(
    traced: TracedStep,
    method: ParallelMethod,
    cluster: ClusterSpec,
    options: StepOptions,
    devices: Sequence[Any],
) -> str:
    """Everything that a choice depends on, as text."""
    profile = cluster.profile
    costs = "" if profile is None or isinstance(profile, str) else profile.digest
    request = (method, replace(cluster, profile=None), costs, options, traced.donated)
    program = program_fingerprint(traced.program)
    return _ADDRESS.sub("", repr((program, *where_and_with(devices), request)))


def _as_known(planned: PlannedStep) -> PlannedStep:
    """The step with its earlier timings marked as known."""
    plan = planned.plan
    assert plan.search is not None
    tried = tuple(replace(trial, is_known=True) for trial in plan.search.tried)
    return replace(planned, plan=replace(plan, search=replace(plan.search, tried=tried)))


@dataclass(frozen=True, eq=False)
class _TimedCandidate:
    """`executable`: None if the time came from the database."""

    planned: PlannedStep
    timing: StepTiming
    executable: Any = None  # of this process: what `make_executable` gives
    judged: JudgedStep | None = None

    @property
    def is_known(self) -> bool:
        return self.executable is None

    @property
    def step_s(self) -> float:
        return inf if self.timing.step is None else self.timing.step.seconds

    @property
    def range_s(self) -> tuple[float, float]:
        """The middle half of the samples."""
        spread = 0.0 if self.timing.step is None else self.timing.step.spread
        return self.step_s * (1 - spread), self.step_s * (1 + spread)


def fastest(
    candidates: Sequence[PlannedStep],
    devices: Sequence[Any],
    database: Database | None = None,
) -> Fastest:
    """The plan with the shortest step of those that fit; its search report has all timings."""
    database = database or default_database()
    tried: list[_TimedCandidate] = []
    with Progress("timing plans", len(candidates)) as progress:
        for planned in candidates:
            tried.append(_timed(planned, devices, database))
            if debugs("solver"):
                tell("solver", f"autopar rerank: {_text(tried[-1])}")
            progress.step()
    first = min(tried, key=lambda candidate: candidate.step_s)
    if first.timing.step is None:
        raise _none_fits(tried)
    near = [candidate for candidate in tried if candidate.range_s[0] <= first.range_s[1]]
    if len(near) > 1:
        tried = [_retimed(c, devices, database) if c in near else c for c in tried]
    winner = min(tried, key=lambda candidate: candidate.step_s)
    report = winner.planned.plan.search or SearchReport(0, 0, 0, 0)
    report = replace(report, tried=tuple(_record(c, c is winner) for c in tried))
    plan = winner.planned.plan
    plan = replace(plan, search=report, warnings=(*plan.warnings, *_busy(winner, near)))
    return Fastest(replace(winner.planned, plan=plan), winner.executable)


def best_judged(
    candidates: Sequence[PlannedStep], devices: Sequence[Any], cluster: ClusterSpec
) -> Fastest:
    """The plan with the shortest judged step of those that fit; nothing runs."""
    tried: list[_TimedCandidate] = []
    with Progress("compiling plans", len(candidates)) as progress:
        for planned in candidates:
            tried.append(_judged(planned, devices, cluster))
            if debugs("solver"):
                tell("solver", f"autopar rerank: {_text(tried[-1])}")
            progress.step()
    winner = min(tried, key=lambda candidate: candidate.step_s)
    if winner.timing.step is None:
        raise _none_fits(tried)
    plan = winner.planned.plan
    report = plan.search or SearchReport(0, 0, 0, 0)
    report = replace(report, tried=tuple(_record(c, c is winner) for c in tried))
    plan = replace(plan, search=report, judged=winner.judged)
    return Fastest(replace(winner.planned, plan=plan), winner.executable)


def _judged(planned: PlannedStep, devices: Sequence[Any], cluster: ClusterSpec) -> _TimedCandidate:
    plan, started_s = planned.plan, time.perf_counter()
    executable = make_executable(planned, devices)
    num_bytes = float(executable.memory_bytes())  # compiles
    compile_s = time.perf_counter() - started_s
    judged, failure = judged_executable(executable, cluster), ""
    limit = limit_of(plan, None, devices[0].platform)
    if limit is not None and num_bytes > limit:
        failure = f"exceeds the budget by {format_bytes(num_bytes - limit)}"
    step = None if failure else Timing(judged.step_s)
    timing = StepTiming(step, compile_s, num_bytes, failure)
    return _TimedCandidate(planned, timing, executable, judged)


def _timed(planned: PlannedStep, devices: Sequence[Any], database: Database) -> _TimedCandidate:
    key = key_of(planned.plan, planned.traced.donated, devices)
    known = database.find(key)
    if known is not None:
        return _TimedCandidate(planned, known)
    executable = make_executable(planned, devices)
    timing = time_executable(executable, state=planned.traced.state)
    database.keep(key, timing, f"{planned.plan.name}: {plan_summary(planned.plan)}")
    return _TimedCandidate(planned, timing, executable)


def _retimed(
    candidate: _TimedCandidate, devices: Sequence[Any], database: Database
) -> _TimedCandidate:
    """A candidate timed once more, if it was timed here. Other work only makes steps longer, so the
    shorter time counts."""
    if candidate.executable is None:
        return candidate
    planned = candidate.planned
    timing = time_executable(candidate.executable, state=planned.traced.state)
    if timing.step is None or timing.step.seconds >= candidate.step_s:
        return candidate
    timing = replace(timing, compile_s=candidate.timing.compile_s)
    key = key_of(planned.plan, planned.traced.donated, devices)
    database.keep(key, timing, f"{planned.plan.name}: {plan_summary(planned.plan)}")
    return replace(candidate, timing=timing)


def _busy(winner: _TimedCandidate, near: Sequence[_TimedCandidate]) -> list[str]:
    """A warning if noise may have decided between plans."""
    step = winner.timing.step
    if step is None or not step.is_noisy or len(near) < 2:
        return []
    return [
        f"the plan was chosen among {len(near)} of similar speed, and its step time varied by "
        f"{step.spread:.0%}: the devices seem busy with other work. For a better choice, clear the "
        "database (autopar profile --forget) and plan again when they are idle"
    ]


def _record(candidate: _TimedCandidate, is_chosen: bool) -> TriedPlan:
    plan, step = candidate.planned.plan, candidate.timing.step
    return TriedPlan(
        what=plan_summary(plan),
        predicted_s=plan.estimated_step_s,
        measured_s=None if step is None or candidate.judged is not None else step.seconds,
        spread=0.0 if step is None else step.spread,
        predicted_bytes=plan.estimated_peak_bytes,
        memory_bytes=candidate.timing.memory_bytes,
        failure=candidate.timing.failure,
        is_known=candidate.is_known,
        is_chosen=is_chosen,
        compiled_s=None if candidate.judged is None else candidate.judged.step_s,
    )


def plan_summary(plan: ParallelPlan) -> str:
    """`mesh 2×4, 12 × (x data y column), 3 × (x ZeRO y row)` by the parallelism of parameters, or
    the stages of a pipeline."""
    parts = []
    if plan.is_pipeline:
        parts = [f"{plan.num_stages} stages: {stages_text(plan.stages)}", plan.schedule]
    else:
        parts.append(f"mesh {'×'.join(map(str, plan.mesh_shape))}")
        if plan.details is not None:
            parts += _parallelism_counts(plan.details)
    if plan.num_micro_batches > 1:
        parts.append(f"{plan.num_micro_batches} micro-batches")
    if plan.remat:
        parts.append(f"recomputing {counted(len(plan.remat), 'layer')}")
    return ", ".join(parts)


def _parallelism_counts(details: PlanDetails) -> list[str]:
    counts: dict[str, int] = {}
    for use in details.parallelism:
        words = " ".join(f"{axis} {word.replace('tensor, ', '')}" for axis, word in use.words)
        counts[words] = counts.get(words, 0) + 1
    return [f"{count} × ({words})" for words, count in counts.items()]


def _text(candidate: _TimedCandidate) -> str:
    plan = candidate.planned.plan
    measured = candidate.timing.failure
    if candidate.timing.step is not None:
        how = "measured" if candidate.judged is None else "judged"
        measured = f"{how} {format_seconds(candidate.step_s)}"
    source = ", from the database" if candidate.is_known else ""
    predicted = format_seconds(plan.estimated_step_s)
    return f"{plan_summary(plan)}: predicted {predicted}, {measured}{source}"


def _none_fits(tried: Sequence[_TimedCandidate]) -> MemoryBudgetError:
    first = tried[0]
    needed = min(candidate.timing.memory_bytes for candidate in tried)
    budget = first.planned.plan.memory_budget_bytes
    lines = "\n".join(f"  - {_text(candidate)}" for candidate in tried)
    return MemoryBudgetError(
        f"{first.planned.plan.name}: all {len(tried)} plans that ShardingOptions(rerank=…) tried "
        f"ran out of memory; the smallest needs {format_bytes(needed)} per device according to "
        f"XLA.\n{lines}\nSet ShardingOptions(memory_budget_bytes=…) below the devices' memory, use "
        "remat='all', or reduce the batch.",
        needed,
        budget,
    )

"""The whole compiler, as a list of passes.

    trace     function, arguments             → TracedStep       tracer.trace
    rewrite   TracedStep, micro-batches       → TracedStep       rewrite.step_source
    graph     TracedStep                      → Graph            tracer.build
    shard     Graph, LogicalMesh              → GraphSharding    sharding.solve
    assign    GraphSharding                   → ProgramSharding  lower.assign
    plan      all of the above                → ParallelPlan     sharding.assemble
    lower     PlannedStep, devices            → functions        lower.lower_step, lower.remote_step

`sharding.plan_mesh` runs graph to plan, for the whole step or for one stage. What comes between
depends on the method; each kind has one planner below, from a `StepSource` to a `PlannedStep`:

    one mesh    recompute layers, plan_mesh                                  sharding.plan_whole
    pipeline    loop, layers, tables, search, slice, plan_mesh per stage,
                simulate                                                     stages.plan_pipeline
    default     one mesh or a pipeline, whichever is predicted to be faster  stages.auto
    following   layouts of a train step's plan, then one of the first two    stages.following
    a plan      made elsewhere and bound to this program; nothing is solved

If a step fits on no devices, the first two plan it again with state in host memory
(sharding.host_memory).

A step that was planned before, here or in another process, is in the plan cache (`plan_cache`): its
plan is read and bound to the new trace like any plan that was made elsewhere.

A `PlanningLog` takes the seconds of every pass. The last stage search of the process is kept here,
for `autopar.get_last_dp_result`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar._requirements import require_packages
from autopar.errors import ArgumentError, AutoparError, MemoryBudgetError
from autopar.ir.failures import failure_warnings, first_line
from autopar.ir.layering import PER_STAGE_OUTPUTS
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import WALL, ParallelPlan
from autopar.ir.stages import SearchReport
from autopar.ir.xla_options import (
    LATENCY_HIDING,
    flag_names,
    may_schedule_otherwise,
    overridden,
)
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    AutoParallel,
    CreateStateParallel,
    FollowParallel,
    ParallelMethod,
    PipeshardParallel,
    ShardParallel,
    options_of,
)
from autopar.plan_cache.canonical import NotCanonicalError
from autopar.plan_cache.entry import as_solved, entry_text, read_entry
from autopar.plan_cache.folder import PlanFolder, plan_folder
from autopar.plan_cache.key import is_cacheable, plan_key
from autopar.progress import LOGGER, Progress, debugs, logged, tell
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import check_same_inputs
from autopar.sharding.host_memory import HostWays, plan_with_host_memory
from autopar.sharding.lost_state import lost_state_warning
from autopar.sharding.method_text import method_text
from autopar.sharding.plan_whole import WholeStep, bind_whole, plan_whole
from autopar.sharding.planning_log import PlanningLog, paused_garbage_collector
from autopar.stages.auto import AutoTask, plan_automatically
from autopar.stages.bind_pipeline import bind_pipeline
from autopar.stages.following import bind_made, plan_following
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.tracer.jax_settings import outside_of_mesh
from autopar.tracer.trace import StepOptions

require_packages("pulp", "scipy")  # named before any work is done

_last_search: SearchReport | None = None


def last_search() -> SearchReport | None:
    """What the last stage search of this process considered; None if there was none."""
    return _last_search


def plan_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | LogicalMesh | None = None,
    options: StepOptions | None = None,
    mesh: LogicalMesh | None = None,
    one_mesh: bool = False,
    log: PlanningLog | None = None,
) -> PlannedStep:
    """Run every pass up to the plan.

    mesh:     replaces the meshes that the cluster would give.
    one_mesh: keeps the default method from searching pipelines.
    log:      takes seconds per pass, and alternatives if its `num_alternatives` asks for them; a
              caller with a log wants to see the search, and gets no plan from the cache.
    """
    global _last_search
    started_s = time.perf_counter()
    _check_rerank(method, log)
    folder = plan_folder() if log is None and is_cacheable(method) else None
    log = log or PlanningLog()
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        planning = f"planning {name}"
        with (
            outside_of_mesh(),
            Progress(planning),
            logged(planning),
            paused_garbage_collector(),
        ):
            with log.timed("trace"):
                source = StepSource.of(fn, args, kwargs, options or StepOptions())
            task = _Task(source, cluster, method, mesh, one_mesh, log, started_s)
            kept = None if folder is None else _look_up(task, folder)
            planned = _plan(task) if kept is None else kept.planned or _plan_and_keep(task, kept)
            if kept is not None:
                planned = replace(planned, cache_key=kept.key)
            planned = _as_flags_say(planned, method)
            log.alternatives = [_warned(other, log) for other in log.alternatives]
    finally:
        _last_search = log.search or _last_search
    if (lost := lost_state_warning(planned.plan)) is not None:
        LOGGER.warning("%s", lost)
    if planned.traced.notes:
        first, *others = planned.traced.notes
        more = f" ({len(others)} more: plan.warnings)" if others else ""
        LOGGER.warning("%s: micro-batches change its results: %s%s", name, first, more)
    if debugs("plan"):
        tell("plan", planned.plan.explain(detail="full"))
    if debugs("strategies"):
        tell("strategies", planned.plan.strategies())
    return planned


def _as_asked(
    planned: PlannedStep, method: ParallelMethod | ParallelPlan | LogicalMesh | None, wall_s: float
) -> PlannedStep:
    """With the method that the user gave, where it chose another, and the seconds of planning."""
    plan = planned.plan
    if isinstance(method, ParallelPlan):
        return planned
    solver = replace(plan.solver, seconds={**plan.solver.seconds, WALL: wall_s})
    asked = plan.asked
    if method is None or isinstance(method, AutoParallel):
        asked = method_text(method or AutoParallel())
    xla_options = overridden(plan.xla_options, options_of(method).xla_options)
    plan = replace(plan, solver=solver, asked=asked, xla_options=xla_options)
    return replace(planned, plan=plan)


def _as_flags_say(
    planned: PlannedStep, method: ParallelMethod | ParallelPlan | LogicalMesh | None
) -> PlannedStep:
    """Without options that the plan chose and the user's XLA_FLAGS set for the whole process."""
    chosen = planned.plan.xla_options
    if isinstance(method, ParallelPlan) or not chosen:
        return planned
    flags = flag_names(os.environ.get("XLA_FLAGS", "")) - set(options_of(method).xla_options)
    kept = tuple(option for option in chosen if option[0] not in flags)
    if kept == chosen:
        return planned
    return replace(planned, plan=replace(planned.plan, xla_options=kept or None))


@dataclass(frozen=True)
class _Task:
    """A traced step to plan: the arguments of `plan_step`."""

    source: StepSource
    cluster: ClusterSpec
    method: ParallelMethod | ParallelPlan | LogicalMesh | None
    mesh: LogicalMesh | None
    one_mesh: bool
    log: PlanningLog
    started_s: float


# -- the plan cache


@dataclass(frozen=True)
class _Kept:
    """Where the plan of a step is kept, and the plan, if it is there."""

    folder: PlanFolder
    key: str
    planned: PlannedStep | None


def _look_up(task: _Task, folder: PlanFolder) -> _Kept | None:
    """The plan of an earlier call or process; None for a step whose plans cannot be kept."""
    with task.log.timed("cache"):
        key = _key(task)
        return None if key is None else _Kept(folder, key, _read(task, folder, key))


def _plan_and_keep(task: _Task, kept: _Kept) -> PlannedStep:
    """A new plan. It is not kept if the user stopped its search, or bugs of ours cut it short."""
    planned, log = _plan(task), task.log
    if not log.failures and log.deadline.interrupted_s is None:
        with log.timed("cache"):
            kept.folder.write(kept.key, entry_text(kept.key, planned))
    return planned


def keep_plan(planned: PlannedStep, key: str) -> None:
    """Keep a plan that was found later to be better for the step of this key: one that fits by
    XLA's count."""
    folder = plan_folder() if key else None
    if folder is not None:
        folder.write(key, entry_text(key, planned))


def _key(task: _Task) -> str | None:
    """None for a step of which it cannot be told whether another is the same."""
    assert not isinstance(task.method, ParallelPlan)
    step, options = task.source.whole, task.source.options
    try:
        return plan_key(step, options, task.cluster, task.method, task.mesh, task.one_mesh)
    except NotCanonicalError as error:
        LOGGER.info("plan cache: %s is not kept: it holds %s", step.name, error)
    except Exception as error:
        task.log.contain("the plan cache", error)
    return None


def _read(task: _Task, folder: PlanFolder, key: str) -> PlannedStep | None:
    """The plan in the cache, checked and bound as one from any other file; None if there is none,
    or it does not pass."""
    text, where = folder.read(key), str(folder.file(key))
    if text is None:
        return None
    assert not isinstance(task.method, ParallelPlan)
    try:
        entry = read_entry(key, text, where)
        bound = _bind(entry.plan, task.source, task.cluster, task.log)
        planned = as_solved(bound, entry, task.cluster, task.method, task.mesh)
    except AutoparError as error:
        folder.ignore(key, error)
        return None
    LOGGER.info("plan cache: %s: read from %s", task.source.whole.name, where)
    return replace(planned, plan=replace(planned.plan, cached=where))


# -- planners


def _warned(planned: PlannedStep, log: PlanningLog) -> PlannedStep:
    """The plan with warnings of what failed beside it, and of state that the step loses."""
    failures = failure_warnings(log.failures)
    lost = lost_state_warning(planned.plan)
    warnings = tuple(dict.fromkeys((*planned.plan.warnings, *failures, *filter(None, [lost]))))
    if warnings == planned.plan.warnings:
        return planned
    return replace(planned, plan=replace(planned.plan, warnings=warnings))


def _plan(task: _Task) -> PlannedStep:
    planned = _warned(_plan_by_method(task), task.log)
    return _as_asked(planned, task.method, time.perf_counter() - task.started_s)


def _plan_by_method(task: _Task) -> PlannedStep:
    """With all state on the devices; if no such plan fits, in XLA's schedule for the least memory;
    if none fits so either, with some of the state in host memory."""
    try:
        return _plan_on_devices(task)
    except MemoryBudgetError as error:
        misfit = error
    lean = _with_least_memory(task)
    if lean is not None:
        task.log.memory = None  # of the other schedule
        try:
            return _as_lean(_plan_on_devices(replace(task, method=lean)), lean)
        except MemoryBudgetError as error:
            tried = f"tried, the one for the least memory: {first_line(error)}"
            misfit = misfit.having_tried({"XLA's schedule": tried})
    ways = HostWays(task.source, task.method, lambda host: _plan_with_host(task, host))
    return plan_with_host_memory(ways, misfit)


_LeanMethod = AutoParallel | ShardParallel | PipeshardParallel


def _with_least_memory(task: _Task) -> _LeanMethod | None:
    """The method in XLA's schedule for the least memory; None if there is nothing to hide under
    compute, or the user has chosen. By default, XLA hides collectives of GPUs, and keeps the
    operands of many gradients of parameters for that."""
    method = task.method
    if method is None:
        method = AutoParallel() if task.mesh is None else ShardParallel()
    if not isinstance(method, _LeanMethod):
        return None
    options = method.options
    if not may_schedule_otherwise(task.cluster, options.xla_options):
        return None
    options = replace(options, xla_options={**options.xla_options, LATENCY_HIDING: False})
    return replace(method, options=options)


def _as_lean(planned: PlannedStep, method: _LeanMethod) -> PlannedStep:
    warning = (
        f"XLA schedules this step for the least memory ({LATENCY_HIDING}=false), so collectives do "
        "not run under compute: in its default schedule, no plan fits."
    )
    warnings = (*planned.plan.warnings, warning)
    kept = overridden(planned.plan.xla_options, method.options.xla_options)
    return replace(planned, plan=replace(planned.plan, warnings=warnings, xla_options=kept))


def _plan_with_host(task: _Task, host: tuple[int, ...]) -> PlannedStep:
    """On one mesh, with this state in host memory."""
    source, cluster, log = task.source, task.cluster, task.log
    match task.method:
        case ShardParallel() as method:
            return plan_whole(WholeStep(source, cluster, method, log, task.mesh, host=host))
        case AutoParallel() | None as method if task.mesh is None:
            automatic = AutoTask(source, method or AutoParallel(), cluster, log, host)
            return plan_automatically(automatic, one_mesh=True)
        case _:
            whole = WholeStep(source, cluster, ShardParallel(), log, task.mesh, host=host)
            return plan_whole(whole)


def _plan_on_devices(task: _Task) -> PlannedStep:
    """By the planner of a method's kind."""
    source, cluster, log = task.source, task.cluster, task.log
    match task.method:
        case ParallelPlan() as plan:
            return _bind(plan, source, cluster, log)
        case PipeshardParallel() as method:
            return plan_pipeline(source, method, cluster, log)
        case CreateStateParallel() | FollowParallel() as method:
            return plan_following(_keeping_arguments(source), method, cluster, log)
        case AutoParallel() as method:
            automatic = AutoTask(source, method, cluster, log)
            return plan_automatically(automatic, one_mesh=task.one_mesh)
        case None if task.mesh is None:
            automatic = AutoTask(source, AutoParallel(), cluster, log)
            return plan_automatically(automatic, one_mesh=task.one_mesh)
        case method:
            one_mesh = ShardParallel() if method is None else method
            return plan_whole(WholeStep(source, cluster, one_mesh, log, task.mesh))


def _bind(
    plan: ParallelPlan, source: StepSource, cluster: ClusterSpec, log: PlanningLog
) -> PlannedStep:
    """A plan from a file, another process or an earlier call, for this step."""
    if not plan.is_pipeline:
        return bind_whole(plan, source, cluster, log)
    check_same_inputs(plan, source.whole)
    if plan.layering == PER_STAGE_OUTPUTS:
        return bind_made(plan, source.whole, cluster)
    return bind_pipeline(plan, source, cluster, log)


def _keeping_arguments(source: StepSource) -> StepSource:
    """A function beside training donates nothing by default: the train step still needs it."""
    if source.options.donate_argnums != "auto":
        return source
    return replace(source, whole=replace(source.whole, donated=()))


def _check_rerank(
    method: ParallelMethod | ParallelPlan | LogicalMesh | None, log: PlanningLog | None
) -> None:
    rerank = 0 if isinstance(method, ParallelPlan) else options_of(method).rerank
    if rerank and log is None:
        raise ArgumentError(
            f"ShardingOptions(rerank={rerank}): plans are run on devices to be "
            "ranked, and here a plan is made without any. Use parallelize(fn, method=…) and its "
            ".plan(…) where the devices are; or autopar.plan_verified(…), which compiles them for "
            "GPUs that are not there; or leave rerank at 0."
        )

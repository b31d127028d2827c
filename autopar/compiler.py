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

A `PlanningLog` takes the seconds of every pass. The last stage search of the process is kept here,
for `autopar.get_last_dp_result`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.failures import failure_warnings
from autopar.ir.layering import PER_STAGE_OUTPUTS
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport
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
from autopar.progress import Progress, debugs, logged, tell
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import check_same_inputs
from autopar.sharding.plan_whole import WholeStep, bind_whole, plan_whole
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.auto import AutoTask, plan_automatically
from autopar.stages.following import bind_made, plan_following
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.stages.solve_pipeline import bind_pipeline
from autopar.tracer.trace import StepOptions

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
    log:      takes seconds per pass, and alternatives if its `num_alternatives` asks for them.
    """
    global _last_search
    _check_rerank(method, log)
    log = log or PlanningLog()
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        with Progress(f"planning {name}"), logged(f"planning {name}"):
            with log.timed("trace"):
                source = StepSource.of(fn, args, kwargs, options or StepOptions())
            planned = _warned(_plan(source, cluster, method, mesh, one_mesh, log), log)
            log.alternatives = [_warned(other, log) for other in log.alternatives]
    finally:
        _last_search = log.search or _last_search
    if debugs("plan"):
        tell("plan", planned.plan.explain())
    if debugs("strategies"):
        tell("strategies", planned.plan.strategies())
    return planned


def _warned(planned: PlannedStep, log: PlanningLog) -> PlannedStep:
    """The plan with warnings of what failed beside it."""
    failures = failure_warnings(log.failures)
    if not failures:
        return planned
    warnings = tuple(dict.fromkeys((*planned.plan.warnings, *failures)))
    return replace(planned, plan=replace(planned.plan, warnings=warnings))


def _plan(
    source: StepSource,
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | LogicalMesh | None,
    mesh: LogicalMesh | None,
    one_mesh: bool,
    log: PlanningLog,
) -> PlannedStep:
    """The planner of a method's kind."""
    match method:
        case ParallelPlan():
            return _bind(method, source, cluster, log)
        case PipeshardParallel():
            return plan_pipeline(source, method, cluster, log)
        case CreateStateParallel() | FollowParallel():
            return plan_following(_keeping_arguments(source), method, cluster, log)
        case AutoParallel():
            return plan_automatically(AutoTask(source, method, cluster, log), one_mesh=one_mesh)
        case None if mesh is None:
            task = AutoTask(source, AutoParallel(), cluster, log)
            return plan_automatically(task, one_mesh=one_mesh)
        case _:
            return plan_whole(
                WholeStep(source, cluster, ShardParallel() if method is None else method, log, mesh)
            )


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

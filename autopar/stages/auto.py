"""The default method: the best of plans on one mesh and pipelines, by predicted step time.

A pipeline is searched unless it cannot win: no step is faster than its products at full speed on
all devices, and every stage starts its stage programs for every micro-batch. Micro-batches are used
only where they change nothing: a step with statistics over the batch keeps its batch whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from autopar.cost.measured import min_work_s
from autopar.errors import AutoparError, MemoryBudgetError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import SearchReport
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AutoParallel, PipeshardParallel, ShardParallel
from autopar.rewrite.layers import find_layers
from autopar.rewrite.step_source import StepSource
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.sharding.plan_whole import WholeStep, plan_whole
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.looped import batch_rows, first_micro_batches, launch_s
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.tracer.costs import aval_bytes, program_flops

# Stage programs that the shortest pipeline starts one after another: two stages, two micro-batches.
_FEWEST_LAUNCHES = 6
# Across hosts, solve a plan on one mesh if tables put it no further behind than this.
_WORTH_SOLVING = 1.05


@dataclass(frozen=True)
class AutoTask:
    """A step to plan in whatever way is fastest."""

    source: StepSource
    method: AutoParallel
    cluster: ClusterSpec
    log: PlanningLog

    @property
    def number_is_free(self) -> bool:
        return self.method.num_micro_batches == "auto"

    def on_one_mesh(self, num_micro_batches: int | None = None) -> PlannedStep:
        """The best plan on one mesh, with the method's number of micro-batches by default."""
        number = num_micro_batches
        if number is None:
            number = 1 if self.number_is_free else int(self.method.num_micro_batches)
        method = ShardParallel(num_micro_batches=number, options=self.method.options)
        return plan_whole(WholeStep(self.source, self.cluster, method, self.log))

    def as_pipeline(self) -> PlannedStep:
        method = PipeshardParallel(self.method.num_micro_batches, options=self.method.options)
        return plan_pipeline(self.source, method, self.cluster, self.log)


def plan_automatically(task: AutoTask, *, one_mesh: bool = False) -> PlannedStep:
    """`one_mesh`: consider no pipelines."""
    if task.cluster.num_devices == 1 or one_mesh:
        return _fitted_on_one_mesh(task)
    reason = None
    whole_may_fit = not task.number_is_free or _may_fit(task)
    if task.cluster.num_hosts > 1 or not whole_may_fit:
        reason = _why_whole_batch(task)
        if reason is None:
            return _pipeline_first(task, whole_may_fit)
    return _one_mesh_first(task, reason)


def _one_mesh_first(task: AutoTask, reason: str | None) -> PlannedStep:
    """Plan on one mesh, and search a pipeline if it can be faster. `reason`: why it cannot be
    searched, if that is known."""
    whole: PlannedStep | None = None
    misfit: MemoryBudgetError | None = None
    try:
        whole = task.on_one_mesh()
    except MemoryBudgetError as error:
        misfit = error
    whole_s = inf if whole is None else whole.plan.estimated_step_s
    reason = reason or _why_too_slow(task, whole_s) or _why_whole_batch(task)
    pipeline = None
    if reason is None:
        try:
            pipeline = task.as_pipeline()
        except AutoparError as error:
            reason = _first_line(error)
    if pipeline is not None and pipeline.plan.estimated_step_s < whole_s:
        return _with_notes(pipeline, whole_s)
    if whole is not None:
        search = None if pipeline is None else pipeline.plan.search
        return _with_notes(whole, whole_s, search, reason)
    assert misfit is not None
    return _with_notes(_with_micro_batches(task, misfit), inf, note=reason)


def _pipeline_first(task: AutoTask, whole_may_fit: bool) -> PlannedStep:
    """Tables know plans on one mesh too, as pipelines of one stage; where these are far behind,
    none with micro-batches is solved. Tables say little of the whole batch at once, which has more
    rows to split over the devices and gathers parameters once. A pipeline of one stage gives way
    to one program on that mesh, unless that is clearly slower: short of memory, two programs per
    micro-batch may have it easier."""
    try:
        pipeline = task.as_pipeline()
    except AutoparError as error:
        planned = _fitted_on_one_mesh(task)
        return _with_notes(planned, planned.plan.estimated_step_s, note=_first_line(error))
    plan, pipeline_s = pipeline.plan, pipeline.plan.estimated_step_s
    numbers = _numbers_on_one_mesh(task, pipeline, whole_may_fit)
    if not numbers:
        return pipeline
    best = pipeline if plan.num_stages > 1 else None
    whole_s = inf
    for number in numbers:
        try:
            whole = task.on_one_mesh(number)
        except MemoryBudgetError:
            continue
        whole_s = min(whole_s, whole.plan.estimated_step_s)
        if best is None or whole.plan.estimated_step_s < best.plan.estimated_step_s:
            best = whole
    if best is None or best.plan.estimated_step_s > _WORTH_SOLVING * pipeline_s:
        best = pipeline
    return _with_notes(best, whole_s, plan.search)


def _numbers_on_one_mesh(task: AutoTask, pipeline: PlannedStep, whole_may_fit: bool) -> list[int]:
    """Numbers of micro-batches for which a plan on one mesh may beat this pipeline."""
    plan = pipeline.plan
    one_s = None if plan.search is None else plan.search.intra_only_s
    one_s = inf if one_s is None else one_s  # on one mesh, not even micro-batches fit
    one_s -= 2 * plan.num_micro_batches * launch_s(task.cluster)  # a loop in one program
    numbers = set()
    if one_s <= _WORTH_SOLVING * plan.estimated_step_s or plan.num_stages == 1:
        numbers.add(int(plan.num_micro_batches))
    if task.number_is_free and whole_may_fit:
        numbers.add(1)
    return sorted(numbers)


# -- one mesh


def _fitted_on_one_mesh(task: AutoTask) -> PlannedStep:
    try:
        return task.on_one_mesh()
    except MemoryBudgetError as error:
        return _with_micro_batches(task, error)


def _with_micro_batches(task: AutoTask, misfit: MemoryBudgetError) -> PlannedStep:
    """A plan on one mesh that fits because it cuts the batch; else raises the misfit."""
    if not task.number_is_free or _why_whole_batch(task) is not None:
        raise misfit
    rows = batch_rows(task.source.whole)
    number = 2
    while number <= rows and rows % number == 0:
        try:
            return task.on_one_mesh(number)
        except MemoryBudgetError:
            number *= 2
    raise misfit


def _may_fit(task: AutoTask) -> bool:
    """Whether the whole batch may fit at once: state, what every layer keeps if all are
    recomputed, and the largest layer, divided evenly. Of what its backward pass reads, about a
    third must be in memory (see `rewrite.residuals`)."""
    step, cluster = task.source.whole, task.cluster
    budget = cluster.spec.memory_bytes * (1 - RESERVE_SHARE)
    if task.method.options.memory_budget_bytes is not None:
        budget = float(task.method.options.memory_budget_bytes)
    layers = find_layers(step.program, batch=step.batch)
    held = sum(aval_bytes(step.avals[i]) for i, _ in step.state)
    held += sum(layer.kept_bytes for layer in layers)
    held += max((layer.residual_bytes / layer.trips for layer in layers), default=0) / 3
    return held / cluster.num_devices <= budget


# -- reasons


def _why_whole_batch(task: AutoTask) -> str | None:
    """Why the batch cannot be cut; None if it can be."""
    asked = task.method.num_micro_batches
    step = task.source.whole
    try:
        rows = batch_rows(step)
        if asked == "auto" and rows == 1:
            return "the batch has one row"
        number = first_micro_batches(step, task.cluster) if asked == "auto" else int(asked)
        notes = task.source.as_loop(number).notes
    except AutoparError as error:
        return _first_line(error)
    except Exception as error:  # the user's own: a function that takes the whole batch alone
        return f"it cannot be called with a micro-batch: {_first_line(error)}"
    if notes and asked == "auto":
        return f"micro-batches would change results: {notes[0]}"
    return None


def _why_too_slow(task: AutoTask, whole_s: float) -> str | None:
    """Why no pipeline can beat a plan on one mesh; None if one may."""
    flops = program_flops(task.source.whole.program) / task.cluster.num_devices
    min_s = min_work_s(task.cluster, flops) + _FEWEST_LAUNCHES * launch_s(task.cluster)
    return None if whole_s > min_s else f"it would take {min_s:.3g} s at least"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")


def _with_notes(
    planned: PlannedStep,
    whole_s: float,
    search: SearchReport | None = None,
    note: str | None = None,
) -> PlannedStep:
    """The plan with what was considered beside it."""
    search = planned.plan.search or search or SearchReport(0, 0, 0, 0)
    notes = search.notes if note is None else (*search.notes, f"No pipeline was searched: {note}.")
    intra_only_s = None if whole_s == inf else whole_s
    search = replace(search, intra_only_s=intra_only_s, notes=notes)
    return replace(planned, plan=replace(planned.plan, search=search))

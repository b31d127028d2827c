"""The default method: the best of plans on one mesh and pipelines, by predicted step time.

A pipeline is searched unless it cannot win: no step is faster than its products at full speed on
all devices, and every stage starts its stage programs for every micro-batch. Micro-batches are used
only where they change nothing: a step with statistics over the batch keeps its batch whole.

Ways to plan a step return None where they lead to no plan, and leave in `_Outcomes` why. If all do,
the error says what was tried; a step whose state alone is too large has it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from autopar.cost.measured import min_work_s
from autopar.errors import AutoparError, MemoryBudgetError, PlanningError, TraceError
from autopar.ir.failures import Failure, first_line, planning_failed
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import SearchReport
from autopar.ir.text import format_bytes
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AutoParallel, PipeshardParallel, ShardParallel
from autopar.rewrite.layers import Layer, find_layers
from autopar.rewrite.step_source import StepSource
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.sharding.plan_whole import WholeStep, plan_smallest, plan_whole
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.tried import (
    MICRO_BATCHES,
    PIPELINES,
    cut_refusal,
    why_not_cut,
    with_failures,
)
from autopar.stages.choose_stages import device_budget
from autopar.stages.looped import batch_rows, first_micro_batches, launch_s
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.tracer.costs import aval_bytes, program_flops

# Stage programs that the shortest pipeline starts one after another: two stages, two micro-batches.
_FEWEST_LAUNCHES = 6
# The time that the next way to plan a step takes, relative to all before it; a guess.
_NEXT_WAY = 0.25
# Of the time, for a first plan of a step that scans its layers.
_EARLY = 0.2
# Of what a backward pass reads, the part that must be in memory (see `rewrite.residuals`).
_HELD_SHARE = 1 / 3
# Across hosts, solve a plan on one mesh if tables put it no further behind than this.
_WORTH_SOLVING = 1.05


@dataclass(frozen=True)
class AutoTask:
    """A step to plan in whatever way is fastest. `host`: state in host memory, by input index."""

    source: StepSource
    method: AutoParallel
    cluster: ClusterSpec
    log: PlanningLog
    host: tuple[int, ...] = ()

    @property
    def number_is_free(self) -> bool:
        return self.method.num_micro_batches == "auto"

    @property
    def budget_bytes(self) -> float:
        given = self.method.options.memory_budget_bytes
        if given is not None:
            return float(given)
        return self.cluster.spec.memory_bytes * (1 - RESERVE_SHARE)

    def whole(
        self,
        num_micro_batches: int | None = None,
        *,
        in_full: bool = False,
        cutoff: float = inf,
    ) -> WholeStep:
        """The step on one mesh, with the method's number of micro-batches by default."""
        number = num_micro_batches
        if number is None:
            number = 1 if self.number_is_free else int(self.method.num_micro_batches)
        method = ShardParallel(num_micro_batches=number, options=self.method.options)
        return WholeStep(
            self.source,
            self.cluster,
            method,
            self.log,
            in_full=in_full,
            cutoff=cutoff,
            host=self.host,
        )

    @cached_property
    def layers(self) -> Sequence[Layer] | None:
        """The step's layers; None if autopar fails to find them."""
        step = self.source.whole
        try:
            return find_layers(step.program, batch=step.batch)
        except Exception as error:
            self.log.contain("recomputation", error)
            return None

    @cached_property
    def state_bytes(self) -> int:
        step = self.source.whole
        return sum(aval_bytes(step.avals[i]) for i, _ in step.state)

    def as_pipeline(self) -> PlannedStep:
        method = PipeshardParallel(self.method.num_micro_batches, options=self.method.options)
        return plan_pipeline(self.source, method, self.cluster, self.log, to_the_end=False)


@dataclass
class _Outcomes:
    """What came of every way to plan a step.

    misfit:   the first error for want of memory.
    failures: of autopar's own.
    tried:    micro-batches and pipelines -> what came of them, or why they were not tried.
    useless:  remedies that were tried in vain.
    """

    task: AutoTask
    misfit: MemoryBudgetError | None = None
    failures: list[Failure] = field(default_factory=list)
    tried: dict[str, str] = field(default_factory=dict)
    useless: set[str] = field(default_factory=set)

    def on_one_mesh(
        self, num_micro_batches: int | None = None, cutoff: float = inf
    ) -> PlannedStep | None:
        """The best plan on one mesh; if none takes less than the cutoff, any or none."""
        try:
            return plan_whole(self.task.whole(num_micro_batches, cutoff=cutoff))
        except MemoryBudgetError as error:
            self.misfit = self.misfit or error
        except Exception as error:
            self.failures += self.task.log.contain("a plan on one mesh", error)
        return None

    def as_pipeline(self) -> PlannedStep | None:
        """The best pipeline. The user asked for none, so no error of it is the user's."""
        try:
            return self.task.as_pipeline()
        except MemoryBudgetError as error:
            self.misfit = self.misfit or error
            self.tried[PIPELINES] = f"tried: {error.problem.splitlines()[0]}"
        except Exception as error:
            refusal = cut_refusal(error)
            if refusal is None and isinstance(error, AutoparError):
                is_failure = isinstance(error, PlanningError)
                refusal = None if is_failure else first_line(error)
            if refusal is not None:
                self.tried[PIPELINES] = f"tried: {refusal}"
            else:
                self.failures += self.task.log.contain("pipelines", error)
                self.tried[PIPELINES] = f"tried: autopar failed, {self.failures[-1].exception}"
        return None


def plan_automatically(task: AutoTask, *, one_mesh: bool = False) -> PlannedStep:
    """`one_mesh`: consider no pipelines."""
    outcomes = _Outcomes(task)
    with task.log.limited(task.method.options):
        whole = task.whole(in_full=True)
        if whole.hopeless is not None:
            return plan_smallest(whole)
        planned = _best_planned(task, outcomes, one_mesh) or _smallest(task, outcomes)
        return task.log.stopped(planned)


def _has_time(task: AutoTask, what: str) -> bool:
    """Whether there is time for another way to plan the step; if not, the plan says what it was."""
    deadline = task.log.deadline
    if deadline.allows(_NEXT_WAY * deadline.elapsed_s):
        return True
    deadline.cut(what)
    return False


def _best_planned(task: AutoTask, outcomes: _Outcomes, one_mesh: bool) -> PlannedStep | None:
    if task.cluster.num_devices == 1:
        outcomes.tried[PIPELINES] = "not tried: there is one device"
        return _on_one_device(task, outcomes)
    if one_mesh:
        outcomes.tried[PIPELINES] = "not tried: one mesh was asked for"
        return _fitted_on_one_mesh(task, outcomes)
    reason = None
    if not _fits_easily(task):
        reason = _why_whole_batch(task)
        if reason is None:
            return _pipeline_first(task, outcomes)
    return _one_mesh_first(task, outcomes, reason)


def _one_mesh_first(task: AutoTask, outcomes: _Outcomes, reason: str | None) -> PlannedStep | None:
    """Plan on one mesh, and search a pipeline if it can be faster. `reason`: why it cannot be
    searched, if that is known."""
    whole = outcomes.on_one_mesh()
    whole_s = inf if whole is None else whole.plan.estimated_step_s
    reason = reason or _why_too_slow(task, whole) or _why_whole_batch(task)
    pipeline = None
    if reason is None and whole is not None and not _has_time(task, "pipelines"):
        reason = "there was no time left"
    if reason is None:
        pipeline = outcomes.as_pipeline()
    else:
        outcomes.tried[PIPELINES] = f"not tried: {reason}"
    if pipeline is not None and pipeline.plan.estimated_step_s < whole_s:
        return _with_notes(pipeline, whole_s)
    note = outcomes.tried.get(PIPELINES)
    if whole is not None:
        search = None if pipeline is None else pipeline.plan.search
        return _with_notes(whole, whole_s, search, note)
    planned = _with_micro_batches(task, outcomes)
    return None if planned is None else _with_notes(planned, inf, note=note)


def _pipeline_first(task: AutoTask, outcomes: _Outcomes) -> PlannedStep | None:
    """Tables know plans on one mesh too, as pipelines of one stage; where these are far behind,
    none with as many micro-batches is solved. Tables say little of fewer: these have more rows to
    split over the devices, and gather parameters less often. Across hosts, a pipeline of one stage
    gives way to one program on that mesh, unless that is clearly slower: short of memory, two
    programs per micro-batch may have it easier."""
    early = _early_on_one_mesh(task)
    if early is not None and not _has_time(task, "pipelines"):
        outcomes.tried[PIPELINES] = "not tried: there was no time left"
        return _with_notes(early, early.plan.estimated_step_s, note=outcomes.tried[PIPELINES])
    pipeline = outcomes.as_pipeline()
    if pipeline is None:
        planned = early
        if early is None or _has_time(task, "one mesh"):
            planned = _faster(early, _fitted_on_one_mesh(task, outcomes))
        if planned is None:
            return None
        note = outcomes.tried[PIPELINES]
        return _with_notes(planned, planned.plan.estimated_step_s, note=note)
    plan, pipeline_s = pipeline.plan, pipeline.plan.estimated_step_s
    numbers = _numbers_on_one_mesh(task, pipeline)
    if not numbers and early is None:
        return pipeline
    best = pipeline if plan.num_stages > 1 or task.cluster.num_hosts == 1 else None
    best = _faster(best, early)
    whole_s = inf
    for number in numbers:
        if best is not None and _recomputed_s(task, number) >= best.plan.estimated_step_s:
            continue
        if best is not None and not _has_time(task, f"one mesh, {number} micro-batches"):
            continue
        cutoff = pipeline_s * (_WORTH_SOLVING if best is None else 1.0)
        whole = outcomes.on_one_mesh(number, cutoff)
        if whole is None:
            continue
        whole_s = min(whole_s, whole.plan.estimated_step_s)
        if best is None or whole.plan.estimated_step_s < best.plan.estimated_step_s:
            best = whole
    if best is None or best.plan.estimated_step_s > _WORTH_SOLVING * pipeline_s:
        best = pipeline
    return _with_notes(best, whole_s, plan.search)


def _faster(one: PlannedStep | None, other: PlannedStep | None) -> PlannedStep | None:
    there = [planned for planned in (one, other) if planned is not None]
    return min(there, key=lambda planned: planned.plan.estimated_step_s, default=None)


def _early_on_one_mesh(task: AutoTask) -> PlannedStep | None:
    """A plan on one mesh with the fewest micro-batches that fit, in a small share of the time. A
    step that scans its layers is short as one program and long as a pipeline, whose layers are
    written out, so such a plan costs little and is there if pipelines take too long."""
    if not task.number_is_free or not any(layer.trips > 1 for layer in task.layers or ()):
        return None
    rows = batch_rows(task.source.whole)
    tries = _MicroBatchTries(task)
    whole = task.log.deadline
    with task.log.sharing(_EARLY):
        for number in (2**k for k in range(rows.bit_length()) if rows % 2**k == 0):
            if not _may_fit(task, number) or tries.is_too_large(number):
                continue
            planned = tries.plan(number)
            if planned is not None:
                return planned
            if whole.allows() and not task.log.deadline.allows():
                return None  # pipelines have time
    return None


def _numbers_on_one_mesh(task: AutoTask, pipeline: PlannedStep) -> list[int]:
    """Numbers of micro-batches for which a plan on one mesh may beat this pipeline, its own number
    first."""
    plan = pipeline.plan
    one_s = None if plan.search is None else plan.search.intra_only_s
    one_s = inf if one_s is None else one_s  # on one mesh, not even micro-batches fit
    one_s -= 2 * plan.num_micro_batches * launch_s(task.cluster)  # a loop in one program
    numbers = set()
    is_one_stage = plan.num_stages == 1 and task.cluster.num_hosts > 1
    if is_one_stage or (plan.num_stages > 1 and one_s <= _WORTH_SOLVING * plan.estimated_step_s):
        numbers.add(int(plan.num_micro_batches))
    if task.number_is_free:
        rows = batch_rows(task.source.whole)
        fewer = [2**k for k in range(rows.bit_length()) if rows % 2**k == 0]
        fewest = next((n for n in fewer if _may_fit(task, n)), None)
        if fewest is not None and (fewest == 1 or fewest < plan.num_micro_batches):
            numbers.add(fewest)
    return sorted(numbers, reverse=True)


def _recomputed_s(task: AutoTask, num_micro_batches: int) -> float:
    """About the least that a step takes on one mesh which recomputes what does not fit else: the
    work of all operators, as plans at hand know it, and that of the layers once more."""
    if (layers := task.layers) is None:
        return 0.0
    excess = _bytes_without_recomputation(task, layers, num_micro_batches) - task.budget_bytes
    flops = 0.0
    for layer in layers:
        if excess <= 0:
            break
        freed = max(0.0, layer.residual_bytes * _HELD_SHARE - layer.kept_bytes)
        excess -= freed / num_micro_batches / task.cluster.num_devices
        flops += layer.flops if freed else 0.0
    return task.log.work_s * (1 + flops / max(1.0, program_flops(task.source.whole.program)))


# -- one mesh


def _fitted_on_one_mesh(task: AutoTask, outcomes: _Outcomes) -> PlannedStep | None:
    """A plan of the whole batch, or of one that is cut. Past the deadline, what is not likely to
    fit is not tried first; what is known not to fit is not tried at all."""
    if task.number_is_free:
        if _floor(task, 1) > task.budget_bytes:
            return _with_micro_batches(task, outcomes)
        if not task.log.deadline.allows() and not _may_fit(task):
            return _with_micro_batches(task, outcomes) or outcomes.on_one_mesh()
    return outcomes.on_one_mesh() or _with_micro_batches(task, outcomes)


def _on_one_device(task: AutoTask, outcomes: _Outcomes) -> PlannedStep | None:
    """The step as it is, if it fits; else the fastest of plans that recompute layers, cut the
    batch, or both. Once a cut batch needs no recomputation, a finer cut gains nothing."""
    best = outcomes.on_one_mesh()
    if best is not None and not best.plan.remat:
        return best
    for planned in _cut_plans(task, outcomes):
        if best is None or planned.plan.estimated_step_s < best.plan.estimated_step_s:
            best = planned
        if not planned.plan.remat or not _has_time(task, "more micro-batches"):
            break
    return best


def _with_micro_batches(task: AutoTask, outcomes: _Outcomes) -> PlannedStep | None:
    """A plan on one mesh that fits because it cuts the batch."""
    return next(_cut_plans(task, outcomes), None)


def _cut_plans(task: AutoTask, outcomes: _Outcomes) -> Iterator[PlannedStep]:
    """Plans on one mesh that fit, with more and more micro-batches."""
    if not task.number_is_free:
        number = task.method.num_micro_batches
        given = f"AutoParallel(num_micro_batches={number})"
        outcomes.tried[MICRO_BATCHES] = f"{number} of them, as {given} asks for"
        return
    outcomes.useless.add(MICRO_BATCHES)
    reason = _why_whole_batch(task)
    if reason is not None:
        outcomes.tried[MICRO_BATCHES] = f"not possible: {reason}"
        return
    rows = batch_rows(task.source.whole)
    numbers = [2**k for k in range(1, rows.bit_length()) if rows % 2**k == 0]
    tried = _MicroBatchTries(task)
    numbers = [n for n in numbers if not tried.is_known_too_large(n)] or numbers
    if not task.log.deadline.allows():  # only those that are likely to fit
        likely = next((number for number in numbers if _may_fit(task, number)), None)
        while likely is not None:
            planned = tried.plan(likely)
            if planned is not None:
                yield planned
            numbers = [number for number in numbers if number > likely]
            likely = next((n for n in numbers if tried.may_fit_after(likely, n)), None)
    if not tried.all_are_too_large(numbers):
        for number in numbers:
            planned = tried.plan(number)
            if planned is not None:
                yield planned
    outcomes.failures += tried.failures
    outcomes.tried[MICRO_BATCHES] = f"tried: {'; '.join(tried.found.values())}"


@dataclass
class _MicroBatchTries:
    """Plans on one mesh with more and more micro-batches. `found`: a number -> why it has none;
    `peaks`: a number -> the least memory that it took."""

    task: AutoTask
    found: dict[int, str] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def plan(self, number: int) -> PlannedStep | None:
        try:
            return plan_whole(self.task.whole(number))
        except MemoryBudgetError as error:
            self._note_need(number, error.peak_bytes)
            self.peaks[number] = error.peak_bytes
        except Exception as error:
            self._note_refusal(number, error)
        return None

    def may_fit_after(self, tried: int, number: int) -> bool:
        """Whether more micro-batches may fit, by what fewer took: all but the state gets less."""
        if tried not in self.peaks:
            return True
        state = self.task.state_bytes / self.task.cluster.num_devices
        rest = max(0.0, self.peaks[tried] - state) * tried / number
        return state + rest <= self.task.budget_bytes

    def all_are_too_large(self, numbers: Sequence[int]) -> bool:
        """Whether even the most micro-batches that the step can have are too large. That is soon
        known, and fewer need more."""
        for number in reversed(numbers):
            is_too_large = self.is_too_large(number)
            if is_too_large is not None:
                return is_too_large
        return True

    def is_known_too_large(self, number: int) -> bool:
        """Whether so many need more than there is, by what another number takes."""
        floor = _floor(self.task, number)
        if floor > self.task.budget_bytes:
            self._note_need(number, floor)
        return floor > self.task.budget_bytes

    def is_too_large(self, number: int) -> bool | None:
        """Whether so many need more than there is, in any layout; None if they are refused."""
        memory = self.task.log.memory
        if memory is not None and memory.floor(number) <= self.task.budget_bytes:
            return False
        try:
            floor = self.task.whole(number).peak_floor(self.task.budget_bytes)
        except Exception as error:
            self._note_refusal(number, error)
            return None
        if floor > self.task.budget_bytes:
            self._note_need(number, floor)
        return floor > self.task.budget_bytes

    def _note_need(self, number: int, peak_bytes: float) -> None:
        self.found[number] = f"{number} of them need {format_bytes(peak_bytes)} per device or more"

    def _note_refusal(self, number: int, error: Exception) -> None:
        refusal = cut_refusal(error)
        if refusal is None:
            failures = self.task.log.contain(f"{number} micro-batches on one mesh", error)
            self.failures += [failure for failure in failures if failure not in self.failures]
            refusal = f"autopar failed, {failures[0].exception}"
        self.found[number] = f"{number} are not possible: {refusal}"


# -- what does not fit


def _smallest(task: AutoTask, outcomes: _Outcomes) -> PlannedStep:
    """The plan that takes the least memory, once no other fits; mostly it raises, and explains."""
    name, failures = task.source.whole.name, outcomes.failures
    if failures and outcomes.misfit is None:
        raise planning_failed(name, failures, "no plan on one mesh and no pipeline could be made")
    misfit = outcomes.misfit
    try:
        return plan_smallest(task.whole(in_full=True))
    except MemoryBudgetError as error:
        misfit = error
    except Exception as error:
        failures += task.log.contain("the plan that takes the least memory", error)
    if misfit is None:
        raise planning_failed(name, failures, "no plan on one mesh could be made")
    misfit = misfit.having_tried(outcomes.tried, useless=outcomes.useless)
    raise with_failures(misfit, failures) from misfit.__cause__


def _fits_easily(task: AutoTask) -> bool:
    """Whether a plan on one mesh should come before pipelines: if the whole batch fits without
    recomputation, across hosts in half of the memory. Then a plan is soon found, and few pipelines
    beat it. Else tables of stages know more, sooner."""
    is_one_host = task.cluster.num_hosts == 1
    if not task.number_is_free:
        return is_one_host
    if (layers := task.layers) is None:
        return is_one_host
    room = task.budget_bytes if is_one_host else task.budget_bytes / 2
    return _bytes_without_recomputation(task, layers) <= room


def _bytes_without_recomputation(
    task: AutoTask, layers: Sequence[Layer], num_micro_batches: int = 1
) -> float:
    """What a device holds of state and of what the backward pass reads, divided evenly."""
    held = sum(max(layer.kept_bytes, layer.residual_bytes * _HELD_SHARE) for layer in layers)
    return (task.state_bytes + held / num_micro_batches) / task.cluster.num_devices


def _floor(task: AutoTask, num_micro_batches: int) -> float:
    """A lower bound on what every plan on one mesh takes that has so many micro-batches, by the
    graph of another number, less all that recomputation can free; 0 if there is none."""
    memory, layers = task.log.memory, task.layers
    if memory is None or layers is None or task.host:
        return 0.0
    freed = 0.0
    if task.method.options.remat != "none":
        freed = sum(max(0, layer.residual_bytes - layer.kept_bytes) for layer in layers)
    return memory.floor(num_micro_batches) - freed / num_micro_batches / task.cluster.num_devices


def _may_fit(task: AutoTask, num_micro_batches: int = 1) -> bool:
    """Whether so many micro-batches may fit on all devices: state, what every layer keeps if all
    are recomputed, and the largest layer, divided evenly."""
    if _floor(task, num_micro_batches) > task.budget_bytes:
        return False
    if (layers := task.layers) is None:
        return True
    held = sum(layer.kept_bytes for layer in layers)
    largest = max((layer.residual_bytes / layer.trips for layer in layers), default=0)
    held += largest * _HELD_SHARE
    each = (task.state_bytes + held / num_micro_batches) / task.cluster.num_devices
    return each <= task.budget_bytes


# -- reasons


def _why_whole_batch(task: AutoTask) -> str | None:
    """Why the batch cannot be cut; None if it can be."""
    asked = task.method.num_micro_batches
    step = task.source.whole
    try:
        rows = batch_rows(step)
    except TraceError as error:
        return first_line(error)
    if asked == "auto" and rows == 1:
        return "the batch has one row"
    if asked == "auto":
        budget = device_budget(task.method.options, task.cluster)
        number = first_micro_batches(step, task.cluster, budget)
    else:
        number = int(asked)
    reason = why_not_cut(task.source.as_loop, number, task.log)
    if reason is not None or asked != "auto":
        return reason
    notes = task.source.as_loop(number).notes
    return f"micro-batches would change results: {notes[0]}" if notes else None


def _why_too_slow(task: AutoTask, whole: PlannedStep | None) -> str | None:
    """Why no pipeline can beat a plan on one mesh; None if one may. No step is faster than its
    operators at full speed on all devices. Where memory is no reason for micro-batches, a pipeline
    has two stages or more: with n micro-batches, the second waits for an n-th of the first one's
    work, and the two start 2 · (n + 1) stage programs one after another."""
    if whole is None:
        return None
    cluster, step = task.cluster, task.source.whole
    flops = program_flops(step.program) / cluster.num_devices
    work_s, each_s = max(min_work_s(cluster, flops), task.log.work_s), launch_s(cluster)
    min_s = work_s + _FEWEST_LAUNCHES * each_s
    if not whole.plan.solver.unbounded and not whole.plan.remat:
        numbers = _possible_numbers(task)
        min_s = min(work_s * (1 + 1 / n) + 2 * (n + 1) * each_s for n in numbers)
    is_slow = whole.plan.estimated_step_s > min_s
    return None if is_slow else f"it would take {min_s:.3g} s at least"


def _possible_numbers(task: AutoTask) -> list[int]:
    """Numbers of micro-batches, roughly."""
    if not task.number_is_free:
        return [int(task.method.num_micro_batches)]
    shapes = [task.source.whole.avals[i].shape for i in task.source.whole.batch]
    rows = max((shape[0] for shape in shapes if shape), default=1)
    return [2**k for k in range(rows.bit_length())]


def _with_notes(
    planned: PlannedStep,
    whole_s: float,
    search: SearchReport | None = None,
    note: str | None = None,
) -> PlannedStep:
    """The plan with what was considered beside it. `note`: what came of pipelines."""
    search = planned.plan.search or search or SearchReport(0, 0, 0, 0)
    notes = search.notes if note is None else (*search.notes, f"Pipelines were {note}.")
    intra_only_s = None if whole_s == inf else whole_s
    search = replace(search, intra_only_s=intra_only_s, notes=notes)
    return replace(planned, plan=replace(planned.plan, search=search))

"""The default method: the best of plans on one mesh and pipelines, by predicted step time.

A pipeline is searched unless it cannot win: no step is faster than its products at full speed on
all devices, and every stage starts its stage programs for every micro-batch. Micro-batches are used
only where they change nothing: a step with statistics over the batch keeps its batch whole.

If no way to plan a step leads to a plan (`auto_task.Outcomes`), the error says what was tried; a
step whose state alone is too large has it at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf

from autopar.cost.measured import min_work_s
from autopar.errors import MemoryBudgetError, TraceError
from autopar.ir.failures import first_line, planning_failed
from autopar.ir.stages import SearchReport
from autopar.ir.traced_step import TracedStep
from autopar.ir.xla_options import may_schedule_otherwise
from autopar.lower.planned_step import PlannedStep
from autopar.sharding.deadline import Deadline
from autopar.sharding.plan_whole import WholeStep, plan_smallest
from autopar.sharding.tried import (
    MICRO_BATCHES,
    PIPELINES,
    cut_refusal,
    why_not_cut,
    with_failures,
)
from autopar.stages.auto_task import (
    WORTH_SOLVING,
    AutoTask,
    MicroBatchTries,
    Outcomes,
    bytes_without_recomputation,
    least_bytes,
    may_fit,
    most_gained,
    one_mesh_s,
    recomputed_s,
)
from autopar.stages.choose_stages import device_budget
from autopar.stages.expected_work import LOOP
from autopar.stages.looped import batch_rows, first_micro_batches, launch_s
from autopar.stages.table_maker import loop_graph

# Stage programs that the shortest pipeline starts one after another: two stages, two micro-batches.
_FEWEST_LAUNCHES = 6
# The time that the next way to plan a step takes, relative to all before it; a guess.
_NEXT_WAY = 0.25
# Of the time, for a first plan on one mesh: of a step that scans its layers, and of one for which
# pipelines can gain no more than this.
_EARLY, _EARLY_PROMISING = 0.2, 0.5
_LITTLE = 0.2
# Of the time, for pipelines of a step that fits on no mesh, but may in XLA's other schedule.
_FIRST_SCHEDULE = 0.5


def plan_automatically(task: AutoTask, *, one_mesh: bool = False) -> PlannedStep:
    """`one_mesh`: consider no pipelines."""
    outcomes = Outcomes(task)
    is_first = not task.log.is_begun
    with task.log.limited(task.method.options):
        whole = task.whole(in_full=True)
        if whole.hopeless is not None:
            return plan_smallest(whole)
        if task.log.deadline.is_over and not is_first:
            return _at_last(task, whole)
        planned = _best_planned(task, outcomes, one_mesh) or _smallest(task, outcomes)
        return task.log.stopped(planned)


def _is_first_schedule(task: AutoTask) -> bool:
    """Whether a step that does not fit is planned once more, in XLA's other schedule."""
    return may_schedule_otherwise(task.cluster, task.method.options.xla_options)


def _has_time(task: AutoTask, what: str) -> bool:
    """Whether there is time for another way to plan the step; if not, the plan says what it was."""
    deadline = task.log.deadline
    if deadline.allows(_NEXT_WAY * deadline.elapsed_s):
        return True
    deadline.cut(what)
    return False


def _best_planned(task: AutoTask, outcomes: Outcomes, one_mesh: bool) -> PlannedStep | None:
    if task.cluster.num_devices == 1:
        outcomes.tried[PIPELINES] = "not tried: there is one device"
        return _or_cut(task, outcomes, outcomes.on_one_mesh())
    if one_mesh:
        outcomes.tried[PIPELINES] = "not tried: one mesh was asked for"
        return _fitted_on_one_mesh(task, outcomes)
    reason = None
    if not _fits_easily(task):
        reason = _why_whole_batch(task)
        if reason is None:
            return _pipeline_first(task, outcomes)
    return _one_mesh_first(task, outcomes, reason)


def _one_mesh_first(task: AutoTask, outcomes: Outcomes, reason: str | None) -> PlannedStep | None:
    """Plan on one mesh, with a cut batch if the whole one does not fit, and search a pipeline if it
    can be faster. `reason`: why it cannot be searched, if that is known."""
    whole = outcomes.on_one_mesh()
    is_too_large = whole is None and outcomes.misfit is not None
    if whole is not None or is_too_large:
        whole = _or_cut(task, outcomes, whole)
    whole_s = inf if whole is None else whole.plan.estimated_step_s
    reason = reason or _why_too_slow(task, whole)
    pipeline = None
    if reason is None and whole is not None and not _has_time(task, "pipelines"):
        reason = "there was no time left"
    reason = reason or _why_whole_batch(task)
    if reason is None:
        is_only = whole is not None or not _is_first_schedule(task)
        with nullcontext() if is_only else task.log.sharing(_FIRST_SCHEDULE):
            pipeline = outcomes.as_pipeline()
    else:
        outcomes.tried[PIPELINES] = f"not tried: {reason}"
    if pipeline is not None and pipeline.plan.estimated_step_s < whole_s:
        if pipeline.plan.num_stages == 1:
            return _or_on_one_mesh(task, outcomes, pipeline, whole)
        return _with_notes(pipeline, whole_s)
    note = outcomes.tried.get(PIPELINES)
    if whole is None and not is_too_large:
        whole = _or_cut(task, outcomes, None)
    if whole is None:
        return None
    search = None if pipeline is None else pipeline.plan.search
    return _with_notes(whole, whole_s, search, note)


def _pipeline_first(task: AutoTask, outcomes: Outcomes) -> PlannedStep | None:
    """Tables know plans on one mesh too, as pipelines of one stage; where these are far behind,
    none with as many micro-batches is solved. Tables say little of fewer: these have more rows to
    split over the devices, and gather parameters less often."""
    deadline = task.log.deadline
    begun_s = deadline.elapsed_s
    early = _early_on_one_mesh(task, outcomes)
    early_s = deadline.elapsed_s - begun_s
    if early is not None and not _has_time(task, "pipelines"):
        outcomes.tried[PIPELINES] = "not tried: there was no time left"
        return _with_notes(early, early.plan.estimated_step_s, note=outcomes.tried[PIPELINES])
    pipeline = outcomes.as_pipeline()
    if pipeline is None:
        planned = early
        if early is None:
            planned = _fitted_on_one_mesh(task, outcomes)
        elif early.plan.solver.stopped is not None and deadline.allows(early_s):  # other meshes
            number, cutoff = early.plan.num_micro_batches, early.plan.estimated_step_s
            planned = _faster(early, outcomes.on_one_mesh(number, cutoff))
        if planned is None and outcomes.is_left:
            return outcomes.as_pipeline(may_leave=False)
        if planned is None:
            return None
        note = outcomes.tried[PIPELINES]
        return _with_notes(planned, planned.plan.estimated_step_s, note=note)
    return _or_on_one_mesh(task, outcomes, pipeline, early)


def _or_on_one_mesh(
    task: AutoTask, outcomes: Outcomes, pipeline: PlannedStep, known: PlannedStep | None
) -> PlannedStep:
    """The best of a pipeline and plans on one mesh, of which one may be known. A pipeline of one
    stage gives way to one program on that mesh, unless that is clearly slower: short of memory, two
    programs per micro-batch may have it easier. Where it did so already (`Outcomes.found`), the
    pipeline given is that plan."""
    plan, pipeline_s = pipeline.plan, pipeline.plan.estimated_step_s
    numbers = _numbers_on_one_mesh(task, pipeline)
    if not numbers and known is None:
        return pipeline
    gives_way = plan.is_pipeline and plan.num_stages == 1
    gives_way = gives_way and (task.cluster.num_hosts > 1 or _has_time(task, "one mesh"))
    for found in outcomes.found.values():
        known = _faster(known, found)
    best = _faster(None if gives_way else pipeline, known)
    whole_s = inf if known is None else known.plan.estimated_step_s
    for number in numbers:
        is_known = known is not None and number == known.plan.num_micro_batches
        if is_known or number in outcomes.found:
            continue
        if best is not None and not _is_worth_a_try(task, number, best.plan.estimated_step_s):
            continue
        cutoff = pipeline_s * (WORTH_SOLVING if best is None else 1.0)
        whole = outcomes.on_one_mesh(number, cutoff)
        if whole is None:
            continue
        whole_s = min(whole_s, whole.plan.estimated_step_s)
        if best is None or whole.plan.estimated_step_s < best.plan.estimated_step_s:
            best = whole
        elif whole.plan.remat:
            break  # with fewer micro-batches, even more is recomputed
    if best is None or best.plan.estimated_step_s > WORTH_SOLVING * pipeline_s:
        best = pipeline
    return _with_notes(best, whole_s, plan.search)


def _is_worth_a_try(task: AutoTask, number: int, best_s: float) -> bool:
    """Whether a plan on one mesh may take less than the best. If time is short, it must promise
    to."""
    work_s = task.log.work_s or task.log.ideal_s
    if recomputed_s(task, number, work_s) >= best_s:
        return False
    what = f"one mesh, {number} micro-batches"
    if task.log.deadline.is_short and one_mesh_s(task, number, work_s) >= best_s:
        task.log.deadline.cut(what)
        return False
    return _has_time(task, what)


def _faster(one: PlannedStep | None, other: PlannedStep | None) -> PlannedStep | None:
    there = [planned for planned in (one, other) if planned is not None]
    return min(there, key=lambda planned: planned.plan.estimated_step_s, default=None)


def _early_on_one_mesh(task: AutoTask, outcomes: Outcomes) -> PlannedStep | None:
    """A plan on one mesh with the fewest micro-batches that fit, or more where memory costs time,
    in a share of the time. It is there if pipelines take too long, and rules out those that promise
    less. A step that scans its layers is short as one program and long as a pipeline, whose layers
    are written out, so such a plan costs little. Of other steps it is made where pipelines have
    little to gain."""
    if not task.number_is_free:
        return None
    is_scanned = any(layer.trips > 1 for layer in task.layers or ())
    is_promising = most_gained(task) <= _LITTLE
    if is_promising and not is_scanned:  # by what it takes in memory too, which pipelines ask for
        try:
            step = _as_loop(task, _first_number(task))
            loop_graph(step, task.method.options, task.cluster, task.log)
        except Exception as error:
            task.log.contain("the memory of micro-batches", error)
        is_promising = most_gained(task) <= _LITTLE
    if not is_scanned and not is_promising:
        return None
    whole = task.log.deadline
    with task.log.sharing(_EARLY_PROMISING if is_promising else _EARLY):
        return _fastest_cut(task, _early_plans(task, outcomes, whole))


def _early_plans(task: AutoTask, outcomes: Outcomes, whole: Deadline) -> Iterator[PlannedStep]:
    """Plans on one mesh that fit, with more and more micro-batches, until their share of the whole
    time is up and pipelines have some left. Those with nothing left out are not made again."""
    tries = MicroBatchTries(task)
    for number in task.numbers:
        if not may_fit(task, number) or tries.is_too_large(number):
            continue
        planned = tries.plan(number)
        if planned is not None:
            if planned.plan.solver.stopped is None:
                outcomes.found[number] = planned
            yield planned
        if whole.allows() and not task.log.deadline.allows():
            return


def _numbers_on_one_mesh(task: AutoTask, pipeline: PlannedStep) -> list[int]:
    """Numbers of micro-batches for which a plan on one mesh may beat this pipeline, its own number
    first. A pipeline of one stage is such a plan already, and each number deserves a try."""
    plan = pipeline.plan
    one_s = None if plan.search is None else plan.search.intra_only_s
    one_s = inf if one_s is None else one_s  # on one mesh, not even micro-batches fit
    one_s -= 2 * plan.num_micro_batches * launch_s(task.cluster)  # a loop in one program
    numbers = set()
    is_one_stage = plan.num_stages == 1
    if is_one_stage or (plan.num_stages > 1 and one_s <= WORTH_SOLVING * plan.estimated_step_s):
        numbers.add(int(plan.num_micro_batches))
    if task.number_is_free:
        fewest = next((n for n in task.numbers if may_fit(task, n)), None)
        if fewest is not None and (fewest == 1 or fewest < plan.num_micro_batches):
            numbers.add(fewest)
            if is_one_stage:
                numbers.update(n for n in task.numbers if fewest < n < plan.num_micro_batches)
    return sorted(numbers, reverse=True)


# -- one mesh


def _fitted_on_one_mesh(task: AutoTask, outcomes: Outcomes) -> PlannedStep | None:
    """A plan of the whole batch, or of one that is cut. Where time is short, what is not likely to
    fit is not tried first; what is known not to fit is not tried at all."""
    if task.number_is_free:
        if least_bytes(task, 1) > task.budget_bytes:
            return _or_cut(task, outcomes, None)
        if task.log.deadline.is_short and not may_fit(task):
            best = _or_cut(task, outcomes, None)
            is_over = task.log.deadline.is_over
            return outcomes.on_one_mesh() if best is None and not is_over else best
    return _or_cut(task, outcomes, outcomes.on_one_mesh())


def _or_cut(task: AutoTask, outcomes: Outcomes, best: PlannedStep | None) -> PlannedStep | None:
    """This plan of the whole batch if it recomputes nothing; else the fastest of it and of plans
    that cut the batch. A finer cut is tried while memory costs time and the last one gained."""
    if best is not None:
        is_slowed = best.plan.remat or _keeps_scans_for_memory(task, best)
        if not is_slowed or not _has_time(task, "micro-batches"):
            return best
    return _faster(best, _fastest_cut(task, _cut_plans(task, outcomes)))


def _fastest_cut(task: AutoTask, plans: Iterator[PlannedStep]) -> PlannedStep | None:
    """Of plans with more and more micro-batches; another is made while memory costs time and the
    last one gained."""
    best: PlannedStep | None = None
    for planned in plans:
        gained = best is None or planned.plan.estimated_step_s < best.plan.estimated_step_s
        best = planned if gained else best
        is_slowed = bool(planned.plan.remat or planned.plan.solver.unbounded)
        is_slowed = is_slowed or _keeps_scans_for_memory(task, planned)
        if not (is_slowed and gained and _has_time(task, "more micro-batches")):
            break
    return best


def _keeps_scans_for_memory(task: AutoTask, planned: PlannedStep) -> bool:
    return not planned.plan.unrolled and planned.plan.num_micro_batches in task.log.cramped


def _cut_plans(task: AutoTask, outcomes: Outcomes) -> Iterator[PlannedStep]:
    """Plans on one mesh that fit, with more and more micro-batches."""
    if not task.number_is_free:
        number = task.method.num_micro_batches
        given = f"AutoParallel(num_micro_batches={number})"
        outcomes.tried[MICRO_BATCHES] = f"{number} of them, as {given} asks for"
        return
    outcomes.useless.add(MICRO_BATCHES)
    reason = _why_whole_batch(task, on_one_mesh=True)
    if reason is not None:
        outcomes.tried[MICRO_BATCHES] = f"not possible: {reason}"
        return
    numbers, likely = task.numbers[1:], _likely_number(task)
    tried = MicroBatchTries(task)
    numbers = [n for n in numbers if not tried.is_known_too_large(n)] or numbers
    if task.log.deadline.is_short:  # only those that are likely to fit
        while likely is not None:
            planned = tried.plan(likely)
            if planned is not None:
                yield planned
            numbers = [number for number in numbers if number > likely]
            if task.log.deadline.is_over:
                break
            likely = next((n for n in numbers if tried.may_fit_after(likely, n)), None)
    # To see whether any can fit, another program is made: not before one that is likely to.
    is_open = likely not in numbers[:1]
    for index, number in enumerate(numbers):
        is_last = task.log.deadline.is_over
        finest = tried.finest(numbers[index:]) if is_open or is_last else number
        if finest is None:
            break
        if is_last and finest != number:
            task.log.deadline.cut(f"fewer than {finest} micro-batches")
        planned = tried.plan(finest if is_last else number)
        if planned is not None:
            yield planned
        if is_last:
            break
        is_open = not index and not is_open and planned is None
    outcomes.failures += tried.failures
    outcomes.least_cut = tried.likely_smallest(task.numbers[1:])
    outcomes.tried[MICRO_BATCHES] = f"tried: {'; '.join(tried.found.values())}"


# -- what does not fit


def _at_last(task: AutoTask, whole: WholeStep) -> PlannedStep:
    """The one try of a way that is begun when time is up: all layers recomputed, and as many
    micro-batches as the step can have, unless even they are known to be too large. Few steps need
    that, so the whole batch comes first if it is likely to fit."""
    task.log.deadline.cut("all plans but the one that needs the least memory")
    if task.number_is_free and _fits_easily(task):
        planned = Outcomes(task).on_one_mesh()
        if planned is not None:
            return task.log.stopped(planned)
    is_cut = task.number_is_free and _why_whole_batch(task, on_one_mesh=True) is None
    number = MicroBatchTries(task).finest(task.numbers[1:]) if is_cut else None
    finest = whole if number is None else task.whole(number, in_full=True)
    try:
        return task.log.stopped(plan_smallest(finest))
    except MemoryBudgetError as error:
        tried = {PIPELINES: "not tried: there was no time left"}
        if number is not None:
            tried[MICRO_BATCHES] = f"tried: {number} of them; for others there was no time left"
        raise error.having_tried(tried) from error.__cause__


def _smallest(task: AutoTask, outcomes: Outcomes) -> PlannedStep:
    """The plan that takes the least memory, once no other fits; mostly it raises, and explains."""
    name, failures = task.source.whole.name, outcomes.failures
    if failures and outcomes.misfit is None:
        raise planning_failed(name, failures, "no plan on one mesh and no pipeline could be made")
    misfit: MemoryBudgetError | None = None
    for number in dict.fromkeys((None, outcomes.least_cut)):
        if misfit is not None and task.log.deadline.is_over:
            break
        try:
            return plan_smallest(task.whole(number, in_full=True))
        except MemoryBudgetError as error:
            if misfit is None or error.peak_bytes < misfit.peak_bytes:
                misfit = error
        except Exception as error:
            if number is None or cut_refusal(error) is None:  # else: it is known by a bound alone
                failures += task.log.contain("the plan that takes the least memory", error)
    misfit = misfit or outcomes.misfit
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
    return bytes_without_recomputation(task, layers) <= room


# -- reasons


def _likely_number(task: AutoTask) -> int | None:
    """The fewest micro-batches, two at least, that are likely to fit on one mesh."""
    return next((number for number in task.numbers[1:] if may_fit(task, number)), None)


def _first_number(task: AutoTask) -> int:
    """The number of micro-batches at which pipelines are searched first."""
    budget = device_budget(task.method.options, task.cluster)
    return first_micro_batches(task.source.whole, task.cluster, budget)


def _why_whole_batch(task: AutoTask, *, on_one_mesh: bool = False) -> str | None:
    """Why the batch cannot be cut; None if it can be. It is cut into as many micro-batches as are
    planned first, on one mesh or as a pipeline."""
    asked = task.method.num_micro_batches
    step = task.source.whole
    try:
        rows = batch_rows(step)
    except TraceError as error:
        return first_line(error)
    if asked == "auto" and rows == 1:
        return "the batch has one row"
    number = _likely_number(task) if on_one_mesh else None
    cut = partial(_as_loop, task)
    if asked != "auto":
        number = int(asked)
    elif number is not None:
        cut = partial(task.source.with_recomputation, ())
    else:
        number = _first_number(task)
    reason = why_not_cut(cut, number, task.log)
    if reason is not None or asked != "auto":
        return reason
    notes = cut(number).notes
    return f"micro-batches would change results: {notes[0]}" if notes else None


def _as_loop(task: AutoTask, number: int) -> TracedStep:
    with task.log.timed("trace"), task.log.measured(LOOP):
        return task.source.as_loop(number)


def _why_too_slow(task: AutoTask, whole: PlannedStep | None) -> str | None:
    """Why no pipeline can beat a plan on one mesh; None if one may. No step is faster than its
    operators at full speed on all devices. Where memory is no reason for micro-batches, a pipeline
    has two stages or more: with n micro-batches, the second waits for an n-th of the first one's
    work, and the two start 2 · (n + 1) stage programs one after another."""
    if whole is None:
        return None
    cluster = task.cluster
    work_s = max(min_work_s(cluster, task.flops / cluster.num_devices), task.log.work_s)
    each_s = launch_s(cluster)
    min_s = work_s + _FEWEST_LAUNCHES * each_s
    has_room = whole.plan.num_micro_batches == 1 and not whole.plan.remat
    if has_room and not whole.plan.solver.unbounded:
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
    return [2**k for k in range(max(1, rows.bit_length()))]


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

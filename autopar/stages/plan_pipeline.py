"""Inter-operator planning: from a step's source to a pipeline.

loop     StepSource, micro-batches → a step with a loop       (rewrite.accumulate)
layers   its body → layers, and every equation's layer        (rewrite.layers, attach_layers)
tables   Graph, submeshes → costs of every layer              (stages.layer_tables)
search   tables → stages on submeshes                         (stages.stage_search)
solve    stages → a plan per stage, and the pipeline's plan   (stages.solve_pipeline)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from autopar.errors import ArgumentError, MemoryBudgetError, SolverError, TraceError
from autopar.ir.failures import Failure, planning_failed
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import PipelineChoice, SearchReport, StageChoice, Submesh
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    AutoLayers,
    AutoStages,
    ManualLayers,
    ManualStages,
    PipeshardParallel,
    UniformStages,
)
from autopar.rewrite.step_source import StepSource
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.tried import (
    MICRO_BATCHES,
    PIPELINES,
    RECOMPUTATION,
    why_not_cut,
    with_failures,
)
from autopar.stages.calibrate import MOST_ROUNDS, calibrated
from autopar.stages.choose_stages import (
    StageSearch,
    at_another,
    check_state_fits,
    choose_stages,
    device_budget,
    nothing_fits,
    search_within,
    with_another,
)
from autopar.stages.expected_work import (
    LOOP,
    PIPELINE,
    loop_s,
    search_again_s,
    solving_s,
)
from autopar.stages.looped import (
    LoopedStep,
    StageSpec,
    batch_rows,
    even_ranges,
    find_looped,
    first_micro_batches,
    halved,
)
from autopar.stages.manual_stages import check_layer_ids
from autopar.stages.pipeline_task import PipelineTask
from autopar.stages.solve_pipeline import solve_pipeline
from autopar.stages.submeshes import uniform_submesh

# Another number of micro-batches that promises so much less is solved without tables of its own.
_CLEARLY_LESS = 0.85
# A second search takes no less than this of all the time before it.
_AGAIN, _AGAIN_ON_FEW = 0.75, 0.25  # the latter if it looks at the submeshes of one plan only
_MOST_LESSONS = 3  # searches that are repeated because a stage did not fit
_NEWS = 1.001  # an excess this much over the one known is worth another search


def plan_pipeline(
    source: StepSource,
    method: PipeshardParallel,
    cluster: ClusterSpec,
    log: PlanningLog,
    *,
    to_the_end: bool = True,
    leaves: Callable[[float], bool] = lambda _: False,
    then_s: Callable[[float], float] = lambda _: 0.0,
    on_one_mesh: Callable[[int, float], PlannedStep | None] | None = None,
) -> PlannedStep:
    """A pipeline as a method asks for it. `to_the_end`, `leaves`, `then_s` and `on_one_mesh` as in
    `PipelineTask`."""
    task = PipelineTask(
        method,
        cluster,
        log,
        to_the_end=to_the_end,
        leaves=leaves,
        then_s=then_s,
        on_one_mesh=on_one_mesh,
    )
    with log.limited(method.options):
        return log.stopped(_plan_pipeline(source, task))


def _plan_pipeline(source: StepSource, task: PipelineTask) -> PlannedStep:
    method = task.method
    if not isinstance(method.stages, AutoStages) and method.num_micro_batches == "auto":
        raise ArgumentError(
            "PipeshardParallel(num_micro_batches='auto'): needs stages=AutoStages(), which "
            "searches it. Give a number with stages that are given."
        )
    try:
        if isinstance(method.stages, AutoStages):
            return _searched(source, task)
        return _given(source, task, int(method.num_micro_batches))
    except MemoryBudgetError as error:
        raise _explained(error, source, task) from error.__cause__


def _looped(
    source: StepSource,
    number: int,
    layers: AutoLayers | ManualLayers,
    log: PlanningLog,
    at_least: int = 1,
) -> LoopedStep:
    with log.timed("trace"), log.measured(LOOP):
        step = source.as_loop(number)
    with log.timed("layers"):
        looped = find_looped(step, layers, at_least)
    if not looped.layers:
        raise _no_layers(looped)
    return looped


def _no_layers(looped: LoopedStep) -> TraceError:
    loops = [equation for equation in looped.body.equations if equation.bodies]
    why = "nothing in it computes with the batch"
    if loops:
        largest = max(loops, key=lambda equation: equation.num_equations())
        why = f"all that could be cut is inside of a {largest.name} ({largest.source_line})"
    return TraceError(
        f"{looped.step.name}: a pipeline cuts the forward pass into layers, and there is none: "
        f"{why}. Use ShardParallel or AutoParallel."
    )


# -- stages that the user gives


def _given(source: StepSource, task: PipelineTask, number: int) -> PlannedStep:
    method, log = task.method, task.log
    if isinstance(method.stages, UniformStages):
        count = method.stages.num_stages
        looped = _looped(source, number, method.layers, log, count)
        specs = _uniform(count, looped, task)
    else:
        assert isinstance(method.stages, ManualStages)
        layers = method.layers
        if layers == AutoLayers():
            layers = AutoLayers(sum(map(len, method.stages.layer_ids)))
        looped = _looped(source, number, layers, log)
        specs = _manual(method.stages, looped)
    if method.options.remat == "all":
        specs = [replace(spec, remat=True) for spec in specs]
    return solve_pipeline(task, looped, specs)


def _manual(stages: ManualStages, looped: LoopedStep) -> list[StageSpec]:
    check_layer_ids(stages.layer_ids, len(looped.layers))
    shapes = stages.mesh_shapes or (None,) * len(stages.submeshes)
    ends = [0, *np.cumsum([len(ids) for ids in stages.layer_ids]).tolist()]
    return [
        StageSpec(layers, submesh, shape)
        for layers, submesh, shape in zip(pairwise(ends), stages.submeshes, shapes, strict=True)
    ]


def _uniform(num_stages: int, looped: LoopedStep, task: PipelineTask) -> list[StageSpec]:
    num_layers = len(looped.layers)
    if num_stages > num_layers:
        raise ArgumentError(
            f"UniformStages(num_stages={num_stages}): every stage needs a layer, and there are "
            f"{num_layers}. Ask for {num_layers} stages or fewer, or for more layers with "
            "layers=AutoLayers(…)."
        )
    num_meshes = num_stages
    if task.method.schedule == "interleaved_1f1b":
        if num_stages % 2:
            raise ArgumentError(
                f"UniformStages(num_stages={num_stages}): schedule='interleaved_1f1b' runs two "
                "stages on every submesh, so it needs an even number of them. Ask for "
                f"{num_stages + 1}, or use schedule='1f1b'."
            )
        num_meshes = num_stages // 2
    submesh = uniform_submesh(num_meshes, task.cluster)
    ranges = even_ranges([layer.flops for layer in looped.layers], num_stages)
    return task.alike(looped, [StageSpec(layers, submesh) for layers in ranges])


# -- stages that are searched


def _searched(source: StepSource, task: PipelineTask) -> PlannedStep:
    """The best pipeline by tables, its stages solved exactly. Where the number of micro-batches is
    free, tables made at a first number tell which other to search at."""
    method, cluster, log = task.method, task.cluster, task.log
    is_free = method.num_micro_batches == "auto"
    check_state_fits(source.whole, method.options, cluster)
    if is_free:
        number = first_micro_batches(source.whole, cluster, device_budget(method.options, cluster))
    else:
        number = int(method.num_micro_batches)
    looped = _looped(source, number, method.layers, log)
    search = choose_stages(
        looped, method, cluster, log, to_the_end=task.to_the_end, splits_stacks=task.splits_stacks
    )
    if search.choice is not None and task.leaves(search.choice.step_s):
        search = with_another(looped, search, log) if is_free else search
        if search.another is None or task.leaves(search.another.step_s):
            log.deadline.cut("pipelines")
            raise _no_time(looped)
    excess: dict[Submesh, float] = {}
    if is_free:
        search = with_another(looped, _calibrated(task, looped, search, excess, 1), log)
        looped, search = _at_better_number(source, task, looped, search, excess)
    rows = batch_rows(looped.step)
    if search.choice is None and is_free and rows % 2 == 0:  # the smallest that can be split
        smallest = _looped_near(source, task, rows // 2, looped.step.num_micro_batches)
        again = None if smallest is None else _search_again(smallest, task, excess)
        if smallest is not None and again is not None:
            looped, search = smallest, again
    if search.choice is None:
        raise nothing_fits(looped, search.report, method.options, cluster)
    if log.has_plan and not task.to_the_end and not _has_time(task, "pipelines", solving_s(log)):
        raise _no_time(looped)
    planned, search = _fitted(task, looped, search, excess)
    if is_free and _recomputes_more(planned.plan, search.report):
        planned = _with_smaller(source, task, planned, search, excess)
    return _with_skipped(planned, log)


def _no_time(looped: LoopedStep) -> SolverError:
    return SolverError(
        f"{looped.step.name}: there was no time left to solve a pipeline. Allow more with "
        "ShardingOptions(planning_time_s=…)."
    )


def _fitted(
    task: PipelineTask, looped: LoopedStep, search: StageSearch, excess: dict[Submesh, float]
) -> tuple[PlannedStep, StageSearch]:
    """The best pipeline, solved, and the search that found it. Where a stage of the best one by
    tables does not fit, the search is repeated with so much less room on its submesh: the next best
    by the old tables mostly has the same fault. Not so past the deadline, if there is a plan or
    another way to one."""
    task.misfits.clear()  # of another number of micro-batches
    plans = {plan.stages: plan for plan in search.report.best}
    misfit: MemoryBudgetError | None = None
    for _ in range(_MOST_LESSONS):
        started = time.monotonic()
        try:
            return _best_solved(task, looped, search.report, until_misfit=True), search
        except MemoryBudgetError as error:
            has_others = task.log.has_plan or not task.to_the_end
            if has_others and not task.log.deadline.allows(time.monotonic() - started):
                raise
            misfit = error
            again = _with_less_room(task, search, excess)
            if again is None:
                break
            search = again
            plans.update((plan.stages, plan) for plan in search.report.best)
    best = tuple(sorted(plans.values(), key=lambda plan: plan.step_s))
    return _best_solved(task, looped, replace(search.report, best=best), misfit), search


def _with_less_room(
    task: PipelineTask, search: StageSearch, excess: dict[Submesh, float]
) -> StageSearch | None:
    """The search, knowing how much more than in tables the stage takes that did not fit last; None
    if that is no news, or leaves nothing."""
    if not task.misfits or search.setting is None:
        return None
    misfit = task.misfits[-1]
    where, submesh = (misfit.spec.layers, misfit.spec.submesh), misfit.spec.submesh
    stages = [s for s in search.report.best[0].stages if (s.layers, s.submesh) == where]
    if not stages:
        return None
    found = misfit.peak_bytes / stages[0].peak_bytes
    if found <= search.excess.get(submesh, 1.0) * _NEWS:
        return None
    excess[submesh] = found
    again = search_within(search, excess, task.log)
    return None if again.choice is None else again


def _calibrated(
    task: PipelineTask,
    looped: LoopedStep,
    search: StageSearch,
    excess: dict[Submesh, float],
    rounds: int = MOST_ROUNDS,
) -> StageSearch:
    """The search with what is found of its stages' memory; as it is, if autopar fails in that, or
    if nothing would fit: a stage may still save memory at a price."""
    try:
        found = calibrated(task, looped, search, excess, rounds)
    except Exception as error:
        task.log.contain("the memory of single stages", error)
        return search
    return search if found.choice is None else found


def _at_better_number(
    source: StepSource,
    task: PipelineTask,
    looped: LoopedStep,
    search: StageSearch,
    excess: dict[Submesh, float],
) -> tuple[LoopedStep, StageSearch]:
    """Search once more at the number of micro-batches that promises to be better. Where there is no
    time for tables at that number, and it promises clearly more, the stages are taken that the
    tables at hand promise there."""
    if search.another is None:
        return looped, search
    number = search.another.num_micro_batches
    plans = (*search.report.best[:1], search.another)
    submeshes = {stage.submesh for plan in plans for stage in plan.stages}
    again_s, rest_s = _again_s(task, search, submeshes, _AGAIN)
    what = f"tables of {number} micro-batches"
    in_time = search.choice is None or _has_time(task, what, again_s + rest_s)
    if not in_time and not _promises_enough(task, looped, search):
        return looped, search
    other = _looped_near(source, task, number, looped.step.num_micro_batches)
    if other is None:
        return looped, search
    if not in_time:
        is_as_promised = other.step.num_micro_batches == number
        return (other, at_another(search)) if is_as_promised else (looped, search)
    rows = batch_rows(looped.step) // other.step.num_micro_batches
    has_few_rows = rows < task.cluster.devices_per_host  # of which tables know little
    with task.log.reserving(rest_s):
        again = _search_again(other, task, excess, only=None if has_few_rows else submeshes)
        if again is None:
            return looped, search
        again = _calibrated(task, other, again, excess)
    old, new = search.choice, again.choice
    if old is None or (new is not None and new.step_s < old.step_s):
        return other, again
    return looped, search


def _promises_enough(task: PipelineTask, looped: LoopedStep, search: StageSearch) -> bool:
    """Whether another number of micro-batches promises clearly more, where tables are to be
    trusted, a plan is still to be found, and there is time to trace the step at that number."""
    assert search.choice is not None and search.another is not None
    rows = batch_rows(looped.step) // search.another.num_micro_batches
    if rows < task.cluster.devices_per_host or task.log.has_plan:
        return False
    if not task.log.deadline.allows(loop_s(task.log)):
        return False
    return search.another.step_s <= _CLEARLY_LESS * search.choice.step_s


def _again_s(
    task: PipelineTask, search: StageSearch, submeshes: Collection[Submesh], least: float
) -> tuple[float, float]:
    """What it takes to search these submeshes at another number of micro-batches; and what follows:
    to solve the stages, and to plan on one mesh where that may win. A second number is no reason to
    leave that out."""
    known = {table.submesh for table in search.tables}
    again_s = search_again_s(task.log, len(known & set(submeshes)) / max(1, len(known)))
    rest_s = solving_s(task.log)
    if search.choice is not None:
        rest_s += task.then_s(search.choice.step_s)
    return max(again_s, least * task.log.deadline.elapsed_s - rest_s), rest_s


def _has_time(task: PipelineTask, what: str, expected_s: float) -> bool:
    """Whether there is time for work that takes so long; if not, the plan says what was left
    out."""
    deadline = task.log.deadline
    if deadline.allows(expected_s):
        return True
    deadline.cut(what)
    return False


def _search_again(
    looped: LoopedStep,
    task: PipelineTask,
    excess: Mapping[Submesh, float],
    only: Collection[Submesh] | None = None,
) -> StageSearch | None:
    """A search at another number of micro-batches than the first; None if autopar fails in it."""
    try:
        return choose_stages(
            looped,
            task.method,
            task.cluster,
            task.log,
            only=only,
            excess=excess,
            to_the_end=False,
            splits_stacks=task.splits_stacks,
        )
    except Exception as error:
        number = looped.step.num_micro_batches
        task.log.contain(f"pipelines of {number} micro-batches", error)
        return None


def _looped_near(
    source: StepSource, task: PipelineTask, number: int, known: int
) -> LoopedStep | None:
    """The step in so many micro-batches; if it is not the same program with so few rows, in half
    as many and so on, as long as these are more than the known number. The log keeps the numbers
    that it cannot have, and why."""
    layers, log = task.method.layers, task.log
    while number != known:
        reason = why_not_cut(lambda n: _looped(source, n, layers, log), number, log)
        if reason is None:
            return _looped(source, number, layers, log)
        log.skipped[number] = reason
        if number < known or number % 2 or number // 2 <= known:
            return None
        number //= 2
    return None


def _with_skipped(planned: PlannedStep, log: PlanningLog) -> PlannedStep:
    """The plan with notes on numbers of micro-batches that promised more but cannot be."""
    search = planned.plan.search
    if search is None or not log.skipped:
        return planned
    notes = [f"{n} micro-batches were not searched: {why}." for n, why in log.skipped.items()]
    search = replace(search, notes=(*search.notes, *notes))
    return replace(planned, plan=replace(planned.plan, search=search))


def _best_solved(
    task: PipelineTask,
    looped: LoopedStep,
    report: SearchReport,
    misfit: MemoryBudgetError | None = None,
    *,
    until_misfit: bool = False,
) -> PlannedStep:
    """The best of the tables' plans, solved exactly: the first, and others as long as the tables
    promise more than the best so far, or the caller wants alternatives. `misfit`: the error of one
    that did not fit before; `until_misfit`: raise that of the first one if it does not fit."""
    least = max(1, task.log.num_alternatives)
    best: PlannedStep | None = None
    failures: list[Failure] = []
    solved: list[list[StageSpec]] = []
    checked: list[tuple[float, float]] = []
    took_s, deadline = 0.0, task.log.deadline
    for number, choice in enumerate(report.best):
        is_enough = len(checked) >= least
        best_s = inf if best is None else best.plan.estimated_step_s
        if is_enough and choice.step_s >= best_s:
            break
        if best is not None and not deadline.allows(took_s + task.then_s(best_s)):
            deadline.cut(f"{len(report.best) - number} of the {len(report.best)} best pipelines")
            break
        started = time.monotonic()
        specs = _specs(choice.stages)
        if task.method.schedule == "interleaved_1f1b":
            specs = halved(specs, looped)
        specs = task.alike(looped, specs)
        if any(specs == other for other in solved):
            continue
        if misfit is not None and task.cannot_fit(specs, looped.step.num_micro_batches):
            continue
        solved.append(specs)
        try:
            planned = _instead(task, looped, choice)
            if planned is None:
                with task.log.measured(PIPELINE):
                    planned = task.log.note(solve_pipeline(task, looped, specs, report))
        except MemoryBudgetError as error:
            if until_misfit and best is None:
                raise
            misfit = misfit or error
            continue
        except Exception as error:
            submeshes = [spec.submesh for spec in specs]
            failures += task.log.contain(f"the pipeline on submeshes {submeshes}", error)
            continue
        took_s = time.monotonic() - started
        exact_s = planned.plan.estimated_step_s
        checked.append((choice.step_s, exact_s))
        best = planned if best is None or exact_s < best_s else best
    if best is None and misfit is not None:
        raise with_failures(misfit, failures)
    if best is None:
        raise planning_failed(looped.step.name, failures, "no pipeline could be solved")
    task.log.search = replace(report, checked=tuple(checked))
    return replace(best, plan=replace(best.plan, search=task.log.search))


def _instead(task: PipelineTask, looped: LoopedStep, choice: PipelineChoice) -> PlannedStep | None:
    """A plan on one mesh in place of a pipeline of one stage: one program and not two for every
    micro-batch, and no stage to cut out and solve. None if it recomputes layers where the pipeline
    need not: short of memory, two programs have it easier."""
    if task.on_one_mesh is None or not task.is_one_program(choice.stages):
        return None
    planned = task.on_one_mesh(looped.step.num_micro_batches, choice.step_s)
    if planned is None or (planned.plan.remat and not choice.stages[0].remat):
        return None
    return planned


def _specs(stages: Sequence[StageChoice]) -> list[StageSpec]:
    return [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in stages]


def _recomputes_more(plan: ParallelPlan, report: SearchReport) -> bool:
    """Whether more stages recompute than in the best plan of the tables."""
    meant = sum(stage.remat for stage in report.best[0].stages)
    return sum(stage.remat for stage in plan.stages) > meant


def _with_smaller(
    source: StepSource,
    task: PipelineTask,
    planned: PlannedStep,
    search: StageSearch,
    excess: Mapping[Submesh, float],
) -> PlannedStep:
    """The same submeshes with micro-batches half as large, if that is faster: tables had more room
    than the stages themselves, which had to recompute."""
    count = planned.plan.num_micro_batches
    submeshes = {stage.submesh for stage in planned.plan.stages}
    expected_s = sum(_again_s(task, search, submeshes, _AGAIN_ON_FEW))
    if not _has_time(task, f"{2 * count} micro-batches", expected_s):
        return planned
    looped = _looped_near(source, task, 2 * count, count)
    if looped is None:
        return planned
    again = _search_again(looped, task, excess, only=submeshes)
    if again is None or again.choice is None:
        return planned
    if again.choice.step_s >= planned.plan.estimated_step_s:
        return planned
    try:
        smaller = _best_solved(task, looped, again.report)
    except MemoryBudgetError:
        return planned
    except Exception as error:
        task.log.contain(f"pipelines of {looped.step.num_micro_batches} micro-batches", error)
        return planned
    is_faster = smaller.plan.estimated_step_s < planned.plan.estimated_step_s
    return smaller if is_faster else planned


# -- what does not fit


def _explained(
    error: MemoryBudgetError, source: StepSource, task: PipelineTask
) -> MemoryBudgetError:
    """The error with what was tried, unless it says so itself."""
    if MICRO_BATCHES in error.tried:
        return error
    method, log = task.method, task.log
    useless = set()
    if method.num_micro_batches == "auto":
        batch = "all numbers that divide the batch were ranked by the tables"
        batch += "".join(f"; {n} are not possible: {why}" for n, why in log.skipped.items())
        useless.add(MICRO_BATCHES)
    else:
        given = f"PipeshardParallel(num_micro_batches={method.num_micro_batches})"
        batch = f"{method.num_micro_batches} of them, as {given} asks for"
        if error.num_micro_batches is not None:
            reason = why_not_cut(source.as_loop, error.num_micro_batches, log)
            if reason is not None:
                useless.add(MICRO_BATCHES)
                batch += f"; {error.num_micro_batches} are not possible: {reason}"
    recomputation = {
        "none": 'not tried: ShardingOptions(remat="none")',
        "all": "every stage recomputes its layers",
        "auto": "tried: stages that do not fit recompute their layers",
    }[method.options.remat]
    stages = "searched: stages=AutoStages()"
    if not isinstance(method.stages, AutoStages):
        stages = f"the one that is given: stages={type(method.stages).__name__}(…)"
    tried = {MICRO_BATCHES: batch, RECOMPUTATION: recomputation, PIPELINES: stages}
    return error.having_tried(tried, useless=useless)

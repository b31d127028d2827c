"""The default method: plans on one mesh and pipelines, whichever is predicted to be faster.

A pipeline is searched unless it cannot win: no step is faster than its products at full speed on
all devices, and every stage starts its stage programs for every micro-batch. Micro-batches are only
used where they change nothing: a step with statistics over the batch keeps its batch whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from autopar.cost.measured import least_work_s
from autopar.errors import AutoparError, MemoryBudgetError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import SearchReport
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AutoParallel, PipeshardParallel, ShardParallel
from autopar.rewrite.layers import find_layers
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.sharding.plan_mesh import PassTimer
from autopar.stages.looped import Loop, batch_rows, first_micro_batches, launch_s
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.tracer.costs import aval_bytes, program_flops

# Stage programs that the shortest pipeline starts one after another: two stages, two micro-batches.
_FEWEST_LAUNCHES = 6
# Across hosts, a plan on one mesh is worked out if tables do not put it further behind than this.
_WORTH_SOLVING = 1.05

OneMesh = Callable[[ShardParallel], PlannedStep]


def plan_automatically(
    traced: TracedStep,
    intra: OneMesh,
    loop: Loop,
    method: AutoParallel,
    cluster: ClusterSpec,
    timer: PassTimer,
    one_mesh: bool = False,
) -> PlannedStep:
    """`intra` plans the step on one mesh; `one_mesh`: pipelines are not considered."""
    if cluster.num_devices == 1 or one_mesh:
        return _on_one_mesh(traced, intra, loop, method, cluster)
    reason = None
    whole_may_fit = method.num_micro_batches != "auto" or _may_fit(traced, method, cluster)
    if cluster.num_hosts > 1 or not whole_may_fit:
        reason = _why_not(traced, loop, method, cluster)
        if reason is None:
            return _searched_first(traced, intra, loop, method, cluster, timer, whole_may_fit)
    whole: PlannedStep | None = None
    misfit: MemoryBudgetError | None = None
    try:
        whole = intra(_one_mesh(method))
    except MemoryBudgetError as error:
        misfit = error
    whole_s = inf if whole is None else whole.plan.estimated_step_s
    reason = reason or _why_too_slow(traced, cluster, whole_s)
    reason = reason or _why_not(traced, loop, method, cluster)
    found = None
    if reason is None:
        try:
            found = plan_pipeline(loop, _pipeline(method), cluster, timer)
        except AutoparError as error:
            reason = _first_line(error)
    if found is not None and found.plan.estimated_step_s < whole_s:
        return _noting(found, whole_s)
    if whole is not None:
        return _noting(whole, whole_s, None if found is None else found.plan.search, reason)
    assert misfit is not None
    return _noting(
        _with_micro_batches(traced, intra, loop, method, cluster, misfit), inf, note=reason
    )


def _searched_first(
    traced: TracedStep,
    intra: OneMesh,
    loop: Loop,
    method: AutoParallel,
    cluster: ClusterSpec,
    timer: PassTimer,
    whole_may_fit: bool,
) -> PlannedStep:
    """Tables know plans on one mesh too, as pipelines of one stage; where these are far behind,
    none with micro-batches is worked out. They say little of the whole batch at once, which has
    more rows to split over the devices and gathers parameters once. A pipeline of one stage gives
    way to one program on that mesh, unless that is clearly slower: short of memory, two programs
    per micro-batch may have it easier."""
    try:
        found = plan_pipeline(loop, _pipeline(method), cluster, timer)
    except AutoparError as error:
        planned = _on_one_mesh(traced, intra, loop, method, cluster)
        return _noting(planned, planned.plan.estimated_step_s, note=_first_line(error))
    search = found.plan.search
    one_s = None if search is None else search.intra_only_s
    if one_s is None:  # on one mesh, not even micro-batches fit
        one_s = inf
    one_s -= 2 * found.plan.num_micro_batches * launch_s(cluster)  # a loop in one program
    pipeline_s = found.plan.estimated_step_s
    numbers = set()
    if one_s <= _WORTH_SOLVING * pipeline_s or found.plan.num_stages == 1:
        numbers.add(int(found.plan.num_micro_batches))
    if method.num_micro_batches == "auto" and whole_may_fit:
        numbers.add(1)
    if not numbers:
        return found
    best = found if found.plan.num_stages > 1 else None
    whole_s = inf
    for number in sorted(numbers):
        try:
            whole = intra(replace(_one_mesh(method), num_micro_batches=number))
        except MemoryBudgetError:
            continue
        whole_s = min(whole_s, whole.plan.estimated_step_s)
        if best is None or whole.plan.estimated_step_s < best.plan.estimated_step_s:
            best = whole
    if best is None or best.plan.estimated_step_s > _WORTH_SOLVING * pipeline_s:
        best = found
    return _noting(best, whole_s, search)


def _may_fit(traced: TracedStep, method: AutoParallel, cluster: ClusterSpec) -> bool:
    """Whether the whole batch may fit at once: state, what every layer keeps of it if all layers
    are computed again, and the largest layer, divided evenly. Of what its backward pass reads, a
    third or so has to be in memory (see `rewrite.residuals`)."""
    budget = cluster.spec.memory_bytes * (1 - RESERVE_SHARE)
    if method.options.memory_budget_bytes is not None:
        budget = float(method.options.memory_budget_bytes)
    layers = find_layers(traced.program, batch=traced.batch)
    held = sum(aval_bytes(traced.avals[i]) for i, _ in traced.state)
    held += sum(layer.kept_bytes for layer in layers)
    held += max((layer.residual_bytes / layer.trips for layer in layers), default=0) / 3
    return held / cluster.num_devices <= budget


def _one_mesh(method: AutoParallel) -> ShardParallel:
    asked = method.num_micro_batches
    number = 1 if asked == "auto" else int(asked)
    return ShardParallel(num_micro_batches=number, options=method.options)


def _pipeline(method: AutoParallel) -> PipeshardParallel:
    return PipeshardParallel(method.num_micro_batches, options=method.options)


def _on_one_mesh(
    traced: TracedStep, intra: OneMesh, loop: Loop, method: AutoParallel, cluster: ClusterSpec
) -> PlannedStep:
    try:
        return intra(_one_mesh(method))
    except MemoryBudgetError as error:
        return _with_micro_batches(traced, intra, loop, method, cluster, error)


def _with_micro_batches(
    traced: TracedStep,
    intra: OneMesh,
    loop: Loop,
    method: AutoParallel,
    cluster: ClusterSpec,
    misfit: MemoryBudgetError,
) -> PlannedStep:
    """A plan on one mesh that fits because the batch is cut; else the misfit is raised."""
    if method.num_micro_batches != "auto" or _why_not(traced, loop, method, cluster) is not None:
        raise misfit
    rows = batch_rows(traced)
    number = 2
    while number <= rows and rows % number == 0:
        try:
            return intra(replace(_one_mesh(method), num_micro_batches=number))
        except MemoryBudgetError:
            number *= 2
    raise misfit


def _why_not(
    traced: TracedStep, loop: Loop, method: AutoParallel, cluster: ClusterSpec
) -> str | None:
    """Why the batch is not cut; None if it may be."""
    asked = method.num_micro_batches
    try:
        rows = batch_rows(traced)
        if asked == "auto" and rows == 1:
            return "the batch has one row"
        number = first_micro_batches(traced, cluster) if asked == "auto" else int(asked)
        notes = loop(number).notes
    except AutoparError as error:
        return _first_line(error)
    except Exception as error:  # the user's own: a function that takes the whole batch alone
        return f"it cannot be called with a micro-batch: {_first_line(error)}"
    if notes and asked == "auto":
        return f"micro-batches would change results: {notes[0]}"
    return None


def _why_too_slow(traced: TracedStep, cluster: ClusterSpec, whole_s: float) -> str | None:
    flops = program_flops(traced.program) / cluster.num_devices
    least_s = least_work_s(cluster, flops) + _FEWEST_LAUNCHES * launch_s(cluster)
    return None if whole_s > least_s else f"it would take {least_s:.3g} s at least"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")


def _noting(
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
    plan: Any = replace(planned.plan, search=search)
    return replace(planned, plan=plan)

"""The default method: plans on one mesh and pipelines, whichever is predicted to be faster.

A pipeline is searched unless it cannot win: no step is faster than its products at full speed on
all devices, and every stage starts its pieces for every micro-batch. Micro-batches are only used
where they change nothing: a step with statistics over the batch keeps its batch whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from autopar.cost.compute import compute_s
from autopar.errors import AutoparError, MemoryBudgetError
from autopar.inter import Loop, batch_rows, launch_s, plan_pipeline
from autopar.intra import PassTimer, PlannedStep
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import SearchReport
from autopar.methods import AutoParallel, PipeshardParallel, ShardParallel
from autopar.trace.figures import program_flops
from autopar.trace.flatten import TracedStep

# Pieces that the shortest pipeline starts one after another: two stages, two micro-batches.
_FEWEST_LAUNCHES = 6


def plan_automatically(
    traced: TracedStep,
    intra: Callable[[ShardParallel], PlannedStep],
    loop: Loop,
    method: AutoParallel,
    cluster: ClusterSpec,
    timer: PassTimer,
) -> PlannedStep:
    asked = method.num_micro_batches
    number = 1 if asked == "auto" else int(asked)
    whole: PlannedStep | None = None
    misfit: MemoryBudgetError | None = None
    try:
        whole = intra(ShardParallel(num_micro_batches=number, options=method.options))
    except MemoryBudgetError as error:
        misfit = error
    whole_s = inf if whole is None else whole.plan.estimated_step_s
    reason = _why_no_pipeline(traced, loop, method, cluster, whole_s)
    if reason is None:
        pipeline = PipeshardParallel(num_micro_batches=asked, options=method.options)
        try:
            found = plan_pipeline(loop, pipeline, cluster, timer)
        except AutoparError as error:
            reason = str(error).split("\n")[0]
        else:
            if found.plan.estimated_step_s < whole_s:
                return _noting(found, whole_s)
            assert whole is not None
            return _noting(whole, whole_s, found.plan.search)
    if whole is None:
        assert misfit is not None
        smaller = _more_micro_batches(traced, intra, loop, method)
        if smaller is not None:
            return _noting(smaller, inf, note=reason)
        raise misfit
    return _noting(whole, whole_s, note=reason)


def _why_no_pipeline(
    traced: TracedStep, loop: Loop, method: AutoParallel, cluster: ClusterSpec, whole_s: float
) -> str | None:
    """Why no pipeline is searched; None if one is."""
    if cluster.num_devices == 1:
        return "one device"
    device = cluster.spec
    flops = program_flops(traced.program) / cluster.num_devices
    least_s = compute_s(device, flops, 0.0, "bfloat16") + _FEWEST_LAUNCHES * launch_s(cluster)
    if whole_s <= least_s:
        return f"no pipeline can be faster: it takes {least_s:.3g} s at least"
    asked = method.num_micro_batches
    try:
        rows = batch_rows(traced)
        if asked == "auto" and rows == 1:
            return "the batch has one row"
        number = int(asked) if asked != "auto" else _smallest_divisor(rows)
        notes = loop(number).notes
    except AutoparError as error:
        return str(error).split("\n")[0]
    if notes and asked == "auto":
        return f"micro-batches would change results: {notes[0]}"
    return None


def _smallest_divisor(rows: int) -> int:
    return next(n for n in range(2, rows + 1) if rows % n == 0)


def _more_micro_batches(
    traced: TracedStep,
    intra: Callable[[ShardParallel], PlannedStep],
    loop: Loop,
    method: AutoParallel,
) -> PlannedStep | None:
    """A plan on one mesh that fits because the batch is cut; None if none does."""
    if method.num_micro_batches != "auto":
        return None
    try:
        rows = batch_rows(traced)
    except AutoparError:
        return None
    number = 2
    while number <= rows and rows % number == 0:
        try:
            if loop(number).notes:
                return None
            return intra(ShardParallel(num_micro_batches=number, options=method.options))
        except AutoparError:
            number *= 2
    return None


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

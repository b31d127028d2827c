"""The last way to fit a step: state in host memory, as much as is needed.

First all state that only the update reads lies there; if that does not fit, parameters too that are
computed with in a narrower type. If such a plan fits, what fits into the memory that it leaves free
comes back to the device, and the step is planned once more: every byte in host memory takes time in
every step. The faster of the two plans is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from autopar.cost.host_memory import GROUPS_ON_DEVICE
from autopar.errors import MemoryBudgetError
from autopar.ir.plan import ParallelPlan
from autopar.ir.spec import num_shards
from autopar.ir.text import format_bytes
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    AutoParallel,
    CreateStateParallel,
    FollowParallel,
    ShardingOptions,
    ShardParallel,
    options_of,
)
from autopar.rewrite.host_cut import hostable_inputs, hostable_parameters, with_host_state
from autopar.rewrite.step_source import StepSource
from autopar.tracer.costs import aval_bytes

HOST_MEMORY = "host memory"
# Of the memory that a plan leaves free, this share is used for state that comes back; the second
# figure if XLA has refused a plan before, so that the next one fits.
_USED_AGAIN, _USED_CAREFULLY = 0.9, 0.5


@dataclass(frozen=True)
class HostWays:
    """A step that fits on no devices. `plan`: its plan with this state, by input index, in host
    memory; `MemoryBudgetError` if none fits."""

    source: StepSource
    method: object
    plan: Callable[[tuple[int, ...]], PlannedStep]

    @property
    def options(self) -> ShardingOptions:
        return options_of(self.method)  # type: ignore[arg-type]


def plan_with_host_memory(ways: HostWays, error: MemoryBudgetError) -> PlannedStep:
    """The plan of a step that does not fit otherwise; `error` if it does not fit so either."""
    if isinstance(ways.method, (CreateStateParallel, FollowParallel)):
        raise error  # of the train step, which was planned in full
    reason = _why_not(ways)
    if reason is not None:
        raise error.having_tried({HOST_MEMORY: reason}) from error.__cause__
    nearest = error
    for inputs in _choices(ways):
        try:
            planned = ways.plan(inputs)
        except MemoryBudgetError as misfit:
            nearest = _nearer(ways, error, nearest, misfit)
        else:
            return _with_less(ways, planned, inputs)
    raise nearest from error.__cause__


def _choices(ways: HostWays) -> list[tuple[int, ...]]:
    """What to try in host memory: the state that only the update reads; then parameters too."""
    step = ways.source.whole
    state = hostable_inputs(step)
    every = (*state, *hostable_parameters(step))
    return [one for one in dict.fromkeys(_within(ways, some) for some in (state, every)) if one]


def _with_less(ways: HostWays, planned: PlannedStep, every: tuple[int, ...]) -> PlannedStep:
    """The faster of a plan that fits and one with only what it needs in host memory."""
    careful = ways.options.memory_correction is not None
    fewer = _needed(planned, every, _USED_CAREFULLY if careful else _USED_AGAIN)
    if len(fewer) == len(every):
        return planned
    try:
        less = ways.plan(fewer)
    except MemoryBudgetError:
        return planned
    return min(planned, less, key=lambda one: one.plan.estimated_step_s)


def _nearer(
    ways: HostWays, error: MemoryBudgetError, nearest: MemoryBudgetError, misfit: MemoryBudgetError
) -> MemoryBudgetError:
    """Of a step that fits neither way, the error of what came nearest: its figures say how much is
    missing. `error`: without host memory."""
    step = ways.source.whole
    what = "state that can lie there"
    if not hostable_parameters(step):
        what += " (no parameter can: the step computes with them as they are, not by a cast)"
    if misfit.peak_bytes < nearest.peak_bytes:
        before = {way: text for way, text in error.tried.items() if way not in misfit.tried}
        now = f"tried, for all {what}; without it: {_first_line(error)}"
        return misfit.having_tried({**before, HOST_MEMORY: now})
    if nearest is not error:
        return nearest
    return error.having_tried({HOST_MEMORY: f"tried: {_first_line(misfit)}"})


def _first_line(error: MemoryBudgetError) -> str:
    return error.problem.splitlines()[0]


def _why_not(ways: HostWays) -> str | None:
    """Why no state can lie in host memory; None if some can."""
    if ways.options.host_memory == "never":
        return 'not tried: ShardingOptions(host_memory="never")'
    method = ways.method
    if not (method is None or isinstance(method, (AutoParallel, ShardParallel))):
        name = type(method).__name__
        return f"not tried: {name} keeps all state on the devices; AutoParallel() may not"
    step = ways.source.whole
    hostable = (*hostable_inputs(step), *hostable_parameters(step))
    if not hostable:
        return (
            "not possible: no state is read by the update alone, and no parameter only by it and "
            "by a cast to a narrower type"
        )
    cut = with_host_state(step, hostable).host
    assert cut is not None
    if GROUPS_ON_DEVICE * cut.group_bytes >= cut.num_bytes:
        return (
            f"not possible: the update of {format_bytes(cut.group_bytes)} of the "
            f"{format_bytes(cut.num_bytes)} that could lie there cannot be divided"
        )
    if not _within(ways, hostable):
        return f"not possible: no array fits into the {ways.options.host_memory} bytes given"
    return None


def _within(ways: HostWays, inputs: Sequence[int]) -> tuple[int, ...]:
    """Those that fit into the host memory that the user allows, the first ones first. Arrays are
    counted whole: how they will be split is not known."""
    limit, avals = ways.options.host_memory, ways.source.whole.avals
    if isinstance(limit, str):
        return tuple(inputs)
    kept, held = [], 0.0
    for index in inputs:
        size = aval_bytes(avals[index])
        if held + size <= limit:
            kept.append(index)
            held += size
    return tuple(kept)


def _needed(planned: PlannedStep, inputs: Sequence[int], share: float) -> tuple[int, ...]:
    """Those that must stay in host memory for the plan to fit: the last ones, which come back to
    the device first, fill this share of what the plan leaves free. They come in the order of their
    groups, so that what is updated together comes back together; parameters, which are fetched
    twice, come back first."""
    plan, step = planned.plan, planned.traced
    if plan.memory_budget_bytes == inf:
        return tuple(inputs)
    free = share * (plan.memory_budget_bytes - plan.estimated_peak_bytes)
    assert step.host is not None
    kept = sorted(step.host.inputs, key=step.host.parameters.__contains__)
    while kept:
        size = aval_bytes(step.avals[kept[-1]]) / _shards(plan, kept[-1])
        if size > free:
            break
        free -= size
        kept.pop()
    return tuple(sorted(kept)) or tuple(inputs)


def _shards(plan: ParallelPlan, index: int) -> int:
    return num_shards(plan.inputs[index].layout, plan.mesh_shape)

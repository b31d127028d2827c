"""Plans that fit by XLA's own count: from a plan and its compiled bytes to a plan that fits.

    plan → compile → XLA's bytes per mesh ─ within the limit ─▶ done
      ▲                     │ over it
      └── MemoryCorrection ◀┘            at most `MAX_REPLANS` times, then `MemoryBudgetError`

What XLA keeps beside the arguments is predicted; where it keeps more, the ratio is learned and the
step is planned again with predictions that are so much larger. The correction and the figures stay
in the plan, and the plan that fits in the plan cache, so that the next process compiles it at once.

A step that is predicted not to fit may do so after all. It is planned once more with predictions so
much smaller that something fits, and XLA decides. So it is if the smallest plan is predicted not to
fit only by what was learned of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Generic, TypeVar

from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.memory_found import MemoryCorrection, MemoryFound
from autopar.ir.plan import ParallelPlan, item_bytes
from autopar.ir.spec import num_shards
from autopar.ir.text import format_bytes
from autopar.methods import (
    AutoParallel,
    ParallelMethod,
    PipeshardParallel,
    ShardParallel,
)
from autopar.progress import LOGGER

MAX_REPLANS = 3
# Predictions that are this much too large are not believed before XLA has counted.
_MOST_TOO_LARGE = 1.5
_MARGIN = 1.02  # beyond what was learned, so that the next plan is not on the edge again
_LEAST_SHARE = 0.02  # of the limit: less predicted beside the arguments says nothing of ratios
# What a plan that ran out of memory counts for, over the limit.
RAN_OUT = 1.15

Compiled = TypeVar("Compiled")
Refittable = ShardParallel | AutoParallel | PipeshardParallel


def with_correction(
    method: ParallelMethod | None, correction: MemoryCorrection | None
) -> ParallelMethod | None:
    """The method whose plans are predicted with this correction; itself, if it searches none."""
    if correction is None or not (method is None or isinstance(method, Refittable)):
        return method
    method = method or AutoParallel()
    assert isinstance(method, Refittable)
    return replace(method, options=replace(method.options, memory_correction=correction))


def on_devices_only(method: ParallelMethod | None, where: str) -> ParallelMethod | None:
    """The method without state in host memory, for devices that programs of this process alone
    cannot use; `ArgumentError` if the user asks for host memory. `where`: the devices, in words."""
    if not (method is None or isinstance(method, Refittable)):
        return method
    method = method or AutoParallel()
    assert isinstance(method, Refittable)
    asked = method.options.host_memory
    if asked == "never":
        return method
    if asked != "auto":
        raise ArgumentError(
            f"ShardingOptions(host_memory={asked!r}): state can lie in host memory where one "
            f"process has all devices, and this step runs on {where}. Use 'auto' or 'never'."
        )
    return replace(method, options=replace(method.options, host_memory="never"))


def can_refit(method: object) -> bool:
    """Whether plans of a method can be made again for less memory."""
    return method is None or isinstance(method, Refittable)


@dataclass(frozen=True)
class Refit(Generic[Compiled]):
    """How to make a step's plan fit.

    plan_again:  a correction → the plan, compiled; `MemoryBudgetError` if none is predicted to fit.
    bytes_of:    a compiled plan → XLA's peak bytes per device, by mesh.
    plan_of:     a compiled plan → the plan.
    limit_bytes: of a device; None for no limit.
    """

    plan_again: Callable[[MemoryCorrection], Compiled]
    bytes_of: Callable[[Compiled], Sequence[float]]
    plan_of: Callable[[Compiled], ParallelPlan]
    limit_bytes: float | None

    def fitted(
        self, compiled: Compiled, replanned: tuple[str, ...] = ()
    ) -> tuple[Compiled, MemoryFound]:
        """The compiled plan, if it fits by XLA's count, else the first that does. `replanned`: why
        earlier plans were given up. If none fits, the error has the figures of the smallest."""
        smallest: tuple[ParallelPlan, MemoryFound] | None = None
        while True:
            found = MemoryFound(tuple(self.bytes_of(compiled)), self.limit_bytes, replanned)
            if self.limit_bytes is None or found.peak_bytes <= self.limit_bytes:
                return compiled, found
            if smallest is None or found.peak_bytes < smallest[1].peak_bytes:
                smallest = (self.plan_of(compiled), found)
            compiled, replanned = self.again(compiled, found, smallest=smallest)

    def again(
        self,
        compiled: Compiled,
        found: MemoryFound,
        excess: float = 1.0,
        smallest: tuple[ParallelPlan, MemoryFound] | None = None,
    ) -> tuple[Compiled, tuple[str, ...]]:
        """The next plan, compiled, and why the ones before were given up. `excess`: what the plan
        was found to need at run time, over XLA's figure; `smallest`: of the plans so far, with
        what XLA found of it."""
        plan, limit = self.plan_of(compiled), self.limit_bytes
        assert limit is not None
        least, least_found = smallest or (plan, found)
        replanned = (*found.replanned, _why(plan, found, excess))
        if len(replanned) > MAX_REPLANS:
            raise _does_not_fit(least, least_found, replanned, limit, None)
        LOGGER.warning("%s: %s Planning again (%d).", plan.name, replanned[-1], len(replanned))
        correction = learned(plan, [excess * b for b in found.compiled_bytes], limit)
        try:
            return self.plan_again(correction), replanned
        except MemoryBudgetError as error:
            smaller = self._smaller(error, correction, excess * least_found.peak_bytes)
            if smaller is not None:
                return smaller, replanned
            raise _does_not_fit(least, least_found, replanned, limit, error) from error

    def _smaller(
        self, error: MemoryBudgetError, correction: MemoryCorrection, least_bytes: float
    ) -> Compiled | None:
        """The smallest plan, compiled, if a smaller one was found than those that XLA counted. What
        these taught need not hold for it."""
        hope = hopeful(error, correction)
        if hope is None or error.peak_bytes >= least_bytes:
            return None
        try:
            return self.plan_again(hope)
        except MemoryBudgetError:
            return None


def learned(
    plan: ParallelPlan, compiled_bytes: Sequence[float], limit_bytes: float
) -> MemoryCorrection:
    """What a plan's predictions must be multiplied by, beside its arguments, to be XLA's: of the
    mesh where they are furthest below."""
    known = plan.correction or MemoryCorrection()
    plans = [stage.plan or plan for stage in plan.stages]
    of_mesh: dict[int, list[ParallelPlan]] = {}
    for stage, stage_plan in zip(plan.stages, plans, strict=True):
        of_mesh.setdefault(stage.mesh, []).append(stage_plan)
    factor = 0.0
    for mesh, bytes_ in enumerate(compiled_bytes):
        if bytes_ <= limit_bytes:
            continue
        held = sum(map(argument_bytes, of_mesh[mesh]))
        predicted = sum(p.estimated_peak_bytes for p in of_mesh[mesh]) - held
        beside = max(predicted, _LEAST_SHARE * limit_bytes)
        factor = max(factor, (bytes_ - held) / beside)
    factor = max(factor, 1.0) * _MARGIN
    if plan.is_pipeline:  # stages that recompute and stages that do not
        return MemoryCorrection(factor * known.kept, factor * known.recomputed)
    return known.times(factor, bool(plan.remat))


def hopeful(
    error: MemoryBudgetError, known: MemoryCorrection | None = None
) -> MemoryCorrection | None:
    """The correction with which a step that was predicted not to fit, with one that is known, is
    planned once more, to be judged by XLA; None if it is too large by far."""
    peak, budget, arguments = error.peak_bytes, error.budget_bytes, error.argument_bytes
    if not arguments < budget < peak <= _MOST_TOO_LARGE * budget:
        return None
    factor = (budget - arguments) / (peak - arguments) / _MARGIN
    return (known or MemoryCorrection()).times(factor)


def first_plan(
    plan: Callable[[MemoryCorrection | None], Compiled],
) -> tuple[Compiled, MemoryBudgetError | None]:
    """The plan, and why it was predicted not to fit, if that is left to XLA."""
    try:
        return plan(None), None
    except MemoryBudgetError as error:
        correction = hopeful(error)
        if correction is None:
            raise
        misfit = error
    try:
        return plan(correction), misfit
    except MemoryBudgetError:
        raise misfit from None


def argument_bytes(plan: ParallelPlan) -> float:
    """Bytes of a mesh plan's state and batch on one device, without those in host memory."""
    total = 0.0
    on_host = () if plan.host is None else plan.host.inputs
    for index, tensor in enumerate(plan.inputs):
        if tensor.role and index not in on_host:
            size = prod(tensor.shape) * item_bytes(tensor.dtype)
            total += size / num_shards(tensor.layout, plan.mesh_shape)
    return total


def limit_of(plan: ParallelPlan, given_bytes: float | None, platform: str) -> float | None:
    """What XLA's count must stay within: the user's budget, or the device's. CPUs have no limit of
    their own."""
    if given_bytes is not None:
        return float(given_bytes)
    budget = plan.memory_budget_bytes
    return None if platform == "cpu" or budget == inf else budget


def _why(plan: ParallelPlan, found: MemoryFound, excess: float) -> str:
    said = f"predicted at {format_bytes(plan.estimated_peak_bytes)} per device"
    if excess > 1:
        return f"a plan {said}, {format_bytes(found.peak_bytes)} by XLA, ran out of memory."
    return (
        f"a plan {said} takes {format_bytes(found.peak_bytes)} by XLA, over the limit of "
        f"{format_bytes(found.limit_bytes or 0)}."
    )


def out_of_memory_excess(found: MemoryFound, limit_bytes: float) -> float:
    """`excess` of a plan that ran out of memory although XLA's count was within the limit."""
    return RAN_OUT * max(1.0, limit_bytes / found.peak_bytes)


def _does_not_fit(
    plan: ParallelPlan,
    found: MemoryFound,
    replanned: Sequence[str],
    limit: float,
    error: MemoryBudgetError | None,
) -> MemoryBudgetError:
    """`plan`, `found`: the smallest of the plans, and what XLA found of it."""
    others = [why for why in replanned if why != _why(plan, found, 1.0)]
    tried = {"planned again": " ".join(others)} if others else {}
    nearest = "" if error is None else f" What came nearest: {error.problem.splitlines()[0]}"
    return MemoryBudgetError(
        f"{plan.name}: no plan fits by XLA's count. The smallest was predicted at "
        f"{format_bytes(plan.estimated_peak_bytes)} per device; compiled it takes "
        f"{format_bytes(found.peak_bytes)}, the limit is {format_bytes(limit)}.{nearest}",
        found.peak_bytes,
        limit,
        tried={**tried, **({} if error is None else error.tried)},
        remedies={} if error is None else error.remedies,
    )

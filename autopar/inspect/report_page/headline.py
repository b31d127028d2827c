"""The numbers that a plan is judged by: from a `ParallelPlan` to a `Headline`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.inspect.breakdown import bubble_share, limits_of, num_devices, rates_of
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline


@dataclass(frozen=True)
class Headline:
    """`batch_rows`: leading dimension of the batch; None if arrays disagree. Rates are FLOP/s per
    device, 0 if unknown: of the model, of all computation, and the vendor's peak. `bubble`: the
    share of the step in which devices idle. `limits`: what limits the step, in sentences."""

    num_devices: int
    batch_rows: int | None
    model_rate: float
    computed_rate: float
    peak_rate: float
    bubble: float
    predicted: Timeline
    limits: tuple[str, ...]


def headline_of(plan: ParallelPlan) -> Headline:
    predicted = plan.timeline()
    rates = rates_of(plan)
    rows = {t.shape[0] for t in plan.inputs if t.role == "batch" and t.shape}
    return Headline(
        num_devices=num_devices(plan),
        batch_rows=rows.pop() if len(rows) == 1 else None,
        model_rate=rates.model if rates is not None else 0.0,
        computed_rate=rates.computed if rates is not None else 0.0,
        peak_rate=rates.peak if rates is not None else 0.0,
        bubble=bubble_share(plan) if plan.schedule else 0.0,
        predicted=predicted,
        limits=tuple(limits_of(plan)),
    )

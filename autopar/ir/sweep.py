"""The results of `autopar sweep`: predictions of one step for several sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SweepPoint:
    """One plan of a sweep; figures are predictions, 0 without a plan.

    values:  the varied settings by name, such as `(("devices", 16),)`. Budgets are bytes.
    problem: why there is no usable plan; empty if it fits.
    plan:    a summary: stages, mesh, micro-batches.
    cost:    of a million tokens, or samples where there are no tokens, in the currency of the
             price; 0 without a price.
    seconds: of planning.
    """

    values: tuple[tuple[str, int | float | str], ...]
    num_devices: int
    problem: str = ""
    plan: str = ""
    num_stages: int = 0
    num_micro_batches: int = 0
    step_s: float = 0.0
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_bytes: float = 0.0
    budget_bytes: float = 0.0
    cost: float = 0.0
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def per_s(self) -> float:
        """Tokens per second, or samples where there are no tokens."""
        return self.tokens_per_s or self.samples_per_s

    def value(self, name: str) -> int | float | str:
        return dict(self.values)[name]


@dataclass(frozen=True)
class Sweep:
    """`command`: the command line; `varied`: names of the varied settings, the first along the
    plots' axis; `unit`: "tokens" or "samples", of throughput and cost."""

    command: str
    device: str
    varied: tuple[str, ...]
    unit: str
    price_per_hour: float
    points: tuple[SweepPoint, ...]

    @property
    def fitting(self) -> tuple[SweepPoint, ...]:
        return tuple(point for point in self.points if point.fits)

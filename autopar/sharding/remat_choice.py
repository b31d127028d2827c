"""How many layers to recompute in the backward pass: `remat="auto"`.

Recomputation is part of the program that is sharded, so its time is part of the objective and its
memory of the budget: plans that recompute different layers compare like any two plans. The search
first recomputes nothing. If that does not fit, or fits only at a price, it recomputes as much as
seems needed, parts of layers before whole ones (`sharding.remat_ladder`); if that is not enough,
more, and all in the end. It skips a try if recomputing that much costs more, by flops alone, than
the budget does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autopar.errors import MemoryBudgetError
from autopar.ir.devices import DeviceSpec
from autopar.ir.failures import Failure, planning_failed
from autopar.ir.plan import ParallelPlan
from autopar.lower.planned_step import PlannedStep
from autopar.rewrite.layers import Layer
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.remat_ladder import RematLadder
from autopar.sharding.tried import with_failures

_MAX_TRIES = 3


class RematProblem(Protocol):
    """A step that can be planned with any of its layers recomputed."""

    def layers(self) -> Sequence[Layer]:
        """Those whose recomputation frees memory, in the order of the forward pass."""
        ...

    def plan(
        self,
        layers: Sequence[Layer],
        mesh_shape: tuple[int, ...] | None,
        *,
        in_full: bool,
        every_order: bool = False,
    ) -> PlannedStep:
        """The plan with these layers recomputed, on any mesh if the shape is None. Unless in full,
        it may raise a short `MemoryBudgetError` at once, and look at one order of a mesh's axes
        alone, unless every order is asked for."""
        ...

    def peak_floor(self, budget: float) -> float:
        """Above the budget, a lower bound on the peak of every plan, whatever it recomputes."""
        ...


@dataclass
class _Tries:
    problem: RematProblem
    name: str
    log: PlanningLog
    planned: list[PlannedStep] = field(default_factory=list)
    failed: list[tuple[int, MemoryBudgetError]] = field(default_factory=list)  # rungs
    broken: list[Failure] = field(default_factory=list)  # tries in which autopar failed

    def plan(
        self, ladder: RematLadder, rung: int, mesh_shape: tuple[int, ...] | None
    ) -> ParallelPlan | None:
        layers = ladder.layers_at(rung)
        try:
            self.planned.append(self.problem.plan(layers, mesh_shape, in_full=False))
        except MemoryBudgetError as error:
            self.failed.append((rung, error))
            return None
        except Exception as error:
            what = f"a plan that recomputes {len(layers)} layers"
            self.broken += self.log.contain(what if layers else "a plan on one mesh", error)
            return None
        return self.planned[-1].plan

    def give_up(self, layers: Sequence[Layer], in_full: bool) -> PlannedStep:
        """Raises, unless a plan fits after all once every mesh is looked at."""
        if not self.failed:
            raise planning_failed(self.name, self.broken, "no plan on one mesh could be made")
        if not in_full and not layers:
            raise self.failed[0][1]
        if not in_full and self.log.deadline.is_over:
            raise self.failed[-1][1]
        if not in_full:
            return self.problem.plan(layers, None, in_full=False, every_order=True)
        try:
            return self.problem.plan(layers, None, in_full=True)
        except MemoryBudgetError as error:
            raise with_failures(error, self.broken) from error.__cause__


def choose_remat(
    problem: RematProblem,
    device: DeviceSpec,
    num_devices: int,
    log: PlanningLog | None = None,
    *,
    name: str = "the step",
    in_full: bool = True,
) -> PlannedStep:
    """`name`: the step's, for errors. `in_full`: explain a step that does not fit."""
    tries = _Tries(problem, name, log or PlanningLog())
    started = time.monotonic()
    without = tries.plan(RematLadder(()), 0, None)
    took_s = time.monotonic() - started
    if without is not None and not without.solver.unbounded:
        return tries.planned[0]
    ladder = RematLadder(problem.layers())
    if tries.broken:  # nothing is known of its memory: all or nothing
        if ladder.layers and tries.plan(ladder, ladder.top, None) is not None:
            return tries.planned[0]
        return tries.give_up(ladder.layers, in_full)
    if without is None and not in_full:
        budget = tries.failed[0][1].budget_bytes
        if (floor := problem.peak_floor(budget)) > budget:
            text = f"{name} needs {floor:.0f} bytes per device or more"
            raise MemoryBudgetError(text, floor, budget)
    _climb(tries, ladder, without, took_s, device, num_devices)
    if not tries.planned:
        return tries.give_up(ladder.layers, in_full)
    return min(tries.planned, key=lambda planned: planned.plan.solver.objective)


def _climb(
    tries: _Tries,
    ladder: RematLadder,
    without: ParallelPlan | None,
    took_s: float,
    device: DeviceSpec,
    num_devices: int,
) -> None:
    """Plans that recompute more and more, until one fits. `took_s`: to make the last plan."""
    mesh_shape = without.mesh_shape if without is not None else None
    deadline = tries.log.deadline
    for _ in range(_MAX_TRIES):
        rung = _rung_needed(ladder, without, tries.failed, num_devices)
        what = f"recomputing {len(ladder.layers_at(rung))} layers"
        if tries.failed and deadline.is_over and rung < ladder.top:
            deadline.cut(what)
            rung = ladder.top
        if not rung or (tries.failed and rung <= tries.failed[-1][0]):
            break
        recompute_s = ladder.flops(rung) / num_devices / (device.flops_16bit * device.efficiency)
        if without is not None and (
            without.solver.unbounded[0] + recompute_s >= without.solver.objective
        ):
            break
        if tries.planned and not deadline.allows(took_s):
            deadline.cut(what)
            break
        started = time.monotonic()
        if tries.plan(ladder, rung, mesh_shape) is not None:
            break
        took_s = time.monotonic() - started


def _rung_needed(
    ladder: RematLadder,
    without: ParallelPlan | None,
    failed: Sequence[tuple[int, MemoryBudgetError]],
    num_devices: int,
) -> int:
    """How much to recompute for the rest to fit: by the layers' sizes at first, with activations
    split over all devices, as they nearly always can be; after a failed try, by what that saved."""
    tried = [(rung, error.peak_bytes) for rung, error in failed if rung]
    if without is not None:
        peak, budget = without.solver.unbounded[1], without.memory_budget_bytes
    else:
        peak, budget = failed[0][1].peak_bytes, failed[0][1].budget_bytes
    if not tried:
        micro_batches = without.num_micro_batches if without is not None else 1
        return ladder.rung_that_frees((peak - budget) * num_devices * micro_batches)
    rung, left = tried[-1]
    share = (peak - left) / max(ladder.freed_bytes(rung), 1)  # of what the sizes promise
    if len(tried) > 1 or share <= 0:
        return ladder.top
    needed = ladder.rung_that_frees((peak - budget) / share) + 1
    return min(ladder.top, max(rung + 1, needed))

"""How many layers to compute again in the backward pass: `remat="auto"`.

Recomputation is part of the program that is sharded, so its time is part of the objective and its
memory of the budget: two plans with different layers recomputed are compared as any two plans are.
What is tried: no layer; if that does not fit, or fits only with a sharding that costs more than
the best one, all layers; then as many as the room that all leave says are needed. Layers are taken
from the front: their activations would be kept longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.ir.plan import ParallelPlan
from autopar.trace.layers import Layer

_MAX_TRIES = 2  # between none and all


class _Planned(Protocol):
    @property
    def plan(self) -> ParallelPlan: ...


Planned = TypeVar("Planned", bound=_Planned)


def choose_remat(
    attempt: Callable[[Sequence[Layer], tuple[int, ...] | None], Planned],
    find: Callable[[], Sequence[Layer]],
) -> Planned:
    """`attempt(layers, mesh shape or None for any)` plans with these layers recomputed; `find`
    gives the layers whose recomputation frees memory."""
    found: list[Planned] = []
    errors: list[MemoryBudgetError] = []

    def try_with(layers: Sequence[Layer], mesh: tuple[int, ...] | None = None) -> Planned | None:
        try:
            found.append(attempt(layers, mesh))
        except MemoryBudgetError as error:
            errors.append(error)
            return None
        return found[-1]

    none = try_with(())
    if none is not None and none.plan.solver.sizes.get("memory_rows", 0) == 0:
        return none
    layers = find()
    everything = try_with(layers) if layers else None
    if everything is not None and len(layers) > 1:
        mesh = everything.plan.mesh_shape
        fewest, count = 0, _needed(everything.plan, layers)
        for _ in range(_MAX_TRIES):
            if not fewest < count < len(layers):
                break
            fitting = try_with(layers[:count], mesh)
            if fitting is not None and fitting.plan.solver.sizes.get("memory_rows", 0) == 0:
                break
            fewest, count = count, (count + len(layers) + 1) // 2
    if not found:
        raise min(errors, key=lambda error: error.peak_bytes)
    return min(found, key=lambda planned: planned.plan.solver.objective)


def _needed(plan: ParallelPlan, layers: Sequence[Layer]) -> int:
    """How many layers must be recomputed, by the room that is left when all are. Activations are
    taken to be split over all devices, as they nearly always can be."""
    room = plan.memory_budget_bytes - plan.estimated_peak_bytes
    micro_batches = plan.num_micro_batches
    kept = 0
    for layer in reversed(layers):
        room -= layer.residual_bytes / plan.num_devices / micro_batches
        if room < 0:
            break
        kept += 1
    return len(layers) - kept

"""How many layers to compute again in the backward pass: `remat="auto"`.

Recomputation is part of the program that is sharded, so its time is part of the objective and its
memory of the budget: two plans with different layers recomputed are compared as any two plans are.
No layer is tried first. If that does not fit, or fits only at a price, as many layers are tried as
seem needed; if that is not enough, more, and all in the end. Layers are taken from the front: their
activations would be kept longest. A try is spared if recomputing that much costs more, by flops
alone, than the budget does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.ir.mesh import DeviceSpec
from autopar.ir.plan import ParallelPlan
from autopar.rewrite.layers import Layer

_MAX_TRIES = 3


class _Planned(Protocol):
    @property
    def plan(self) -> ParallelPlan: ...


Planned = TypeVar("Planned", bound=_Planned)


def choose_remat(
    attempt: Callable[[Sequence[Layer], tuple[int, ...] | None, bool], Planned],
    find: Callable[[], Sequence[Layer]],
    device: DeviceSpec,
    num_devices: int,
) -> Planned:
    """`attempt(layers, mesh shape or None for any, in full)` plans with these layers recomputed;
    unless in full, it may fail at once where they cannot fit. `find` gives the layers whose
    recomputation frees memory."""
    found: list[Planned] = []
    failed: list[tuple[int, MemoryBudgetError]] = []  # with how many layers, and why

    def try_with(layers: Sequence[Layer], mesh: tuple[int, ...] | None) -> ParallelPlan | None:
        try:
            found.append(attempt(layers, mesh, False))
        except MemoryBudgetError as error:
            failed.append((len(layers), error))
            return None
        return found[-1].plan

    none = try_with((), None)
    if none is not None and not none.solver.unbounded:
        return found[0]
    layers = find()
    mesh = none.mesh_shape if none is not None else None
    for _ in range(_MAX_TRIES):
        count = _num_needed(layers, none, failed, num_devices)
        if not count or (failed and count <= failed[-1][0]):
            break
        flops = sum(layer.flops for layer in layers[:count])
        again_s = flops / num_devices / (device.flops_16bit * device.efficiency)
        if none is not None and none.solver.unbounded[0] + again_s >= none.solver.objective:
            break
        if try_with(layers[:count], mesh) is not None:
            break
    if not found:
        return attempt(layers, None, True)  # raises, and says everything
    return min(found, key=lambda planned: planned.plan.solver.objective)


def _num_needed(
    layers: Sequence[Layer],
    none: ParallelPlan | None,
    failed: Sequence[tuple[int, MemoryBudgetError]],
    num_devices: int,
) -> int:
    """How many layers must be recomputed for the rest to fit: by their sizes at first, activations
    being split over all devices as they nearly always can be; once some were tried, by what those
    saved."""
    tried = [(count, error.peak_bytes) for count, error in failed if count]
    if none is not None:
        peak, budget = none.solver.unbounded[1], none.memory_budget_bytes
    else:
        peak, budget = failed[0][1].peak_bytes, failed[0][1].budget_bytes
    if tried:
        count, left = tried[-1]
        saved = (peak - left) / count
        if len(tried) > 1 or saved <= 0:
            return len(layers)
        return min(len(layers), max(count + 1, ceil((peak - budget) / saved) + 1))
    excess = peak - budget
    micro_batches = none.num_micro_batches if none is not None else 1
    for count, layer in enumerate(layers, 1):
        excess -= (layer.residual_bytes - layer.kept_bytes) / num_devices / micro_batches
        if excess <= 0:
            return count
    return len(layers)

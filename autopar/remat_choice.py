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
from typing import Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.ir.mesh import DeviceSpec
from autopar.ir.plan import ParallelPlan
from autopar.trace.layers import Layer

_MAX_TRIES = 3


class _Planned(Protocol):
    @property
    def plan(self) -> ParallelPlan: ...


Planned = TypeVar("Planned", bound=_Planned)


def choose_remat(
    attempt: Callable[[Sequence[Layer], tuple[int, ...] | None], Planned],
    find: Callable[[], Sequence[Layer]],
    device: DeviceSpec,
    num_devices: int,
) -> Planned:
    """`attempt(layers, mesh shape or None for any)` plans with these layers recomputed; `find`
    gives the layers whose recomputation frees memory."""
    found: list[Planned] = []
    errors: list[MemoryBudgetError] = []

    def try_with(layers: Sequence[Layer], mesh: tuple[int, ...] | None) -> ParallelPlan | None:
        try:
            found.append(attempt(layers, mesh))
        except MemoryBudgetError as error:
            errors.append(error)
            return None
        return found[-1].plan

    none = try_with((), None)
    if none is not None and not none.solver.unbounded:
        return found[0]
    layers = find()
    count = _num_needed(layers, none, errors, num_devices)
    mesh = none.mesh_shape if none is not None else None
    for _ in range(_MAX_TRIES):
        if not 0 < count <= len(layers):
            break
        flops = sum(layer.flops for layer in layers[:count])
        again_s = flops / num_devices / (device.flops_16bit * device.efficiency)
        if none is not None and none.solver.unbounded[0] + again_s >= none.solver.objective:
            break
        plan = try_with(layers[:count], mesh)
        if count == len(layers) or (plan is not None and not plan.solver.unbounded):
            break
        count = len(layers) if plan is None else min(len(layers), count + max(1, count // 2))
    if not found:
        raise min(errors, key=lambda error: error.peak_bytes)
    return min(found, key=lambda planned: planned.plan.solver.objective)


def _num_needed(
    layers: Sequence[Layer],
    none: ParallelPlan | None,
    errors: Sequence[MemoryBudgetError],
    num_devices: int,
) -> int:
    """How many layers must be recomputed for the rest to fit. Activations are taken to be split
    over all devices, as they nearly always can be."""
    if none is not None:
        excess = none.solver.unbounded[1] - none.memory_budget_bytes
        micro_batches = none.num_micro_batches
    else:
        excess = errors[0].peak_bytes - errors[0].budget_bytes
        micro_batches = 1
    for count, layer in enumerate(layers, 1):
        excess -= (layer.residual_bytes - layer.kept_bytes) / num_devices / micro_batches
        if excess <= 0:
            return count
    return len(layers)

"""The devices that a step names: from a `Program` and the session's devices to the step's.

A `shard_map` or a sharding constraint inside of the step has a mesh of the user's. JAX runs all of
a program on the same devices in the same order, so these are the step's, as under `jax.jit`, even
if the session has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar import _jax
from autopar.errors import MeshError
from autopar.ir.program import Program
from autopar.lower.planned_step import PlannedStep


def devices_for(planned: PlannedStep, devices: Sequence[Any]) -> Sequence[Any]:
    """The devices that a planned step runs on, of those of the session."""
    plan = planned.plan
    given = devices_of_step(plan.name, planned.traced.program, devices)
    if given is None:
        return devices
    if plan.is_pipeline and plan.num_stages > 1:
        raise MeshError(
            f"{plan.name}: a shard_map or sharding constraint in it has a mesh of "
            f"{_text(given)}, but the stages of a pipeline run on fewer devices each. Use "
            "ShardParallel(), which runs the step on one mesh."
        )
    if plan.num_devices != len(given):
        raise MeshError(
            f"{plan.name}: a shard_map or sharding constraint in it has a mesh of "
            f"{_text(given)}, and all of a step runs on the same devices, but the plan is for "
            f"{plan.num_devices}. Use as many in both."
        )
    return given


def devices_of_step(name: str, program: Program, devices: Sequence[Any]) -> tuple[Any, ...] | None:
    """The devices that the step `name` names, in its order; None if it names none."""
    found: tuple[str, tuple[Any, ...]] | None = None
    for equation in program.all_equations():
        given = _jax.given_devices(equation.name, equation.params)
        if given is None:
            continue
        where = f"{equation.name} at {equation.source_line}"
        absent = [d for d in given if d not in set(devices)]
        if absent:
            raise MeshError(
                f"{name}: the {where} has a mesh of {_text(given)}, but {absent[0]} is not among "
                f"the devices of this session, {_text(devices)}. Use those, or choose devices with "
                "autopar.init(devices=…)."
            )
        if found is not None and found[1] != given:
            raise MeshError(
                f"{name}: the {where} has a mesh of {_text(given)}, and the {found[0]} one of "
                f"{_text(found[1])}. A step runs on the same devices throughout, in the same "
                "order: use one mesh."
            )
        found = found or (where, given)
    return None if found is None else found[1]


def _text(devices: Sequence[Any]) -> str:
    numbers = [d.id for d in devices]
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"{len(numbers)} devices ({shown})"

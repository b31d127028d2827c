"""What a plan does, as one text: plans of a program with the same digest run the same.

    ParallelPlan → digest

Figures, names and how the plan was found are left out. Layouts are told by which part of an array
is on which device, so that a plan on a mesh of 2 × 4 that never uses its axes apart is the same as
one on a mesh of 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.ir.plan import ParallelPlan
from autopar.ir.program_sharding import EquationSharding, ProgramSharding
from autopar.ir.spec import WHOLE, Layout


def plan_digest(plan: ParallelPlan) -> str:
    digest = hashlib.sha256()
    for part in _plan(plan):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _plan(plan: ParallelPlan) -> Iterator[Any]:
    yield plan.num_devices, plan.num_micro_batches, plan.schedule, plan.remat
    for stage in plan.stages:
        if stage.plan is None:
            yield from _program(plan.program, plan.mesh_shape)
        else:
            yield stage.layers, stage.devices, stage.mesh, stage.remat
            yield from _plan(stage.plan)
    for tensor in (*plan.inputs, *plan.outputs):
        own = plan.stages[tensor.stages[0]].plan or plan
        yield placement(tensor.layout, own.mesh_shape), tensor.stages


def _program(program: ProgramSharding, shape: Sequence[int]) -> Iterator[Any]:
    yield _chain([x for x in program.inputs if x is not None], shape)
    for equation in program.equations:
        yield from _equation(equation, shape)
    yield [_chain(chain, shape) for chain in program.outputs]


def _equation(equation: EquationSharding, shape: Sequence[int]) -> Iterator[Any]:
    yield [_chain(chain, shape) for chain in equation.operands]
    yield [_chain(chain, shape) for chain in equation.results]
    yield [_chain(chain, shape) for chain in equation.local]
    yield equation.refetched
    if equation.lanes is not None:  # whose axes are told apart
        yield tuple(shape), equation.lanes
    for body in equation.bodies:
        yield from _program(body, shape)


def _chain(chain: Sequence[Layout], shape: Sequence[int]) -> list[Any]:
    return [placement(layout, shape) for layout in chain]


def placement(layout: Layout, shape: Sequence[int]) -> tuple[Any, ...]:
    """(dimension, (stride, size) …) of every dimension that is split, and of partial sums: over
    which devices it goes. Axes that lie one within the other are one."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    found: dict[int, list[tuple[int, int]]] = {}
    for entry, own, size in zip(layout, strides, shape, strict=True):
        if entry == WHOLE or size == 1:
            continue
        runs = found.setdefault(entry, [])
        if runs and runs[-1][0] == own * size:
            runs[-1] = (own, runs[-1][1] * size)
        else:
            runs.append((own, size))
    return tuple(sorted((dim, tuple(runs)) for dim, runs in found.items()))

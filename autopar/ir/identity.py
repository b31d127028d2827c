"""The identity of a plan: plans of one program with equal digests run the same.

    ParallelPlan → digest

Predictions, names and the way the plan was found do not count. Layouts count by the part of an
array on each device, so a plan on a 2 × 4 mesh that never uses its axes separately equals one on a
mesh of 8.
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
        meshes = [(plan.stages[s].plan or plan).mesh_shape for s in tensor.holders()]
        layouts = zip(tensor.held_layouts(), meshes, strict=True)
        yield [placement(*one) for one in layouts], tensor.stages, tensor.split


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
    if equation.lanes is not None:  # lanes depend on the axes
        yield tuple(shape), equation.lanes
    for body in equation.bodies:
        yield from _program(body, shape)


def _chain(chain: Sequence[Layout], shape: Sequence[int]) -> list[Any]:
    return [placement(layout, shape) for layout in chain]


def placement(layout: Layout, shape: Sequence[int]) -> tuple[Any, ...]:
    """(dimension, (stride, size) …) of every split dimension, and of partial sums: the devices that
    it is split over. Adjacent axes are merged."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    runs_by_dim: dict[int, list[tuple[int, int]]] = {}
    for entry, stride, size in zip(layout, strides, shape, strict=True):
        if entry == WHOLE or size == 1:
            continue
        runs = runs_by_dim.setdefault(entry, [])
        if runs and runs[-1][0] == stride * size:
            runs[-1] = (stride, runs[-1][1] * size)
        else:
            runs.append((stride, size))
    return tuple(sorted((dim, tuple(runs)) for dim, runs in runs_by_dim.items()))

"""A step for meshes of other processes, as data: what is lowered, and what each mesh is told.

Buffers of workers hold plain numbers: where a step has random keys, they hold the keys' data.
Devices of a mesh are numbered by their place in it, those of a buffer's own arrangement by `grid`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from autopar.ir.pipeline import MeshProgram, PipelinePrograms, Recv, Send
from autopar.ir.spec import Layout
from autopar.ir.tiles import Box, TilePlan, shard_box


@dataclass(frozen=True)
class ShardedType:
    """An array on a mesh: its type, and how it lies.

    mesh_shape, axis_names: the arrangement of devices that `layout` speaks of.
    grid:                   the mesh's device at each place of the arrangement, row by row.
    """

    shape: tuple[int, ...]
    dtype: Any
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    layout: Layout
    grid: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def boxes(self) -> dict[int, Box]:
        """What each device of the mesh holds."""
        return {
            device: shard_box(self.shape, self.layout, self.mesh_shape, place)
            for place, device in enumerate(self.grid)
        }


@dataclass(frozen=True)
class LoweredProgram:
    """A program of one mesh: a flat function from what it reads to what it writes."""

    name: str
    stage: int
    function: Callable[..., list[Any]]
    reads: tuple[ShardedType, ...]
    writes: tuple[ShardedType, ...]
    donated: tuple[int, ...]


@dataclass(frozen=True)
class RemoteTransfer:
    """A buffer's way from stage to stage; without tiles where both are on one mesh."""

    source: ShardedType
    target: ShardedType
    tiles: TilePlan | None


@dataclass(frozen=True)
class Bound:
    """The buffer of an argument, or of a result, on a mesh. An argument that several meshes read
    has one on each."""

    position: int
    mesh: int
    buffer: int
    held: ShardedType


@dataclass(frozen=True)
class LoweredStep:
    """A step for several meshes.

    meshes:   the cluster's numbers of each mesh's devices.
    donated:  positions of arguments that the step uses up.
    ways:     of the crossings, from which stage to which.
    """

    name: str
    meshes: tuple[tuple[int, ...], ...]
    stage_programs: tuple[LoweredProgram, ...]
    stage_program_mesh: tuple[int, ...]
    programs: PipelinePrograms
    crossings: dict[int, RemoteTransfer]
    stage_mesh: tuple[int, ...]
    arguments: tuple[Bound, ...]
    results: tuple[Bound, ...]
    donated: frozenset[int]
    ways: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramSpec:
    """A stage program as its mesh's workers know it; the program itself comes beside."""

    name: str
    stage: int
    reads: tuple[ShardedType, ...]
    writes: tuple[ShardedType, ...]
    donated: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """A device as transports name it: the worker that owns it, and its place among that worker's
    devices (`jax.local_devices()`)."""

    worker: int
    device: int


@dataclass(frozen=True)
class MeshTask:
    """What the workers of one mesh are told of a step.

    number:     of the step, in the session.
    mesh:       which of the step's meshes this is.
    stage programs:     by their number in the instructions.
    crossings:  by the number of the transfer.
    recv_order: for a `Recv` (by its place in the list), the places of those which are to be posted
                before it is waited for, in the order in which the other side sends.
    ends:       by mesh and device of it, for all meshes that this one sends to or receives from.
    used_up:    places among the program's inputs whose buffers the step uses up.
    """

    number: int
    name: str
    mesh: int
    stage_programs: dict[int, ProgramSpec]
    program: MeshProgram
    crossings: dict[int, RemoteTransfer]
    recv_order: dict[int, tuple[int, ...]]
    ends: dict[int, tuple[End, ...]]
    used_up: tuple[int, ...]


def recv_order(programs: PipelinePrograms, mesh: int) -> dict[int, tuple[int, ...]]:
    """When the `Recv`s of a mesh must be posted, so that those from one mesh are posted in the
    order in which it sends: each with those that were sent before it and are not posted yet."""
    sent = {
        (source, send.tag): place
        for source, program in enumerate(programs.meshes)
        for place, send in enumerate(program.instructions)
        if isinstance(send, Send) and send.to_mesh == mesh
    }
    waiting: dict[int, list[tuple[int, int]]] = {}
    recvs = {
        place: recv
        for place, recv in enumerate(programs.meshes[mesh].instructions)
        if isinstance(recv, Recv)
    }
    for place, recv in recvs.items():
        waiting.setdefault(recv.from_mesh, []).append((sent[recv.from_mesh, recv.tag], place))
    for queue in waiting.values():
        queue.sort(reverse=True)
    order = {}
    for place, recv in recvs.items():
        queue, due = waiting[recv.from_mesh], sent[recv.from_mesh, recv.tag]
        now = []
        while queue and queue[-1][0] <= due:
            now.append(queue.pop()[1])
        order[place] = tuple(now)
    return order

"""A step for meshes of other processes, as data: from `LoweredStep` to a `MeshTask` per mesh.

Buffers of workers hold plain numbers; for random keys, the data of the keys. The devices of a mesh
are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from autopar.ir.pipeline import MeshProgram, Phase, PipelinePrograms, Recv, Send
from autopar.ir.rows import Rows
from autopar.ir.spec import Layout, num_shards
from autopar.ir.tiles import Box, TilePlan, shard_box
from autopar.ir.xla_options import StoredOptions


@dataclass(frozen=True)
class ShardedType:
    """The type of an array on a mesh, with its sharding.

    mesh_shape, axis_names: the arrangement of devices that `layout` refers to.
    grid:                   per place of the arrangement, row by row, the device of the mesh.
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

    @property
    def num_shards(self) -> int:
        """How many different shards it has; the devices hold copies of them."""
        return num_shards(self.layout, self.mesh_shape)

    @property
    def shard_bytes(self) -> int:
        """Bytes on one device."""
        return self.nbytes // self.num_shards

    def boxes(self) -> dict[int, Box]:
        """Per device of the mesh, the shard that it holds."""
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
    phase: Phase = Phase.RESULTS


@dataclass(frozen=True)
class RemoteTransfer:
    """A buffer's transfer from one stage to another; it has no tiles if both are on one mesh."""

    source: ShardedType
    target: ShardedType
    tiles: TilePlan | None
    source_stage: int = 0
    target_stage: int = 1


@dataclass(frozen=True)
class BoundBuffer:
    """A mesh's buffer that holds an argument or a result of the step. An argument that several
    meshes read has a buffer on each; of a stack that is split over stages, each holds `rows`."""

    position: int
    mesh: int
    buffer: int
    type: ShardedType
    rows: Rows | None = None


@dataclass(frozen=True)
class LoweredStep:
    """A step for several meshes.

    meshes:             per mesh, the cluster's numbers of its devices.
    stage_program_mesh: the mesh of each stage program.
    transfers:          by number.
    stage_mesh:         the mesh of each stage.
    donated:            positions of the arguments that the step uses up.
    state_results:      positions of the results that are the state of the next step.
    """

    name: str
    meshes: tuple[tuple[int, ...], ...]
    stage_programs: tuple[LoweredProgram, ...]
    stage_program_mesh: tuple[int, ...]
    programs: PipelinePrograms
    transfers: dict[int, RemoteTransfer]
    stage_mesh: tuple[int, ...]
    arguments: tuple[BoundBuffer, ...]
    results: tuple[BoundBuffer, ...]
    donated: frozenset[int]
    state_results: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ProgramSpec:
    """A stage program as its mesh's workers know it; its code is sent separately."""

    name: str
    stage: int
    reads: tuple[ShardedType, ...]
    writes: tuple[ShardedType, ...]
    donated: tuple[int, ...]
    xla_options: StoredOptions = ()


@dataclass(frozen=True)
class Endpoint:
    """A device as transports name it: its worker, and its place in that worker's
    `jax.local_devices()`."""

    worker: int
    device: int


@dataclass(frozen=True)
class MeshTask:
    """A step as the workers of one mesh receive it.

    number:         the step's number in the session.
    mesh:           the mesh's number in the step.
    stage_programs: by their number in the instructions.
    transfers:      by number.
    recv_order:     per `Recv`, by its place in the list, the places of the `Recv`s to post before
                    waiting for it, in the order in which the other mesh sends.
    endpoints:      per mesh that this one sends to or receives from, its devices.
    used_up:        places among the program's inputs whose buffers the step uses up.
    """

    number: int
    name: str
    mesh: int
    stage_programs: dict[int, ProgramSpec]
    program: MeshProgram
    transfers: dict[int, RemoteTransfer]
    recv_order: dict[int, tuple[int, ...]]
    endpoints: dict[int, tuple[Endpoint, ...]]
    used_up: tuple[int, ...]


def recv_order(programs: PipelinePrograms, mesh: int) -> dict[int, tuple[int, ...]]:
    """When a mesh must post its `Recv`s so that those from one mesh are posted in the order in
    which it sends: each together with those that were sent earlier and are not posted yet. NCCL
    matches sends and receives by their order alone."""
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

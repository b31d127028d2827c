"""Moves an array to another mesh, or into another layout, for a step that needs it there.

Within a mesh, its workers reshard the array. Between meshes, a small step of its own sends and
receives it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.pipeline import MeshProgram, PipelinePrograms, Recv, Send
from autopar.ir.remote import LoweredStep, MeshTask, RemoteTransfer, ShardedType, recv_order
from autopar.runtime.remote.arrays import DistributedArray
from autopar.runtime.remote.commands import StepCall
from autopar.runtime.remote.mesh import PendingReply, RemoteMesh
from autopar.runtime.remote.session import RemoteSession

# Mesh 0 sends its only buffer, and mesh 1 receives it.
_PROGRAMS = PipelinePrograms(
    (
        MeshProgram((Send((0,), (0,), None, 1, 0),), ((0, 0),), (), 1),
        MeshProgram((Recv((0,), (0,), None, 0, 0),), (), ((0, 0),), 1),
    ),
    (),
)


def move(
    session: RemoteSession, array: DistributedArray, mesh: RemoteMesh, target: ShardedType
) -> int:
    """The number of a new copy of the array on a mesh."""
    number = session.new_number(mesh)
    for copy in array.copies:
        if copy.mesh is mesh:
            mesh.submit("reshard", [(copy.number, number, target)], fatal=True)
            return number
    copy = array.copies[0]
    task, first_tag = _task(session, copy.mesh, mesh, copy.type, target), session.new_tags(1)
    sent = StepCall(task, (copy.number,), (), (), (), (), first_tag, ())
    received = StepCall(task, (), (number,), (), (), (), first_tag, ())
    copy.mesh.submit("step", sent, fatal=True)
    mesh.submit("step", received, fatal=True)
    return number


def _task(
    session: RemoteSession,
    source_mesh: RemoteMesh,
    target_mesh: RemoteMesh,
    source: ShardedType,
    target: ShardedType,
) -> int:
    """The number of the step that sends arrays of this type, loaded when first needed."""
    meshes = (source_mesh, target_mesh)
    devices = (source_mesh.devices, target_mesh.devices)
    key = (*devices, source, target)
    if key in session.moves:
        return session.moves[key]
    number = session.moves[key] = session.new_task()
    tiles = session.plan_tiles(
        source.shape,
        np.dtype(source.dtype).itemsize,
        source.layout,
        source.mesh_shape,
        target.layout,
        target.mesh_shape,
    )
    step = LoweredStep(
        name="a move between meshes",
        meshes=devices,
        stage_programs=(),
        stage_program_mesh=(),
        programs=_PROGRAMS,
        transfers={0: RemoteTransfer(source, target, tiles)},
        stage_mesh=(0, 1),
        arguments=(),
        results=(),
        donated=frozenset(),
    )
    session.tasks[number] = step
    loading = [reply for mesh in (0, 1) for reply in _load(session, number, step, meshes, mesh)]
    session.prepare_links(meshes, loading)
    return number


def _load(
    session: RemoteSession,
    number: int,
    step: LoweredStep,
    meshes: tuple[RemoteMesh, RemoteMesh],
    mesh: int,
) -> Sequence[PendingReply]:
    task = MeshTask(
        number=number,
        name="move",
        mesh=mesh,
        stage_programs={},
        program=step.programs.meshes[mesh],
        transfers=step.transfers,
        recv_order=recv_order(step.programs, mesh),
        endpoints=dict(enumerate(each.endpoints for each in meshes)),
        used_up=(),
    )
    session.announce(meshes[mesh], task, [])
    return meshes[mesh].submit("load", number)

"""An array to another mesh, or in another layout, for a step that wants it so.

Within a mesh its workers reshard it. Between meshes a small step of its own is made, which only
sends and receives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.ir.pipeline import MeshProgram, PipelinePrograms, Recv, Send
from autopar.ir.remote import LoweredStep, MeshTask, RemoteTransfer, ShardedType, recv_order
from autopar.runtime.remote.arrays import DistributedArray
from autopar.runtime.remote.commands import StepCall
from autopar.runtime.remote.session import RemoteMesh, RemoteSession


def move(
    session: RemoteSession, array: DistributedArray, mesh: RemoteMesh, held: ShardedType
) -> int:
    """The number of a copy of the array on a mesh, in a layout."""
    for copy in array.copies:
        if copy.mesh is mesh:
            number = session.new_number(mesh)
            mesh.submit("reshard", [(copy.number, number, held)], fatal=True)
            return number
    copy = array.copies[0]
    source: RemoteMesh = copy.mesh
    task = _task(session, source, mesh, copy.held, held)
    number, first_tag = session.new_number(mesh), session.new_tags(1)
    sent = StepCall(task, (copy.number,), (), (), (), (), first_tag, ())
    received = StepCall(task, (), (number,), (), (), (), first_tag, ())
    source.submit("step", sent, fatal=True)
    mesh.submit("step", received, fatal=True)
    return number


def _task(
    session: RemoteSession,
    source: RemoteMesh,
    target: RemoteMesh,
    held: ShardedType,
    wanted: ShardedType,
) -> int:
    key = (source.devices, target.devices, held, wanted)
    if key in session.moves:
        return session.moves[key]
    number = session.moves[key] = session.new_task()
    tiles = session.plan_tiles(
        held.shape,
        np.dtype(held.dtype).itemsize,
        held.layout,
        held.mesh_shape,
        wanted.layout,
        wanted.mesh_shape,
    )
    crossings = {0: RemoteTransfer(held, wanted, tiles)}
    programs = PipelinePrograms(
        (
            MeshProgram((Send((0,), (0,), None, 1, 0),), ((0, 0),), (), 1),
            MeshProgram((Recv((0,), (0,), None, 0, 0),), (), ((0, 0),), 1),
        ),
        (),
    )
    meshes = (source, target)
    session.tasks[number] = LoweredStep(
        "a move between meshes",
        (source.devices, target.devices),
        (),
        (),
        programs,
        crossings,
        (0, 1),
        (),
        (),
        frozenset(),
    )
    ends = {0: source.ends, 1: target.ends}
    loading: list[Any] = []
    for place, mesh in enumerate(meshes):
        task = MeshTask(
            number,
            "move",
            place,
            {},
            programs.meshes[place],
            crossings,
            recv_order(programs, place),
            ends,
            (),
        )
        args = []
        for channel in mesh.channels:
            data_key = session.new_key()
            with session.connected():
                channel.send(data_key, [])
            args.append((task, data_key))
        mesh.group.submit("announce", args)
        loading += mesh.submit("load", number)
    session.prepare_links(meshes, loading)
    return number

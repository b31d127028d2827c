"""Checkpoints of arrays on workers: every worker writes its own shards and reads those it needs.

All hosts must see the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar import _jax
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import ShardedType
from autopar.runtime.checkpoints.backends import register_backend
from autopar.runtime.checkpoints.format import Entry, Manifest
from autopar.runtime.checkpoints.leaves import key_data_type
from autopar.runtime.checkpoints.objects import Location
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.remote.session import RemoteSession

_LIMIT_S = 24 * 3600.0  # the loss of a worker is noticed long before


@dataclass(frozen=True)
class RemotePlace:
    """Where to place an array on a cluster."""

    session: RemoteSession
    mesh: RemoteMesh
    type: ShardedType
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


class RemoteBackend:
    def save_leaves(
        self, folder: Location, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        by_mesh: dict[int, tuple[RemoteMesh, list[tuple[str, int]]]] = {}
        for key, leaf in leaves:
            place = self.place_of(leaf)
            number = leaf.copies[0].number
            by_mesh.setdefault(id(place.mesh), (place.mesh, []))[1].append((key, number))
        replies: list[Any] = []
        with leaves[0][1].owner.lock:
            for mesh, items in by_mesh.values():
                replies += mesh.submit("save", str(folder), items)

        def written() -> list[Entry]:
            return [entry for reply in replies for entry in reply.result(_LIMIT_S)]

        return written

    def restore_leaves(
        self, folder: Location, manifest: Manifest, wanted: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        by_mesh: dict[int, tuple[RemoteMesh, list[tuple[str, int, ShardedType]]]] = {}
        restored: list[DistributedArray] = []
        replies: list[Any] = []
        session: RemoteSession = wanted[0][1].session
        with session.lock:
            for key, place in wanted:
                number = session.new_number(place.mesh)
                items = by_mesh.setdefault(id(place.mesh), (place.mesh, []))[1]
                items.append((key, number, place.type))
                copies = (Copy(place.mesh, number, place.type),)
                restored.append(
                    DistributedArray(session, place.shape, place.dtype, place.weak_type, copies)
                )
            for mesh, items in by_mesh.values():
                replies += mesh.submit("restore", str(folder), items)
        for reply in replies:
            reply.result(_LIMIT_S)
        return restored

    def place_of(self, leaf: Any) -> RemotePlace:
        if isinstance(leaf, RemotePlace):
            return leaf
        copy = leaf.first()
        return RemotePlace(leaf.owner, copy.mesh, copy.type, leaf.shape, leaf.dtype, leaf.weak_type)


def input_places(
    plan: ParallelPlan, avals: Sequence[Any], session: RemoteSession
) -> list[RemotePlace]:
    """Where a plan places each input of its step; starts the workers if they do not run yet."""
    register_remote_backend()
    by_mesh: dict[int, set[int]] = {}
    for stage in plan.stages:
        numbers = stage.devices if stage.plan else range(plan.num_devices)
        by_mesh.setdefault(stage.mesh, set()).update(numbers)
    devices = [tuple(sorted(by_mesh[mesh])) for mesh in sorted(by_mesh)]
    meshes = session.meshes(devices)
    places = []
    for tensor, aval in zip(plan.inputs, avals, strict=True):
        stage = plan.stages[tensor.stages[0]]
        stage_plan = stage.plan or plan
        numbers = stage.devices if stage.plan else tuple(range(plan.num_devices))
        mesh = meshes[sorted(by_mesh).index(stage.mesh)]
        shape, dtype = tuple(aval.shape), aval.dtype
        if _jax.is_extended_dtype(dtype):
            data = key_data_type(aval)
            raw_shape, raw_dtype = tuple(data.shape), np.dtype(data.dtype)
        else:
            raw_shape, raw_dtype = shape, np.dtype(dtype)
        grid = tuple(mesh.devices.index(number) for number in numbers)
        type_ = ShardedType(
            raw_shape,
            raw_dtype,
            stage_plan.mesh_shape,
            stage_plan.axis_names,
            tuple(tensor.layout),
            grid,
        )
        is_weak = bool(getattr(aval, "weak_type", False))
        places.append(RemotePlace(session, mesh, type_, shape, dtype, is_weak))
    return places


_backend = RemoteBackend()


def register_remote_backend() -> None:
    """From now on, checkpoints write and read the arrays of workers. Called by whatever makes such
    arrays or places."""
    register_backend(DistributedArray, _backend)
    register_backend(RemotePlace, _backend)

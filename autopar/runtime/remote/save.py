"""Checkpoints of arrays on workers: every worker writes its own shards and reads those it needs.

All hosts must see the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar import _jax
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import ShardedType
from autopar.ir.rows import Rows, rows_shape
from autopar.runtime.checkpoints.backends import register_backend
from autopar.runtime.checkpoints.format import Entry, Manifest
from autopar.runtime.checkpoints.leaves import key_data_type
from autopar.runtime.checkpoints.objects import Location
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.remote.session import RemoteSession

_LIMIT_S = 24 * 3600.0  # the loss of a worker is noticed long before


class PlacePart(NamedTuple):
    mesh: RemoteMesh
    type: ShardedType
    rows: Rows | None = None


@dataclass(frozen=True)
class RemotePlace:
    """Where to place an array on a cluster: on a mesh, or rows of it on each of several."""

    session: RemoteSession
    parts: tuple[PlacePart, ...]
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


class RemoteBackend:
    def save_leaves(
        self, folder: Location, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        by_mesh: dict[int, tuple[RemoteMesh, list[tuple[str, int, tuple[int, ...]]]]] = {}
        for key, leaf in leaves:
            for copy in leaf.held():
                items = by_mesh.setdefault(id(copy.mesh), (copy.mesh, []))[1]
                items.append((key, copy.number, copy.first_row))
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
        by_mesh: dict[
            int, tuple[RemoteMesh, list[tuple[str, int, ShardedType, tuple[int, ...]]]]
        ] = {}
        restored: list[DistributedArray] = []
        replies: list[Any] = []
        session: RemoteSession = wanted[0][1].session
        with session.lock:
            for key, place in wanted:
                copies = []
                for mesh, type_, rows in place.parts:
                    copy = Copy(mesh, session.new_number(mesh), type_, rows)
                    items = by_mesh.setdefault(id(mesh), (mesh, []))[1]
                    items.append((key, copy.number, type_, copy.first_row))
                    copies.append(copy)
                shape, dtype, is_weak = place.shape, place.dtype, place.weak_type
                restored.append(DistributedArray(session, shape, dtype, is_weak, tuple(copies)))
            for mesh, items in by_mesh.values():
                replies += mesh.submit("restore", str(folder), items)
        for reply in replies:
            reply.result(_LIMIT_S)
        return restored

    def place_of(self, leaf: Any) -> RemotePlace:
        if isinstance(leaf, RemotePlace):
            return leaf
        parts = tuple(PlacePart(copy.mesh, copy.type, copy.rows) for copy in leaf.held())
        return RemotePlace(leaf.owner, parts, leaf.shape, leaf.dtype, leaf.weak_type)


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
        raw_shape, raw_dtype = _raw_type(aval)
        parts = []
        held = zip(tensor.holders(), tensor.held_layouts(), tensor.rows(), strict=True)
        for number, layout, rows in held:
            stage = plan.stages[number]
            stage_plan = stage.plan or plan
            numbers = stage.devices if stage.plan else tuple(range(plan.num_devices))
            mesh = meshes[sorted(by_mesh).index(stage.mesh)]
            grid = tuple(mesh.devices.index(device) for device in numbers)
            shape = raw_shape if rows is None else rows_shape(raw_shape, rows)
            type_ = ShardedType(
                shape,
                raw_dtype,
                stage_plan.mesh_shape,
                stage_plan.axis_names,
                tuple(layout),
                grid,
            )
            parts.append(PlacePart(mesh, type_, rows))
        is_weak = bool(getattr(aval, "weak_type", False))
        places.append(RemotePlace(session, tuple(parts), tuple(aval.shape), aval.dtype, is_weak))
    return places


def _raw_type(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of the buffer of an array; of keys, of their data."""
    if not _jax.is_extended_dtype(aval.dtype):
        return tuple(aval.shape), np.dtype(aval.dtype)
    data = key_data_type(aval)
    return tuple(data.shape), np.dtype(data.dtype)


_backend = RemoteBackend()


def register_remote_backend() -> None:
    """From now on, checkpoints write and read the arrays of workers. Called by whatever makes such
    arrays or places."""
    register_backend(DistributedArray, _backend)
    register_backend(RemotePlace, _backend)

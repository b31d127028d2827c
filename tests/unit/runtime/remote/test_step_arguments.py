"""What of a step's arguments is on a mesh already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from autopar.ir.remote import BoundBuffer, ShardedType
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.step_arguments import WantedArguments


def mesh_without_workers() -> Any:
    return SimpleNamespace(release=lambda number: None)


def type_with(layout: tuple[int, ...]) -> ShardedType:
    return ShardedType((4, 8), np.dtype(np.float32), (2,), ("x",), layout, (0, 1))


def array_on(mesh: Any, number: int, type_: ShardedType) -> DistributedArray:
    copies = (Copy(mesh, number, type_),)
    return DistributedArray(SimpleNamespace(), (4, 8), np.dtype(np.float32), False, copies)


def test_bytes_of_arguments_that_are_on_the_mesh() -> None:
    """An array that is given twice is there once; those in other layouts or on other meshes, and
    values of the driver, are yet to come."""
    mesh, other = mesh_without_workers(), mesh_without_workers()
    split, whole = type_with((0,)), type_with((-1,))
    wanted = WantedArguments([BoundBuffer(n, 0, n, split) for n in range(5)], ())
    twice = array_on(mesh, 1, split)
    elsewhere, otherwise = array_on(other, 2, split), array_on(mesh, 3, whole)
    leaves = [twice, twice, elsewhere, otherwise, np.zeros((4, 8), np.float32)]
    assert wanted.bytes_there(mesh, leaves) == 4 * 8 * 4 // 2
    assert wanted.bytes_there(other, leaves) == 4 * 8 * 4 // 2
    assert wanted.bytes_there(mesh, [leaves[-1]] * 5) == 0

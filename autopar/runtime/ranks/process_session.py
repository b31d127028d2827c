"""The driver's side of a pipeline in processes of your own: `RemoteSession` in each of them.

Values that a process passes to a step go to its own workers only: all pass the same. To read an
array that is no small result, all processes must ask for it, as they must for JAX's own arrays that
span processes: each sends the shards that it holds to all others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError, ClusterError
from autopar.ir.remote import ShardedType
from autopar.ir.rows import take_rows
from autopar.ir.tiles import Box, slices
from autopar.runtime.ranks.process_cluster import ProcessCluster
from autopar.runtime.ranks.process_replies import read_key
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.commands import Put
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.remote.session import (
    FETCH_LIMIT_S,
    RemoteSession,
    empty_value,
    one_holder_each,
)
from autopar.runtime.uninterrupted import uninterrupted


class ProcessSession(RemoteSession):
    """A cluster of the processes of `jax.distributed`."""

    def __init__(self, cluster: ProcessCluster, transport: str | None, plan_tiles: Any) -> None:
        super().__init__(cluster, transport, plan_tiles)
        self._processes = cluster
        self._here = threading.local()
        self._num_placed = 0
        self._fetches: dict[int, int] = {}

    def runs_here(self, devices: Sequence[int]) -> bool:
        return self._processes.runs_here(devices)

    def _open_channel(self, worker: Any, address: Any) -> Any:
        return self._processes.mailbox(worker)

    def check(self) -> None:
        if self.closed:
            raise ClusterError(
                "the session of this step was ended by autopar.shutdown() or autopar.init(). Call "
                "the step with new arrays; it is then compiled again."
            )
        self._processes.check()

    def recording_notes(self) -> list[str]:
        if self._processes.is_on_one_machine():
            return []
        return ["clocks of other machines are known by their wall clocks, which may be wrong"]

    # -- values up

    def new_numbers(self, mesh: RemoteMesh, count: int) -> range:
        """Equal in all processes for what steps return. What is placed beside them, by a data
        loader's thread, has numbers below 0 of this process's own."""
        if not getattr(self._here, "is_placing", False):
            return super().new_numbers(mesh, count)
        with self.lock:
            mesh.group.num_arrays += count
            first = self._num_placed + 1
            self._num_placed += count
        return range(-first, -first - count, -1)

    def upload(
        self, mesh: RemoteMesh, values: Sequence[tuple[Any, ShardedType]]
    ) -> tuple[list[int], list[tuple[Put, ...]]]:
        for value, type_ in values:
            if isinstance(value, jax.Array) and not (
                value.is_fully_addressable or value.is_fully_replicated
            ):
                raise ArgumentError(
                    f"an array of shape {list(type_.shape)} spans processes ({value.sharding}), "
                    "and a pipeline takes arrays that each process has whole, or that a pipeline "
                    "returned. Pass it as a NumPy array, or create state with "
                    "autopar.CreateStateParallel; or plan one mesh, which takes it, with "
                    "method=autopar.ShardParallel()."
                )
        if not self.runs_here(mesh.devices):
            return list(self.new_numbers(mesh, len(values))), [()] * len(mesh.places)
        return super().upload(mesh, values)

    def place(self, mesh: RemoteMesh, values: Sequence[tuple[Any, ShardedType]]) -> list[int]:
        self._here.is_placing = True
        try:
            return super().place(mesh, values)
        finally:
            self._here.is_placing = False

    # -- values down

    def fetch_all(self, arrays: Sequence[DistributedArray]) -> list[np.ndarray]:
        """The values of arrays, in all processes; all must ask for the same."""
        return [self._fetch_together(array) for array in arrays]

    def _fetch_together(self, array: DistributedArray) -> np.ndarray:
        value = empty_value(array)
        for copy in array.held():
            rows = value if copy.rows is None else take_rows(value, copy.rows)
            self._fetch_copy(array, copy, rows)
        return value

    def _fetch_copy(self, array: DistributedArray, copy: Copy, value: np.ndarray) -> None:
        """Fill in the value of a copy, in all processes."""
        if copy.number < 0:
            raise ArgumentError(
                f"{array!r} was placed by this process, and others may have placed others since. "
                "Read the values that you placed it from."
            )
        by_worker: dict[int, list[tuple[Box, int]]] = {}
        for box, device in one_holder_each(copy.type).items():
            worker, local = copy.mesh.owners[device]
            by_worker.setdefault(worker, []).append((box, local))
        with uninterrupted(), self.lock:
            self.check()
            nth = self._fetches[copy.number] = self._fetches.get(copy.number, 0) + 1
            asked: list[tuple[int, int, Any]] = []
            for worker, wanted in by_worker.items():
                if copy.mesh.places[worker].host != self._processes.process:
                    continue
                key = self.new_key()
                args: list[tuple[Any, ...] | None] = [None] * len(copy.mesh.places)
                args[worker] = ([(copy.number, local) for _, local in wanted], key)
                asked.append((worker, key, copy.mesh.group.submit("fetch", args)[0]))
        for worker, key, reply in asked:
            reply.result()
            shards = copy.mesh.channels[worker].receive(key, FETCH_LIMIT_S)
            self._processes.send(read_key(copy.number, nth, worker), shards)
            _fill(value, by_worker.pop(worker), shards)
        for worker, wanted in by_worker.items():
            process = copy.mesh.places[worker].host
            key = read_key(copy.number, nth, worker)
            _fill(value, wanted, self._processes.take(process, key, FETCH_LIMIT_S))


def _fill(
    value: np.ndarray, wanted: Sequence[tuple[Box, int]], shards: Sequence[np.ndarray]
) -> None:
    for (box, _), shard in zip(wanted, shards, strict=True):
        value[slices(box)] = shard

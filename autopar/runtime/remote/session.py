"""The driver's side of a cluster: its meshes, the numbers of arrays, and values up and down.

Commands go through the groups of workers (one call per worker), values over data channels.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Protocol

import jax
import numpy as np

from autopar import _jax
from autopar.errors import ClusterError, DataError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.remote import LoweredStep, MeshTask, ShardedType
from autopar.ir.tiles import Box, TilePlan, shifted, slices
from autopar.runtime.remote.arrays import DistributedArray
from autopar.runtime.remote.channel import ChannelClient
from autopar.runtime.remote.commands import Put
from autopar.runtime.remote.frames import DataTimeout, PeerGone
from autopar.runtime.remote.mesh import (
    Channel,
    PendingReply,
    RemoteMesh,
    WorkerGroup,
    WorkerHandle,
)
from autopar.runtime.transports.base import Link
from autopar.runtime.transports.choose import choose
from autopar.runtime.uninterrupted import uninterrupted

FETCH_LIMIT_S = 600.0
_CONNECT_LIMIT_S = 30.0
_LOAD_LIMIT_S = 3600.0
_PARALLEL_BYTES = 2**20  # larger uploads go to several workers at the same time


class WorkerCluster(Protocol):
    """A cluster, however its workers are started."""

    @property
    def platform(self) -> str: ...

    @property
    def spec(self) -> ClusterSpec: ...

    @property
    def ends_idle_groups(self) -> bool:
        """Whether a group that nobody uses makes room for one that needs its devices."""
        ...

    def possible_devices(self) -> int:
        """How many devices a new session could have now."""
        ...

    def notice(self) -> str:
        """Which hosts are about to be taken away, in words; empty if none."""
        ...

    def groups(self, meshes: Sequence[tuple[int, ...]], /) -> Sequence[WorkerGroup]: ...

    def close_group(self, group: Any, /) -> None: ...

    def check(self) -> None: ...

    def wait_for_failure(self) -> WorkerError | None: ...

    def close(self) -> None: ...


class RemoteSession:
    """A cluster in use. `plan_tiles` plans the transfer of an array between meshes; `transport` is
    the name of what carries it, or None to choose one that all workers have."""

    def __init__(
        self, cluster: WorkerCluster, transport: str | None, plan_tiles: Callable[..., TilePlan]
    ) -> None:
        self.cluster = cluster
        self.plan_tiles = plan_tiles
        self.lock = threading.RLock()  # one thread at a time sends commands to meshes
        self._transport = transport
        self._meshes: dict[tuple[int, ...], RemoteMesh] = {}
        self._addresses: dict[int, dict[str, Any]] = {}
        self._next_number = 1
        self._keys = itertools.count(1)
        self._tasks = itertools.count(1)
        self._next_tag = 0
        self._uploaders = ThreadPoolExecutor(
            min(8, os.cpu_count() or 1), thread_name_prefix="autopar-upload"
        )
        self.tasks: dict[int, LoweredStep] = {}  # the steps that workers know, by number
        self.moves: dict[Hashable, int] = {}  # steps that move arrays between meshes
        self.closed = False
        self.before_close: Callable[[], object] | None = None  # called while workers still run

    # -- meshes

    def meshes(self, devices: Sequence[tuple[int, ...]]) -> list[RemoteMesh]:
        """The meshes with these devices; those that do not run yet are started."""
        with self.lock:
            self._make_room(devices)
            groups = self.cluster.groups(list(devices))
            live = {tuple(group.devices): group for group in groups}
            self._forget_closed()
            fresh = [group for key, group in live.items() if key not in self._meshes]
            if fresh and self._transport is None:
                self._transport = self._choose_transport(fresh)
            opened = [
                (group, group.submit("open", [(self._transport,)] * len(group.workers)))
                for group in fresh
            ]
            for group, replies in opened:
                channels = []
                for worker, reply in zip(group.workers, replies, strict=True):
                    addresses = reply.result(_CONNECT_LIMIT_S)
                    self._addresses[worker.place.worker] = addresses["transport"]
                    with self.connected():
                        channels.append(self._open_channel(worker, addresses["channel"]))
                self._meshes[tuple(group.devices)] = RemoteMesh(group, channels)
            if fresh:
                connecting = [
                    reply
                    for mesh in self._meshes.values()
                    for reply in mesh.submit("connect", dict(self._addresses))
                ]
                for reply in connecting:
                    reply.result(_CONNECT_LIMIT_S)
            return [self._meshes[tuple(numbers)] for numbers in devices]

    def _open_channel(self, worker: WorkerHandle, address: Any) -> Channel:
        return ChannelClient(tuple(address), worker.place.token, _CONNECT_LIMIT_S)

    def runs_here(self, devices: Sequence[int]) -> bool:
        """Whether commands from here are what makes the mesh's workers run."""
        return True

    def _make_room(self, wanted: Sequence[tuple[int, ...]]) -> None:
        """End meshes that nobody uses and whose GPUs new meshes need: each of their processes has
        memory and connections of the GPU. A mesh of the cluster's choice may have to go besides."""
        if not self.cluster.ends_idle_groups:
            return
        taken = {device for devices in wanted for device in devices}
        steps = [step for number, step in self.tasks.items() if number not in self.moves.values()]
        busy = {devices for step in steps for devices in step.meshes}
        for devices, mesh in list(self._meshes.items()):
            if devices in wanted or taken.isdisjoint(devices) or mesh.group.closed:
                continue
            mesh.free_released()
            if mesh.group.num_arrays == 0 and devices not in busy:
                self.cluster.close_group(mesh.group)

    def _forget_closed(self) -> None:
        for devices, mesh in list(self._meshes.items()):
            if mesh.group.closed:
                mesh.close()
                del self._meshes[devices]
                for place in mesh.places:
                    self._addresses.pop(place.worker, None)
                for key, number in list(self.moves.items()):
                    if devices in self.tasks[number].meshes:
                        del self.moves[key], self.tasks[number]

    def _choose_transport(self, groups: Sequence[WorkerGroup]) -> str:
        replies = [r for g in groups for r in g.submit("transports", [()] * len(g.workers))]
        common = set.intersection(*(set(reply.result(_CONNECT_LIMIT_S)) for reply in replies))
        return choose(self.cluster.platform, common)

    def new_task(self) -> int:
        return next(self._tasks)

    def end_task(self, number: int, meshes: Sequence[RemoteMesh]) -> None:
        """A step's executable is gone: workers forget its programs with their next command. Like
        `release`, this may be called in any thread, at any time."""
        self.tasks.pop(number, None)
        for mesh in meshes:
            mesh.end_task(number)

    def new_number(self, mesh: RemoteMesh) -> int:
        return self.new_numbers(mesh, 1)[0]

    def new_numbers(self, mesh: RemoteMesh, count: int) -> range:
        """Numbers of so many new arrays."""
        with self.lock:
            mesh.group.num_arrays += count
            first = self._next_number
            self._next_number += count
        return range(first, first + count)

    def new_key(self) -> int:
        return next(self._keys)

    def new_tags(self, num_tags: int) -> int:
        """The first of `num_tags` consecutive unused tags."""
        first = self._next_tag
        self._next_tag += num_tags
        return first

    def announce(
        self, mesh: RemoteMesh, task: MeshTask, programs: Sequence[np.ndarray]
    ) -> Sequence[PendingReply]:
        """Send a step's lists to a mesh, and the code of its stage programs in their order."""
        args = []
        for channel in mesh.channels:
            key = self.new_key()
            with self.connected():
                channel.send(key, programs)
            args.append((task, key))
        return mesh.group.submit("announce", args)

    def prepare_links(self, meshes: Sequence[RemoteMesh], loaded: Sequence[PendingReply]) -> None:
        """Have workers create communicators for the links that `load` answered, all in the same
        order. Workers wait for each other there, as they do in steps, so every mesh must get these
        commands in one order, whichever threads send them."""
        links = {link for reply in loaded for link in reply.result(_LOAD_LIMIT_S)}
        in_order = sorted(
            links,
            key=lambda link: (
                link.source.worker,
                link.source.device,
                [(end.worker, end.device) for end in link.targets],
            ),
        )
        prepared = []
        with self.lock:
            for mesh in meshes:
                args = [(_links_of(place.worker, in_order),) for place in mesh.places]
                prepared += mesh.group.submit("prepare", args)
        for reply in prepared:
            reply.result(_LOAD_LIMIT_S)

    def recording_notes(self) -> list[str]:
        """What a trace of this cluster's steps should say."""
        return []

    def check(self) -> None:
        """Raise if the cluster was shut down or has failed."""
        if self.closed:
            raise ClusterError(
                "the cluster of this step was shut down. Call autopar.init(cluster='ray') again; "
                "the step is then planned and compiled again."
            )
        self.cluster.check()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Guards the use of data channels. A broken one means that a worker is gone, and the
        cluster soon knows which one, and why; or that the network is cut."""
        try:
            yield
        except (PeerGone, DataTimeout) as error:
            self.cluster.wait_for_failure()
            try:
                self.check()
            except (ClusterError, WorkerError) as failure:
                raise failure from error
            raise WorkerError(
                f"The connection to a worker is lost, though all workers answer: {error} Check the "
                "network between the driver and its host. The session cannot be used any more."
            ) from error

    # -- values up

    def upload(
        self, mesh: RemoteMesh, values: Sequence[tuple[Any, ShardedType]]
    ) -> tuple[list[int], list[tuple[Put, ...]]]:
        """Send values to a mesh, to each worker only the shards of its devices. Returns the numbers
        of the arrays, and per worker the `Put`s that create them."""
        numbers = list(self.new_numbers(mesh, len(values)))
        keys = [self.new_key() for _ in mesh.places]
        arrays: list[list[np.ndarray]] = [[] for _ in mesh.places]
        puts: list[list[Put]] = [[] for _ in mesh.places]
        for number, (value, type_) in zip(numbers, values, strict=True):
            raw = raw_value(value, type_)
            for worker, boxes in enumerate(_boxes_by_worker(type_, tuple(mesh.owners))):
                distinct = {
                    box: len(arrays[worker]) + n for n, box in enumerate(dict.fromkeys(boxes))
                }
                arrays[worker] += [raw[slices(box)] for box in distinct]
                shards = tuple(distinct[box] for box in boxes)
                puts[worker].append(Put(number, type_, keys[worker], shards))
        sends = list(zip(mesh.channels, keys, arrays, strict=True))
        with self.connected():
            num_bytes = sum(array.nbytes for worker_arrays in arrays for array in worker_arrays)
            if num_bytes < _PARALLEL_BYTES or len(sends) == 1:
                for channel, key, worker_arrays in sends:
                    channel.send(key, worker_arrays)
            else:
                list(self._uploaders.map(lambda send: send[0].send(send[1], send[2]), sends))
        return numbers, [tuple(worker_puts) for worker_puts in puts]

    def place(self, mesh: RemoteMesh, values: Sequence[tuple[Any, ShardedType]]) -> list[int]:
        """Put values on a mesh: (value, type of its buffer). Returns the arrays' numbers."""
        with uninterrupted():
            numbers, puts = self.upload(mesh, values)
            with self.lock:
                replies = mesh.group.submit("put", [(worker_puts,) for worker_puts in puts])
        for reply in replies:
            reply.result()  # earlier steps may take long; the loss of a worker ends the wait
        return numbers

    # -- values down

    def fetch(self, array: DistributedArray) -> np.ndarray:
        """An array's raw value: each shard from the first device that holds it."""
        return self.fetch_all([array])[0]

    def fetch_all(self, arrays: Sequence[DistributedArray]) -> list[np.ndarray]:
        asked: list[tuple[Channel, int, list[tuple[int, Box, int, int]]]] = []
        try:
            return self._fetch_all(arrays, asked)
        except BaseException:  # Ctrl-C, say: workers should not keep what nobody will take
            for channel, key, _ in asked:
                with suppress(DataError):
                    channel.discard(key)
            raise

    def _fetch_all(
        self,
        arrays: Sequence[DistributedArray],
        asked: list[tuple[Channel, int, list[tuple[int, Box, int, int]]]],
    ) -> list[np.ndarray]:
        """`asked`: is filled with the channels and keys under which workers will offer values."""
        with uninterrupted(), self.lock:
            self.check()
            wanted: dict[tuple[int, int], list[tuple[int, Box, int, int]]] = {}
            meshes: dict[int, RemoteMesh] = {}
            for place, array in enumerate(arrays):
                for copy in array.held():
                    meshes[id(copy.mesh)] = copy.mesh
                    for box, device in one_holder_each(copy.type).items():
                        worker, local = copy.mesh.owners[device]
                        entry = (place, shifted(box, copy.first_row), copy.number, local)
                        wanted.setdefault((id(copy.mesh), worker), []).append(entry)
            replies: list[PendingReply] = []
            for mesh_id, mesh in meshes.items():
                args: list[tuple[Any, ...] | None] = []
                for worker in range(len(mesh.places)):
                    shards_wanted = wanted.get((mesh_id, worker))
                    if shards_wanted is None:
                        args.append(None)
                        continue
                    key = self.new_key()
                    args.append(([(number, local) for _, _, number, local in shards_wanted], key))
                    asked.append((mesh.channels[worker], key, shards_wanted))
                replies += mesh.group.submit("fetch", args)
        for reply in replies:
            reply.result()  # earlier steps may take long; the loss of a worker ends the wait
        values = [empty_value(array) for array in arrays]
        for channel, key, shards_wanted in asked:
            with self.connected():
                shards = channel.receive(key, FETCH_LIMIT_S)
            for (place, box, _, _), shard in zip(shards_wanted, shards, strict=True):
                values[place][slices(box)] = shard
        return values

    def device_bytes(self, limit_s: float) -> list[int]:
        """Memory in use on each device of the meshes that run, as far as JAX counts it."""
        with self.lock:
            self.check()
            replies = [r for mesh in self._meshes.values() for r in mesh.submit("stats")]
        return [number for r in replies for number in r.result(limit_s)["device_bytes"]]

    def close(self) -> None:
        if self.before_close is not None:
            self.before_close()
        self.closed = True
        for mesh in self._meshes.values():
            mesh.close()
        self._meshes.clear()
        self._uploaders.shutdown(wait=False, cancel_futures=True)
        self.cluster.close()


def _links_of(worker: int, links: Sequence[Link]) -> list[Link]:
    """The links that this worker is an end of."""
    return [
        link
        for link in links
        if worker in (link.source.worker, *(end.worker for end in link.targets))
    ]


@lru_cache(maxsize=4096)
def one_holder_each(type_: ShardedType) -> dict[Box, int]:
    """For each distinct shard of an array, the first device that holds it."""
    holders: dict[Box, int] = {}
    for device, box in type_.boxes().items():
        if device < holders.get(box, len(type_.grid)):
            holders[box] = device
    return holders


@lru_cache(maxsize=4096)
def _boxes_by_worker(type_: ShardedType, owners: tuple[tuple[int, int], ...]) -> list[list[Box]]:
    """Per worker, the shards of its devices, in order."""
    boxes = type_.boxes()
    by_worker: list[list[Box]] = [[] for _ in range(owners[-1][0] + 1)]
    for device, (worker, _) in enumerate(owners):
        by_worker[worker].append(boxes[device])
    return by_worker


@lru_cache(maxsize=65536)
def same_shards(one: ShardedType, other: ShardedType) -> bool:
    """Whether every device holds the same shard in both."""
    return one == other or (
        (one.shape, one.dtype) == (other.shape, other.dtype) and one.boxes() == other.boxes()
    )


def empty_value(array: DistributedArray) -> np.ndarray:
    """Room for an array's raw value."""
    type_ = array.first().type
    depth = len(array.first().first_row)
    shape = (*array.shape[:depth], *type_.shape[depth:])
    return np.empty(shape, type_.dtype)


def raw_value(value: Any, type_: ShardedType) -> np.ndarray:
    """A value as a NumPy array; of keys, their data."""
    if isinstance(value, jax.Array) and _jax.is_extended_dtype(value.dtype):
        value = jax.random.key_data(value)
    raw = np.asarray(value, dtype=type_.dtype)
    assert raw.shape == type_.shape, (raw.shape, type_.shape)
    return raw

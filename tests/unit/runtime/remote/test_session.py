"""What a broken data channel is told as; meshes that make room for others; links in one order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.errors import ClusterError, WorkerError
from autopar.ir.remote import ShardedType
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.frames import DataTimeout, PeerGone
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.session import RemoteSession
from autopar.runtime.transports.base import Endpoint, Link


class Cluster:
    """Notices a failure only when somebody waits for it."""

    platform = "cpu"

    def __init__(self, failure: WorkerError | None) -> None:
        self._coming, self._failure = failure, None

    def wait_for_failure(self) -> WorkerError | None:
        self._failure = self._coming
        return self._failure

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        pass


def session_on(cluster: Any) -> RemoteSession:
    return RemoteSession(cluster, "jax_transfer", lambda: None)


@pytest.mark.parametrize("error", [PeerGone("broke"), DataTimeout("silent")])
def test_a_broken_channel_is_the_worker_that_is_gone(error: Exception) -> None:
    failure = WorkerError("Worker 3 died", host="h1")
    with pytest.raises(WorkerError) as caught, session_on(Cluster(failure)).connected():
        raise error
    assert caught.value is failure and caught.value.__cause__ is error


def test_if_no_worker_is_gone_the_network_is_cut() -> None:
    """Also a `WorkerError`, so that training starts again."""
    said = r"connection to a worker is lost, though all workers answer: broke.*Check the network"
    with pytest.raises(WorkerError, match=said), session_on(Cluster(None)).connected():
        raise PeerGone("broke")


def test_or_as_the_end_of_the_session() -> None:
    session = session_on(Cluster(None))
    session.close()
    with pytest.raises(ClusterError, match="was shut down"), session.connected():
        raise PeerGone("broke")


# -- meshes


class Group:
    """The workers of a mesh, one per device, each with the device's number; answers at once."""

    def __init__(self, devices: tuple[int, ...], sent: list[Any]) -> None:
        self.devices, self.num_arrays, self.closed = devices, 0, False
        self.sent = sent
        self.workers = [
            SimpleNamespace(
                place=WorkerPlace(
                    number, rank, len(devices), 0, "n", (number,), devices, "gpu", "", "", ""
                )
            )
            for rank, number in enumerate(devices)
        ]

    def submit(self, command: str, args: Sequence[Any], fatal: bool = False) -> list[Any]:
        self.sent.append((self.devices, command, tuple(args)))
        answer = {"transport": None, "channel": ("", 0)} if command == "open" else None
        return [SimpleNamespace(result=lambda limit_s=None: answer) for _ in args]


class GpuCluster(Cluster):
    """Meshes of whole GPUs: a new one ends those in its way, if no arrays are on them."""

    platform, ends_idle_groups = "gpu", True

    def __init__(self) -> None:
        super().__init__(None)
        self.running: dict[tuple[int, ...], Group] = {}
        self.sent: list[Any] = []

    def groups(self, meshes: Sequence[tuple[int, ...]]) -> list[Group]:
        for group in list(self.running.values()):
            if group.devices not in meshes and any({*group.devices} & {*new} for new in meshes):
                if group.num_arrays:
                    raise ClusterError(f"{group.num_arrays} arrays are on {group.devices}")
                self.close_group(group)
        for devices in meshes:
            self.running.setdefault(devices, Group(devices, self.sent))
        return [self.running[devices] for devices in meshes]

    def close_group(self, group: Group) -> None:
        group.closed = True
        del self.running[group.devices]


class GpuSession(RemoteSession):
    def _open_channel(self, worker: Any, address: Any) -> Any:
        return SimpleNamespace(close=lambda: None)


@pytest.fixture
def gpus() -> GpuSession:
    return GpuSession(GpuCluster(), "nccl", lambda: None)  # type: ignore[arg-type]


def test_arrays_that_were_dropped_do_not_keep_a_mesh(gpus: GpuSession) -> None:
    (mesh,) = gpus.meshes([(0, 1)])
    kept, dropped = gpus.new_number(mesh), gpus.new_number(mesh)
    mesh.release(dropped)
    with pytest.raises(ClusterError, match="1 arrays"):
        gpus.meshes([(1, 2)])
    mesh.release(kept)
    (other,) = gpus.meshes([(1, 2)])
    assert mesh.group.closed and not other.group.closed
    freed = [args[0][0] for devices, name, args in gpus.cluster.sent if name == "free"]  # type: ignore[attr-defined]
    assert freed == [(dropped,), (kept,)]


def test_a_mesh_that_comes_back_is_another_one(gpus: GpuSession) -> None:
    (mesh,) = gpus.meshes([(0, 1)])
    gpus.meshes([(1, 2)])
    (again,) = gpus.meshes([(0, 1)])
    assert again is not mesh and not again.group.closed


def test_moves_of_a_closed_mesh_are_forgotten(gpus: GpuSession) -> None:
    """New workers do not know the steps of those before them."""
    gpus.meshes([(0, 1), (2,), (3,)])
    for key, meshes in {"away": ((0, 1), (2,)), "other": ((2,), (3,))}.items():
        gpus.moves[key] = gpus.new_task()
        gpus.tasks[gpus.moves[key]] = SimpleNamespace(meshes=meshes)  # type: ignore[assignment]
    gpus.meshes([(0,)])
    assert list(gpus.moves) == ["other"] and list(gpus.tasks) == [gpus.moves["other"]]


def test_threads_that_prepare_links_reach_all_meshes_in_one_order(gpus: GpuSession) -> None:
    """Workers wait for each other there: in two orders, they would wait for ever."""
    one, other = gpus.meshes([(0,), (1,)])
    sent: list[tuple[tuple[int, ...], str]] = []
    both_run = threading.Barrier(2)
    second_waits = threading.Event()

    def submit_as(group: Any) -> Any:
        def submit(command: str, args: Any, fatal: bool = False) -> list[Any]:
            name = threading.current_thread().name
            if not sent:  # the first thread pauses between its two meshes
                sent.append((group.devices, name))
                second_waits.wait(0.5)
            else:
                sent.append((group.devices, name))
            return [SimpleNamespace(result=lambda limit_s=None: None)]

        return submit

    for mesh in (one, other):
        mesh.group.submit = submit_as(mesh.group)  # type: ignore[method-assign]
    link = Link(Endpoint(0, 0), (Endpoint(1, 0),))
    loaded: Any = [SimpleNamespace(result=lambda limit_s=None: [link])]

    def prepare(meshes: Any) -> None:
        both_run.wait(10)
        gpus.prepare_links(meshes, loaded)
        second_waits.set()

    threads = [
        threading.Thread(target=prepare, args=(meshes,), daemon=True)
        for meshes in ((one, other), (other, one))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [name for _, name in sent[:2]] == [sent[0][1]] * 2, "not interleaved"
    assert [name for _, name in sent[2:]] == [sent[2][1]] * 2 and len(sent) == 4


def test_a_fetch_that_is_interrupted_leaves_nothing_in_the_workers(gpus: GpuSession) -> None:
    (mesh,) = gpus.meshes([(0, 1)])
    discarded: list[tuple[int, int]] = []
    for worker, channel in enumerate(mesh.channels):
        channel.discard = lambda key, worker=worker: discarded.append((worker, key))  # type: ignore[method-assign]
    asked: list[int] = []

    def submit(command: str, args: Any, fatal: bool = False) -> list[Any]:
        asked.extend(key for _, key in args)

        def result() -> None:
            raise KeyboardInterrupt

        return [SimpleNamespace(result=result) for _ in args]

    mesh.group.submit = submit  # type: ignore[method-assign]
    by_rows = ShardedType((4,), np.dtype(np.float32), (2,), ("x",), (0,), (0, 1))
    array = DistributedArray(gpus, (4,), by_rows.dtype, False, (Copy(mesh, 1, by_rows),))
    with pytest.raises(KeyboardInterrupt):
        gpus.fetch(array)
    assert discarded == list(enumerate(asked)) and len(asked) == 2

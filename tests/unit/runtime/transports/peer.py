"""A process with a transport, driven over its pipes; and `Peer`, which starts and drives one.

Each command is a method of `_Worker`, sent as a pickled (name, arguments) and answered by a pickled
(ok, value). `post` sends without waiting, so that several processes act at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
ANSWER_LIMIT_S = 120.0


class Peer:
    """A worker process: `num_devices` virtual CPU devices, or with `gpus` (ranks and the numbers
    of some) their GPUs. With `fake_cuda`, a folder, transports take the first CPU device for a GPU,
    and get a stand-in for CuPy."""

    def __init__(
        self,
        worker: int,
        transport: str,
        num_devices: int = 2,
        gpus: tuple[Any, Sequence[int]] | None = None,
        fake_cuda: str = "",
    ) -> None:
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        env = {**os.environ, "PYTHONPATH": ":".join(paths), "JAX_PLATFORMS": "cpu"}
        if gpus is not None:
            from tests.remote.process_cluster import gpu_environment

            env |= gpu_environment(*gpus)
        else:
            env["XLA_FLAGS"] = (
                f"--xla_force_host_platform_device_count={num_devices} "
                "--xla_backend_optimization_level=0"
            )
        if fake_cuda:
            env["AUTOPAR_FAKE_CUDA"] = fake_cuda
            env["PYTHONPATH"] += f":{Path(__file__).parent / 'fake'}"
        self.worker = worker
        self.platform = "gpu" if fake_cuda or gpus is not None else "cpu"
        self.pending = 0
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()
        self.post("start", worker, transport, self.platform)

    def post(self, name: str, *arguments: Any) -> None:
        self._outbox.put((name, arguments))
        self.pending += 1

    def _write_all(self) -> None:
        """Commands wait here, not in `post`, for a process that is busy."""
        with contextlib.suppress(OSError, ValueError):  # the process is gone; answers tell
            while (message := self._outbox.get()) is not None:
                _write(self.process.stdin, message)

    def answer(self) -> Any:
        """The answer to the earliest command that has none yet."""
        stdout = self.process.stdout
        assert stdout is not None
        assert self.pending, "nothing was asked"
        ready, _, _ = select.select([stdout], [], [], ANSWER_LIMIT_S)
        if not ready:
            raise TimeoutError(f"worker {self.worker} did not answer in {ANSWER_LIMIT_S} s")
        self.pending -= 1
        ok, value = _read(stdout)
        if not ok:
            raise PeerError(f"worker {self.worker}: {value}")
        return value

    def ask(self, name: str, *arguments: Any) -> Any:
        while self.pending:
            self.answer()
        self.post(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """Nothing of it goes on, and nobody is told; it can still be killed."""
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.kill()
        self._outbox.put(None)
        self._writer.join(10)
        self.process.stdin.close()
        self.process.stdout.close()


class PeerError(Exception):
    """A command of a worker failed."""


def use(peers: Sequence[Peer], transport: str) -> None:
    """Go over to another transport."""
    for peer in peers:
        peer.ask("close")
        peer.ask("start", peer.worker, transport, peer.platform)
    join(peers)


def join(peers: Sequence[Peer]) -> None:
    """Let all know each other's addresses."""
    addresses = {peer.worker: peer.ask("address") for peer in peers}
    for peer in peers:
        peer.post("connect", addresses)
    for peer in peers:
        peer.answer()


class _Worker:
    def start(self, worker: int, transport: str, platform: str) -> None:
        import jax

        from autopar.runtime.remote.place import WorkerPlace
        from autopar.runtime.transports.choose import make_transport

        devices = tuple(range(len(jax.local_devices())))
        place = WorkerPlace(
            worker, 0, 1, 0, "here", devices, devices, platform, "127.0.0.1", "a token", "/tmp"
        )
        self.transport: Any = make_transport(transport, place)
        self.arrived: dict[int, list[Any]] = {}

    def available(self) -> tuple[str, ...]:
        from autopar.runtime.transports.choose import available_transports

        return available_transports("gpu")

    def address(self) -> dict[str, Any]:
        return self.transport.address()

    def connect(self, addresses: dict[int, dict[str, Any]]) -> None:
        self.transport.connect(addresses)

    def prepare(self, links: Sequence[Any]) -> None:
        self.transport.prepare(links)

    def expect(self, tiles: Sequence[Any]) -> None:
        self.transport.expect(tiles)

    def send(self, tag: int, tiles: Sequence[tuple[Any, Any, Any]]) -> None:
        import jax

        from autopar.runtime.transports.base import OutTile

        devices = jax.local_devices()
        self.transport.send(
            tag,
            [
                OutTile(jax.device_put(value, devices[source.device]), source, targets)
                for value, source, targets in tiles
            ],
        )

    def recv(self, tag: int, tiles: Sequence[Any]) -> None:
        self.arrived[tag] = self.transport.recv(tag, tiles)

    def recv_unseen(self, tag: int, tiles: Sequence[Any]) -> None:
        self.transport.recv(tag, tiles)

    def num_slots(self) -> int:
        return len(self.transport._slots[0]._all)

    def values(self, tag: int) -> list[tuple[Any, int]]:
        """What has arrived, and on which device; it is let go."""
        import jax
        import numpy as np

        devices = jax.local_devices()
        values = [
            (np.asarray(array), devices.index(next(iter(array.devices()))))
            for array in self.arrived.pop(tag)
        ]
        self.transport.check()
        return values

    def set_limit(self, limit_s: float) -> None:
        """For transfers of NCCL."""
        self.transport._watch.limit_s = limit_s

    def send_many(self, tags: range, source: Any, targets: Any, size: int, work: int) -> None:
        from autopar.runtime.transports.base import OutTile

        make = _maker(source.device, size, work)
        for tag in tags:
            self.transport.send(tag, [OutTile(make(tag % 97), source, targets)])

    def recv_many(self, tags: range, tile: Any) -> int:
        """How many arrive as they were sent, each used up by a program that takes its buffer."""
        right = 0
        for tag in tags:
            (array,) = self.transport.recv(tag, [tile])
            right += float(_double()(array)[0]) == 2.0 * (tag % 97)
        return right

    def with_itself(self, tags: range, end: Any, size: int, work: int) -> tuple[int, int]:
        """Send tiles to the same device. How many arrive as they were sent, and how many of these
        a program that takes their buffer could use in place."""
        from autopar.runtime.transports.base import InTile, Link, OutTile

        self.transport.prepare([Link(end, (end,))])
        make = _maker(end.device, size, work)
        right = in_place = 0
        for tag in tags:
            self.transport.send(tag, [OutTile(make(tag % 97), end, (end,))])
            tile = InTile((size,), "float32", end, end, (end,))
            (array,) = self.transport.recv(tag, [tile])
            address = array.unsafe_buffer_pointer()
            doubled = _double()(array)
            assert array.is_deleted()
            right += float(doubled[-1]) == 2.0 * (tag % 97)
            in_place += doubled.unsafe_buffer_pointer() == address
        return right, in_place

    def footprint(self) -> tuple[int, int]:
        """Arrays that are alive, and bytes of memory that this process holds."""
        import gc

        import jax

        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(jax.live_arrays()), pages * resource.getpagesize()

    def close(self) -> None:
        self.transport.close()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


@lru_cache
def _maker(device: int, size: int, work: int) -> Any:
    """Makes an array of `size` times the same number, after so many products of matrices."""
    import jax
    import jax.numpy as jnp

    place = jax.local_devices()[device]
    ones = jnp.ones((size,), jnp.float32, device=place)
    unit = jnp.eye(2048 if work else 1, dtype=jnp.float32, device=place)

    @jax.jit
    def make(number: Any, ones: Any, unit: Any) -> Any:
        product = jax.lax.fori_loop(0, work, lambda _, x: x @ unit, unit)
        return ones * number * product[0, 0]

    return lambda number: make(jnp.float32(number), ones, unit)


@lru_cache
def _double() -> Any:
    """A program that takes its argument's buffer."""
    import jax

    return jax.jit(lambda x: x + x, donate_argnums=0)


def _write(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[stream.write(view) :]
    stream.flush()


def _read(stream: Any) -> Any:
    (size,) = struct.unpack("<Q", _read_bytes(stream, 8))
    return pickle.loads(_read_bytes(stream, size))


def _read_bytes(stream: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = stream.read(size - len(data))
        if not some:
            raise EOFError
        data += some
    return bytes(data)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    worker = _Worker()
    while True:
        try:
            name, arguments = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, getattr(worker, name)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        _write(answers, answer)


if __name__ == "__main__":
    _serve()

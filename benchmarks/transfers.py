"""GB/s of each transport between two processes, against the machine's ceilings.

    python -m benchmarks.transfers [--json FILE] [--mib 1 16 256] [--rounds N]

Two processes of this host, with CPU devices or both on the first GPU, send a tile back and forth:
`one way` is half of the round trip, everything included, with one tile in flight at a time.
`stream` is four tiles sent one after another and acknowledged together, so that both sides overlap.

NCCL refuses two processes on one GPU. With one GPU it is measured from the device to itself, in one
process; with several, between two processes on the first two.

On CPUs all arrays arrive in fresh memory, whose pages the kernel zeroes one by one; `huge pages`
are the same processes with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`.

The ceilings come from the same run and are counted in the same way: on CPUs a copy by NumPy, and
bytes over a loopback TCP connection into used memory; on GPUs a copy on the device, and NCCL from
the device to itself, without JAX. GB are 10⁹ bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform as host
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from benchmarks.script import script_parser, write_json

WARM_UP = 3
STREAM_TILES = 4
LIMIT_S = 240.0
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


# -- the measured processes


class Worker:
    """One of the two processes; it reads commands as lines of JSON."""

    def open(self, number: int, transport: str, platform: str) -> Any:
        import jax

        from autopar.runtime.remote.place import WorkerPlace
        from autopar.runtime.transports.choose import make_transport

        devices = tuple(range(len(jax.local_devices())))
        place = WorkerPlace(
            number, 0, 1, 0, "here", devices, devices, platform, "127.0.0.1", "benchmark", "."
        )
        self.number = number
        self.tag = 0
        self.transport = make_transport(transport, place)
        return self.transport.address()

    def connect(self, addresses: dict[str, Any]) -> None:
        from autopar.ir.remote import Endpoint
        from autopar.runtime.transports.base import Link

        self.transport.connect({int(worker): address for worker, address in addresses.items()})
        numbers = sorted(map(int, addresses))
        self.end_here = Endpoint(self.number, 0)
        self.other = Endpoint(next((n for n in numbers if n != self.number), self.number), 0)
        first, last = Endpoint(numbers[0], 0), Endpoint(numbers[-1], 0)
        self.transport.prepare([Link(first, (last,)), Link(last, (first,))])

    def back_and_forth(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds one way. The first worker has the tile first."""
        tile = self._tile(num_bytes)
        seconds = []
        for _ in range(WARM_UP + rounds):
            started = time.perf_counter()
            if self.end_here == self.other:
                self._send(tile)
                tile = self._receive(num_bytes)
                seconds.append(time.perf_counter() - started)
                continue
            if self.number == 0:
                self._send(tile)
                tile = self._receive(num_bytes)
            else:
                tile = self._receive(num_bytes)
                self._send(tile)
            seconds.append((time.perf_counter() - started) / 2)
        return seconds[WARM_UP:]

    def stream(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds per tile, with several in flight."""
        tiles = [self._tile(num_bytes) for _ in range(STREAM_TILES)]
        word = self._tile(4)
        seconds = []
        for _ in range(WARM_UP + rounds):
            started = time.perf_counter()
            if self.number == 0:
                for tile in tiles:
                    self._send(tile)
            if self.number == 1 or self.end_here == self.other:
                got = [self._receive(num_bytes, wait=False) for _ in range(STREAM_TILES)]
                for tile in got:
                    tile.block_until_ready()
                del got
            if self.end_here != self.other:
                if self.number == 0:
                    self._receive(4)
                else:
                    self._send(word)
            seconds.append((time.perf_counter() - started) / STREAM_TILES)
        return seconds[WARM_UP:]

    def _tile(self, num_bytes: int) -> Any:
        import jax.numpy as jnp

        return jnp.ones((num_bytes // 4,), jnp.float32).block_until_ready()

    def _send(self, tile: Any) -> None:
        from autopar.runtime.transports.base import OutTile

        self.transport.send(self._tag(0), [OutTile(tile, self.end_here, (self.other,))])

    def _receive(self, num_bytes: int, wait: bool = True) -> Any:
        from autopar.runtime.transports.base import InTile

        tile = InTile((num_bytes // 4,), "float32", self.other, self.end_here, (self.end_here,))
        (array,) = self.transport.recv(self._tag(1), [tile])
        return array.block_until_ready() if wait else array

    def _tag(self, receives: int) -> int:
        """Both sides count the messages that each has sent."""
        counts = self.__dict__.setdefault("counts", {})
        sender = (self.other if receives else self.end_here).worker
        key = (sender, receives)
        counts[key] = counts.get(key, 0) + 1
        return 2 * counts[key] + sender % 2

    def close(self) -> None:
        self.transport.close()

    def about(self) -> dict[str, Any]:
        import jax

        return {
            "device": jax.local_devices()[0].device_kind,
            "devices": len(jax.local_devices()),
            "platform": jax.default_backend(),
        }

    # -- ceilings

    def numpy_copy(self, num_bytes: int, rounds: int) -> list[float]:
        import numpy as np

        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        return _timed(lambda: np.copyto(target, source), rounds)

    def tcp_listen(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(LIMIT_S)
        return self.listener.getsockname()[1]

    def tcp(self, num_bytes: int, rounds: int, port: int) -> list[float]:
        """Seconds one way; the first worker listens."""
        if self.number == 0:
            connection, _ = self.listener.accept()
            self.listener.close()
        else:
            connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        with connection:
            connection.settimeout(LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = memoryview(bytearray(num_bytes))
            steps = [lambda: connection.sendall(data), lambda: _receive_into(connection, data)]
            if self.number == 1:
                steps.reverse()
            return [seconds / 2 for seconds in _timed(lambda: [step() for step in steps], rounds)]

    def device_copy(self, num_bytes: int, rounds: int) -> list[float]:
        import cupy

        source, target = cupy.ones(num_bytes, cupy.uint8), cupy.ones(num_bytes, cupy.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)

        def copy() -> None:
            cupy.cuda.runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, num_bytes, 3, stream.ptr
            )
            stream.synchronize()

        cupy.cuda.Device().synchronize()
        return _timed(copy, rounds)

    def nccl_itself(self, num_bytes: int, rounds: int) -> list[float]:
        import cupy

        from autopar.runtime.transports.cuda import import_nccl

        nccl = import_nccl()
        comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        source, target = cupy.ones(num_bytes, cupy.uint8), cupy.ones(num_bytes, cupy.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)

        def send() -> None:
            nccl.groupStart()
            comm.send(source.data.ptr, num_bytes, nccl.NCCL_UINT8, 0, stream.ptr)
            comm.recv(target.data.ptr, num_bytes, nccl.NCCL_UINT8, 0, stream.ptr)
            nccl.groupEnd()
            stream.synchronize()

        cupy.cuda.Device().synchronize()
        seconds = _timed(send, rounds)
        comm.destroy()
        return seconds

    def cuda_versions(self) -> dict[str, Any]:
        import cupy

        from autopar.runtime.transports.cuda import import_nccl

        return {
            "cupy": cupy.__version__,
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "nccl": import_nccl().get_version(),
        }


def _receive_into(connection: socket.socket, data: memoryview) -> None:
    left = data
    while left:
        left = left[connection.recv_into(left) :]


def _timed(call: Callable[[], Any], rounds: int) -> list[float]:
    seconds = []
    for _ in range(WARM_UP + rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(worker, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


# -- the measuring process


class Process:
    def __init__(
        self,
        platform: str,
        visible: str | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env |= variables or {}
        if platform == "cpu":
            env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfers", "--serve"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def post(self, *command: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        stdout = self.process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], LIMIT_S)
        if not ready:
            raise TimeoutError(f"no answer in {LIMIT_S:g} s")
        line = stdout.readline()
        if not line:
            raise RuntimeError("a process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def ask(self, *command: Any) -> Any:
        self.post(*command)
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


def together(processes: Sequence[Process], *command: Any) -> Any:
    """Sends a command to all processes; returns the first one's answer."""
    for process in processes:
        process.post(*command)
    answers = [process.answer() for process in processes]
    return answers[0]


def row(name: str, what: str, num_bytes: int, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "transport": name,
        "what": what,
        "mib": num_bytes / 2**20,
        "gb_per_s": num_bytes / statistics.median(seconds) / 1e9,
        "best_gb_per_s": num_bytes / min(seconds) / 1e9,
        "median_ms": 1e3 * statistics.median(seconds),
        "rounds": len(seconds),
    }


def measure(
    transport: str,
    platform: str,
    visible: Sequence[str | None],
    sizes: Sequence[int],
    rounds: int,
    variables: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Measures a transport between two processes, or from one to itself: one per `visible`."""
    rows = []
    processes = [Process(platform, device, variables) for device in visible]
    try:
        addresses = {
            number: process.ask("open", number, transport, platform)
            for number, process in enumerate(processes)
        }
        together(processes, "connect", addresses)
        name = transport if len(processes) == 2 else f"{transport}, to itself"
        name += ", huge pages" if variables else ""
        for num_bytes in sizes:
            for command, what in (("back_and_forth", "one way"), ("stream", "stream")):
                count = rounds if num_bytes < 2**27 else max(5, rounds // 4)
                seconds = together(processes, command, num_bytes, count)
                rows.append(row(name, what, num_bytes, seconds))
                print(show(rows[-1]), flush=True)
        together(processes, "close")
    except (RuntimeError, TimeoutError) as error:
        rows.append({"transport": transport, "error": str(error)})
        print(show(rows[-1]), flush=True)
    finally:
        for process in processes:
            process.end()
    return rows


def ceilings(platform: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    visible = "0" if platform == "gpu" else None
    processes = [Process(platform, visible) for _ in range(2)]
    try:
        for number, process in enumerate(processes):
            process.ask("open", number, "jax_transfer", platform)
        for num_bytes in sizes:
            if platform == "cpu":
                seconds = processes[0].ask("numpy_copy", num_bytes, rounds)
                rows.append(row("ceiling: NumPy copy", "one way", num_bytes, seconds))
                port = processes[0].ask("tcp_listen")
                seconds = together(processes, "tcp", num_bytes, rounds, port)
                rows.append(row("ceiling: loopback TCP", "one way", num_bytes, seconds))
            else:
                seconds = processes[0].ask("device_copy", num_bytes, rounds)
                rows.append(row("ceiling: copy on the device", "one way", num_bytes, seconds))
                seconds = processes[0].ask("nccl_itself", num_bytes, rounds)
                rows.append(row("ceiling: NCCL to itself", "one way", num_bytes, seconds))
    except (RuntimeError, TimeoutError) as error:
        rows.append({"transport": "ceiling", "error": str(error)})
    finally:
        for process in processes:
            process.end()
    for entry in rows:
        print(show(entry), flush=True)
    return rows


def show(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['transport']}: {one['error']}"
    return (
        f"{one['transport']:28s} {one['mib']:6g} MiB, {one['what']:7s} {one['gb_per_s']:8.2f} GB/s "
        f"(best {one['best_gb_per_s']:.2f}), {one['median_ms']:.3f} ms"
    )


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds each row's ratios to the ceilings of its size."""
    limits = {
        (entry["transport"].removeprefix("ceiling: "), entry["mib"]): entry["gb_per_s"]
        for entry in rows
        if "mib" in entry and entry["transport"].startswith("ceiling")
    }
    return [
        entry
        if "mib" not in entry or entry["transport"].startswith("ceiling")
        else {
            **entry,
            "over": {
                name: entry["gb_per_s"] / limit
                for (name, mib), limit in limits.items()
                if mib == entry["mib"]
            },
        }
        for entry in rows
    ]


def about(platform: str) -> dict[str, Any]:
    process = Process(platform)
    try:
        found = process.ask("about")
        if platform == "gpu":
            try:
                found |= process.ask("cuda_versions")
            except RuntimeError as error:
                found["cuda"] = str(error)
    finally:
        process.end()
    return {
        **found,
        "machine": host.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": host.python_version(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cpu", action="store_true", help="CPU devices, even if there are GPUs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve()
        return
    found = about("cpu" if arguments.cpu else "gpu" if _has_gpu() else "cpu")
    platform = found["platform"]
    sizes = [int(mib * 2**20) for mib in arguments.mib]
    rows = ceilings(platform, sizes, arguments.rounds)
    if platform == "cpu":
        for variables in ({}, HUGE_PAGES):
            rows += measure("jax_transfer", "cpu", [None, None], sizes, arguments.rounds, variables)
    else:
        for transport in ("cuda_ipc", "jax_transfer"):
            rows += measure(transport, "gpu", ["0", "0"], sizes, arguments.rounds)
        nccl_on = ["0", "1"] if found["devices"] > 1 else ["0"]
        rows += measure("nccl", "gpu", nccl_on, sizes, arguments.rounds)
    result = {**found, "load_after": os.getloadavg()[0], "rows": with_ratios(rows)}
    write_json(arguments.json, result)


def _has_gpu() -> bool:
    return (
        pathlib.Path("/proc/driver/nvidia/gpus").exists() or pathlib.Path("/dev/nvidia0").exists()
    )


if __name__ == "__main__":
    main()

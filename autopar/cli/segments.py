"""`autopar profile --model FACTORY`: the passes over a model's segments; processes that compile.

Each of the latter (`segment_worker`) makes the step anew from the factory, and leaves the programs
that it compiles in the folder's cache, where the process that times them finds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from autopar.cli.devices import first_devices, parse_mesh, use_devices
from autopar.cli.factories import UserStep, load_step, parse_options
from autopar.errors import ArgumentError
from autopar.measure.segments.analyse import PreparedStep
from autopar.measure.segments.combine import TOP
from autopar.measure.segments.passes import PASSES, prepare_step, run_passes
from autopar.measure.segments.profile import TimingTask
from autopar.progress import Progress
from autopar.session import cluster_of_devices
from autopar.tracer.trace import step_and_options

OK = 0
COMPILE_LIMIT_S = 900.0  # for one program, including the start of its process


@dataclass(frozen=True)
class SegmentRequest:
    """What another process needs to build the same step, as JSON values."""

    factory: str
    options: dict[str, Any]
    mesh: tuple[int, ...] | None
    devices: int | None
    platform: str
    profile: str | None
    folder: str


def run_segments(arguments: Namespace) -> int:
    started = time.perf_counter()
    passes = tuple(PASSES if arguments.passes is None else arguments.passes.split(","))
    unknown = [name for name in passes if name not in PASSES]
    if unknown:
        raise ArgumentError(
            f"--passes {arguments.passes}: unknown pass {', '.join(unknown)}; choose from "
            f"{', '.join(PASSES)}."
        )
    folder = Path(arguments.folder or f"{Path(arguments.model.rpartition(':')[0]).stem}-segments")
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--folder {folder}: this is a file; give the path of a folder.")
    request = SegmentRequest(
        factory=arguments.model,
        options=parse_options(arguments.set),
        mesh=parse_mesh(arguments.mesh),
        devices=arguments.devices,
        platform=arguments.platform,
        profile=arguments.profile,
        folder=str(folder),
    )
    step, devices = step_of(request)
    jobs = arguments.jobs or default_jobs()

    def compile_ahead(tasks: list[TimingTask]) -> None:
        compile_in_processes(request, tasks, min(jobs, len(tasks)))

    result = run_passes(
        step,
        folder,
        devices,
        passes=passes,
        top=arguments.top or TOP,
        compile_ahead=compile_ahead if jobs > 1 else None,
        check=arguments.check or 0,
        say=lambda words: print(words, flush=True),
    )
    if result is not None:
        print(f"saved: {folder / 'plan.json'}, for parallelize(step, method=plan)")
    print(f"{', '.join(passes)} in {time.perf_counter() - started:.1f} s; files in {folder}")
    return OK


def default_jobs() -> int:
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def step_of(request: SegmentRequest, loaded: UserStep | None = None) -> tuple[PreparedStep, Any]:
    """The prepared step and its devices."""
    use_devices(request.platform)
    user = load_step(request.factory, request.options) if loaded is None else loaded
    devices = first_devices(request.devices)
    cluster = cluster_of_devices(devices)
    if request.profile is not None:
        cluster = replace(cluster, profile=request.profile)
    fn, options = step_and_options("profile", user.step, (), (1,))
    mesh = request.mesh or (len(devices),)
    return prepare_step(fn, user.args, user.kwargs, cluster, mesh, options), devices


# -- compiling


def compile_in_processes(
    request: SegmentRequest,
    tasks: Sequence[TimingTask],
    num: int,
    tell: Callable[[dict[str, Any]], Any] = lambda done: None,
) -> None:
    """Compile all programs into the cache, `num` at a time. Failures are left to the timing, which
    reports them."""
    left: SimpleQueue[TimingTask] = SimpleQueue()
    for task in tasks:
        left.put(task)
    with Progress(f"compiling in {num} processes", len(tasks)) as progress:

        def serve() -> None:
            with _Worker(request) as worker:
                while True:
                    try:
                        task = left.get_nowait()
                    except Empty:
                        return
                    done = worker.compile(task)
                    if done is None:  # the process ended; the others continue
                        return
                    tell(done)
                    progress.step()

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _Worker:
    """A process of `segment_worker`, which exchanges lines of JSON."""

    def __init__(self, request: SegmentRequest, limit_s: float = COMPILE_LIMIT_S) -> None:
        self.limit_s = limit_s
        package = str(Path(__file__).parents[2])
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "AUTOPAR_PROGRESS": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar.cli.segment_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.send(asdict(request))

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()

    def send(self, message: dict[str, Any]) -> bool:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def compile(self, task: TimingTask) -> dict[str, Any] | None:
        """The worker's answer; None if it ended, or was killed at the time limit."""
        assert self.process.stdout is not None
        limit = threading.Timer(self.limit_s, self.process.kill)
        limit.start()
        try:
            line = self.process.stdout.readline() if self.send(asdict(task)) else ""
        finally:
            limit.cancel()
        return json.loads(line) if line else None

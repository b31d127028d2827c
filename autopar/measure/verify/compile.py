"""XLA's GPU compiler in processes of its own: from `CompileJob`s to `ProgramCosts`.

JAX chooses and checks its plugins when it is imported, so every program is compiled in a new
process with the environment that compiling without a GPU needs. A program that takes too long or
too much memory ends only that process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import jax

from autopar.errors import CompileError
from autopar.ir.judged import JudgedStep
from autopar.measure.verify.jobs import Collectives, CompileJob, ProgramCosts

MAX_PROCESSES = 2
_LOG_LINES = 12
_KILLED = -9
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_CHILD = "autopar.measure.verify.child"


def compile_all(
    jobs: Sequence[CompileJob],
    time_limit_s: float,
    done: Callable[[CompileJob], None] = lambda job: None,
) -> list[ProgramCosts]:
    """Compile all programs, two at a time. The first failure stops the others."""
    running: set[subprocess.Popen[bytes]] = set()
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()
            for process in running:
                process.kill()

    def run(job: CompileJob) -> ProgramCosts:
        with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
            folder = Path(name)
            (folder / "job.bin").write_bytes(pickle.dumps(job))
            with (folder / "log").open("wb") as log:
                with lock:
                    if stopped.is_set():
                        raise CompileError(f"verify: compiling {job.name} was cancelled.")
                    process = _start(folder, log)
                    running.add(process)
                try:
                    code = process.wait(time_limit_s)
                except subprocess.TimeoutExpired:
                    raise CompileError(
                        f"verify: XLA did not compile {job.name} within {time_limit_s:g} s. Raise "
                        "the limit with verify(…, time_limit_s=…)."
                    ) from None
                finally:
                    process.kill()
                    process.wait()
                    with lock:
                        running.discard(process)
            costs = _result(job, folder, code)
        done(job)
        return costs

    with ThreadPoolExecutor(max_workers=MAX_PROCESSES) as threads:
        futures: list[Future[ProgramCosts]] = [threads.submit(run, job) for job in jobs]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future in finished and future.exception()]
            if failed:
                failed[0].result()
        finally:
            for future in futures:
                future.cancel()
            stop()
    return [future.result() for future in futures]


def _start(folder: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _CHILD, str(folder), str(os.getpid())],
        env=_environment(),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def _environment() -> dict[str, str]:
    """This process's environment with this autopar, set up to compile without GPUs."""
    package = str(Path(__file__).parents[3])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": _flags(os.environ.get("XLA_FLAGS", "")),
        "JAX_ENABLE_X64": "1" if jax.config.jax_enable_x64 else "0",  # type: ignore[attr-defined]
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _flags(given: str) -> str:
    """XLA's flags for compiling without a GPU. With one, XLA times its own kernels for products
    against cuBLAS's, which mostly win; without one it takes its own, which need other memory."""
    if _TRITON_PRODUCTS in given:
        return given
    return f"{given} --{_TRITON_PRODUCTS}=false".strip()


def _result(job: CompileJob, folder: Path, code: int) -> ProgramCosts:
    file = folder / "result.json"
    if not file.is_file():
        lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        reason = (
            "was killed, probably for lack of memory"
            if code == _KILLED
            else f"ended with status {code}"
        )
        words = "\n".join(lines[-_LOG_LINES:])
        raise CompileError(f"verify: the process compiling {job.name} {reason}.\n{words}")
    result = json.loads(file.read_text(encoding="utf-8"))
    if "error" in result:
        raise CompileError(f"verify: XLA cannot compile {job.name}. {result['error']}")
    collectives = tuple(Collectives(*fields) for fields in result.pop("collectives"))
    times = result.pop("times", None)
    return ProgramCosts(
        **result, collectives=collectives, times=JudgedStep(*times) if times else None
    )

"""XLA's GPU compiler in processes of its own: from `CompileJob`s to `ProgramCosts`.

JAX decides when it is imported which plugins it takes and what it checks of them. So that the
caller's process stays as it is, every program is compiled in a new one, with the environment that
compiling without a GPU needs. A program that takes too long, or more memory than the machine has,
ends that process alone.
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

import jax

from autopar.errors import CompileError
from autopar.measure.verify.jobs import Collectives, CompileJob, ProgramCosts

MAX_PROCESSES = 2
_LOG_LINES = 12
_KILLED = -9
_CHILD = "autopar.measure.verify.child"


def compile_all(
    jobs: Sequence[CompileJob],
    time_limit_s: float,
    done: Callable[[CompileJob], None] = lambda job: None,
) -> list[ProgramCosts]:
    """Every program compiled, two at a time. The first that fails ends the others."""
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
                        raise CompileError(f"verify: {job.name} was not compiled.")
                    process = subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            _CHILD,
                            name,
                            str(os.getpid()),
                        ],
                        env=_environment(),
                        cwd=name,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                    running.add(process)
                try:
                    code = process.wait(time_limit_s)
                except subprocess.TimeoutExpired:
                    raise CompileError(
                        f"verify: XLA did not compile {job.name} within {time_limit_s:g} s. Give "
                        "it longer with verify(…, time_limit_s=…)."
                    ) from None
                finally:
                    process.kill()
                    process.wait()
                    with lock:
                        running.discard(process)
            figures = _result(job, folder, code)
        done(job)
        return figures

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


def _environment() -> dict[str, str]:
    """As this process's, but for GPUs that are not there, and with this very autopar."""
    package = str(Path(__file__).parents[3])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_X64": "1" if jax.config.jax_enable_x64 else "0",  # type: ignore[attr-defined]
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _result(job: CompileJob, folder: Path, code: int) -> ProgramCosts:
    file = folder / "result.json"
    if not file.is_file():
        lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        reason = (
            "was killed: most likely this machine has too little memory for it"
            if code == _KILLED
            else f"ended with status {code}"
        )
        words = "\n".join(lines[-_LOG_LINES:])
        raise CompileError(f"verify: the process that compiled {job.name} {reason}.\n{words}")
    found = json.loads(file.read_text(encoding="utf-8"))
    if "error" in found:
        raise CompileError(f"verify: {job.name} cannot be compiled. {found['error']}")
    collectives = tuple(Collectives(*one) for one in found.pop("collectives"))
    return ProgramCosts(**found, collectives=collectives)

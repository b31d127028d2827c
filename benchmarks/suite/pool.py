"""Processes side by side, each with one result file: from `Task`s to the files, in limited time.

A task whose file exists is not run again, so an interrupted run resumes. A process that fails
leaves its log next to the missing file, and the next run tries it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LAST_WORDS = 400


@dataclass(frozen=True)
class Task:
    """`arguments` for this Python write the file `result`. `environment` is added. With `again`,
    the task runs even if the result exists, and resumes by itself."""

    name: str
    arguments: tuple[str, ...]
    result: Path
    environment: dict[str, str] = field(default_factory=dict)
    again: bool = False

    @property
    def log(self) -> Path:
        return self.result.with_suffix(".log")

    @property
    def is_done(self) -> bool:
        return self.result.is_file()


def run_tasks(
    tasks: Sequence[Task],
    jobs: int,
    ends_s: float,
    done: Callable[[Task, str], None] = lambda task, problem: None,
) -> int:
    """Runs the unfinished tasks, `jobs` at a time, until `ends_s` (`time.time`). Calls `done` for
    each task that ended, with its problem or "". Returns how many tasks are still unfinished."""
    waiting = [task for task in tasks if task.again or not task.is_done]
    running: set[subprocess.Popen[bytes]] = set()
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()
            for process in running:
                process.kill()

    def run(task: Task) -> str:
        if stopped.is_set() or time.time() >= ends_s:
            return "the time was up before it began"
        task.result.parent.mkdir(parents=True, exist_ok=True)
        with task.log.open("wb") as log:
            with lock:
                if stopped.is_set():
                    return "the time was up before it began"
                process = subprocess.Popen(
                    [sys.executable, *task.arguments],
                    env=_environment(task),
                    cwd=_ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                running.add(process)
            try:
                code = process.wait(max(0.1, ends_s - time.time()))
            except subprocess.TimeoutExpired:
                return "the time was up while it ran"
            finally:
                process.kill()
                process.wait()
                with lock:
                    running.discard(process)
        if task.is_done:
            return ""
        words = task.log.read_text(encoding="utf-8", errors="replace").strip()[-_LAST_WORDS:]
        return f"ended with status {code}: {words}"

    with ThreadPoolExecutor(max_workers=jobs) as threads:
        futures = {threads.submit(run, task): task for task in waiting}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        finally:
            stop()
    return sum(not task.is_done for task in tasks)


def _environment(task: Task) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **task.environment,
    }

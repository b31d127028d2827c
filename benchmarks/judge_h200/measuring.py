"""Cases → a folder with a row per case, its optimized HLO, and a profile of one step.

All cases are compiled first, some side by side, then timed one after another with nothing else on
the GPU. Where one takes most of the time to compile, the others are timed beside it, and their
rows say so. When all have been timed, one step of each runs under the profiler while time is left,
those of the development half first. The state is donated; a sample is a round of steps that are
dispatched without waiting.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.runtime.timing import spread_of
from benchmarks.judge_h200.cases import Case
from benchmarks.one_gpu import memory_of
from benchmarks.step_profile import profile_of

DEVICE, PROFILE = "h200-sxm", "h200"
NO_BUDGET_BYTES = 1e15
LEAST_ROUND_S = 0.15
WARM_UP_S = 0.3
NUM_ROUNDS = 7
SIDE_BY_SIDE = 8
COMPILING = 0.75  # of the time; a case that has not been compiled then is left out


@dataclass(frozen=True)
class Compiled:
    """A case that is ready to run."""

    case: Case
    make_state: Any
    batch: Any
    step: Any
    compile_s: float


class Folder:
    """Rows and programs on disk; everything is written at once."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.about = about
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["name"]] = self.rows.get(row["name"], {}) | row
        document = {**self.about, "rows": list(self.rows.values())}
        (self.path / "rows.json").write_text(json.dumps(document, indent=1) + "\n")

    def add_file(self, name: str, ending: str, content: bytes) -> None:
        file_of(self.path, name, ending).write_bytes(gzip.compress(content, 6))


def file_of(folder: Path, name: str, ending: str) -> Path:
    """A case's program (".hlo.gz") or profile (".xplane.gz")."""
    return folder / (re.sub(r"\W+", "-", name) + ending)


def measure(cases: Sequence[Case], folder: Folder, *, tiny: bool, ends_s: float) -> list[str]:
    """Until `ends_s`, by `time.monotonic`. What has not begun then is left out. Returns the cases
    that took too long to compile, some of which may still be compiled."""
    ready: list[Compiled] = []
    found, late = _compile_all(cases, folder, tiny, COMPILING * (ends_s - time.monotonic()))
    for one in found:
        if time.monotonic() > ends_s:
            break
        try:
            row = _timed_row(one)
        except jax.errors.JaxRuntimeError as error:
            _fail(folder, one.case, error)
            continue
        folder.add(row | ({"compiling_beside": late} if late else {}))
        ready.append(one)
        step_ms, spread = 1e3 * row["step_s"], row["spread"]
        print(f"{one.case.name:26s} {step_ms:8.2f} ms ± {spread:.1%}", flush=True)
    for one in sorted(ready, key=lambda one: one.case.held_out):
        if time.monotonic() > ends_s:
            break
        folder.add_file(one.case.name, ".xplane.gz", _profile(one))
    return late


def _fail(folder: Folder, case: Case, error: Exception) -> None:
    first, _, _ = f"{type(error).__name__}: {error}".partition("\n")
    folder.add({"name": case.name, "held_out": case.held_out, "error": first})
    print(f"{case.name:26s} {first}", flush=True)


def _compile_all(
    cases: Sequence[Case], folder: Folder, tiny: bool, limit_s: float
) -> tuple[list[Compiled], list[str]]:
    """The compiled ones, and the names of those that are not after `limit_s`."""
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    futures = [pool.submit(_compile, case, tiny) for case in cases]
    started = time.monotonic()
    wait(futures, limit_s)
    pool.shutdown(wait=False, cancel_futures=True)
    found, late = [], []
    for case, future in zip(cases, futures, strict=True):
        if not future.done() or future.cancelled():
            late.append(case.name)
            continue
        try:
            one = future.result()
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            _fail(folder, case, error)
            continue
        folder.add_file(case.name, ".hlo.gz", one.step.as_text().encode())
        found.append(one)
    spent_s = time.monotonic() - started
    print(f"{len(found)} compiled in {spent_s:.0f} s; late: {late}", flush=True)
    return found, late


def _compile(case: Case, tiny: bool) -> Compiled:
    made = case.make(tiny)
    state = jax.eval_shape(made.make_state)
    batch = jax.eval_shape(lambda: made.make_batch(0))
    make_state = jax.jit(made.make_state).lower().compile()
    make_batch = jax.jit(lambda: made.make_batch(0)).lower().compile()
    started = time.perf_counter()
    if case.planned:
        step = _Planned(made.step, (state, *batch))
    else:
        step = jax.jit(made.step, donate_argnums=0).lower(state, *batch).compile()
    return Compiled(case, make_state, make_batch, step, time.perf_counter() - started)


def plan_on_h200(step: Any, *args: Any) -> autopar.ParallelPlan:
    """The step whole, with all its activations, priced by the table that comes with autopar."""
    cluster = autopar.ClusterSpec(1, 1, DEVICE, profile=PROFILE)
    options = autopar.ShardingOptions(remat="none", memory_budget_bytes=NO_BUDGET_BYTES)
    method = autopar.ShardParallel((1,), options=options)
    return autopar.plan(step, *args, cluster=cluster, method=method)


class _Planned:
    """A step as autopar runs it on one device, called like the original."""

    def __init__(self, step: Any, args: tuple[Any, ...]) -> None:
        plan = plan_on_h200(step, *args)
        self.compiled = autopar.compile(step, *args, plan=plan)["step"]
        self.results = jax.tree.structure(jax.eval_shape(step, *args))

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.results, self.compiled(*jax.tree.leaves(args)))

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()


def _timed_row(one: Compiled) -> dict[str, Any]:
    state, batch = jax.block_until_ready((one.make_state(), one.batch()))

    def run(num_steps: int) -> float:
        nonlocal state
        metrics = None
        started = time.perf_counter()
        for _ in range(num_steps):
            state, metrics = one.step(state, *batch)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - started) / num_steps

    run(1)
    num_steps = max(2, round(LEAST_ROUND_S / run(2)))
    warm_until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm_until:
        run(num_steps)
    samples = [run(num_steps) for _ in range(NUM_ROUNDS)]
    return {
        "name": one.case.name,
        "held_out": one.case.held_out,
        "step_s": statistics.median(samples),
        "spread": spread_of(samples),
        "steps": num_steps,
        "compile_s": one.compile_s,
        "memory": memory_of(one.step),
    }


def _profile(one: Compiled) -> bytes:
    state, batch = jax.block_until_ready((one.make_state(), one.batch()))
    state, _ = jax.block_until_ready(one.step(state, *batch))
    return profile_of(lambda: one.step(state, *batch))

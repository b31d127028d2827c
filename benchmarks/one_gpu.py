"""autopar's step beside plain `jax.jit` of the same model on one GPU: time, memory, compiling.

    python -m benchmarks.one_gpu --json FILE [--only GROUP …] [--limit-s 540] [--hlo FOLDER]
    python -m benchmarks.one_gpu --tiny          (a dry run on any device)

On one device there is nothing to shard: this checks that autopar costs nothing where it cannot
help, and its rows are the truth that predictions are held against (`benchmarks.accuracy
--measured`). Both steps take turns with one state: each round runs some steps of the one and then
of the other, dispatched without waiting; `ratio` is the median over rounds of autopar's seconds
over `jax.jit`'s. `call_ms` is how long a call keeps the host, `compile_s` tracing, lowering and
compiling (whoever is second finds XLA's choices of kernels made), `plan_s` is autopar's alone.
`xla_bytes` is XLA's own peak, `seen_bytes` the most that the allocator had in use (None where an
earlier row had more).

Every group of cases has a process of its own; rows are written as they come, and what has not
begun when the time is up is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

GIB = 2**30
LEAST_ROUND_S = 0.4
LEAST_STEPS = 4  # of a round: that many are dispatched before any is waited for
NUM_ROUNDS = 6


def median_step_s(step: Any, state: Any, batch: Any, steps: int) -> tuple[float, Any]:
    """The median of steps that are waited for one by one."""
    import jax

    times = []
    for _ in range(steps):
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - started)
    return statistics.median(times), state


class _Plain:
    """`jax.jit` of the step, compiled ahead so that it takes the state wherever it came from."""

    def __init__(self, case: Any) -> None:
        self._case = case
        self.compiled: Any = None

    def first(self, state: Any, batch: Any) -> Any:
        import jax

        from benchmarks.one_gpu_cases import plain_step

        jitted = jax.jit(plain_step(self._case), donate_argnums=0)
        self.compiled = jitted.lower(state, batch).compile()
        return self.compiled(state, batch)

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.compiled(state, batch)


class _Ours:
    """As a user calls it."""

    def __init__(self, case: Any) -> None:
        import autopar
        from benchmarks.one_gpu_cases import example_of, method_of

        self.step = autopar.parallelize(example_of(case).train_step, method=method_of(case))
        self.plan: Any = None
        self.plan_s = 0.0

    def first(self, state: Any, batch: Any) -> Any:
        started = time.perf_counter()
        self.plan = self.step.plan(state, batch)
        self.plan_s = time.perf_counter() - started
        return self.step(state, batch)

    @property
    def compiled(self) -> Any:
        return self.step.last_executable.compiled

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.step(state, batch)


def measure(case: Any, *, ours_first: bool, rounds: int, folder: str | None) -> dict[str, Any]:
    import jax

    from autopar.ir.mesh import device_spec, preset_of
    from autopar.runtime.timing import spread_of
    from benchmarks.one_gpu_cases import example_of

    device = jax.devices()[0]
    example = example_of(case)
    batch = example.make_batch()
    ours = _Ours(case)
    steps: dict[str, Any] = {"jit": _Plain(case), "autopar": ours}
    order = ["autopar", "jit"] if ours_first else ["jit", "autopar"]
    peak_before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    row: dict[str, Any] = {**dataclasses.asdict(case), "compiled_first": order[0]}
    first_s: dict[str, float] = {}
    state = None
    for name in order:
        state = None  # before the next one is made
        state = example.create_state()
        started = time.perf_counter()
        state, loss = jax.block_until_ready(steps[name].first(state, batch))
        first_s[name] = time.perf_counter() - started
        row[f"{name}_loss"] = float(loss)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    samples: dict[str, list[float]] = {name: [] for name in order}
    calls: dict[str, list[float]] = {name: [] for name in order}
    num_steps = LEAST_STEPS
    for index in range(rounds + 1):
        for name in order if index % 2 else order[::-1]:
            step = steps[name]
            started = time.perf_counter()
            state, loss = step(state, batch)
            called_s = time.perf_counter() - started
            for _ in range(num_steps - 1):
                state, loss = step(state, batch)
            jax.block_until_ready((state, loss))
            seconds = (time.perf_counter() - started) / num_steps
            if index:
                samples[name].append(seconds)
                calls[name].append(called_s)
        if not index:  # a round to warm up, by which the others are sized
            num_steps = max(LEAST_STEPS, round(LEAST_ROUND_S / seconds))
    ratios = [a / b for a, b in zip(samples["autopar"], samples["jit"], strict=True)]
    row |= {"steps": num_steps, "rounds": rounds}
    row |= {"ratio": statistics.median(ratios), "ratio_spread": spread_of(ratios)}
    for name in order:
        row[f"{name}_step_s"] = statistics.median(samples[name])
        row[f"{name}_spread"] = spread_of(samples[name])
        row[f"{name}_call_ms"] = 1e3 * statistics.median(calls[name])
        row[f"{name}_compile_s"] = first_s[name] - row[f"{name}_step_s"]
        row[f"{name}_memory"] = memory_of(steps[name].compiled)
        row[f"{name}_xla_bytes"] = row[f"{name}_memory"]["peak"]
    row["autopar_compile_s"] -= ours.plan_s
    flops = example.flops_per_step()
    spec = device_spec(preset_of(device.platform, device.device_kind))
    is_32bit = str(jax.numpy.dtype(example.config.dtype)) == "float32"
    rate = flops / row["autopar_step_s"]
    row |= {
        "seen_bytes": peak if peak > peak_before else None,
        "plan_s": ours.plan_s,
        "predicted_step_s": ours.plan.estimated_step_s,
        "predicted_bytes": ours.plan.estimated_peak_bytes,
        "remat_layers": len(ours.plan.remat),
        "tflops": rate / 1e12,
        "share_of_peak": rate / (spec.flops_32bit if is_32bit else spec.flops_16bit),
    }
    if folder:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        name = case.label().replace(", ", "_").replace(" ", "-")
        with gzip.open(path / f"{name}.hlo.gz", "wt") as file:
            file.write(ours.compiled.as_text())
    return row


def memory_of(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    peak = sizes["arguments"] + sizes["outputs"] + sizes["temporaries"] - sizes["aliased"]
    return {**sizes, "peak": peak}


def run_group(name: str, tiny: bool, rounds: int, folder: str | None) -> None:
    """In a process of its own: the machine, then a row per case, as lines of JSON."""
    import jax

    import autopar
    from benchmarks.one_gpu_cases import GROUPS, TINY_GROUPS
    from benchmarks.pipeline_rows import machine

    device = jax.devices()[0]
    autopar.init(devices=[device])
    print(json.dumps({**machine(), "device": device.device_kind}), flush=True)
    for index, case in enumerate((TINY_GROUPS if tiny else GROUPS)[name]):
        try:
            row = measure(case, ours_first=index % 2 == 0, rounds=rounds, folder=folder)
        except (jax.errors.JaxRuntimeError, autopar.AutoparError) as error:
            first, _, _ = str(error).partition("\n")
            row = {**dataclasses.asdict(case), "error": first}
        print(json.dumps({"group": name, "label": case.label(), **row}), flush=True)
        jax.clear_caches()


def lines_of(command: list[str], ends_s: float) -> Iterator[dict[str, Any]]:
    """What a process prints, line by line; it is ended when the time is up."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        limit = threading.Timer(ends_s - time.time(), process.kill)
        limit.start()
        try:
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        finally:
            limit.cancel()
            process.kill()


def show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['label']:55s} {row['error']}", flush=True)
        return
    peaks = " / ".join(f"{row[f'{name}_xla_bytes'] / GIB:.2f}" for name in ("jit", "autopar"))
    seen = f", seen {row['seen_bytes'] / GIB:.2f}" if row["seen_bytes"] else ""
    steps = " / ".join(f"{1e3 * row[f'{name}_step_s']:8.2f}" for name in ("jit", "autopar"))
    print(
        f"{row['label']:55s} {steps} ms "
        f"± {row['autopar_spread']:.1%}, ratio {row['ratio']:.4f} ± {row['ratio_spread']:.2%}; "
        f"{row['tflops']:.0f} TFLOP/s ({row['share_of_peak']:.1%}); {peaks} GiB{seen}; "
        f"compiled in {row['jit_compile_s']:.1f} / {row['autopar_compile_s']:.1f} s, "
        f"planned in {row['plan_s']:.1f} s; a call {row['jit_call_ms']:.2f} / "
        f"{row['autopar_call_ms']:.2f} ms; predicted {1e3 * row['predicted_step_s']:.2f} ms, "
        f"{row['predicted_bytes'] / GIB:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups, in this order")
    parser.add_argument("--limit-s", type=float, default=560.0, help="end after that many seconds")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--hlo", metavar="FOLDER", help="write optimized programs there")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any device")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        run_group(options.group, options.tiny, options.rounds, options.hlo)
        return
    from benchmarks.one_gpu_cases import GROUPS, TINY_GROUPS

    groups = TINY_GROUPS if options.tiny else GROUPS
    wanted = options.only or list(groups)
    if unknown := set(wanted) - set(groups):
        parser.error(f"--only: {unknown.pop()!r} is none of {', '.join(groups)}")
    ends_s = time.time() + options.limit_s
    command_line = " ".join(["python -m benchmarks.one_gpu", *sys.argv[1:]])
    for path, name in ((options.json, "FILE"), (options.hlo, "FOLDER")):
        command_line = command_line.replace(path, name) if path else command_line
    document: dict[str, Any] = {"command": command_line}
    rows: list[dict[str, Any]] = []
    for group in wanted:
        if time.time() > ends_s:
            print(f"{group}: left out, the time is up", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.one_gpu", "--group", group]
        command += ["--rounds", str(options.rounds)] + ["--tiny"] * options.tiny
        command += ["--hlo", options.hlo] if options.hlo else []
        for line in lines_of(command, ends_s):
            if "group" not in line:
                document |= line
                continue
            rows.append(line)
            show(line)
            if options.json:
                text = json.dumps({**document, "rows": rows}, indent=1) + "\n"
                pathlib.Path(options.json).write_text(text)


if __name__ == "__main__":
    main()

"""autopar's step against plain `jax.jit` of the same model on one GPU: time, memory, compiling.

    python -m benchmarks.one_gpu --json FILE [--only GROUP …] [--limit-s 540] [--hlo FOLDER]
    python -m benchmarks.one_gpu --tiny          (a dry run on any device)

On one device there is nothing to shard: this checks that autopar costs nothing there, and its rows
are the reference for predictions (`benchmarks.accuracy --measured`). Both steps take turns on one
state: each round dispatches some steps of one and then of the other without waiting; `ratio` is the
median over rounds of autopar's seconds over `jax.jit`'s. `call_ms` is how long a call occupies the
host, `compile_s` is tracing, lowering and compiling (whichever is second reuses XLA's kernel
choices), `plan_s` is autopar's alone. `xla_bytes` is XLA's peak, `seen_bytes` the allocator's peak
(None where an earlier row had more).

Every group of cases runs in its own process. Rows are written as they come; groups that have not
begun when the time is up are left out.
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

from benchmarks.script import check_names, command_line, script_parser, write_json

GIB = 2**30
LEAST_ROUND_S = 0.4
LEAST_STEPS = 4  # per round: all are dispatched before waiting for any
NUM_ROUNDS = 6


class _Plain:
    """`jax.jit` of the step, compiled ahead of time so that it accepts the other side's state."""

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
    """autopar's step, as a user calls it."""

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

    from autopar.ir.devices import device_spec, preset_of
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
        state = None  # freed before the next one is created
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
        if not index:  # the warm-up round sets the size of the others
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
    """Runs in its own process: prints the machine, then a row per case, as lines of JSON."""
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


def rows_of(
    name: str, command: list[str], ends_s: float, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows that a process prints as lines of JSON; it is killed when the time is up. A line
    without a `label` describes the machine and is added to `about`."""
    if time.time() > ends_s:
        print(f"{name}: left out, the time is up", flush=True)
        return
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        limit = threading.Timer(ends_s - time.time(), process.kill)
        limit.start()
        try:
            for line in process.stdout:
                found = json.loads(line) if line.startswith("{") else {}
                if "label" in found:
                    yield found
                else:
                    about.update(found)
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
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups, in this order")
    parser.add_argument("--limit-s", type=float, default=560.0, help="stop after that many seconds")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--hlo", metavar="FOLDER", help="write the optimized programs there")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any device")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        run_group(options.group, options.tiny, options.rounds, options.hlo)
        return
    from benchmarks.one_gpu_cases import GROUPS, TINY_GROUPS

    groups = TINY_GROUPS if options.tiny else GROUPS
    wanted = options.only or list(groups)
    check_names(parser, "--only", wanted, groups)
    ends_s = time.time() + options.limit_s
    typed = command_line("benchmarks.one_gpu", FILE=options.json, FOLDER=options.hlo)
    document: dict[str, Any] = {"command": typed}
    rows: list[dict[str, Any]] = []
    for group in wanted:
        command = [sys.executable, "-m", "benchmarks.one_gpu", "--group", group]
        command += ["--rounds", str(options.rounds)] + ["--tiny"] * options.tiny
        command += ["--hlo", options.hlo] if options.hlo else []
        for row in rows_of(group, command, ends_s, document):
            rows.append(row)
            show(row)
            write_json(options.json, {**document, "rows": rows})


if __name__ == "__main__":
    main()

"""A scan over layers against the same layers written out: seconds of a step on one device.

    python -m benchmarks.scan_speed [--json FILE] [--only MODEL …] [--tiny | --compiled [N]]

Every model runs in four forms: scanned and written out, by `jax.jit` and by autopar's default
method. They take turns: each round dispatches some steps of one form after the other without
waiting, and a form's time is the median over rounds. `scan_ratio` is a scanned step over the
written-out one by the same side; `jit_ratio` is autopar's step over that of `jax.jit`. With
`--tiny`, a dry run on any device.

With `--compiled` nothing runs: the programs, planned on one mesh, are compiled for one absent H100,
or for N of them with N times the batch, and `autopar.measure.judge` reads their seconds. A third
side, `kept scan`, is autopar's without writing the scan out, as in deep models. `jax.jit` is for
one device only. It needs `jax[cuda13]` and

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 XLA_FLAGS=--xla_gpu_enable_triton_gemm=false
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.measure.judge import judge
from autopar.sharding import plan_whole
from benchmarks.script import check_names, command_line, script_parser, write_json
from examples.models import build

GPT = {"num_heads": 16, "seq_len": 1024, "vocab_size": 32768}
LLAMA = {"num_heads": 16, "num_kv_heads": 8, "ffn_size": 5632, "seq_len": 2048, "vocab_size": 32768}
# name -> (model, overrides, batch)
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt-12x1024": ("gpt-2.6b", {"hidden_size": 1024, "num_layers": 12, **GPT}, 8),
    "llama-16x2048": ("llama3-8b", {"hidden_size": 2048, "num_layers": 16, **LLAMA}, 4),
}
TINY: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt-12x1024": ("gpt-tiny", {"num_layers": 4}, 4),
    "llama-16x2048": ("llama-tiny", {"num_layers": 4}, 4),
}
H100 = "h100-sxm"
NUM_ROUNDS = 5
LEAST_ROUND_S = 0.4


class Form:
    """One form of a model's step, with a state of its own."""

    def __init__(self, case: tuple[str, dict[str, Any], int], scan: bool, side: str) -> None:
        name, overrides, batch = case
        example = build(name, batch_size=batch, scan_layers=scan, **overrides)
        self.layers, self.side = "scanned" if scan else "written out", side
        self.state, self.batch = example.create_state(), jax.device_put(example.make_batch())
        self.step: Callable[..., Any]
        started = time.perf_counter()
        if side == "jit":
            self.step = jax.jit(example.train_step, donate_argnums=0)
        else:
            self.step = autopar.parallelize(example.train_step)
        self.run(1)
        self.compile_s = time.perf_counter() - started
        started = time.perf_counter()
        self.run(2)
        self.num_steps = max(2, round(LEAST_ROUND_S / (time.perf_counter() - started) * 2))
        self.times: list[float] = []

    def run(self, num_steps: int) -> None:
        result = None
        for _ in range(num_steps):
            self.state, result = self.step(self.state, self.batch)
        jax.block_until_ready(result)

    def round(self) -> None:
        started = time.perf_counter()
        self.run(self.num_steps)
        self.times.append((time.perf_counter() - started) / self.num_steps)

    @property
    def step_s(self) -> float:
        return statistics.median(self.times)


def measured(name: str, case: tuple[str, dict[str, Any], int]) -> list[dict[str, Any]]:
    forms = [Form(case, scan, side) for scan in (False, True) for side in ("jit", "autopar")]
    for _ in range(NUM_ROUNDS):
        for form in forms:
            form.round()
    step_s = {(form.layers, form.side): form.step_s for form in forms}
    return [
        {
            "model": name,
            "layers": form.layers,
            "side": form.side,
            "step_ms": round(1e3 * form.step_s, 3),
            "compile_s": round(form.compile_s, 1),
            "scan_ratio": round(form.step_s / step_s["written out", form.side], 3),
            "jit_ratio": round(form.step_s / step_s[form.layers, "jit"], 3),
        }
        for form in forms
    ]


def judged(
    name: str, case: tuple[str, dict[str, Any], int], num_devices: int
) -> list[dict[str, Any]]:
    """The forms of a model compiled for absent H100s."""
    from benchmarks.gpu_hlo import peak_bytes  # keeps JAX from looking for GPUs

    model, overrides, batch = case
    rows: list[dict[str, Any]] = []
    for scan in (False, True):
        example = build(model, batch_size=batch * num_devices, scan_layers=scan, **overrides)
        sides = ("jit", "autopar", "kept scan") if scan else ("jit", "autopar")
        for side in sides if num_devices == 1 else sides[1:]:
            compiled, plan = _compiled(example, side, num_devices)
            row = {
                "model": name,
                "layers": "scanned" if scan else "written out",
                "side": side,
                "step_ms": round(1e3 * judge(compiled.as_text(), H100).step_s, 2),
                "peak_gib": round(peak_bytes(compiled) / 2**30, 2),
            }
            if plan is not None:
                row["predicted_ms"] = round(1e3 * plan.estimated_step_s, 2)
                row["predicted_peak_gib"] = round(plan.estimated_peak_bytes / 2**30, 2)
            rows.append(row)
    return rows


def _compiled(example: Any, side: str, num_devices: int) -> tuple[Any, autopar.ParallelPlan | None]:
    from benchmarks.gpu_hlo import h100_devices

    devices = h100_devices(num_devices)
    state, batch = example.abstract_state(), example.abstract_batch()
    if side == "jit":
        alone = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
        step = jax.jit(
            example.train_step, donate_argnums=0, in_shardings=alone, out_shardings=alone
        )
        return step.lower(state, batch).compile(), None
    worth = plan_whole._WORTH_UNROLLING
    if side == "kept scan":
        plan_whole._WORTH_UNROLLING = 0.0
    try:
        cluster = autopar.ClusterSpec(1, num_devices, H100)
        plan = autopar.plan(example.train_step, state, batch, cluster=cluster, method="shard")
    finally:
        plan_whole._WORTH_UNROLLING = worth
    compiled = autopar.compile(example.train_step, state, batch, plan=plan, devices=devices)
    return compiled["step"], plan


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="small models: a dry run")
    parser.add_argument(
        "--compiled",
        nargs="?",
        type=int,
        const=1,
        choices=range(1, 9),
        metavar="N",
        help="for absent H100s of one host, by the judge",
    )
    options = parser.parse_args()
    check_names(parser, "--only", options.only, MODELS)
    if not options.compiled:
        autopar.init(devices=jax.devices()[:1])
    document: dict[str, Any] = {
        "command": command_line("benchmarks.scan_speed", FILE=options.json),
        "jax": jax.__version__,
        "device": f"{options.compiled} × {H100}, not run"
        if options.compiled
        else jax.devices()[0].device_kind,
        "rows": [],
    }
    for name in options.only:
        case = (TINY if options.tiny else MODELS)[name]
        rows = judged(name, case, options.compiled) if options.compiled else measured(name, case)
        for row in rows:
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
        write_json(options.json, document)


if __name__ == "__main__":
    main()

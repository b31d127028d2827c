"""Predicted peak memory against XLA's figure, for models × forms × methods.

    python -m benchmarks.memory --target cpu
    python -m benchmarks.memory --target h100 --devices 64 --model gpt-4x2560 --json FILE

`cpu` compiles small float32 models for virtual CPU devices; `h100` compiles models of real width,
but shallow, in bfloat16, for H100s (needs `jax[cuda13]`, no GPU). XLA's figure is arguments +
outputs + temporaries − aliased, per device; `ratio` is predicted / XLA, so below 1 is too little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

# This sets the environment for compiling without GPUs, so it comes before JAX.
from benchmarks import gpu_hlo

# isort: split
import jax
import jax.numpy as jnp

import autopar
from benchmarks.script import check_names, script_parser, write_json
from examples.models import Example, bert, build, gpt, llama, moe, wide_resnet

NO_BUDGET_BYTES = 1e15
SHARE_OF_FREE = 0.8
NUM_MICRO_BATCHES = 4
TOLERANCE = 0.15
FORMS = ("plain", "scan")
METHODS = ("data", "zero2", "zero3", "free", "budget", "micro-batches", "remat")


def models(target: str, num_devices: int) -> dict[str, Example]:
    """Batch sizes are for 8 devices and grow with the devices."""
    times = max(1, num_devices // 8)
    if target == "cpu":
        small = {"seq_len": 128, "vocab_size": 2048}
        return {
            "gpt": gpt.example(gpt.GPTConfig(256, 2, 8, **small), 32 * times),
            "llama": llama.example(llama.LlamaConfig(256, 2, 8, 8, 768, **small), 32 * times),
            "moe": moe.example(
                moe.MoEConfig(256, 2, 8, num_heads=8, group_size=256, **small), 32 * times
            ),
            "bert": bert.example(bert.BertConfig(256, 2, 8, **small), 32 * times),
            "wresnet": wide_resnet.example(
                wide_resnet.WideResNetConfig((1, 1), 64, 2, image_size=32, num_classes=64),
                64 * times,
            ),
        }
    bf16 = {"dtype": jnp.bfloat16}
    return {
        "gpt-4x2560": gpt.example(gpt.GPTConfig(2560, 4, 32, **bf16), 64 * times),
        "gpt-2x8192": gpt.example(gpt.GPTConfig(8192, 2, 64, **bf16), 8 * times),
        "llama-2x4096": build("llama3-8b", 16 * times, num_layers=2, seq_len=2048),
        "moe-2x1536": moe.example(moe.MoEConfig(1536, 2, 16, num_heads=16, **bf16), 32 * times),
        "bert-2x1024": build("bert-large", 128 * times, num_layers=2),
        "wresnet-250m": build("wresnet-250m", 64 * times, stage_sizes=(1, 1, 1, 1), **bf16),
    }


def in_form(example: Example, form: str) -> Example | None:
    """The model with its layers unrolled or in a loop; None if it does not support that."""
    if form == "plain":
        return example
    return example.replace(scan_layers=True) if hasattr(example.config, "scan_layers") else None


def method_of(name: str, free_bytes: float | None) -> Any:
    """`free_bytes` is the peak of the plan without a budget."""

    def solver(budget_bytes: float, num_micro_batches: int = 1, remat: str = "auto") -> Any:
        options = autopar.ShardingOptions(memory_budget_bytes=budget_bytes, remat=remat)
        return autopar.ShardParallel(num_micro_batches=num_micro_batches, options=options)

    if name == "budget":
        assert free_bytes is not None
        return solver(SHARE_OF_FREE * free_bytes)
    return {
        "data": lambda: autopar.DataParallel(),
        "zero2": lambda: autopar.Zero2Parallel(),
        "zero3": lambda: autopar.Zero3Parallel(),
        "free": lambda: solver(NO_BUDGET_BYTES),
        "micro-batches": lambda: solver(NO_BUDGET_BYTES, NUM_MICRO_BATCHES),
        "remat": lambda: solver(NO_BUDGET_BYTES, remat="all"),
    }[name]()


def rows_of(
    example: Example, methods: list[str], cluster: autopar.ClusterSpec, devices: Any
) -> Iterator[dict[str, Any]]:
    """One row for each method; the budget is a share of the predicted peak without one."""
    arguments = (example.abstract_state(), example.abstract_batch())

    def planned(method: Any) -> autopar.ParallelPlan:
        return autopar.plan(example.train_step, *arguments, cluster=cluster, method=method)

    free_bytes = None
    if "budget" in methods:
        free_bytes = planned(method_of("free", None)).estimated_peak_bytes
    for name in methods:
        row: dict[str, Any] = {"method": name}
        try:
            plan = planned(method_of(name, free_bytes))
        except autopar.AutoparError as error:
            yield {**row, "error": str(error)}
            continue
        started = time.perf_counter()
        compiled = autopar.compile(example.train_step, *arguments, plan=plan, devices=devices)
        xla_bytes = gpu_hlo.peak_bytes(compiled["step"])
        yield {
            **row,
            "mesh": list(plan.mesh_shape),
            "remat_layers": len(plan.remat),
            "predicted_bytes": plan.estimated_peak_bytes,
            "xla_bytes": xla_bytes,
            "ratio": plan.estimated_peak_bytes / xla_bytes,
            "budget_bytes": SHARE_OF_FREE * free_bytes if name == "budget" else None,
            "compiled_s": time.perf_counter() - started,
        }


def show(row: dict[str, Any]) -> None:
    head = f"| {row['model']:13s} | {row['form']:5s} | {row['method']:13s} |"
    if "error" in row:
        first, _, _ = row["error"].partition("\n")
        print(f"{head} {first} |", flush=True)
        return
    mesh = "×".join(map(str, row["mesh"]))
    print(
        f"{head} {mesh:5s} | {row['remat_layers']:2d} | {row['predicted_bytes'] / 2**20:10.1f} | "
        f"{row['xla_bytes'] / 2**20:10.1f} | {row['ratio']:5.2f} |",
        flush=True,
    )


def show_worst(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "ratio" in row]
    off = [row for row in measured if abs(row["ratio"] - 1) > TOLERANCE]
    print(f"\n{len(measured) - len(off)} of {len(measured)} within {TOLERANCE:.0%}; the others:")
    for row in sorted(off, key=lambda row: -abs(row["ratio"] - 1)):
        show(row)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--target", choices=("cpu", "h100"), default="cpu")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--model", nargs="+", help="default: all of the target")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    examples = models(options.target, options.devices)
    check_names(parser, "--model", options.model or (), examples)
    if options.target == "cpu":
        jax.config.update("jax_num_cpu_devices", options.devices)
        cluster = autopar.ClusterSpec(1, options.devices, "cpu")
        devices = jax.devices("cpu")[: options.devices]
    else:
        hosts = max(1, options.devices // 8)
        cluster = autopar.ClusterSpec(hosts, options.devices // hosts, "h100-sxm")
        devices = gpu_hlo.h100_devices(options.devices)
    rows: list[dict[str, Any]] = []
    print("| model | form | method | mesh | remat | predicted MiB | XLA MiB | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.model or examples:
        for form in options.form:
            example = in_form(examples[name], form)
            if example is None:
                continue
            for row in rows_of(example, options.method, cluster, devices):
                rows.append({"model": name, "form": form, **row})
                show(rows[-1])
                about = {"target": options.target, "devices": options.devices}
                write_json(options.json, {"jax": jax.__version__, **about, "rows": rows})
    show_worst(rows)


if __name__ == "__main__":
    main()

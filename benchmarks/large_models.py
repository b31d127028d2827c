"""Large models on 8 and 64 H100s: planned, compiled without GPUs, against hand-written shardings.

    python -m benchmarks.large_models --model gpt-2.6b --devices 8 --plan autopar --json-dir DIR
    python -m benchmarks.large_models --collect DIR --json benchmarks/results/large_models.json

The first command makes one row, in its own file, so many can run side by side; the second collects
all rows of a folder and prints tables. `--plan planning` compiles nothing: it times planning
without a memory budget, with the device's budget and with a binding one.

Compute is bfloat16, parameters and optimizer are float32. A hand-written plan that does not fit is
compiled again with the model's `remat=True`, as an expert would. Times follow the formula of
`benchmarks.gpu_hlo`, which knows only one link speed; on 64 devices, where hosts are further apart,
compare bytes sent rather than times. This needs `jax[cuda13]` but no GPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# This sets the environment for compiling without GPUs, so it comes before JAX.
from benchmarks import gpu_hlo

# isort: split
import jax
import jax.numpy as jnp

import autopar
from benchmarks.experts import layouts as by_hand
from benchmarks.large_model_tables import show_tables
from benchmarks.script import script_parser, write_json
from examples.models import Example, build

H100 = "h100-sxm"
FITS_BYTES = 80e9 * 0.9
NO_BUDGET_BYTES = 1e15
BINDING_SHARE = 0.75
GIB = 2**30

# (sequences or images per device, config fields)
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt-2.6b": (8, {}),
    "llama3-8b": (2, {"seq_len": 2048}),
    "moe-10b": (8, {}),
    "wresnet-2b": (24, {}),
}
PLANS = ("autopar", "fsdp", "zero2", "megatron", "experts", "planning")


def example_of(model: str, num_devices: int, num_layers: int | None = None) -> Example:
    """The model at this benchmark's size; `num_layers` makes it shallower, for dry runs (for a
    Wide-ResNet, the blocks of each stage)."""
    per_device, overrides = SIZES[model]
    example = build(model, per_device * num_devices, dtype=jnp.bfloat16, **overrides)
    if num_layers is None:
        return example
    if model.startswith("wresnet"):
        return example.replace(stage_sizes=(num_layers,) * len(example.config.stage_sizes))
    return example.replace(num_layers=num_layers)


def plan_by_hand(
    model: str, num_devices: int, plan: str, tensor: int | None = None
) -> by_hand.HandWritten:
    """`tensor` is the size of the mesh axis that splits tensors, for the plans that have one."""
    tensor = tensor or default_tensor(num_devices)
    data = num_devices // tensor
    if plan == "experts":
        if not model.startswith("moe"):
            raise SystemExit(f"--plan experts: {model} has no experts.")
        if num_devices == 8:
            return by_hand.expert_parallel(8, zero=True)
        return by_hand.experts_in_hosts(data, tensor)
    if model.startswith("wresnet"):
        kinds: dict[str, Callable[[], by_hand.HandWritten]] = {
            "fsdp": lambda: by_hand.image_fsdp(num_devices),
            "zero2": lambda: by_hand.image_zero2(num_devices),
            "megatron": lambda: by_hand.image_channels(data, tensor),
        }
    else:
        kinds = {
            "fsdp": lambda: by_hand.fsdp(num_devices),
            "zero2": lambda: by_hand.zero2(num_devices),
            "megatron": lambda: by_hand.megatron(data, tensor, sequence=True, zero=True),
        }
    return kinds[plan]()


def default_tensor(num_devices: int) -> int:
    return 8 if num_devices >= 64 else 4


def cluster_of(num_devices: int) -> autopar.ClusterSpec:
    hosts = max(1, num_devices // 8)
    return autopar.ClusterSpec(hosts, num_devices // hosts, H100)


def measured(compiled: Any) -> dict[str, Any]:
    """The fields of a row that come from a compiled program."""
    figures = gpu_hlo.measure(compiled)
    figures["xla_peak_gib"] = figures.pop("peak_gib")
    return {**figures, "fits": figures["xla_peak_gib"] * GIB <= FITS_BYTES}


# -- rows


def autopar_row(example: Example, num_devices: int, micro_batches: int) -> dict[str, Any]:
    arguments = (example.abstract_state(), example.abstract_batch())
    method = autopar.ShardParallel(num_micro_batches=micro_batches)
    started = time.perf_counter()
    try:
        plan = autopar.plan(
            example.train_step, *arguments, cluster=cluster_of(num_devices), method=method
        )
    except autopar.MemoryBudgetError as error:
        seconds = time.perf_counter() - started
        return {"plan": "autopar", "planned_s": seconds, "fits": False, "error": str(error)}
    planned_s = time.perf_counter() - started
    row = {
        "plan": "autopar",
        "mesh": list(plan.mesh_shape),
        "planned_s": planned_s,
        "predicted_peak_gib": plan.estimated_peak_bytes / GIB,
        "predicted_ms": 1e3 * plan.estimated_step_s,
        "remat_layers": len(plan.remat),
        "num_micro_batches": plan.num_micro_batches,
        "solver": {
            "gap": plan.solver.gap,
            "sizes": plan.solver.sizes,
            "seconds": plan.solver.seconds,
        },
    }
    devices = gpu_hlo.h100_devices(num_devices)
    started = time.perf_counter()
    compiled = autopar.compile(example.train_step, *arguments, plan=plan, devices=devices)["step"]
    return {**row, "compiled_s": time.perf_counter() - started, **measured(compiled)}


def hand_row(example: Example, num_devices: int, hand: by_hand.HandWritten) -> dict[str, Any]:
    """The plan as it is; with remat if it does not fit and the model supports remat."""
    row = _compiled_by_hand(example, num_devices, hand)
    if row["fits"] or not hasattr(example.config, "remat"):
        return row
    again = _compiled_by_hand(example.replace(remat=True), num_devices, hand)
    again["plan"] += " + remat"
    again["remat_layers"] = example.config.num_layers
    return {**again, "xla_peak_gib_without_remat": row["xla_peak_gib"]}


def _compiled_by_hand(
    example: Example, num_devices: int, hand: by_hand.HandWritten
) -> dict[str, Any]:
    state, batch = example.abstract_state(), example.abstract_batch()
    devices = gpu_hlo.h100_devices(num_devices)
    started = time.perf_counter()
    jitted, _ = hand.jitted(example.train_step, state, devices)
    compiled = jitted.lower(state, batch).compile()
    return {
        "plan": hand.name,
        "mesh": list(hand.mesh_shape),
        "compiled_s": time.perf_counter() - started,
        "remat_layers": 0,
        "num_micro_batches": 1,
        **measured(compiled),
    }


def planning_row(example: Example, num_devices: int) -> dict[str, Any]:
    """Planning seconds without a budget, with the device's budget and with a binding one."""
    arguments = (example.abstract_state(), example.abstract_batch())
    # Pays what only the first call in a process costs: imports, the first trace.
    jax.make_jaxpr(example.train_step)(*arguments)

    def planned(budget_bytes: float | None) -> dict[str, Any]:
        options = autopar.ShardingOptions(memory_budget_bytes=budget_bytes)
        started = time.perf_counter()
        found: dict[str, Any] = {}
        try:
            plan = autopar.plan(
                example.train_step,
                *arguments,
                cluster=cluster_of(num_devices),
                method=autopar.ShardParallel(options=options),
            )
        except autopar.MemoryBudgetError as error:
            found["error"] = str(error)
        else:
            found = {
                "mesh": list(plan.mesh_shape),
                "predicted_peak_gib": plan.estimated_peak_bytes / GIB,
                "predicted_ms": 1e3 * plan.estimated_step_s,
                "objective": plan.solver.objective,
                "gap": plan.solver.gap,
                "remat_layers": len(plan.remat),
                "passes_s": plan.solver.seconds,
            }
        seconds = time.perf_counter() - started
        return {"budget_gb": budget_bytes and budget_bytes / 1e9, "planned_s": seconds, **found}

    free = planned(NO_BUDGET_BYTES)
    runs = {"without": free, "device": planned(None)}
    runs["binding"] = planned(BINDING_SHARE * free["predicted_peak_gib"] * GIB)
    ratios = {name: run["planned_s"] / free["planned_s"] for name, run in runs.items()}
    return {"plan": "planning", "budgets": runs, "ratios": ratios}


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return {**packages, "autopar": autopar.__version__, "python": platform.python_version()}


def make_row(options: argparse.Namespace) -> dict[str, Any]:
    example = example_of(options.model, options.devices, options.layers)
    row = {
        "model": options.model,
        "devices": options.devices,
        "batch_size": example.batch_size,
        "asked": options.plan,
        "versions": versions(),
    }
    if options.layers is not None:
        row["layers"] = options.layers
    if options.plan == "autopar":
        return {**row, **autopar_row(example, options.devices, options.micro_batches)}
    if options.plan == "planning":
        return {**row, **planning_row(example, options.devices)}
    hand = plan_by_hand(options.model, options.devices, options.plan, options.tensor)
    return {**row, **hand_row(example, options.devices, hand)}


def file_name(options: argparse.Namespace) -> str:
    """`model-devices-plan`, followed by non-default options."""
    name = f"{options.model}-{options.devices}-{options.plan}"
    if options.tensor is not None:
        name += f"-tensor{options.tensor}"
    if options.micro_batches > 1:
        name += f"-micro{options.micro_batches}"
    return name + ".json"


def collect(folder: str, target: str | None) -> None:
    rows = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    about = {"target": "H100 80GB, 8 to a host (compiled, not run)"}
    write_json(target, {**about, "rows": rows})
    show_tables(rows)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", choices=list(SIZES))
    parser.add_argument("--devices", type=int, choices=(8, 64), default=8)
    parser.add_argument("--plan", choices=PLANS, default="autopar")
    parser.add_argument("--tensor", type=int, help="size of the tensor axis")
    parser.add_argument("--micro-batches", type=int, default=1, help="for autopar's plan")
    parser.add_argument("--layers", type=int, help="a shallower model, for dry runs")
    parser.add_argument("--json-dir", help="write the row to a file in this folder")
    parser.add_argument("--collect", metavar="DIR", help="collect a folder's rows into --json")
    options = parser.parse_args()
    if options.collect:
        return collect(options.collect, options.json)
    if not options.model:
        parser.error("give --model or --collect")
    row = make_row(options)
    if options.json_dir:
        folder = pathlib.Path(options.json_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(str(folder / file_name(options)), row)
    show_tables([row])


if __name__ == "__main__":
    main()

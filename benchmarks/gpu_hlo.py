"""XLA's programs for our plan on 8 H100s, against hand-written shardings; no GPU needed.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m benchmarks.gpu_hlo [--case NAME] [--json FILE]

This needs `jax[cuda13]` (or cuda12), on a machine with or without GPUs. Every program is compiled
for eight H100s and judged by XLA's optimized HLO:

    communication = Σ over collectives of bytes sent per device by a ring / 450 GB/s
                    (all-reduce 2(n−1)/n·B, all-gather, reduce-scatter, all-to-all (n−1)/n·B)
    compute       = flops of the partitioned program per device / (989 TFLOP/s · 0.7)
    peak          = XLA's arguments + outputs + temporaries − aliased, per device

`total` is the sum of the first two. Flops are counted on the dots and convolutions of the
partitioned HLO before fusion, so redundant work shows.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autopar
from autopar import _jax
from autopar.measure.verify.targets import load_target
from autopar.runtime.hlo import read_collectives, read_dot_flops
from benchmarks.experts.layouts import (
    data_parallel,
    expert_parallel,
    fsdp,
    megatron,
    zero2,
)
from benchmarks.script import script_parser, write_json
from examples.models import gpt, moe

LINK = 450e9
FLOPS = 989e12 * 0.7
NUM_DEVICES = 8


def cases() -> dict[str, tuple[Any, list[Any]]]:
    wide = gpt.GPTConfig(8192, 2, 64, dtype=jnp.bfloat16)
    deep = gpt.GPTConfig(2560, 4, 32, dtype=jnp.bfloat16)
    experts = moe.MoEConfig(1536, 2, 16, num_heads=16, dtype=jnp.bfloat16)
    by_hand = [
        data_parallel(8),
        zero2(8),
        fsdp(8),
        *(
            megatron(data, tensor, sequence=s)
            for data, tensor in ((1, 8), (2, 4), (4, 2))
            for s in (False, True)
        ),
        megatron(2, 4, sequence=True, zero=True),
        megatron(4, 2, sequence=True, zero=True),
    ]
    return {
        "gpt-4x2560-b64": (gpt.example(deep, 64), by_hand),
        "gpt-2x8192-b8": (gpt.example(wide, 8), by_hand),
        "moe-2x1536-b32": (
            moe.example(experts, 32),
            [
                data_parallel(8),
                fsdp(8),
                expert_parallel(8, zero=False),
                expert_parallel(8, zero=True),
            ],
        ),
    }


def h100_devices(num_devices: int = NUM_DEVICES) -> list[Any]:
    config = load_target("h100-80gb").config
    hosts = max(1, num_devices // 8)
    return _jax.gpu_topology_devices(hosts, num_devices // hosts, config)


def peak_bytes(compiled: Any) -> int:
    """XLA's peak memory of a device."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def measure(compiled: Any) -> dict[str, Any]:
    text = compiled.as_text()
    ops = read_collectives(text)
    peak = peak_bytes(compiled)
    sent = sum(op.sent_bytes for op in ops)
    kinds: dict[str, int] = {}
    sent_gb_by_kind: dict[str, float] = {}
    for op in ops:
        kinds[op.kind] = kinds.get(op.kind, 0) + op.trips
        sent_gb_by_kind[op.kind] = sent_gb_by_kind.get(op.kind, 0.0) + op.sent_bytes / 1e9
    flops = read_dot_flops(text)
    return {
        "communication_ms": 1e3 * sent / LINK,
        "compute_ms": 1e3 * flops / FLOPS,
        "total_ms": 1e3 * (sent / LINK + flops / FLOPS),
        "sent_gb": sent / 1e9,
        "peak_gib": peak / 2**30,
        "collectives": kinds,
        "sent_gb_by_kind": sent_gb_by_kind,
    }


def run_case(name: str, example: Any, by_hand: list[Any], dump: str | None) -> list[dict[str, Any]]:
    devices = h100_devices()
    state, batch = example.abstract_state(), example.abstract_batch()
    rows = []
    cluster = autopar.ClusterSpec(1, NUM_DEVICES, "h100-sxm")
    started = time.perf_counter()
    one_mesh = autopar.ShardParallel()
    plan = autopar.plan(example.train_step, state, batch, cluster=cluster, method=one_mesh)
    planned_s = time.perf_counter() - started
    compiled = autopar.compile(example.train_step, state, batch, plan=plan, devices=devices)
    rows.append({"plan": f"autopar {plan.mesh_shape}", **measure(compiled["step"])})
    rows[-1]["planned_s"] = planned_s
    rows[-1]["predicted_ms"] = 1e3 * plan.estimated_step_s
    rows[-1]["predicted_peak_gib"] = plan.estimated_peak_bytes / 2**30
    show(name, rows[-1])
    if dump:
        folder = pathlib.Path(dump, name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.txt").write_text(plan.explain(detail="full"))
        (folder / "autopar.hlo").write_text(compiled["step"].as_text())
    for hand in by_hand:
        jitted, _ = hand.jitted(example.train_step, state, devices)
        compiled_hand = jitted.lower(state, batch).compile()
        rows.append({"plan": hand.name, **measure(compiled_hand)})
        show(name, rows[-1])
        if dump:
            text = compiled_hand.as_text()
            (folder / f"{hand.name.replace(' ', '_').replace('/', '_')}.hlo").write_text(text)
    best = min(rows[1:], key=lambda r: r["total_ms"]) if by_hand else None
    if best:
        ratio = rows[0]["total_ms"] / best["total_ms"]
        print(f"{name}: autopar / best by hand ({best['plan']}) = {ratio:.3f}", flush=True)
    return rows


def show(case: str, row: dict[str, Any]) -> None:
    print(
        f"{case:16s} {row['plan']:28s} total {row['total_ms']:7.2f} ms  "
        f"(compute {row['compute_ms']:6.2f}, communication {row['communication_ms']:6.2f})  "
        f"peak {row['peak_gib']:5.1f} GiB  {row['collectives']}",
        flush=True,
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=list(cases()))
    parser.add_argument("--dump", help="write plans and HLO into this folder")
    parser.add_argument("--only-autopar", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name, (example, by_hand) in cases().items():
        if arguments.case and name not in arguments.case:
            continue
        hands = [] if arguments.only_autopar else by_hand
        results[name] = run_case(name, example, hands, arguments.dump)
    about = {"jax": jax.__version__, "target": "8 × H100 80GB (compiled, not run)"}
    write_json(arguments.json, {**about, "cases": results})


if __name__ == "__main__":
    main()

"""Our objective against hand-written plans, all evaluated by the same cost function.

    python -m benchmarks.objectives [--devices 8 64] [--model NAME …] [--json FILE]

A hand-written plan fixes the layout of every parameter, moment and batch array on a mesh; the
solver completes the rest optimally, so a plan can only gain. The plans: data parallelism
(`DataParallel`, completely fixed), ZeRO-3, Megatron tensor parallelism, and the 2-D mixes of data
or ZeRO-3 with tensor parallelism, on every mesh that fits the heads and channels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks.script import script_parser, write_json
from examples.models import build

# name -> (model, overrides, batch on 8 devices, batch on 64)
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "mlp-6x4096": ("mlp-tiny", {"hidden_size": 4096}, 1024, 8192),
    "gpt-2.6b": ("gpt-2.6b", {}, 64, 256),
    "bert-large": ("bert-large", {}, 64, 256),
    "llama3-8b": ("llama3-8b", {"seq_len": 2048}, 8, 64),
    "moe-2.4b": ("moe-2.4b", {}, 64, 256),
    "wresnet-1b": ("wresnet-1b", {}, 64, 256),
}
COLUMN = ("'qkv'", "'up'", "'gate'", "'query'", "'key'", "'value'", "'lm_head'", "'head'")
ROW = ("'out'", "'down'")


def tensor_spec(path: str, shape: tuple[int, ...], tensor: int, zero: int) -> P:
    """Megatron's layout of a parameter on axes "x" (data) and "y" (tensor)."""
    other = "x" if zero > 1 else None
    if len(shape) == 1:
        column = any(name in path for name in COLUMN) and shape[0] % tensor == 0
        return P("y") if column else P()
    if len(shape) == 4:  # convolution kernels: split the output channels
        fits = shape[3] % tensor == 0
        inner = other if zero > 1 and shape[2] % zero == 0 else None
        return P(None, None, inner, "y" if fits else None)
    if len(shape) == 3 and "experts" in path:
        return P("y", other if zero > 1 and shape[1] % zero == 0 else None, None)
    if len(shape) != 2:
        return P()
    rows, columns = shape
    inner_rows = other if zero > 1 and rows % zero == 0 else None
    inner_columns = other if zero > 1 and columns % zero == 0 else None
    if ("embed" in path or any(name in path for name in ROW)) and rows % tensor == 0:
        return P("y", inner_columns)
    if any(name in path for name in COLUMN) and columns % tensor == 0:
        return P(inner_rows, "y")
    return P()


def zero_spec(shape: tuple[int, ...], shards: int) -> P:
    divisible = [d for d, n in enumerate(shape) if n % shards == 0]
    if not divisible:
        return P()
    best = max(divisible, key=lambda d: shape[d])
    return P(*["x" if d == best else None for d in range(len(shape))])


def hand_written(state: Any, devices: int) -> Iterator[tuple[str, autopar.ManualParallel]]:
    def specs(of: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: of(jax.tree_util.keystr(path), leaf.shape) if leaf.ndim else P(),
            state,
        )

    def method(shape: tuple[int, ...], state_specs: Any) -> autopar.ManualParallel:
        names = ("x", "y")[: len(shape)]
        return autopar.ManualParallel(shape, names, (state_specs, P("x")))

    yield "ZeRO-3", method((devices,), specs(lambda _, shape: zero_spec(shape, devices)))
    tensor = 2
    while tensor <= min(devices, 8):
        data = devices // tensor
        for zero in (1, data):
            if data == 1 and zero == 1 and tensor != devices:
                continue
            split = specs(lambda p, s, t=tensor, z=zero: tensor_spec(p, s, t, z))
            name = f"Megatron {data}×{tensor}" + (" + ZeRO-3" if zero > 1 else "")
            yield name, method((data, tensor), split)
        tensor *= 2


def compare(name: str, devices: int) -> dict[str, Any]:
    model, overrides, *batches = MODELS[name]
    batch = batches[0 if devices <= 8 else 1]
    example = build(model, **overrides)
    state, data = example.abstract_state(), example.abstract_batch(batch)
    cluster = autopar.ClusterSpec(max(1, devices // 8), min(devices, 8), "h100-sxm")
    one_mesh = autopar.ShardParallel()
    ours = autopar.plan(example.train_step, state, data, cluster=cluster, method=one_mesh)
    row: dict[str, Any] = {
        "model": name,
        "devices": devices,
        "batch": batch,
        "mesh": ours.mesh_shape,
        "objective_ms": 1e3 * ours.solver.objective,
        "gap": ours.solver.gap,
        "by_hand_ms": {},
    }
    methods: list[tuple[str, Any]] = [("data parallel", autopar.DataParallel())]
    methods += list(hand_written(state, devices))
    for label, method in methods:
        try:
            plan = autopar.plan(example.train_step, state, data, cluster=cluster, method=method)
        except autopar.AutoparError as error:
            row["by_hand_ms"][label] = f"does not fit: {error}"[:90]
            continue
        row["by_hand_ms"][label] = 1e3 * plan.solver.objective
    times = {k: v for k, v in row["by_hand_ms"].items() if isinstance(v, float)}
    best = min(times, key=lambda label: times[label])
    row["best_by_hand"], row["ratio"] = best, row["objective_ms"] / times[best]
    return row


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.model:
        for devices in arguments.devices:
            row = compare(name, devices)
            rows.append(row)
            print(
                f"{name:12s} {devices:3d} devices  mesh {row['mesh']!s:8s} "
                f"objective {row['objective_ms']:9.3f} ms (gap {row['gap']:.1%})  "
                f"best by hand {row['best_by_hand']}  ratio {row['ratio']:.3f}",
                flush=True,
            )
            write_json(arguments.json, {"jax": jax.__version__, "rows": rows})


if __name__ == "__main__":
    main()

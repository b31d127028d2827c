"""Predicted time of a step by kind of work, against the kernels that ran on a GPU.

    python -m benchmarks.kernel_times KERNELS.json [--profile NAME] [--modules] [--only MODEL]

KERNELS.json: {"rows": [{"case", "model", "batch", "overrides", "step_s", "kernels": {HLO op:
[count, microseconds, kernel names]}}]}. The optimized HLO of each row is next to it, in
`hlo_{case}_{model}_b{batch}.txt.gz`. Planning needs no GPU. Bytes are those of a kernel's operands
and results, and those that the prediction counts.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autopar
from autopar.cost.plan_details import single_device_layouts
from autopar.cost.report import node_compute_s
from autopar.ir.graph import Node
from autopar.ir.mesh import mesh_of_cluster
from autopar.runtime.hlo_text import HloModule, Instruction
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from benchmarks.one_gpu_cases import allow_fused_attention
from examples.models import build

_WORK_SPACE = ("s8", "u8")  # workspaces of libraries, as a last result


@dataclass
class Sums:
    seconds: float = 0.0
    num_bytes: float = 0.0
    count: float = 0.0

    def add(self, seconds: float, num_bytes: float, count: float = 1.0) -> None:
        self.seconds += seconds
        self.num_bytes += num_bytes
        self.count += count


Table = dict[tuple[str, str], Sums]  # by kind of work, and module with region


def measured(row: dict[str, Any], text: str) -> Table:
    """The kernels of a row, with the bytes of their operands and results."""
    instructions = {one.name: one for one in HloModule(text).instructions}
    found: Table = defaultdict(Sums)
    for name, (count, micros, kernels) in row["kernels"].items():
        instruction = instructions.get(name)
        names = instruction.operands if instruction else ()
        operands = [instructions[operand] for operand in names if operand in instructions]
        moved = sum(_array_bytes(one) for one in (instruction, *operands) if one is not None)
        kind = _kind_of_kernel(name, instruction.attributes if instruction else "", kernels)
        place = _place(instruction.op_name if instruction else "")
        found[kind, place].add(1e-6 * micros, moved, count)
    return found


def _array_bytes(one: Instruction) -> int:
    return sum(array.num_bytes for array in one.results if array.dtype not in _WORK_SPACE)


def _kind_of_kernel(name: str, attributes: str, kernels: list[str]) -> str:
    text = " ".join(kernels)
    if "dot_product_attention" in name or "sdpa" in text:
        return "attention"
    if 'custom_call_target="__cudnn$conv' in attributes:
        return "convolution"
    if "custom_call_target" in attributes or "nvjet" in text or "gemm" in text:
        return "product"
    if "scatter" in name:
        return "scatter"
    if "transpose" in name or name.startswith("copy"):
        return "transpose"
    if "reduce" in name or name.startswith("fusion"):
        return "reduction"
    return "elementwise"


def _place(op_name: str) -> str:
    backward = "transpose(" in op_name
    parts = re.sub(r"\w+\(([^()]*)\)", r"\1", re.sub(r"\w+\(([^()]*)\)", r"\1", op_name)).split("/")
    return f"{'backward' if backward else 'forward'} {'/'.join(parts[1:-1])}"


def predicted(row: dict[str, Any], profile: str | None) -> tuple[Table, float]:
    example = build(row["model"], batch_size=row["batch"], **_overrides(row["overrides"]))
    cluster = autopar.ClusterSpec(1, 1, "h200-sxm", profile=profile)
    mesh = mesh_of_cluster(cluster, (1,))
    step = trace_step(
        example.train_step,
        (example.abstract_state(), example.abstract_batch()),
        {},
        batch_argnums=(1,),
    )
    graph = build_graph(step)
    layouts, _ = single_device_layouts(graph, 1)
    found: Table = defaultdict(Sums)
    for node, layout in zip(graph.nodes, layouts, strict=True):
        seconds = node_compute_s(graph, mesh, node, layout)
        if seconds:
            kernels = 1.0 if node.work is not None else 0.0
            moved = node.touched_bytes
            if profile is not None and node.work is None:
                assert node.traffic is not None
                kernels, moved = node.traffic.num_kernels, node.traffic.num_bytes
            key = (_kind_of_node(node), f"{node.region} {node.module}")
            found[key].add(seconds, node.weight * sum(moved), node.weight * kernels)
    return found, sum(sums.seconds for sums in found.values())


def _overrides(given: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in given.items():
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _kind_of_node(node: Node) -> str:
    if node.name == "dot_general":
        return "product"
    if node.name == "conv_general_dilated":
        return "convolution"
    if node.work is not None:
        return "attention"
    stream = "elementwise" if node.traffic is None else node.traffic.stream
    return {
        "reduce-last": "reduction",
        "reduce-first": "reduction",
        "copy": "elementwise",
        "gather": "elementwise",
    }.get(stream, stream)


def show(row: dict[str, Any], text: str, profile: str | None, modules: bool) -> None:
    ran = measured(row, text)
    thought, step_s = predicted(row, profile)
    about = ", ".join(f"{k}={v}" for k, v in row["overrides"].items())
    took_s = row["step_s"]
    print(
        f"{row['model']} batch {row['batch']} {about}: step {1e3 * took_s:.2f} ms, kernels "
        f"{1e3 * sum(s.seconds for s in ran.values()):.2f} ms, predicted {1e3 * step_s:.2f} ms "
        f"({step_s / took_s:.3f})"
    )
    places = (0, 1) if modules else (0,)
    print(
        f"    {'':40}{'measured ms':>12}{'GB':>8}{'kernels':>9}"
        f"{'predicted ms':>14}{'GB':>8}{'kernels':>9}"
    )
    for place in places:
        both: dict[str, tuple[Sums, Sums]] = defaultdict(lambda: (Sums(), Sums()))
        for side, table in enumerate((ran, thought)):
            for key, sums in table.items():
                name = key[place] if place == 0 else f"{key[1]} {key[0]}"
                both[name][side].add(sums.seconds, sums.num_bytes, sums.count)
        for name, (one, other) in sorted(both.items(), key=lambda item: -item[1][0].seconds):
            if max(one.seconds, other.seconds) < 2e-3 * took_s:
                continue
            print(
                f"    {name:40.40}{1e3 * one.seconds:12.3f}{one.num_bytes / 1e9:8.2f}"
                f"{one.count:9.0f}{1e3 * other.seconds:14.3f}{other.num_bytes / 1e9:8.2f}"
                f"{other.count:9.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--profile", help="a machine profile; default: the data sheet")
    parser.add_argument("--modules", action="store_true", help="also by module")
    parser.add_argument("--only", help="models whose name contains this")
    arguments = parser.parse_args()
    allow_fused_attention()
    body = json.loads(arguments.kernels.read_text())
    for row in body["rows"]:
        if arguments.only and arguments.only not in f"{row['case']} {row['model']}":
            continue
        name = f"hlo_{row['case']}_{row['model']}_b{row['batch']}.txt.gz"
        with gzip.open(arguments.kernels.parent / name, "rt") as file:
            show(row, file.read(), arguments.profile, arguments.modules)


if __name__ == "__main__":
    main()

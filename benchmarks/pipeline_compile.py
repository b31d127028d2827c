"""XLA's stage programs of a pipeline for H100s: memory and collectives; no GPU needed.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m benchmarks.pipeline_compile [--json FILE]

This needs `jax[cuda13]` (or cuda12), on a machine with or without GPUs. It plans a GPT of
GPT-1.3B's width with four layers as two stages on two hosts of four H100s, compiles every stage
program and reads from XLA's programs:

    memory       while a stage program runs: XLA's arguments + results + temporaries, and the other
                 buffers on its mesh; the peak of a stage is compared with the plan's estimate
    collectives  of each stage program. Gradients are reduced once per step, so no forward or
                 backward stage program may reduce one.

Micro-batches have a multiple of seven rows, and no array of the model has a dimension divisible by
seven: that tells reductions of rows from reductions of gradients.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import autopar
from autopar import _jax
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.ir.pipeline import PER_MICRO_BATCH
from autopar.measure.verify.targets import load_target
from autopar.runtime.hlo import CollectiveOp, read_collectives
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.stage_programs import program_bytes
from benchmarks.pipeline_rows import GIB, machine, shape_text
from benchmarks.script import script_parser, write_json
from examples.models import Example, gpt

HOSTS, DEVICES_PER_HOST = 2, 4
MICRO_BATCHES, ROWS = 4, 28
MARK = 7  # divides the rows and nothing else
_REDUCTIONS = ("all-reduce", "reduce-scatter")


def example() -> Example:
    config = gpt.GPTConfig(2048, 4, 32, dtype=jnp.bfloat16)
    return gpt.example(config, MICRO_BATCHES * ROWS)


def methods() -> dict[str, autopar.PipeshardParallel]:
    stages = autopar.UniformStages(2)
    plain = autopar.ShardingOptions(remat="none")
    again = autopar.ShardingOptions(remat="all")
    return {
        "1f1b": autopar.PipeshardParallel(MICRO_BATCHES, stages=stages, options=plain),
        "1f1b, remat": autopar.PipeshardParallel(MICRO_BATCHES, stages=stages, options=again),
    }


def gradient_reductions(ops: Iterable[CollectiveOp]) -> list[CollectiveOp]:
    """Reductions of arrays without rows, except scalars such as the loss."""
    return [
        op
        for op in ops
        if op.kind in _REDUCTIONS
        and any(shape and prod(shape) > 1 and prod(shape) % MARK for shape in op.shapes)
    ]


def measure(method: Any, devices: Sequence[Any]) -> dict[str, Any]:
    model = example()
    arguments = (model.abstract_state(), model.abstract_batch())
    cluster = autopar.ClusterSpec(HOSTS, DEVICES_PER_HOST, "h100-sxm")
    planned = plan_step(model.train_step, arguments, {}, cluster=cluster, method=method)
    executable = make_executable(planned, devices)
    assert isinstance(executable, PipelineExecutable)
    started = time.perf_counter()
    compiled = executable.compiled
    compiled_s = time.perf_counter() - started
    stage_programs = {}
    for (name, program), stage_program in zip(
        compiled.items(), executable.pipeline.stage_programs, strict=True
    ):
        ops = read_collectives(program.as_text() or "")
        kinds: Counter[str] = Counter()
        for op in ops:
            kinds[op.kind] += op.trips
        stage_programs[name] = {
            "xla_gib": program_bytes(program) / GIB,
            "collectives": dict(kinds),
            "sent_gb": sum(op.sent_bytes for op in ops) / 1e9,
            "per_micro_batch": stage_program.phase in PER_MICRO_BATCH,
            "gradient_reductions": len(gradient_reductions(ops)),
        }
    peaks = executable.mesh_memory_bytes()
    stages = []
    for number, stage in enumerate(executable.plan.stages):
        assert stage.plan is not None
        predicted = stage.plan.estimated_peak_bytes
        stages.append(
            {
                "layers": list(stage.layers),
                "mesh": list(stage.mesh_shape),
                "remat": stage.remat,
                "predicted_gib": predicted / GIB,
                "xla_gib": peaks[stage.mesh] / GIB,
                "ratio": predicted / peaks[stage.mesh],
                "buffers_gib": executable.live_bytes()[number] / GIB,
            }
        )
    return {"compiled_s": compiled_s, "stages": stages, "pieces": stage_programs}


def show(name: str, row: dict[str, Any]) -> None:
    for number, stage in enumerate(row["stages"]):
        print(
            f"{name}, stage {number} on {shape_text(stage['mesh'])}: XLA {stage['xla_gib']:.2f} "
            f"GiB, predicted {stage['predicted_gib']:.2f}, ratio {stage['ratio']:.2f}; between "
            f"stage programs {stage['buffers_gib']:.2f}"
        )
    for stage_program, costs in row["pieces"].items():
        print(
            f"  {stage_program:18s} {costs['xla_gib']:6.2f} GiB, sends {costs['sent_gb']:.3f} GB, "
            f"{costs['collectives']}, gradients reduced: {costs['gradient_reductions']}",
            flush=True,
        )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=list(methods()))
    options = parser.parse_args()
    config = load_target("h100-80gb").config
    devices = _jax.gpu_topology_devices(HOSTS, DEVICES_PER_HOST, config)
    rows = {}
    for name, method in methods().items():
        if options.case is None or name in options.case:
            rows[name] = measure(method, devices)
            show(name, rows[name])
    about = {
        "target": "2 × 4 H100 80GB (compiled, not run)",
        "model": f"GPT 4 × 2048, {MICRO_BATCHES} micro-batches of {ROWS} × 1024",
        "machine": machine(),
    }
    write_json(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()

"""What XLA makes of a pipeline's pieces for H100s, beside the plan's own figures; no GPU needed.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m benchmarks.gpu_pipelines [--json FILE]

needs `jax[cuda13]` (or cuda12) installed, on a machine with or without GPUs. A small GPT is planned
as two stages of four H100s each, every piece is compiled for its stage's devices and read from
XLA's optimized HLO: collectives, flops, and the bytes of arguments, results and temporaries.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

from benchmarks import gpu_hlo  # sets the platform before JAX is imported

import jax.numpy as jnp  # isort: skip

import autopar
from autopar.api import make_executable
from autopar.compiler import plan_step
from autopar.runtime.pipeline import PipelineExecutable
from examples.models import gpt


def measure(schedule: str, num_micro_batches: int, num_stages: int) -> dict[str, Any]:
    example = gpt.example(gpt.GPTConfig(1024, 4, 16, dtype=jnp.bfloat16), 32)
    state, batch = example.abstract_state(), example.abstract_batch()
    cluster = autopar.ClusterSpec(1, gpu_hlo.NUM_DEVICES, "h100-sxm")
    method = autopar.PipeshardParallel(
        num_micro_batches, stages=autopar.UniformStages(num_stages), schedule=schedule
    )
    planned = plan_step(example.train_step, (state, batch), {}, cluster=cluster, method=method)
    executable = make_executable(planned, gpu_hlo.h100_devices())
    assert isinstance(executable, PipelineExecutable)
    started = time.perf_counter()
    pieces = {name: gpu_hlo.measure(program) for name, program in executable.compiled.items()}
    plans = [stage.plan for stage in planned.plan.stages if stage.plan is not None]
    estimated = [plan.estimated_peak_bytes for plan in plans]
    return {
        "schedule": schedule,
        "num_micro_batches": num_micro_batches,
        "meshes": [stage.mesh_shape for stage in planned.plan.stages],
        "estimated_step_ms": 1e3 * planned.plan.estimated_step_s,
        "estimated_peak_gib": [peak / 2**30 for peak in estimated],
        "peak_gib": [peak / 2**30 for peak in executable.mesh_memory_bytes()],
        "live_gib": [peak / 2**30 for peak in executable.live_bytes()],
        "num_instructions": executable.num_instructions(),
        "compiled_s": time.perf_counter() - started,
        "pieces": pieces,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    found = measure(options.schedule, options.micro_batches, options.stages)
    for name, piece in found["pieces"].items():
        figures = ", ".join(
            f"{key} {piece[key]:.3f}" for key in ("compute_ms", "communication_ms", "peak_gib")
        )
        print(f"{name:18} {figures}, {piece['collectives']}")
    for key in found.keys() - {"pieces"}:
        print(f"{key}: {found[key]}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A plan for a described cluster as a row of a benchmark: the plan, and the cost of finding it.

Input: an `Example`, a cluster, a method. Output: a dict for JSON, and a line of text for it.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax

import autopar
from autopar.cost.reshard import reshard_table
from autopar.ir.stages import PipelineChoice
from autopar.sharding.strategies import enumerate_strategies

if TYPE_CHECKING:
    from examples.models import Example

GIB = 2**30


def planned_row(example: Example, cluster: autopar.ClusterSpec, method: Any) -> dict[str, Any]:
    """Plans the example's step from cleared caches. `cpu_s` is the processor time of all threads,
    which depends less on other load than wall time; `load` is the machine's load."""
    arguments = (example.abstract_state(), example.abstract_batch())
    clear_caches()
    load = os.getloadavg()[0]
    started, started_cpu = time.perf_counter(), time.process_time()
    found: dict[str, Any]
    try:
        plan = autopar.plan(example.train_step, *arguments, cluster=cluster, method=method)
        found = plan_figures(plan, example.flops_per_step(), cluster.num_devices)
    except autopar.AutoparError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {
        "model": example.name,
        "batch_size": example.batch_size,
        "hosts": cluster.num_hosts,
        "devices": cluster.num_devices,
        "device": cluster.spec.name,
        "method": repr_of(method),
        "planned_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - started_cpu,
        "load": load,
        **found,
    }


def plan_figures(plan: autopar.ParallelPlan, flops: float, num_devices: int) -> dict[str, Any]:
    """`flops`: of the model's products, once forward and twice backward, without recomputation."""
    search = plan.search
    return {
        "step_s": plan.estimated_step_s,
        "tflops_per_device": tflops_per_device(flops, plan.estimated_step_s, num_devices),
        "peak_gib": plan.estimated_peak_bytes / GIB,
        "num_micro_batches": plan.num_micro_batches,
        "mesh": list(plan.mesh_shape),
        "remat_layers": len(plan.remat),
        "num_layers": len(plan.layers),
        "stages": [
            {
                "layers": list(stage.layers),
                "submesh": list(stage.submesh),
                "mesh": list(stage.mesh_shape),
                "remat": stage.remat,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "once_s": stage.once_s,
                "transfer_s": stage.transfer_s,
                "peak_gib": None if stage.plan is None else stage.plan.estimated_peak_bytes / GIB,
            }
            for stage in plan.stages
        ],
        "checked": [] if search is None else [list(pair) for pair in search.checked],
        "by_tables": [] if search is None else [choice_figures(choice) for choice in search.best],
        "one_mesh_s": None if search is None else search.intra_only_s,
        "notes": [] if search is None else list(search.notes),
        "candidates": 0 if search is None else search.num_candidates,
        "seconds": dict(plan.solver.seconds),
    }


def choice_figures(choice: PipelineChoice) -> dict[str, Any]:
    """One of the best plans by the search's tables."""
    return {
        "step_s": choice.step_s,
        "num_micro_batches": choice.num_micro_batches,
        "stages": [
            {
                "layers": list(stage.layers),
                "submesh": list(stage.submesh),
                "mesh": list(stage.mesh_shape),
                "remat": stage.remat,
                "peak_gib": stage.peak_bytes / GIB,
            }
            for stage in choice.stages
        ],
    }


def tflops_per_device(flops: float, step_s: float, num_devices: int) -> float:
    return flops / step_s / num_devices / 1e12


def structure(row: dict[str, Any]) -> str:
    """The stages in words, equal neighbours merged: `2 × 1×8 as (4, 2) remat, 1×8 as (8,)`."""
    parts: list[tuple[str, int]] = []
    for stage in row["stages"]:
        hosts, per_host = stage["submesh"]
        name = f"{hosts}×{per_host} as {shape_text(stage['mesh'])}"
        name += " remat" if stage["remat"] else ""
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1] + 1)
        else:
            parts.append((name, 1))
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in parts)


def shape_text(shape: list[int]) -> str:
    return f"({shape[0]},)" if len(shape) == 1 else f"({shape[0]}, {shape[1]})"


def passes(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {s:.1f}" for name, s in row["seconds"].items() if s >= 0.05)


def line(name: str, row: dict[str, Any]) -> str:
    took = f"{name:22s} {row['planned_s']:6.1f} s ({row['cpu_s']:.1f} cpu, load {row['load']:.1f})"
    if "error" in row:
        return f"{took}: {row['error']}"
    return (
        f"{took}: step {row['step_s']:.4g} s, {row['tflops_per_device']:.1f} TFLOPS per device, "
        f"peak {row['peak_gib']:.1f} GiB, {row['num_micro_batches']} micro-batches, "
        f"{structure(row)}; {passes(row)}"
    )


def repr_of(method: Any) -> str:
    """A method as a user would write it, without defaults."""
    if isinstance(method, autopar.AutoParallel):
        number = method.num_micro_batches
        if method == autopar.AutoParallel(num_micro_batches=number):
            return f"AutoParallel({'' if number == 'auto' else f'num_micro_batches={number}'})"
    if isinstance(method, autopar.PipeshardParallel):
        plain = autopar.PipeshardParallel(method.num_micro_batches)
        if method == plain:
            return f"PipeshardParallel({method.num_micro_batches!r})"
    return repr(method)


def clear_caches() -> None:
    jax.clear_caches()
    reshard_table.cache_clear()
    enumerate_strategies.cache_clear()
    gc.collect()


def machine() -> dict[str, Any]:
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "highspy")}
    return {
        **packages,
        "autopar": autopar.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [row.split(":", 1)[1].strip() for row in lines if row.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()

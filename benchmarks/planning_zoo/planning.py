"""A case → a row: what planning took, pass by pass, and what the plan promises.

python -m benchmarks.planning_zoo.planning NAME SECONDS [CORE …]    # prints the row as JSON

0 seconds: no limit. With cores, the process uses only these. JAX's own trace and lowering of the
step, beside which planning is judged, come after the plan and from cleared caches.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks.zoo.planning import row_of_a_process, versions, without_folders

GIB = 2**30


def plan_in_a_process(
    name: str, planning_time_s: float, limit_s: float, cores: Sequence[int] = ()
) -> dict[str, Any]:
    """The row of a case, or what went wrong. `cores`: those to use; all by default."""
    about = {**versions(), "load": os.getloadavg()[0]}
    if cores:
        about["cores"] = len(cores)
    arguments = [name, f"{planning_time_s}", *map(str, cores)]
    return {**about, **row_of_a_process("benchmarks.planning_zoo.planning", arguments, limit_s)}


def plan_row(name: str, planning_time_s: float) -> dict[str, Any]:
    import autopar
    from benchmarks.planning_zoo.cases import CASES

    case = CASES[name]
    step, arguments = case.make()
    hosts = max(1, case.devices // 8)
    cluster = autopar.ClusterSpec(hosts, case.devices // hosts, "h100-sxm")
    options = autopar.ShardingOptions(planning_time_s=planning_time_s or None)
    started, started_cpu = time.perf_counter(), _cpu_s()
    try:
        plan = autopar.plan(
            step, *arguments, cluster=cluster, method=autopar.AutoParallel(options=options)
        )
        found = _promises(plan)
    except autopar.AutoparError as error:
        found = {"error": without_folders(f"{type(error).__name__}: {error}")}
    row = {
        "devices": case.devices,
        "planned_s": time.perf_counter() - started,
        "cpu_s": _cpu_s() - started_cpu,
        **found,
    }
    return {**row, **_of_jax(step, arguments)}


def _cpu_s() -> float:
    """Seconds of this process and of those it started that have ended."""
    return sum(os.times()[:4])


def _of_jax(step: Any, arguments: tuple[Any, ...]) -> dict[str, float]:
    """Seconds that JAX takes to trace and lower the step as it is."""
    import jax

    jax.clear_caches()
    started = time.perf_counter()
    traced = jax.jit(step).trace(*arguments)
    traced_s = time.perf_counter() - started
    traced.lower()
    return {"jax_trace_s": traced_s, "jax_lower_s": time.perf_counter() - started - traced_s}


def _promises(plan: Any) -> dict[str, Any]:
    passes = {name: s for name, s in plan.solver.seconds.items() if "." not in name}
    return {
        "step_s": plan.estimated_step_s,
        "gap": plan.solver.gap,
        "stopped": plan.solver.stopped,
        "passes_s": passes,
        "peak_gib": plan.estimated_peak_bytes / GIB,
        "mesh": list(plan.mesh_shape),
        "stages": [[list(s.layers), list(s.submesh), list(s.mesh_shape)] for s in plan.stages],
        "num_micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    name, planning_time_s, *cores = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, map(int, cores))
    print(json.dumps(plan_row(name, float(planning_time_s))))


if __name__ == "__main__":
    main()

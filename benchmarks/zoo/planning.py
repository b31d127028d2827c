"""A zoo program and a number of H100s → a row: what planning took, and what the plan promises.

python -m benchmarks.zoo.planning NAME DEVICES METHOD     # prints the row as JSON
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GIB = 2**30
METHODS = ("auto", "shard")


def plan_in_a_process(name: str, num_devices: int, method: str, limit_s: float) -> dict[str, Any]:
    """The row of one program, or what went wrong."""
    arguments = [name, str(num_devices), method]
    about = {"method": method, **versions()}
    return {**about, **row_of_a_process("benchmarks.zoo.planning", arguments, limit_s)}


def row_of_a_process(module: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The row that `python -m module` prints last, or what went wrong; after `limit_s` seconds, the
    process is ended, as it is with this one. It keeps and reads no plans."""
    changes = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE_DIR": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.zoo.ending", str(os.getpid()), module, *arguments],
        cwd=ROOT,
        env={**os.environ, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"no plan within {limit_s:g} s"}
    if process.returncode or not printed.strip():
        last = complaints.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"error": without_folders(last[0])}
    return json.loads(printed.splitlines()[-1])


def versions() -> dict[str, str]:
    return {"jax": version("jax"), "python": platform.python_version()}


def without_folders(text: str) -> str:
    """Paths from the repository's root, or from an installed package's name."""
    return re.sub(r"\S*/(site|dist)-packages/", "", text).replace(f"{ROOT}/", "")


def plan_row(name: str, num_devices: int, method: str) -> dict[str, Any]:
    import jax

    import autopar
    from tests.zoo.check import environment_of
    from tests.zoo.program import Size, all_programs

    program = all_programs()[name]
    if missing := program.missing():
        return {"error": f"not installed: {', '.join(missing)}"}
    hosts = max(1, num_devices // 8)
    cluster = autopar.ClusterSpec(hosts, num_devices // hosts, "h100-sxm")
    how = {"auto": autopar.AutoParallel, "shard": autopar.ShardParallel}[method]()
    with environment_of(program):
        zoo_step = program.build(Size.REAL)
        state = jax.eval_shape(zoo_step.make_state)
        batch = jax.eval_shape(lambda: zoo_step.make_batch(0))
        started = time.perf_counter()
        try:
            plan = autopar.plan(zoo_step.step, state, *batch, cluster=cluster, method=how)
        except autopar.AutoparError as error:
            seconds = time.perf_counter() - started
            message = without_folders(f"{type(error).__name__}: {error}")
            return {"planned_s": seconds, "error": message}
    return {"planned_s": time.perf_counter() - started, **promises(plan)}


def promises(plan: Any) -> dict[str, Any]:
    """What a plan promises, as JSON."""
    return {
        "gap": plan.solver.gap,
        "peak_gib": plan.estimated_peak_bytes / GIB,
        "step_s": plan.estimated_step_s,
        "mesh": list(plan.mesh_shape),
        "stages": [list(stage.mesh_shape) for stage in plan.stages],
        "num_micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
        "warnings": [without_folders(text) for text in plan.warnings],
        "max_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    warnings.simplefilter("ignore")  # of other people's packages
    name, num_devices, method = sys.argv[1:]
    print(json.dumps(plan_row(name, int(num_devices), method)))


if __name__ == "__main__":
    main()

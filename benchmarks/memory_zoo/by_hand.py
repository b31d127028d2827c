"""Plans written by hand where a budget was refused: a case → XLA's peaks of them.

    python -m benchmarks.memory_zoo.by_hand MODEL KIND     # prints them as JSON

On one device, that is the step under plain `jax.jit`, and with `jax.checkpoint` around its layers
where the model has such an option. On any, all layers recomputed, with as many micro-batches as the
kind says, or a row each. None of these is searched, and none knows of the budget. A process of its
own compiles them: it sets XLA's flags.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    )

from benchmarks.memory_zoo.cases import CHECKPOINTED, Case, Step, case_of


def plans_by_hand(case: Case) -> Iterator[tuple[str, Callable[[], float]]]:
    """What a plan does, and what compiles it and returns its peak."""
    step = case.step()
    if case.num_devices == 1:
        yield "jax.jit", partial(_jitted_peak, step)
        if case.model in CHECKPOINTED:
            again = CHECKPOINTED[case.model](1)
            yield "jax.jit, jax.checkpoint around each layer", partial(_jitted_peak, again)
    for number, method in _fixed_methods(case, step):
        batches = f", {number} micro-batches" if number > 1 else ""
        yield f"all layers recomputed{batches}", partial(_planned_peak, case, step, method)


def _fixed_methods(case: Case, step: Step) -> Iterator[tuple[int, Any]]:
    import jax

    from benchmarks.memory_zoo.cases import KINDS, NUM_MICRO_BATCHES, free_method

    if case.kind == "stages":
        given = KINDS["stages"]()
        yield NUM_MICRO_BATCHES, replace(given, options=replace(given.options, remat="all"))
        return
    yield 1, free_method(remat="all")
    rows = jax.tree.leaves(step[1][1:])[0].shape[0] // case.num_devices
    if rows > 1:
        yield rows, free_method(rows, remat="all")


def _jitted_peak(step: Step) -> float:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.gpu_hlo import h100_devices, peak_bytes

    fn, arguments = step
    whole = NamedSharding(Mesh(h100_devices(1), "x"), PartitionSpec())
    jitted = jax.jit(fn, in_shardings=whole, out_shardings=whole, donate_argnums=0)
    return float(peak_bytes(jitted.lower(*arguments).compile()))


def _planned_peak(case: Case, step: Step, method: Any) -> float:
    import autopar

    fn, arguments = step
    cluster = autopar.ClusterSpec(1, case.num_devices, "h100-sxm")
    plan = autopar.plan(fn, *arguments, cluster=cluster, method=method)
    report = autopar.verify(fn, *arguments, plan=plan)
    return max(mesh.peak_bytes.xla for mesh in report.meshes)


def main() -> None:
    warnings.simplefilter("ignore")  # of other people's packages
    model, kind = sys.argv[1:]
    print(json.dumps({what: peak() for what, peak in plans_by_hand(case_of(model, kind))}))


if __name__ == "__main__":
    main()

"""The processes of `autopar doctor`: from the name of a probe to JSON.

`python -m autopar.cli.doctor_probes NAME FILE` writes what the probe finds; an error is
`{"error": …}`.

A driver that hangs, or a library that crashes, affects only its probe.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from autopar._requirements import internal_states
from autopar.errors import AutoparError
from autopar.ir.files import write_whole

_ERROR_WIDTH = 500


def internals() -> dict[str, Any]:
    """JAX's version, and the state of every internal that autopar uses."""
    import jax

    return {"version": jax.__version__, "internals": [asdict(s) for s in internal_states()]}


def devices() -> dict[str, Any]:
    """The devices that JAX finds, and the versions of the CUDA libraries it loaded."""
    import jax

    rows = [
        {
            "platform": device.platform,
            "kind": device.device_kind,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit", 0),
        }
        for device in jax.devices()
    ]
    try:
        from autopar import _jax

        versions = _jax.installed_versions(rows[0]["platform"])
    except AutoparError:  # the probe of the internals reports it
        versions = {}
    return {"devices": rows, "versions": versions}


def highs() -> dict[str, Any]:
    """Solve a small integer program: minimize x + y with 3 x + 2 y ≥ 7."""
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    x, y = solver.addIntegral(), solver.addIntegral()
    solver.addConstr(3 * x + 2 * y >= 7)
    solver.minimize(x + y)
    objective = solver.getInfo().objective_function_value
    if objective != 3:
        return {"error": f"HiGHS returned {objective} where the optimum is 3"}
    return {"version": solver.version()}


def pulp() -> dict[str, Any]:
    import pulp

    return {"solvers": pulp.listSolvers(onlyAvailable=True)}


def ray() -> dict[str, Any]:
    """The nodes of the Ray cluster at RAY_ADDRESS, or else of one that runs here, and why it
    cannot be joined, if so."""
    from autopar.runtime.ray.nodes import connect, import_ray, read_nodes

    import_ray()
    try:
        connect(os.environ.get("RAY_ADDRESS") or "auto")
    except AutoparError as error:
        is_none = "RAY_ADDRESS" not in os.environ and isinstance(error.__cause__, ConnectionError)
        return {"nodes": [], "refused": "" if is_none else _one_line(error.__cause__ or error)}
    return {"nodes": [node.described() for node in read_nodes()], "refused": ""}


def cupy() -> dict[str, Any]:
    from autopar.runtime.transports.cuda import import_cupy, import_nccl

    version, nccl = import_cupy("nccl").__version__, import_nccl().get_version()
    return {"version": version, "nccl": f"{nccl // 10000}.{nccl % 10000 // 100}.{nccl % 100}"}


def compiler() -> dict[str, Any]:
    """Compile a matrix product for an H100, without having one, as `autopar.verify` does."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from autopar import _jax

    target = resources.files("autopar.measure.verify") / "gpu_targets" / "h100-80gb.txtpb"
    (device, *_) = _jax.gpu_topology_devices(1, 8, target.read_text(encoding="utf-8"))
    array = jax.ShapeDtypeStruct((64, 64), "float32", sharding=SingleDeviceSharding(device))
    jax.jit(lambda a: a @ a).lower(array).compile()
    return {}


def step() -> dict[str, Any]:
    """Plan a train step for eight H100s, run it on all devices here, and compare with `jax.jit`."""
    import jax
    import jax.numpy as jnp

    import autopar

    def train_step(weights: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            return jnp.mean((jnp.tanh(batch @ weights) @ weights.T) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * grads, loss

    shape = jax.ShapeDtypeStruct
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    arguments = shape((1024, 1024), jnp.float32), shape((4096, 1024), jnp.float32)
    autopar.plan(train_step, *arguments, cluster=cluster)
    num_devices = jax.device_count()
    weights = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    batch = jnp.linspace(0, 1, 8 * num_devices * 64).reshape(-1, 64)
    expected = jax.jit(train_step)(weights, batch)
    parallel = autopar.parallelize(train_step, donate_argnums=())
    results = parallel(weights, batch)
    for result, other in zip(results, expected, strict=True):
        # Products may be rounded to TensorFloat-32 on GPUs.
        if not jnp.allclose(jax.device_get(result), jax.device_get(other), rtol=1e-2, atol=1e-3):
            return {"error": "a sharded step and jax.jit of the same step differ"}
    return {"devices": num_devices}


def _one_line(error: BaseException) -> str:
    kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{kind}{error}", _ERROR_WIDTH, placeholder=" …")


PROBES = {
    probe.__name__: probe for probe in (internals, devices, highs, pulp, ray, cupy, compiler, step)
}


def main(name: str, file: Path) -> None:
    try:
        result = PROBES[name]()
    except Exception as error:
        result = {"error": _one_line(error)}
    write_whole(file, json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

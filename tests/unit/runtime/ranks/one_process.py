"""A pipeline on two meshes of one process, by the session of processes of the user's own; writes
down what it finds as JSON.

    python one_process.py PORT FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.compiler import plan_step
from autopar.executables import make_remote_executable
from autopar.lower.tiles import plan_tiles
from autopar.runtime.ranks.process_cluster import ProcessCluster
from autopar.runtime.ranks.process_session import ProcessSession

WIDTH = 8


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(weights: Any) -> Any:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0]
        return (x**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return state - 0.1 * grads, loss


def refused(function: Any) -> str:
    try:
        function()
    except autopar.AutoparError as error:
        return str(error)
    return ""


def main() -> None:
    port, file = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    spec = autopar.ClusterSpec(1, 2, "cpu")
    session = ProcessSession(ProcessCluster(jax.devices(), spec), None, plan_tiles)
    state = np.asarray(jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH)))
    batch = np.ones((4, WIDTH), np.float32)
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
    planned = plan_step(step, (state, batch), {}, cluster=spec, method=method)
    executable = make_remote_executable(planned, session)
    new, _ = executable([state, batch])
    want, _ = jax.jit(step)(state, batch)
    found = {
        "rows": [copy.rows for copy in new.copies],
        "worst": float(np.max(np.abs(np.asarray(new) - np.asarray(want)))),
    }
    placed = executable.place_inputs({1: batch})[1]
    found["placed"] = placed.copies[0].number
    found["read"] = refused(lambda: np.asarray(placed))
    with autopar.trace(Path(file).with_name("trace.json")) as trace:
        executable([np.asarray(new), batch])
    meshes = {event.mesh for event in trace.timelines[0].events if event.kind == "run"}
    found["traced"] = {"meshes": sorted(meshes), "notes": trace.notes}
    groups = [mesh.group for mesh in executable.meshes]
    session.close()
    found["ended"] = refused(session.check)
    found["groups_closed"] = all(group.closed for group in groups)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

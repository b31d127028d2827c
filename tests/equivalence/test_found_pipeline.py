"""A pipeline that the stage search finds, not one it is told, equals `jax.jit`.

Two hosts of four slow devices. Computing everything on both hosts doubles the products, and data
parallelism sends gradients between hosts; a pipeline sends activations, which are four times
smaller here. Where the network between hosts is slow the search cuts the step between them, and
where it is fast it does not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from tests.equivalence.pipelines import assert_equal, batch_of, own_buffers, weights

WIDTH, ROWS, NUM_STEPS = 64, 16, 2
METHOD = autopar.PipeshardParallel(8, layers=autopar.AutoLayers(4), stages=autopar.AutoStages())
# Adam divides a gradient by its own size: with a small eps, rounding noise becomes whole steps.
optimizer = optax.adam(1e-2, eps=1e-3)


def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def plan_of(state: Any, host_bandwidth: float) -> autopar.ParallelPlan:
    device = autopar.DeviceSpec("slow", 3e6, 3e6, 1e9, 1e9, 1e9, host_bandwidth)
    cluster = autopar.ClusterSpec(2, 4, device)
    return autopar.plan(train, state, batch_of(0, ROWS, WIDTH), cluster=cluster, method=METHOD)


def test_the_search_cuts_between_hosts_and_the_pipeline_equals_jit() -> None:
    params = weights(jax.random.key(0), 4, WIDTH)
    first = {"params": params, "opt": optimizer.init(params)}
    assert plan_of(first, host_bandwidth=1e9).num_stages == 1
    plan = plan_of(first, host_bandwidth=2e5)
    assert plan.num_stages >= 2
    parallel, serial = autopar.parallelize(train, method=plan), jax.jit(train)
    mine, theirs = own_buffers(first), first
    for index in range(NUM_STEPS):
        batch = batch_of(index, ROWS, WIDTH)
        mine, got = parallel(mine, batch)
        theirs, want = serial(theirs, batch)
        assert_equal(got, want, f"step {index}:", rtol=1e-5)
    assert_equal(mine, theirs, "state:")
    ran = parallel.last_executable.plan
    assert [stage.submesh for stage in ran.stages] == [stage.submesh for stage in plan.stages]
    devices = [set(stage.devices) for stage in ran.stages]
    assert not set.intersection(*devices) and len(set.union(*devices)) == 8

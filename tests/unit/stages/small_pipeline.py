"""A step of four equal layers on two slow hosts, for tests of what a stage search learns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.rewrite.step_source import StepSource
from autopar.stages.looped import LoopedStep, find_looped
from autopar.tracer.trace import StepOptions

CLUSTER = autopar.ClusterSpec(2, 2, "v100", memory_bytes=1e9, host_bandwidth=1e8)
METHOD = autopar.PipeshardParallel(4)


def train_step(weights: Any, batch: Any) -> tuple[Any, Any]:
    def loss(weights: Any) -> Any:
        x = batch["x"]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def step_source() -> StepSource:
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    return StepSource.of(train_step, (weights, batch), {}, StepOptions())


def looped_step() -> LoopedStep:
    return find_looped(step_source().as_loop(4), METHOD.layers)

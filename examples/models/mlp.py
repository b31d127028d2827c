"""A stack of Dense + relu layers in plain JAX: the smallest model, whose plans we know by hand.

Input, hidden and output size are `hidden_size`, as in Alpa's tests of its sharding pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .example import Batch, Example, Family, TrainStep


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    hidden_size: int
    num_layers: int = 6
    dtype: Any = jnp.float32
    learning_rate: float = 1e-3


class MLPState(NamedTuple):
    params: list[dict[str, jax.Array]]
    opt_state: optax.OptState
    step: jax.Array


def apply_mlp(config: MLPConfig, params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Applies every layer: a product in `config.dtype`, a bias and a relu."""
    x = x.astype(config.dtype)
    for layer in params:
        x = x @ layer["kernel"].astype(config.dtype) + layer["bias"].astype(config.dtype)
        x = jax.nn.relu(x)
    return x


def create_state(config: MLPConfig, key: jax.Array) -> MLPState:
    init_kernel = jax.nn.initializers.he_normal()
    size = config.hidden_size
    params = [
        {"kernel": init_kernel(layer_key, (size, size), jnp.float32), "bias": jnp.zeros((size,))}
        for layer_key in jax.random.split(key, config.num_layers)
    ]
    opt_state = optax.adam(config.learning_rate).init(params)
    return MLPState(params, opt_state, jnp.zeros((), jnp.int32))


def make_train_step(config: MLPConfig) -> TrainStep:
    optimizer = optax.adam(config.learning_rate)

    def train_step(state: MLPState, batch: Batch) -> tuple[MLPState, jax.Array]:
        def loss_fn(params):
            outputs = apply_mlp(config, params, batch["x"])
            return jnp.mean(jnp.square(outputs.astype(jnp.float32) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return MLPState(params, opt_state, state.step + 1), loss

    return train_step


def make_batch(config: MLPConfig, batch_size: int, key: jax.Array) -> Batch:
    x_key, y_key = jax.random.split(key)
    shape = (batch_size, config.hidden_size)
    return {"x": jax.random.normal(x_key, shape), "y": jax.random.normal(y_key, shape)}


def flops_per_step(config: MLPConfig, batch_size: int) -> int:
    """Three products per layer, less the gradient of the input, which is not computed."""
    return 2 * batch_size * config.hidden_size**2 * (3 * config.num_layers - 1)


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: MLPConfig, batch_size: int = 16, name: str = "mlp") -> Example:
    return Example(name, config, batch_size, FAMILY)


EXAMPLES = {"mlp-tiny": example(MLPConfig(hidden_size=32), name="mlp-tiny")}

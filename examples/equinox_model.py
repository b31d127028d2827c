"""An Equinox model with optax, trained on all devices by a step written for one.

    python examples/equinox_model.py
    python examples/equinox_model.py --width 8192 --batch 4096 --cluster ray --address auto

The model is a pytree. Its leaves that are not arrays, such as activation functions, are part of
the program, as with `eqx.filter_jit`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common

NUM_FEATURES = 16
optimizer = optax.adam(1e-3)


class Regressor(eqx.Module):
    """Residual blocks between two linear layers."""

    first: eqx.nn.Linear
    blocks: list[eqx.nn.MLP]
    last: eqx.nn.Linear

    def __init__(self, width: int, num_blocks: int, key: jax.Array):
        first, last, *rest = jax.random.split(key, num_blocks + 2)
        self.first = eqx.nn.Linear(NUM_FEATURES, width, key=first)
        self.blocks = [eqx.nn.MLP(width, width, width, 1, jax.nn.gelu, key=key) for key in rest]
        self.last = eqx.nn.Linear(width, "scalar", key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@autopar.parallelize
def train_step(state, batch):
    model, opt_state = state

    @eqx.filter_value_and_grad
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = loss_of(model)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (eqx.apply_updates(model, updates), opt_state), loss


def make_batch(batch_size: int, seed: int) -> dict[str, np.ndarray]:
    """Points and a smooth function of them."""
    x = np.random.default_rng(seed).uniform(-1, 1, (batch_size, NUM_FEATURES))
    y = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3:].mean(axis=1)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def main() -> None:
    parser = common.arguments(__doc__, steps=200, batch=256)
    parser.add_argument("--width", type=common.whole_number, default=128)
    parser.add_argument("--blocks", type=common.whole_number, default=2)
    arguments = parser.parse_args()
    with common.devices(arguments):
        model = Regressor(arguments.width, arguments.blocks, jax.random.key(0))
        state = model, optimizer.init(eqx.filter(model, eqx.is_array))
        common.show(train_step.plan(state, make_batch(arguments.batch, 0)))

        progress = common.Progress(arguments.steps, "samples", arguments.batch)
        for step in range(arguments.steps):
            state, loss = train_step(state, make_batch(arguments.batch, step))
            progress(loss)


if __name__ == "__main__":
    main()

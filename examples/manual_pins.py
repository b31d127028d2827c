"""Some layouts pinned by hand, the rest planned: Megatron's split of a feed-forward network.

    python examples/manual_pins.py
    python examples/manual_pins.py --devices 4

`ShardingOptions(pins=…)` fixes the layout of arrays: inputs by patterns of their paths, values
inside the step by the name that `autopar.constrain` gives them. The plan says what the pins cost.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common

WIDTH = 64
PINS = {
    "state['params'][*]['up']": P(None, "y"),  # by columns
    "state['params'][*]['down']": P("y", None),  # by rows: one sum after both
    "batch*": P("x"),
    "hidden": P("x", "y"),
}
optimizer = optax.adam(3e-3)


def make_state(key: jax.Array) -> dict:
    def layer(key: jax.Array) -> dict:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * WIDTH**-0.5,
            "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) * (4 * WIDTH) ** -0.5,
        }

    params = [layer(key) for key in jax.random.split(key, 2)]
    return {"params": params, "opt": optimizer.init(params)}


def train_step(state, batch):
    def loss_of(params):
        x = batch["x"]
        for layer in params:
            hidden = autopar.constrain(jax.nn.gelu(x @ layer["up"]), "hidden")
            x = x + hidden @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def make_batch(batch_size: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((batch_size, WIDTH), np.float32)
    return {"x": x, "y": np.roll(np.abs(x), 1, axis=1)}


def main() -> None:
    parser = common.arguments(__doc__, steps=100, batch=128)
    arguments = parser.parse_args()
    with common.devices(arguments):
        num_devices = arguments.devices or len(jax.devices())
        if num_devices % 2:
            raise SystemExit(
                f"--devices {num_devices}: the mesh is 2 × half of the devices; use an even number"
            )
        shape = (2, num_devices // 2)
        state, batch = make_state(jax.random.key(0)), make_batch(arguments.batch, 0)

        free = autopar.parallelize(train_step, method=autopar.ShardParallel(shape))
        options = autopar.ShardingOptions(pins=PINS)
        pinned = autopar.parallelize(
            train_step, method=autopar.ShardParallel(shape, options=options)
        )
        for name, step in (("decided", free), ("pinned", pinned)):
            plan = step.plan(state, batch)
            up, down = (plan.input_specs[0]["params"][0][key] for key in ("up", "down"))
            print(
                f"{name}: up {up}, down {down}; predicted step {plan.estimated_step_s * 1e6:.0f} µs"
            )

        progress = common.Progress(arguments.steps, "samples", arguments.batch)
        for step in range(arguments.steps):
            state, loss = pinned(state, make_batch(arguments.batch, step))
            progress(loss)
        for key, array in state["params"][0].items():
            print(f"{key} {array.shape} has the layout {array.sharding.spec}")


if __name__ == "__main__":
    main()

"""Random train steps: layers of random operations, several batch arguments, momentum.

Every layer applies a random program to each row of its input, so the loss is a mean over rows, and
micro-batches and pipelines must give what the whole batch gives.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.properties.random_pool import OPERATIONS
from tests.properties.random_programs import RandomProgram

BATCH_SIZE = 16
WIDTHS = (8, 16, 12, 10)


@dataclass(frozen=True)
class RandomStep:
    """`layers` run one after the other on rows of `width` numbers, with boundaries between them.

    features: "tied" (the head uses the first layer's weights), "clipped" (by the norm of all
              gradients), "dropout" (by a key that the step's number changes)
    """

    layers: tuple[RandomProgram, ...]
    width: int
    num_ids: int
    features: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        return max(layer.tolerance for layer in self.layers)

    def inputs(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)

        def floats(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        w = [
            {"w": floats(self.width, self.width) / 4, "b": floats(self.width)} for _ in self.layers
        ]
        state = {"params": w, "momentum": jax.tree.map(np.zeros_like, w), "count": np.int32(0)}
        ids = rng.integers(0, 50, size=(BATCH_SIZE, self.num_ids), dtype=np.int32)
        return state, floats(BATCH_SIZE, self.width), floats(BATCH_SIZE, self.width), ids

    def layer(self, index: int, params: Any, x: Any, ids: Any) -> Any:
        program = self.layers[index]

        def of_row(row: Any, row_ids: Any) -> Any:
            values = program.values([row, params["w"]], [row_ids])
            kept = [v for v in values if jnp.issubdtype(v.dtype, jnp.floating)]
            return sum((jnp.mean(jnp.sin(v.astype(jnp.float32))) for v in kept[-3:]), start=0.0)

        mixed = jax.vmap(of_row)(x, ids)
        return jnp.tanh(x @ params["w"] + params["b"] + mixed[:, None])

    def __call__(self, state: Any, x: Any, y: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = x
            for index, layer in enumerate(params):
                if index:
                    autopar.mark_layer_boundary()
                hidden = self.layer(index, layer, hidden, ids)
            if "dropout" in self.features:
                key = jax.random.fold_in(jax.random.key(0), state["count"])
                hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0.0)
            if "tied" in self.features:
                hidden = hidden @ params[0]["w"].T
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        if "clipped" in self.features:
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "count": state["count"] + 1}, value


def step_of(rng: random.Random, num_layers: int) -> RandomStep:
    names = sorted(OPERATIONS)

    def program() -> RandomProgram:
        steps = tuple((rng.choice(names), rng.randrange(2**32)) for _ in range(rng.randint(1, 3)))
        return RandomProgram((), (), steps, True)

    layers = tuple(program() for _ in range(num_layers))
    features = tuple(f for f in ("tied", "clipped", "dropout") if rng.random() < 0.3)
    return RandomStep(layers, rng.choice(WIDTHS), rng.choice((2, 3, 4)), features)

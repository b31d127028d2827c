"""Random steps on several views of the batch: its rows repeated, stacked, transposed, cut apart and
put together, so that they lie in many orders.

A step never names the size of the batch. On micro-batches it gives what the whole batch gives, or a
note says why not, or it is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDTH = 8, 4
MOST_ROWS = 4  # times those of the batch

Views = list[Any]  # (rows, WIDTH) each
Operation = Callable[[random.Random, Views, "Inputs"], Any]
OPERATIONS: list[Operation] = []


@dataclass(frozen=True)
class Inputs:
    w: Any
    ids: Any
    num_rows: int


def operation(fn: Operation) -> Operation:
    OPERATIONS.append(fn)
    return fn


def some(rng: random.Random, views: Views, most: int) -> Any:
    """One of the views with at most so many rows; late ones are likelier."""
    fitting = [view for view in views if len(view) <= most] or views[:1]
    return fitting[max(rng.randrange(len(fitting)) for _ in range(2))]


def fitting(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    return some(rng, views, MOST_ROWS * inputs.num_rows)


def small(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    return some(rng, views, MOST_ROWS * inputs.num_rows // 2)


def pair(rng: random.Random, views: Views, inputs: Inputs) -> tuple[Any, Any]:
    a = small(rng, views, inputs)
    return a, rng.choice([view for view in views if len(view) == len(a)])


@operation
def twice(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a = small(rng, views, inputs)
    return jnp.tile(a, (2, 1)) if rng.random() < 0.5 else jnp.repeat(a, 2, axis=0)


@operation
def joined(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a, b = pair(rng, views, inputs)
    axis = rng.randrange(2)
    return (
        jnp.concatenate([a, b])
        if rng.random() < 0.5
        else jnp.stack([a, b], axis).reshape(-1, WIDTH)
    )


@operation
def met(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a, b = pair(rng, views, inputs)
    return jnp.tanh(a * b) if rng.random() < 0.5 else a - jnp.sin(b)


@operation
def projected(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    return jnp.tanh(fitting(rng, views, inputs) @ inputs.w)


@operation
def cut(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a = fitting(rng, views, inputs)
    if len(a) <= inputs.num_rows:
        return None
    half = len(a) // 2
    return rng.choice((a[:half], a[half:], a[::2], a[1::2], a[:half] * a[half:]))


@operation
def moved(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a = fitting(rng, views, inputs)
    return rng.choice(
        (
            lambda: a.reshape(2, -1, WIDTH).swapaxes(0, 1).reshape(-1, WIDTH),
            lambda: a.reshape(-1, 2, WIDTH).swapaxes(0, 1).reshape(-1, WIDTH),
            lambda: jnp.roll(a, len(a) // 2, axis=0),
            lambda: a[::-1],
            lambda: a.T.reshape(-1, WIDTH),
            lambda: jnp.sin(a.T.ravel()).reshape(WIDTH, -1).T,
        )
    )()


@operation
def noisy(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a = fitting(rng, views, inputs)
    key = jax.random.key(rng.randrange(9))
    if rng.random() < 0.7:
        return a + jax.random.normal(key, a.shape)
    return a * jax.vmap(jax.random.uniform)(jax.random.split(key, len(a)))[:, None]


@operation
def labelled(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a = fitting(rng, views, inputs)
    times = len(a) // inputs.num_rows
    labels = jnp.tile(inputs.ids, times) if rng.random() < 0.5 else jnp.repeat(inputs.ids, times)
    return a + a[jnp.arange(len(a)), labels % WIDTH][:, None]


@operation
def looped(rng: random.Random, views: Views, inputs: Inputs) -> Any:
    a, b = pair(rng, views, inputs)
    if rng.random() < 0.5:
        return lax.cond(inputs.w[0, 0] > 0, lambda: jnp.tanh(a), lambda: a * b)
    return lax.scan(lambda c, _: (jnp.tanh(c @ inputs.w + b), None), a, None, length=2)[0]


@dataclass(frozen=True)
class RandomViews:
    seed: int
    num_operations: int

    def inputs(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(self.seed)
        w, x, y = (rng.normal(size=(n, WIDTH)).astype(np.float32) for n in (WIDTH, ROWS, ROWS))
        return w, {"x": x, "y": y, "ids": rng.integers(0, 9, ROWS).astype(np.int32)}

    def __call__(self, w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            rng = random.Random(self.seed)
            inputs = Inputs(w, batch["ids"], len(batch["x"]))
            x, y = jnp.tanh(batch["x"] @ w), batch["y"]
            views = [x, y, jnp.tile(x, (2, 1)), jnp.repeat(y, 2, axis=0), jnp.concatenate([x, y])]
            for _ in range(self.num_operations):
                made = rng.choice(OPERATIONS)(rng, views, inputs)
                if made is not None:
                    views.append(made)
            return jnp.mean(jnp.sin(views[-1] @ w) * jnp.cos(views[-1])), views[-1]

        (value, last), slope = jax.value_and_grad(loss, has_aux=True)(w)
        is_returned = self.seed % 2 == 0
        return w - 0.1 * slope, value, last if is_returned else None

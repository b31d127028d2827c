"""A loss function, parameters and batches → a `ZooStep`; and the data most programs train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import ZooStep

Batches = Callable[[int], tuple[Any, ...]]


def momentum() -> optax.GradientTransformation:
    """The default optimizer of small programs. Adam turns the rounding of a zero gradient into a
    whole step, so its results depend on the order of sums."""
    return optax.sgd(0.05, momentum=0.9)


def train_step(
    loss_fn: Callable[..., jax.Array],
    make_params: Callable[[], Any],
    make_batch: Batches,
    optimizer: optax.GradientTransformation | None = None,
) -> ZooStep:
    """The step of `loss_fn(params, *batch) -> loss`, with state `(params, optimizer state)`."""
    optimizer = optimizer or momentum()

    def make_state() -> Any:
        params = make_params()
        return params, optimizer.init(params)

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return ZooStep(step, make_state, make_batch)


def train_step_with_statistics(
    loss_fn: Callable[..., tuple[jax.Array, Any]],
    make_variables: Callable[[], tuple[Any, Any]],
    make_batch: Batches,
    optimizer: optax.GradientTransformation | None = None,
) -> ZooStep:
    """The step of `loss_fn(params, statistics, *batch) -> (loss, statistics)`: BatchNorm and other
    state that gradients do not update."""
    optimizer = optimizer or momentum()

    def make_state() -> Any:
        params, statistics = make_variables()
        return params, statistics, optimizer.init(params)

    def step(state: Any, *batch: Any) -> Any:
        params, statistics, opt_state = state
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, statistics), grads = grad(params, statistics, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    return ZooStep(step, make_state, make_batch)


def images(rows: int, side: int, num_classes: int, channels: int = 3) -> Batches:
    """`({"image", "label"},)`."""

    def make_batch(i: int) -> tuple[Any, ...]:
        key = jax.random.key(1000 + i)
        image = jax.random.normal(key, (rows, side, side, channels))
        return ({"image": image, "label": (jnp.arange(rows) + i) % num_classes},)

    return make_batch


def tokens(rows: int, length: int, vocabulary: int) -> Batches:
    """`(tokens,)`: whole numbers below `vocabulary`."""

    def make_batch(i: int) -> tuple[Any, ...]:
        return (jax.random.randint(jax.random.key(2000 + i), (rows, length), 0, vocabulary),)

    return make_batch


def rows_of(rows: int, width: int, out: int = 1) -> Batches:
    """`({"x", "y"},)` of a regression."""

    def make_batch(i: int) -> tuple[Any, ...]:
        x = jax.random.normal(jax.random.key(3000 + i), (rows, width))
        return ({"x": x, "y": jnp.sin(x[:, :out] + 0.1 * i)},)

    return make_batch


def label_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return label_loss(logits[:, :-1], tokens[:, 1:])

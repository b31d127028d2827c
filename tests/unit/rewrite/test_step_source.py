"""A step in the forms that planning asks for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.rewrite.layers import find_layers
from autopar.rewrite.step_source import StepSource
from autopar.tracer.trace import StepOptions

WEIGHTS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3
BATCH = jax.ShapeDtypeStruct((8, 16), jnp.float32)


class Counted:
    """A train step that counts its traces."""

    def __init__(self, scanned: bool = False) -> None:
        self.count, self.scanned = 0, scanned

    def __call__(self, weights: Any, x: Any) -> Any:
        self.count += 1

        def layer(h: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(h @ w), None

        def loss(weights: Any) -> Any:
            h = x
            if self.scanned:
                return (jax.lax.scan(layer, h, jnp.stack(weights))[0] ** 2).sum()
            for w in weights:
                h, _ = layer(h, w)
            return (h**2).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def source_of(step: Counted) -> StepSource:
    return StepSource.of(step, (WEIGHTS, BATCH), {}, StepOptions())


def test_a_form_is_made_once() -> None:
    step = Counted()
    source = source_of(step)
    layers = find_layers(source.whole.program, batch=source.whole.batch)[:2]
    looped = source.with_recomputation(layers, 2)
    assert source.with_recomputation(tuple(layers), 2) is looped
    assert looped.remat == tuple(layer.name for layer in layers)
    other = source.with_recomputation(layers[:1], 2)
    assert other is not looped and other.remat == (layers[0].name,)
    assert source.with_recomputation(layers, 4).num_micro_batches == 4
    assert step.count == 1  # micro-batches follow from the batch


def test_a_step_that_counts_its_rows_is_traced_for_each_size() -> None:
    count = 0

    def step(weights: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return jnp.sum(x[jnp.arange(len(x))] @ weights[0])

    source = StepSource.of(step, (WEIGHTS, BATCH), {}, StepOptions())
    for number in (2, 4, 2):
        source.micro_batch(number)
    assert count == 3  # the batch, a half of it and a quarter


def test_without_scans_a_loop_is_the_step_with_micro_batches() -> None:
    source = source_of(Counted())
    assert source.as_loop(2) is source.with_recomputation((), 2)
    source = source_of(Counted(scanned=True))
    loop = source.as_loop(2)
    assert loop is source.as_loop(2) is not source.with_recomputation((), 2)
    names = [e.name for e in loop.program.all_equations()]
    assert names.count("scan") == 1  # over micro-batches; the layers are written out


def test_only_the_last_forms_are_kept() -> None:
    source = source_of(Counted())
    layers = find_layers(source.whole.program, batch=source.whole.batch)
    first = source.with_recomputation(layers[:1])
    for number in (2, 4, 8, 1):
        source.with_recomputation((), number)
    again = source.with_recomputation(layers[:1])
    assert again is not first and again.remat == first.remat

"""Barriers of `jax.checkpoint` wait for the gradients of later layers, and results stay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.program import Equation, Program
from autopar.rewrite.gradient_waits import await_gradients
from autopar.rewrite.step_source import StepSource
from autopar.tracer.trace import StepOptions
from tests.unit.tracer.test_flatten import evaluate

ROWS, WIDTH, LAYERS = 16, 8, 3
SHAPE = WIDTH, WIDTH  # of a layer's weights


def train_step(weights: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def loss(weights: list[Any]) -> Any:
        x = batch["x"]
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def arguments() -> tuple[list[Any], dict[str, Any]]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys[1:]]
    return weights, {"x": jax.random.normal(keys[0], (ROWS, WIDTH))}


def source() -> StepSource:
    return StepSource.of(train_step, arguments(), {}, StepOptions())


def barriers(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.name == "optimization_barrier"]


def test_a_barrier_takes_the_gradient_of_the_layer_after_it() -> None:
    plain, waiting = source().whole, source().with_recomputation(())
    before, after = barriers(plain.program), barriers(waiting.program)
    # The backward pass begins with the last layer, which has no gradient to wait for.
    added = [len(a.operands) - len(b.operands) for a, b in zip(after, before, strict=True)]
    assert added == [0, *[1] * (LAYERS - 1)]
    for barrier in after[1:]:
        assert waiting.program.avals[barrier.results[-1]].shape == (WIDTH, WIDTH)
    subtractions = [e for e in waiting.program.equations if e.name == "sub"]
    updates = [e for e in subtractions if waiting.program.avals[e.results[0]].shape == SHAPE]
    made = waiting.program.producers()
    awaited = {barrier.results[-1] for barrier in after[1:]}
    scaled = [waiting.program.equations[made[e.inputs[1]]] for e in updates]
    assert sum(not awaited.isdisjoint(e.inputs) for e in scaled) == LAYERS - 1


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_results_stay(num_micro_batches: int) -> None:
    step = source().with_recomputation((), num_micro_batches)
    given = jax.tree.leaves(arguments())
    expected = jax.tree.leaves(jax.jit(train_step)(*arguments()))
    for got, want in zip(evaluate(step.program, *given), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_micro_batches_wait_inside_their_loop() -> None:
    step = source().with_recomputation((), 4)
    assert step.loop is not None
    plain = source().as_loop(4)
    assert plain.loop is not None
    (body,), (before,) = (s.program.equations[s.loop].bodies for s in (step, plain) if s.loop)
    sizes = [len(b.operands) for b in barriers(before)]
    assert [len(b.operands) for b in barriers(body)] != sizes
    assert len(barriers(body)) == len(sizes)


def test_pipelines_and_steps_without_barriers_stay() -> None:
    loop = source().as_loop(4)
    assert loop.loop is not None
    (body,) = loop.program.equations[loop.loop].bodies
    gradients = [e for e in barriers(body) if body.avals[e.results[-1]].shape == (WIDTH, WIDTH)]
    assert not gradients

    def plain(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    weights, batch = arguments()
    step = StepSource.of(plain, (weights[0], batch["x"]), {}, StepOptions()).whole
    assert await_gradients(step) is step

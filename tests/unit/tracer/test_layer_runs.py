"""Layers that are equal, and layers that only look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.program import Program
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import unsharded
from autopar.tracer.layer_runs import LayerRun, find_run, numbered_layers
from autopar.tracer.trace import StepOptions

X, W = jnp.ones((4, 4)), jnp.ones((5, 4, 4))


def program_of(function: Callable[..., Any], *arguments: Any) -> Program:
    return StepSource.of(function, arguments, {}, StepOptions()).whole.program


def run_of(function: Callable[..., Any], *arguments: Any) -> LayerRun | None:
    program = program_of(function, *arguments)
    ((_, layers), *_) = numbered_layers(program.equations).items()
    shardings = unsharded(program).equations
    numbers = sorted(layers)
    return find_run(program.equations, shardings, program.avals, [layers[n] for n in numbers])


def layers_of(
    step: Callable[[Any, Any, int], Any], numbers: range = range(5)
) -> Callable[..., Any]:
    def run(x: Any, w: Any) -> Any:
        for number in numbers:
            with jax.named_scope(f"layer_{number}"):
                x = step(x, w, number)
        return x

    return run


def test_rows_of_one_array_and_a_carry() -> None:
    run = run_of(layers_of(lambda x, w, n: jnp.tanh(x @ w[n])), X, W)
    assert run is not None and not run.is_reversed
    assert len(run.trips) == 5
    assert len(run.carries) == 1
    assert list(run.slices.values()) == [(0, 1)]
    assert not run.reads


def test_layers_that_run_from_the_last_to_the_first() -> None:
    run = run_of(layers_of(lambda x, w, n: jnp.tanh(x @ w[n]), range(4, -1, -1)), X, W)
    assert run is not None and run.is_reversed
    assert list(run.slices.values()) == [(4, -1)]


def test_values_of_each_layer_come_in_the_order_of_layers() -> None:
    def apply(x: Any, *w: Any) -> Any:
        return layers_of(lambda x, w, n: jnp.sin(x @ w[n]))(x, w)

    own = [jnp.full((4, 4), n, jnp.float32) for n in range(5)]
    program = program_of(apply, X, *own)
    run = run_of(apply, X, *own)
    assert run is not None
    assert list(run.reads.values()) == [program.inputs[1:]]


def test_another_constant_another_order_of_rows_or_a_layer_skipped_is_no_run() -> None:
    assert run_of(layers_of(lambda x, w, n: x @ w[n] * (1.0 + n)), X, W) is None
    assert run_of(layers_of(lambda x, w, n: x @ w[(0, 2, 1, 3, 4)[n]]), X, W) is None

    def skipping(x: Any, w: Any) -> Any:
        before = [x, x]
        for number in range(5):
            with jax.named_scope(f"layer_{number}"):
                before.append(before[-1] @ w[number] + before[-2])
        return before[-1]

    assert run_of(skipping, X, W) is None


def test_what_a_layer_needs_of_the_outside_must_be_there_before_the_first() -> None:
    def between(x: Any, w: Any) -> Any:
        for number in range(5):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ w[number])
            x = jnp.sort(x)
        return x

    assert run_of(between, X, W) is None


def test_numbers_are_found_under_derivatives() -> None:
    def loss(w: Any, x: Any) -> Any:
        return layers_of(lambda x, w, n: jnp.tanh(x @ w[n]))(x, w).sum()

    program = program_of(jax.grad(loss), W, X)
    ((key, layers), *_) = numbered_layers(program.equations).items()
    assert key == ("", "layer")
    assert sorted(layers) == list(range(5))

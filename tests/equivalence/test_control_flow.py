"""Loops, branches, checkpoints, custom derivatives and callbacks, sharded, equal `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.plan import ParallelPlan
from autopar.ir.program_sharding import EquationSharding

MESH = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)
W = (RNG.normal(size=(16, 16)) / 4).astype(np.float32)
XS = RNG.normal(size=(3, 8, 16)).astype(np.float32)


def parallel(fn: Callable[..., Any], **options: Any) -> autopar.ParallelFunction:
    return autopar.parallelize(fn, method=autopar.ShardParallel(MESH), **options)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.dtype, ours.shape, ours.weak_type) == (
            theirs.dtype,
            theirs.shape,
            theirs.weak_type,
        )
        if jnp.issubdtype(theirs.dtype, jnp.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(ours, theirs)


def is_sharded(plan: ParallelPlan) -> bool:
    """Whether any equation, in loops or out, gives a split result."""

    def visit(equations: tuple[EquationSharding, ...]) -> bool:
        return any(
            any(max(layout) >= 0 for chain in equation.results for layout in chain)
            or any(visit(body.equations) for body in equation.bodies)
            for equation in equations
        )

    return visit(plan.program.equations)


def check(fn: Callable[..., Any], *args: Any) -> ParallelPlan:
    step = parallel(fn)
    assert_same(step(*args), jax.jit(fn)(*args))
    plan = step.last_executable.plan
    assert is_sharded(plan)
    return plan


def rnn(x: Any, w: Any, xs: Any, reverse: bool = False) -> Any:
    def body(carry: Any, x: Any) -> Any:
        hidden, total, count = carry
        hidden = jnp.tanh(hidden @ w + x)
        return (hidden, total + hidden.sum(0), count + 1), (hidden.sum(1), hidden.T, 1.0)

    return lax.scan(body, (x, jnp.zeros(16), 0), xs, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_with_carries_and_stacks_of_different_shapes(reverse: bool) -> None:
    check(lambda x, w, xs: rnn(x, w, xs, reverse), X, W, XS)


@pytest.mark.ci
def test_gradient_of_a_scan() -> None:
    def loss(w: Any, x: Any, xs: Any) -> Any:
        (hidden, total, _), (sums, _, _) = rnn(x, w, xs)
        return hidden.sum() + jnp.sin(total).sum() + sums.mean()

    check(jax.value_and_grad(loss, argnums=(0, 2)), W, X, XS)


def test_scan_whose_carry_changes_its_layout_by_itself() -> None:
    # The body transposes: whichever way the carry lies, the body must take it back.
    def step(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w).T, c[0]), x, None, length=4)

    check(step, W, W / 2)


def test_scan_without_a_carry_and_with_a_constant_one() -> None:
    check(lambda xs, w: lax.scan(lambda c, x: (c, x @ w), None, xs)[1], XS, W)
    check(lambda xs, w: lax.scan(lambda c, x: (0.5, x @ w * c), 2.0, xs), XS, W)


def test_unrolled_scan() -> None:
    def step(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.mean()), x, None, length=6, unroll=2)

    check(step, X, W)


def test_while_loop() -> None:
    def step(x: Any, w: Any) -> Any:
        limit = jnp.abs(w).sum()
        return lax.while_loop(
            lambda c: (c[1] < 5) & (jnp.abs(c[0]).sum() < limit),
            lambda c: (jnp.tanh(c[0] @ w) * 1.5, c[1] + 1),
            (x, 0),
        )

    check(step, X, W)


@pytest.mark.parametrize("trips", [0, 3])
def test_fori_loop(trips: int) -> None:
    def step(x: Any, w: Any, count: Any) -> Any:
        return lax.fori_loop(0, count, lambda i, c: c + jnp.sin(c @ w) * i, x)

    check(lambda x, w: step(x, w, trips) + x @ w, X, W)  # a scan
    check(step, X, W, trips)  # a while loop


@pytest.mark.parametrize("sign", [-1, 1])
def test_cond_with_branches_that_disagree(sign: int) -> None:
    def step(x: Any, w: Any) -> Any:
        return lax.cond(
            x.sum() > 0,
            lambda x: (x @ w, 1.0, x.sum(1)),
            lambda x: (jnp.cumsum(x, axis=0), 0.0, jnp.zeros(8)),
            x,
        )

    check(step, sign * np.abs(X), W)


def test_switch_that_reads_what_it_is_not_given() -> None:
    def step(x: Any, w: Any, which: Any) -> Any:
        return lax.switch(which, [lambda: x @ w, lambda: x * 2, lambda: jnp.tanh(x)])

    for which in range(3):
        check(step, X, W, np.int32(which))


def test_nested_loops() -> None:
    def step(x: Any, w: Any) -> Any:
        def outer(carry: Any, _: Any) -> Any:
            def inner(carry: Any, scale: Any) -> Any:
                carry = lax.cond(
                    carry[0, 0] > 0,
                    lambda c: jnp.tanh(c @ w) * scale,
                    lambda c: c.at[0].set(1),
                    carry,
                )
                return carry, carry[0]

            carry, rows = lax.scan(inner, carry, jnp.arange(2.0) + 1)
            return lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) + i, carry), rows

        return lax.scan(outer, x, None, length=2)

    check(step, X, W)


def test_checkpoint() -> None:
    def loss(w: Any, x: Any) -> Any:
        block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))
        return block(block(x)).sum()

    check(jax.grad(loss), W, X)


@pytest.mark.ci
def test_checkpoint_in_a_scan() -> None:
    def loss(w: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), c.mean()))
        carry, means = lax.scan(body, x, w)
        return carry.sum() + means.sum()

    check(jax.grad(loss), np.stack([W, W * 0.5, W]), X)


def test_custom_vjp_and_custom_jvp() -> None:
    @jax.custom_vjp
    def twice_as_steep(x: Any) -> Any:
        return jnp.sin(x)

    twice_as_steep.defvjp(
        lambda x: (jnp.sin(x), x), lambda residual, g: (2 * g * jnp.cos(residual),)
    )

    def loss(w: Any, x: Any) -> Any:
        return (twice_as_steep(x @ w) + jax.nn.silu(x @ w) + jax.nn.relu(x)).sum()

    check(jax.value_and_grad(loss), W, X)


def test_jit_inside() -> None:
    @jax.jit
    def inner(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), x.sum()

    check(lambda x, w: (inner(inner(x, w)[0], w), 3, True), X, W)


def test_constants_of_the_program() -> None:
    table = jnp.asarray(W)  # closed over
    check(lambda x, w: (x @ table @ w, np.float32(2) * np.ones((8, 16), np.float32) * x), X, W)


def test_debug_callback_runs_once_per_step() -> None:
    seen: list[float] = []

    def step(x: Any, w: Any) -> Any:
        y = x @ w
        jax.debug.callback(lambda total: seen.append(float(total)), y.sum())

        def body(carry: Any, _: Any) -> Any:
            jax.debug.callback(lambda total: seen.append(float(total)), carry.sum())
            return jnp.tanh(carry @ w), None

        return lax.scan(body, y, None, length=2)[0]

    run = parallel(step)
    run(X, W)
    jax.effects_barrier()
    assert len(seen) == 3
    np.testing.assert_allclose(seen[0], (X @ W).sum(), rtol=1e-4)


def test_callback_with_a_result_is_replicated_and_named() -> None:
    def step(x: Any, w: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda a: np.asarray(a) * 2, shape, x) @ w

    plan = check(step, X, W)
    assert any("pure_callback at" in w and "test_control_flow.py" in w for w in plan.warnings)


def test_op_without_a_rule_is_replicated_and_named_with_its_line() -> None:
    def step(x: Any, w: Any) -> Any:
        return jnp.linalg.qr(w)[0] @ x.T

    line = step.__code__.co_firstlineno + 1
    plan = check(step, X, W)
    (warning,) = plan.warnings
    assert "qr at" in warning
    assert f"test_control_flow.py:{line}" in warning


def test_op_without_a_rule_in_a_loop() -> None:
    def step(x: Any, w: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return jnp.tanh(carry @ w), jnp.linalg.eigh(carry.T @ carry)[0]

        return lax.scan(body, x, None, length=2)

    plan = check(step, X, W)
    assert any("eigh at" in w and "test_control_flow.py" in w for w in plan.warnings)


def test_random_numbers_are_those_of_one_device() -> None:
    def step(key: Any, x: Any) -> Any:
        first, second = jax.random.split(key)
        mask = jax.random.bernoulli(first, 0.5, x.shape)
        noise = jax.random.normal(second, (8, 16)) + jax.random.uniform(second, (16,))
        return jnp.where(mask, x, noise) @ jax.random.permutation(second, x.T)

    check(step, jax.random.key(3), X)
    check(step, jax.random.PRNGKey(3), X)


@pytest.mark.ci
def test_old_and_new_keys_pass_through_loops() -> None:
    def step(key: Any, x: Any) -> Any:
        def body(key: Any, _: Any) -> Any:
            key, own = jax.random.split(key)
            return key, x @ jax.random.normal(own, (16, 16))

        key, ys = lax.scan(body, key, None, length=2)
        return jax.random.bits(key), ys

    check(step, jax.random.key(0), X)
    check(step, jax.random.PRNGKey(0), X)

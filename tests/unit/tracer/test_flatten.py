"""Flattening keeps values: calls are inlined, loops kept, barriers and constants too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.program import Equation, Program
from autopar.lower.annotate import annotated_function
from autopar.sharding.assemble import unsharded
from autopar.tracer.flatten import flatten_jaxpr
from autopar.tracer.trace_step import trace_step

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def flatten(fn: Callable[..., Any], *args: Any) -> Program:
    return flatten_jaxpr(jax.jit(fn).trace(*args).jaxpr)


def evaluate(program: Program, *args: Any) -> list[Any]:
    """Bind every equation again, without any sharding."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return annotated_function(program, unsharded(program), mesh)(*args)


def names(program: Program) -> list[str]:
    return [e.name for e in program.equations]


def find(program: Program, name: str) -> Equation:
    return next(e for e in program.equations if e.name == name)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * x,))

INLINED: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda x, w: jax.jit(lambda a, b: (a @ b, a))(x, w),
    "jit in jit": lambda x, w: jax.jit(lambda a: jax.jit(jnp.sin)(a) + jax.nn.relu(a))(x @ w),
    "custom_jvp": lambda x, w: jax.nn.silu(x @ w) + jax.nn.gelu(x),
    "custom_vjp": lambda x, w: clipped(x @ w),
    "gradient of custom_vjp": lambda x, w: jax.grad(lambda w: clipped(x @ w).sum())(w),
    "checkpoint": lambda x, w: jax.checkpoint(lambda a: jnp.sin(a @ w))(x),
    "gradient of checkpoint": lambda x, w: jax.grad(
        lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w)))(w).sum()
    )(w),
    "vmap": lambda x, w: jax.vmap(jax.jit(lambda a: a @ w))(x),
    "linear": lambda x, w: jax.jvp(lambda w: jnp.sin(x @ w), (w,), (w,)),
}


@pytest.mark.parametrize("fn", INLINED.values(), ids=INLINED.keys())
def test_calls_are_inlined_and_values_kept(fn: Callable[[Any, Any], Any]) -> None:
    program = flatten(fn, X, W)
    calls = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
    assert not calls & set(names(program))
    want = jax.tree.leaves(jax.jit(fn)(X, W))
    for ours, theirs in zip(evaluate(program, X, W), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_every_value_has_a_number_and_a_type() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, None, length=3)

    program = flatten(fn, X, W)
    made = [*program.inputs]

    def visit(program: Program) -> None:
        made.extend(v for v, _ in program.captured)
        for equation in program.equations:
            made.extend(equation.results)
            for body in equation.bodies:
                assert body.avals is program.avals
                made.extend(body.inputs)
                visit(body)

    visit(program)
    assert sorted(made) == list(range(len(program.avals)))
    assert program.num_equations() == len(program.equations) + sum(
        len(b.equations) for e in program.equations for b in e.bodies
    )


def test_loops_keep_their_bodies() -> None:
    def fn(x: Any) -> Any:
        x = jax.lax.fori_loop(0, 3, lambda i, c: c + i, x)
        x = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)
        return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    program = flatten(fn, X)
    assert len(find(program, "scan").bodies) == 1
    assert len(find(program, "while").bodies) == 2
    assert [names(b) for b in find(program, "cond").bodies] == [["cos"], ["sin"]]


def test_checkpoint_keeps_its_barrier() -> None:
    def loss(w: Any, prevent_cse: bool) -> Any:
        block = jax.checkpoint(lambda w: jnp.sin(jnp.sin(X @ w)), prevent_cse=prevent_cse)
        return block(w).sum()

    shielded = flatten(jax.grad(lambda w: loss(w, True)), W)
    barrier = find(shielded, "optimization_barrier")
    assert len(barrier.operands) == len(barrier.results) > 0
    # What is computed again reads what came through the barrier.
    after = shielded.equations[shielded.equations.index(barrier) + 1 :]
    again = next(e for e in after if e.name == "dot_general")
    assert set(again.operands) & set(barrier.results)
    assert "optimization_barrier" not in names(flatten(jax.grad(lambda w: loss(w, False)), W))


def test_captured_arrays_are_kept() -> None:
    table = jnp.asarray(W)

    def fn(x: Any) -> Any:
        inner = jax.jit(lambda a: a @ table)
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]

    step = trace_step(fn, (X,))
    (got,) = evaluate(step.program, X)
    np.testing.assert_allclose(got, X @ W @ W, rtol=1e-5, atol=1e-5)


def test_scopes_and_source_lines() -> None:
    def fn(x: Any) -> Any:
        with jax.named_scope("outer"):
            x = jax.lax.scan(lambda c, _: (inside(c), None), x, None, length=2)[0]
            return jnp.linalg.qr(x)[0]

    def inside(x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    program = flatten(fn, X)
    scan = find(program, "scan")
    (body,) = scan.bodies
    sine = find(body, "sin")
    assert sine.scope == "outer/inner"
    assert str(sine.name_stack) == "inner", "JAX adds the loop's own scope when it lowers"
    assert "test_flatten.py" in sine.source_line
    # `jnp.linalg.qr` is jitted inside JAX, so its equations have no line of ours.
    line = fn.__code__.co_firstlineno + 3
    assert f"test_flatten.py:{line}" in find(program, "qr").source_line


def test_effects_are_marked() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda a: None, x)
        return x + 1

    program = flatten(fn, X)
    assert {e.name: e.has_effect for e in program.equations} == {
        "debug_callback": True,
        "add": False,
    }


def test_literal_and_repeated_outputs() -> None:
    program = flatten(lambda x: (1.0, x, x, 3), X)
    one, first, second, three = evaluate(program, X)
    assert (one, three) == (1.0, 3)
    assert first is second


def test_arrays_taken_apart_and_put_together_become_slices_and_concatenations() -> None:
    def step(x: Any) -> Any:
        first, _, third = jnp.split(x, 3, 1)
        rows = [row * 2 for row in x]
        return jnp.stack(rows, 1), jnp.tile(first + third, (2, 3)), jnp.unstack(x, axis=1)[2]

    x = jnp.arange(12.0).reshape(2, 6)
    program = flatten_jaxpr(jax.make_jaxpr(step)(x))
    assert not {"split", "stack", "unstack", "tile"} & set(names(program))
    assert all(e.source_line.startswith(__file__) for e in program.equations)
    assert names(program).count("slice") == 5  # the middle of the split is read by nobody
    for got, expected in zip(evaluate(program, x), jax.tree.leaves(step(x)), strict=True):
        assert jnp.array_equal(got, expected)


def test_device_put_without_a_device_is_its_operand() -> None:
    """As in `jax.scipy.sparse.linalg`; what names a place is kept."""

    def fn(x: Any, w: Any) -> Any:
        x, w = jax.device_put((x, w))
        return jnp.tanh(x @ w), jax.device_put(x), jax.device_put(w, jax.memory.Space.Device)

    program = flatten(fn, X, W)
    assert names(program) == ["dot_general", "tanh", "device_put"]
    for got, wanted in zip(evaluate(program, X, W), fn(X, W), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)

"""`autopar.constrain` names values, changes none, and survives what JAX does to functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import LogicalMesh, ShardingOptions
from autopar.errors import ArgumentError
from autopar.tracer.trace_step import trace_step

X = jnp.arange(32.0).reshape(4, 8) / 32


def names_in(fn: Any, *args: Any) -> list[str]:
    return [named.name for named in trace_step(fn, args).program.named_values()]


def hidden(x):
    return autopar.constrain(jnp.sin(x), "h")


def loss(x):
    return (hidden(x) ** 2).sum()


def plain_loss(x):
    return (jnp.sin(x) ** 2).sum()


def over_scan(of):
    def fn(x):
        def body(carry, row):
            carry = of(carry + row)
            return carry, carry

        return jax.lax.scan(body, x[0], x)[1].sum()

    return fn


@pytest.mark.representatives("eager", "jit", "grad", "vmap", "checkpoint")
@pytest.mark.parametrize(
    ("fn", "plain"),
    [
        (hidden, jnp.sin),
        (jax.jit(hidden), jnp.sin),
        (jax.grad(loss), jax.grad(plain_loss)),
        (jax.grad(jax.checkpoint(loss)), jax.grad(plain_loss)),
        (jax.vmap(jax.grad(loss)), jax.vmap(jax.grad(plain_loss))),
        (jax.hessian(loss), jax.hessian(plain_loss)),
        (lambda x: jax.jvp(loss, (x,), (x,))[1], lambda x: jax.jvp(plain_loss, (x,), (x,))[1]),
        (jax.grad(over_scan(hidden)), jax.grad(over_scan(jnp.sin))),
    ],
    ids=["eager", "jit", "grad", "checkpoint", "vmap", "hessian", "jvp", "scan"],
)
def test_it_is_the_identity(fn: Any, plain: Any) -> None:
    np.testing.assert_array_equal(fn(X), plain(X))
    np.testing.assert_allclose(jax.jit(fn)(X), plain(X), rtol=1e-6)
    assert set(names_in(fn, X)) == {"h"}


def test_its_transpose_is_the_identity() -> None:
    (x,) = jax.linear_transpose(lambda x: autopar.constrain(x, "h") * 2, X)(X)
    np.testing.assert_array_equal(x, 2 * X)


def test_a_gradient_has_no_name() -> None:
    """The value is named once in the forward pass and not again in the backward pass."""
    assert names_in(jax.grad(loss), X) == ["h"]


def test_in_pytrees_names_are_paths() -> None:
    def fn(x):
        tree = {"a": x, "b": (x + 1, None, "text", jnp.sin)}
        named = autopar.constrain(tree, "tree")
        assert named["b"][1:] == tree["b"][1:]
        return named["a"] + named["b"][0]

    assert names_in(fn, X) == ["tree['a']", "tree['b'][0]"]


def test_keys_and_python_numbers() -> None:
    def fn(key, x):
        key = autopar.constrain(key, "key")
        return jax.random.normal(key, (4,)) * autopar.constrain(2.0, "two") * x

    key = jax.random.key(0)
    np.testing.assert_allclose(jax.jit(fn)(key, 1.0), 2 * jax.random.normal(key, (4,)), rtol=1e-6)
    assert names_in(fn, key, 1.0) == ["key", "two"]
    step = autopar.parallelize(fn)
    np.testing.assert_allclose(step(key, 1.0), fn(key, 1.0), rtol=1e-6)


@pytest.mark.parametrize("name", ["", None, 3, ("h",)])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(ArgumentError, match="constrain") as caught:
        autopar.constrain(X, name)
    assert f"name={name!r}" in str(caught.value)


# -- in plans


def explained(fn: Any, *args: Any, mesh: LogicalMesh, **options: Any) -> autopar.ParallelPlan:
    return autopar.solve_sharding(fn, *args, mesh=mesh, options=ShardingOptions(**options)).plan


def test_the_plan_names_values_and_keeps_them_in_its_file() -> None:
    plan = explained(hidden, X, mesh=LogicalMesh((4,)), pins={"h": P(None, "x")})
    assert [(t.path, plan.spec_of(t)) for t in plan.named] == [("h", P(None, "x"))]
    table = plan.explain(detail="full").split("named values:")[1].splitlines()
    assert table[3].split()[:2] == ["h", "float32[4,"]
    assert str(P(None, "x")) in table[3]
    assert autopar.ParallelPlan.from_json(plan.to_json()).named == plan.named


def test_on_one_device_names_are_told_too() -> None:
    plan = autopar.plan(hidden, X, cluster=autopar.ClusterSpec(1, 1))
    assert [(t.path, plan.spec_of(t)) for t in plan.named] == [("h", P())]


def test_under_vmap_a_spec_is_of_the_dimensions_that_the_user_sees() -> None:
    """The mapped dimension, which lies in the middle, may be split or not."""

    def fn(x):
        return jax.vmap(lambda row: autopar.constrain(row * 2, "row"), in_axes=1, out_axes=1)(x)

    x = jax.ShapeDtypeStruct((8, 16, 8), jnp.float32)
    options = {"pins": {"row": P(None, "x"), "x": P(None, "y", "x")}}
    plan = explained(fn, x, mesh=LogicalMesh((2, 4)), **options)
    assert [t.layout for t in plan.named] == [(2, 1)]
    assert plan.solver.objective < 1e-3  # the batch dimension stays split, so nothing moves


def test_values_in_loops_are_pinned() -> None:
    def fn(x):
        def body(carry, row):
            carry = autopar.constrain(jnp.tanh(carry @ row), "carry")
            return carry, None

        return jax.lax.scan(body, x, jnp.ones((4, 8, 8)))[0]

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = explained(fn, x, mesh=LogicalMesh((8,)), pins={"carry": P(None, "x")})
    assert [plan.spec_of(t) for t in plan.named] == [P(None, "x")]


def test_state_that_is_named_is_still_state() -> None:
    def step(state, batch):
        grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(state)
        return autopar.constrain(state - 0.1 * grads, "new")

    traced = trace_step(step, (jnp.ones((8, 8)), jnp.ones((4, 8))))
    assert traced.state == ((0, 0),)

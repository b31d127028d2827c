"""Operators that autopar cannot look into, split by rules that users give: equal to `jax.jit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, PartitionSpec

import autopar
from tests.equivalence.constructs import (
    MESH,
    assert_same,
    definite,
    equations,
    floats,
    gathers,
    run,
    split_ways,
)

X, W, V = floats(8, 16), floats(16, 16), floats(16)


@pytest.fixture
def rules() -> Iterator[Any]:
    """`autopar.register_rule`, whose rules are forgotten after the test."""
    names = []

    def register(name: str, rule: str, **options: Any) -> None:
        names.append(name)
        autopar.register_rule(name, rule, **options)

    yield register
    for name in names:
        autopar.register_rule(name, None)


def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# -- Pallas


def scale_kernel(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] * w[...]


def scale(x: Any, w: Any) -> Any:
    blocks = pl.BlockSpec((2, 4), lambda i, j: (i, j))
    return pl.pallas_call(
        scale_kernel,
        out_shape=struct(*x.shape),
        grid=(x.shape[0] // 2, x.shape[1] // 4),
        in_specs=[blocks, pl.BlockSpec((4,), lambda i, j: (j,))],
        out_specs=blocks,
        interpret=True,
        name="scale",
    )(x, w)


def pallas_step(x: Any, w: Any, v: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return scale(jnp.tanh(carry @ w), v), None

    return lax.scan(body, x, None, length=2)[0]


@pytest.mark.ci
def test_pallas_kernel_without_a_rule_is_replicated_and_named() -> None:
    step = run(pallas_step, X, W, V)
    (warning,) = step.last_executable.plan.warnings
    assert "pallas_call at" in warning
    assert "runs replicated" in warning
    assert "register_rule" in warning


def test_pallas_kernel_with_a_rule_is_split(rules: Any) -> None:
    rules("scale", "i j, j -> i j")
    step = run(pallas_step, X, W, V)
    assert not step.last_executable.plan.warnings
    assert dict(split_ways(step))["pallas_call"] > 1
    (local,) = [e.local for e in equations(step.last_executable.plan) if e.local]
    assert local


def test_pallas_kernel_under_vmap_with_a_rule_of_its_own(rules: Any) -> None:
    rules("scale", "b _ _, _ -> b _ _")
    fn = jax.vmap(scale, (0, None))
    step = run(fn, floats(8, 2, 4), floats(4))
    assert not step.last_executable.plan.warnings
    assert ("pallas_call", 8) in split_ways(step)


# -- callbacks


def multiply(a: Any, b: Any) -> Any:
    return np.asarray(a) @ np.asarray(b)


def callback_step(x: Any, w: Any) -> Any:
    return jax.pure_callback(multiply, struct(x.shape[0], w.shape[1]), x, w) * 2


def test_callback_is_split_over_its_rows(rules: Any) -> None:
    rules("multiply", "i k, k j -> i j", reduction="k")
    step = run(callback_step, X, W)
    assert ("pure_callback", 8) in split_ways(step)
    assert not gathers(step)


def test_parts_along_a_reduction_are_added_up(rules: Any) -> None:
    rules("multiply", "_ k, k _ -> _ _", reduction="k")
    method = autopar.ManualParallel(
        (2, 4), ("x", "y"), in_specs=(PartitionSpec(None, "x"), PartitionSpec("x"))
    )
    step = autopar.parallelize(callback_step, method=method)
    assert_same(step(X, W), jax.jit(callback_step)(X, W))
    plan = step.last_executable.plan
    assert any(-2 in layout for e in equations(plan) if e.local for layout in e.local[1])
    assert [op.kind for op in step.last_executable.collectives()] == ["all-reduce"]


def test_io_callback_with_a_rule_runs_once_per_part(rules: Any) -> None:
    seen: list[tuple[int, ...]] = []

    def tripled(a: Any) -> Any:
        seen.append(a.shape)
        return np.asarray(a) * 3

    def fn(x: Any) -> Any:
        return io_callback(tripled, struct(*x.shape), x)

    rules("tripled", "i j -> i j")
    step = autopar.parallelize(fn, method=autopar.ShardParallel(MESH))
    assert_same(step(X), jnp.asarray(X * 3))
    jax.effects_barrier()
    assert len(seen) == 8
    assert sum(np.prod(shape) for shape in seen) == X.size


def test_io_callback_without_a_rule_runs_once() -> None:
    seen: list[tuple[int, ...]] = []

    def doubled(a: Any) -> Any:
        seen.append(a.shape)
        return np.asarray(a) * 2

    def fn(x: Any, w: Any) -> Any:
        return io_callback(doubled, struct(*x.shape), x) @ w

    step = autopar.parallelize(fn, method=autopar.ShardParallel(MESH))
    assert_same(step(X, W), jnp.asarray(X * 2 @ W))
    jax.effects_barrier()
    assert seen == [X.shape]
    assert "io_callback at" in step.last_executable.plan.warnings[0]


# -- custom calls


def test_ffi_call_is_split_over_its_batch(rules: Any) -> None:
    jnp.linalg.cholesky(jnp.eye(2))  # makes jaxlib load LAPACK

    def fn(a: Any) -> Any:
        columns_first = (0, 2, 1)
        factor, info = jax.ffi.ffi_call(
            "lapack_spotrf_ffi",
            (struct(*a.shape), struct(*a.shape[:-2], dtype=jnp.int32)),
            input_layouts=[columns_first],
            output_layouts=[columns_first, (0,)],
        )(a, uplo=np.uint8(ord("L")))
        return jnp.tril(factor), info

    matrices = definite(8, 4, 4)
    rules("lapack_spotrf_ffi", "b _ _ -> b _ _, b")
    step = run(fn, matrices)
    assert ("ffi_call", 8) in split_ways(step)
    assert not step.last_executable.plan.warnings
    assert not gathers(step)
    np.testing.assert_allclose(step(matrices)[0], np.linalg.cholesky(matrices), rtol=1e-4)


def test_custom_partitioning_is_split_by_its_own_rule() -> None:
    @custom_partitioning
    def steep(a: Any) -> Any:
        return jnp.sin(a) * 2

    steep.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: (
            mesh,
            lambda a: jnp.sin(a) * 2,
            result.sharding,
            tuple(a.sharding for a in args),
        ),
        sharding_rule="i j -> i j",
    )

    def fn(x: Any, w: Any) -> Any:
        return steep(x) @ w

    step = run(fn, X, W)
    assert not step.last_executable.plan.warnings
    assert dict(split_ways(step))["custom_partitioning"] > 1


def test_shard_map_inside_of_a_step_is_entered_replicated_and_named() -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    spec = PartitionSpec("d")

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def normalised(a: Any) -> Any:
        return a / lax.psum(jnp.abs(a).sum(), "d")

    step = run(lambda x, w: normalised(x) @ w, X, W)
    (warning,) = step.last_executable.plan.warnings
    assert "shard_map at" in warning


def test_plan_of_split_kernels_can_be_saved(rules: Any, tmp_path: Any) -> None:
    rules("scale", "i j, j -> i j")
    step = run(scale, X, V)
    step.last_executable.plan.save(tmp_path / "plan.json")
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert_same(autopar.parallelize(scale, method=loaded)(X, V), jax.jit(scale)(X, V))

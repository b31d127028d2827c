"""Small closed-form cases, each one operator or two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import LogicalMesh
from autopar.runtime.hlo import read_collectives

FOUR = LogicalMesh((4,))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def hlo_collectives(fn, *args, mesh):
    solution = autopar.solve_sharding(fn, *args, mesh=mesh)
    devices = jax.devices()[: mesh.num_devices]
    compiled = autopar.compile(fn, *args, plan=solution.plan, devices=devices)
    return solution, read_collectives(compiled["step"].as_text() or "")


def test_reshape_is_free_where_a_layout_is():
    def fn(x):
        return (x * 2).reshape(8, 18) + 1

    solution, ops = hlo_collectives(fn, f32(144), mesh=FOUR)
    assert solution.objective == 0
    assert solution.output_specs == P("x")
    assert not ops


def test_argmax_is_free_where_a_layout_is():
    def fn(x):
        return jnp.argmax(x * 2, axis=1)

    solution, ops = hlo_collectives(fn, f32(16, 32), mesh=FOUR)
    assert solution.objective == 0
    assert solution.output_specs == P("x")
    assert not ops


def test_vector_matrix_product_splits_the_columns():
    def fn(x, w):
        return x @ w

    solution, ops = hlo_collectives(fn, f32(128), f32(128, 256), mesh=FOUR)
    assert solution.objective == 0
    assert solution.input_specs[1] == P(None, "x")
    assert solution.output_specs == P("x")
    assert not ops


def test_vocabulary_parallel_embedding_needs_one_all_reduce_and_no_table():
    def fn(table, tokens):
        return table[tokens]

    vocabulary, width = 1024, 6  # 4 does not divide the width, and too few tokens to split
    plan = autopar.plan(
        fn,
        f32(vocabulary, width),
        jax.ShapeDtypeStruct((6,), jnp.int32),
        cluster=autopar.ClusterSpec(1, 4, "cpu"),
        method=autopar.ManualParallel((4,), ("x",), (P("x"), P()), P()),
    )
    compiled = autopar.compile(
        fn,
        f32(vocabulary, width),
        jax.ShapeDtypeStruct((6,), jnp.int32),
        plan=plan,
        devices=jax.devices()[:4],
    )
    ops = read_collectives(compiled["step"].as_text() or "")
    assert [op.kind for op in ops] == ["all-reduce"]
    assert ops[0].shapes == ((6, width),)


def test_dropout_bits_are_generated_sharded():
    def fn(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)

    key = jax.eval_shape(lambda: jax.random.key(0))
    solution, ops = hlo_collectives(fn, key, f32(64, 64), mesh=FOUR)
    assert solution.objective == 0
    assert solution.output_specs != P()
    assert not ops


def test_donated_output_is_split_over_all_devices():
    def fn(state):
        return {"a": state["a"] + 1}

    solution = autopar.solve_sharding(fn, {"a": f32(128, 128)}, mesh=LogicalMesh((2, 2)))
    spec = solution.output_specs["a"]
    assert solution.input_specs[0]["a"] == spec
    used = {
        name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())
    }
    assert used == {"x", "y"}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_mesh_of_one_device(shape):
    def fn(state, x):
        return {"w": state["w"] - x}, x.sum()

    solution = autopar.solve_sharding(fn, {"w": f32(4, 4)}, f32(4, 4), mesh=LogicalMesh(shape))
    assert solution.objective == 0
    assert solution.gap == 0
    assert solution.input_specs[0]["w"] == P()

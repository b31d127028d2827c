"""Random arrays in random layouts on random meshes, saved and restored to others."""

from __future__ import annotations

import tempfile
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.ir.spec import all_layouts, to_partition_spec
from autopar.runtime.checkpoints import write

few = settings(deadline=None, max_examples=30)
mesh_shapes = st.sampled_from(
    [s for s in product(range(1, 5), repeat=2) if prod(s) <= 8] + [(n,) for n in range(1, 9)]
)
array_shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "uint32", "bool", "complex64", "int4"])


@st.composite
def shardings(draw, shape: tuple[int, ...]) -> NamedSharding:
    mesh_shape = draw(mesh_shapes)
    layout = draw(st.sampled_from(list(all_layouts(shape, mesh_shape))))
    devices = draw(st.permutations(range(8)))[: prod(mesh_shape)]
    grid = np.array([jax.devices()[d] for d in devices]).reshape(mesh_shape)
    axes = ("a", "b")[: len(mesh_shape)]
    return NamedSharding(Mesh(grid, axes), to_partition_spec(layout, len(shape), axes))


@st.composite
def arrays(draw) -> tuple[np.ndarray, NamedSharding, NamedSharding]:
    """(values, saved sharding, restored sharding)."""
    shape = draw(array_shapes)
    seed = draw(st.integers(0, 9))
    values = np.random.default_rng(seed).integers(-8, 8, shape).astype(draw(dtypes))
    return values, draw(shardings(shape)), draw(shardings(shape))


names = st.sampled_from(["w", "b", "a b", "ü", "'", "]['", "0"])
trees = st.recursive(
    arrays(),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(names, inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


def is_array(node: Any) -> bool:
    return isinstance(node, tuple)


@few
@given(trees, st.sampled_from([1, 20, 10**6]), st.booleans())
def test_any_layout_to_any_other(tree: Any, block_bytes: int, asynchronous: bool) -> None:
    state = jax.tree.map(lambda t: jax.device_put(t[0], t[1]), tree, is_leaf=is_array)
    target = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t[0].shape, t[0].dtype, sharding=t[2]),
        tree,
        is_leaf=is_array,
    )
    usual, write.BLOCK_BYTES = write.BLOCK_BYTES, block_bytes
    try:
        with tempfile.TemporaryDirectory() as directory:
            saved = autopar.save_checkpoint(directory, state, 3, asynchronous=asynchronous)
            if isinstance(saved, autopar.CheckpointSave):
                saved.wait()
            back = autopar.restore_checkpoint(directory, target)
            plain = autopar.restore_checkpoint(directory)
    finally:
        write.BLOCK_BYTES = usual
    wanted = jax.tree.leaves(tree, is_leaf=is_array)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert jax.tree.structure(plain) == jax.tree.structure(state)
    for (values, _, sharding), array, host in zip(
        wanted, jax.tree.leaves(back), jax.tree.leaves(plain), strict=True
    ):
        assert array.sharding == sharding and array.dtype == host.dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(array), values)
        np.testing.assert_array_equal(host, values)

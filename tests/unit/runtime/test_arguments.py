from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.runtime import arguments
from autopar.runtime.arguments import has_types, place_some, put


@pytest.fixture
def shardings() -> tuple[NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return NamedSharding(mesh, P("x")), NamedSharding(mesh, P())


def aval(shape: tuple[int, ...], dtype: str, weak: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), weak_type=weak)


FITTING = {
    "numpy": (np.ones((2, 3), np.float32), aval((2, 3), "float32")),
    "numpy of twice the precision": (np.ones(2), aval((2,), "float32")),
    "jax": (jnp.ones((2,), jnp.bfloat16), aval((2,), "bfloat16")),
    "a number": (3.0, aval((), "float32", weak=True)),
    "numpy's number": (np.float32(3), aval((), "float32")),
}
MISFITS = {
    "shape": (np.ones((2, 4), np.float32), aval((2, 3), "float32")),
    "type": (np.ones(2, np.int32), aval((2,), "float32")),
    "weak": (3.0, aval((), "float32")),
    "not weak": (np.float32(3), aval((), "float32", weak=True)),
}


@pytest.mark.parametrize(("leaf", "wanted"), FITTING.values(), ids=FITTING.keys())
def test_leaves_that_have_their_types(leaf, wanted):
    assert has_types([leaf], [wanted])
    assert not has_types([leaf, leaf], [wanted])


@pytest.mark.parametrize(("leaf", "wanted"), MISFITS.values(), ids=MISFITS.keys())
def test_leaves_that_have_others(leaf, wanted):
    assert not has_types([leaf], [wanted])


LEAVES = {
    "numpy": np.arange(8.0, dtype=np.float32),
    "numpy of twice the precision": np.arange(8.0),
    "jax": jnp.arange(8, dtype=jnp.bfloat16),
    "keys": jax.random.split(jax.random.key(1), 8),
    "keys of another kind": jax.random.split(jax.random.key(1, impl="rbg"), 8),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES.keys())
def test_putting_across_processes_gives_what_device_put_gives(shardings, leaf):
    """Of one process all shards are its own, so that both can be compared."""
    for sharding in shardings:
        got, want = arguments._put_across(leaf, sharding), jax.device_put(leaf, sharding)
        assert (got.dtype, got.sharding) == (want.dtype, want.sharding)
        if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)


def test_what_lies_right_is_left_there(shardings):
    split, _ = shardings
    x = jax.device_put(np.ones(8, np.float32), split)
    same = NamedSharding(split.mesh, P("x"))
    assert arguments._put_across(x, same) is x
    (got,) = put([x], [same])
    assert got.sharding == split


@pytest.mark.parametrize("across", [False, True])
def test_what_was_placed_does_not_change_with_the_source(shardings, monkeypatch, across):
    if across:
        monkeypatch.setattr(
            arguments,
            "put",
            lambda leaves, shardings: [*map(arguments._put_across, leaves, shardings)],
        )
    for sharding in shardings:
        source = np.zeros((4096, 64), np.float32)
        placed = place_some({1: source, 0: np.float32(1)}, [shardings[1], sharding])
        source[:] = 1
        assert set(placed) == {0, 1}
        assert not np.asarray(placed[1]).any()

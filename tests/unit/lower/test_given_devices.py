"""A step with a mesh of its own runs on the devices of that mesh, as under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import MeshError

W, X = jnp.arange(64.0).reshape(8, 8), jnp.ones((16, 8))


def mapped(devices: Sequence[Any]) -> Callable[..., Any]:
    mesh = Mesh(np.array(devices), ("i",))

    def step(w: Any, x: Any) -> Any:
        rows = jax.shard_map(
            lambda a: 2 * a + jax.lax.psum(a.sum(), "i"),
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
        )
        return rows(x @ w)

    return step


def constrained(devices: Sequence[Any]) -> Callable[..., Any]:
    sharding = NamedSharding(Mesh(np.array(devices), ("i",)), P("i"))
    return lambda w, x: jax.lax.with_sharding_constraint(x @ w, sharding)


@pytest.mark.parametrize("make", [mapped, constrained])
@pytest.mark.parametrize(
    "chosen", [slice(4), slice(4, 8), slice(3, None, -1), slice(None, None, -1)]
)
def test_on_the_devices_of_its_mesh(make: Any, chosen: slice) -> None:
    devices = jax.devices()[chosen]
    step = make(devices)
    parallel = autopar.parallelize(step, method=autopar.ShardParallel())
    got = parallel(W, X)
    np.testing.assert_allclose(got, jax.jit(step)(W, X))
    assert got.sharding.device_set == set(devices)
    assert parallel.plan(W, X).num_devices == len(devices)


def test_by_default() -> None:
    step = mapped(jax.devices()[:4])
    np.testing.assert_allclose(autopar.parallelize(step)(W, X), jax.jit(step)(W, X))


@pytest.mark.parametrize("size", [2, 8])
def test_a_method_with_another_number_of_devices(size: int) -> None:
    step = autopar.parallelize(mapped(jax.devices()[:4]), method=autopar.ShardParallel((size,)))
    with pytest.raises(MeshError, match=r"a mesh of 4 devices.* runs on the same devices"):
        step(W, X)


def test_two_meshes() -> None:
    devices = jax.devices()
    both = [mapped(devices[:4]), mapped(devices[4:])]
    step = autopar.parallelize(lambda w, x: both[0](w, x) + both[1](w, x))
    with pytest.raises(MeshError, match=r"4 devices \(4, 5, 6, 7\).*4 devices \(0, 1, 2, 3\)"):
        step(W, X)


def test_devices_that_the_session_lacks() -> None:
    autopar.init(devices=jax.devices()[:2])
    try:
        with pytest.raises(MeshError, match=r"test_given_devices.py.*not among the devices"):
            autopar.parallelize(mapped(jax.devices()[:4]))(W, X)
    finally:
        autopar.shutdown()

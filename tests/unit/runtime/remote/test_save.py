"""Places of a step's inputs on a cluster, and the backend that checkpoints use for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.runtime.checkpoints.backends import backend_of
from autopar.runtime.remote.save import RemoteBackend, input_places


def step(state: Any, batch: Any) -> Any:
    return {**state, "w": state["w"] * state["scale"] + batch.sum()}


def test_places_of_a_steps_inputs() -> None:
    avals = [
        jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
    ]
    state = dict(zip(("key", "scale", "w"), avals, strict=False))
    parallel = autopar.parallelize(step, method=autopar.ShardParallel(mesh_shape=(8,)))
    plan = parallel.plan(state, avals[-1])
    session: Any = SimpleNamespace(
        meshes=lambda devices: [SimpleNamespace(devices=tuple(numbers)) for numbers in devices]
    )
    places = input_places(plan, avals, session)
    assert [place.weak_type for place in places] == [False, True, False, False]
    assert [place.dtype for place in places] == [aval.dtype for aval in avals]
    # Workers hold the data of a key.
    (key,), (weights,) = places[0].parts, places[2].parts
    assert (places[0].shape, key.type.shape) == ((), (2,))
    assert key.type.dtype == np.uint32
    assert weights.type.layout == plan.inputs[2].layout
    assert weights.mesh.devices == tuple(range(8)) and weights.rows is None
    assert isinstance(backend_of(places[0]), RemoteBackend)

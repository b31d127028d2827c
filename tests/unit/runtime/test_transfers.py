"""The ways of an array from one sharding to another, and that results are buffers of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.spec import WHOLE
from autopar.lower.tiles import plan_tiles
from autopar.runtime.transfers import transfer_function

FIRST, SECOND = (
    Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
    for devices in (jax.devices()[:4], jax.devices()[4:])
)
VALUES = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)


def struct(mesh: Mesh, *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(VALUES.shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


PAIRS = {
    "shard by shard": (struct(FIRST, "x", "y"), struct(SECOND, "x", "y")),
    "the same shards on other devices": (struct(FIRST, "x"), struct(SECOND, "y")),
    "other shards": (struct(FIRST, "x"), struct(SECOND, None, "y")),
    "the same mesh": (struct(FIRST, "x"), struct(FIRST, "x")),
    "the same mesh, other shards": (struct(FIRST, "x"), struct(FIRST, None, "x")),
    "fewer devices": (struct(FIRST, "x", "y"), jax.ShapeDtypeStruct(
        VALUES.shape, jnp.float32,
        sharding=NamedSharding(Mesh(np.array(jax.devices()[7:]).reshape(1), ("x",)), P()),
    )),
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS.values(), ids=PAIRS.keys())
def test_values_arrive_in_buffers_of_their_own(source: Any, target: Any) -> None:
    array = jax.device_put(VALUES, source.sharding)
    (sent,) = transfer_function([source], [target], [None])([array])
    assert sent.sharding == target.sharding
    assert sent.committed
    array.delete()
    np.testing.assert_array_equal(sent, VALUES)


def test_several_at_once_each_its_way() -> None:
    arrays = [
        jax.device_put(VALUES + i, source.sharding) for i, (source, _) in enumerate(PAIRS.values())
    ]
    send = transfer_function(
        [source for source, _ in PAIRS.values()],
        [target for _, target in PAIRS.values()],
        [None] * len(arrays),
    )
    for i, (sent, (_, target)) in enumerate(zip(send(arrays), PAIRS.values(), strict=True)):
        assert sent.sharding == target.sharding
        np.testing.assert_array_equal(sent, VALUES + i)


def test_other_shards_go_by_tiles_and_not_through_the_host(monkeypatch) -> None:
    source, target = struct(FIRST, "x"), struct(SECOND, None, "y")
    plan = plan_tiles(VALUES.shape, 4, (0, WHOLE), (2, 2), (WHOLE, 1), (2, 2))
    array = jax.device_put(VALUES, source.sharding)
    send = transfer_function([source], [target], [plan])
    places: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, to: (places.extend(to), put(x, to))[1])
    (sent,) = send([array])
    assert set(places) == set(SECOND.devices.flat), "tiles to devices, and no more"
    assert sent.sharding == target.sharding
    np.testing.assert_array_equal(sent, VALUES)


def test_what_cannot_be_cut_is_copied_on_the_target() -> None:
    source, target = (
        jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
        for mesh in (FIRST, SECOND)
    )
    line = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(FIRST, P("x")))
    whole = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=target.sharding)
    for one, other, layout in ((source, target, (WHOLE, WHOLE)), (line, whole, (0, WHOLE))):
        plan = plan_tiles(one.shape, 4, layout, (2, 2), (WHOLE, WHOLE), (2, 2))
        values = np.arange(one.shape[0], dtype=np.float32)
        (sent,) = transfer_function([one], [other], [plan])([jax.device_put(values, one.sharding)])
        assert sent.sharding == other.sharding
        for shard in sent.addressable_shards:
            np.testing.assert_array_equal(shard.data, values)


def test_equal_shards_are_seen_however_they_are_told(monkeypatch) -> None:
    """An axis of one device splits nothing."""
    meshes = (
        Mesh(np.array(devices).reshape(1, 2), ("x", "y"))
        for devices in (jax.devices()[:2], jax.devices()[2:4])
    )
    specs = P("x", "y"), P(None, "y")
    source, target = (struct(mesh, *spec) for mesh, spec in zip(meshes, specs, strict=True))
    array = jax.device_put(VALUES, source.sharding)
    monkeypatch.setattr(jax, "device_put", None)
    (sent,) = transfer_function([source], [target], [None])([array])
    assert sent.sharding == target.sharding
    np.testing.assert_array_equal(sent, VALUES)


def test_keys() -> None:
    key = jax.device_put(jax.random.key(3), NamedSharding(FIRST, P()))
    source, target = (
        jax.ShapeDtypeStruct((), key.dtype, sharding=NamedSharding(mesh, P()))
        for mesh in (FIRST, SECOND)
    )
    (sent,) = transfer_function([source], [target], [None])([key])
    assert sent.sharding.device_set == set(SECOND.devices.flat)
    np.testing.assert_array_equal(jax.random.key_data(sent), jax.random.key_data(key))

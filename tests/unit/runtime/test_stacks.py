"""Stacks over layers: one array over the stages' meshes, of the same buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.stacks import STAGES, put_together, stacked_sharding, take_apart

WHOLE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


def parts_with(spec: PartitionSpec, num_stages: int = 2) -> list[NamedSharding]:
    devices = np.array(jax.devices()[:8]).reshape(num_stages, -1, 2)
    return [NamedSharding(Mesh(own, ("x", "y")), spec) for own in devices]


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        (PartitionSpec(), PartitionSpec(STAGES)),
        (PartitionSpec(None, "y"), PartitionSpec(STAGES, "y")),
        (PartitionSpec("x", None, "y"), PartitionSpec((STAGES, "x"), None, "y")),
        (PartitionSpec(None, ("x", "y")[1]), PartitionSpec(STAGES, "y")),
    ],
)
def test_there_and_back(spec: PartitionSpec, whole: PartitionSpec) -> None:
    parts = parts_with(spec)
    sharding = stacked_sharding(parts)
    assert sharding.spec == whole
    stack = jax.device_put(WHOLE, sharding)
    rows = take_apart(stack, parts)
    for own, part, want in zip(rows, parts, (WHOLE[:2], WHOLE[2:]), strict=True):
        assert own.sharding == part
        np.testing.assert_array_equal(own, want)
    again = put_together(rows, WHOLE.shape, sharding)
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, WHOLE)


def test_nothing_is_copied() -> None:
    parts = parts_with(PartitionSpec(None, "y"), 4)
    stack = jax.device_put(WHOLE, stacked_sharding(parts))
    rows = take_apart(stack, parts)
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in stack.addressable_shards}
    for own in rows:
        for shard in own.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]
    jax.jit(jnp.sin, donate_argnums=0)(rows[0]).block_until_ready()
    assert stack.is_deleted()


def test_parts_must_be_alike() -> None:
    first, _ = parts_with(PartitionSpec())
    _, second = parts_with(PartitionSpec("x"))
    with pytest.raises(AssertionError, match="different layouts"):
        stacked_sharding([first, second])

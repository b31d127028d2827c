"""Stacks over layers: one array over the stages' meshes, of the same buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import ArgumentError
from autopar.ir.rows import take_rows
from autopar.runtime.arguments import put, without_aliases
from autopar.runtime.stacks import (
    STAGES,
    RowShardings,
    StackedArray,
    put_stack,
    put_together,
    stack_sharding,
    take_apart,
)

WHOLE = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
HALVES = [((0, 2),), ((2, 4),)]


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
    sharding = stack_sharding(HALVES, parts)
    assert isinstance(sharding, NamedSharding)
    assert sharding.spec == whole
    stack = jax.device_put(WHOLE, sharding)
    rows = take_apart(stack, parts)
    for own, part, want in zip(rows, parts, (WHOLE[:2], WHOLE[2:]), strict=True):
        assert own.sharding == part
        np.testing.assert_array_equal(own, want)
    again = put_together(rows, sharding)
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, WHOLE)


def test_rows_of_two_dimensions_are_one_array() -> None:
    """The axis over stages has one axis for each: of two outer rows each has two stages."""
    parts = parts_with(PartitionSpec(None, None, "y"), 4)
    whole = WHOLE.reshape(2, 4, 6, 4)
    quarters = [((n, n + 1), (m, m + 2)) for n in range(2) for m in (0, 2)]
    sharding = stack_sharding(quarters, parts)
    assert isinstance(sharding, NamedSharding)
    assert sharding.spec == PartitionSpec(STAGES, f"{STAGES}_1", "y")
    stack = jax.device_put(whole, sharding)
    rows = take_apart(stack, parts)
    for own, part, box in zip(rows, parts, quarters, strict=True):
        assert own.sharding == part
        np.testing.assert_array_equal(own, take_rows(whole, box))
    again = put_together(rows, sharding)
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, whole)


def test_nothing_is_copied() -> None:
    parts = parts_with(PartitionSpec(None, "y"), 4)
    quarters = [((n, n + 1),) for n in range(4)]
    stack = jax.device_put(WHOLE, stack_sharding(quarters, parts))
    rows = take_apart(stack, parts)
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in stack.addressable_shards}
    for own in rows:
        for shard in own.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]
    jax.jit(jnp.sin, donate_argnums=0)(rows[0]).block_until_ready()
    assert stack.is_deleted()


def on(devices: slice, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[devices]), ("x",)), spec)


# name -> rows and shardings of parts that cannot be one array
UNLIKE = {
    "layouts": (HALVES, parts_with(PartitionSpec())[:1] + parts_with(PartitionSpec("x"))[1:]),
    "rows": ([((0, 3),), ((3, 4),)], parts_with(PartitionSpec(None, "y"))),
    "meshes": (
        HALVES,
        [on(slice(0, 2), PartitionSpec("x")), on(slice(2, 6), PartitionSpec(None, None, "x"))],
    ),
    "boxes": (
        [((0, 1), (0, 4)), ((0, 1), (4, 6)), ((1, 4), (0, 6))],
        [on(slice(n, n + 2), PartitionSpec()) for n in (0, 0, 2)],
    ),
    "shared devices": (HALVES, [on(slice(0, 2), PartitionSpec("x"))] * 2),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_parts_are_an_array_in_parts(name: str) -> None:
    rows, parts = UNLIKE[name]
    sharding = stack_sharding(rows, parts)
    assert isinstance(sharding, RowShardings)
    stack = put_stack(WHOLE, sharding)
    assert isinstance(stack, StackedArray)
    for own, part, box in zip(take_apart(stack, parts), parts, rows, strict=True):
        assert own.sharding == part
        np.testing.assert_array_equal(own, take_rows(WHOLE, box))
    again = put_together(stack.parts, sharding)
    np.testing.assert_array_equal(again, WHOLE)
    assert (stack.shape, stack.nbytes, len(stack.meshes)) == (WHOLE.shape, WHOLE.nbytes, len(rows))


def test_an_array_in_parts_moves_to_any_place() -> None:
    here, there = (stack_sharding(*UNLIKE[name]) for name in ("rows", "meshes"))
    one = on(slice(0, 4), PartitionSpec("x"))
    (stack,) = put([WHOLE], [here])
    kept, moved, joined, plain = put([stack, stack, stack, WHOLE], [here, there, one, one])
    assert kept is stack
    assert moved.sharding == there and joined.sharding == one == plain.sharding
    for each in (kept, moved, joined, plain):
        np.testing.assert_array_equal(each, WHOLE)


def test_an_array_in_parts_is_deleted_with_any_part() -> None:
    stack = put_stack(WHOLE, stack_sharding(*UNLIKE["rows"]))
    (_, copy) = without_aliases([stack, stack], {1})
    stack.parts[1].delete()
    assert stack.is_deleted() and "deleted" in repr(stack)
    with pytest.raises(ArgumentError, match="is deleted"):
        stack.fetch()
    np.testing.assert_array_equal(copy.block_until_ready(), WHOLE)
    copy.delete()
    assert copy.is_deleted()

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import ArgumentError
from autopar.ir.remote import ShardedType
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.session import same_shards


class Mesh:
    """What an array needs of a mesh."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self.released: list[int] = []

    def release(self, number: int) -> None:
        self.released.append(number)


def sharded_type(
    shape: tuple[int, ...] = (4, 8), layout: tuple[int, ...] = (0, -1), **kw: Any
) -> ShardedType:
    return ShardedType(shape, np.dtype(np.float32), (2, 2), ("x", "y"), layout, (0, 1, 2, 3), **kw)


def array_on(*meshes: Mesh, known: Any = None, value: Any = None) -> DistributedArray:
    owner = SimpleNamespace(fetch=lambda array: value)
    copies = tuple(Copy(mesh, number, sharded_type()) for number, mesh in enumerate(meshes))
    return DistributedArray(owner, (4, 8), jnp.dtype(jnp.float32), False, copies, known)


def test_it_tells_where_it_lies() -> None:
    x = array_on(Mesh((4, 5, 6, 7)), Mesh((0, 2, 8, 9)))
    assert x.spec == P("x")
    assert x.mesh.devices == (4, 5, 6, 7) and x.mesh.shape == (2, 2)
    assert len(x.meshes) == 2
    assert repr(x) == (
        f"DistributedArray(float32[4, 8], {P('x')} on mesh(x=2, y=2; devices 4-7) and 1 more)"
    )
    assert "0,2,8,9" in repr(x.meshes[1])
    assert (x.nbytes, x.size, x.ndim, len(x)) == (128, 32, 2, 4)
    assert x.aval.shape == (4, 8)


def test_buffers_are_released_once() -> None:
    mesh = Mesh((0, 1, 2, 3))
    x = array_on(mesh)
    del x
    assert mesh.released == [0]
    x = array_on(mesh)
    x.delete()
    x.delete()
    assert mesh.released == [0, 0] and x.is_deleted()
    del x
    assert mesh.released == [0, 0]
    x = array_on(mesh)
    assert [copy.number for copy in x.take()] == [0]
    del x
    assert mesh.released == [0, 0], "who took the copies frees them"


def test_values_that_came_with_the_answer_are_not_fetched() -> None:
    x = array_on(Mesh((0, 1, 2, 3)), known=lambda: np.ones((4, 8)), value=np.zeros((4, 8)))
    assert np.asarray(x).sum() == 32
    x = array_on(Mesh((0, 1, 2, 3)), known=lambda: None, value=np.zeros((4, 8), np.float32))
    assert np.asarray(x).sum() == 0
    assert np.asarray(x, np.int32).dtype == np.int32
    with pytest.raises(ArgumentError, match=r"must be copied from the workers\. Use np\.asarray"):
        np.array(x, copy=False)


def test_types_that_are_no_numbers_and_have_no_length() -> None:
    key = DistributedArray(None, (), jax.random.key(0).dtype, False, ())
    number = DistributedArray(None, (), jnp.dtype(jnp.float32), False, ())
    for use, said in (
        (lambda: np.asarray(key), r"random keys are not numbers\. Use x\.fetch\(\)"),
        (lambda: len(number), r"without dimensions has no length\. Use x\.item\(\)"),
    ):
        with pytest.raises(ArgumentError, match=said) as caught:
            use()
        assert isinstance(caught.value, TypeError), "as NumPy and JAX have it"


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x @ x,
        lambda x: abs(x),
        lambda x: x == x,
        lambda x: x[0],
        lambda x: sum(x),
    ],
)
def test_arithmetic_is_refused(use: Any) -> None:
    with pytest.raises(ArgumentError, match=r"np\.asarray\(x\)"):
        use(array_on(Mesh((0, 1, 2, 3))))


def test_it_is_a_leaf_that_can_be_counted_and_mapped() -> None:
    x = array_on(Mesh((0, 1, 2, 3)))
    assert jax.tree.leaves({"a": x})[0] is x
    assert jax.tree.map(lambda leaf: leaf.shape, {"a": x}) == {"a": (4, 8)}
    assert len({x, array_on(Mesh((0, 1, 2, 3)))}) == 2


def test_same_place_is_about_what_devices_hold() -> None:
    over_x = sharded_type(layout=(0, -1))
    as_one_axis = ShardedType((4, 8), np.dtype(np.float32), (4,), ("x",), (-1,), (0, 1, 2, 3))
    assert same_shards(over_x, sharded_type(layout=(0, -1)))
    assert not same_shards(over_x, sharded_type(layout=(1, -1)))
    assert same_shards(sharded_type(layout=(-1, -1)), as_one_axis)
    turned = ShardedType((4, 8), np.dtype(np.float32), (2, 2), ("x", "y"), (0, -1), (0, 2, 1, 3))
    assert not same_shards(over_x, turned)
    by_columns = ShardedType(
        (4, 8), np.dtype(np.float32), (2, 2), ("x", "y"), (-1, 0), (0, 2, 1, 3)
    )
    assert same_shards(over_x, by_columns)


def test_values_can_be_written_to() -> None:
    came = np.ones((4, 8), np.float32)
    came.flags.writeable = False  # as Ray gives them
    x = array_on(Mesh((0, 1, 2, 3)), known=lambda: came)
    value = np.asarray(x)
    value += 1
    assert np.asarray(x).max() == 1 and x.fetch().flags.writeable

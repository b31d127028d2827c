"""Arguments of a call: from the leaves that the caller gave to arrays that a program can take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError
from autopar.runtime.stacks import RowShardings, StackedArray, put_stack


class SignatureChanged(Exception):
    """The arguments have other types than the program was made for. Internal."""


class DeletedArrayError(ArgumentError, RuntimeError):
    """An array whose buffers are gone. Also a `RuntimeError`, which is what JAX raises."""

    def __init__(self, name: str, position: int, array: Any) -> None:
        super().__init__(
            f"Array has been deleted: argument {position} of {name}, {array.dtype}"
            f"{list(array.shape)}, was donated or deleted before this call. Use the state that the "
            "last step returned, or keep the old one with parallelize(…, donate_argnums=())."
        )


def is_weak(leaf: Any) -> bool:
    return getattr(leaf, "weak_type", type(leaf) in (int, float, complex))


_weak_type = attrgetter("weak_type")


def weak_types(leaves: Sequence[Any]) -> list[bool]:
    """`is_weak` of each leaf; fast if all are JAX arrays, since a step may have thousands."""
    try:
        return list(map(_weak_type, leaves))
    except AttributeError:
        return list(map(is_weak, leaves))


def without_aliases(leaves: Sequence[Any], donated: Collection[int]) -> Sequence[Any]:
    """Copies donated arrays that appear more than once. XLA aborts the process if one buffer is
    donated twice, as when the average of the parameters starts as the parameters themselves."""
    if len(set(map(id, leaves))) == len(leaves):
        return leaves
    seen = {id(leaf) for i, leaf in enumerate(leaves) if i not in donated}
    separate = list(leaves)
    for i in donated:
        if id(leaves[i]) in seen and isinstance(leaves[i], (jax.Array, StackedArray)):
            separate[i] = leaves[i].copy()
        seen.add(id(leaves[i]))
    return separate


def has_types(leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
    """Whether leaves have these shapes and types; NumPy's are converted as JAX does."""
    if len(leaves) != len(avals):
        return False
    for leaf, aval in zip(leaves, avals, strict=True):
        array = leaf if hasattr(leaf, "weak_type") else jax.typeof(leaf)
        if (array.shape, array.dtype) != (aval.shape, aval.dtype):
            return False
        if is_weak(leaf) != aval.weak_type:
            return False
    return True


def put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Put arguments where a program wants them. On a mesh of several processes, every process gives
    the same values and keeps its own shards, so nothing is sent; JAX moves only arrays that span
    processes already."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        return _put_here(leaves, shardings)
    return [_put_across(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]


def _put_here(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    places = list(enumerate(zip(leaves, shardings, strict=True)))
    in_parts = {
        n: leaf if leaf_sharding(leaf) == sharding else put_stack(leaf, sharding)
        for n, (leaf, sharding) in places
        if isinstance(leaf, StackedArray) or isinstance(sharding, RowShardings)
    }
    others = [(leaf, sharding) for n, (leaf, sharding) in places if n not in in_parts]
    moved = iter(jax.device_put([leaf for leaf, _ in others], [s for _, s in others]))
    return [in_parts[n] if n in in_parts else next(moved) for n, _ in places]


def leaf_sharding(leaf: Any) -> Any:
    """Where an argument is; None if it is on no device."""
    return leaf.sharding if isinstance(leaf, (jax.Array, StackedArray)) else None


def _put_across(leaf: Any, sharding: Any) -> Any:
    if isinstance(leaf, jax.Array):
        # Mostly they are equal, and that test is much faster.
        if leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _put_across(np.asarray(jax.random.key_data(leaf)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    value = np.asarray(leaf, jax.typeof(leaf).dtype)
    # On a CPU, JAX would keep using the memory of NumPy's array.
    shard = (lambda index: np.array(value[index])) if _is_on_cpu(sharding) else value.__getitem__
    return jax.make_array_from_callback(value.shape, sharding, shard)


def place_some(leaves: Mapping[int, Any], shardings: Sequence[Any]) -> dict[int, Any]:
    """Put some arguments, by position, where a program wants them. Afterwards the caller may change
    what was given: on a CPU, JAX would keep using the memory of NumPy's arrays, so they are
    copied."""
    wanted = [shardings[position] for position in leaves]
    copied = [
        np.array(leaf) if isinstance(leaf, np.ndarray) and _is_on_cpu(sharding) else leaf
        for leaf, sharding in zip(leaves.values(), wanted, strict=True)
    ]
    placed = jax.block_until_ready(put(copied, wanted))
    return dict(zip(leaves, placed, strict=True))


def _is_on_cpu(sharding: Any) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"

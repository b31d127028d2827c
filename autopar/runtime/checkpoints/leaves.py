"""The leaves of a checkpoint: pytree ↔ named leaves.

A leaf's name is its path, `.params['Dense_0']['kernel']`. Arrays, PRNG keys and Python numbers are
saved. Other leaves (functions and strings in equinox modules) are part of the program: they are not
saved, and come from the target when a checkpoint is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    keystr,
    tree_flatten_with_path,
)

from autopar import _jax
from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime.checkpoints.format import ARRAY, KEY, SCALARS, Leaf, PathEntry, scalar_text

_NUMBER_TYPES = {
    "bool": np.bool_,
    "int": np.integer,
    "float": np.floating,
    "complex": np.complexfloating,
}


@dataclass(frozen=True)
class NamedLeaf:
    key: str
    path: tuple[PathEntry, ...]
    leaf: Any


def is_saved(leaf: object) -> bool:
    if isinstance(leaf, (*SCALARS.values(), np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def named_leaves(tree: Any, function: str) -> list[NamedLeaf]:
    """The leaves of a pytree that are saved; `function` names the user's call in errors."""
    flat, _ = tree_flatten_with_path(tree)
    named = [
        NamedLeaf(keystr(path), tuple(map(path_entry, path)), leaf)
        for path, leaf in flat
        if is_saved(leaf)
    ]
    seen: set[str] = set()
    for leaf in named:
        if leaf.key in seen:
            raise ArgumentError(
                f"{function}: two leaves of the state are both called {leaf.key!r}. Give the keys "
                "of its dictionaries texts that differ."
            )
        seen.add(leaf.key)
    return named


def path_entry(key: Any) -> PathEntry:
    match key:
        case DictKey(key=str() | int() as name) if not isinstance(name, bool):
            return "key", name
        case GetAttrKey(name=name):
            return "attribute", name
        case SequenceKey(idx=index) | FlattenedIndexKey(key=index) if isinstance(index, int):
            return "index", index
        case _:
            return "other", str(key)


def described(named: NamedLeaf, function: str) -> Leaf:
    """The manifest's entry for a leaf, before its shards are written."""
    leaf = named.leaf
    if _jax.is_traced(leaf):
        raise ArgumentError(
            f"{function}: {named.key or 'the state'} is being traced. Save outside of functions "
            "that JAX transforms."
        )
    if isinstance(leaf, tuple(SCALARS.values())) and not isinstance(leaf, np.generic):
        kind = next(k for k, of in SCALARS.items() if isinstance(leaf, of))
        return Leaf(named.key, named.path, kind, value=scalar_text(leaf))
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ArgumentError(
            f"{function}: the array {named.key or 'given'} is deleted. A step that returns updated "
            "state takes over the buffers of the old one: save the state that it returned."
        )
    is_weak = bool(getattr(leaf, "weak_type", False))
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = key_data_type(leaf)
        impl = _jax.key_implementation(leaf.dtype)
        return Leaf(named.key, named.path, KEY, data.shape, data.dtype.name, impl=impl)
    dtype = np.dtype(leaf.dtype)
    if dtype.hasobject or dtype.kind in "SUmM" or dtype.names is not None:
        raise ArgumentError(
            f"{function}: {named.key or 'the state'} has elements of the type {dtype}. Save arrays "
            "of numbers only."
        )
    return Leaf(named.key, named.path, ARRAY, tuple(leaf.shape), dtype.name, is_weak)


def key_data_type(key: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the data of a PRNG key, or of an array of keys."""
    return _key_data_type(tuple(key.shape), key.dtype)


@lru_cache(maxsize=4096)  # JAX keeps something for every call of eval_shape
def _key_data_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def canonical(dtype: Any) -> Any:
    """The dtype that JAX uses for this dtype: at most 32 bits without `jax_enable_x64`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def is_number_type(dtype: Any, kind: str) -> bool:
    """Whether a dtype matches this kind of Python number."""
    return bool(jax.numpy.issubdtype(dtype, _NUMBER_TYPES[kind]))


def nested(leaves: Sequence[tuple[tuple[PathEntry, ...], Any]]) -> Any:
    """Leaves by their paths as nested dicts; lists where all entries of a level are positions.
    Attributes become keys; positions without leaves become `None`."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    if not all(path for path, _ in leaves):
        raise CheckpointError("a checkpoint whose leaves lie within other leaves; it is malformed.")
    children: dict[PathEntry, list[tuple[tuple[PathEntry, ...], Any]]] = {}
    for path, leaf in leaves:
        children.setdefault(path[0], []).append((path[1:], leaf))
    built = {entry: nested(below) for entry, below in children.items()}
    positions = [name for kind, name in built if kind == "index" and isinstance(name, int)]
    # A damaged file must not create a list of any length.
    if len(positions) == len(built) and max(positions) < 1000 + 2 * len(built):
        return [built.get(("index", i)) for i in range(max(positions) + 1)]
    return {name: value for (_, name), value in built.items()}

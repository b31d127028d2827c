"""Programs on plain numbers: from a function on arrays to one whose random keys are their data.

Transports, channels and checkpoints then need to handle numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar import _jax


@lru_cache(maxsize=64)
def _data_of(dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of one key's data."""
    impl = _jax.key_implementation(dtype)
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def raw_type(buffer: Any) -> jax.ShapeDtypeStruct:
    """The type of a buffer's data, with its sharding if it has one."""
    sharding = getattr(buffer, "sharding", None)
    if not _jax.is_extended_dtype(buffer.dtype):
        return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=sharding)
    data = _data_of(buffer.dtype)
    assert sharding is None or isinstance(sharding, NamedSharding)
    return jax.ShapeDtypeStruct((*buffer.shape, *data.shape), data.dtype, sharding=sharding)


def on_raw_keys(
    function: Callable[..., Sequence[Any]], reads: Sequence[Any]
) -> Callable[..., list[Any]]:
    """The function on raw data; `reads` are the types of its arguments."""
    impls = [
        _jax.key_implementation(read.dtype) if _jax.is_extended_dtype(read.dtype) else None
        for read in reads
    ]

    def run(*arrays: Any) -> list[Any]:
        values = [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, impls, strict=True)
        ]
        return [
            jax.random.key_data(result) if _jax.is_extended_dtype(result.dtype) else result
            for result in map(_as_array, function(*values))
        ]

    return run


def _as_array(value: Any) -> Any:
    return value if hasattr(value, "dtype") else jax.numpy.asarray(value)

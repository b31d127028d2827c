"""What samples of single operations are made of: sizes drawn at random, and their arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Operation = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments' shapes
f32, bf16, c64 = jnp.float32, jnp.bfloat16, jnp.complex64
NUM = 12  # operations of a step


@dataclass(frozen=True)
class Index:
    """An argument: `size` places of an array of `num`."""

    size: int
    num: int


def some(rng: np.random.Generator, low: float, high: float, multiple: int = 1) -> int:
    """A number between these, most often one with many factors of two."""
    number = 2 ** rng.uniform(np.log2(low), np.log2(high))
    by = max(multiple, int(rng.choice([1, 8, 32])))
    return max(by, round(number / by) * by) if number > by else max(1, round(number))


def of(*shape: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def some_type(rng: np.random.Generator) -> Any:
    return (f32, bf16)[int(rng.integers(2))]


def made(given: Any) -> Any:
    if isinstance(given, Index):
        return _scrambled(given.size, given.num)
    return (_scrambled(prod(given.shape), 1024).reshape(given.shape) / 512 - 1).astype(given.dtype)


def _scrambled(size: int, num: int) -> Any:
    """Numbers below `num` in an order without a pattern that caches like."""
    counted = jax.lax.iota(jnp.uint32, size)
    return ((counted * np.uint32(2654435761) >> 7) % num).astype(jnp.int32)

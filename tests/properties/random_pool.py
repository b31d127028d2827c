"""The values that a random program has made so far, and the table of operations that make more.

Every value knows whether it is *exact*: made only by moving data or by integer arithmetic, so the
order of a sum cannot change it. Discontinuous operations (argmax, comparisons) read only exact
values: a difference in the last bit must not become another result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp

MAX_SIZE = 4096


@dataclass(frozen=True)
class Entry:
    value: Any
    exact: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def is_int(self) -> bool:
        """True for an array of int32, which can index another."""
        return self.value.dtype == jnp.int32

    @property
    def is_float(self) -> bool:
        return self.value.dtype == jnp.float32


class Pool:
    """The values made so far, and choices among them that depend only on the seed and shapes."""

    def __init__(self, entries: list[Entry], seed: int, differentiable: bool) -> None:
        self.entries = entries
        self.rng = random.Random(seed)
        self.differentiable = differentiable

    def pick(self, accept: Callable[[Entry], bool]) -> Entry | None:
        fitting = [e for e in self.entries if accept(e)]
        if not fitting:
            return None
        # Late values are likelier, so that programs get deep.
        return fitting[max(self.rng.randrange(len(fitting)) for _ in range(2))]

    def array(self, min_dims: int = 1, accept: Callable[[Entry], bool] = lambda e: True) -> Any:
        return self.pick(lambda e: e.is_float and e.value.ndim >= min_dims and accept(e))

    def any_type(self, min_dims: int = 1, accept: Callable[[Entry], bool] = lambda e: True) -> Any:
        return self.pick(lambda e: e.value.ndim >= min_dims and accept(e))

    def index(self, min_dims: int = 0) -> Entry | None:
        return self.pick(lambda e: e.is_int and e.value.ndim >= min_dims)

    def axis(self, entry: Entry) -> int:
        return self.rng.randrange(entry.value.ndim)


OPERATIONS: dict[str, Callable[[Pool], Any]] = {}


def operation(fn: Callable[[Pool], Any]) -> Callable[[Pool], Any]:
    OPERATIONS[fn.__name__] = fn
    return fn


def noise(shape: tuple[int, ...], seed: int = 0) -> Any:
    """A constant of the program, made from iota so that it is not a captured array."""
    count = jnp.arange(prod(shape), dtype=jnp.float32).reshape(shape)
    return jnp.sin(count * 0.7 + seed)

"""Random programs of array operations, made from a short list of numbers.

A program is input shapes and steps; a step is an operation's name and a seed, from which it picks
its operands among the values made so far. Anything can be dropped from a program and it remains
one, so hypothesis shrinks a failure to the few steps that matter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from tests.properties import random_indices, random_loops, random_operations, random_types
from tests.properties.random_pool import MAX_SIZE, OPERATIONS, Entry, Pool

MODULES = (random_operations, random_loops, random_indices, random_types)  # they fill OPERATIONS
MESHES = ((8,), (2, 4), (4, 2), (1, 8))
DIMS = (8, 8, 16, 4, 2, 24, 3, 1)
RAGGED_DIMS = (8, 16, 3, 5, 6, 7, 10, 12)  # few are multiples of a mesh axis


@dataclass(frozen=True)
class RandomProgram:
    """Input shapes (floats, then integers), steps, and whether the gradient is taken."""

    shapes: tuple[tuple[int, ...], ...]
    int_shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, int], ...]
    gradient: bool

    @property
    def tolerance(self) -> float:
        halves = any(name in random_types.HALF for name, _ in self.steps)
        return 3e-2 if halves else 1e-4

    def inputs(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        rng = np.random.default_rng(0)
        floats = [rng.normal(size=s).astype(np.float32) for s in self.shapes]
        return floats, [rng.integers(0, 50, size=s, dtype=np.int32) for s in self.int_shapes]

    def values(self, floats: list[Any], ints: list[Any]) -> list[Any]:
        entries = [Entry(jnp.asarray(x), True) for x in (*floats, *ints)]
        for name, seed in self.steps:
            made = OPERATIONS[name](Pool(entries, seed, self.gradient))
            for item in made if isinstance(made, list) else [made]:
                if item is not None:
                    entries.append(item if isinstance(item, Entry) else Entry(item, False))
        return [e.value for e in entries[len(floats) + len(ints) :]]

    def __call__(self, floats: list[Any], ints: list[Any]) -> Any:
        if not self.gradient:
            return self.values(floats, ints)[-3:] or [floats[0] * 2]

        def loss(floats: list[Any]) -> Any:
            values = [v for v in self.values(floats, ints) if jnp.issubdtype(v.dtype, jnp.floating)]
            return sum(jnp.mean(jnp.sin(v.astype(jnp.float32))) for v in values[-3:]) + jnp.mean(
                floats[0]
            )

        return jax.value_and_grad(loss)(floats)


def programs(min_steps: int, max_steps: int) -> st.SearchStrategy[RandomProgram]:
    def shapes(min_dims: int, max_dims: int) -> st.SearchStrategy[tuple[int, ...]]:
        dims = st.lists(st.sampled_from(DIMS), min_size=min_dims, max_size=max_dims)
        return dims.filter(lambda d: prod(d) <= MAX_SIZE).map(tuple)

    def step(number: int) -> tuple[str, int]:
        # Hypothesis prefers small numbers; a hash spreads them over all operations evenly.
        return random.Random(number).choice(sorted(OPERATIONS)), number

    numbers = st.lists(st.integers(0, 2**32), min_size=min_steps, max_size=max_steps, unique=True)
    return st.builds(
        RandomProgram,
        st.lists(shapes(1, 4), min_size=2, max_size=3).map(tuple),
        st.lists(shapes(1, 2), min_size=1, max_size=1).map(tuple),
        numbers.map(lambda each: tuple(step(number) for number in each)),
        st.booleans(),
    )


def program_of(rng: random.Random) -> RandomProgram:
    """A program of three to seven steps. Its first input has eight rows, so that every mesh has
    something to split; the other sizes may be ragged."""
    dims = rng.choice((DIMS, RAGGED_DIMS))

    def shape(min_dims: int, max_dims: int) -> tuple[int, ...]:
        while True:
            found = tuple(rng.choice(dims) for _ in range(rng.randint(min_dims, max_dims)))
            if prod(found) <= MAX_SIZE // 4:
                return found

    names = sorted(OPERATIONS)
    return RandomProgram(
        ((8, *shape(0, 2)), *(shape(1, 3) for _ in range(rng.randint(1, 2)))),
        (shape(1, 2),),
        tuple((rng.choice(names), rng.randrange(2**32)) for _ in range(rng.randint(3, 7))),
        rng.random() < 0.5,
    )

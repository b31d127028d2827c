"""The common interface of all models, for tests and benchmarks.

A `Family` is four functions of a config; an `Example` is a family with a config and a batch size.
Nothing is traced or allocated before a method needs it, so an `Example` of a 39B model costs
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

Batch = dict[str, jax.Array]
TrainStep = Callable[[Any, Batch], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Family:
    """The functions of a model family; each takes the family's config first."""

    create_state: Callable[[Any, jax.Array], Any]
    make_train_step: Callable[[Any], TrainStep]
    make_batch: Callable[[Any, int, jax.Array], Batch]
    flops_per_step: Callable[[Any, int], int]


@dataclasses.dataclass(frozen=True)
class Example:
    """A model with its train step, optimizer and data: `state, loss = train_step(state, batch)`.

    Attributes:
      name: the name in the registry, or the family's name for an ad-hoc config.
      config: the family's frozen config dataclass.
      batch_size: the global batch size that the methods use by default.
      family: the functions behind the methods.
    """

    name: str
    config: Any
    batch_size: int
    family: Family

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The pure single-device step; one object per example, so that `jax.jit` caches it."""
        return self.family.make_train_step(self.config)

    def create_state(self, key: jax.Array | None = None) -> Any:
        """Initialises parameters and optimizer state on the default device."""
        return self._jitted_create_state(jax.random.key(0) if key is None else key)

    def make_batch(self, batch_size: int | None = None, key: jax.Array | None = None) -> Batch:
        """Draws a synthetic batch; the leading dimension of every array is the batch."""
        key = jax.random.key(1) if key is None else key
        return self.family.make_batch(self.config, batch_size or self.batch_size, key)

    def abstract_state(self) -> Any:
        """The state with a `jax.ShapeDtypeStruct` for each array."""
        return jax.eval_shape(self.create_state)

    def abstract_batch(self, batch_size: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The batch with a `jax.ShapeDtypeStruct` for each array."""
        return jax.eval_shape(lambda: self.make_batch(batch_size))

    @functools.cached_property
    def num_params(self) -> int:
        """The number of trained scalars."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_state().params))

    def flops_per_step(self, batch_size: int | None = None) -> int:
        """Floating point operations of one train step, by the closed form of the family.

        A multiply-add is two. Only matrix products and convolutions count: the forward pass once
        and its two gradients, never recomputation.
        """
        return self.family.flops_per_step(self.config, batch_size or self.batch_size)

    def replace(self, batch_size: int | None = None, **overrides: Any) -> Example:
        """The same model with another batch size or with some config fields changed."""
        return dataclasses.replace(
            self,
            batch_size=batch_size or self.batch_size,
            config=dataclasses.replace(self.config, **overrides),
        )

    @functools.cached_property
    def _jitted_create_state(self) -> Callable[[jax.Array], Any]:
        return jax.jit(functools.partial(self.family.create_state, self.config))

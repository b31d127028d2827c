"""The table of operators: a tiny program for every primitive of JAX.

A `Case` belongs to the primitive that its program binds, in the forward or the backward pass.
`operator` adds one. Cases of a *family* are checked together, as one step (`check.py`), since
compiling one program of twenty operators is quicker than compiling twenty programs.

Modules of cases: `elementwise`, `arrays`, `reductions`, `linear_algebra`, `random_keys`, `calls`,
`across_devices`. `excluded.py` lists the primitives that need no case, with reasons.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.operators.primitives import primitives


@dataclass(frozen=True)
class Case:
    """`gradient`: whether JAX differentiates the program with respect to its inexact inputs."""

    primitive: str
    family: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    gradient: bool
    tolerance: float

    def forward(self, *args: Any) -> Any:
        return self.function(*args)

    def backward(self, *args: Any) -> Any:
        """Gradients of a weighted sum of all results; every element has another weight."""
        chosen = [i for i, a in enumerate(args) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]

        def loss(*inexact: Any) -> Any:
            every = list(args)
            for i, value in zip(chosen, inexact, strict=True):
                every[i] = value
            leaves = jax.tree.leaves(self.function(*every))
            return sum((_weighted(leaf) for leaf in leaves), start=jnp.float32(0))

        inexact = [args[i] for i in chosen]
        return jax.grad(loss, argnums=tuple(range(len(chosen))))(*inexact)

    def step(self, *args: Any) -> Any:
        return self.forward(*args), self.backward(*args) if self.gradient else ()


def _weighted(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.float32(0)
    weights = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.sum(weights * jnp.real(leaf)) + jnp.sum(weights[::-1] * jnp.imag(leaf))
    return jnp.sum(weights * leaf.astype(jnp.float32))


CASES: dict[str, Case] = {}


def operator(
    primitive: str,
    family: str,
    function: Callable[..., Any],
    *args: Any,
    gradient: bool | None = None,
    tolerance: float = 2e-5,
) -> None:
    """Adds a case, if this release of JAX has the primitive. By default, it is differentiated if
    it has inexact inputs."""
    if primitive not in primitives():
        return
    assert primitive not in CASES, primitive
    if gradient is None:
        gradient = any(np.issubdtype(np.asarray(a).dtype, np.inexact) for a in args)
    CASES[primitive] = Case(primitive, family, function, args, gradient, tolerance)


def is_differentiable(function: Callable[..., Any], *args: Any) -> bool:
    """Whether this release of JAX can; some learnt it later than others."""
    try:
        jax.eval_shape(Case("", "", function, args, True, 0.0).backward, *args)
    except NotImplementedError:
        return False
    return True


def bound(primitive: str, **params: Any) -> Callable[..., Any]:
    """A function that binds a primitive for which JAX has no public function."""
    return lambda *args: primitives()[primitive].bind(*args, **params)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return rng.normal(size=shape).astype(np.float32)


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers between 0.05 and 0.95."""
    rng = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return rng.uniform(0.05, 0.95, size=shape).astype(np.float32)


def integers(*shape: int, limit: int = 8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return rng.integers(0, limit, size=shape, dtype=np.int32)


def distinct(*shape: int) -> np.ndarray:
    """Different numbers in no order, so that the largest is the same in every precision."""
    rng = np.random.default_rng(0)
    return rng.permutation(int(np.prod(shape))).astype(np.float32).reshape(shape) / 8


def definite(*shape: int) -> np.ndarray:
    """Symmetric positive definite matrices."""
    a = floats(*shape)
    return a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1], dtype=np.float32)


def load() -> dict[str, Case]:
    """All cases for this JAX, by primitive."""
    from tests.operators import (  # noqa: F401
        across_devices,
        arrays,
        calls,
        elementwise,
        linear_algebra,
        random_keys,
        reductions,
    )

    return CASES

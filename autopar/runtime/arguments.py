"""What executables do with the leaves they are given before a program sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np


class SignatureChanged(Exception):
    """The arguments are not those the program was made for. Internal."""


def is_weak(leaf: Any) -> bool:
    return getattr(leaf, "weak_type", type(leaf) in (int, float, complex))


def with_own_buffers(leaves: Sequence[Any], donated: Collection[int]) -> Sequence[Any]:
    """XLA ends the process if one buffer is donated twice, as happens when the average of the
    parameters starts as the parameters themselves: copy what is donated and not alone."""
    if len(set(map(id, leaves))) == len(leaves):
        return leaves
    seen = {id(leaf) for i, leaf in enumerate(leaves) if i not in donated}
    separate = list(leaves)
    for i in donated:
        if id(leaves[i]) in seen and isinstance(leaves[i], jax.Array):
            separate[i] = jax.numpy.copy(leaves[i])
        seen.add(id(leaves[i]))
    return separate


def place_some(leaves: Mapping[int, Any], shardings: Sequence[Any]) -> dict[int, Any]:
    """Put some arguments, given by position, where a program wants them. When this returns, their
    owner may change what was given: on a CPU, JAX would go on using the memory of NumPy's arrays,
    so they are copied."""
    wanted = [shardings[position] for position in leaves]
    own = [
        np.array(leaf) if isinstance(leaf, np.ndarray) and _is_on_cpu(sharding) else leaf
        for leaf, sharding in zip(leaves.values(), wanted, strict=True)
    ]
    placed = jax.block_until_ready(jax.device_put(own, wanted))
    return dict(zip(leaves, placed, strict=True))


def _is_on_cpu(sharding: Any) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"

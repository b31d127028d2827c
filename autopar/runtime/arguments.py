"""What executables do with the leaves they are given before a program sees them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax


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

"""What of a layer is kept for the backward pass, when an expert has it computed again.

    "none"       all of it
    "products"   what the kernels (and experts) of a layer give; attention's scores, activation
                 functions and norms are computed again
    "attention"  the projections of attention alone; the feed-forward is computed again
    "full"       nothing but the layer's input

The models' own `remat=True` is the last; the two between are a policy of `jax.checkpoint` that
saves outputs by name. They are named by `HandWritten.annotate`, from outside the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import flax.linen as nn
import jax

KINDS = ("none", "products", "attention", "full")
_PROJECTIONS = ("qkv", "query", "key", "value", "out")
_EXPERTS = ("gsec,gsm->egcm", "egcm,emh->egch", "egch,ehm->egcm")
# A row-split product's result is added to the stream, and nothing of the backward pass reads it.
SAVED = {"products": (*_PROJECTIONS, "up", "gate", *_EXPERTS), "attention": _PROJECTIONS}


@contextlib.contextmanager
def keeping(kind: str) -> Iterator[None]:
    """Layers that are rematerialised inside keep what `kind` says."""
    if kind not in SAVED:
        yield
        return
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED[kind])
    with contextlib.ExitStack() as stack:
        for owner, name in ((nn, "remat"), (jax, "checkpoint")):
            own = functools.partial(getattr(owner, name), policy=policy)
            stack.enter_context(mock.patch.object(owner, name, own))
        yield

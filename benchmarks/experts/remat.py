"""Which values of a layer an expert saves for the backward pass; the rest is recomputed.

    "none"       saves everything
    "products"   saves the outputs of the layer's kernels (and experts); recomputes attention
                 scores, activation functions and norms
    "attention"  saves only the attention projections; recomputes the feed-forward
    "full"       saves only the layer's input

The models' `remat=True` is the last; the two in between are `jax.checkpoint` policies that save
outputs by name. `HandWritten.annotate` names them, from outside the model.
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
# A row-split product's output is added to the residual stream; the backward pass never reads it.
SAVED = {"products": (*_PROJECTIONS, "up", "gate", *_EXPERTS), "attention": _PROJECTIONS}


@contextlib.contextmanager
def keeping(kind: str) -> Iterator[None]:
    """Layers rematerialised in the block save what `kind` says."""
    if kind not in SAVED:
        yield
        return
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED[kind])
    with contextlib.ExitStack() as stack:
        for owner, name in ((nn, "remat"), (jax, "checkpoint")):
            patched = functools.partial(getattr(owner, name), policy=policy)
            stack.enter_context(mock.patch.object(owner, name, patched))
        yield

"""Chooses the next token of every slot: from logits and settings to tokens, on the device.

Warpers come in the order of transformers: temperature, top-k, top-p. A draw depends only on the
request's seed and the position, not on its slot or the rest of the batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Settings = dict[str, Any]


def choose_tokens(
    logits: jax.Array, settings: Settings, positions: jax.Array, *, may_sample: bool
) -> tuple[jax.Array, jax.Array]:
    """logits (slots, vocabulary) -> tokens (slots,) and their log-probabilities before warpers.

    settings:   `temperature`, `top_k` (0: all), `top_p`, `seed`, `do_sample`, one entry per slot.
    positions:  of the chosen tokens.
    may_sample: False leaves out the sampling code; then no slot may sample.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if may_sample:
        sampled = jax.vmap(_sample)(logits, settings, positions)
        tokens = jnp.where(settings["do_sample"], sampled, tokens)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def _sample(logits: jax.Array, settings: Settings, position: jax.Array) -> jax.Array:
    """One slot: (vocabulary,) -> a token."""
    size = logits.shape[0]
    scaled = logits / settings["temperature"]
    falling, tokens = lax.sort_key_val(-scaled, jnp.arange(size, dtype=jnp.int32))
    falling = -falling
    top_k = jnp.where(settings["top_k"] > 0, jnp.minimum(settings["top_k"], size), size)
    # transformers keeps tokens that tie with the last of the top k.
    falling = jnp.where(falling >= falling[top_k - 1], falling, -jnp.inf)
    probabilities = jax.nn.softmax(falling)
    before = jnp.cumsum(probabilities) - probabilities
    is_kept = (before < settings["top_p"]) | (jnp.arange(size) == 0)
    key = jax.random.fold_in(jax.random.key(settings["seed"]), position)
    noise = jax.random.gumbel(key, (size,), jnp.float32)
    drawn = jnp.argmax(jnp.where(is_kept, falling, -jnp.inf) + noise)
    return tokens[drawn]

"""GPT: a decoder-only, pre-LN transformer with learned positions.

Sizes are GPT-3's as in the Alpa paper (OSDI 2022): sequences of 1024, a vocabulary of 51200 and a
global batch of 1024.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .example import Batch, Example, Family, TrainStep
from .transformer import (
    AttentionKind,
    FeedForward,
    SelfAttention,
    TrainState,
    apply_layers,
    check_attention,
    create_train_state,
    cross_entropy,
    make_token_batch,
)


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Parameters are float32; activations and products use `dtype`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int = 1024
    vocab_size: int = 51200
    tie_embeddings: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    attention: AttentionKind = "einsum"
    remat: bool = False
    scan_layers: bool = False
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_attention(self.attention, self.dropout)


class GPTLayer(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        config = self.config
        y = nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x)
        x += SelfAttention(
            config.num_heads,
            causal=True,
            dropout=config.dropout,
            dtype=config.dtype,
            kind=config.attention,
            name="attention",
        )(y)
        y = nn.LayerNorm(dtype=config.dtype, name="ffn_norm")(x)
        x += FeedForward(4 * config.hidden_size, config.dropout, config.dtype, name="ffn")(y)
        return x, None


class GPT(nn.Module):
    """Maps (batch, seq) tokens to (batch, seq, vocab) logits."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            embedding_init=init,
            name="embed",
        )
        positions = self.param("positions", init, (config.seq_len, config.hidden_size))
        x = embed(tokens) + positions.astype(config.dtype)
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        x = apply_layers(GPTLayer, config, config.num_layers, x)
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(x)
        if config.tie_embeddings:
            return embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, dtype=config.dtype, name="lm_head")(x)


@functools.cache
def _model(config: GPTConfig) -> GPT:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return GPT(config)


def create_state(config: GPTConfig, key: jax.Array) -> TrainState:
    return create_train_state(
        _model(config),
        jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32),
        key,
        learning_rate=config.learning_rate,
        dropout=config.dropout,
    )


def make_train_step(config: GPTConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["tokens"], rngs=state.rngs())
            return jnp.mean(cross_entropy(logits, batch["targets"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_batch(config: GPTConfig, batch_size: int, key: jax.Array) -> Batch:
    return make_token_batch(config.vocab_size, config.seq_len, batch_size, key)


def flops_per_step(config: GPTConfig, batch_size: int) -> int:
    """6 · tokens · (12 L H² + H V) + 12 · tokens · L S H.

    The first term is the weights of the layers and the LM head (the embedding lookup has no
    products); the second is the scores and outputs of attention, masked half included.
    """
    tokens = batch_size * config.seq_len
    hidden, layers = config.hidden_size, config.num_layers
    weights = 12 * layers * hidden**2 + hidden * config.vocab_size
    return 6 * tokens * weights + 12 * tokens * layers * config.seq_len * hidden


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: GPTConfig, batch_size: int = 1024, name: str = "gpt") -> Example:
    return Example(name, config, batch_size, FAMILY)


_PAPER_CONFIGS = {
    "gpt-350m": GPTConfig(1024, 24, 16, dtype=jnp.bfloat16),
    "gpt-760m": GPTConfig(1536, 24, 16, dtype=jnp.bfloat16),
    "gpt-1.3b": GPTConfig(2048, 24, 32, dtype=jnp.bfloat16),
    "gpt-2.6b": GPTConfig(2560, 32, 32, dtype=jnp.bfloat16),
    "gpt-6.7b": GPTConfig(4096, 32, 32, dtype=jnp.bfloat16),
    "gpt-15b": GPTConfig(5120, 48, 40, dtype=jnp.bfloat16),
    "gpt-39b": GPTConfig(8192, 48, 64, dtype=jnp.bfloat16),
}
_TINY = GPTConfig(hidden_size=32, num_layers=2, num_heads=8, seq_len=32, vocab_size=128)
_TINY_CONFIGS = {
    "gpt-tiny": _TINY,
    "gpt-tiny-scan": dataclasses.replace(_TINY, num_layers=3, scan_layers=True),
}
EXAMPLES = {name: example(config, name=name) for name, config in _PAPER_CONFIGS.items()} | {
    name: example(config, batch_size=8, name=name) for name, config in _TINY_CONFIGS.items()
}

"""BERT: a post-LN encoder trained on masked tokens, and its bare layers.

BERT-large is that of Devlin et al. (2018) without segments and next-sentence prediction. The bare
layers map activations to target activations, as in Alpa's tests of its sharding pass. Dropout uses
a key in the state; fused attention does not support it and needs `dropout=0.0`.
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
)


@dataclasses.dataclass(frozen=True)
class BertLayersConfig:
    """Parameters are float32; activations and products use `dtype`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int = 512
    dropout: float = 0.1
    dtype: Any = jnp.float32
    attention: AttentionKind = "einsum"
    remat: bool = False
    scan_layers: bool = False
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_attention(self.attention, self.dropout)


@dataclasses.dataclass(frozen=True)
class BertConfig(BertLayersConfig):
    vocab_size: int = 30522
    masked_fraction: float = 0.15


class BertLayer(nn.Module):
    config: BertLayersConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        config = self.config
        x += SelfAttention(
            config.num_heads,
            causal=False,
            dropout=config.dropout,
            dtype=config.dtype,
            kind=config.attention,
            name="attention",
        )(x)
        x = nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x)
        x += FeedForward(4 * config.hidden_size, config.dropout, config.dtype, name="ffn")(x)
        return nn.LayerNorm(dtype=config.dtype, name="ffn_norm")(x), None


class BertLayers(nn.Module):
    """Maps (batch, seq, hidden) activations to the same shape."""

    config: BertLayersConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.config.dtype)
        return apply_layers(BertLayer, self.config, self.config.num_layers, x)


class Bert(nn.Module):
    """Maps (batch, seq) tokens to (batch, seq, vocab) logits, the decoder tied to the embedding."""

    config: BertConfig

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
        # Looked up in float32: all masked tokens share one row, and a GPU adds its gradients one
        # by one, which is slow in bfloat16 (half of a step on an H200).
        x = jnp.take(embed.embedding, tokens, axis=0).astype(config.dtype)
        x = x + positions.astype(config.dtype)
        x = nn.LayerNorm(dtype=config.dtype, name="embed_norm")(x)
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        x = apply_layers(BertLayer, config, config.num_layers, x)
        x = nn.gelu(nn.Dense(config.hidden_size, dtype=config.dtype, name="head")(x))
        x = nn.LayerNorm(dtype=config.dtype, name="head_norm")(x)
        bias = self.param("head_bias", nn.initializers.zeros, (config.vocab_size,))
        return embed.attend(x) + bias.astype(config.dtype)


@functools.cache
def _model(config: BertConfig) -> Bert:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return Bert(config)


@functools.cache
def _layers_model(config: BertLayersConfig) -> BertLayers:
    return BertLayers(config)


def create_state(config: BertConfig, key: jax.Array) -> TrainState:
    return create_train_state(
        _model(config),
        jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32),
        key,
        learning_rate=config.learning_rate,
        dropout=config.dropout,
    )


def create_layers_state(config: BertLayersConfig, key: jax.Array) -> TrainState:
    return create_train_state(
        _layers_model(config),
        jax.ShapeDtypeStruct((1, config.seq_len, config.hidden_size), jnp.float32),
        key,
        learning_rate=config.learning_rate,
        dropout=config.dropout,
    )


def make_train_step(config: BertConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["tokens"], rngs=state.rngs())
            losses = cross_entropy(logits, batch["targets"])
            return jnp.sum(losses * batch["is_masked"]) / jnp.sum(batch["is_masked"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_layers_train_step(config: BertLayersConfig) -> TrainStep:
    model = _layers_model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            outputs = model.apply({"params": params}, batch["x"], rngs=state.rngs())
            return jnp.mean(jnp.square(outputs.astype(jnp.float32) - batch["y"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_batch(config: BertConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens as targets; where `is_masked` is 1.0 the input has the last token instead."""
    token_key, mask_key = jax.random.split(key)
    shape = (batch_size, config.seq_len)
    mask_token = config.vocab_size - 1
    targets = jax.random.randint(token_key, shape, 0, mask_token)
    is_masked = jax.random.bernoulli(mask_key, config.masked_fraction, shape)
    return {
        "tokens": jnp.where(is_masked, mask_token, targets),
        "targets": targets,
        "is_masked": is_masked.astype(jnp.float32),
    }


def make_layers_batch(config: BertLayersConfig, batch_size: int, key: jax.Array) -> Batch:
    x_key, y_key = jax.random.split(key)
    shape = (batch_size, config.seq_len, config.hidden_size)
    return {"x": jax.random.normal(x_key, shape), "y": jax.random.normal(y_key, shape)}


def layers_flops_per_step(config: BertLayersConfig, batch_size: int) -> int:
    """6 · tokens · 12 L H² for the weights, and 12 · tokens · L S H for attention."""
    tokens = batch_size * config.seq_len
    hidden, layers = config.hidden_size, config.num_layers
    return 72 * tokens * layers * hidden**2 + 12 * tokens * layers * config.seq_len * hidden


def flops_per_step(config: BertConfig, batch_size: int) -> int:
    """The layers' flops, and 6 · tokens · (H² + H V) for the head."""
    tokens = batch_size * config.seq_len
    head_weights = config.hidden_size**2 + config.hidden_size * config.vocab_size
    return layers_flops_per_step(config, batch_size) + 6 * tokens * head_weights


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)
LAYERS_FAMILY = Family(
    create_layers_state, make_layers_train_step, make_layers_batch, layers_flops_per_step
)


def example(config: BertConfig, batch_size: int = 256, name: str = "bert") -> Example:
    return Example(name, config, batch_size, FAMILY)


def layers_example(
    config: BertLayersConfig, batch_size: int = 8, name: str = "bert-layers"
) -> Example:
    return Example(name, config, batch_size, LAYERS_FAMILY)


EXAMPLES = {
    "bert-large": example(BertConfig(1024, 24, 16, dtype=jnp.bfloat16), name="bert-large"),
    "bert-tiny": example(
        BertConfig(32, 2, 8, seq_len=32, vocab_size=128), batch_size=8, name="bert-tiny"
    ),
    "bert-layers-tiny": layers_example(
        BertLayersConfig(32, 2, 8, seq_len=32), batch_size=8, name="bert-layers-tiny"
    ),
}

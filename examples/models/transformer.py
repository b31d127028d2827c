"""Shared by the transformer families: attention, feed-forward, layer stack, loss and state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from .example import Batch

AttentionKind = Literal["einsum", "xla", "cudnn"]


def check_attention(kind: AttentionKind, dropout: float = 0.0) -> None:
    """Raises ValueError if this kind of attention does not exist, or not with dropout."""
    kinds = get_args(AttentionKind)
    if kind not in kinds:
        raise ValueError(f"unknown attention {kind!r}; choose from {', '.join(map(repr, kinds))}")
    if kind != "einsum" and dropout:
        raise ValueError(
            f'attention is "{kind}" and dropout is {dropout}; JAX\'s attention has no '
            'dropout here, so set dropout=0.0 or attention="einsum"'
        )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    kind: AttentionKind = "einsum",
    dropout: Callable[[jax.Array], jax.Array] = lambda probs: probs,
) -> jax.Array:
    """Scaled dot-product attention over (batch, seq, heads, head_dim) arrays, softmax in float32.

    `key` and `value` may have fewer heads than `query`: each then serves a group of query heads.
    "cudnn" is the fused kernel (bf16 on a GPU, no dropout), "xla" the same JAX function as XLA
    compiles it on any device, "einsum" is written out here.
    """
    if kind != "einsum":
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation=kind
        )
    batch, seq_len, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if num_kv_heads != num_heads:
        query = query.reshape(batch, seq_len, num_kv_heads, -1, head_dim)
        to_scores, to_outputs = "bqngd,bknd->bngqk", "bngqk,bknd->bqngd"
    else:
        to_scores, to_outputs = "bqnd,bknd->bnqk", "bnqk,bknd->bqnd"
    scores = jnp.einsum(to_scores, query / head_dim**0.5, key).astype(jnp.float32)
    if causal:
        visible = jnp.tril(jnp.ones((seq_len, seq_len), bool))
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    probs = dropout(jax.nn.softmax(scores).astype(value.dtype))
    return jnp.einsum(to_outputs, probs, value).reshape(batch, seq_len, num_heads, head_dim)


class SelfAttention(nn.Module):
    """Multi-head self-attention with one Dense for query, key and value."""

    num_heads: int
    causal: bool
    dropout: float = 0.0
    dtype: Any = jnp.float32
    kind: AttentionKind = "einsum"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq_len, hidden_size = x.shape
        qkv = nn.Dense(3 * hidden_size, dtype=self.dtype, name="qkv")(x)
        # Heads are outermost, so that a split of the Dense's features is a split of the heads.
        qkv = qkv.reshape(batch, seq_len, self.num_heads, -1)
        query, key, value = jnp.split(qkv, 3, axis=-1)
        dropout = nn.Dropout(self.dropout, deterministic=False)
        x = attention(query, key, value, causal=self.causal, kind=self.kind, dropout=dropout)
        x = nn.Dense(hidden_size, dtype=self.dtype, name="out")(
            x.reshape(batch, seq_len, hidden_size)
        )
        return nn.Dropout(self.dropout, deterministic=False)(x)


class FeedForward(nn.Module):
    """Dense, gelu, Dense."""

    ffn_size: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden_size = x.shape[-1]
        x = nn.gelu(nn.Dense(self.ffn_size, dtype=self.dtype, name="up")(x))
        x = nn.Dense(hidden_size, dtype=self.dtype, name="down")(x)
        return nn.Dropout(self.dropout, deterministic=False)(x)


def apply_layers(layer: type[nn.Module], config: Any, num_layers: int, carry: Any) -> Any:
    """Applies `num_layers` of `layer(config)` inside the calling module.

    With `config.scan_layers` the parameters are stacked under "layers", otherwise they are under
    "layer_0", "layer_1", ... A layer maps a carry to `(carry, None)`.
    """
    if config.remat:
        layer = nn.remat(layer, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=num_layers,
        )
        carry, _ = scanned(config, name="layers")(carry)
        return carry
    for index in range(num_layers):
        carry, _ = layer(config, name=f"layer_{index}")(carry)
    return carry


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of each position, in float32.

    The target's logit is picked by a masked sum: unlike a gather, it and its gradient are
    elementwise over the vocabulary, which fuses and can be split along it.
    """
    logits = logits.astype(jnp.float32)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


class TrainState(train_state.TrainState):
    """Flax's train state, with a dropout key if the model has dropout."""

    dropout_key: jax.Array | None = None

    def rngs(self) -> dict[str, jax.Array]:
        """The random streams of the current step."""
        if self.dropout_key is None:
            return {}
        return {"dropout": jax.random.fold_in(self.dropout_key, self.step)}


@functools.cache
def adam(learning_rate: float) -> optax.GradientTransformation:
    """Adam, one object per rate, since states hold their optimizer statically and compare by it."""
    return optax.adam(learning_rate)


@functools.cache
def adafactor(learning_rate: float) -> optax.GradientTransformation:
    """Adafactor, one object per rate; its state is a row and a column of every matrix."""
    return optax.adafactor(learning_rate)


OPTIMIZERS = {"adam": adam, "adafactor": adafactor}


def check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")


def create_train_state(
    model: nn.Module,
    inputs: jax.ShapeDtypeStruct,
    key: jax.Array,
    *,
    learning_rate: float,
    dropout: float,
    optimizer: str = "adam",
) -> TrainState:
    """Initialises `model` and its optimizer for `inputs` without running the model."""
    params_key, dropout_key = jax.random.split(key)
    params = model.lazy_init({"params": params_key, "dropout": dropout_key}, inputs)["params"]
    transformation = OPTIMIZERS[optimizer](learning_rate)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        apply_fn=model.apply,
        params=params,
        tx=transformation,
        opt_state=transformation.init(params),
        dropout_key=dropout_key if dropout else None,
    )


def make_token_batch(vocab_size: int, seq_len: int, batch_size: int, key: jax.Array) -> Batch:
    """Random token sequences, and the same sequences one position later as targets."""
    tokens = jax.random.randint(key, (batch_size, seq_len + 1), 0, vocab_size)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

"""Llama 2 and 3 in nnx: RMSNorm, rotary positions, SwiGLU, grouped-query attention, untied head.

Sizes are those of Touvron et al. (2023) and of the Llama 3 report (2024). The layers are either a
list, applied one by one, or one module with stacked parameters that `jax.lax.scan` runs over. The
train step is a pure function of a pytree: `nnx.split` and `nnx.merge` convert the modules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .example import Batch, Example, Family, TrainStep
from .transformer import (
    AttentionKind,
    attention,
    check_attention,
    cross_entropy,
    make_token_batch,
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Parameters are float32; activations and products use `dtype`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    seq_len: int = 4096
    vocab_size: int = 32000
    rope_theta: float = 10_000.0
    dtype: Any = jnp.float32
    attention: AttentionKind = "einsum"
    remat: bool = False
    scan_layers: bool = False
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_attention(self.attention)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def rotary_angles(config: LlamaConfig) -> jax.Array:
    """The (seq, head_dim / 2) angles by which positions rotate the pairs of a head."""
    frequencies = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2) / config.head_dim)
    return jnp.arange(config.seq_len)[:, None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates each pair (i, i + head_dim / 2) of (batch, seq, heads, head_dim) by its angle."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _linear(config: LlamaConfig, size_in: int, size_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(size_in, size_out, use_bias=False, dtype=config.dtype, rngs=rngs)


class LlamaAttention(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        self.config = config
        self.query = _linear(config, hidden, hidden, rngs)
        self.key = _linear(config, hidden, kv_size, rngs)
        self.value = _linear(config, hidden, kv_size, rngs)
        self.out = _linear(config, hidden, hidden, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        def split_heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, self.config.head_dim)

        query = rotate(split_heads(self.query(x)), angles)
        key = rotate(split_heads(self.key(x)), angles)
        value = split_heads(self.value(x))
        y = attention(query, key, value, causal=True, kind=self.config.attention)
        return self.out(y.reshape(x.shape))


class LlamaFeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.gate = _linear(config, config.hidden_size, config.ffn_size, rngs)
        self.up = _linear(config, config.hidden_size, config.ffn_size, rngs)
        self.down = _linear(config, config.ffn_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.attention = LlamaAttention(config, rngs)
        self.ffn_norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.ffn = LlamaFeedForward(config, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nnx.Module):
    """Maps (batch, seq) tokens to (batch, seq, vocab) logits."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        if config.scan_layers:
            keys = jax.random.split(rngs.params(), config.num_layers)
            self.layers = nnx.vmap(lambda key: LlamaLayer(config, nnx.Rngs(key)))(keys)
        else:
            self.layers = nnx.List(LlamaLayer(config, rngs) for _ in range(config.num_layers))
        self.final_norm = nnx.RMSNorm(config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.lm_head = _linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self._apply_layers(self.embed(tokens), rotary_angles(self.config))
        return self.lm_head(self.final_norm(x))

    def _apply_layers(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        layers = [self.layers] if self.config.scan_layers else self.layers
        graphdef = nnx.graphdef(layers[0])

        def apply_layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, params)(x, angles), None

        if self.config.remat:
            apply_layer = jax.checkpoint(apply_layer, prevent_cse=not self.config.scan_layers)
        if self.config.scan_layers:
            return jax.lax.scan(apply_layer, x, nnx.state(self.layers))[0]
        for layer in layers:
            x, _ = apply_layer(x, nnx.state(layer))
        return x


@flax.struct.dataclass
class LlamaState:
    """`graphdef` turns `params` back into the model."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    graphdef: nnx.GraphDef = flax.struct.field(pytree_node=False)


def create_state(config: LlamaConfig, key: jax.Array) -> LlamaState:
    graphdef, params = nnx.split(Llama(config, nnx.Rngs(key)))
    opt_state = optax.adam(config.learning_rate).init(params)
    return LlamaState(params, opt_state, jnp.zeros((), jnp.int32), graphdef)


def make_train_step(config: LlamaConfig) -> TrainStep:
    optimizer = optax.adam(config.learning_rate)

    def train_step(state: LlamaState, batch: Batch) -> tuple[LlamaState, jax.Array]:
        def loss_fn(params):
            logits = nnx.merge(state.graphdef, params)(batch["tokens"])
            return jnp.mean(cross_entropy(logits, batch["targets"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), loss

    return train_step


def make_batch(config: LlamaConfig, batch_size: int, key: jax.Array) -> Batch:
    return make_token_batch(config.vocab_size, config.seq_len, batch_size, key)


def flops_per_step(config: LlamaConfig, batch_size: int) -> int:
    """6 · tokens · (L (2 H² + 2 H K D + 3 H F) + H V) + 12 · tokens · L S H.

    K D is the size of all key heads and F that of the feed-forward. The embedding lookup has no
    products; the second term is the scores and outputs of attention, masked half included.
    """
    tokens = batch_size * config.seq_len
    hidden, layers = config.hidden_size, config.num_layers
    kv_size = config.num_kv_heads * config.head_dim
    layer_weights = 2 * hidden**2 + 2 * hidden * kv_size + 3 * hidden * config.ffn_size
    weights = layers * layer_weights + hidden * config.vocab_size
    return 6 * tokens * weights + 12 * tokens * layers * config.seq_len * hidden


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: LlamaConfig, batch_size: int = 16, name: str = "llama") -> Example:
    return Example(name, config, batch_size, FAMILY)


_PAPER_CONFIGS = {
    "llama2-7b": LlamaConfig(4096, 32, 32, 32, 11008, dtype=jnp.bfloat16),
    "llama2-13b": LlamaConfig(5120, 40, 40, 40, 13824, dtype=jnp.bfloat16),
    "llama3-8b": LlamaConfig(
        4096,
        32,
        32,
        8,
        14336,
        seq_len=8192,
        vocab_size=128256,
        rope_theta=500_000.0,
        dtype=jnp.bfloat16,
    ),
}
_TINY = LlamaConfig(64, 2, 8, 4, 128, seq_len=32, vocab_size=128)
_TINY_CONFIGS = {
    "llama-tiny": _TINY,
    "llama-tiny-scan": dataclasses.replace(_TINY, num_layers=3, scan_layers=True),
}
EXAMPLES = {name: example(config, name=name) for name, config in _PAPER_CONFIGS.items()} | {
    name: example(config, batch_size=8, name=name) for name, config in _TINY_CONFIGS.items()
}

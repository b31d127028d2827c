"""GShard's mixture-of-experts transformer, as a decoder-only language model.

Every second layer's feed-forward is a mixture: each token goes to its two best experts, whose
buffers have a fixed capacity per group of tokens (Lepikhin et al., GShard, 2020, algorithm 1, with
the second expert always taken rather than at random). Sizes are the Alpa paper's (OSDI 2022) and
CFP's; their names count a feed-forward of 8 H, which is also GShard's own ratio.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
    check_optimizer,
    create_train_state,
    cross_entropy,
    make_token_batch,
)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Parameters are float32; activations and products use `dtype`.

    `group_size` is the number of tokens that share the experts' buffers; it must divide the tokens
    of a batch. An expert takes `capacity_factor · group_size / num_experts` tokens of a group;
    further tokens that chose it skip it through the residual. `optimizer` is "adam", or "adafactor"
    as in the Alpa paper: Adam's moments of 70B parameters would not fit into its 64 GPUs of 16 GB.
    """

    hidden_size: int
    num_layers: int
    num_experts: int
    num_heads: int = 16
    seq_len: int = 1024
    vocab_size: int = 32000
    group_size: int = 2048
    ffn_multiplier: int = 8
    capacity_factor: float = 2.0
    balance_weight: float = 0.01
    dtype: Any = jnp.float32
    attention: AttentionKind = "einsum"
    remat: bool = False
    scan_layers: bool = False
    learning_rate: float = 3e-4
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        check_attention(self.attention)
        check_optimizer(self.optimizer)
        if self.num_layers % 2:
            raise ValueError(
                f"num_layers is {self.num_layers}; layers come in pairs of a dense and an expert "
                "layer, so it must be even"
            )

    @property
    def capacity(self) -> int:
        """The number of tokens of one group that one expert can take."""
        return math.ceil(self.capacity_factor * self.group_size / self.num_experts)


def route_top2(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Sends each token to its two best experts, up to their capacity.

    Args:
      gates: (group, token, expert) probabilities.
      capacity: the number of slots each expert has for a group.

    Returns:
      The (group, token, expert, slot) weights that combine the experts' outputs, zero where the
      slot does not hold the token; and the load-balance loss, 1 if all experts are chosen equally
      often.
    """
    num_experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), num_experts)
    other_gates = gates * (1 - first)
    second = jax.nn.one_hot(jnp.argmax(other_gates, axis=-1), num_experts)
    balance_loss = num_experts * jnp.mean(
        jnp.sum(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1), axis=-1)
    )

    # A token's slot is the number of tokens before it with the same choice. First choices go first.
    first_slot = jnp.cumsum(first, axis=1) - first
    second_slot = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    first_gate = jnp.sum(gates * first, axis=-1)
    second_gate = jnp.sum(gates * second, axis=-1)
    total_gate = first_gate + second_gate

    def weights(choice: jax.Array, slot: jax.Array, gate: jax.Array) -> jax.Array:
        slot = jnp.sum(slot * choice, axis=-1).astype(jnp.int32)
        # Slots past the capacity have an all-zero one-hot, which drops their tokens.
        in_slot = jax.nn.one_hot(slot, capacity)
        weight = choice * (gate / total_gate)[..., None]
        return weight[:, :, :, None] * in_slot[:, :, None, :]

    combine = weights(first, first_slot, first_gate) + weights(second, second_slot, second_gate)
    return combine, balance_loss


class ExpertFeedForward(nn.Module):
    """A mixture of feed-forwards; returns its output and the load-balance loss."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        hidden, ffn = config.hidden_size, config.ffn_multiplier * config.hidden_size
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (config.num_experts, hidden, ffn)).astype(config.dtype)
        down = self.param("down", init, (config.num_experts, ffn, hidden)).astype(config.dtype)

        groups = x.reshape(-1, config.group_size, hidden)
        # The router decides in float32: a rounded tie would change where a token goes.
        scores = nn.Dense(config.num_experts, use_bias=False, name="router")(
            groups.astype(jnp.float32)
        )
        combine, balance_loss = route_top2(jax.nn.softmax(scores), config.capacity)
        dispatch = (combine > 0).astype(config.dtype)
        y = jnp.einsum("gsec,gsm->egcm", dispatch, groups)
        y = nn.gelu(jnp.einsum("egcm,emh->egch", y, up))
        y = jnp.einsum("egch,ehm->egcm", y, down)
        y = jnp.einsum("gsec,egcm->gsm", combine.astype(config.dtype), y)
        return y.reshape(x.shape), balance_loss


class MoELayerPair(nn.Module):
    """A dense and an expert layer, both pre-LN; carries activations and the balance loss."""

    config: MoEConfig

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        config = self.config
        norm = functools.partial(nn.LayerNorm, dtype=config.dtype)
        attention = functools.partial(
            SelfAttention,
            config.num_heads,
            causal=True,
            dtype=config.dtype,
            kind=config.attention,
        )
        x, balance_loss = carry
        x += attention(name="dense_attention")(norm(name="dense_attention_norm")(x))
        ffn_size = config.ffn_multiplier * config.hidden_size
        x += FeedForward(ffn_size, dtype=config.dtype, name="ffn")(norm(name="ffn_norm")(x))
        x += attention(name="expert_attention")(norm(name="expert_attention_norm")(x))
        y, pair_loss = ExpertFeedForward(config, name="experts")(norm(name="experts_norm")(x))
        return (x + y, balance_loss + pair_loss), None


class MoETransformer(nn.Module):
    """Maps (batch, seq) tokens to (batch, seq, vocab) logits and the mean load-balance loss."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
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
        num_pairs = config.num_layers // 2
        x, balance_loss = apply_layers(MoELayerPair, config, num_pairs, (x, jnp.zeros(())))
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(x)
        return embed.attend(x), balance_loss / num_pairs


@functools.cache
def _model(config: MoEConfig) -> MoETransformer:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return MoETransformer(config)


def create_state(config: MoEConfig, key: jax.Array) -> TrainState:
    num_sequences = math.lcm(config.group_size, config.seq_len) // config.seq_len
    return create_train_state(
        _model(config),
        jax.ShapeDtypeStruct((num_sequences, config.seq_len), jnp.int32),
        key,
        learning_rate=config.learning_rate,
        dropout=0.0,
        optimizer=config.optimizer,
    )


def make_train_step(config: MoEConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            logits, balance_loss = model.apply({"params": params}, batch["tokens"])
            loss = jnp.mean(cross_entropy(logits, batch["targets"]))
            return loss + config.balance_weight * balance_loss

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_batch(config: MoEConfig, batch_size: int, key: jax.Array) -> Batch:
    if batch_size * config.seq_len % config.group_size:
        raise ValueError(
            f"a batch of {batch_size} sequences of {config.seq_len} tokens does not divide into "
            f"groups of {config.group_size}; change batch_size or group_size"
        )
    return make_token_batch(config.vocab_size, config.seq_len, batch_size, key)


def flops_per_step(config: MoEConfig, batch_size: int) -> int:
    """6 · tokens · weights + 12 · tokens · L S H for attention, plus routing.

    Weights are 4 L H² for attention, H V for the LM head, and for each pair of layers 2 H F (F is
    the feed-forward size) for the dense layer, and for the expert layer `capacity_factor` times
    that, for filled and empty slots, and H E for the router. Dispatch and combine multiply
    E · capacity · H per token, five times in all: the mask of dispatch has no gradient.
    """
    tokens = batch_size * config.seq_len
    hidden, layers, experts = config.hidden_size, config.num_layers, config.num_experts
    num_slots = experts * config.capacity
    ffn_weights = 2 * config.ffn_multiplier * hidden**2
    pairs = layers // 2
    tokens_in_slots = tokens * num_slots // config.group_size
    per_token = 4 * layers * hidden**2 + hidden * config.vocab_size
    per_token += pairs * (ffn_weights + hidden * experts)
    attention = 12 * tokens * layers * config.seq_len * hidden
    routing = pairs * 5 * 2 * tokens * num_slots * hidden
    return 6 * (tokens * per_token + tokens_in_slots * pairs * ffn_weights) + attention + routing


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: MoEConfig, batch_size: int = 1024, name: str = "moe") -> Example:
    return Example(name, config, batch_size, FAMILY)


_PAPER_CONFIGS = {
    "moe-380m": MoEConfig(768, 8, 8, dtype=jnp.bfloat16),
    "moe-690m": MoEConfig(768, 8, 16, dtype=jnp.bfloat16),
    "moe-1.3b": MoEConfig(768, 16, 16, dtype=jnp.bfloat16),
    "moe-2.4b": MoEConfig(1024, 16, 16, dtype=jnp.bfloat16),
    "moe-10b": MoEConfig(1536, 16, 32, dtype=jnp.bfloat16),
    "moe-27b": MoEConfig(2048, 16, 48, dtype=jnp.bfloat16),
    "moe-70b": MoEConfig(2048, 32, 64, dtype=jnp.bfloat16),
}
_CFP = MoEConfig(1280, 16, 32, num_heads=4, dtype=jnp.bfloat16)
_TINY = MoEConfig(32, 2, 8, num_heads=8, seq_len=16, vocab_size=128, group_size=32)
EXAMPLES = {name: example(config, name=name) for name, config in _PAPER_CONFIGS.items()} | {
    # CFP's micro-batches: 32 and 64 with 4 heads, 96 and 128 with 2.
    "moe-cfp": example(_CFP, batch_size=32, name="moe-cfp"),
    "moe-cfp-2heads": example(
        dataclasses.replace(_CFP, num_heads=2), batch_size=96, name="moe-cfp-2heads"
    ),
    "moe-tiny": example(_TINY, batch_size=16, name="moe-tiny"),
}

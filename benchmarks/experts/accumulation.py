"""A hand-written train step that accumulates gradients over parts of the batch.

    Example, number of micro-batches → (state, batch) → (state, loss)

The gradient of a mean over equal parts is the mean of their gradients. That holds for GPT, Llama
and the mixture of experts (whose groups of tokens stay whole), but not for BERT, whose parts have
different numbers of masked tokens, nor for a Wide-ResNet with its BatchNorm: see `can_accumulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.models import Example, gpt, llama, moe
from examples.models.transformer import cross_entropy

Loss = Callable[[Any, Any], jax.Array]


def can_accumulate(example: Example) -> bool:
    config = example.config
    if isinstance(config, moe.MoEConfig):
        return not config.group_size % config.seq_len or not config.seq_len % config.group_size
    if isinstance(config, gpt.GPTConfig):
        return not config.dropout
    return isinstance(config, llama.LlamaConfig)


def rows_together(example: Example) -> int:
    """How many neighbouring sequences share a group of tokens and must stay in one part."""
    config = example.config
    if isinstance(config, moe.MoEConfig):
        return max(1, config.group_size // config.seq_len)
    return 1


def accumulating_step(
    example: Example, num_parts: int, place: Callable[[Any], Any] = lambda parts: parts
) -> Any:
    """`place` sets the layout of the batch after it is split into (part, row of the part, …)."""
    if not can_accumulate(example):
        raise ValueError(f"{example.name}: the loss of a batch is not the mean over its parts")

    block = rows_together(example)

    def part(x: jax.Array) -> jax.Array:
        """Part i has blocks i, n + i … of rows, so that every device has rows of each."""
        blocks = x.reshape(-1, num_parts, block, *x.shape[1:]).swapaxes(0, 1)
        return blocks.reshape(num_parts, -1, *x.shape[1:])

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss_fn = _loss(example, state)
        parts = jax.tree.map(part, batch)

        def add(sums: Any, rows: Any) -> tuple[Any, None]:
            gradients = jax.value_and_grad(loss_fn)(state.params, rows)
            return jax.tree.map(jnp.add, sums, gradients), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = jax.lax.scan(add, zeros, place(parts))
        loss, grads = jax.tree.map(lambda x: x / num_parts, sums)
        return _updated(example, state, grads), loss

    return step


def _loss(example: Example, state: Any) -> Loss:
    if isinstance(example.config, llama.LlamaConfig):
        return lambda params, batch: jnp.mean(
            cross_entropy(nnx.merge(state.graphdef, params)(batch["tokens"]), batch["targets"])
        )

    def loss(params: Any, batch: Any) -> jax.Array:
        out = state.apply_fn({"params": params}, batch["tokens"])
        logits, balance = out if isinstance(example.config, moe.MoEConfig) else (out, None)
        mean = jnp.mean(cross_entropy(logits, batch["targets"]))
        return mean if balance is None else mean + example.config.balance_weight * balance

    return loss


def _updated(example: Example, state: Any, grads: Any) -> Any:
    if not isinstance(example.config, llama.LlamaConfig):
        return state.apply_gradients(grads=grads)
    optimizer = optax.adam(example.config.learning_rate)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

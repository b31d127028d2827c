"""Losses across the batch: CLIP, and SwAV whose Sinkhorn iteration stops when it has converged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    adamw_if_real,
    cross_entropy,
    dense_init,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
)
from tests.zoo.written.vision import EncoderBlock, ViT


class TextTower(nn.Module):
    vocabulary: int
    out: int
    dim: int
    depth: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.dim, dtype=self.dtype)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        for _ in range(self.depth):
            x = EncoderBlock(self.heads, self.dtype)(x, nn.make_causal_mask(tokens))
        last = jnp.take_along_axis(x, tokens.argmax(-1)[:, None, None], axis=1)[:, 0]
        return nn.Dense(self.out, use_bias=False)(nn.LayerNorm()(last))


@zoo_program("clip", source="written", layers=True, micro_batches=1)
def clip(size: Size) -> ZooStep:
    """Every image is compared with every text of the batch, so micro-batches change the loss."""
    image = pick(
        size,
        ViT(24, 8, 32, 2, 4),
        ViT(768, 14, 1024, 24, 16, jnp.bfloat16),
        ViT(768, 14, 1024, 2, 16, jnp.bfloat16),
    )
    text = pick(
        size,
        TextTower(97, 24, 32, 2, 4),
        TextTower(49408, 768, 768, 12, 12, jnp.bfloat16),
        TextTower(49408, 768, 768, 2, 12, jnp.bfloat16),
    )
    rows, pixels, length = pick(size, (16, 24, 7), (4096, 224, 77), (256, 224, 77))

    def init() -> Any:
        return {
            "image": image.init(jax.random.key(0), jnp.zeros((1, pixels, pixels, 3))),
            "text": text.init(jax.random.key(1), jnp.zeros((1, length), int)),
            "scale": jnp.log(1 / 0.07),
        }

    def loss(params: Any, images: jax.Array, tokens: jax.Array) -> jax.Array:
        def unit(x: jax.Array) -> jax.Array:
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        images = unit(image.apply(params["image"], images))
        texts = unit(text.apply(params["text"], tokens))
        logits = jnp.exp(params["scale"]) * images @ texts.T
        labels = jnp.arange(len(logits))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def make_batch(i: int) -> tuple:
        images = normal(i, rows, pixels, pixels, 3, dtype=image.dtype)
        return images, integers(i, text.vocabulary, rows, length)

    return trained(init, loss, make_batch, adamw_if_real(size))


@zoo_program("swav", source="written", layers=True, micro_batches=1)
def swav(size: Size) -> ZooStep:
    """Assignments to prototypes are balanced over the batch by a `while_loop` that runs until the
    marginals fit."""
    rows, width, hidden, out, prototypes = pick(
        size, (16, 12, 32, 8, 5), (4096, 2048, 8192, 128, 3000)
    )

    def init() -> Any:
        key = jax.random.key(0)
        return {
            "net": mlp_init(key, width, hidden, hidden, out),
            "c": dense_init(key, out, prototypes),
        }

    def balance(scores: jax.Array) -> jax.Array:
        plan = jnp.exp((scores - scores.max()) / 0.25)

        def go_on(carry: Any) -> jax.Array:
            q, i = carry
            return (jnp.abs(q.sum(0) * prototypes / rows - 1).max() > 1e-2) & (i < 50)

        def rescale(carry: Any) -> Any:
            q, i = carry
            q = q / q.sum(0) * (rows / prototypes)
            return q / q.sum(1, keepdims=True), i + 1

        return jax.lax.while_loop(go_on, rescale, (plan / plan.sum(1, keepdims=True), 0))[0]

    def loss(params: Any, one: jax.Array, other: jax.Array) -> jax.Array:
        def scores(view: jax.Array) -> jax.Array:
            z = mlp(params["net"], view)
            return z / jnp.linalg.norm(z, axis=-1, keepdims=True) @ params["c"]

        a, b = scores(one), scores(other)
        target_a, target_b = jax.lax.stop_gradient((balance(a), balance(b)))
        swapped = target_a * jax.nn.log_softmax(b / 0.1) + target_b * jax.nn.log_softmax(a / 0.1)
        return -swapped.sum(-1).mean()

    return trained(
        init, loss, lambda i: (normal(2 * i, rows, width), normal(2 * i + 1, rows, width))
    )

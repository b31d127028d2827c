"""ViT: a pre-LN transformer encoder on image patches, classified by their mean.

Sizes are those of Dosovitskiy et al. (2020) on 224-pixel images, without the class token: its 197
positions divide by nothing, and the mean of all patches trains as well (Zhai et al., 2021).
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
class ViTConfig:
    """Parameters are float32; activations and products use `dtype`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    patch_size: int = 16
    image_size: int = 224
    num_classes: int = 1000
    dtype: Any = jnp.float32
    attention: AttentionKind = "einsum"
    remat: bool = False
    scan_layers: bool = False
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_attention(self.attention)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size is {self.image_size} and patch_size is {self.patch_size}; an image "
                "must divide into whole patches"
            )

    @property
    def seq_len(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class ViTLayer(nn.Module):
    config: ViTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        config = self.config
        y = nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x)
        x += SelfAttention(
            config.num_heads,
            causal=False,
            dtype=config.dtype,
            kind=config.attention,
            name="attention",
        )(y)
        y = nn.LayerNorm(dtype=config.dtype, name="ffn_norm")(x)
        x += FeedForward(4 * config.hidden_size, dtype=config.dtype, name="ffn")(y)
        return x, None


class ViT(nn.Module):
    """Maps (batch, height, width, 3) images to (batch, classes) logits."""

    config: ViTConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        patches = to_patches(images.astype(config.dtype), config.patch_size)
        x = nn.Dense(config.hidden_size, dtype=config.dtype, name="patches")(patches)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (config.seq_len, config.hidden_size))
        x += positions.astype(config.dtype)
        x = apply_layers(ViTLayer, config, config.num_layers, x)
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(x)
        return nn.Dense(config.num_classes, dtype=config.dtype, name="head")(x.mean(axis=1))


def to_patches(images: jax.Array, size: int) -> jax.Array:
    """(batch, height, width, channels) images as (batch, patches, pixels of a patch) rows."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.swapaxes(2, 3).reshape(batch, -1, size * size * channels)


@functools.cache
def _model(config: ViTConfig) -> ViT:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return ViT(config)


def create_state(config: ViTConfig, key: jax.Array) -> TrainState:
    return create_train_state(
        _model(config),
        jax.ShapeDtypeStruct((1, config.image_size, config.image_size, 3), jnp.float32),
        key,
        learning_rate=config.learning_rate,
        dropout=0.0,
    )


def make_train_step(config: ViTConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["images"])
            return jnp.mean(cross_entropy(logits, batch["labels"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_batch(config: ViTConfig, batch_size: int, key: jax.Array) -> Batch:
    image_key, label_key = jax.random.split(key)
    shape = (batch_size, config.image_size, config.image_size, 3)
    return {
        "images": jax.random.normal(image_key, shape),
        "labels": jax.random.randint(label_key, (batch_size,), 0, config.num_classes),
    }


def flops_per_step(config: ViTConfig, batch_size: int) -> int:
    """72 · tokens · L H² for the layers' weights, 12 · tokens · L S H for attention, 6 · images ·
    H · classes for the head, and 4 · tokens · pixels · H for the patches, whose gradient is not
    computed."""
    tokens = batch_size * config.seq_len
    hidden, layers = config.hidden_size, config.num_layers
    in_layers = 72 * hidden**2 + 12 * config.seq_len * hidden
    pixels = 3 * config.patch_size**2
    head = 6 * batch_size * hidden * config.num_classes
    return tokens * (layers * in_layers + 4 * pixels * hidden) + head


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: ViTConfig, batch_size: int = 4096, name: str = "vit") -> Example:
    return Example(name, config, batch_size, FAMILY)


_PAPER_CONFIGS = {
    "vit-86m": ViTConfig(768, 12, 12, dtype=jnp.bfloat16),
    "vit-304m": ViTConfig(1024, 24, 16, dtype=jnp.bfloat16),
    "vit-632m": ViTConfig(1280, 32, 16, patch_size=14, dtype=jnp.bfloat16),
}
_TINY = ViTConfig(32, 2, 8, patch_size=4, image_size=16, num_classes=8, learning_rate=1e-3)
EXAMPLES = {name: example(config, name=name) for name, config in _PAPER_CONFIGS.items()} | {
    "vit-tiny": example(_TINY, batch_size=16, name="vit-tiny")
}

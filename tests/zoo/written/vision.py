"""Image and video classifiers: ViT, MLP-Mixer, ConvNeXt, ResNet with BatchNorm, a 3-D ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import adamw_if_real, cross_entropy, integers, normal, pick, trained


class EncoderBlock(nn.Module):
    """A pre-norm transformer block; CLIP uses it too."""

    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class ViT(nn.Module):
    """With its class token, the number of tokens is odd: 197 for 224 × 224 pixels."""

    classes: int
    patch: int
    dim: int
    depth: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.dim, patch, strides=patch, dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.dim)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.dim))
        x = jnp.concatenate([jnp.tile(token.astype(x.dtype), (x.shape[0], 1, 1)), x], axis=1)
        position = self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + position.astype(x.dtype)
        for _ in range(self.depth):
            x = EncoderBlock(self.heads, self.dtype)(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(x[:, 0]))


class MixerBlock(nn.Module):
    token_width: int
    channel_width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)
        y = nn.Dense(self.token_width, dtype=self.dtype)(y)
        y = nn.Dense(x.shape[1], dtype=self.dtype)(nn.gelu(y))
        x = x + y.swapaxes(1, 2)
        y = nn.Dense(self.channel_width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(x.shape[2], dtype=self.dtype)(nn.gelu(y))


class Mixer(nn.Module):
    classes: int
    patch: int
    dim: int
    depth: int
    token_width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.dim, patch, strides=patch, dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.dim)
        for _ in range(self.depth):
            x = MixerBlock(self.token_width, 4 * self.dim, self.dtype)(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(x).mean(axis=1))


class ConvNeXt(nn.Module):
    classes: int
    depths: Sequence[int]
    dims: Sequence[int]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.dims[0], (4, 4), strides=(4, 4), dtype=self.dtype)(images)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        for stage, (depth, dim) in enumerate(zip(self.depths, self.dims, strict=True)):
            if stage:
                x = nn.LayerNorm(dtype=self.dtype)(x)
                x = nn.Conv(dim, (2, 2), strides=(2, 2), dtype=self.dtype)(x)
            for block in range(depth):
                y = nn.Conv(dim, (7, 7), feature_group_count=dim, dtype=self.dtype)(x)
                y = nn.Dense(4 * dim, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(y))
                y = nn.Dense(dim, dtype=self.dtype)(nn.gelu(y))
                scale = self.param(f"scale{stage}_{block}", nn.initializers.constant(0.1), (dim,))
                x = x + scale.astype(y.dtype) * y
        return nn.Dense(self.classes)(nn.LayerNorm()(x.mean(axis=(1, 2))))


class ResNet(nn.Module):
    """Bottleneck blocks with BatchNorm."""

    classes: int
    depths: Sequence[int]
    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def norm(y: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(y)

        x = nn.Conv(self.dim, (7, 7), strides=(2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(norm(x)), (3, 3), strides=(2, 2), padding="SAME")
        for stage, depth in enumerate(self.depths):
            dim = self.dim * 2**stage
            for block in range(depth):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm(nn.Conv(dim, (1, 1), use_bias=False, dtype=self.dtype)(x)))
                y = nn.Conv(dim, (3, 3), strides=strides, use_bias=False, dtype=self.dtype)(y)
                y = nn.Conv(4 * dim, (1, 1), use_bias=False, dtype=self.dtype)(nn.relu(norm(y)))
                if x.shape != y.shape:
                    x = nn.Conv(4 * dim, (1, 1), strides, use_bias=False, dtype=self.dtype)(x)
                    x = norm(x)
                x = nn.relu(x + norm(y))
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


class VideoResNet(nn.Module):
    """A 3-D ResNet over time, height and width, with GroupNorm."""

    classes: int
    depths: Sequence[int]
    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(y: jax.Array, dim: int, window: int, stride: int) -> jax.Array:
            return nn.Conv(dim, (window,) * 3, strides=(stride,) * 3, dtype=self.dtype)(y)

        x = nn.Conv(self.dim, (3, 7, 7), strides=(1, 2, 2), dtype=self.dtype)(x)
        for stage, depth in enumerate(self.depths):
            dim = self.dim * 2**stage
            for block in range(depth):
                stride = 2 if stage and not block else 1
                y = conv(nn.relu(nn.GroupNorm(4, dtype=self.dtype)(x)), dim, 3, stride)
                y = conv(nn.relu(nn.GroupNorm(4, dtype=self.dtype)(y)), dim, 3, 1)
                x = (x if x.shape == y.shape else conv(x, dim, 1, stride)) + y
        return nn.Dense(self.classes)(x.mean(axis=(1, 2, 3)))


def classifier(size: Size, model: nn.Module, classes: int, *shape: int) -> ZooStep:
    dtype = model.dtype  # type: ignore[attr-defined]

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, *shape[1:])))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images), labels)  # type: ignore[arg-type]

    def make_batch(i: int) -> tuple:
        return normal(i, *shape, dtype=dtype), integers(i, classes, shape[0])

    return trained(init, loss, make_batch, adamw_if_real(size))


@zoo_program("vit", source="written", layers=True)
def vit(size: Size) -> ZooStep:
    model = pick(
        size,
        ViT(10, 8, 32, 2, 4),
        ViT(1000, 16, 1024, 24, 16, jnp.bfloat16),
        ViT(1000, 16, 1024, 4, 16, jnp.bfloat16),
    )
    return classifier(
        size,
        model,
        model.classes,
        *pick(size, (16, 32, 32, 3), (1024, 224, 224, 3), (128, 224, 224, 3)),
    )


@zoo_program("mixer", source="written", layers=True)
def mixer(size: Size) -> ZooStep:
    model = pick(
        size,
        Mixer(10, 8, 32, 3, 24),
        Mixer(1000, 16, 1024, 24, 512, jnp.bfloat16),
        Mixer(1000, 16, 1024, 4, 512, jnp.bfloat16),
    )
    return classifier(
        size,
        model,
        model.classes,
        *pick(size, (16, 24, 24, 3), (1024, 224, 224, 3), (128, 224, 224, 3)),
    )


@zoo_program("convnext", source="written", layers=True)
def convnext(size: Size) -> ZooStep:
    small = ConvNeXt(10, (1, 2), (16, 32))
    real = ConvNeXt(1000, (3, 3, 27, 3), (192, 384, 768, 1536), jnp.bfloat16)
    one_gpu = ConvNeXt(1000, (1, 1, 3, 1), (192, 384, 768, 1536), jnp.bfloat16)
    shape = pick(size, (16, 24, 24, 3), (1024, 224, 224, 3), (128, 224, 224, 3))
    return classifier(size, pick(size, small, real, one_gpu), pick(size, 10, 1000), *shape)


@zoo_program("conv3d", source="written", layers=True)
def conv3d(size: Size) -> ZooStep:
    small, real = VideoResNet(5, (1, 1), 8), VideoResNet(400, (2, 2, 2, 2), 64, jnp.bfloat16)
    one_gpu = VideoResNet(400, (1, 1, 1, 1), 64, jnp.bfloat16)
    shape = pick(size, (16, 5, 12, 12, 3), (128, 16, 112, 112, 3), (16, 16, 112, 112, 3))
    return classifier(size, pick(size, small, real, one_gpu), pick(size, 5, 400), *shape)


class BatchNormState(train_state.TrainState):
    batch_stats: Any


@zoo_program("resnet-bn", source="written", layers=True, micro_batches=1)
def resnet(size: Size) -> ZooStep:
    """Statistics are of the whole batch, and beside the parameters in a flax TrainState."""
    model = pick(
        size,
        ResNet(10, (1, 2), 8),
        ResNet(1000, (3, 4, 6, 3), 64, jnp.bfloat16),
        ResNet(1000, (1, 2, 2, 1), 64, jnp.bfloat16),
    )
    shape = pick(size, (16, 24, 24, 3), (2048, 224, 224, 3), (256, 224, 224, 3))
    # A small rate: rounding before a ReLU switches gradients of single pixels on or off.
    tx = optax.sgd(0.01, momentum=0.9, nesterov=True)

    def make_state() -> BatchNormState:
        variables = model.init(jax.random.key(0), jnp.zeros((2, *shape[1:])))
        return BatchNormState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=tx,
        )

    def step(state: BatchNormState, batch: dict[str, jax.Array]) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["label"]), (new["batch_stats"], logits)

        (value, (stats, logits)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": value, "accuracy": accuracy}

    def make_batch(i: int) -> tuple:
        image = normal(i, *shape, dtype=model.dtype)
        return ({"image": image, "label": integers(i, model.classes, shape[0])},)

    return ZooStep(step, make_state, make_batch)

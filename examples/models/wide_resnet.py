"""Wide-ResNet: bottleneck residual networks on images, with BatchNorm and SGD with momentum.

Sizes are the Alpa paper's (OSDI 2022): 224-pixel images and a global batch of 1536. Their names
count a width factor that widens only the output of a block's 3×3 convolution.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from .example import Batch, Example, Family, TrainStep
from .transformer import cross_entropy

RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)


@dataclasses.dataclass(frozen=True)
class WideResNetConfig:
    """`stage_sizes` is the number of blocks of each stage; each stage doubles the channels."""

    stage_sizes: tuple[int, ...]
    base_channels: int
    width_factor: int
    image_size: int = 224
    num_classes: int = 1000
    dtype: Any = jnp.float32
    learning_rate: float = 0.1
    momentum: float = 0.9


class WideResNetState(train_state.TrainState):
    """Flax's train state and the running means and variances of the BatchNorms."""

    batch_stats: Any


class BottleneckBlock(nn.Module):
    config: WideResNetConfig
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.config.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.config.dtype)
        strides = (self.stride, self.stride)
        wide = self.channels * self.config.width_factor
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(wide, (3, 3), strides)(y)))
        # A block starts as the identity, so that deep networks train.
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = conv(4 * self.channels, (1, 1), strides, name="shortcut")(x)
            x = norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Maps (batch, height, width, 3) images to (batch, classes) logits."""

    config: WideResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Conv(
            config.base_channels,
            (7, 7),
            (2, 2),
            use_bias=False,
            dtype=config.dtype,
            name="stem",
        )(images.astype(config.dtype))
        x = nn.BatchNorm(use_running_average=False, dtype=config.dtype, name="stem_norm")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding="SAME")
        for stage, num_blocks in enumerate(config.stage_sizes):
            for block in range(num_blocks):
                x = BottleneckBlock(
                    config,
                    config.base_channels * 2**stage,
                    stride=2 if stage and not block else 1,
                    name=f"stage_{stage}_block_{block}",
                )(x)
        return nn.Dense(config.num_classes, dtype=config.dtype, name="head")(x.mean(axis=(1, 2)))


@functools.cache
def _model(config: WideResNetConfig) -> WideResNet:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return WideResNet(config)


@functools.cache
def _sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    """One optimizer per setting, for the same reason."""
    return optax.sgd(learning_rate, momentum)


def create_state(config: WideResNetConfig, key: jax.Array) -> WideResNetState:
    model = _model(config)
    images = jax.ShapeDtypeStruct((1, config.image_size, config.image_size, 3), jnp.float32)
    variables = model.lazy_init(key, images)
    optimizer = _sgd(config.learning_rate, config.momentum)
    return WideResNetState(
        step=jnp.zeros((), jnp.int32),
        apply_fn=model.apply,
        params=variables["params"],
        tx=optimizer,
        opt_state=optimizer.init(variables["params"]),
        batch_stats=variables["batch_stats"],
    )


def make_train_step(config: WideResNetConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: WideResNetState, batch: Batch) -> tuple[WideResNetState, jax.Array]:
        def loss_fn(params):
            logits, updates = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                batch["images"],
                mutable=["batch_stats"],
            )
            return jnp.mean(cross_entropy(logits, batch["labels"])), updates["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return train_step


def make_batch(config: WideResNetConfig, batch_size: int, key: jax.Array) -> Batch:
    image_key, label_key = jax.random.split(key)
    shape = (batch_size, config.image_size, config.image_size, 3)
    return {
        "images": jax.random.normal(image_key, shape),
        "labels": jax.random.randint(label_key, (batch_size,), 0, config.num_classes),
    }


def flops_per_step(config: WideResNetConfig, batch_size: int) -> int:
    """6 · images · Σ (output pixels · weights) over the convolutions, and the head's weights."""
    size = -(-config.image_size // 2)
    macs = size**2 * 7 * 7 * 3 * config.base_channels
    size = -(-size // 2)
    channels_in = config.base_channels
    for stage, num_blocks in enumerate(config.stage_sizes):
        channels = config.base_channels * 2**stage
        wide = channels * config.width_factor
        for block in range(num_blocks):
            size_in, size = size, -(-size // 2) if stage and not block else size
            macs += size_in**2 * channels_in * channels
            macs += size**2 * (9 * channels * wide + wide * 4 * channels)
            if not block:
                macs += size**2 * channels_in * 4 * channels
            channels_in = 4 * channels
    return 6 * batch_size * (macs + channels_in * config.num_classes)


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: WideResNetConfig, batch_size: int = 1536, name: str = "wide-resnet") -> Example:
    return Example(name, config, batch_size, FAMILY)


_PAPER_CONFIGS = {
    "wresnet-250m": WideResNetConfig(RESNET_50, 160, 2),
    "wresnet-500m": WideResNetConfig(RESNET_50, 224, 2),
    "wresnet-1b": WideResNetConfig(RESNET_50, 320, 2),
    "wresnet-2b": WideResNetConfig(RESNET_50, 448, 2),
    "wresnet-4b": WideResNetConfig(RESNET_50, 640, 2),
    "wresnet-6.8b": WideResNetConfig(RESNET_50, 320, 16),
    "wresnet-13b": WideResNetConfig(RESNET_101, 320, 16),
}
_TINY = WideResNetConfig((1, 1), 16, 2, image_size=16, num_classes=8, learning_rate=0.02)
EXAMPLES = {name: example(config, name=name) for name, config in _PAPER_CONFIGS.items()} | {
    "wresnet-tiny": example(_TINY, batch_size=16, name="wresnet-tiny")
}

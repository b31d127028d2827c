"""Flax: linen modules as in its examples, and nnx modules split into a graph and a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import (
    images,
    label_loss,
    momentum,
    next_token_loss,
    tokens,
    train_step,
    train_step_with_statistics,
)


@zoo_program("linen-transformer", source="flax", layers=True, packages=("flax",))
def linen_transformer(size: Size) -> ZooStep:
    """A decoder as in flax's lm1b example, with dropout: the key is folded with the step."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    width, heads, depth, vocabulary, length, rows = (16, 2, 2, 32, 8, 8)
    if not size.is_small:
        width, heads, depth, vocabulary, length, rows = (2048, 16, 24, 32000, 2048, 64)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(heads, dropout_rate=0.1, deterministic=False)(
                y, mask=mask
            )
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            y = nn.Dense(4 * width)(nn.LayerNorm()(x))
            return x + nn.Dense(width)(nn.gelu(y))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(vocabulary, width)
            x, mask = embed(tokens), nn.make_causal_mask(tokens)
            for _ in range(depth):
                x = Block()(x, mask)
            return embed.attend(nn.LayerNorm()(x))

    model = Model()

    def make_state() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = model.init(keys, jnp.zeros((1, length), jnp.int32))
        return TrainState.create(apply_fn=model.apply, params=params, tx=momentum())

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(2), state.step)

        def loss_fn(params: Any) -> Any:
            return next_token_loss(state.apply_fn(params, batch, rngs={"dropout": key}), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return ZooStep(step, make_state, tokens(rows, length, vocabulary))


@zoo_program("linen-scanned-layers", source="flax", layers=True, packages=("flax",))
def linen_scanned_layers(size: Size) -> ZooStep:
    """`nn.scan` over `nn.remat` layers, as large models are written."""
    import flax.linen as nn

    width, depth, length, vocabulary, rows = (16, 4, 8, 32, 8)
    if not size.is_small:
        width, depth, length, vocabulary, rows = (4096, 32, 2048, 50304, 32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.RMSNorm()(x)
            y = nn.SelfAttention(max(2, width // 128))(y, mask=nn.make_causal_mask(x[..., 0]))
            x = x + y
            gate, up = jnp.split(nn.Dense(8 * width, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
            return x + nn.Dense(width, use_bias=False)(nn.silu(gate) * up), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(vocabulary, width)(tokens)
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=depth,
            )
            x, _ = layers()(x, None)
            return nn.Dense(vocabulary)(x)

    model = Model()

    def make_params() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))

    def loss(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(model.apply(params, batch), batch)

    return train_step(loss, make_params, tokens(rows, length, vocabulary))


@zoo_program(
    "linen-resnet", source="flax", layers=True, packages=("flax", "jax_resnet"), micro_batches=1,
    rtol=1e-2, atol=2e-3,
)  # fmt: skip
def linen_resnet(size: Size) -> ZooStep:
    """jax-resnet's network. Its BatchNorm couples the rows of a batch."""
    import jax_resnet

    if size.is_small:
        rows, side, classes = 8, 16, 4
        model = jax_resnet.ResNet(
            block_cls=jax_resnet.ResNetBlock,
            stage_sizes=[1, 1],
            hidden_sizes=(8, 16),
            n_classes=classes,
        )
    else:
        rows, side, classes = 2048, 224, 1000
        model = jax_resnet.ResNet50(n_classes=classes)

    def make_variables() -> Any:
        variables = model.init(jax.random.key(0), jnp.zeros((1, side, side, 3)))
        return variables["params"], variables["batch_stats"]

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        return label_loss(logits, batch["label"]), new["batch_stats"]

    return train_step_with_statistics(loss, make_variables, images(rows, side, classes))


def _nnx_step(
    make_model: Callable[[], Any], loss_fn: Callable[..., Any], make_batch: Any
) -> ZooStep:
    """`nnx.split` outside, `nnx.merge` inside: the functional form of nnx's documentation."""
    from flax import nnx

    graph, _, _ = nnx.split(nnx.eval_shape(make_model), nnx.Param, ...)
    optimizer = momentum()

    def make_state() -> Any:
        _, params, rest = nnx.split(make_model(), nnx.Param, ...)
        params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        return params, rest, optimizer.init(params)

    _, abstract_params, abstract_rest = nnx.split(nnx.eval_shape(make_model), nnx.Param, ...)

    def restored(abstract: Any, pure: Any) -> Any:
        new = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(new, pure)
        return new

    def step(state: Any, *batch: Any) -> Any:
        params, rest, opt_state = state

        def loss_of(params: Any) -> Any:
            model = nnx.merge(
                graph, restored(abstract_params, params), restored(abstract_rest, rest)
            )
            loss = loss_fn(model, *batch)
            _, _, new = nnx.split(model, nnx.Param, ...)
            return loss, nnx.to_pure_dict(new)

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), loss

    return ZooStep(step, make_state, make_batch)


@zoo_program("nnx-transformer", source="flax", layers=True, packages=("flax",))
def nnx_transformer(size: Size) -> ZooStep:
    """Encoder layers of nnx with dropout; random streams are part of the state."""
    from flax import nnx

    width, heads, depth, vocabulary, length, rows = (16, 2, 2, 32, 8, 8)
    if not size.is_small:
        width, heads, depth, vocabulary, length, rows = (1024, 16, 24, 30522, 512, 256)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.dropout(self.attention(self.norms[0](x)))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    def loss(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch), batch)

    return _nnx_step(lambda: Model(nnx.Rngs(0)), loss, tokens(rows, length, vocabulary))


@zoo_program(
    "nnx-cnn", source="flax", layers=True, packages=("flax",), micro_batches=1,
    rtol=1e-2, atol=2e-3,
)  # fmt: skip
def nnx_cnn(size: Size) -> ZooStep:
    """nnx's MNIST tutorial with BatchNorm, whose statistics couple the rows of a batch."""
    from flax import nnx

    channels, side, rows = (4, 8, 8) if size.is_small else (256, 128, 4096)

    class Cnn(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Conv(3, channels, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(channels, rngs=rngs)
            self.second = nnx.Conv(channels, 2 * channels, (3, 3), rngs=rngs)
            self.head = nnx.Linear(2 * channels, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
            x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
            return self.head(x.mean((1, 2)))

    def loss(model: Any, batch: Any) -> Any:
        return label_loss(model(batch["image"]), batch["label"])

    return _nnx_step(lambda: Cnn(nnx.Rngs(0)), loss, images(rows, side, 10))

"""DLRM: a recommendation model whose parameters are embedding tables, and whose work is MLPs.

After Naumov et al. (2019): a bottom MLP maps the dense features to a vector, each categorical
feature looks up a row of its table, the products of all pairs of these vectors go with the bottom
MLP's output through a top MLP to one logit. All tables have the same size and are one array (table,
row, feature), so that a split of its first dimension gives every device whole tables. The products
of all pairs are kept as the whole matrix; the original takes one triangle. It trains by Adagrad.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .example import Batch, Example, Family, TrainStep
from .transformer import TrainState


@dataclasses.dataclass(frozen=True)
class DLRMConfig:
    """`bottom` and `top` are the outputs of the MLPs' hidden layers; the bottom MLP ends with
    `table_dim` features, the top MLP with one. Parameters are float32; activations and products
    use `dtype`."""

    num_tables: int
    table_rows: int
    table_dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    num_dense: int = 16
    dtype: Any = jnp.float32
    learning_rate: float = 1e-2

    @property
    def num_vectors(self) -> int:
        """Vectors of a sample that interact: one per table, and the bottom MLP's."""
        return self.num_tables + 1

    @property
    def top_inputs(self) -> int:
        return self.num_vectors**2 + self.table_dim


class MultiLayer(nn.Module):
    """Dense layers with a relu after each, except after the last if `last_is_linear`."""

    sizes: Sequence[int]
    dtype: Any
    last_is_linear: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, size in enumerate(self.sizes):
            x = nn.Dense(size, dtype=self.dtype, name=f"dense_{index}")(x)
            if not (self.last_is_linear and index == len(self.sizes) - 1):
                x = nn.relu(x)
        return x


class DLRM(nn.Module):
    """Maps (batch, dense features) and (batch, tables) rows to (batch,) logits."""

    config: DLRMConfig

    @nn.compact
    def __call__(self, dense: jax.Array, rows: jax.Array) -> jax.Array:
        config = self.config
        shape = (config.num_tables, config.table_rows, config.table_dim)
        tables = self.param("tables", nn.initializers.normal(0.1), shape)
        bottom = MultiLayer((*config.bottom, config.table_dim), config.dtype, name="bottom")
        x = bottom(dense.astype(config.dtype))
        vectors = Lookup(name="lookup")(tables, rows).astype(config.dtype)
        vectors = jnp.concatenate([x[:, None], vectors], axis=1)
        pairs = jnp.einsum("bid,bjd->bij", vectors, vectors)
        x = jnp.concatenate([x, pairs.reshape(pairs.shape[0], -1)], axis=1)
        top = MultiLayer((*config.top, 1), config.dtype, last_is_linear=True, name="top")
        return top(x)[:, 0]


class Lookup(nn.Module):
    """Rows of all tables: (table, row, feature), (batch, table) → (batch, table, feature)."""

    @nn.compact
    def __call__(self, tables: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda table, row: table[row], in_axes=(0, 1), out_axes=1)(tables, rows)


@functools.cache
def _model(config: DLRMConfig) -> DLRM:
    """One model per config, since states hold its `apply` statically and compare by it."""
    return DLRM(config)


@functools.cache
def _adagrad(learning_rate: float) -> optax.GradientTransformation:
    """One optimizer per rate, for the same reason."""
    return optax.adagrad(learning_rate)


def create_state(config: DLRMConfig, key: jax.Array) -> TrainState:
    model, optimizer = _model(config), _adagrad(config.learning_rate)
    dense = jax.ShapeDtypeStruct((1, config.num_dense), jnp.float32)
    rows = jax.ShapeDtypeStruct((1, config.num_tables), jnp.int32)
    params = model.lazy_init(key, dense, rows)["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        apply_fn=model.apply,
        params=params,
        tx=optimizer,
        opt_state=optimizer.init(params),
    )


def make_train_step(config: DLRMConfig) -> TrainStep:
    model = _model(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["dense"], batch["rows"])
            losses = optax.sigmoid_binary_cross_entropy(
                logits.astype(jnp.float32), batch["clicked"]
            )
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_batch(config: DLRMConfig, batch_size: int, key: jax.Array) -> Batch:
    dense_key, row_key, label_key = jax.random.split(key, 3)
    row_shape = (batch_size, config.num_tables)
    return {
        "dense": jax.random.normal(dense_key, (batch_size, config.num_dense)),
        "rows": jax.random.randint(row_key, row_shape, 0, config.table_rows),
        "clicked": jax.random.bernoulli(label_key, 0.3, (batch_size,)).astype(jnp.float32),
    }


def flops_per_step(config: DLRMConfig, batch_size: int) -> int:
    """6 · samples · (weights of the MLPs + table_dim · vectors²), less 2 · samples · weights of the
    bottom MLP's first layer: the gradient of the dense features is not computed."""
    sizes = [
        [config.num_dense, *config.bottom, config.table_dim],
        [config.top_inputs, *config.top, 1],
    ]
    weights = sum(m * n for mlp in sizes for m, n in itertools.pairwise(mlp))
    products = weights + config.table_dim * config.num_vectors**2
    return batch_size * (6 * products - 2 * sizes[0][0] * sizes[0][1])


FAMILY = Family(create_state, make_train_step, make_batch, flops_per_step)


def example(config: DLRMConfig, batch_size: int = 65536, name: str = "dlrm") -> Example:
    return Example(name, config, batch_size, FAMILY)


_CONFIGS = {
    "dlrm-560m": DLRMConfig(16, 2**19, 64, (512, 256), (4096, 4096, 2048), dtype=jnp.bfloat16),
}
_TINY = DLRMConfig(8, 64, 8, (16,), (32, 16), num_dense=8, learning_rate=0.05)
EXAMPLES = {name: example(config, name=name) for name, config in _CONFIGS.items()} | {
    "dlrm-tiny": example(_TINY, batch_size=32, name="dlrm-tiny")
}

"""Models of other projects, from packages that know nothing of autopar, in steps as their users
write them. (Haiku's networks are in test_haiku, equinox's layers in test_equinox.)"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import autopar
from tests.ecosystem.steps import SHARDED, TWO_STAGES, check_close, check_functional


class BatchStatsState(TrainState):
    batch_stats: Any = None


def images(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((8, 16, 16, 3)).astype(np.float32),
        "label": np.arange(8, dtype=np.int32) % 4,
    }


@pytest.mark.slow
def test_a_residual_network_of_jax_resnet() -> None:
    jax_resnet = pytest.importorskip("jax_resnet")
    model = jax_resnet.ResNet(
        block_cls=jax_resnet.ResNetBlock, stage_sizes=[1, 1], hidden_sizes=(8, 16), n_classes=4
    )
    variables = model.init(jax.random.key(0), images(0)["image"])
    state = BatchStatsState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> Any:
            logits, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    method = autopar.ShardParallel((8,))
    check_functional(step, state, [images(0), images(1)], method, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", [SHARDED, TWO_STAGES], ids=["sharded", "stages"])
def test_a_normalising_flow_of_flowjax(method: Any) -> None:
    """An equinox module with wrapped parameters, masks and functions among its leaves."""
    pytest.importorskip("flowjax")
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    def is_leaf(x: Any) -> bool:
        return isinstance(x, paramax.NonTrainable)

    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        flow, opt_state = state
        params, rest = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_leaf)

        def loss_fn(params: Any) -> Any:
            flow = paramax.unwrap(eqx.combine(params, rest, is_leaf=is_leaf))
            return -flow.log_prob(batch).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = eqx.apply_updates(params, updates)
        return (eqx.combine(params, rest, is_leaf=is_leaf), opt_state), loss

    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=8, nn_depth=1
    )
    params = eqx.filter(flow, eqx.is_inexact_array, is_leaf=is_leaf)
    rows = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    state = (flow, optimizer.init(params))
    _, plan = check_functional(step, state, [rows] * 2, method, jit=eqx.filter_jit)
    assert plan.is_pipeline == (method is TWO_STAGES)


@pytest.mark.slow
def test_attention_and_recurrence_of_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.recurrent = nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs), rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.recurrent(self.attention(self.embed(tokens)))
            return self.embed.attend(x)

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            logits = model(tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make() -> tuple[Any, Any]:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    tokens = np.arange(64, dtype=np.int32).reshape(8, 8) % 32
    got, want = make(), make()
    parallel, serial = autopar.parallelize(step, method=SHARDED), nnx.jit(step)
    for _ in range(2):
        check_close(parallel(*got, tokens), serial(*want, tokens))
    check_close(nnx.state(got), nnx.state(want))

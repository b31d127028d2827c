"""Half precision with loss scaling: steps that overflow change the scale and nothing else."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import autopar
from tests.ecosystem.steps import SHARDED, TWO_STAGES, batch, check_close, own

METHODS = [SHARDED, pytest.param(TWO_STAGES, marks=pytest.mark.slow)]


class ScaledState(TrainState):
    dynamic_scale: DynamicScale


class Half(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = nn.tanh(nn.Dense(16, dtype=jnp.float16)(x))
        return x


def batches() -> list[Any]:
    """The second one overflows in half precision."""
    large = {"x": batch(1)["x"], "y": np.full((16, 16), 6e4, np.float32)}
    return [batch(0), large, batch(2)]


def check_steps(step: Any, state: Any, method: Any, scale_of: Any) -> None:
    want, got = state, own(state)
    serial, parallel = jax.jit(step), autopar.parallelize(step, method=method)
    scales = [float(scale_of(state))]
    for one in batches():
        want, want_finite = serial(want, one)
        got, got_finite = parallel(got, one)
        check_close(got_finite, want_finite)
        scales.append(float(scale_of(got)))
    check_close(got, want, rtol=2e-3, atol=1e-3)
    assert scales[2] < scales[1] == scales[0], "halved by the step that overflowed"


@pytest.mark.parametrize("method", METHODS)
def test_dynamic_scale_of_flax(method: Any) -> None:
    model = Half()
    params = model.init(jax.random.key(0), batch()["x"])["params"]
    state = ScaledState.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.adam(1e-3),
        dynamic_scale=DynamicScale(scale=jnp.float32(2.0**10), fin_steps=jnp.int32(0)),
    )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> Any:
            out = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((out - batch["y"].astype(jnp.float16)).astype(jnp.float32) ** 2)

        scale, is_finite, _, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
        new = state.apply_gradients(grads=grads)

        def kept(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        new = new.replace(
            params=kept(new.params, state.params),
            opt_state=kept(new.opt_state, state.opt_state),
            dynamic_scale=scale,
        )
        return new, is_finite

    check_steps(step, state, method, lambda s: s.dynamic_scale.scale)


@pytest.mark.ci
@pytest.mark.parametrize("method", METHODS)
def test_loss_scale_of_jmp(method: Any) -> None:
    jmp = pytest.importorskip("jmp")
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, scale = state

        def loss_fn(params: Any) -> Any:
            params, x, y = policy.cast_to_compute((params, batch["x"], batch["y"]))
            for w in params:
                x = jnp.tanh(x @ w)
            return scale.scale(jnp.mean(policy.cast_to_output(x - y) ** 2))

        grads = scale.unscale(jax.grad(loss_fn)(params))
        is_finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(
            is_finite, (new_params, new_opt_state), (params, opt_state)
        )
        return (params, opt_state, scale.adjust(is_finite)), is_finite

    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (16, 16)) / 4 for key in keys]
    scale = jmp.DynamicLossScale(jnp.float32(2.0**10))
    check_steps(step, (params, optimizer.init(params), scale), method, lambda s: s[2].loss_scale)

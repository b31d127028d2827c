"""Wrappers of optax around optimizers: what they keep is state, and comes out as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import autopar
from tests.ecosystem.steps import (
    SHARDED,
    TWO_STAGES,
    batch,
    check_close,
    check_functional,
    own,
)

WIDTH = 16
Params = dict[str, dict[str, jax.Array]]


def make_params() -> Params:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        f"layer_{i}": {
            "w": jax.random.normal(key, (WIDTH, WIDTH)) / 4,
            "b": jnp.zeros(WIDTH),
        }
        for i, key in enumerate(keys)
    }


def apply(params: Params, x: Any) -> Any:
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def kinds(params: Params) -> Any:
    """Weights by one rule, biases by another."""
    return jax.tree.map(lambda p: "weights" if p.ndim == 2 else "biases", params)


def is_weight(params: Params) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 3), weight_decay=1e-2
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), is_weight), optax.adam(1e-2)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"weights": optax.adam(1e-2), "biases": optax.sgd(1e-1, momentum=0.9)}, kinds
    ),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "clipping": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.scale_by_adam(), optax.scale(-1e-2)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2), 1e-2, b1=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
}
IN_DEFAULT_RUN = ("multi_steps", "multi_transform")
STEPS = 3


def parameters(fast: Any) -> Any:
    """Those that gradients are taken of; `lookahead` keeps a second copy beside them."""
    return fast.fast if isinstance(fast, optax.LookaheadParams) else fast


def step_of(optimizer: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(parameters(params))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def run(name: str, method: Any) -> tuple[Any, Any]:
    optimizer = OPTIMIZERS[name]()
    params: Any = make_params()
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    state = (params, optimizer.init(params))
    batches = [batch(i) for i in range(STEPS)]
    # Newton–Schulz iterations of muon magnify what sums in another order leave.
    loose = {"rtol": 1e-2, "atol": 1e-3} if name == "muon" else {}
    return check_functional(step_of(optimizer), state, batches, method, **loose)


def sharded_matrices(tree: Any) -> list[bool]:
    matrices = [x for x in jax.tree.leaves(tree) if x.shape == (WIDTH, WIDTH)]
    return [not x.sharding.is_fully_replicated for x in matrices]


@pytest.mark.representatives("multi_transform")
@pytest.mark.parametrize(
    "name",
    [n if n in IN_DEFAULT_RUN else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS],
)
def test_sharded(name: str) -> None:
    (params, opt_state), plan = run(name, SHARDED)
    assert all(t.role == "state" for t in plan.inputs if not t.path.startswith("batch"))
    for tree in (params, opt_state):
        found = sharded_matrices(tree)
        assert found and all(found), "moments, accumulators and copies lie in shards"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_a_pipeline(name: str) -> None:
    (params, _), plan = run(name, TWO_STAGES)
    assert plan.is_pipeline
    layers = parameters(params)
    first, last = layers["layer_0"]["w"], layers["layer_3"]["w"]
    assert not first.sharding.device_set & last.sharding.device_set


@pytest.mark.parametrize("method", [SHARDED, pytest.param(TWO_STAGES, marks=pytest.mark.slow)])
def test_an_average_of_parameters_beside_them(method: Any) -> None:
    """`optax.incremental_update`; at first the average and the parameters are the same arrays."""
    optimizer = optax.adam(1e-2)
    inner = step_of(optimizer)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        (params, opt_state), loss = inner(state["train"], batch)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"train": (params, opt_state), "average": average}, loss

    def start() -> Any:
        params = make_params()
        return {"train": (params, optimizer.init(params)), "average": params}

    serial, parallel = jax.jit(step), autopar.parallelize(step, method=method)
    want, got = start(), start()
    for i in range(2):
        want, _ = serial(want, batch(i))
        got, _ = parallel(got, batch(i))
    check_close(got, want)
    one, other = got["train"][0]["layer_0"]["w"], got["average"]["layer_0"]["w"]
    assert one.sharding.device_set == other.sharding.device_set


@pytest.mark.ci
def test_steps_that_are_not_finite_are_skipped() -> None:
    optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2)
    params = make_params()
    bad = {"x": np.full((16, WIDTH), np.inf, np.float32), "y": batch()["y"]}
    state = (params, optimizer.init(params))
    step = step_of(optimizer)
    serial, parallel = jax.jit(step), autopar.parallelize(step, method=SHARDED)
    want, got = state, own(state)
    for one in (batch(0), bad, batch(1)):
        want, _ = serial(want, one)
        got, _ = parallel(got, one)
    check_close(got, want)
    assert int(got[1].total_notfinite) == 1

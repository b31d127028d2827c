"""Steps that compute gradients and lose them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.sharding.lost_state import lost_state_warning

PARAMS = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
BATCH = jax.ShapeDtypeStruct((16, 64), "float32")
CLUSTER = autopar.ClusterSpec(1, 4, "h100-sxm")


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def loses(params, batch):
    loss, _ = jax.value_and_grad(loss_of)(params, batch)
    return {"loss": loss, "norm": jnp.sum(jax.grad(loss_of)(params, batch)["w"])}


def keeps(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def returns_gradients(params, batch):
    return jax.grad(loss_of)(params, batch)


@pytest.mark.parametrize("method", ["data", "shard", "auto"])
def test_a_step_that_loses_its_state_is_warned_of(method: str, caplog) -> None:
    plan = autopar.plan(loses, PARAMS, BATCH, cluster=CLUSTER, method=method)
    (warning,) = [text for text in plan.warnings if "no updated state" in text]
    assert "such as params['w']" in warning and "return new_state, loss" in warning
    assert warning in caplog.text
    assert warning.split(": ")[0] in plan.explain()
    assert lost_state_warning(autopar.ParallelPlan.from_json(plan.to_json())) == warning


@pytest.mark.parametrize("step", [keeps, returns_gradients, loss_of])
def test_other_steps_are_not(step, caplog) -> None:
    plan = autopar.plan(step, PARAMS, BATCH, cluster=CLUSTER, method="shard")
    assert lost_state_warning(plan) is None and not caplog.text
    assert not [text for text in plan.warnings if "state" in text]

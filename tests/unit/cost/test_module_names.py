"""Layers are told apart by the paths of their parameters where names do not do it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import autopar


def modules_of(scope_of) -> set[str]:
    """Module names of a stack of layers whose scopes are as given."""

    def step(params, batch):
        def loss(params):
            x = batch
            for number, layer in enumerate(params["layers"]):
                with jax.named_scope(scope_of(number)):
                    x = jax.nn.relu(x @ layer["w"] + layer["b"])
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    layer = {"w": jax.ShapeDtypeStruct((64, 64), "float32"), "b": jax.ShapeDtypeStruct((64,), "f4")}
    params = {"layers": [layer] * 3}
    batch = jax.ShapeDtypeStruct((16, 64), "float32")
    cluster = autopar.ClusterSpec(1, 4, "h100-sxm")
    plan = autopar.plan(step, params, batch, cluster=cluster, method="data")
    return {use.module for use in plan.details.parallelism}


def test_a_class_name_that_all_layers_share_tells_none_apart():
    assert modules_of(lambda number: "eqx.nn.Linear") == {f"layers[{n}]" for n in range(3)}


def test_names_of_layers_are_kept():
    assert modules_of(lambda number: f"Dense_{number}") == {f"Dense_{n}" for n in range(3)}

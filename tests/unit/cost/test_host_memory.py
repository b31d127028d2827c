"""State in host memory takes no memory on the device before the update, and three groups in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.cost.host_memory import host_memory, with_host_memory
from autopar.cost.memory import memory_profile
from autopar.cost.plan_details import single_device_layouts
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.spec import WHOLE
from autopar.rewrite.host_cut import hostable_inputs, hostable_parameters, with_host_state
from autopar.tracer.build import build_graph
from autopar.tracer.trace import StepOptions, trace

WIDTH, LAYERS = 64, 12


@pytest.fixture(scope="module")
def steps() -> Any:
    tx = optax.adam(1e-3)
    params = [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state

        def loss_of(params: Any) -> jax.Array:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), loss

    one = trace(step, ((params, tx.init(params)), jnp.ones((2, WIDTH))), {}, StepOptions())
    return one, with_host_state(one, hostable_inputs(one))


def peak(step: Any) -> float:
    graph = with_host_memory(build_graph(step, overlaps=False), step)
    mesh = mesh_of_cluster(ClusterSpec(1, 1, "h100-sxm"), (1,))
    layouts, _ = single_device_layouts(graph, 1)
    return memory_profile(graph, mesh, layouts).peak_bytes


def test_three_groups_are_on_the_device(steps: Any) -> None:
    plain, hosted = steps
    one = 4 * WIDTH * WIDTH
    assert peak(plain) >= 3 * LAYERS * one  # parameters and moments
    # Parameters, gradients, and three times two moments of a layer.
    assert peak(hosted) == pytest.approx((2 * LAYERS + 6) * one, rel=0.03)


def test_transfers_take_what_the_link_allows(steps: Any) -> None:
    _, hosted = steps
    cluster = ClusterSpec(1, 4, "h100-sxm", host_link_bandwidth=1e9)
    mesh = mesh_of_cluster(cluster, (4,))
    whole = [(WHOLE,)] * len(hosted.avals)
    held = 2 * LAYERS * 4 * WIDTH * WIDTH
    found = host_memory(hosted, mesh, whole)
    assert found is not None and found.num_bytes == held
    assert found.transfer_s == pytest.approx(held / 1e9)
    assert dict(hosted.state)[found.inputs[0]] == found.outputs[0]
    split = [(0,) if len(aval.shape) == 2 else (WHOLE,) for aval in hosted.avals]
    found = host_memory(hosted, mesh, split)
    assert found is not None and found.num_bytes == held / 4
    assert np.isclose(found.transfer_s, held / 4 / 1e9)


def test_of_parameters_in_host_memory_the_casts_are_on_the_device() -> None:
    tx = optax.adam(1e-3)
    params = [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state

        def loss_of(params: Any) -> jax.Array:
            y = x
            for w in params:
                y = jnp.tanh(y @ w.astype(jnp.bfloat16))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), loss

    x = jnp.ones((2, WIDTH), jnp.bfloat16)
    plain = trace(step, ((params, tx.init(params)), x), {}, StepOptions())
    moments, parameters = hostable_inputs(plain), hostable_parameters(plain)
    one = 4 * WIDTH * WIDTH
    # Parameters and gradients, these in bfloat16, and three times two moments of a layer.
    without = peak(with_host_state(plain, moments))
    assert without == pytest.approx((1.5 * LAYERS + 6) * one, rel=0.05)
    # Casts and gradients, and three times three arrays of a layer.
    hosted = with_host_state(plain, (*moments, *parameters))
    assert peak(hosted) == pytest.approx((LAYERS + 9) * one, rel=0.05)
    graph = with_host_memory(build_graph(hosted, overlaps=False), hosted)
    casts = {v for node in graph.nodes if node.equation in range(LAYERS) for v in node.results}
    lives = [life for life in graph.liveness.lives if life.value in casts]
    last = max(n for n, node in enumerate(graph.nodes) if node.name == "dot_general")
    assert len(lives) == LAYERS and all(life.start == 0 < last <= life.end for life in lives)
    cluster = ClusterSpec(1, 1, "h100-sxm", host_link_bandwidth=1e9)
    found = host_memory(hosted, mesh_of_cluster(cluster, (1,)), [(WHOLE,)] * len(hosted.avals))
    assert found is not None and set(found.parameters) == set(parameters)
    assert found.num_bytes == 3 * LAYERS * one
    assert found.transfer_s == pytest.approx(4 * LAYERS * one / 1e9)  # parameters are fetched twice

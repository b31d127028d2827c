"""Which state can lie in host memory, and in which order its step then runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.host_cut import (
    NUM_GROUPS,
    hostable_inputs,
    hostable_parameters,
    with_host_state,
)
from autopar.sharding.assemble import unsharded
from autopar.tracer.trace import StepOptions, trace

WIDTH = 8


def traced(tx: optax.GradientTransformation, more: Callable[..., Any] | None = None) -> TracedStep:
    params = {name: jnp.full((WIDTH, WIDTH), 0.1) for name in "abc"}
    state = {"params": params, "opt": tx.init(params)}

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y = x
            for name in "abc":
                y = jnp.tanh(y @ params[name])
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new, loss if more is None else (loss, more(updates, new))

    return trace(step, (state, jnp.ones((4, WIDTH))), {}, StepOptions())


def paths(step: TracedStep, inputs: tuple[int, ...]) -> list[str]:
    return [step.call.paths[i] for i in inputs]


def test_moments_can_lie_in_host_memory_and_nothing_else() -> None:
    step = traced(optax.adam(1e-3))
    assert paths(step, hostable_inputs(step)) == [
        f"state['opt'][0].{moment}['{name}']" for moment in ("mu", "nu") for name in "abc"
    ]


def test_state_that_a_result_depends_on_stays() -> None:
    step = traced(optax.adam(1e-3), lambda updates, _: jnp.sum(updates["a"] ** 2))
    assert {path[-5:] for path in paths(step, hostable_inputs(step))} == {"['b']", "['c']"}


def test_state_that_is_printed_stays() -> None:
    def show(_: Any, new: Any) -> int:
        jax.debug.callback(lambda x: None, new["opt"][0].mu["a"])
        return 0

    step = traced(optax.adam(1e-3), show)
    hosted = paths(step, hostable_inputs(step))
    assert "state['opt'][0].mu['a']" not in hosted
    assert "state['opt'][0].mu['b']" in hosted


@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))],
    ids=["adam", "clipped"],
)
def test_each_parameter_with_its_moments_is_a_group(tx: optax.GradientTransformation) -> None:
    step = traced(tx)
    cut_step = with_host_state(step, hostable_inputs(step))
    cut = cut_step.host
    assert cut is not None
    ends = [[path[-5:] for path in paths(step, group.inputs)] for group in cut.groups]
    assert sorted(ends) == [[f"['{name}']"] * 2 for name in "abc"]
    size = 4 * WIDTH * WIDTH
    assert (cut.num_bytes, cut.group_bytes) == (6 * size, 2 * size)
    borders = [cut.early[1], *(group.equations[1] for group in cut.groups)]
    assert [group.equations for group in cut.groups] == list(pairwise(borders))
    assert borders[-1] == len(step.program.equations) == len(cut_step.program.equations)


def test_only_gradients_wait_for_the_update() -> None:
    """Not their squares and multiples, which the update makes by itself."""
    step = traced(optax.adam(1e-3))
    cut_step = with_host_state(step, hostable_inputs(step))
    assert cut_step.host is not None
    equations, early = cut_step.program.equations, cut_step.host.early[1]
    made = {v for equation in equations[:early] for v in equation.results}
    waiting = {v for equation in equations[early:] for v in equation.inputs} & made
    arrays = [v for v in waiting if cut_step.program.avals[v].shape]
    assert len(arrays) == 3


def test_the_new_order_computes_the_same() -> None:
    step = traced(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    cut_step = with_host_state(step, hostable_inputs(step))
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    values = [
        jnp.asarray(np.random.default_rng(i).random(a.shape), a.dtype)
        for i, a in enumerate(step.avals)
    ]
    results = [
        annotated_function(one.program, unsharded(one.program), mesh)(*values)
        for one in (step, cut_step)
    ]
    for old, new in zip(*results, strict=True):
        np.testing.assert_array_equal(old, new)


def test_an_update_that_cannot_be_divided_is_one_group() -> None:
    step = traced(optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)))
    cut = with_host_state(step, hostable_inputs(step)).host
    assert cut is not None and len(cut.groups) == 1
    assert cut.group_bytes == cut.num_bytes


def test_there_are_not_too_many_groups() -> None:
    params = [jnp.ones((4, 4)) for _ in range(3 * NUM_GROUPS)]
    tx = optax.sgd(1e-3, momentum=0.9)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda ps: sum(jnp.sum(x @ p) ** 2 for p in ps))(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), loss

    one = trace(step, ((params, tx.init(params)), jnp.ones((2, 4))), {}, StepOptions())
    cut = with_host_state(one, hostable_inputs(one)).host
    assert cut is not None and len(cut.inputs) == len(params)
    assert len(cut.groups) == NUM_GROUPS


def test_a_gradient_waits_for_its_update_once() -> None:
    """Its square and its multiples are made late, also where one needs two of them."""
    names = "abc"
    params = {name: jnp.full((WIDTH, WIDTH), 0.1) for name in names}
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y = x
            for name in names:
                y = jnp.tanh(y @ params[name])
            return jnp.mean(y**2)

        params, mu, nu = state
        loss, grads = jax.value_and_grad(loss_of)(params)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, grads)
        params = jax.tree.map(lambda p, m, v: p - m / (v + 1e-8), params, mu, nu)
        return (params, mu, nu), loss

    one = trace(step, ((params, zeros, zeros), jnp.ones((4, WIDTH))), {}, StepOptions())
    hosted = with_host_state(one, hostable_inputs(one))
    assert hosted.host is not None
    equations = hosted.program.equations
    _, end = hosted.host.early
    early, late = equations[:end], equations[end:]
    made = {value for equation in early for value in equation.results}
    waiting = {value for equation in late for value in equation.inputs if value in made}
    assert [hosted.program.avals[v].shape for v in waiting] == [(WIDTH, WIDTH)] * len(names)


# -- parameters


def mixed(read: Callable[..., Any], more: Callable[..., Any] | None = None) -> TracedStep:
    """Three float32 parameters; `read`: a layer of x and one of them."""
    tx = optax.adam(1e-3)
    params = {name: jnp.full((WIDTH, WIDTH), 0.1) for name in "abc"}

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y = x
            for name in "abc":
                y = read(y, params[name])
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new, loss if more is None else (loss, more(state["params"], new["params"]))

    state = {"params": params, "opt": tx.init(params)}
    return trace(step, (state, jnp.ones((4, WIDTH), jnp.bfloat16)), {}, StepOptions())


def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w.astype(jnp.bfloat16))


PARAMETERS = [f"state['params']['{name}']" for name in "abc"]


@pytest.mark.parametrize("layer", [narrow, jax.checkpoint(narrow)], ids=["kept", "recomputed"])
def test_parameters_that_are_cast_can_lie_there_and_are_cast_first(layer: Any) -> None:
    step = mixed(layer)
    found = hostable_parameters(step)
    assert paths(step, found) == PARAMETERS
    hosted = with_host_state(step, (*hostable_inputs(step), *found))
    cut, equations = hosted.host, hosted.program.equations
    assert cut is not None
    assert set(cut.parameters) == set(found) < set(cut.inputs)
    start, end = cut.early
    casts = equations[:start]
    assert [e.name for e in casts] == ["convert_element_type"] * 3  # once each
    values = {hosted.program.inputs[i] for i in cut.inputs}
    assert not any(values.intersection(e.inputs) for e in equations[start:end])
    args = [jnp.linspace(0.1, 0.9, a.size).reshape(a.shape).astype(a.dtype) for a in step.avals]
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    wanted, got = (
        annotated_function(one.program, unsharded(one.program), mesh)(*args)
        for one in (step, hosted)
    )
    for one, other in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: jnp.tanh(x.astype(jnp.float32) @ w),
        lambda x, w: jnp.tanh(x.astype(jnp.float32) @ w.astype(jnp.bfloat16) * jnp.sum(w)),
    ],
    ids=["as they are", "also as they are"],
)
def test_parameters_that_are_computed_with_stay(layer: Any) -> None:
    assert hostable_parameters(mixed(layer)) == ()


def test_a_parameter_that_a_result_depends_on_stays() -> None:
    step = mixed(narrow, lambda old, new: jnp.sum(new["a"] ** 2))
    assert paths(step, hostable_parameters(step)) == PARAMETERS[1:]


def test_state_that_is_replaced_and_not_updated_stays() -> None:
    """The last gradient is stored, and nothing reads the old one."""
    keep_last = optax.GradientTransformation(
        lambda params: {"last": jax.tree.map(jnp.zeros_like, params)},
        lambda grads, state, params=None: (grads, {"last": grads}),
    )
    step = traced(optax.chain(keep_last, optax.adam(1e-3)))
    hosted = hostable_inputs(step)
    assert hosted and not any("last" in path for path in paths(step, hosted))
    assert with_host_state(step, hosted).host is not None

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import _jax
from autopar.errors import TraceError
from autopar.lower.annotate import annotated_function
from autopar.rewrite.single_microbatch import loop_single_microbatch
from autopar.sharding.assemble import unsharded
from autopar.tracer.trace_step import trace_step
from tests.unit.rewrite.staged_models import batch, loss_fn, parameters, reads, trained_by


def half_loss(params: Any, batch: Any) -> Any:
    half = jax.tree.map(lambda p: p.astype(jnp.float16).astype(jnp.float32), params)
    return loss_fn(half, batch)


@pytest.mark.ci
def test_loop_of_one_trip_gives_the_same() -> None:
    optimizer = optax.adam(1e-2)
    step = trained_by(optimizer, half_loss)
    args = ((parameters(), optimizer.init(parameters())), batch())
    looped = loop_single_microbatch(trace_step(step, args))
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    function = annotated_function(looped.program, unsharded(looped.program), mesh)
    got = jax.jit(function)(*looped.call.leaves)
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_passes_are_in_the_loop_and_nothing_else_is() -> None:
    optimizer = optax.adam(1e-2)
    step = trained_by(optimizer, half_loss)
    traced = trace_step(step, ((parameters(), optimizer.init(parameters())), batch()))
    looped = loop_single_microbatch(traced)
    assert looped.loop is not None
    equations = looped.program.equations
    loop = equations[looped.loop]
    assert loop.params["length"] == 1
    inside = [e.name for e in loop.bodies[0].equations]
    assert inside.count("dot_general") == 3 * 3 - 1  # of the input no gradient is asked
    outside = [e for i, e in enumerate(equations) if i != looped.loop]
    assert not any(e.name == "dot_general" for e in outside)
    # What is made of parameters alone stands before, the update after.
    casts = [i for i, e in enumerate(equations) if e.name == "convert_element_type"]
    assert sum(i < looped.loop for i in casts) >= 2 * 6
    assert any(e.name == "sqrt" for e in equations[looped.loop + 1 :])
    made = set(looped.program.inputs) | {v for v, _ in looped.program.captured}
    for equation in equations:
        assert made.issuperset(reads(equation.operands))
        made.update(equation.results)


def test_step_that_ignores_its_batch_is_refused() -> None:
    def step(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: sum(jnp.sum(own["w"] ** 2) for own in p))(params)

    with pytest.raises(TraceError, match="nothing in the step reads one"):
        loop_single_microbatch(trace_step(step, (parameters(), batch())))


def test_an_update_between_two_passes_is_in_the_loop() -> None:
    """As in a GAN: the generator is trained against the updated discriminator."""

    def score(judge: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.softplus(jnp.tanh(x @ judge) @ jnp.ones(8)))

    def step(state: Any, x: Any) -> Any:
        slope = jax.grad(lambda d: score(d, x) - score(d, x @ state["maker"]))(state["judge"])
        judge = state["judge"] - 0.1 * slope
        slope = jax.grad(lambda g: score(judge, x @ g))(state["maker"])
        return {"maker": state["maker"] - 0.1 * slope, "judge": judge}

    state = {"maker": jnp.eye(8), "judge": jnp.ones((8, 8)) / 8}
    args = state, jax.random.normal(jax.random.key(0), (16, 8))
    looped = loop_single_microbatch(trace_step(step, args))
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    function = annotated_function(looped.program, unsharded(looped.program), mesh)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for a, b in zip(jax.jit(function)(*looped.call.leaves), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    method = autopar.PipeshardParallel(1, stages=autopar.UniformStages(2))
    got = autopar.parallelize(step, method=method, donate_argnums=())(*args)
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

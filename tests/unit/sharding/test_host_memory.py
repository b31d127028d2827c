"""Which state is put into host memory when a step does not fit, and what the error says if none
helps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.errors import MemoryBudgetError
from autopar.methods import ShardingOptions, ShardParallel
from autopar.rewrite.host_cut import hostable_inputs, hostable_parameters
from autopar.rewrite.step_source import StepSource
from autopar.sharding.host_memory import HOST_MEMORY, HostWays, plan_with_host_memory
from autopar.tracer.trace import StepOptions, trace

WIDTH, LAYERS = 16, 24
ERROR = MemoryBudgetError("step: does not fit.", 9.0, 4.0)


def source_of(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> Any:
    """As much of a `StepSource` as is read here; products are of this type."""
    params = [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y = x.astype(dtype)
            for w in params:
                y = jnp.tanh(y @ w.astype(dtype))
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_of)(state[0])
        updates, opt = tx.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), opt), loss

    class Source:
        whole = trace(step, ((params, tx.init(params)), jnp.ones((2, WIDTH))), {}, StepOptions())

    return Source()


def tried_with(
    source: StepSource, misfit: MemoryBudgetError, method: Any = None
) -> tuple[MemoryBudgetError, list[tuple[int, ...]]]:
    """The error of a step that fits in no way, and what was put into host memory for it."""
    asked: list[tuple[int, ...]] = []

    def plan(inputs: tuple[int, ...]) -> Any:
        asked.append(inputs)
        raise misfit

    with pytest.raises(MemoryBudgetError) as raised:
        plan_with_host_memory(HostWays(source, method or ShardParallel(), plan), ERROR)
    return raised.value, asked


def test_all_state_that_can_lie_there_is_tried_and_the_nearer_error_is_raised() -> None:
    source = source_of(optax.adam(1e-3))
    error, asked = tried_with(source, MemoryBudgetError("step: with moments there.", 5.0, 4.0))
    assert asked == [hostable_inputs(source.whole)]
    assert error.peak_bytes == 5.0 and error.problem == "step: with moments there."
    assert "without it: step: does not fit." in error.tried[HOST_MEMORY]
    assert "no parameter can: the step computes with them as they are" in error.tried[HOST_MEMORY]


def test_parameters_that_are_cast_are_tried_after_the_state() -> None:
    source = source_of(optax.adam(1e-3), jnp.bfloat16)
    error, asked = tried_with(source, MemoryBudgetError("step: with moments there.", 5.0, 4.0))
    state = hostable_inputs(source.whole)
    assert asked == [state, (*state, *hostable_parameters(source.whole))]
    assert len(asked[1]) == 3 * LAYERS
    assert error.peak_bytes == 5.0 and "no parameter can" not in error.tried[HOST_MEMORY]


def test_an_error_that_is_no_nearer_is_only_told_of() -> None:
    source = source_of(optax.adam(1e-3))
    error, _ = tried_with(source, MemoryBudgetError("step: even more.", 12.0, 4.0))
    assert error.peak_bytes == ERROR.peak_bytes
    assert error.tried[HOST_MEMORY] == "tried: step: even more."


def test_no_more_than_the_user_allows_lies_there() -> None:
    source = source_of(optax.adam(1e-3))
    one = 4 * WIDTH * WIDTH
    method = ShardParallel(options=ShardingOptions(host_memory=5 * one))
    _, (asked,) = tried_with(source, ERROR, method)
    assert asked == hostable_inputs(source.whole)[:5]


@pytest.mark.parametrize(
    ("tx", "options", "reason"),
    [
        (optax.adam(1e-3), ShardingOptions(host_memory="never"), "not tried"),
        (optax.adam(1e-3), ShardingOptions(host_memory=1.0), "not possible: no array fits"),
        (
            optax.sgd(1e-3),
            ShardingOptions(),
            "not possible: no state is read by the update alone, ",
        ),
    ],
)
def test_why_none_can_lie_there_is_said(
    tx: optax.GradientTransformation, options: ShardingOptions, reason: str
) -> None:
    error, asked = tried_with(source_of(tx), ERROR, ShardParallel(options=options))
    assert not asked and error.tried[HOST_MEMORY].startswith(reason)

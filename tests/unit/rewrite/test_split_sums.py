from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from autopar import _jax
from autopar.rewrite.split_sums import split_sums
from tests.properties.staged_steps import body_of
from tests.unit.rewrite.staged_models import WIDTHS, in_layers, looped, makers, reads

WIDTH = WIDTHS[0]


def tied_loss(params: Any, batch: Any) -> Any:
    x = batch["x"]
    x = jnp.tanh(x @ params["tied"]) @ params["middle"]
    x = jnp.tanh(x) @ params["tied"].T
    return jnp.mean(x**2)


def mixed_loss(params: Any, batch: Any) -> Any:
    """Each use casts the weight, as Flax's modules do, so each of its gradients is cast back."""

    def cast(x: Any) -> Any:
        return x.astype(jnp.bfloat16)

    x = jnp.tanh(cast(batch["x"]) @ cast(params["tied"])) @ cast(params["middle"])
    x = jnp.tanh(x) @ cast(params["tied"]).T
    return jnp.mean(x.astype(jnp.float32) ** 2)


def tied_parameters() -> dict[str, Any]:
    return {"tied": jnp.ones((WIDTH, 6)) / 3, "middle": jnp.ones((6, 6)) / 4}


def test_without_shared_weights_nothing_changes() -> None:
    step = looped(optax.sgd(0.1))
    assert step.loop is not None
    stage_of = in_layers(step, 3).layer_of
    program, loop, stages = split_sums(step.program, step.loop, stage_of)
    assert program is step.program and loop == step.loop and stages == stage_of


@pytest.mark.parametrize("loss", [tied_loss, mixed_loss])
@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_each_stage_sums_its_own_gradient_of_a_shared_weight(
    num_micro_batches: int, loss: Any
) -> None:
    step = looped(optax.sgd(0.1), loss, tied_parameters(), num_micro_batches)
    assert step.loop is not None
    stage_of = in_layers(step, 3).layer_of
    program, loop, stages = split_sums(step.program, step.loop, stage_of)
    before, after = step.program.equations[step.loop], program.equations[loop]
    assert _jax.scan_sizes(after.params)[1] == _jax.scan_sizes(before.params)[1] + 1
    (body,) = after.bodies
    assert len(stages) == len(body.equations)
    maker = makers(body)
    shared = []
    for out in reads(body.outputs):
        if body.avals[out].shape == (WIDTH, 6):
            equation = body.equations[maker[out]]
            shared.append(stages[maker[out]])
            # Each adds what it made itself.
            terms = [v for v in reads(equation.operands) if v in maker]
            assert {stages[maker[v]] for v in terms} == {stages[maker[out]]}
    assert sorted(shared) == [0, 2]
    # After the loop they are added, once, to what was the sum before.
    results = set(after.results)
    added = [
        e for e in program.equations[loop + 1 :]
        if e.name in ("add", "add_any") and results.issuperset(reads(e.operands))
    ]  # fmt: skip
    assert [e.results[0] for e in added if len(reads(e.operands)) == 2] == [
        r for r in before.results if step.program.avals[r].shape == (WIDTH, 6)
    ]


def test_a_weight_used_twice_in_one_stage_has_one_sum() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["tied"]) @ params["tied"].T
        x = jnp.tanh(x @ params["tied"]) @ params["middle"]
        return jnp.mean(x**2)

    step = looped(optax.sgd(0.1), loss, tied_parameters())
    assert step.loop is not None
    stage_of = [min(layer, 0) for layer in in_layers(step, 2).layer_of]
    program, _, _ = split_sums(step.program, step.loop, stage_of)
    assert program is step.program
    assert len(body_of(step).equations) == len(stage_of)

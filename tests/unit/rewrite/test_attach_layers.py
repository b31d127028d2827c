from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from autopar import _jax
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import ANYWHERE, boundary_bytes
from tests.properties.staged_steps import body_of
from tests.unit.rewrite.staged_models import WIDTHS, in_layers, looped, makers, reads

SGD = optax.sgd(0.1)
MICRO_ROWS = 4


def sums_by_shape(step: TracedStep, layer_of: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """Shape of a sum over micro-batches, as the weight has it -> the layer of the equation that
    adds to it."""
    assert step.loop is not None
    body, maker = body_of(step), makers(body_of(step))
    _, num_carry = _jax.scan_sizes(step.program.equations[step.loop].params)
    outs = reads(body.outputs[:num_carry])
    return {tuple(sorted(body.avals[o].shape)): layer_of[maker[o]] for o in outs}


def test_gradients_belong_to_the_layer_of_their_weights() -> None:
    step = looped(SGD)
    attached = in_layers(step, 3)
    sums = sums_by_shape(step, attached.layer_of)
    for layer, shape in enumerate(pairwise(WIDTHS)):
        assert sums[shape] == layer  # of the weight
        assert sums[shape[1:]] == layer  # of the bias, which reads nothing but a cotangent
    assert sums[()] == 2  # the loss


def test_passes_go_through_layers_in_order() -> None:
    step = looped(SGD)
    attached = in_layers(step, 3)
    body, maker = body_of(step), makers(body_of(step))
    assert set(attached.layer_of) <= {ANYWHERE, 0, 1, 2}
    for index, equation in enumerate(body.equations):
        own = attached.layer_of[index]
        for value in reads(equation.operands):
            before = maker.get(value)
            if before is None or ANYWHERE in (own, attached.layer_of[before]):
                continue
            if attached.is_backward[before]:
                assert attached.is_backward[index] and own <= attached.layer_of[before]
            elif not attached.is_backward[index]:
                assert own >= attached.layer_of[before]


def test_one_activation_crosses_each_boundary() -> None:
    step = looped(SGD)
    crossing = boundary_bytes(body_of(step), in_layers(step, 3))
    assert crossing == [4 * MICRO_ROWS * width for width in WIDTHS[1:3]]


def test_what_skips_a_layer_crosses_two_boundaries() -> None:
    def loss(params: Any, batch: Any) -> Any:
        first = jnp.tanh(batch["x"] @ params[0]["w"])
        x = jnp.tanh(first @ params[1]["w"])
        x = jnp.tanh(x @ params[2]["w"]) * jnp.sum(first, axis=1, keepdims=True)
        return jnp.mean((x - batch["y"]) ** 2)

    step = looped(SGD, loss)
    attached = in_layers(step, 3)
    crossing = boundary_bytes(body_of(step), attached)
    assert crossing[0] >= 4 * MICRO_ROWS * WIDTHS[1]
    assert crossing[1] > 4 * MICRO_ROWS * WIDTHS[2]
    sums = sums_by_shape(step, attached.layer_of)
    assert [sums[s] for s in pairwise(WIDTHS)] == [0, 1, 2]


def test_what_is_made_of_constants_belongs_nowhere() -> None:
    table = np.arange(WIDTHS[1], dtype=np.float32)

    def loss(params: Any, batch: Any) -> Any:
        rows = jnp.arange(len(batch["x"]))[:, None] * jnp.asarray(table)
        x = jnp.tanh(batch["x"] @ params[0]["w"]) * (rows > 2)
        x = jnp.tanh(x @ params[1]["w"])
        return jnp.mean((x @ params[2]["w"] - batch["y"]) ** 2)

    step = looped(SGD, loss)
    attached = in_layers(step, 3)
    for equation, layer in zip(body_of(step).equations, attached.layer_of, strict=True):
        if equation.name == "iota":
            assert layer == ANYWHERE
        if equation.name in ("dot_general", "tanh"):
            assert layer != ANYWHERE


def test_cotangents_are_sent_while_they_are_small() -> None:
    """Of a mean over positions, one row per example crosses, in both directions."""

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"][:, None, :] * jnp.ones((1, 9, 1)) @ params[0]["w"])
        x = jnp.tanh(jnp.mean(x, axis=1) @ params[1]["w"])
        return jnp.mean((x @ params[2]["w"] - batch["y"]) ** 2)

    step = looped(SGD, loss)
    body = body_of(step)
    attached = in_layers(step, 3)
    maker = makers(body)
    crossing = {
        value
        for equation, own in zip(body.equations, attached.layer_of, strict=True)
        for value in reads(equation.operands)
        if value in maker and attached.layer_of[maker[value]] not in (own, ANYWHERE)
    }
    shapes = sorted(body.avals[value].shape for value in crossing)
    assert shapes == [(MICRO_ROWS, WIDTHS[1])] * 2 + [(MICRO_ROWS, WIDTHS[2])] * 2

"""Scans stack products, carries and small statistics; the rest is computed again, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.rewrite.scan_residuals import thinned
from autopar.tracer.costs import aval_bytes
from autopar.tracer.trace_step import trace_step

F32 = jnp.float32
LENGTH, ROWS, WIDTH = 4, 16, 64


def shapes(**arrays: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in arrays.items()}


def programs(model: Callable[[Any, Any], Any], params: Any, x: Any) -> tuple[Program, Program]:
    """The program of a gradient, and the same with scans that stack less."""

    def gradient(params: Any, x: Any) -> Any:
        return jax.grad(lambda p: (model(p, x) ** 2).sum())(params)

    program = trace_step(gradient, (params, x)).program
    return program, thinned(program)


def scans(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.name == "scan"]


def stacks(program: Program) -> list[str]:
    """What the forward scan stacks: the names of the equations that make it."""
    scan = scans(program)[0]
    (body,) = scan.bodies
    maker = {r: e.name for e in body.equations for r in e.results}
    num_carry = _jax.scan_sizes(scan.params)[1]
    return [
        maker.get(o, "an input") if isinstance(o, int) else "a constant"
        for o in body.outputs[num_carry:]
    ]


def mlp(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return lax.scan(layer, x, params)[0]


MLP = shapes(up=(LENGTH, WIDTH, 4 * WIDTH), down=(LENGTH, 4 * WIDTH, WIDTH))
X = jax.ShapeDtypeStruct((ROWS, WIDTH), F32)


def test_an_activation_is_computed_again_from_its_product() -> None:
    before, after = programs(mlp, MLP, X)
    assert len(stacks(before)) > 4
    assert sorted(stacks(after)) == ["an input", "dot_general"]


def attention(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"])
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return x + jnp.einsum("bqk,bkd->bqd", probs, x @ w["q"]), None

    return lax.scan(layer, x, params)[0]


HEADS = shapes(q=(LENGTH, 8, 8), k=(LENGTH, 8, 8))
LONG = jax.ShapeDtypeStruct((2, 128, 8), F32)


def test_scores_of_short_rows_are_computed_again() -> None:
    """The product over a head's 8 features takes less than moving its result twice."""
    _, after = programs(attention, HEADS, LONG)
    scan = scans(after)[0]
    num_carry = _jax.scan_sizes(scan.params)[1]
    assert all(after.avals[r].shape[-2:] != (128, 128) for r in scan.results[num_carry:])


def test_a_mask_is_broadcast_in_the_trip() -> None:
    before, after = programs(attention, HEADS, LONG)
    for program, is_there in ((before, True), (after, False)):
        consts = [
            program.avals[o].shape
            for scan in scans(program)
            for o in scan.operands[: _jax.scan_sizes(scan.params)[0]]
            if isinstance(o, int)
        ]
        assert ((2, 128, 128) in consts) is is_there


def test_nothing_changes_without_a_gradient() -> None:
    program = trace_step(mlp, (MLP, X)).program
    assert thinned(program) is program


def test_a_scan_that_stacks_only_what_it_must_stays() -> None:
    def linear(params: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0]

    before, after = programs(linear, shapes(w=(LENGTH, WIDTH, WIDTH)), X)
    assert after is before


@pytest.mark.parametrize(("model", "params", "x"), [(mlp, MLP, X), (attention, HEADS, LONG)])
def test_stacks_shrink(model: Any, params: Any, x: Any) -> None:
    def stacked(program: Program) -> int:
        return sum(aval_bytes(program.avals[r]) for r in scans(program)[0].results)

    before, after = programs(model, params, x)
    assert stacked(after) < 0.5 * stacked(before)

"""Residuals that are cheap to make again are not kept, and the backward pass stays the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.rewrite.residuals import CHEAP, ResidualChoice, choose_residuals
from autopar.tracer.costs import aval_bytes
from autopar.tracer.regions import BACKWARD, equation_regions
from autopar.tracer.trace_step import trace_step

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


W = {"up": array(8, 32), "bias": array(32), "down": array(32, 8), "scale": array(8)}
X = array(4, 8)


def gelu(w: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]


def normed(w: Any, x: Any) -> Any:
    h = x @ w["up"] @ w["down"]
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return jnp.tanh(h * w["scale"]) @ w["up"]


def softmax(w: Any, x: Any) -> Any:
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x @ w["up"] @ w["up"].T @ x.T, -1e9)
    return jax.nn.softmax(scores) @ x


def dropped(w: Any, x: Any) -> Any:
    h = x @ w["up"]
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, h.shape)
    return jnp.where(keep, h / 0.5, 0.0) @ w["down"]


BLOCKS = {"gelu": gelu, "norm": normed, "softmax": softmax, "dropout": dropped}


def split(block: Callable[..., Any]) -> tuple[Program, list[Equation], list[Equation]]:
    """The program of a gradient: forward and backward equations apart."""

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w, x: jnp.sin(block(w, x)).sum(), argnums=(0, 1))(w, x)

    program = trace_step(step, (W, X)).program
    regions = equation_regions(program)
    is_backward = [region == BACKWARD for region in regions]
    first = is_backward.index(True)
    return program, list(program.equations[:first]), list(program.equations[first:])


def read_by(backward: Sequence[Equation], forward: Sequence[Equation]) -> set[int]:
    made = {r for e in forward for r in e.results}
    return {o for e in backward for o in e.operands if isinstance(o, int) and o in made}


def evaluate(equations: Sequence[Equation], env: dict[int, Any]) -> None:
    for e in equations:
        operands = [env[o] if isinstance(o, int) else o.value for o in e.operands]
        env.update(zip(e.results, _jax.bind(e.primitive, e.params, operands), strict=True))


def size(values: Collection[int], program: Program) -> int:
    return sum(aval_bytes(program.avals[v]) for v in values)


@pytest.mark.representatives("dropout")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_backward_pass_is_the_same_with_fewer_bytes(name: str) -> None:
    program, forward, backward = split(BLOCKS[name])
    read = read_by(backward, forward)
    given = dict(zip(program.inputs, jax.tree.leaves((W, X)), strict=True)) | dict(program.captured)
    choice = choose_residuals(forward, read, given, program.avals)
    before, after = size(read, program), size(choice.stored, program)
    assert after <= before if name == "dropout" else after < before
    assert {forward[p].name for p in choice.recomputed} <= CHEAP

    whole = dict(given)
    evaluate(forward, whole)
    handed = given | {v: whole[v] for v in choice.stored}
    evaluate([forward[p] for p in choice.recomputed], handed)
    for env in (whole, handed):
        evaluate(backward, env)
    for output in program.outputs:
        np.testing.assert_array_equal(handed[output], whole[output])


def test_of_a_gelu_only_what_the_product_gave_is_kept() -> None:
    program, forward, backward = split(gelu)
    read = read_by(backward, forward)
    kept = choose_residuals(forward, read, program.inputs, program.avals).stored
    shapes = sorted(program.avals[v].shape for v in kept)
    assert shapes == [(4, 8), (4, 32)], "the products' results, the last of them for the sine"
    assert sum(program.avals[v].shape == (4, 32) for v in read) > 2


def test_a_mask_of_constants_is_not_kept_and_a_random_one_as_bits_of_a_byte() -> None:
    program, forward, backward = split(softmax)
    choice = choose_residuals(forward, read_by(backward, forward), program.inputs, program.avals)
    assert not [v for v in choice.stored if program.avals[v].dtype == bool]
    program, forward, backward = split(dropped)
    choice = choose_residuals(forward, read_by(backward, forward), program.inputs, program.avals)
    types = [program.avals[v].dtype for v in choice.stored if program.avals[v].shape == (4, 32)]
    assert bool in types and jnp.uint32 not in types


def test_nothing_read_and_nothing_made_again() -> None:
    _, forward, _ = split(gelu)
    assert choose_residuals(forward, (), (), ()) == ResidualChoice((), ())


def test_what_comes_from_elsewhere_may_be_kept() -> None:
    """An activation that another stage sent stands for two that are made from it."""
    program, forward, _ = split(lambda w, x: jnp.tanh(x))
    (x,) = [v for v in program.inputs if program.avals[v].shape == X.shape]
    made = forward[0].results[0]
    weights = [v for v in program.inputs if v != x]
    assert choose_residuals(forward, {x, made}, weights, program.avals) == ResidualChoice(
        (x,), (0,)
    )
    assert choose_residuals(forward, {made}, weights, program.avals) == ResidualChoice((made,), ())


def test_bytes_beyond_32_bits_are_counted() -> None:
    program, forward, _ = split(lambda w, x: jnp.tanh(jnp.exp(x)))
    big = [jax.ShapeDtypeStruct((1 << 20, 1 << 14), jnp.float32)] * len(program.avals)
    x = next(v for v in program.inputs if program.avals[v].shape == X.shape)
    read = {e.results[0] for e in forward[:3]} | {x}
    choice = choose_residuals(forward, read, [v for v in program.inputs if v != x], big)
    assert choice.stored == (x,)

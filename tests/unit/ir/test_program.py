"""Equations that are copied with other values."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp

from autopar.ir.program import Constant, Equation
from autopar.tracer.trace import StepOptions, trace


def test_an_equation_of_other_values_is_otherwise_the_same() -> None:
    """As `dataclasses.replace` makes it, whatever fields there are."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y) * 2.0, None), x, None, length=3)
        return y + 1.0

    program = trace(step, (jnp.ones(4),), {}, StepOptions()).program
    names = [field.name for field in fields(Equation) if field.init]
    for equation in program.all_equations():
        operands, results = (*equation.operands, 0), (*equation.results, 1)
        changes = {"operands": operands, "results": results, "bodies": (), "params": {"a": 1}}
        made, like = equation.of_values(**changes), replace(equation, **changes)
        assert all(getattr(made, name) is getattr(like, name) for name in names)
        assert made.inputs == like.inputs
        made, like = equation.of_values(operands), replace(equation, operands=operands)
        assert all(getattr(made, name) is getattr(like, name) for name in names)


def test_an_equation_reads_its_operands_but_the_constants() -> None:
    program = trace(lambda x: 2.0 * x + x, (jnp.ones(4),), {}, StepOptions()).program
    (x,), (doubled, added) = program.inputs, program.equations
    assert [type(o) for o in doubled.operands] == [Constant, int]
    assert doubled.inputs == (x,)
    assert replace(doubled, operands=(x, x)).inputs == (x, x)
    assert added.inputs == added.operands

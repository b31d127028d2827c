"""A writer of `Program`s: it numbers values, copies equations and adds new ones.

New equations come from tracing small `jax.numpy` functions, so that no pass has to know how JAX
builds the parameters of its primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.tracer.flatten import flatten_jaxpr

Env = dict[int, Operand]  # value of the program copied -> operand of the program written


def read_all(operands: Iterable[Operand], env: Mapping[int, Operand]) -> list[Operand]:
    """The operands in the program that is written."""
    return [env[o] if isinstance(o, int) else o for o in operands]


class ProgramWriter:
    """The equations of one body; bodies inside it (`inner`) share the numbering."""

    def __init__(self, avals: list[ShapedArray] | None = None) -> None:
        self.avals: list[ShapedArray] = [] if avals is None else avals
        self.equations: list[Equation] = []
        self.captured: list[tuple[int, Any]] = []

    def inner(self) -> ProgramWriter:
        return ProgramWriter(self.avals)

    def new_value(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def aval(self, operand: Operand) -> ShapedArray:
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def capture(self, array: Any, aval: ShapedArray) -> int:
        value = self.new_value(aval)
        self.captured.append((value, array))
        return value

    def program(self, inputs: Sequence[int], outputs: Sequence[Operand]) -> Program:
        return Program(
            tuple(inputs),
            tuple(outputs),
            tuple(self.equations),
            self.avals,
            tuple(self.captured),
        )

    def copy(self, equation: Equation, source: Sequence[ShapedArray], env: Env) -> None:
        """Add an equation of another program whose avals are `source`."""
        operands = tuple(read_all(equation.operands, env))
        bodies = tuple(self.copy_program(body, source) for body in equation.bodies)
        results = tuple(self.new_value(source[r]) for r in equation.results)
        env.update(zip(equation.results, results, strict=True))
        self.equations.append(equation.of_values(operands, results, bodies))

    def copy_program(self, program: Program, source: Sequence[ShapedArray]) -> Program:
        inside, env = self.inner(), Env()
        for value, array in program.captured:
            env[value] = inside.capture(array, source[value])
        inputs = [self.new_value(source[v]) for v in program.inputs]
        env.update(zip(program.inputs, inputs, strict=True))
        for equation in program.equations:
            inside.copy(equation, source, env)
        return inside.program(inputs, read_all(program.outputs, env))

    def scan(
        self,
        body: Program,
        *,
        length: int,
        consts: Sequence[Operand],
        inits: Sequence[Operand],
        xs: Sequence[Operand],
        results: Sequence[int],
        like: Equation,
    ) -> None:
        """Add a scan, with the source line of the equation `like`."""
        sizes = {"num_consts": len(consts), "num_carry": len(inits)}
        self.equations.append(
            Equation(
                primitive=_jax.scan_primitive(),
                params={"length": length, "reverse": False, "unroll": 1, **sizes},
                operands=(*consts, *inits, *xs),
                results=tuple(results),
                scope="",
                name_stack=_jax.empty_name_stack(),
                source_info=like.source_info,
                context=like.context,
                bodies=(body,),
            )
        )

    def emit(
        self,
        function: Callable[..., Any],
        operands: Sequence[Operand],
        like: Equation | None = None,
        **static: Any,
    ) -> Operand:
        """Add the equations of `function(*operands, **static)`, with the names and source line of
        the equation `like`. The result must be one array."""
        types = tuple(_type(self.aval(o)) for o in operands)
        program = _traced(function, types, tuple(sorted(static.items())))
        env: Env = dict(zip(program.inputs, operands, strict=True))
        for value, array in program.captured:
            env[value] = self.capture(array, program.avals[value])
        first = len(self.equations)
        for equation in program.equations:
            self.copy(equation, program.avals, env)
        if like is not None:
            self.equations[first:] = [_named_like(e, like) for e in self.equations[first:]]
        (out,) = read_all(program.outputs, env)
        return out


# -- functions to emit


def zeros(*, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)


def add(first: jax.Array, second: jax.Array) -> jax.Array:
    return first + second


def _named_like(equation: Equation, like: Equation) -> Equation:
    return replace(
        equation,
        scope=like.scope,
        name_stack=like.name_stack,
        source_info=like.source_info,
        callers=like.callers,
        marks=like.marks,
    )


def _type(aval: ShapedArray) -> tuple[tuple[int, ...], Any, bool]:
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


@lru_cache(maxsize=4096)
def _traced(
    function: Callable[..., Any], types: tuple[Any, ...], static: tuple[tuple[str, Any], ...]
) -> Program:
    arguments = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
    traced = jax.jit(partial(function, **dict(static)), keep_unused=True).trace(*arguments)
    return flatten_jaxpr(traced.jaxpr)

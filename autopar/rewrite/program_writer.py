"""Programs written by hand: a writer that numbers values, copies equations and adds new ones.

New equations come from tracing small functions of `jax.numpy`, so that no pass here has to know how
JAX builds the parameters of its primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.tracer.flatten import flatten_jaxpr

Env = dict[int, Operand]  # value of the program that is copied -> operand of the one written


class ProgramWriter:
    """Equations of one scope; scopes inside of it (`inner`) share the numbering."""

    def __init__(self, avals: list[Any] | None = None) -> None:
        self.avals: list[Any] = [] if avals is None else avals
        self.equations: list[Equation] = []
        self.captured: list[tuple[int, Any]] = []

    def inner(self) -> ProgramWriter:
        return ProgramWriter(self.avals)

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def aval(self, operand: Operand) -> Any:
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def capture(self, array: Any, aval: Any) -> int:
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

    def copy(self, equation: Equation, source: Sequence[Any], env: Env) -> None:
        """Add an equation of another program, whose values have the avals `source`."""
        operands = tuple(env[o] if isinstance(o, int) else o for o in equation.operands)
        bodies = tuple(self.copy_program(body, source) for body in equation.bodies)
        results = tuple(self.new_value(source[r]) for r in equation.results)
        env.update(zip(equation.results, results, strict=True))
        self.equations.append(replace(equation, operands=operands, results=results, bodies=bodies))

    def copy_program(self, program: Program, source: Sequence[Any]) -> Program:
        inside, env = self.inner(), Env()
        for value, array in program.captured:
            env[value] = inside.capture(array, source[value])
        inputs = [self.new_value(source[v]) for v in program.inputs]
        env.update(zip(program.inputs, inputs, strict=True))
        for equation in program.equations:
            inside.copy(equation, source, env)
        outputs = [env[o] if isinstance(o, int) else o for o in program.outputs]
        return inside.program(inputs, outputs)

    def emit(
        self,
        function: Callable[..., Any],
        operands: Sequence[Operand],
        like: Equation | None = None,
        **static: Any,
    ) -> Operand:
        """Add the equations of `function(*operands, **static)`; they get the names and the source
        line of the equation `like`. The result must be one array."""
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
        (out,) = program.outputs
        return env[out] if isinstance(out, int) else out


def _named_like(equation: Equation, like: Equation) -> Equation:
    return replace(
        equation,
        scope=like.scope,
        name_stack=like.name_stack,
        source_info=like.source_info,
        callers=like.callers,
        marks=like.marks,
    )


def _type(aval: Any) -> tuple[tuple[int, ...], Any, bool]:
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


@lru_cache(maxsize=4096)
def _traced(
    function: Callable[..., Any], types: tuple[Any, ...], static: tuple[tuple[str, Any], ...]
) -> Program:
    arguments = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
    traced = jax.jit(partial(function, **dict(static)), keep_unused=True).trace(*arguments)
    return flatten_jaxpr(traced.jaxpr)

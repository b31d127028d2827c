"""A jaxpr, flattened: jit, custom derivatives and checkpoint inlined; loops kept as bodies.

`flatten_jaxpr` numbers every value of the program, nested bodies included, so that later passes
speak of plain integers. Inlining substitutes names and evaluates nothing, so it costs far less
than tracing again. `jax.checkpoint` keeps the barrier that JAX itself would put in front of a
rematerialised region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar import _jax

LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True)
class Constant:
    """An operand known while tracing."""

    value: Any
    aval: Any


Operand = int | Constant


@dataclass(frozen=True, slots=True)
class Equation:
    primitive: Any
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    name_stack: Any
    source_info: Any
    context: Any
    bodies: tuple[Program, ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def scope(self) -> str:
        """Transformations and module names, `transpose(jvp(GPT))/Block_0`."""
        return str(self.name_stack)

    @property
    def source_line(self) -> str:
        return _jax.source_line(self.source_info)


@dataclass(frozen=True, slots=True)
class Program:
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    equations: tuple[Equation, ...]
    avals: list[Any]  # by value; shared with nested bodies
    captured: tuple[tuple[int, Any], ...] = ()  # constants closed over: (value, array)

    def num_equations(self) -> int:
        """Equations in all, bodies included."""
        return sum(1 + sum(b.num_equations() for b in e.bodies) for e in self.equations)


def flatten_jaxpr(closed_jaxpr: Any) -> Program:
    return _Flattener().program(closed_jaxpr, prefix=_jax.empty_name_stack())


class _Flattener:
    def __init__(self) -> None:
        self.avals: list[Any] = []

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def program(self, closed_jaxpr: Any, prefix: Any) -> Program:
        jaxpr, consts = _jax.open_jaxpr(closed_jaxpr)
        env: dict[Any, Operand] = {}
        captured = []
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.new_value(var.aval)
            captured.append((env[var], const))
        inputs = []
        for var in jaxpr.invars:
            env[var] = self.new_value(var.aval)
            inputs.append(env[var])
        equations: list[Equation] = []
        self.inline(jaxpr, env, prefix, equations, captured)
        outputs = tuple(self.read(env, atom) for atom in jaxpr.outvars)
        return Program(tuple(inputs), outputs, tuple(equations), self.avals, tuple(captured))

    @staticmethod
    def read(env: dict[Any, Operand], atom: Any) -> Operand:
        if isinstance(atom, _jax.Literal):
            return Constant(atom.val, atom.aval)
        return env[atom]

    def inline(
        self,
        jaxpr: Any,
        env: dict[Any, Operand],
        prefix: Any,
        equations: list[Equation],
        captured: list[tuple[int, Any]],
    ) -> None:
        for eqn in jaxpr.eqns:
            stack = prefix + eqn.source_info.name_stack
            operands = [self.read(env, atom) for atom in eqn.invars]
            body = _jax.call_body(eqn)
            if body is not None:
                operands = self.shield(eqn, operands, stack, equations)
                self.inline_call(eqn, body, operands, env, stack, equations, captured)
                continue
            results = tuple(self.new_value(var.aval) for var in eqn.outvars)
            for var, value in zip(eqn.outvars, results, strict=True):
                env[var] = value
            equations.append(
                Equation(
                    primitive=eqn.primitive,
                    params=eqn.params,
                    operands=tuple(operands),
                    results=results,
                    name_stack=stack,
                    source_info=eqn.source_info,
                    context=eqn.ctx,
                    bodies=tuple(self.program(b, stack) for b in _loop_bodies(eqn)),
                )
            )

    def inline_call(
        self,
        eqn: Any,
        body: Any,
        operands: Sequence[Operand],
        env: dict[Any, Operand],
        stack: Any,
        equations: list[Equation],
        captured: list[tuple[int, Any]],
    ) -> None:
        inner, consts = _jax.open_jaxpr(body)
        inner_env: dict[Any, Operand] = {}
        for var, const in zip(inner.constvars, consts, strict=True):
            inner_env[var] = self.new_value(var.aval)
            captured.append((inner_env[var], const))
        inner_env.update(zip(inner.invars, operands, strict=True))
        self.inline(inner, inner_env, stack, equations, captured)
        for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
            env[var] = self.read(inner_env, atom)

    def shield(
        self, eqn: Any, operands: list[Operand], stack: Any, equations: list[Equation]
    ) -> list[Operand]:
        """Put the barrier of a rematerialised region in front of its operands."""
        mask = _jax.remat_barrier_mask(eqn)
        kept = [i for i, on in enumerate(mask) if on and isinstance(operands[i], int)]
        if not kept:
            return operands
        results = tuple(self.new_value(self.avals[operands[i]]) for i in kept)  # type: ignore[index]
        equations.append(
            Equation(
                primitive=_jax.optimization_barrier_primitive(),
                params={},
                operands=tuple(operands[i] for i in kept),
                results=results,
                name_stack=stack,
                source_info=eqn.source_info,
                context=eqn.ctx,
            )
        )
        shielded = list(operands)
        for i, value in zip(kept, results, strict=True):
            shielded[i] = value
        return shielded


def _loop_bodies(eqn: Any) -> tuple[Any, ...]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return (params["jaxpr"],)
    if name == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    if name == "cond":
        return tuple(params["branches"])
    return ()

"""A jaxpr, flattened: jit, custom derivatives and checkpoint inlined; loops kept as bodies.

`flatten_jaxpr` numbers every value of the program, nested bodies included, so that later passes
speak of plain integers. Inlining substitutes names and evaluates nothing, so it costs far less
than tracing again. `jax.checkpoint` keeps the barrier that JAX itself would put in front of a
rematerialised region. Marks of layer boundaries are no equations: each equation knows those before
it, so that no pass but `rewrite.layer_boundaries` sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar import _jax

LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True, slots=True)
class Constant:
    """An operand known while tracing."""

    value: Any
    aval: Any


Operand = int | Constant


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive applied.

    scope:      transformations and module names, `transpose(jvp(GPT))/Block_0`.
    name_stack: the same as JAX holds it; in the body of a loop, relative to the loop.
    callers:    sources of the inlined calls around it, the innermost first.
    has_effect: it does more than compute its results (a print, a callback, a write).
    marks:      lines of the layer boundaries that the user marked before it in the forward pass.
    inner_marks: those in loops: its own or, where JAX moved a mark out of its loop, the next one.
    """

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    scope: str
    name_stack: Any
    source_info: Any
    context: Any
    callers: tuple[Any, ...] = ()
    has_effect: bool = False
    bodies: tuple[Program, ...] = ()
    marks: tuple[str, ...] = ()
    inner_marks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def source_line(self) -> str:
        """Where the user's code made it. A function of JAX that is itself jitted is traced once
        for all its callers and knows none of their lines; then the call's own line is given."""
        return _line(self.source_info, self.callers)


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A value that the user named; `vmapped` are its dimensions that `vmap` added."""

    name: str
    value: int
    vmapped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    equations: tuple[Equation, ...]
    avals: list[Any]  # by value; shared with nested bodies
    captured: tuple[tuple[int, Any], ...] = ()  # constants closed over: (value, array)

    def named_values(self) -> Iterator[NamedValue]:
        """What `autopar.constrain` named, bodies included, in program order."""
        for equation in self.equations:
            if equation.name == _jax.CONSTRAIN:
                params = equation.params
                yield NamedValue(params["name"], equation.results[0], params["vmapped"])
            for body in equation.bodies:
                yield from body.named_values()

    def num_equations(self) -> int:
        """Equations in all, bodies included."""
        return sum(1 + sum(b.num_equations() for b in e.bodies) for e in self.equations)


def flatten_jaxpr(closed_jaxpr: Any) -> Program:
    empty = _jax.empty_name_stack()
    return _Flattener().program(closed_jaxpr, _ValuePlace(empty, empty, ()))


class _ValuePlace:
    """Where in the user's modules equations stand. Equations of one module share one place, since
    making its text for each of them would take longer than all else here."""

    __slots__ = ("_inner", "callers", "full_stack", "name_stack", "scope")

    def __init__(self, name_stack: Any, full_stack: Any, callers: tuple[Any, ...]) -> None:
        self.name_stack = name_stack
        self.full_stack = full_stack
        self.callers = callers
        self.scope = str(full_stack)
        self._inner: dict[Any, _ValuePlace] = {}

    def below(self, name_stack: Any) -> _ValuePlace:
        """The place of an equation that has this name stack here."""
        if not len(name_stack):
            return self
        found = self._inner.get(name_stack)
        if found is None:
            found = _ValuePlace(
                self.name_stack + name_stack, self.full_stack + name_stack, self.callers
            )
            self._inner[name_stack] = found
        return found

    def called_from(self, source_info: Any) -> _ValuePlace:
        return _ValuePlace(self.name_stack, self.full_stack, (source_info, *self.callers))

    def in_loop(self, source_info: Any) -> _ValuePlace:
        """The place of a loop's body: JAX puts the loop's own stack in front when it lowers."""
        return _ValuePlace(_jax.empty_name_stack(), self.full_stack, (source_info, *self.callers))


class _Flattener:
    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.marks: tuple[str, ...] = ()  # so far
        self.inner_marks: tuple[str, ...] = ()  # of a loop, for the next equation to hold

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def program(self, closed_jaxpr: Any, place: _ValuePlace) -> Program:
        jaxpr, consts = _jax.open_jaxpr(closed_jaxpr)
        env: dict[Any, Operand] = {}
        captured: list[tuple[int, Any]] = []
        self.capture(jaxpr, consts, env, captured)
        inputs = tuple(self.new_value(var.aval) for var in jaxpr.invars)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        equations: list[Equation] = []
        self.inline(jaxpr, env, place, equations, captured)
        outputs = tuple(_read(env, atom) for atom in jaxpr.outvars)
        return Program(inputs, outputs, tuple(equations), self.avals, tuple(captured))

    def capture(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        env: dict[Any, Operand],
        captured: list[tuple[int, Any]],
    ) -> None:
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            value = self.new_value(var.aval)
            env[var] = value
            captured.append((value, const))

    def inline(
        self,
        jaxpr: Any,
        env: dict[Any, Operand],
        around: _ValuePlace,
        equations: list[Equation],
        captured: list[tuple[int, Any]],
    ) -> None:
        for eqn in jaxpr.eqns:
            source_info = eqn.source_info
            place = around.below(source_info.name_stack)
            operands = [_read(env, atom) for atom in eqn.invars]
            if eqn.primitive.name == _jax.LAYER_BOUNDARY:
                self.mark(eqn, place)
                continue
            body = _jax.call_body(eqn)
            if body is not None:
                operands = self.shield(eqn, operands, place, equations)
                operands = [operands[i] for i in _jax.call_operands(eqn)]
                inner, consts = _jax.open_jaxpr(body)
                inner_env: dict[Any, Operand] = {}
                self.capture(inner, consts, inner_env, captured)
                inner_env.update(zip(inner.invars, operands, strict=True))
                self.inline(inner, inner_env, place.called_from(source_info), equations, captured)
                for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                    env[var] = _read(inner_env, atom)
                continue
            results = tuple(self.new_value(var.aval) for var in eqn.outvars)
            env.update(zip(eqn.outvars, results, strict=True))
            bodies, inner_marks = self.bodies(eqn, place)
            equations.append(
                Equation(
                    eqn.primitive,
                    _jax.parameters(eqn),
                    tuple(operands),
                    results,
                    place.scope,
                    place.name_stack,
                    source_info,
                    eqn.ctx,
                    place.callers,
                    _jax.has_effect(eqn),
                    bodies,
                    self.marks,
                    inner_marks,
                )
            )

    def bodies(self, eqn: Any, place: _ValuePlace) -> tuple[tuple[Program, ...], tuple[str, ...]]:
        """The bodies of a loop, and the marks in them and those that were moved here."""
        marks, moved = self.marks, self.inner_marks
        self.inner_marks = ()
        inside = place.in_loop(eqn.source_info)
        bodies = tuple(self.program(body, inside) for body in _loop_bodies(eqn))
        found = [mark for b in bodies for e in b.equations for mark in e.inner_marks]
        found += [f"{eqn.primitive.name} body: {line}" for line in self.marks[len(marks) :]]
        found += self.inner_marks
        self.marks, self.inner_marks = marks, ()
        return bodies, (*moved, *found)

    def mark(self, eqn: Any, place: _ValuePlace) -> None:
        """A layer boundary of the forward pass. If it was written in a loop's body, JAX may have
        moved it in front of the loop: then the next equation tells of it."""
        line, loop = _line(eqn.source_info, place.callers), eqn.params["loop"]
        if "transpose(" in place.scope:
            return
        if loop is not None:
            self.inner_marks = (*self.inner_marks, f"{loop} body: {line}")
        else:
            self.marks = (*self.marks, line)

    def shield(
        self, eqn: Any, operands: list[Operand], place: _ValuePlace, equations: list[Equation]
    ) -> list[Operand]:
        """Put the barrier of a rematerialised region in front of its operands."""
        mask = _jax.remat_barrier_mask(eqn)
        kept = {i: o for i, o in enumerate(operands) if mask[i] and isinstance(o, int)}
        if not kept:
            return operands
        results = {i: self.new_value(self.avals[o]) for i, o in kept.items()}
        equations.append(
            Equation(
                primitive=_jax.optimization_barrier_primitive(),
                params={},
                operands=tuple(kept.values()),
                results=tuple(results.values()),
                scope=place.scope,
                name_stack=place.name_stack,
                source_info=eqn.source_info,
                context=eqn.ctx,
                callers=place.callers,
                marks=self.marks,
            )
        )
        return [results.get(i, o) for i, o in enumerate(operands)]


def _line(source_info: Any, callers: tuple[Any, ...]) -> str:
    lines = (_jax.source_line(source) for source in (source_info, *callers))
    return next((line for line in lines if line), "an unknown line")


def _read(env: dict[Any, Operand], atom: Any) -> Operand:
    if isinstance(atom, _jax.Literal):
        return Constant(atom.val, atom.aval)
    return env[atom]


def _loop_bodies(eqn: Any) -> tuple[Any, ...]:
    name, params = eqn.primitive.name, _jax.parameters(eqn)
    if name == "scan":
        return (params["jaxpr"],)
    if name == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    if name == "cond":
        return tuple(params["branches"])
    return ()

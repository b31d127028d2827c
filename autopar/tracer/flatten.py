"""From a jaxpr to a `Program`: jit, custom derivatives and checkpoint inlined; loops keep bodies.

Inlining substitutes values and evaluates nothing, so it costs far less than tracing again.
Equations that simpler ones can write become those (`tracer.simpler_equations`).
`jax.checkpoint` keeps the barrier that JAX would put in front of a rematerialised region. Marks of
layer boundaries become no equations: each equation knows the marks before it, and only
`rewrite.layer_boundaries` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import LOOPS, Constant, Equation, Operand, Program, source_line
from autopar.tracer.simpler_equations import is_simple, simpler_jaxpr


def flatten_jaxpr(closed_jaxpr: Any) -> Program:
    empty = _jax.empty_name_stack()
    return _Flattener().program(closed_jaxpr, _Scope(empty, empty, ()))


class _Scope:
    """The user's modules around equations. Equations of one module share one scope: writing its
    text for each of them would take longer than everything else here."""

    __slots__ = ("_inner", "callers", "full_stack", "name_stack", "text")

    def __init__(
        self,
        name_stack: _jax.NameStack,
        full_stack: _jax.NameStack,
        callers: tuple[_jax.SourceInfo, ...],
    ) -> None:
        self.name_stack = name_stack
        self.full_stack = full_stack
        self.callers = callers
        self.text = str(full_stack)
        self._inner: dict[_jax.NameStack, _Scope] = {}

    def below(self, name_stack: _jax.NameStack) -> _Scope:
        """The scope of an equation that has this name stack in here."""
        if not len(name_stack):
            return self
        inner = self._inner.get(name_stack)
        if inner is None:
            inner = _Scope(self.name_stack + name_stack, self.full_stack + name_stack, self.callers)
            self._inner[name_stack] = inner
        return inner

    def called_from(self, source_info: _jax.SourceInfo) -> _Scope:
        return _Scope(self.name_stack, self.full_stack, (source_info, *self.callers))

    def in_loop(self, source_info: _jax.SourceInfo) -> _Scope:
        """The scope of a loop's body: JAX puts the loop's stack in front when it lowers."""
        return _Scope(_jax.empty_name_stack(), self.full_stack, (source_info, *self.callers))


class _Flattener:
    def __init__(self) -> None:
        self.avals: list[ShapedArray] = []
        self.marks: tuple[str, ...] = ()  # before the next equation
        self.inner_marks: tuple[str, ...] = ()  # of a loop, moved in front of the next equation

    def new_value(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def new_results(self, eqn: Any, env: dict[Any, Operand]) -> tuple[int, ...]:
        results = tuple(self.new_value(var.aval) for var in eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
        return results

    def program(self, closed_jaxpr: Any, scope: _Scope) -> Program:
        jaxpr, consts = _jax.open_jaxpr(closed_jaxpr)
        env: dict[Any, Operand] = {}
        captured: list[tuple[int, Any]] = []
        self.capture(jaxpr, consts, env, captured)
        inputs = tuple(self.new_value(var.aval) for var in jaxpr.invars)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        equations: list[Equation] = []
        self.inline(jaxpr, env, scope, equations, captured)
        outputs = tuple(self.read(atom, env, captured) for atom in jaxpr.outvars)
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

    def read(self, atom: Any, env: dict[Any, Operand], captured: list[tuple[int, Any]]) -> Operand:
        """The operand for an atom of a jaxpr. Only scalars stay constants: a literal array
        (`jax_use_simplified_jaxpr_constants`) is captured, like one of the jaxpr's constants."""
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        assert isinstance(atom.aval, ShapedArray)
        if not atom.aval.shape:
            return Constant(atom.val, atom.aval)
        value = self.new_value(atom.aval)
        captured.append((value, atom.val))
        return value

    def inline(
        self,
        jaxpr: Any,
        env: dict[Any, Operand],
        outer: _Scope,
        equations: list[Equation],
        captured: list[tuple[int, Any]],
        written: _jax.JaxprEqn | None = None,
    ) -> None:
        """Append the jaxpr's equations, at the user's line if `written` is what the user wrote."""
        read = frozenset() if all(map(is_simple, jaxpr.eqns)) else _read_in(jaxpr)
        for eqn in jaxpr.eqns:
            source_info = (written or eqn).source_info
            scope = outer.below(source_info.name_stack)
            operands = [self.read(atom, env, captured) for atom in eqn.invars]
            if eqn.primitive.name == _jax.LAYER_BOUNDARY:
                self.mark(eqn, scope)
                continue
            if _goes_nowhere(eqn):
                env.update(zip(eqn.outvars, operands, strict=True))
                continue
            body = _jax.call_body(eqn)
            if body is not None:
                operands = self.shield(eqn, operands, scope, equations)
                operands = [operands[i] for i in _jax.call_operands(eqn)]
                inner, consts = _jax.open_jaxpr(body)
                inner_env: dict[Any, Operand] = {}
                self.capture(inner, consts, inner_env, captured)
                inner_env.update(zip(inner.invars, operands, strict=True))
                self.inline(inner, inner_env, scope.called_from(source_info), equations, captured)
                for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                    env[var] = self.read(atom, inner_env, captured)
                continue
            if not is_simple(eqn):
                kept = [i for i, var in enumerate(eqn.outvars) if var in read]
                inner, _ = _jax.open_jaxpr(simpler_jaxpr(eqn, kept))
                inner_env = dict(zip(inner.invars, operands, strict=True))
                self.inline(inner, inner_env, outer, equations, captured, written=eqn)
                for i, atom in zip(kept, inner.outvars, strict=True):
                    env[eqn.outvars[i]] = self.read(atom, inner_env, captured)
                continue
            results = self.new_results(eqn, env)
            bodies, inner_marks = self.bodies(eqn, scope)
            equations.append(
                Equation(
                    primitive=eqn.primitive,
                    params=_jax.parameters(eqn),
                    operands=tuple(operands),
                    results=results,
                    scope=scope.text,
                    name_stack=scope.name_stack,
                    source_info=source_info,
                    context=(written or eqn).ctx,
                    callers=scope.callers,
                    has_effect=_jax.has_effect(eqn),
                    bodies=bodies,
                    marks=self.marks,
                    inner_marks=inner_marks,
                )
            )

    def bodies(
        self, eqn: _jax.JaxprEqn, scope: _Scope
    ) -> tuple[tuple[Program, ...], tuple[str, ...]]:
        """The bodies of a loop, and the marks in them or moved in front of the loop."""
        marks, moved = self.marks, self.inner_marks
        self.inner_marks = ()
        if not (jaxprs := _loop_bodies(eqn)):
            return (), moved
        inside = scope.in_loop(eqn.source_info)
        bodies = tuple(self.program(body, inside) for body in jaxprs)
        inner_marks = [mark for b in bodies for e in b.equations for mark in e.inner_marks]
        inner_marks += [f"{eqn.primitive.name} body: {line}" for line in self.marks[len(marks) :]]
        inner_marks += self.inner_marks
        self.marks, self.inner_marks = marks, ()
        return bodies, (*moved, *inner_marks)

    def mark(self, eqn: _jax.JaxprEqn, scope: _Scope) -> None:
        """Note a layer boundary of the forward pass. JAX may have moved one out of a loop's body,
        in front of the loop; then the next equation takes it as an inner mark."""
        line, loop = source_line(eqn.source_info, scope.callers), eqn.params["loop"]
        if "transpose(" in scope.text:
            return
        if loop is not None:
            self.inner_marks = (*self.inner_marks, f"{loop} body: {line}")
        else:
            self.marks = (*self.marks, line)

    def shield(
        self, eqn: _jax.JaxprEqn, operands: list[Operand], scope: _Scope, equations: list[Equation]
    ) -> list[Operand]:
        """Put the barrier of a rematerialised region in front of its operands."""
        mask = _jax.remat_barrier_mask(eqn)
        shielded = {i: o for i, o in enumerate(operands) if mask[i] and isinstance(o, int)}
        if not shielded:
            return operands
        results = {i: self.new_value(self.avals[o]) for i, o in shielded.items()}
        equations.append(
            Equation(
                primitive=_jax.optimization_barrier_primitive(),
                params={},
                operands=tuple(shielded.values()),
                results=tuple(results.values()),
                scope=scope.text,
                name_stack=scope.name_stack,
                source_info=eqn.source_info,
                context=eqn.ctx,
                callers=scope.callers,
                marks=self.marks,
            )
        )
        return [results.get(i, o) for i, o in enumerate(operands)]


def _goes_nowhere(eqn: _jax.JaxprEqn) -> bool:
    """Whether it is a `jax.device_put` that names no device, as JAX's linear solvers have."""
    if eqn.primitive.name != "device_put":
        return False
    return all(device is None for device in _jax.parameters(eqn)["devices"])


def _read_in(jaxpr: Any) -> frozenset[Any]:
    """The variables that the jaxpr returns or one of its equations reads."""
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    return frozenset(atom for atom in atoms if not isinstance(atom, _jax.Literal))


def _loop_bodies(eqn: _jax.JaxprEqn) -> tuple[Any, ...]:
    name = eqn.primitive.name
    if name not in LOOPS:
        return ()
    params = _jax.parameters(eqn)
    if name == "scan":
        return (params["jaxpr"],)
    if name == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    return tuple(params["branches"])

"""A flattened jaxpr: the `Program` that every pass before the plan reads and rewrites.

Values are numbered 0, 1, 2, … through the whole program, loop bodies included, so passes work on
plain integers. `tracer.flatten` makes a program from a jaxpr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jax.core import ShapedArray

from autopar import _jax

LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True, slots=True)
class Constant:
    """An operand known while tracing."""

    value: Any
    aval: ShapedArray


Operand = int | Constant


def values_in(operands: Iterable[Operand]) -> list[int]:
    """The operands that are values, without the constants; repetitions stay."""
    return [o for o in operands if isinstance(o, int)]


@dataclass(frozen=True, slots=True)
class Equation:
    """One application of a primitive.

    scope:       transformations and module names, `transpose(jvp(GPT))/Block_0`.
    name_stack:  the scope as JAX stores it; in a loop's body, relative to the loop.
    callers:     source infos of the inlined calls around it, innermost first.
    has_effect:  it does more than compute its results (a print, a callback, a write).
    marks:       lines of the layer boundaries marked before it in the forward pass.
    inner_marks: lines of marks in its bodies, or moved in front of it out of a loop by JAX.
    inputs:      the values it reads: its operands without the constants.
    """

    primitive: _jax.Primitive
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    scope: str
    name_stack: _jax.NameStack
    source_info: _jax.SourceInfo
    context: _jax.EquationContext
    callers: tuple[_jax.SourceInfo, ...] = ()
    has_effect: bool = False
    bodies: tuple[Program, ...] = ()
    marks: tuple[str, ...] = ()
    inner_marks: tuple[str, ...] = ()
    inputs: tuple[int, ...] = field(init=False, repr=False, compare=False)  # every pass reads them

    def __post_init__(self) -> None:
        inputs = tuple([o for o in self.operands if isinstance(o, int)])
        object.__setattr__(self, "inputs", inputs)

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def source_line(self) -> str:
        """The line of the user's code that made it.

        JAX traces a jitted function of its own once for all callers, without their lines; its
        equations get the line of the call.
        """
        return source_line(self.source_info, self.callers)

    def of_values(
        self,
        operands: tuple[Operand, ...],
        results: tuple[int, ...] | None = None,
        bodies: tuple[Program, ...] | None = None,
        params: dict[str, Any] | None = None,
    ) -> Equation:
        """The equation with other values, as by `dataclasses.replace`, in a third of its time:
        rewrites copy every equation of a program."""
        return Equation(
            self.primitive,
            self.params if params is None else params,
            operands,
            self.results if results is None else results,
            self.scope,
            self.name_stack,
            self.source_info,
            self.context,
            self.callers,
            self.has_effect,
            self.bodies if bodies is None else bodies,
            self.marks,
            self.inner_marks,
        )

    def with_bodies(self) -> Iterator[Equation]:
        """The equation itself, then all equations of its bodies, in program order."""
        yield self
        for body in self.bodies:
            yield from body.all_equations()

    def num_equations(self) -> int:
        """The number of equations in it: itself and those of its bodies."""
        return 1 + sum([body.num_equations() for body in self.bodies])


def source_line(source_info: _jax.SourceInfo, callers: tuple[_jax.SourceInfo, ...]) -> str:
    lines = (_jax.source_line(source) for source in (source_info, *callers))
    return next((line for line in lines if line), "an unknown line")


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A value that the user named; `vmapped` are the dimensions that `vmap` added to it."""

    name: str
    value: int
    vmapped: tuple[int, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """Equations in order, from `inputs` to `outputs`; a loop's body is a program too."""

    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    equations: tuple[Equation, ...]
    avals: list[ShapedArray]  # by value; one list for a program and all its bodies
    captured: tuple[tuple[int, Any], ...] = ()  # constants closed over: (value, array)

    @property
    def output_values(self) -> list[int]:
        """The outputs that are values, without the constants."""
        return values_in(self.outputs)

    def producers(self) -> dict[int, int]:
        """{value: index of the equation that computes it}, without bodies."""
        return {value: i for i, e in enumerate(self.equations) for value in e.results}

    def readers(self) -> dict[int, list[int]]:
        """{value: indices of the equations that read it}, without bodies."""
        readers: dict[int, list[int]] = {}
        for index, equation in enumerate(self.equations):
            for value in equation.inputs:
                readers.setdefault(value, []).append(index)
        return readers

    def num_reads(self) -> Counter[int]:
        """How often equations and outputs read each value, without bodies."""
        operands = chain(self.outputs, *[equation.operands for equation in self.equations])
        return Counter([o for o in operands if isinstance(o, int)])

    def made_of_constants(self) -> set[int]:
        """Values that depend on no input, such as the zeros that a gradient is filled with."""
        made = {value for value, _ in self.captured}
        for equation in self.equations:
            if made.issuperset(equation.inputs) and not equation.has_effect:
                made.update(equation.results)
        return made

    def all_equations(self) -> Iterator[Equation]:
        """The equations in program order, each followed by those of its bodies."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.all_equations()

    def named_values(self) -> Iterator[NamedValue]:
        """The values named with `autopar.constrain`, bodies included, in program order."""
        for equation in self.all_equations():
            if equation.name == _jax.CONSTRAIN:
                params = equation.params
                yield NamedValue(params["name"], equation.results[0], params["vmapped"])

    def num_equations(self) -> int:
        """The number of equations, bodies included."""
        bodies = (body for equation in self.equations for body in equation.bodies)
        return len(self.equations) + sum(body.num_equations() for body in bodies)

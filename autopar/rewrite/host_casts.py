"""Parameters in host memory: which can lie there, and the step with their casts first.

A float32 parameter that is computed with in bfloat16 is read twice: by a cast, and by its update.
Between the two only the narrow copy is needed. So the casts come first, group by group, each with
the parameters that it fetches, and every other reader of such a parameter is in the update. A
recomputation reads the parameter once more, behind a barrier, and casts it again; that cast is the
first one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.ir.graph import HEAVY
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.costs import aval_bytes

_BARRIER = "optimization_barrier"


@dataclass(frozen=True)
class CastParameter:
    """A parameter of which all but the update reads a narrower copy.

    casts:    the equations that make its copies, one per type.
    repeats:  later casts of it, with the first to the same type.
    barriers: what else reads it before the update.
    """

    casts: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]
    barriers: tuple[int, ...]

    @property
    def equations(self) -> tuple[int, ...]:
        """All that read it before its update."""
        return (*self.casts, *(index for index, _ in self.repeats), *self.barriers)


def cast_parameters(
    program: Program, values: Collection[int], seen: Set[int]
) -> dict[int, CastParameter]:
    """Those of the `values`, inputs of a program, that are cast to a narrower type, and else read
    by elementwise equations on which no value `seen` before the update depends."""
    readers = program.readers()
    found = {}
    for value in values:
        cast = _casts_of(program, value, readers, seen)
        if cast is not None:
            found[value] = cast
    return found


def _casts_of(
    program: Program, value: int, readers: dict[int, list[int]], seen: Set[int]
) -> CastParameter | None:
    first: dict[str, int] = {}  # type -> equation
    repeats, barriers = [], []
    outputs = set(program.output_values)
    if value in outputs:
        return None
    for index in sorted({i for v in _same(program, value, readers) for i in readers.get(v, ())}):
        equation = program.equations[index]
        if equation.name == _BARRIER:
            barriers.append(index)
        elif _narrows(program, equation):
            if equation.results[0] in outputs:
                return None
            name = str(program.avals[equation.results[0]].dtype)
            if first.setdefault(name, index) != index:
                repeats.append((index, first[name]))
        elif not _is_of_update(equation, seen):
            return None
    if not first:
        return None
    return CastParameter(tuple(first.values()), tuple(repeats), tuple(barriers))


def _narrows(program: Program, equation: Equation) -> bool:
    if equation.name != "convert_element_type":
        return False
    (value,), (result,) = equation.inputs, equation.results
    return aval_bytes(program.avals[result]) < aval_bytes(program.avals[value])


def _is_of_update(equation: Equation, seen: Set[int]) -> bool:
    is_small = not equation.bodies and equation.name not in HEAVY
    return is_small and not equation.has_effect and seen.isdisjoint(equation.results)


def _same(program: Program, value: int, readers: dict[int, list[int]]) -> list[int]:
    """A value and what barriers make of it."""
    same = [value]
    for one in same:
        for index in readers.get(one, ()):
            equation = program.equations[index]
            if equation.name == _BARRIER:
                pairs = zip(equation.operands, equation.results, strict=True)
                same += [result for operand, result in pairs if operand == one]
    return same


def with_casts_once(step: TracedStep, cast: Mapping[int, CastParameter]) -> TracedStep:
    """The step with each parameter cast once to each type, and in no barrier."""
    program = step.program
    readers = program.readers()
    names: dict[int, int] = {}
    for value, parameter in cast.items():
        names.update(dict.fromkeys(_same(program, value, readers)[1:], value))
        for index, first in parameter.repeats:
            again, made = (program.equations[i].results[0] for i in (index, first))
            names[again] = made
    repeated = {index for parameter in cast.values() for index, _ in parameter.repeats}
    kept = {}
    for index, equation in enumerate(program.equations):
        if index in repeated:
            continue
        if equation.name == _BARRIER:
            pairs = zip(equation.operands, equation.results, strict=True)
            pairs = [(operand, result) for operand, result in pairs if result not in names]
            if not pairs:
                continue
            operands, results = zip(*pairs, strict=True)
            equation = replace(equation, operands=operands, results=results)
        kept[index] = replace(equation, operands=_renamed(equation.operands, names))
    outputs = _renamed(program.outputs, names)
    return replace(
        step,
        program=replace(program, equations=tuple(kept.values()), outputs=outputs),
        loop=None if step.loop is None else list(kept).index(step.loop),
    )


def _renamed(operands: Sequence[Operand], names: Mapping[int, int]) -> tuple[Operand, ...]:
    return tuple(names.get(o, o) if isinstance(o, int) else o for o in operands)

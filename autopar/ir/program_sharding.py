"""How a program is annotated: the layouts of every operand and result, as a plan stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.spec import PARTIAL, Layout

Chain = tuple[Layout, ...]  # the layouts that a value is resharded through, in order


@dataclass(frozen=True)
class UnreducedAxes:
    """Partial sums kept as data: one addend per rank of each axis, in leading dimensions of the
    array (*lanes*) that those axes split. A layout that is `PARTIAL` along an axis means such an
    array.

    axes:     the axes with lanes, in mesh order.
    operands: the layout each operand is read in; None for constants. An operand that is `PARTIAL`
              along an axis has lanes already; a dimension that an axis splits is cut into lanes.
    """

    axes: tuple[int, ...]
    operands: tuple[Layout | None, ...]


@dataclass(frozen=True)
class EquationSharding:
    """operands:  the layouts that each operand is resharded through before its use.
    results:   the layouts that each result is resharded through; empty where the compiler decides
               (partial sums).
    local:     layouts of operands and of results, for an operator that every device applies to its
               own shards; empty otherwise.
    refetched: operands that are resharded again, so that an earlier copy need not be kept.
    """

    operands: tuple[Chain, ...]
    results: tuple[Chain, ...]
    bodies: tuple[ProgramSharding, ...] = ()
    local: tuple[tuple[Layout, ...], ...] = ()
    refetched: tuple[Refetch, ...] = ()
    lanes: UnreducedAxes | None = None


@dataclass(frozen=True)
class Refetch:
    """An operand, by its position, that shares the first `num_shared` layouts of its chain with
    earlier uses. It is resharded through the others again, once the value `after` exists."""

    operand: int
    num_shared: int
    after: int


@dataclass(frozen=True)
class ProgramSharding:
    """Layouts of inputs (None for constants), equations in order, and outputs."""

    inputs: tuple[Layout | None, ...]
    equations: tuple[EquationSharding, ...]
    outputs: tuple[Chain, ...]


def renumbered(program: ProgramSharding, number: Mapping[int, int]) -> ProgramSharding:
    """The layouts of an equal program. `number`: value -> the other program's in its place."""

    def of_equation(equation: EquationSharding) -> EquationSharding:
        if not (equation.refetched or equation.bodies):
            return equation
        return replace(
            equation,
            bodies=tuple(renumbered(body, number) for body in equation.bodies),
            refetched=tuple(replace(r, after=number[r.after]) for r in equation.refetched),
        )

    return replace(program, equations=tuple(map(of_equation, program.equations)))


def check_program_sharding(
    program: ProgramSharding, num_axes: int, where: str, smallest_entry: int
) -> None:
    """`PlanError` unless layouts have an entry per mesh axis and counts agree. Entries of inputs
    and outputs are at least `smallest_entry`; between them, and in bodies of loops, values may be
    `PARTIAL`."""

    def check(layout: Layout | None, smallest: int = PARTIAL) -> None:
        if layout is not None and (len(layout) != num_axes or any(e < smallest for e in layout)):
            raise PlanError(f"{where}: a layout {layout} for a mesh of {num_axes} axes.")

    for layout in (*program.inputs, *(layout for chain in program.outputs for layout in chain)):
        check(layout, smallest_entry)
    for equation in {id(e): e for e in program.equations}.values():  # equal layers share theirs
        for chain in (*equation.operands, *equation.results, *equation.local):
            for layout in chain:
                check(layout)
        counts = [len(group) for group in equation.local]
        if counts not in ([], [len(equation.operands), len(equation.results)]):
            raise PlanError(f"{where}: local layouts {equation.local} of an equation.")
        for again in equation.refetched:
            known = 0 <= again.operand < len(equation.operands) and again.after >= 0
            if not known or not 0 <= again.num_shared <= len(equation.operands[again.operand]):
                raise PlanError(f"{where}: an operand cannot be fetched again as {again}.")
        if equation.lanes is not None:
            _check_lanes(equation.lanes, len(equation.operands), num_axes, where)
            for layout in equation.lanes.operands:
                check(layout)
        for body in equation.bodies:
            check_program_sharding(body, num_axes, where, smallest_entry=PARTIAL)


def _check_lanes(lanes: UnreducedAxes, num_operands: int, num_axes: int, where: str) -> None:
    in_order = tuple(sorted(set(lanes.axes))) == lanes.axes
    in_range = all(0 <= axis < num_axes for axis in lanes.axes)
    if not lanes.axes or not in_order or not in_range or len(lanes.operands) != num_operands:
        raise PlanError(f"{where}: lanes {lanes} for a mesh of {num_axes} axes.")

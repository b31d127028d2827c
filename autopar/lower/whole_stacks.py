"""Stacks of layers where a stage program would stack their rows again.

The update of a scanned model puts the gradients of its layers together. Where a loop has written
these as a stack already, the stage program reads the stack instead of its rows: all of what is put
together, or a stretch of it if a layer at the end stayed outside of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.core import ShapedArray

from autopar.ir.pipeline import Ref
from autopar.ir.program import Constant, Equation, Operand
from autopar.ir.program_sharding import EquationSharding
from autopar.ir.spec import Layout
from autopar.lower.stage_bodies import Entry, StageProgramBody, stacked_layout


@dataclass(frozen=True)
class StackGroup:
    """Buffers of a stage, one per layer, that become the rows of a stack."""

    members: tuple[int, ...]
    micro_batch: int | None
    stack: int  # the value of its buffer
    layout: Layout | None  # of a row
    aval: ShapedArray  # of a row

    @property
    def ref(self) -> Ref:
        return Ref(self.stack, self.micro_batch)


def with_whole_stacks(
    body: StageProgramBody, groups: Sequence[StackGroup], new_value: Callable[[ShapedArray], int]
) -> StageProgramBody:
    """The stage program with a stack where equations stack its rows again."""
    rows = {e.value: e for e in body.entries if e.row is not None}
    maker = {r: e for e in body.equations for r in e.results}
    whole: list[Entry] = []
    kept: list[tuple[int, Equation, EquationSharding]] = []
    for index, item in enumerate(zip(body.equations, body.shardings, strict=True)):
        equation, sharding = item
        sources = [_row_behind(o, maker, rows) for o in equation.operands]
        found = _stack_in(body, groups, equation, sharding, sources)
        if found is None:
            kept.append((index, *item))
            continue
        group, stretch = found
        is_all = len(stretch) == len(sources)
        first = sources[stretch.start]
        assert first is not None
        chain = [stacked_layout(layout) for layout in first.chain]
        chain += sharding.results[0] if is_all else ()
        value = equation.results[0] if is_all else new_value(body.avals[group.stack])
        layouts = tuple(layout for layout in chain if layout is not None)
        whole.append(Entry((group.ref,), value, stacked_layout(group.layout), layouts))
        if not is_all:
            kept.append((index, *_with_operand(equation, sharding, stretch, value)))
    if not whole:
        return body
    loops = tuple((sum(k < position for k, *_ in kept), loop) for position, loop in body.loops)
    return replace(
        body,
        entries=(*body.entries, *whole),
        equations=tuple(equation for _, equation, _ in kept),
        shardings=tuple(sharding for *_, sharding in kept),
        loops=loops,
    )


def _stack_in(
    body: StageProgramBody,
    groups: Sequence[StackGroup],
    equation: Equation,
    sharding: EquationSharding,
    sources: Sequence[Entry | None],
) -> tuple[StackGroup, range] | None:
    """(a group, the operands that are all of its rows in order) if the equation stacks them."""
    if equation.name != "concatenate" or equation.params["dimension"] != 0:
        return None
    for start, first in enumerate(sources):
        group = next((g for g in groups if first and g.ref == first.refs[0]), None)
        if first is None or first.row != 0 or group is None:
            continue
        stretch = range(start, start + len(group.members))
        if stretch.stop > len(sources):
            continue
        operands = [equation.operands[n] for n in stretch]
        shapes = {tuple(body.avals[o].shape) for o in operands if isinstance(o, int)}
        found = [s and (s.refs[0], s.row, s.chain) for s in (sources[n] for n in stretch)]
        wanted = [(group.ref, row, first.chain) for row in range(len(stretch))]
        chains = {sharding.operands[n] for n in stretch}
        is_all = len(stretch) == len(sources)
        is_plain = not (sharding.local or sharding.refetched or sharding.lanes)
        if shapes == {(1, *group.aval.shape)} and found == wanted:
            return (group, stretch) if is_all or (is_plain and len(chains) == 1) else None
    return None


def _with_operand(
    equation: Equation, sharding: EquationSharding, stretch: range, value: int
) -> tuple[Equation, EquationSharding]:
    """The equation with a value in place of a stretch of operands."""
    before, after = slice(stretch.start), slice(stretch.stop, None)
    operands, chains = equation.operands, sharding.operands
    return (
        replace(equation, operands=(*operands[before], value, *operands[after])),
        replace(sharding, operands=(*chains[before], chains[stretch.start], *chains[after])),
    )


def _row_behind(
    operand: Operand, maker: dict[int, Equation], rows: dict[int, Entry]
) -> Entry | None:
    """The row of a stack that an operand is, in another shape."""
    while isinstance(operand, int) and operand not in rows:
        source = maker.get(operand)
        if source is None or not _only_reshapes(source):
            return None
        operand = source.operands[0]
    return rows[operand] if isinstance(operand, int) else None


def _only_reshapes(equation: Equation) -> bool:
    name, params = equation.name, equation.params
    if name == "broadcast_in_dim":
        if len(equation.operands) != 1 or isinstance(equation.operands[0], Constant):
            return False
        dims = params["broadcast_dimensions"]
        others = [s for d, s in enumerate(params["shape"]) if d not in dims]
        return others == [1] * len(others) and len(dims) == len(params["shape"]) - len(others)
    if name == "reshape":
        return params["dimensions"] is None
    return name in ("squeeze", "expand_dims")

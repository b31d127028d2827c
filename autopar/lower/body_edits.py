"""Edits of stage programs with loops over layers: `StageProgramBody` → `StageProgramBody`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.program import Constant, Equation, Operand, values_in
from autopar.ir.program_sharding import EquationSharding
from autopar.ir.spec import Layout
from autopar.lower.stage_bodies import (
    Exit,
    LayerLoop,
    LoopCarry,
    LoopRead,
    LoopSlice,
    LoopWrite,
    StageProgramBody,
)
from autopar.rewrite.residuals import is_cheap
from autopar.tracer.layer_runs import LayerRun


def items_of(
    body: StageProgramBody,
) -> tuple[list[Equation | LayerLoop], list[EquationSharding | None]]:
    """The equations and loops of a stage program in order, and the equations' shardings."""
    items: list[Equation | LayerLoop] = []
    shardings: list[EquationSharding | None] = []
    first = 0
    for position, loop in (*body.loops, (len(body.equations), None)):
        items += body.equations[first:position]
        shardings += body.shardings[first:position]
        if loop is not None:
            items.append(loop)
            shardings.append(None)
        first = position
    return items, shardings


def operands_of(exits: Iterable[Exit]) -> list[int]:
    """The values that become buffers, rows of stacks too."""
    return values_in(o for e in exits for o in (e.operand, *(r.operand for r in e.rows)))


def with_loop(
    body: StageProgramBody,
    run: LayerRun,
    reads: Sequence[LoopRead],
    writes: Sequence[LoopWrite],
) -> StageProgramBody:
    """The stage program with a run of equal layers as one loop."""
    items, shardings = items_of(body)
    model = run.trips[run.model]
    plain = [index for n, index in enumerate(model) if n not in run.slices]
    plain = [*_made_of_constants(items, plain), *plain]
    loop = LayerLoop(
        num_trips=len(run.trips),
        is_reversed=run.is_reversed,
        equations=tuple(_equation(items[i]) for i in plain),
        shardings=tuple(_sharding(shardings[i]) for i in plain),
        slices=tuple(
            LoopSlice(_equation(items[model[n]]), _sharding(shardings[model[n]]), first, step)
            for n, (first, step) in run.slices.items()
        ),
        carries=tuple(_carry(run, place, items, shardings) for place in run.carries),
        reads=tuple(reads),
        writes=tuple(writes),
    )
    return _with_item(body, run, items, shardings, loop)


def _made_of_constants(items: Sequence[Equation | LayerLoop], inside: Sequence[int]) -> list[int]:
    """The equations that make what those `inside` read out of constants alone, elementwise. A loop
    that makes it itself has it fused into what reads it; outside it would be an array in memory."""
    made: dict[int, int] = {}  # value -> its equation
    for index, item in enumerate(items):
        if isinstance(item, Equation) and is_cheap(item) and made.keys() >= set(item.inputs):
            made.update(dict.fromkeys(item.results, index))
    found: set[int] = set()
    left = [v for index in inside for v in _equation(items[index]).inputs]
    while left:
        index = made.get(left.pop())
        if index is not None and index not in found and index not in inside:
            found.add(index)
            left += _equation(items[index]).inputs
    return sorted(found)


def _equation(item: Equation | LayerLoop) -> Equation:
    assert isinstance(item, Equation)
    return item


def _sharding(sharding: EquationSharding | None) -> EquationSharding:
    assert sharding is not None
    return sharding


def _carry(
    run: LayerRun,
    place: tuple[int, int],
    items: Sequence[Equation | LayerLoop],
    shardings: Sequence[EquationSharding | None],
) -> LoopCarry:
    carry, (at, number) = run.carries[place], place

    def made_in(trip: int) -> tuple[int, Layout | None]:
        index = run.trips[trip][at]
        chain = _sharding(shardings[index]).results[number]
        return _equation(items[index]).results[number], chain[-1] if chain else None

    (made, layout), (end, end_layout) = made_in(run.model), made_in(run.last)
    return LoopCarry(carry.value, carry.start, made, end, layout, end_layout)


def _with_item(
    body: StageProgramBody,
    run: LayerRun,
    items: Sequence[Equation | LayerLoop],
    shardings: Sequence[EquationSharding | None],
    loop: LayerLoop,
) -> StageProgramBody:
    """The stage program with the run's equations replaced by the loop: before it what does not
    depend on it, after it the rest."""
    inside = {index for trip in run.trips for index in trip}
    before: list[int] = []
    after: list[int] = []
    later = set(run.place_of)
    for index, item in enumerate(items):
        if index in inside:
            continue
        if later.isdisjoint(item.inputs):
            before.append(index)
        else:
            after.append(index)
            later.update(item.results)
    equations: list[Equation] = []
    own: list[EquationSharding] = []
    loops: list[tuple[int, LayerLoop]] = []
    for index in (*before, None, *after):
        item = loop if index is None else items[index]
        if isinstance(item, LayerLoop):
            loops.append((len(equations), item))
        else:
            assert index is not None
            equations.append(item)
            own.append(_sharding(shardings[index]))
    return replace(body, equations=tuple(equations), shardings=tuple(own), loops=tuple(loops))


def common_filling(rows: Sequence[Exit], equations: Sequence[Equation]) -> Constant | None:
    """The number that arrays consist of, if all of them are that number, broadcast."""
    maker = {r: e for e in equations for r in e.results}
    numbers: list[Constant] = []
    for row in rows:
        operand: Operand = row.operand
        source = maker.get(operand) if isinstance(operand, int) else None
        if source is not None and source.name == "broadcast_in_dim":
            operand = source.operands[0]
        if not isinstance(operand, Constant) or operand.aval.shape:
            return None
        numbers.append(operand)
    values = {float(n.value) if n.value == n.value else None for n in numbers}
    return numbers[0] if len(values) == 1 and None not in values else None


def pruned(body: StageProgramBody) -> StageProgramBody:
    """Without equations and entries that nothing needs, and with the refs that are left."""
    needed = set(operands_of(e for e in body.exits if not e.filling))
    needed.update(operands_of(e.rows[:1])[0] for e in body.exits
                  if e.filling and isinstance(e.rows[0].operand, int))  # fmt: skip
    items, shardings = items_of(body)
    kept: list[int] = []
    for index in reversed(range(len(items))):
        item = items[index]
        is_kept = not isinstance(item, Equation) or item.has_effect
        if is_kept or not needed.isdisjoint(item.results):
            kept.append(index)
            needed.update(item.inputs)
    equations, own, loops = [], [], []
    for index in reversed(kept):
        item = items[index]
        if isinstance(item, LayerLoop):
            loops.append((len(equations), item))
        else:
            equations.append(item)
            own.append(_sharding(shardings[index]))
    entries = tuple(entry for entry in body.entries if entry.value in needed)
    reads = dict.fromkeys(ref for entry in entries for ref in entry.refs)
    writes = tuple(ref for exit_ in body.exits for ref in exit_.refs)
    return replace(
        body,
        stage_program=replace(body.stage_program, reads=tuple(reads), writes=writes),
        entries=entries,
        equations=tuple(equations),
        shardings=tuple(own),
        captured=tuple((v, array) for v, array in body.captured if v in needed),
        loops=tuple(loops),
    )

"""Equal layers of a stage as one loop: from `StagePrograms` to `StagePrograms` that compile faster.

A model that scans over its layers is unrolled before it is cut into stages, so a stage program has
as many copies of a layer as the stage has layers, and XLA takes time for each. Here a run of equal
layers (`tracer.layer_runs`) becomes a loop again, in the forward and in the backward stage program:
compile time no longer grows with depth. Plans do not change: the loop's body has the layouts that
the layers have.

What a layer hands from one stage program to another (residuals, sums of gradients) has a buffer per
layer. These become one buffer, a stack with a row per layer, which a loop reads and writes row by
row. Stage programs without the loop take rows out of it; an update that stacks the rows itself,
as the gradient of a scan does, reads the stack. Layers with weights of their own, which are no rows
of one array, would have to be copied together for a loop, so they stay written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.pipeline import PER_MICRO_BATCH, Ref
from autopar.ir.program_sharding import Chain
from autopar.ir.spec import PARTIAL, Layout
from autopar.lower.body_edits import (
    common_filling,
    items_of,
    operands_of,
    pruned,
    with_loop,
)
from autopar.lower.stage_bodies import (
    Entry,
    Exit,
    LoopRead,
    LoopWrite,
    StageProgramBody,
    StagePrograms,
    stacked_layout,
)
from autopar.lower.whole_stacks import StackGroup, with_whole_stacks
from autopar.tracer.layer_runs import (
    Key,
    LayerRun,
    find_run,
    numbered_layers,
    ranges_to_try,
)


def roll_layers(staged: StagePrograms) -> StagePrograms:
    """The same stage programs, with loops over equal layers."""
    pipeline = staged.pipeline
    fixed: set[tuple[int, int]] = {
        (p.stage, p.value) for p in (*pipeline.inputs, *pipeline.outputs)
    }
    for transfer in pipeline.transfers:
        fixed |= {(stage, transfer.ref.value) for stage in (transfer.source, transfer.target)}
    programs, layouts = list(staged.programs), dict(staged.layouts)
    for stage in range(pipeline.num_stages):
        own = [n for n, body in enumerate(programs) if body.stage_program.stage == stage]
        of_stage = {value: layout for (at, value), layout in layouts.items() if at == stage}
        roller = _StageRoller(
            [programs[n] for n in own], of_stage, {value for at, value in fixed if at == stage}
        )
        for n, body in zip(own, roller.rolled(), strict=True):
            programs[n] = body
        layouts.update(((stage, value), layout) for value, layout in roller.stack_layouts.items())
        for value in roller.gone:
            del layouts[stage, value]
    pipeline = replace(pipeline, stage_programs=tuple(p.stage_program for p in programs))
    return StagePrograms(pipeline, tuple(programs), layouts)


class _CannotRoll(Exception):
    """These layers stay as they are."""


class _StageRoller:
    def __init__(
        self,
        bodies: Sequence[StageProgramBody],
        layouts: dict[int, Layout | None],
        fixed: set[int],
    ) -> None:
        self.bodies, self.layouts, self.fixed = list(bodies), layouts, fixed
        self.stack_layouts: dict[int, Layout | None] = {}
        self.gone: set[int] = set()

    def rolled(self) -> list[StageProgramBody]:
        tried: set[Key] = set()
        while True:
            keys = (k for body in self.looped() for k in numbered_layers(items_of(body)[0]))
            key = next((k for k in keys if k not in tried), None)
            if key is None:
                return self.bodies
            tried.add(key)
            self.roll(key)

    def looped(self) -> list[StageProgramBody]:
        return [b for b in self.bodies if b.stage_program.phase in PER_MICRO_BATCH]

    def roll(self, key: Key) -> None:
        """Rolls the layers of this name, as many of them as all stage programs can."""
        numbers = [sorted(numbered_layers(items_of(b)[0]).get(key, ())) for b in self.looped()]
        numbers = [own for own in numbers if own]
        first, last = max(own[0] for own in numbers), min(own[-1] for own in numbers)
        for chosen in ranges_to_try(first, last):
            runs = [self.run_of(body, key, chosen) for body in self.bodies]
            if any(
                run is None and self.has(body, key, chosen)
                for body, run in zip(self.bodies, runs, strict=True)
            ):
                continue
            try:
                self.bodies = _Stacks(self, runs).bodies()
            except _CannotRoll:
                continue
            return

    def has(self, body: StageProgramBody, key: Key, numbers: range) -> bool:
        """Whether a stage program that runs for each micro-batch has any of these layers."""
        layers = numbered_layers(items_of(body)[0]).get(key, {})
        is_looped = body.stage_program.phase in PER_MICRO_BATCH
        return is_looped and not layers.keys().isdisjoint(numbers)

    def run_of(self, body: StageProgramBody, key: Key, numbers: range) -> LayerRun | None:
        if body.stage_program.phase not in PER_MICRO_BATCH:
            return None
        equations, shardings = items_of(body)
        layers = numbered_layers(equations).get(key, {})
        if any(number not in layers for number in numbers):
            return None
        return find_run(equations, shardings, body.avals, [layers[n] for n in numbers])


class _Stacks:
    """The buffers that become stacks for runs of a stage, and the stage programs with them."""

    def __init__(self, roller: _StageRoller, runs: Sequence[LayerRun | None]) -> None:
        self.roller, self.runs = roller, runs
        self.groups: dict[tuple[int, ...], StackGroup] = {}
        self.avals = roller.bodies[0].avals
        self.num_avals = len(self.avals)

    def bodies(self) -> list[StageProgramBody]:
        pairs = list(zip(self.roller.bodies, self.runs, strict=True))
        try:
            for body, run in pairs:
                if run is not None:
                    self.find_read_groups(body, run)
            for body, run in pairs:
                if run is not None:
                    self.find_written_groups(body, run)
            bodies = [self.rewritten(body, run) for body, run in pairs]
        except _CannotRoll:
            del self.avals[self.num_avals :]
            raise
        for group in self.groups.values():
            self.roller.stack_layouts[group.stack] = stacked_layout(group.layout)
            self.roller.gone.update(m for m in group.members if self.is_grouped(m))
        return bodies

    def new_value(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    # -- groups

    def add_group(self, run: LayerRun, refs: Sequence[Ref]) -> None:
        """The buffers with these refs, in the order of layers, are rows of a stack."""
        members = tuple(ref.value for ref in refs)
        if members in self.groups:
            return
        micro_batches = {ref.micro_batch for ref in refs}
        layouts = [self.roller.layouts[value] for value in members]
        layout = layouts[run.row_of(run.model)]
        is_partial = any(own is not None and PARTIAL in own for own in layouts)
        is_mixed = len(set(layouts)) > 1 and (is_partial or None in layouts)
        avals = [self.avals[value] for value in members]
        types = {(tuple(aval.shape), aval.dtype) for aval in avals}
        is_fixed = self.roller.fixed.issuperset(members)
        if is_fixed or is_mixed or len(micro_batches) > 1 or len(types) > 1:
            raise _CannotRoll
        if len(set(members)) < len(members) or _jax.is_extended_dtype(avals[0].dtype):
            raise _CannotRoll
        stack = self.new_value(_jax.stacked_aval(avals[0], len(members)))
        self.groups[members] = StackGroup(members, micro_batches.pop(), stack, layout, avals[0])

    def find_read_groups(self, body: StageProgramBody, run: LayerRun) -> None:
        for values in run.reads.values():
            self.add_group(run, self.refs_of(body, values))

    def refs_of(self, body: StageProgramBody, values: Sequence[int]) -> list[Ref]:
        entries = {entry.value: entry for entry in body.entries}
        refs = []
        for value in values:
            entry = entries.get(value)
            if entry is None or entry.chain or entry.is_stack or entry.row is not None:
                raise _CannotRoll
            refs += entry.refs
        return refs

    def find_written_groups(self, body: StageProgramBody, run: LayerRun) -> None:
        """What layers hand on and no loop reads; then checks that nothing else leaves the run but
        what the last layer carries out of it."""
        by_place: dict[Any, dict[int, Exit]] = {}
        for exit_ in body.exits:
            for value in operands_of([exit_]):
                if value not in run.place_of:
                    continue
                trip, place = run.place_of[value]
                if len(exit_.refs) != 1 or exit_.is_stack or exit_.starts_sum or exit_.rows:
                    raise _CannotRoll
                if not self.is_grouped(exit_.refs[0].value):
                    by_place.setdefault(place, {})[trip] = exit_
        for place, exits in by_place.items():
            if len(exits) == len(run.trips):
                refs = [exits[trip].refs[0] for trip in range(len(run.trips))]
                self.add_group(run, run.by_layer(refs))
            elif list(exits) != [run.last] or place not in run.carries:
                raise _CannotRoll
        items, _ = items_of(body)
        inside = {index for trip in run.trips for index in trip}
        for index, item in enumerate(items):
            if index in inside:
                continue
            for value in item.inputs:
                trip, place = run.place_of.get(value, (run.last, None))
                if trip != run.last or (place is not None and place not in run.carries):
                    raise _CannotRoll

    # -- stage programs

    def rewritten(self, body: StageProgramBody, run: LayerRun | None) -> StageProgramBody:
        for entry in body.entries:
            if len(entry.refs) > 1 and any(self.is_grouped(ref.value) for ref in entry.refs):
                raise _CannotRoll
        stacks = {} if run is None else self.stacks_read(body, run)
        rows: list[Entry] = []
        entries: list[Entry] = []
        for entry in body.entries:
            (rows if self.is_grouped(entry.refs[0].value) else entries).append(entry)
        given = {row.refs[0].value for row in rows}
        members = {group.members for group in stacks.values()}
        read = [
            g
            for g in self.groups.values()
            if g.members in members or not given.isdisjoint(g.members)
        ]
        whole = {g.members: self.new_value(self.avals[g.stack]) for g in read}
        exits, writes = self.exits(body, run, whole)
        for group in read:
            stack = Entry((group.ref,), whole[group.members], stacked_layout(group.layout))
            entries += (stack, *_rows(group, rows))
        new = replace(body, entries=tuple(entries), exits=tuple(exits))
        if run is not None:
            reads = [LoopRead(v, whole[g.members], g.layout) for v, g in stacks.items()]
            new = with_loop(new, run, reads, writes)
        elif not read and len(exits) == len(body.exits):
            return body
        return pruned(with_whole_stacks(new, list(self.groups.values()), self.new_value))

    def stacks_read(self, body: StageProgramBody, run: LayerRun) -> dict[int, StackGroup]:
        """The stack that each value of a layer is a row of, where it is another in every layer."""
        return {
            value: self.groups[tuple(ref.value for ref in self.refs_of(body, values))]
            for value, values in run.reads.items()
        }

    def is_grouped(self, value: int) -> bool:
        """Whether a buffer is now only a row of a stack. What is sent, or an argument, stays."""
        is_row = any(value in members for members in self.groups)
        return is_row and value not in self.roller.fixed

    def exits(
        self, body: StageProgramBody, run: LayerRun | None, whole: dict[tuple[int, ...], int]
    ) -> tuple[list[Exit], list[LoopWrite]]:
        """The exits with those of groups put together, and what the loop writes of these."""
        own = {e.refs[0].value: e for e in body.exits if len(e.refs) == 1}
        exits = [e for e in body.exits if not any(self.is_grouped(ref.value) for ref in e.refs)]
        writes: list[LoopWrite] = []
        for group in self.groups.values():
            if not any(self.is_grouped(m) and m in own for m in group.members):
                continue
            rows = [own.get(m) or self.given(body, m) for m in group.members]
            if any(e.is_stack for e in rows):
                raise _CannotRoll
            layout = stacked_layout(group.layout)
            made = self.made_in_loop(rows, run)
            if made is None:
                if run is not None and any(v in run.place_of for v in operands_of(rows)):
                    raise _CannotRoll
                filling = common_filling(rows, body.equations)
                rows = [replace(row, refs=(), layout=group.layout) for row in rows]
                exits.append(Exit((group.ref,), rows[0].operand, (), layout, False, False,
                                  tuple(rows), filling))  # fmt: skip
                continue
            operand, chain = made
            result = self.new_value(self.avals[group.stack])
            start = whole.get(group.members)
            writes.append(LoopWrite(operand, chain, group.layout, group.aval, result, start))
            exits.append(Exit((group.ref,), result, (), layout))
        return exits, writes

    def given(self, body: StageProgramBody, member: int) -> Exit:
        """A row that is a copy of a buffer from elsewhere, which the stage program reads."""
        for entry in body.entries:
            if entry.refs[0].value == member and member in self.roller.fixed and not entry.chain:
                return Exit(entry.refs, entry.value, (), entry.layout)
        raise _CannotRoll

    def made_in_loop(self, rows: Sequence[Exit], run: LayerRun | None) -> tuple[int, Chain] | None:
        """(the value that each trip makes or begins with, the chain to its row) if the loop makes
        these exits, which are in the order of layers."""
        if run is None:
            return None
        by_trip = run.by_layer(rows)
        model = by_trip[run.model]
        chains = {row.chain for row in rows}
        if len(chains) > 1 and any(PARTIAL in layout for chain in chains for layout in chain):
            return None
        made = [run.place_of.get(row.operand) for row in by_trip if isinstance(row.operand, int)]
        if len(made) < len(rows):
            return None
        place = next((found[1] for found in made if found is not None), None)
        if all(found == (trip, place) for trip, found in enumerate(made)):
            assert isinstance(model.operand, int)
            return model.operand, model.chain
        carry = run.carries.get(place) if place is not None else None
        is_entering = made[0] is None and all(f == (n, place) for n, f in enumerate(made[1:]))
        if carry is not None and is_entering and carry.start == by_trip[0].operand:
            return carry.value, model.chain
        return None


def _rows(group: StackGroup, entries: Sequence[Entry]) -> list[Entry]:
    """The rows of a stack as values of their own, for whoever reads them."""
    position_of = {member: row for row, member in enumerate(group.members)}
    rows = []
    for entry in entries:
        if entry.refs[0].value in position_of:
            chain = entry.chain
            if entry.layout != group.layout and entry.layout is not None:
                chain = (entry.layout, *chain)
            row = position_of[entry.refs[0].value]
            rows.append(
                replace(entry, refs=(group.ref,), layout=group.layout, chain=chain, row=row)
            )
    return rows

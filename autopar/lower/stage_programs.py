"""From the steps of all stages and their shardings to `StagePrograms`: what each mesh runs.

A stage's step (`rewrite.stage_slices`) is cut along its equations. Its prologue becomes the stage
program that prepares the loop: it brings the values that the loop only reads to their layout there,
splits the batch into micro-batches and sets sums to zero. The loop's body becomes a forward and a
backward stage program (and one for the gradients of weights, if a schedule separates them), its
epilogue the update. Values that one stage program makes and another reads are in buffers, in the
layout that their maker gave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autopar import _jax
from autopar.ir.pipeline import EACH, Phase, Pipeline, Place, Ref, StageProgram, Transfer
from autopar.ir.program import Equation, values_in
from autopar.ir.program_sharding import EquationSharding, ProgramSharding
from autopar.ir.rows import Rows
from autopar.ir.spec import Layout
from autopar.lower.stage_bodies import Entry, Exit, StageProgramBody, StagePrograms
from autopar.rewrite.stage_slices import StageSlice


def cut_into_stage_programs(
    stages: Sequence[StageSlice],
    shardings: Sequence[ProgramSharding],
    num_micro_batches: int,
    *,
    stage_mesh: Sequence[int],
    split_weights: bool = False,
    donated: Iterable[int] = (),
) -> StagePrograms:
    """`donated`: positions of the step's inputs."""
    cutters = [
        _StageCutter(number, stage, sharding, num_micro_batches, split_weights)
        for number, (stage, sharding) in enumerate(zip(stages, shardings, strict=True))
    ]
    made_in = {v: part for cutter in cutters for v, part in cutter.prologue_parts().items()}
    for cutter in cutters:
        cutter.cut(made_in)
    transfers = []
    for number, (stage, cutter) in enumerate(zip(stages, cutters, strict=True)):
        transfers += (Transfer(Ref(v, None), source, number) for v, source in stage.received)
        read = {ref.value for p in cutter.stage_programs for ref in p.stage_program.reads}
        for value, source in stage.arrivals:
            if value in read:
                transfers.append(Transfer(Ref(value, EACH), source, number))
    inputs: list[tuple[int, Place]] = []
    outputs: list[tuple[int, Place]] = []
    for number, stage in enumerate(stages):
        program = stage.step.program
        own = zip(stage.inputs, program.inputs, stage.input_rows, strict=False)
        inputs += ((position, Place(value, number, rows)) for position, value, rows in own)
        own = zip(stage.outputs, program.output_values, stage.output_rows, strict=False)
        outputs += ((position, Place(value, number, rows)) for position, value, rows in own)
    inputs.sort(key=_argument_and_rows)
    outputs.sort(key=_argument_and_rows)
    arguments, results = (tuple(position for position, _ in x) for x in (inputs, outputs))
    used_up = set(donated)
    programs = tuple(p for cutter in cutters for p in cutter.stage_programs)
    pipeline = Pipeline(
        num_micro_batches,
        tuple(stage_mesh),
        tuple(p.stage_program for p in programs),
        tuple(transfers),
        tuple(place for _, place in inputs),
        tuple(place for _, place in outputs),
        frozenset(n for n, position in enumerate(arguments) if position in used_up),
        () if arguments == tuple(range(len(arguments))) else arguments,
        () if results == tuple(range(len(results))) else results,
    )
    layouts = {
        (number, v): layout
        for number, cutter in enumerate(cutters)
        for v, layout in cutter.buffers.items()
    }
    return StagePrograms(pipeline, programs, layouts)


def _argument_and_rows(bound: tuple[int, Place]) -> tuple[int, Rows]:
    position, place = bound
    return position, place.rows or ()


class _StageCutter:
    def __init__(
        self,
        number: int,
        stage: StageSlice,
        sharding: ProgramSharding,
        num: int,
        split_weights: bool,
    ) -> None:
        self.number, self.stage, self.num = number, stage, num
        self.split_weights = split_weights
        self.program = stage.step.program
        self.sharding = sharding
        assert stage.step.loop is not None
        self.position = stage.step.loop
        self.loop = self.program.equations[self.position]
        self.loop_sharding = sharding.equations[self.position]
        (self.body,) = self.loop.bodies
        (self.inside,) = self.loop_sharding.bodies
        self.num_consts, self.num_carry = _jax.scan_sizes(self.loop.params)
        self.num_arrivals = len(stage.arrivals)
        self.num_departures = len(stage.departures)
        self.stage_programs: list[StageProgramBody] = []
        self.made_in_body = {r for e in self.body.equations for r in e.results}
        self.buffers: dict[int, Layout | None] = {}
        self.row_values: dict[int, int] = {}
        self.layout = self.value_layouts()
        self.body_refs = self.find_body_refs()

    # -- layouts

    def value_layouts(self) -> dict[int, Layout | None]:
        """The layout in which each value is made."""
        layouts: dict[int, Layout | None] = {}
        layouts.update(zip(self.program.inputs, self.sharding.inputs, strict=True))
        self.note_equations(layouts, self.program.equations, self.sharding.equations)
        layouts.update(zip(self.body.inputs, self.inside.inputs, strict=True))
        self.note_equations(layouts, self.body.equations, self.inside.equations)
        return layouts

    @staticmethod
    def note_equations(
        layouts: dict[int, Layout | None],
        equations: Sequence[Equation],
        shardings: Sequence[EquationSharding],
    ) -> None:
        for equation, sharding in zip(equations, shardings, strict=True):
            for value, chain in zip(equation.results, sharding.results, strict=True):
                layouts[value] = chain[-1] if chain else None

    def buffer(self, value: int, layout: Layout | None) -> Layout | None:
        """The layout of a buffer; this one if it has none yet."""
        if value not in self.buffers:
            self.buffers[value] = layout
        return self.buffers[value]

    # -- the loop's inputs

    def find_body_refs(self) -> dict[int, Ref]:
        """{input of the body: the buffer it is read from}."""
        refs: dict[int, Ref] = {}
        for position, (operand, value) in enumerate(
            zip(self.loop.operands, self.body.inputs, strict=True)
        ):
            if position < self.num_consts:
                if not isinstance(operand, int) or operand in dict(self.program.captured):
                    continue
                is_resharded = bool(self.loop_sharding.operands[position])
                refs[value] = Ref(value if is_resharded else operand, None)
            elif position < self.num_consts + self.num_carry:
                refs[value] = Ref(value, None)
            else:
                refs[value] = Ref(value, EACH)
        return refs

    def body_constants(self) -> dict[int, Any]:
        """Inputs of the body that are constants, and arrays that it captured."""
        captured = dict(self.program.captured)
        constants = dict(self.body.captured)
        for operand, value in zip(self.loop.operands, self.body.inputs, strict=True):
            if value not in self.body_refs:
                constants[value] = captured[operand] if isinstance(operand, int) else operand.value
        return constants

    # -- prologue

    def prologue_parts(self) -> dict[int, int]:
        """{value that this stage's prologue makes: its part}."""
        parts: dict[int, int] = {}
        for index in range(self.position):
            equation = self.program.equations[index]
            parts.update((r, self.stage.parts[index]) for r in equation.results)
        return parts

    def cut(self, made_in: dict[int, int]) -> None:
        """`made_in`: value that some stage's prologue makes -> its part."""
        self.outer_needs = self.outside_needs()
        self.note_given()
        self.cut_prologue(made_in)
        self.cut_body()
        self.cut_epilogue()

    def note_given(self) -> None:
        """Note the layouts of arguments and of values received. A received value that is only
        returned has the result's layout."""
        arrivals = {v for v, _ in self.stage.arrivals}
        given = self.program.inputs[: len(self.program.inputs) - self.num_arrivals]
        for value in (*given, *arrivals):
            self.buffer(value, self.layout[value])
        received = {v for v, _ in self.stage.received}
        for position in range(len(self.stage.outputs)):
            value, chain = self.program.output_values[position], self.sharding.outputs[position]
            if value in received and chain:
                self.buffers[value] = chain[-1]

    def outside_needs(self) -> set[int]:
        """Values outside the loop that are read from buffers: by the loop without resharding, by
        the epilogue, by other stages, or as results."""
        needs = {ref.value for ref in self.body_refs.values()}
        for index in range(self.position + 1, len(self.program.equations)):
            needs.update(self.program.equations[index].inputs)
        outputs = self.program.outputs[: len(self.program.outputs) - self.num_departures]
        return needs | set(values_in(outputs))

    def cut_prologue(self, made_in: dict[int, int]) -> None:
        received = {v for v, _ in self.stage.received}
        exits = self.loop_exits()
        read_by_loop = {v for e in exits for v in values_in([e.operand])}
        parts = self.prologue_parts()
        waits = [made_in[v] + 1 for v in read_by_loop if v in received and v in made_in]
        last = max([0, *parts.values(), *waits])
        groups: list[list[int]] = [[] for _ in range(last + 1)]
        for index in range(self.position):
            groups[self.stage.parts[index]].append(index)
        made: dict[int, int] = {}
        for part, indices in enumerate(groups):
            made.update((r, part) for i in indices for r in self.program.equations[i].results)
        for part, indices in enumerate(groups):
            later = set(self.outer_needs)
            for other in groups[part + 1 :]:
                later.update(v for i in other for v in self.program.equations[i].inputs)
            if part < last:
                later |= read_by_loop
            own_exits = [self.plain_exit(v) for v, p in made.items() if p == part and v in later]
            if part == last:
                own_exits += exits
            captured = dict(self.program.captured)
            own_exits += (self.plain_exit(v) for v in captured if part == 0 and self.is_result(v))
            self.add_outer(Phase.PREPARE, part, indices, own_exits)

    def is_result(self, value: int) -> bool:
        return value in self.program.outputs

    def plain_exit(self, value: int) -> Exit:
        layout = self.buffer(value, self.layout.get(value))
        return Exit((Ref(value, None),), value, (), layout)

    def loop_exits(self) -> list[Exit]:
        """The exits that prepare the loop: parameters in their layout there, the batch in
        micro-batches, sums at zero (except those that the body overwrites)."""
        exits = []
        read = {v for e in self.body.equations for v in e.inputs}
        read.update(self.body.output_values)
        operands = self.loop.operands[: len(self.loop.operands) - self.num_arrivals]
        for position, operand in enumerate(operands):
            value, chain = self.body.inputs[position], self.loop_sharding.operands[position]
            ref = self.body_refs.get(value)
            if ref is None or ref.value != value:
                continue
            layout = self.inside.inputs[position]
            refs = (ref,)
            if ref.micro_batch == EACH:
                refs = tuple(Ref(value, m) for m in range(self.num))
            self.buffer(value, layout)
            starts_sum = self.num_consts <= position < self.num_consts + self.num_carry
            if starts_sum and value not in read:
                assert self.num == 1, "a carry that keeps the last micro-batch's value"
                continue
            exits.append(Exit(refs, operand, chain, layout, ref.micro_batch == EACH, starts_sum))
        return exits

    def add_outer(
        self,
        phase: Phase,
        part: int,
        indices: Sequence[int],
        exits: Sequence[Exit],
        entries: Sequence[Entry] = (),
    ) -> None:
        if not exits and not any(self.program.equations[i].has_effect for i in indices):
            return
        equations = [self.program.equations[i] for i in indices]
        shardings = [self.sharding.equations[i] for i in indices]
        constants = dict(self.program.captured)
        self.add(phase, equations, shardings, exits, constants, part=part, entries=entries)

    def add(
        self,
        phase: Phase,
        equations: Sequence[Equation],
        shardings: Sequence[EquationSharding],
        exits: Sequence[Exit],
        constants: dict[int, Any],
        *,
        part: int = 0,
        entries: Sequence[Entry] = (),
        refs: dict[int, Ref] | None = None,
    ) -> None:
        """Add a stage program of these equations; buffers hold the values that they do not make."""
        made = {r for e in equations for r in e.results} | {e.value for e in entries}
        read = [v for e in equations for v in e.inputs]
        read += values_in(e.operand for e in exits)
        all_entries = list(entries)
        captured: dict[int, Any] = {}
        for value in dict.fromkeys(read):
            if value in made:
                continue
            if value in constants:
                captured[value] = constants[value]
                continue
            ref = (refs or {}).get(value, Ref(value, None if refs is None else EACH))
            layout = self.buffer(ref.value, self.layout.get(value))
            all_entries.append(Entry((ref,), value, layout))
        stage_program = StageProgram(
            self.number,
            phase,
            tuple(ref for entry in all_entries for ref in entry.refs),
            tuple(ref for exit_ in exits for ref in exit_.refs),
            part,
        )
        stripped = tuple(replace(s, refetched=()) if s.refetched else s for s in shardings)
        self.stage_programs.append(
            StageProgramBody(
                stage_program,
                tuple(all_entries),
                tuple(exits),
                tuple(equations),
                stripped,
                tuple(captured.items()),
                self.program.avals,
            )
        )

    # -- the loop

    def cut_body(self) -> None:
        departures = set(self.stage.departures)
        forward, backward = list(self.stage.forward), list(self.stage.backward)
        groups = [(Phase.FORWARD, forward)]
        if backward and self.split_weights:
            needed = self.before_departures(backward, departures)
            groups.append((Phase.BACKWARD, needed))
            groups.append((Phase.WEIGHTS, self.rest(backward, needed)))
        elif backward:
            groups.append((Phase.BACKWARD, backward))
        made: list[set[int]] = [
            {r for i in indices for r in self.body.equations[i].results} for _, indices in groups
        ]
        reads: list[set[int]] = [
            {v for i in indices for v in self.body.equations[i].inputs} - results
            for (_, indices), results in zip(groups, made, strict=True)
        ]
        outs = self.body.outputs
        num_rows = len(outs) - self.num_departures
        done: set[int] = set()
        for at, (phase, indices) in enumerate(groups):
            later: set[int] = set().union(*reads[at + 1 :])
            fresh = made[at] - done
            done |= made[at]
            exits = [self.micro_exit(v) for v in sorted(fresh & (later | departures))]
            for position in range(self.num_carry):
                out = outs[position]
                last = at == len(groups) - 1
                is_made = isinstance(out, int) and out in self.made_in_body
                if out in fresh if is_made else last:
                    exits.append(self.carry_exit(position))
            for position in range(self.num_carry, num_rows):
                out = outs[position]
                made_here = isinstance(out, int) and out in fresh
                if made_here or (at == 0 and out not in self.made_in_body):
                    exits.append(self.row_exit(position))
            equations = [self.body.equations[i] for i in indices]
            shardings = [self.inside.equations[i] for i in indices]
            has_effect = any(e.has_effect for e in equations)
            if exits or has_effect:
                constants = self.body_constants()
                self.add(phase, equations, shardings, exits, constants, refs=self.body_refs)

    def before_departures(self, backward: Sequence[int], departures: set[int]) -> list[int]:
        """The backward equations that the departures depend on."""
        needed = self.above(departures, backward)
        return [i for i in backward if i in needed]

    def above(self, values: Iterable[int], equations: Iterable[int]) -> set[int]:
        """The equations of the body that the values depend on."""
        maker = {r: i for i in equations for r in self.body.equations[i].results}
        left = [maker[v] for v in values if v in maker]
        needed: set[int] = set()
        while left:
            index = left.pop()
            if index not in needed:
                needed.add(index)
                inputs = self.body.equations[index].inputs
                left += (maker[v] for v in inputs if v in maker)
        return needed

    def rest(self, backward: Sequence[int], taken: Sequence[int]) -> list[int]:
        """The other backward equations, with the cheap forward ones that they repeat."""
        forward = set(self.stage.forward)
        others = [i for i in backward if i not in set(taken) and i not in forward]
        read = [v for i in others for v in self.body.equations[i].inputs]
        return sorted({*others, *self.above(read, [i for i in backward if i in forward])})

    def micro_exit(self, value: int) -> Exit:
        layout = self.buffer(value, self.layout[value])
        return Exit((Ref(value, EACH),), value, (), layout)

    def carry_exit(self, position: int) -> Exit:
        carry = self.body.inputs[self.num_consts + position]
        layout = self.inside.inputs[self.num_consts + position]
        self.buffer(carry, layout)
        return Exit(
            (Ref(carry, None),), self.body.outputs[position], self.inside.outputs[position], layout
        )

    def row_exit(self, position: int) -> Exit:
        """This micro-batch's rows of a result."""
        out, chain = self.body.outputs[position], self.inside.outputs[position]
        layout = chain[-1] if chain else self.layout.get(out) if isinstance(out, int) else None
        value = self.row_value(position)
        self.buffer(value, layout)
        return Exit((Ref(value, EACH),), out, chain, layout)

    def row_value(self, position: int) -> int:
        """A value for the rows of a result: the body's value may have another layout."""
        if position not in self.row_values:
            out, avals = self.body.outputs[position], self.program.avals
            avals.append(avals[out] if isinstance(out, int) else out.aval)
            self.row_values[position] = len(avals) - 1
        return self.row_values[position]

    # -- epilogue

    def cut_epilogue(self) -> None:
        """Cuts the update into parts; the first that reads a result of the loop finishes it."""
        outside = range(self.position + 1, len(self.program.equations))
        num_outputs = len(self.program.outputs) - self.num_departures
        results = set(values_in(self.program.outputs[:num_outputs]))
        loop_results = self.loop.results[: len(self.loop.results) - self.num_departures]
        last = max([0, *(self.stage.parts[i] for i in outside)])
        groups = [[i for i in outside if self.stage.parts[i] == part] for part in range(last + 1)]
        reads = [{v for i in group for v in self.program.equations[i].inputs} for group in groups]
        sent = set(self.stage.sent)
        finished_in: dict[int, int] = {}
        for value in loop_results:
            parts = [p for p, read in enumerate(reads) if value in read]
            if value in sent:
                parts = [0]
            if parts or value in results:
                finished_in[value] = min(parts, default=last)
        for part, indices in enumerate(groups):
            later = set().union(results, sent, *reads[part + 1 :])
            entries = [
                self.finished(position)
                for position, value in enumerate(loop_results)
                if finished_in.get(value) == part
            ]
            made = [e.value for e in entries]
            made += (r for i in indices for r in self.program.equations[i].results)
            exits = [self.output_exit(v) for v in made if v in later]
            self.add_outer(Phase.UPDATE, part, indices, exits, entries)

    def finished(self, position: int) -> Entry:
        value, chain = self.loop.results[position], self.loop_sharding.results[position]
        if position < self.num_carry:
            carry = self.body.inputs[self.num_consts + position]
            return Entry((Ref(carry, None),), value, self.buffers[carry], chain)
        rows = self.row_value(position)
        refs = tuple(Ref(rows, m) for m in range(self.num))
        return Entry(refs, value, None, chain, is_stack=True)

    def output_exit(self, value: int) -> Exit:
        """The exit of a value; a result of the step leaves in the layout that the plan gives it."""
        outputs = self.program.outputs
        num_own = len(self.stage.outputs)
        for position in range(num_own):
            if outputs[position] == value:
                chain = self.sharding.outputs[position]
                layout = chain[-1] if chain else self.layout.get(value)
                self.buffers[value] = layout
                return Exit((Ref(value, None),), value, chain, layout)
        return self.plain_exit(value)

"""A step with state in host memory, as programs: from a `PlannedStep` to `HostPrograms`.

    cast k     narrow copies of the parameters of group k, which are fetched before it
    step       forward, backward, everything that needs no state in host memory
    update k   updates group k, whose state is fetched before and stored after it

After the step's arguments come the slots of results, of values that updates read, and of state
while it is on the device. Programs move nothing between the memories: inside a program, XLA fetches
only after it has stored, though the link carries both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.ir.host_programs import HOST_KIND, HostProgram, HostPrograms
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.program_sharding import Chain, EquationSharding, ProgramSharding
from autopar.ir.spec import WHOLE, Layout, to_partition_spec
from autopar.lower.annotate import Writer
from autopar.lower.planned_step import PlannedStep
from autopar.lower.unreduced import AnyMesh, partial_axes, unreduced_layout


def lower_with_host_memory(planned: PlannedStep, mesh: AnyMesh, platform: str) -> HostPrograms:
    return _Lowering(planned, mesh, platform).lower()


class _Lowering:
    def __init__(self, planned: PlannedStep, mesh: AnyMesh, platform: str) -> None:
        self.step, self.plan, self.mesh = planned.traced, planned.plan, mesh
        assert self.step.host is not None
        self.cut = self.step.host
        self.program, self.sharding = self.step.program, self.plan.program
        self.writer = Writer(mesh, platform)
        self.hosted = set(self.cut.inputs)
        self.layouts = self._layouts()
        self.slots: list[jax.ShapeDtypeStruct] = []
        self.slot_of: dict[int, int] = {}  # value on the device -> slot
        self.host_slot: dict[int, int] = {}  # input in host memory -> slot
        self.outputs: dict[int, int] = {}  # result -> slot
        self.on_host: set[int] = set()  # slots
        self.programs: list[HostProgram] = []

    def _layouts(self) -> dict[int, Layout | None]:
        """value -> its layout as it was made; None where the compiler decides."""
        layouts = dict(zip(self.program.inputs, self.sharding.inputs, strict=True))
        for equation, sharding in self._equations(0, len(self.program.equations)):
            for value, chain in zip(equation.results, sharding.results, strict=True):
                layouts[value] = chain[-1] if chain else None
        return layouts

    def _equations(self, start: int, end: int) -> list[tuple[Equation, EquationSharding]]:
        equations = self.program.equations[start:end]
        return list(zip(equations, self.sharding.equations[start:end], strict=True))

    def lower(self) -> HostPrograms:
        for index, value in enumerate(self.program.inputs):
            tensor, aval = self.plan.inputs[index], self.step.avals[index]
            if index in self.hosted:
                sharding = self._spec_sharding(tensor, HOST_KIND)
                self.host_slot[index] = self._new_slot(aval.shape, aval, sharding)
                self.on_host.add(self.host_slot[index])
            else:
                sharding = self._spec_sharding(tensor, None)
                self.slot_of[value] = self._new_slot(aval.shape, aval, sharding)
        for number in range(len(self.cut.casts)):
            self._add_cast(number)
        self._add_main()
        for number in range(len(self.cut.groups)):
            self._add_update(number)
        return HostPrograms(
            tuple(self._with_used_up()),
            tuple(self.slots),
            tuple(self.outputs[o] for o in range(len(self.program.outputs))),
            frozenset(self.on_host),
            len(self.cut.casts),
        )

    # -- slots

    def _new_slot(self, shape: Sequence[int], aval: Any, sharding: NamedSharding) -> int:
        weak_type = getattr(aval, "weak_type", False)
        self.slots.append(
            jax.ShapeDtypeStruct(tuple(shape), aval.dtype, sharding=sharding, weak_type=weak_type)
        )
        return len(self.slots) - 1

    def _spec_sharding(self, tensor: Any, kind: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.plan.spec_of(tensor), memory_kind=kind)  # type: ignore[arg-type]

    def _value_slot(self, value: int, layout: Layout | None) -> int:
        """Of a value between programs; partial sums have lanes."""
        aval, mesh = self.program.avals[value], self.mesh
        layout = (WHOLE,) * len(mesh.axis_names) if layout is None else layout
        lanes = [mesh.axis_sizes[axis] for axis in partial_axes(layout)]
        shape = (*lanes, *getattr(aval, "shape", ()))
        spec = to_partition_spec(unreduced_layout(layout), len(shape), mesh.axis_names)
        return self._new_slot(shape, aval, NamedSharding(mesh, spec))  # type: ignore[arg-type]

    def _device_slot(self, aval: Any, tensor: Any) -> int:
        """Of state in host memory, while it is on the device."""
        return self._new_slot(aval.shape, aval, self._spec_sharding(tensor, None))

    def _output_slot(self, output: int, is_hosted: bool) -> int:
        aval, tensor = self.step.out_avals[output], self.plan.outputs[output]
        sharding = self._spec_sharding(tensor, HOST_KIND if is_hosted else None)
        self.outputs[output] = self._new_slot(aval.shape, aval, sharding)
        if is_hosted:
            self.on_host.add(self.outputs[output])
        return self.outputs[output]

    # -- programs

    def _function(
        self,
        equations: Sequence[tuple[Equation, EquationSharding]],
        inputs: Sequence[int],
        outputs: Sequence[tuple[Operand, Chain]],
    ) -> Callable[..., list[Any]]:
        """A flat function of values in the layouts of their slots."""
        read = {v for equation, _ in equations for v in equation.inputs}
        read.update(values_in(operand for operand, _ in outputs))
        program = Program(
            tuple(inputs),
            tuple(operand for operand, _ in outputs),
            tuple(equation for equation, _ in equations),
            self.program.avals,
            tuple((v, array) for v, array in self.program.captured if v in read),
        )
        sharding = ProgramSharding(
            tuple(self.layouts.get(value) for value in inputs),
            tuple(replace(s, refetched=()) if s.refetched else s for _, s in equations),
            tuple(chain for _, chain in outputs),
        )
        return lambda *arrays: self.writer.run(program, sharding, arrays)

    def _add_cast(self, number: int) -> None:
        group = self.cut.casts[number]
        equations = self._equations(*group.equations)
        outputs, writes = self._handed_on(equations, group.equations[1])
        own = [self.program.inputs[i] for i in group.inputs]
        cast = self._function(equations, own, outputs)
        fetches = self._fetches(group.inputs)
        reads = tuple(slot for _, slot in fetches)
        self.programs.append(HostProgram(f"cast_{number}", cast, reads, writes, fetches))

    def _add_main(self) -> None:
        start, end = self.cut.early
        early = self._equations(start, end)
        late = self._equations(end, len(self.program.equations))
        made_late = {value for equation, _ in late for value in equation.results}
        results = [
            number
            for number, out in enumerate(self.program.outputs)
            if not (isinstance(out, int) and out in made_late)
        ]
        returned = [(self.program.outputs[n], self.sharding.outputs[n]) for n in results]
        final = [self._output_slot(number, is_hosted=False) for number in results]
        read = {v for equation, _ in early for v in equation.inputs}
        read.update(values_in(operand for operand, _ in returned))
        inputs = [v for i, v in enumerate(self.program.inputs) if i not in self.hosted]
        inputs += sorted(read & (self.slot_of.keys() - set(inputs)))
        reads = tuple(self.slot_of[v] for v in inputs)
        outputs, writes = self._handed_on(early, end)
        main = self._function(early, inputs, [*returned, *outputs])
        self.programs.append(HostProgram("step", main, reads, (*final, *writes)))

    def _handed_on(
        self, equations: Sequence[tuple[Equation, EquationSharding]], end: int
    ) -> tuple[list[tuple[Operand, Chain]], tuple[int, ...]]:
        """(what these equations make and those from `end` on read, with changes of layout; its
        slots)."""
        made = {value for equation, _ in equations for value in equation.results}
        waiting: dict[int, Chain] = {}  # value -> how the first later equation reads it
        for equation, sharding in self._equations(end, len(self.program.equations)):
            for operand, chain in zip(equation.operands, sharding.operands, strict=True):
                if isinstance(operand, int) and operand in made:
                    waiting[operand] = waiting.get(operand) or chain
        outputs: list[tuple[Operand, Chain]] = []
        for value, chain in waiting.items():
            if self.layouts[value] is None and chain:
                self.layouts[value] = chain[-1]
                outputs.append((value, chain))
            else:
                outputs.append((value, ()))
            self.slot_of[value] = self._value_slot(value, self.layouts[value])
        return outputs, tuple(self.slot_of[value] for value in waiting)

    def _fetches(self, inputs: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (self.host_slot[i], self._device_slot(self.step.avals[i], self.plan.inputs[i]))
            for i in inputs
        )

    def _add_update(self, number: int) -> None:
        group = self.cut.groups[number]
        equations = self._equations(*group.equations)
        made = {value for equation, _ in equations for value in equation.results}
        own = [self.program.inputs[i] for i in group.inputs]
        read = {v for equation, _ in equations for v in equation.inputs} - made - set(own)
        others = sorted(v for v in read if v in self.slot_of)
        new_of = dict(self.step.state)
        stored = {new_of[i] for i in group.inputs}
        results = [
            o for o, out in enumerate(self.program.outputs) if isinstance(out, int) and out in made
        ]
        # What stays on the device comes first: it takes over donated buffers, one after another.
        results.sort(key=stored.__contains__)
        outputs = [(self.program.outputs[o], self.sharding.outputs[o]) for o in results]
        update = self._function(equations, [*others, *own], outputs)
        fetches = self._fetches(group.inputs)
        reads = (*(self.slot_of[v] for v in others), *(slot for _, slot in fetches))
        writes, stores = [], []
        for o in results:
            final = self._output_slot(o, o in stored)
            if o in stored:
                made_here = self._device_slot(self.step.out_avals[o], self.plan.outputs[o])
                stores.append((made_here, final))
                writes.append(made_here)
            else:
                writes.append(final)
        self.programs.append(
            HostProgram(f"update_{number}", update, reads, tuple(writes), fetches, tuple(stores))
        )

    def _with_used_up(self) -> list[HostProgram]:
        """The programs with what each is the last to read. Arguments are kept unless donated."""
        donated = set(self.step.donated)
        kept = {i for i in range(len(self.program.inputs)) if i not in donated}
        kept.update(self.outputs.values())
        done: list[HostProgram] = []
        read_later: set[int] = set()
        for program in reversed(self.programs):
            read = (*(host for host, _ in program.fetches), *program.reads)
            moved = tuple(slot for slot, _ in program.stores)
            used_up = tuple(
                dict.fromkeys(s for s in (*read, *moved) if s not in read_later and s not in kept)
            )
            read_later.update(read)
            done.append(replace(program, used_up=used_up))
        return done[::-1]

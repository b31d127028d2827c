"""A pipelined step on the devices of this process: from a `Pipeline` to `PipelineExecutable`.

Every stage program is compiled ahead for its stage's mesh. A step then follows one list, in which
the lists of all meshes are interleaved once and for all: run a stage program, copy arrays to
another mesh, drop arrays. JAX dispatches without waiting, so the meshes work at the same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.ir.live import buffer_slots
from autopar.ir.pipeline import (
    Free,
    Pipeline,
    PipelinePrograms,
    Place,
    Recv,
    Run,
    Send,
    StageProgram,
    Transfer,
    stage_program_names,
)
from autopar.ir.plan import ParallelPlan
from autopar.ir.rows import Rows
from autopar.ir.tiles import TilePlan
from autopar.ir.xla_options import compiler_options
from autopar.runtime.arguments import (
    DeletedArrayError,
    leaf_sharding,
    place_some,
    put,
    without_aliases,
)
from autopar.runtime.executable import FlatFunction, InstructionExecutable
from autopar.runtime.operations import (
    Operation,
    RunSlots,
    Slots,
    free_operation,
    run_alone_operation,
    run_operation,
    send_operation,
)
from autopar.runtime.order import Buffer, Ordered
from autopar.runtime.recording import Recorder, clock, may_be_used_up, one_to_watch
from autopar.runtime.stacks import RowShardings, put_together, stack_sharding, take_apart
from autopar.runtime.stage_programs import (
    Buffers,
    compile_stage_programs,
    lower_stage_program,
    program_bytes,
)
from autopar.runtime.threads import must_run_alone
from autopar.runtime.timestamps import ProgramLabel
from autopar.runtime.transfers import transfer_function


class _Held(NamedTuple):
    """An argument or result as it is on one stage, or a stack as it is on several: its slots, the
    sharding of each, and that of the whole."""

    slots: tuple[int, ...]
    parts: tuple[NamedSharding, ...]
    sharding: NamedSharding | RowShardings


class _Watched(NamedTuple):
    """What to wait for after an operation: the operation's mesh and its place in that mesh's list,
    the slots, and whether a later program may use them up."""

    mesh: int
    place: int
    slots: tuple[int, ...]
    may_vanish: bool


@dataclass(frozen=True)
class StepStats:
    """What was observed while a step ran. Peak bytes are per device, by mesh."""

    num_runs: int
    num_sends: int
    num_transfers: int  # arrays that were sent
    transfer_bytes: int  # total bytes of these arrays
    num_frees: int
    peak_live_bytes: tuple[int, ...]


class PipelineExecutable(InstructionExecutable):
    """A pipelined step, or any other that runs as stage programs.

    functions:  one per stage program, from its reads to its writes, in order.
    buffers:    (stage, value) -> type and sharding of the buffer that holds the value there; for
                a value of each micro-batch, of one micro-batch.
    tile_plans: by transfer. A transfer without one that cannot go shard by shard is done by
                `jax.device_put`, through the host, which is best on virtual CPU devices.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        pipeline: Pipeline,
        programs: PipelinePrograms,
        functions: Sequence[FlatFunction],
        meshes: Sequence[Mesh],
        buffers: Buffers,
        avals: Sequence[Any],
        whole: FlatFunction,
        tile_plans: Mapping[int, TilePlan] | None = None,
    ) -> None:
        names = stage_program_names(pipeline)
        super().__init__(
            plan,
            programs,
            [
                ProgramLabel(name, program.stage, program.phase)
                for name, program in zip(names, pipeline.stage_programs, strict=True)
            ],
            {n: _size_of(t, buffers) for n, t in enumerate(pipeline.transfers)},
            avals,
            whole,
        )
        self.pipeline = pipeline
        self.meshes = tuple(meshes)
        self.buffers = buffers
        self._functions = tuple(functions)
        self._tile_plans = tile_plans or {}
        self._buffer_slots = [buffer_slots(pipeline, program) for program in programs.meshes]
        # Buffers of all meshes are slots of one list.
        sizes = [program.num_buffers for program in programs.meshes]
        self._offsets = [sum(sizes[:mesh]) for mesh in range(len(sizes))]
        self._num_slots = sum(sizes)
        self._inputs = self._bind(pipeline.inputs, [program.inputs for program in programs.meshes])
        self._outputs = self._bind(
            pipeline.outputs, [program.outputs for program in programs.meshes]
        )
        self._arguments = _gathered(pipeline.inputs, pipeline.argument_of_input, self._inputs)
        self._results = _gathered(pipeline.outputs, pipeline.result_of_output, self._outputs)
        self.input_shardings = [self._arguments[n][0].sharding for n in range(len(avals))]
        self.output_shardings = [self._results[n][0].sharding for n in range(len(self._results))]
        self._used_up = {pipeline.argument_of_input[n] for n in pipeline.donated}
        self._compiled: list[jax.stages.Compiled] | None = None
        self._operations: list[Operation] | None = None

    def _bind(
        self, places: Sequence[Place], numbers: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[int, NamedSharding]]:
        """The slot and the sharding of each input, or of each output."""
        slots = {
            position: self._offsets[mesh] + buffer
            for mesh, bound in enumerate(numbers)
            for position, buffer in bound
        }
        shardings = [self.buffers[place.stage, place.value].sharding for place in places]
        return [(slots[position], sharding) for position, sharding in enumerate(shardings)]

    # -- running

    def _run(self, leaves: Sequence[Any], recorder: Recorder | None) -> list[Any]:
        slots = self._first_slots(leaves)
        operations = self._operations or self._make_operations()
        if recorder is not None:
            self._run_recorded(recorder, slots, operations)
        else:
            for operation in operations:
                operation(slots)
        return self._returned(slots)

    def _returned(self, slots: Slots) -> list[Any]:
        """The step's results."""
        results = []
        for position in range(len(self._results)):
            held = self._results[position][0]
            array: Any = slots[held.slots[0]]
            if len(held.slots) > 1:
                array = put_together([slots[slot] for slot in held.slots], held.sharding)
            results.append(array)
        return results

    def _run_recorded(
        self, recorder: Recorder, slots: Slots, operations: Sequence[Operation]
    ) -> None:
        logs = recorder.begin(self.description).logs
        for operation, watched in zip(operations, self._watched, strict=True):
            began_s = clock()
            operation(slots)
            if watched.slots:
                log, place = logs[watched.mesh], watched.place
                log.began(place, began_s)
                log.ends_with(place, [slots[slot] for slot in watched.slots], watched.may_vanish)

    @cached_property
    def _watched(self) -> list[_Watched]:
        """What to wait for after each operation: one result of a run, or all arrays of a `Send`."""
        meshes = self.programs.meshes
        used_up = [may_be_used_up(program, self.programs.donated) for program in meshes]
        places = [
            iter([n for n, i in enumerate(program.instructions) if not isinstance(i, Recv)])
            for program in meshes
        ]
        watched = []
        for mesh, instruction, received in self._order:
            buffers: Sequence[int] = ()
            at, may_vanish = mesh, False
            if isinstance(instruction, Run) and instruction.writes:
                best, may_vanish = one_to_watch(
                    instruction.writes, lambda b, m=mesh: self._bytes_of((m, b)), used_up[mesh]
                )
                buffers = (best,)
            elif isinstance(instruction, Send):
                at, buffers = instruction.to_mesh, received
                may_vanish = not used_up[at].isdisjoint(received)
            slots = tuple(self._offsets[at] + buffer for buffer in buffers)
            watched.append(_Watched(mesh, next(places[mesh]), slots, may_vanish))
        return watched

    def run_tracked(self, leaves: Sequence[Any]) -> tuple[list[Any], StepStats]:
        """Run a step and count the live arrays after every instruction."""
        self._check_types(leaves)
        slots = self._first_slots(leaves)
        operations = self._operations or self._make_operations()
        ends = [*self._offsets[1:], self._num_slots]
        peaks = [0] * len(ends)
        sent_bytes = 0

        def look() -> None:
            for mesh, (start, end) in enumerate(zip(self._offsets, ends, strict=True)):
                there = [a for a in slots[start:end] if a is not None and not a.is_deleted()]
                peaks[mesh] = max(peaks[mesh], sum(map(_bytes_on_one_device, there)))

        look()
        for operation, ordered in zip(operations, self._order, strict=True):
            operation(slots)
            if isinstance(ordered.instruction, Send):
                at = self._offsets[ordered.mesh]
                sent_bytes += sum(slots[at + b].nbytes for b in ordered.instruction.buffers)
            look()
        counts = Counter(type(ordered.instruction) for ordered in self._order)
        sends = [o.instruction for o in self._order if isinstance(o.instruction, Send)]
        stats = StepStats(
            num_runs=counts[Run],
            num_sends=counts[Send],
            num_transfers=sum(len(send.buffers) for send in sends),
            transfer_bytes=sent_bytes,
            num_frees=counts[Free],
            peak_live_bytes=tuple(peaks),
        )
        return self._returned(slots), stats

    def time_stage_programs(
        self, leaves: Sequence[Any]
    ) -> list[tuple[StageProgram, int | None, float]]:
        """Run a step one instruction at a time. Returns (stage program, micro-batch, seconds) of
        every run."""
        self._check_types(leaves)
        slots = self._first_slots(leaves)
        operations = self._operations or self._make_operations()
        timed = []
        for operation, ordered in zip(operations, self._order, strict=True):
            jax.block_until_ready([a for a in slots if a is not None and not a.is_deleted()])
            start = time.perf_counter()
            operation(slots)
            if isinstance(ordered.instruction, Run):
                run = ordered.instruction
                at = self._offsets[ordered.mesh]
                jax.block_until_ready([slots[at + buffer] for buffer in run.writes])
                seconds = time.perf_counter() - start
                timed.append(
                    (self.pipeline.stage_programs[run.stage_program], run.micro_batch, seconds)
                )
        return timed

    def _first_slots(self, leaves: Sequence[Any]) -> Slots:
        """Slots that hold the arguments, moved where necessary."""
        leaves = without_aliases(leaves, self._used_up)
        slots: Slots = [None] * self._num_slots
        elsewhere: list[tuple[Any, _Held]] = []
        for position, held_on in self._arguments.items():
            leaf = leaves[position]
            where = leaf_sharding(leaf)
            if where is not None and leaf.is_deleted():
                raise DeletedArrayError(self.plan.name, position, leaf)
            for held in held_on:
                if where == held.sharding:
                    _fill(slots, held, leaf)
                else:
                    elsewhere.append((leaf, held))
        if elsewhere:
            given, targets = map(list, zip(*elsewhere, strict=True))
            moved = put(given, [held.sharding for held in targets])
            for held, leaf in zip(targets, moved, strict=True):
                _fill(slots, held, leaf)
        return slots

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return put(leaves, self.input_shardings)

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        return place_some(leaves, self.input_shardings)

    # -- compiling

    @property
    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The compiled stage programs by name, such as `stage0_forward`."""
        if self._compiled is None:
            lowered = [self._lower(number) for number in range(len(self.names))]
            options = compiler_options(self.plan.xla_options)
            self._compiled = compile_stage_programs(self.plan.name, self.names, lowered, options)
        return dict(zip(self.names, self._compiled, strict=True))

    def _lower(self, number: int) -> jax.stages.Lowered:
        return lower_stage_program(
            f"{self.plan.name}_{self.names[number]}",
            self.pipeline.stage_programs[number],
            self._functions[number],
            self.programs.donated[number],
            self.buffers,
        )

    def _make_operations(self) -> list[Operation]:
        programs = list(self.compiled.values())
        self._operations = [self._operation(ordered, programs) for ordered in self._order]
        return self._operations

    def _operation(self, ordered: Ordered, programs: Sequence[jax.stages.Compiled]) -> Operation:
        instruction, at = ordered.instruction, self._offsets[ordered.mesh]
        if isinstance(instruction, Run):
            program = programs[instruction.stage_program]
            donated = self.programs.donated[instruction.stage_program]
            slots = RunSlots(
                tuple(at + buffer for buffer in instruction.reads),
                tuple(at + instruction.reads[position] for position in donated),
                tuple(at + buffer for buffer in instruction.writes),
            )
            mesh = self.meshes[ordered.mesh]
            if must_run_alone(mesh):
                return run_alone_operation(program, slots, list(mesh.devices.flat))
            return run_operation(program, slots)
        if isinstance(instruction, Send):
            transfers = instruction.transfers
            send = transfer_function(
                [self._buffer_of(t, at_source=True) for t in transfers],
                [self._buffer_of(t, at_source=False) for t in transfers],
                [self._tile_plans.get(t) for t in transfers],
            )
            to = self._offsets[instruction.to_mesh]
            sources = [at + buffer for buffer in instruction.buffers]
            return send_operation(send, sources, [to + buffer for buffer in ordered.received])
        return free_operation([at + buffer for buffer in instruction.buffers])

    def _buffer_of(self, transfer_number: int, at_source: bool) -> jax.ShapeDtypeStruct:
        transfer = self.pipeline.transfers[transfer_number]
        stage = transfer.source if at_source else transfer.target
        return self.buffers[stage, transfer.ref.value]

    # -- inspection

    def _bytes_of(self, buffer: Buffer) -> int:
        mesh, number = buffer
        stage, ref = self._buffer_slots[mesh][number]
        return _bytes_on_one_device(self.buffers[stage, ref.value])

    def _program_bytes(self) -> list[int]:
        return [program_bytes(program) for program in self.compiled.values()]

    def hlo_texts(self) -> dict[str, str]:
        return {name: program.as_text() or "" for name, program in self.compiled.items()}

    def annotated_text(self, name: str) -> str:
        return self._lower(self.names.index(name)).as_text()


def _gathered(
    places: Sequence[Place], positions: Sequence[int], bound: Sequence[tuple[int, NamedSharding]]
) -> dict[int, list[_Held]]:
    """{position of an argument or a result: how it is held, by each stage that has all of it, or
    by all that have rows of it}."""
    held: dict[int, list[_Held]] = {}
    rows: dict[int, list[tuple[Rows, int, NamedSharding]]] = {}
    for place, position, (slot, sharding) in zip(places, positions, bound, strict=True):
        if place.rows is None:
            held.setdefault(position, []).append(_Held((slot,), (sharding,), sharding))
        else:
            rows.setdefault(position, []).append((place.rows, slot, sharding))
    for position, parts in rows.items():
        in_order = sorted(parts, key=lambda part: part[0])
        numbers, slots, shardings = zip(*in_order, strict=True)
        held[position] = [_Held(slots, shardings, stack_sharding(numbers, shardings))]
    return held


def _fill(slots: Slots, held: _Held, leaf: Any) -> None:
    """Put an argument, which is where it should be, into its slots."""
    arrays = [leaf] if len(held.slots) == 1 else take_apart(leaf, held.parts)
    for slot, array in zip(held.slots, arrays, strict=True):
        slots[slot] = array


def _bytes_on_one_device(array: Any) -> int:
    return prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _size_of(transfer: Transfer, buffers: Buffers) -> tuple[int, int, float]:
    buffer = buffers[transfer.source, transfer.ref.value]
    num_bytes = prod(buffer.shape) * buffer.dtype.itemsize
    return transfer.source, transfer.target, float(num_bytes)

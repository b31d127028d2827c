"""A pipelined step on the devices of this process.

Every stage program is compiled ahead for its stage's mesh. A step then follows one list, in which
the lists of all meshes are interleaved once and for all: run a stage program, copy arrays to
another mesh, forget arrays. JAX dispatches without waiting, so that meshes work at the same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.live import buffer_slots, bytes_over_time
from autopar.ir.pipeline import (
    Free,
    Pipeline,
    PipelinePrograms,
    Recv,
    Run,
    Send,
    StageProgram,
    stage_program_names,
)
from autopar.ir.plan import ParallelPlan
from autopar.ir.tiles import TilePlan
from autopar.runtime import recording
from autopar.runtime.arguments import (
    DeletedArrayError,
    SignatureChanged,
    place_some,
    weak_types,
    with_own_buffers,
)
from autopar.runtime.debug import (
    DebugFile,
    Describe,
    describe_nothing,
    dump,
    instruction_files,
    program_files,
)
from autopar.runtime.hlo import CollectiveOp, read_collectives
from autopar.runtime.operations import (
    Operation,
    RunSlots,
    Slots,
    free_operation,
    run_alone_operation,
    run_operation,
    send_operation,
)
from autopar.runtime.order import Buffer, Ordered, interleave, peak_bytes, peak_live_bytes
from autopar.runtime.stage_programs import (
    Buffers,
    compile_stage_programs,
    lower_stage_programs,
    program_bytes,
)
from autopar.runtime.threads import must_run_alone
from autopar.runtime.timestamps import StepDescription
from autopar.runtime.transfers import transfer_function

# Of an operation: mesh, place in its list, slots to wait for, whether they may be used up.
_Watched = tuple[int, int, tuple[int, ...], bool]


@dataclass(frozen=True)
class StepStats:
    """What a step did, as it was seen while it ran. Bytes are per device, of each mesh."""

    num_runs: int
    num_sends: int
    num_transfers: int  # arrays that were sent
    transfer_bytes: int  # of these arrays, each counted once
    num_frees: int
    peak_live_bytes: tuple[int, ...]


class PipelineExecutable:
    """What `step.last_executable` gives of a pipelined step.

    functions:  one per stage program, from its reads to its writes, in order.
    buffers:    (stage, value) -> type and `NamedSharding` of what holds the value there; for
                values of a micro-batch, those of one micro-batch.
    avals:      types of the step's arguments.
    tile_plans: of transfers, by number. What has none, and does not go shard by shard, is taken
                through the host by `jax.device_put`, which is best on virtual CPU devices.
    whole:      the step as one flat function, for when it is called inside of another program.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        pipeline: Pipeline,
        programs: PipelinePrograms,
        functions: Sequence[Callable[..., Sequence[Any]]],
        meshes: Sequence[Mesh],
        buffers: Buffers,
        avals: Sequence[Any],
        tile_plans: Mapping[int, TilePlan] | None = None,
        whole: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.plan = plan
        self.pipeline = pipeline
        self.programs = programs
        self.meshes = tuple(meshes)
        self.avals = tuple(avals)
        self.input_shardings = [buffers[p.stage, p.value].sharding for p in pipeline.inputs]
        self.output_shardings = [buffers[p.stage, p.value].sharding for p in pipeline.outputs]
        self.names = stage_program_names(pipeline)
        self._functions = tuple(functions)
        self._buffers = buffers
        self._tile_plans = tile_plans or {}
        self._whole = whole
        self._types = [(aval.shape, aval.dtype) for aval in self.avals]
        self._weak_types = [aval.weak_type for aval in self.avals]
        self._order = interleave(programs)
        self._held = [buffer_slots(pipeline, program) for program in programs.meshes]
        # Buffers of all meshes are slots of one list.
        sizes = [program.num_buffers for program in programs.meshes]
        self._offsets = [sum(sizes[:mesh]) for mesh in range(len(sizes))]
        self._num_slots = sum(sizes)
        self._input_slots = self._slots_of([program.inputs for program in programs.meshes])
        self._output_slots = self._slots_of([program.outputs for program in programs.meshes])
        self._compiled: list[Any] | None = None
        self._operations: list[Operation] | None = None
        self.describe: Describe = describe_nothing
        self._recording: tuple[StepDescription, list[_Watched]] | None = None

    def _slots_of(self, places: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """The slot of each argument, or result, of the step."""
        found = {
            position: self._offsets[mesh] + buffer
            for mesh, own in enumerate(places)
            for position, buffer in own
        }
        return [found[position] for position in range(len(found))]

    # -- running

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        if _jax.is_tracing():
            return self._inside_of_another_program(leaves)
        slots = self._first_slots(leaves)
        operations = self._operations or self._make_operations()
        if recording.current is not None:
            self._run_recorded(recording.current, slots, operations)
        else:
            for operation in operations:
                operation(slots)
        return [slots[slot] for slot in self._output_slots]

    def _run_recorded(
        self, recorder: recording.Recorder, slots: Slots, operations: Sequence[Operation]
    ) -> None:
        if self._recording is None:
            self._recording = self._make_recording()
        described, watched = self._recording
        logs = recorder.begin(described).logs
        for operation, (mesh, place, watch, may_vanish) in zip(operations, watched, strict=True):
            began_s = recording.clock()
            operation(slots)
            if watch:
                logs[mesh].began(place, began_s)
                logs[mesh].ends_with(place, [slots[slot] for slot in watch], may_vanish)

    def _make_recording(self) -> tuple[StepDescription, list[_Watched]]:
        """What a step consists of, and what to wait for after each of its operations: one result of
        a run, and all that a `Send` has brought."""
        meshes = self.programs.meshes
        used_up = [recording.may_be_used_up(own, self.programs.donated) for own in meshes]
        places = [
            iter([n for n, i in enumerate(own.instructions) if not isinstance(i, Recv)])
            for own in meshes
        ]
        watched: list[_Watched] = []
        for mesh, instruction, received in self._order:
            place, watch, may_vanish = next(places[mesh]), (), False
            if isinstance(instruction, Run) and instruction.writes:
                at = self._offsets[mesh]
                best, may_vanish = recording.one_to_watch(
                    instruction.writes, lambda b, m=mesh: self._bytes_of((m, b)), used_up[mesh]
                )
                watch = (at + best,)
            elif isinstance(instruction, Send):
                at = self._offsets[instruction.to_mesh]
                watch = tuple(at + buffer for buffer in received)
                may_vanish = not used_up[instruction.to_mesh].isdisjoint(received)
            watched.append((mesh, place, watch, may_vanish))
        transfers = {}
        for number, transfer in enumerate(self.pipeline.transfers):
            buffer = self._buffers[transfer.source, transfer.ref.value]
            size = float(prod(buffer.shape) * buffer.dtype.itemsize)
            transfers[number] = transfer.source, transfer.target, size
        live = bytes_over_time(
            self.pipeline,
            self.programs,
            lambda stage, ref: _bytes_on_one_device(self._buffers[stage, ref.value]),
        )
        stage_programs = [
            (name, p.stage)
            for name, p in zip(self.names, self.pipeline.stage_programs, strict=True)
        ]
        described = StepDescription(
            self.plan, self.programs, tuple(stage_programs), transfers, live
        )
        return described, watched

    def run_tracked(self, leaves: Sequence[Any]) -> tuple[list[Any], StepStats]:
        """Run a step and look, after every instruction, at the arrays that are there."""
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
        return [slots[slot] for slot in self._output_slots], stats

    def time_stage_programs(
        self, leaves: Sequence[Any]
    ) -> list[tuple[StageProgram, int | None, float]]:
        """Run a step one instruction at a time: (stage program, micro-batch, seconds) of every
        run."""
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
        self._check_types(leaves)
        leaves = with_own_buffers(leaves, self.pipeline.donated)
        slots: Slots = [None] * self._num_slots
        elsewhere = []
        for i, (leaf, sharding) in enumerate(zip(leaves, self.input_shardings, strict=True)):
            if isinstance(leaf, jax.Array):
                if leaf.is_deleted():
                    raise DeletedArrayError(self.plan.name, i, leaf)
                if leaf.sharding == sharding:
                    slots[self._input_slots[i]] = leaf
                    continue
            elsewhere.append(i)
        if elsewhere:
            placed = jax.device_put(
                [leaves[i] for i in elsewhere], [self.input_shardings[i] for i in elsewhere]
            )
            for i, leaf in zip(elsewhere, placed, strict=True):
                slots[self._input_slots[i]] = leaf
        return slots

    def _check_types(self, leaves: Sequence[Any]) -> None:
        if len(leaves) != len(self._types) or weak_types(leaves) != self._weak_types:
            raise SignatureChanged
        for leaf, expected in zip(leaves, self._types, strict=True):
            if not isinstance(leaf, jax.Array):
                leaf = jax.typeof(leaf)  # with the types that JAX gives to what comes from NumPy
            if (leaf.shape, leaf.dtype) != expected:
                raise SignatureChanged

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put host or device arrays where the plan wants them."""
        return jax.device_put(list(leaves), self.input_shardings)

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Put some arguments, by position, where the plan wants them. Their owner may change them
        afterwards."""
        return place_some(leaves, self.input_shardings)

    def _inside_of_another_program(self, leaves: Sequence[Any]) -> list[Any]:
        self._check_types(leaves)
        if self._whole is None:
            raise TraceError(
                f"{self.plan.name} is a pipeline on {len(self.meshes)} meshes and was called "
                "inside of another traced program, which runs on one. Call it outside of jax.jit, "
                "or give parallelize(..., method=autopar.ShardParallel())."
            )
        return list(self._whole(*leaves))

    # -- compiling

    @property
    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The compiled stage programs by name, such as `stage0_forward`."""
        if self._compiled is None:
            self._compiled = compile_stage_programs(
                self.plan.name,
                self.pipeline,
                self._functions,
                self.programs.donated,
                self._buffers,
            )
        return dict(zip(self.names, self._compiled, strict=True))

    def _make_operations(self) -> list[Operation]:
        programs = list(self.compiled.values())
        self._operations = [self._operation(ordered, programs) for ordered in self._order]
        return self._operations

    def _operation(self, ordered: Ordered, programs: Sequence[Any]) -> Operation:
        instruction, at = ordered.instruction, self._offsets[ordered.mesh]
        if isinstance(instruction, Run):
            program = programs[instruction.stage_program]
            donated = self.programs.donated[instruction.stage_program]
            own = RunSlots(
                tuple(at + buffer for buffer in instruction.reads),
                tuple(at + instruction.reads[position] for position in donated),
                tuple(at + buffer for buffer in instruction.writes),
            )
            mesh = self.meshes[ordered.mesh]
            if must_run_alone(mesh):
                return run_alone_operation(program, own, list(mesh.devices.flat))
            return run_operation(program, own)
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
        return self._buffers[stage, transfer.ref.value]

    # -- looking into it

    def _bytes_of(self, buffer: Buffer) -> int:
        mesh, number = buffer
        stage, ref = self._held[mesh][number]
        return _bytes_on_one_device(self._buffers[stage, ref.value])

    def live_bytes(self) -> tuple[int, ...]:
        """The most bytes that lie in buffers of each mesh between instructions, per device, as
        the lists say: what `run_tracked` sees."""
        return peak_live_bytes(self._order, self.programs, self._bytes_of)

    def mesh_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes per device, by mesh: while a stage program runs, XLA's own figure of it
        (arguments, results and temporaries, those in place once) and what else lies in buffers."""
        own_bytes = [program_bytes(program) for program in self.compiled.values()]
        return peak_bytes(self._order, self.programs, self._bytes_of, own_bytes)

    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.mesh_memory_bytes())

    def num_instructions(self) -> dict[str, int]:
        """How many instructions of each kind a step has, on all meshes together."""
        kinds = [type(i).__name__ for program in self.programs.meshes for i in program.instructions]
        return dict(Counter(kinds))

    def hlo_text(self) -> str:
        """XLA's optimized HLO of every stage program, each under its name."""
        texts = [f"// {name}\n\n{one.as_text()}" for name, one in self.compiled.items()]
        return "\n\n".join(texts)

    def collectives(self) -> tuple[CollectiveOp, ...]:
        """Every collective that XLA will run in a step, with bytes and group sizes. Transfers from
        mesh to mesh are none."""
        runs = Counter(
            o.instruction.stage_program for o in self._order if isinstance(o.instruction, Run)
        )
        return tuple(
            replace(op, trips=op.trips * runs[number])
            for number, program in enumerate(self.compiled.values())
            for op in read_collectives(program.as_text() or "")
            if runs[number]
        )

    def dump_debug_info(self, directory: str | Path) -> None:
        """Write plan, programs, placement, strategies, the solver's problems, transfers, schedule,
        instructions and figures into a folder; its README.txt says what each file is."""
        dump(
            self,
            directory,
            (*self._program_files(), *instruction_files(self.programs)),
            mesh_memory_bytes=self.mesh_memory_bytes(),
            live_bytes=self.live_bytes(),
            num_instructions=self.num_instructions(),
        )

    def _program_files(self) -> Iterator[DebugFile]:
        lowered: list[jax.stages.Lowered] = []

        def annotated(number: int) -> str:
            if not lowered:
                lowered.extend(
                    lower_stage_programs(
                        self.plan.name,
                        self.pipeline,
                        self._functions,
                        self.programs.donated,
                        self._buffers,
                    )
                )
            return lowered[number].as_text()

        for number, (name, one) in enumerate(self.compiled.items()):
            yield from program_files(
                name, partial(annotated, number), lambda one=one: one.as_text() or ""
            )

    @property
    def buffers(self) -> Buffers:
        return self._buffers


def _bytes_on_one_device(array: Any) -> int:
    return prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize

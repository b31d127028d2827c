"""A step on the meshes of a cluster: what `step.last_executable` gives there.

A call sends one command to each worker (with what it must know of new arguments) and returns
handles at once; the workers carry out the step. A few steps may be on their way at a time.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar import _jax
from autopar.ir.live import sizes_over_time
from autopar.ir.pipeline import PipelinePrograms, Recv, Run, Send
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import (
    Bound,
    LoweredProgram,
    LoweredStep,
    MeshTask,
    ProgramSpec,
    RemoteTransfer,
    ShardedType,
    recv_order,
)
from autopar.ir.spec import num_shards
from autopar.progress import Progress, logged
from autopar.runtime import recording
from autopar.runtime.arguments import DeletedArrayError, SignatureChanged, is_weak
from autopar.runtime.debug import (
    DebugFile,
    Describe,
    describe_nothing,
    dump,
    instruction_files,
    program_files,
)
from autopar.runtime.hlo import CollectiveOp, read_collectives
from autopar.runtime.order import interleave, peak_bytes, peak_live_bytes
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.commands import Put, StepCall
from autopar.runtime.remote.exporting import export_stage_program, exported_stage_program
from autopar.runtime.remote.move import move
from autopar.runtime.remote.recording import collector_of
from autopar.runtime.remote.session import RemoteMesh, RemoteSession, same_place
from autopar.runtime.timestamps import StepDescription

MAX_STEPS_AHEAD = 2
_COMPILE_LIMIT_S = 4 * 3600.0
_WATCHED_BYTES = 4096  # values up to this size come back with the answer to the step


@dataclass(frozen=True)
class CallStats:
    """What the last call cost the driver."""

    num_calls: int  # remote procedure calls
    uploaded_bytes: int


class RemoteExecutable:
    """avals, out_avals: types of the step's arguments and results.
    whole:           the step as one flat function, for when it is called inside of another
                     program.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        lowered: LoweredStep,
        session: RemoteSession,
        avals: Sequence[Any],
        out_avals: Sequence[Any],
        whole: Callable[..., Sequence[Any]],
    ) -> None:
        self.plan = plan
        self.avals = tuple(avals)
        self.out_avals = tuple(out_avals)
        self.programs: PipelinePrograms = lowered.programs
        self.last_call: CallStats | None = None
        self._lowered = lowered
        self._session = session
        self._whole = whole
        self._types = [(aval.shape, aval.dtype) for aval in self.avals]
        self._weak_types = [aval.weak_type for aval in self.avals]
        self._order = interleave(lowered.programs)
        self._ahead: deque[list[Any]] = deque()
        self._stage_program_bytes: dict[int, int] = {}
        self.describe: Describe = describe_nothing
        num_meshes = len(lowered.meshes)
        self._arguments: list[list[Bound]] = [
            [a for a in lowered.arguments if a.mesh == mesh] for mesh in range(num_meshes)
        ]
        self._results = [
            [r for r in lowered.results if r.mesh == mesh] for mesh in range(num_meshes)
        ]
        self._num_tags = 1 + max(
            (
                i.tag
                for program in lowered.programs.meshes
                for i in program.instructions
                if isinstance(i, Send)
            ),
            default=0,
        )
        self._watched = [
            tuple(place for place, r in enumerate(own) if _is_small(r.held))
            for own in self._results
        ]
        platform = session.cluster.platform
        with ThreadPoolExecutor(1, thread_name_prefix="autopar-start") as starter:
            starting = starter.submit(session.meshes, lowered.meshes)
            exported = [
                export_stage_program(lowered.name, stage_program, platform)
                for stage_program in lowered.stage_programs
            ]
            self.meshes: list[RemoteMesh] = starting.result()
        self.number = session.new_task()
        weakref.finalize(self, session.end_task, self.number, self.meshes).atexit = False
        self._load(exported)

    # -- loading

    def _tasks(self) -> list[MeshTask]:
        lowered = self._lowered
        ends = {number: mesh.ends for number, mesh in enumerate(self.meshes)}
        tasks = []
        for mesh, program in enumerate(lowered.programs.meshes):
            stage_programs = {
                number: ProgramSpec(p.name, p.stage, p.reads, p.writes, p.donated)
                for number, p in enumerate(lowered.stage_programs)
                if lowered.stage_program_mesh[number] == mesh
            }
            moves = [i for i in program.instructions if isinstance(i, Send | Recv)]
            near = {mesh} | {i.to_mesh if isinstance(i, Send) else i.from_mesh for i in moves}
            tasks.append(
                MeshTask(
                    self.number,
                    lowered.name,
                    mesh,
                    stage_programs,
                    program,
                    {t: lowered.crossings[t] for i in moves for t in i.transfers},
                    recv_order(lowered.programs, mesh),
                    {number: ends[number] for number in sorted(near)},
                    tuple(
                        place
                        for place, (position, _) in enumerate(program.inputs)
                        if position in lowered.donated
                    ),
                )
            )
        return tasks

    def _load(self, exported: Sequence[bytes]) -> None:
        lowered, session = self._lowered, self._session
        tasks = self._tasks()
        session.tasks[self.number] = lowered
        waiting: list[tuple[int, Any]] = []
        announced: list[Any] = []
        for mesh, task in zip(self.meshes, tasks, strict=True):
            programs = [np.frombuffer(exported[number], np.uint8) for number in task.stage_programs]
            args = []
            for channel in mesh.channels:
                key = session.new_key()
                with session.connected():
                    channel.send(key, programs)
                args.append((task, key))
            announced += mesh.group.submit("announce", args)
            for number in task.stage_programs:
                replies = mesh.submit("compiled", self.number, number)
                waiting += [(number, reply) for reply in replies]
        for reply in announced:
            reply.result(_COMPILE_LIMIT_S)
        what = f"compiling {lowered.name} on workers"
        with Progress(what, len(waiting)) as progress, logged(what):
            for number, reply in waiting:
                self._stage_program_bytes[number] = reply.result(_COMPILE_LIMIT_S)
                progress.step()
        loaded = [mesh.submit("load", self.number) for mesh in self.meshes]
        session.prepare_links(self.meshes, [reply for own in loaded for reply in own])

    # -- running

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        self._check_types(leaves)
        if _jax.is_tracing():
            return list(self._whole(*leaves))
        self._session.check()
        self._wait_for_room()
        with self._session.lock:
            return self._submit(leaves)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        if len(leaves) != len(self._types) or [is_weak(x) for x in leaves] != self._weak_types:
            raise SignatureChanged
        for leaf, expected in zip(leaves, self._types, strict=True):
            if not isinstance(leaf, (jax.Array, DistributedArray)):
                leaf = jax.typeof(leaf)  # with the types that JAX gives to what comes from NumPy
            if (leaf.shape, leaf.dtype) != expected:
                raise SignatureChanged

    def _wait_for_room(self) -> None:
        """A step is sent when at most `MAX_STEPS_AHEAD` others are not done."""
        with self._session.lock:
            num_due = max(0, len(self._ahead) - MAX_STEPS_AHEAD + 1)
            due = [self._ahead.popleft() for _ in range(num_due)]
        for replies in due:  # others may send commands meanwhile, such as a data loader
            for reply in replies:
                reply.result()

    def _submit(self, leaves: Sequence[Any]) -> list[Any]:
        session, lowered = self._session, self._lowered
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, DistributedArray) and leaf.is_deleted():
                raise DeletedArrayError(self.plan.name, position, leaf)
        calls: list[list[StepCall]] = []
        taken: list[DistributedArray] = []
        uploaded_bytes = num_calls = 0
        outputs: list[list[int]] = []
        first_tag = session.new_tags(self._num_tags)
        seen: set[int] = set()  # numbers of the arrays that the step uses up
        for mesh, arguments, results, watched in zip(
            self.meshes, self._arguments, self._results, self._watched, strict=True
        ):
            numbers: dict[int, int] = {}  # by place among the arguments
            dropped: list[int] = []
            new: list[tuple[int, Bound]] = []
            copied: list[tuple[int, int, ShardedType]] = []
            # What is used up last: others may read the same array.
            in_order = sorted(
                enumerate(arguments), key=lambda one: one[1].position in lowered.donated
            )
            for place, argument in in_order:
                leaf = leaves[argument.position]
                used_up = argument.position in lowered.donated
                if not isinstance(leaf, DistributedArray):
                    new.append((place, argument))
                    continue
                found = _copy_on(leaf, mesh, argument.held)
                if found is None:
                    number = move(session, leaf, mesh, argument.held)
                    if not used_up:
                        dropped.append(number)
                elif used_up and (found in seen or found in numbers.values()):
                    number = session.new_number(mesh)
                    copied.append((found, number, argument.held))
                else:
                    number = found
                numbers[place] = number
                if used_up:
                    seen.add(number)
                    taken.append(leaf)
            puts: list[tuple[Put, ...]] = [()] * len(mesh.places)
            if new:
                values = [(leaves[a.position], a.held) for _, a in new]
                made, puts = session.upload(mesh, values)
                uploaded_bytes += sum(held.nbytes for _, held in values)
                for (place, argument), number in zip(new, made, strict=True):
                    numbers[place] = number
                    if argument.position not in lowered.donated:
                        dropped.append(number)
            if copied:
                mesh.submit("reshard", copied, fatal=True)
                num_calls += len(mesh.places)
            outputs.append([session.new_number(mesh) for _ in results])
            in_list = tuple(numbers[place] for place in range(len(arguments)))
            freed = mesh.take_released()
            ended = mesh.take_ended()
            if ended:
                mesh.submit("unload", ended)
                num_calls += len(mesh.places)
            mesh.group.num_arrays -= len(dropped) + sum(
                a.position in lowered.donated for a in arguments
            )
            calls.append(
                [
                    StepCall(
                        self.number,
                        in_list,
                        tuple(outputs[-1]),
                        own,
                        freed,
                        tuple(dropped),
                        first_tag,
                        watched,
                    )
                    for own in puts
                ]
            )
        if recording.current is not None:
            collector_of(recording.current, session).step(self.described, self.meshes, first_tag)
        replies = [
            mesh.group.submit("step", [(call,) for call in own], fatal=True)
            for mesh, own in zip(self.meshes, calls, strict=True)
        ]
        num_calls += sum(map(len, calls))
        self.last_call = CallStats(num_calls, uploaded_bytes)
        _use_up(taken, seen)
        self._ahead.append([reply for own in replies for reply in own])
        return self._handles(outputs, replies)

    def _handles(self, outputs: Sequence[Sequence[int]], replies: Sequence[Any]) -> list[Any]:
        copies: dict[int, list[Copy]] = {}
        known: dict[int, Callable[[], Any]] = {}
        for mesh, own, numbers, done, watched in zip(
            self.meshes, self._results, outputs, replies, self._watched, strict=True
        ):
            for place, (result, number) in enumerate(zip(own, numbers, strict=True)):
                copies.setdefault(result.position, []).append(Copy(mesh, number, result.held))
                known[result.position] = _waiter(done[0], place if place in watched else None)
        return [
            DistributedArray(
                self._session,
                tuple(aval.shape),
                aval.dtype,
                getattr(aval, "weak_type", False),
                tuple(copies[position]),
                known[position],
            )
            for position, aval in enumerate(self.out_avals)
        ]

    # -- arguments

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Put arguments, by their position, where the plan wants them."""
        placed: dict[int, Any] = {}
        by_mesh: dict[int, list[Bound]] = {}
        for argument in self._lowered.arguments:
            if argument.position in leaves and argument.position not in placed:
                placed[argument.position] = leaves[argument.position]
                if not isinstance(leaves[argument.position], DistributedArray):
                    by_mesh.setdefault(argument.mesh, []).append(argument)
        for mesh, arguments in by_mesh.items():
            values = [(leaves[a.position], a.held, self.avals[a.position]) for a in arguments]
            arrays = self._session.place(self.meshes[mesh], values)
            placed |= {a.position: x for a, x in zip(arguments, arrays, strict=True)}
        return placed

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put host arrays where the plan wants them."""
        placed = self.place_inputs(dict(enumerate(leaves)))
        return [placed[position] for position in range(len(leaves))]

    def wait(self) -> None:
        """Wait for all steps that were called."""
        while self._ahead:
            for reply in self._ahead.popleft():
                reply.result()

    # -- looking into it

    @property
    def _buffer_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes on one device of every buffer: (mesh, number)."""
        found: dict[tuple[int, int], int] = {}
        for argument in self._lowered.arguments:
            found[argument.mesh, argument.buffer] = _bytes_on_one_device(argument.held)
        for mesh, program in enumerate(self.programs.meshes):
            for instruction in program.instructions:
                if isinstance(instruction, Run):
                    stage_program = self._lowered.stage_programs[instruction.stage_program]
                    for buffer, held in zip(instruction.writes, stage_program.writes, strict=True):
                        found[mesh, buffer] = _bytes_on_one_device(held)
                elif isinstance(instruction, Recv):
                    for buffer, number in zip(
                        instruction.buffers, instruction.transfers, strict=True
                    ):
                        target = self._lowered.crossings[number].target
                        found[mesh, buffer] = _bytes_on_one_device(target)
        return found

    @cached_property
    def described(self) -> StepDescription:
        """What a record of a step speaks of."""
        lowered = self._lowered
        transfers = {}
        for program in lowered.programs.meshes:
            for recv in program.instructions:
                if isinstance(recv, Recv):
                    for number in recv.transfers:
                        source, target = lowered.ways[number]
                        size = float(lowered.crossings[number].source.nbytes)
                        transfers[number] = source, target, size
        bytes_of = self._buffer_bytes
        live = tuple(
            sizes_over_time(program, lambda b, m=mesh: bytes_of[m, b])
            for mesh, program in enumerate(self.programs.meshes)
        )
        stage_programs = tuple(
            (stage_program.name, stage_program.stage) for stage_program in lowered.stage_programs
        )
        return StepDescription(self.plan, self.programs, stage_programs, transfers, live)

    def live_bytes(self) -> tuple[int, ...]:
        """The most bytes that lie in buffers of each mesh between instructions, per device."""
        return peak_live_bytes(self._order, self.programs, self._buffer_bytes.__getitem__)

    def mesh_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes per device, by mesh: while a stage program runs, XLA's own figure of it, and
        what else lies in buffers."""
        own = [
            self._stage_program_bytes[number] for number in range(len(self._lowered.stage_programs))
        ]
        return peak_bytes(self._order, self.programs, self._buffer_bytes.__getitem__, own)

    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.mesh_memory_bytes())

    def num_instructions(self) -> dict[str, int]:
        """How many instructions of each kind a step has, on all meshes together."""
        kinds = [type(i).__name__ for program in self.programs.meshes for i in program.instructions]
        return dict(Counter(kinds))

    def hlo_texts(self) -> dict[str, str]:
        """XLA's optimized HLO of every stage program, by name."""
        texts: dict[int, str] = {}
        for mesh in self.meshes:
            first = [(self.number,)] + [None] * (len(mesh.places) - 1)
            texts |= mesh.group.submit("hlo_texts", first)[0].result(_COMPILE_LIMIT_S)
        return {self._lowered.stage_programs[n].name: texts[n] for n in sorted(texts)}

    def hlo_text(self) -> str:
        """XLA's optimized HLO of every stage program, each under its name."""
        return "\n\n".join(f"// {name}\n\n{text}" for name, text in self.hlo_texts().items())

    def collectives(self) -> tuple[CollectiveOp, ...]:
        """Every collective that XLA will run in a step, with bytes and group sizes. Transfers from
        mesh to mesh are none."""
        runs = Counter(
            o.instruction.stage_program for o in self._order if isinstance(o.instruction, Run)
        )
        names = [stage_program.name for stage_program in self._lowered.stage_programs]
        return tuple(
            replace(op, trips=op.trips * runs[names.index(name)])
            for name, text in self.hlo_texts().items()
            for op in read_collectives(text)
        )

    def dump_debug_info(self, directory: str | Path) -> None:
        """Write plan, programs, placement, strategies, the solver's problems, transfers, schedule,
        instructions and figures into a folder of the driver; its README.txt says what each is."""
        dump(
            self,
            directory,
            (*self._program_files(), *instruction_files(self.programs)),
            mesh_memory_bytes=self.mesh_memory_bytes(),
            live_bytes=self.live_bytes(),
            num_instructions=self.num_instructions(),
        )

    def _program_files(self) -> Iterator[DebugFile]:
        lowered, platform = self._lowered, self._session.cluster.platform
        optimized: dict[str, str] = {}

        def annotated(stage_program: LoweredProgram) -> str:
            return str(exported_stage_program(lowered.name, stage_program, platform).mlir_module())

        def compiled(name: str) -> str:
            if not optimized:
                optimized.update(self.hlo_texts())
            return optimized[name]

        for stage_program in lowered.stage_programs:
            yield from program_files(
                stage_program.name,
                partial(annotated, stage_program),
                partial(compiled, stage_program.name),
            )

    @property
    def crossings(self) -> Mapping[int, RemoteTransfer]:
        """Transfers from mesh to mesh, by number."""
        return self._lowered.crossings


def _use_up(taken: Sequence[DistributedArray], used_up: Collection[int]) -> None:
    """Empty the handles of arguments that a step uses up. What it has not taken itself, because it
    wanted them elsewhere or in another layout, is freed."""
    for leaf in taken:
        for copy in leaf.take():
            if copy.number not in used_up:
                copy.mesh.release(copy.number)


def _copy_on(leaf: DistributedArray, mesh: RemoteMesh, held: ShardedType) -> int | None:
    """The number of the array's copy on a mesh, if it lies there as wanted."""
    for copy in leaf.copies:
        if copy.mesh is mesh and same_place(copy.held, held):
            return copy.number
    return None


def _waiter(reply: Any, place: int | None) -> Callable[[], Any]:
    """Waits for a step; then the raw value of an output, if it came with the answer."""

    def wait() -> Any:
        done = reply.result()
        return None if place is None else done.values.get(place)

    return wait


def _is_small(held: ShardedType) -> bool:
    return held.nbytes <= _WATCHED_BYTES and num_shards(held.layout, held.mesh_shape) == 1


def _bytes_on_one_device(held: ShardedType) -> int:
    size = prod(held.shape) // num_shards(held.layout, held.mesh_shape)
    return size * np.dtype(held.dtype).itemsize

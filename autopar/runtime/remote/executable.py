"""A step on the meshes of a cluster: from a `LoweredStep` to `RemoteExecutable`.

A call sends one command to each worker, with whatever it must know about new arguments, and returns
handles at once; the workers run the step. A few steps may be in flight at a time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np

from autopar.ir.pipeline import Recv, Run, Send
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import (
    BoundBuffer,
    LoweredStep,
    MeshTask,
    ProgramSpec,
    RemoteTransfer,
    ShardedType,
    recv_order,
)
from autopar.ir.rows import Rows
from autopar.ir.text import format_bytes
from autopar.progress import Progress, logged
from autopar.runtime.arguments import DeletedArrayError
from autopar.runtime.executable import FlatFunction, InstructionExecutable
from autopar.runtime.order import Buffer
from autopar.runtime.recording import Recorder
from autopar.runtime.remote.arrays import Copy, DistributedArray
from autopar.runtime.remote.commands import StepCall
from autopar.runtime.remote.exporting import export_stage_program, exported_stage_program
from autopar.runtime.remote.mesh import PendingReply, RemoteMesh
from autopar.runtime.remote.recording import collector_of
from autopar.runtime.remote.save import register_remote_backend
from autopar.runtime.remote.session import RemoteSession
from autopar.runtime.remote.step_arguments import StepArguments, WantedArguments, rows_of
from autopar.runtime.timestamps import ProgramLabel
from autopar.runtime.uninterrupted import uninterrupted

MAX_STEPS_AHEAD = 2
_COMPILE_LIMIT_S = 4 * 3600.0
_WATCHED_BYTES = 4096  # results up to this size are returned with the answer to the step


@dataclass(frozen=True)
class CallStats:
    """What the last call cost the driver."""

    num_calls: int  # remote procedure calls
    uploaded_bytes: int


class RemoteExecutable(InstructionExecutable):
    """`out_avals`: types of the step's results."""

    def __init__(
        self,
        plan: ParallelPlan,
        lowered: LoweredStep,
        session: RemoteSession,
        avals: Sequence[Any],
        out_avals: Sequence[Any],
        whole: FlatFunction,
    ) -> None:
        super().__init__(
            plan,
            lowered.programs,
            [ProgramLabel(p.name, p.stage, p.phase) for p in lowered.stage_programs],
            {
                number: (one.source_stage, one.target_stage, float(one.source.nbytes))
                for number, one in lowered.transfers.items()
            },
            avals,
            whole,
        )
        self.out_avals = tuple(out_avals)
        self.last_call: CallStats | None = None
        self._lowered = lowered
        self._session = session
        self._ahead: deque[list[PendingReply]] = deque()
        self._stage_program_bytes: dict[int, int] = {}
        kinds: dict[ShardedType, ShardedType] = {}  # one object each: compared in every call
        arguments, self._results = (
            _by_mesh(lowered, [replace(b, type=kinds.setdefault(b.type, b.type)) for b in bound])
            for bound in (lowered.arguments, lowered.results)
        )
        self._arguments = [WantedArguments(wanted, lowered.donated) for wanted in arguments]
        self._out_types = [
            (tuple(aval.shape), aval.dtype, getattr(aval, "weak_type", False))
            for aval in self.out_avals
        ]
        self._held = _held_results(self._results, len(self.out_avals))
        sends = (i for program in lowered.programs.meshes for i in program.instructions)
        self._num_tags = 1 + max((i.tag for i in sends if isinstance(i, Send)), default=0)
        self._watched = [
            tuple(
                place
                for place, result in enumerate(results)
                if _is_watched(result, result.position in lowered.state_results)
            )
            for results in self._results
        ]
        self.meshes: list[RemoteMesh] = []
        self._start()

    # -- loading

    def _start(self) -> None:
        """Start the meshes that do not run, and load the step on all."""
        lowered, session = self._lowered, self._session
        with ThreadPoolExecutor(1, thread_name_prefix="autopar-start") as starter:
            starting = starter.submit(session.meshes, lowered.meshes)
            exported = {
                number: export_stage_program(lowered.name, one, session.cluster.platform)
                for number, one in enumerate(lowered.stage_programs)
                if session.runs_here(lowered.meshes[lowered.stage_program_mesh[number]])
            }
            self.meshes = starting.result()
        register_remote_backend()
        self.number = session.new_task()
        self._end = weakref.finalize(self, session.end_task, self.number, self.meshes)
        self._end.atexit = False
        self._load(exported)

    def _start_again(self) -> None:
        """Once another step needed the GPUs, meshes of this one may be closed."""
        if any(mesh.group.closed for mesh in self.meshes):
            self._end()
            self._ahead.clear()
            self._start()

    def _task(self, mesh: int) -> MeshTask:
        lowered, program = self._lowered, self._lowered.programs.meshes[mesh]
        sent = [i for i in program.instructions if isinstance(i, Send | Recv)]
        peers = {mesh} | {i.to_mesh if isinstance(i, Send) else i.from_mesh for i in sent}
        options = self.plan.xla_options or ()
        return MeshTask(
            number=self.number,
            name=lowered.name,
            mesh=mesh,
            stage_programs={
                number: ProgramSpec(p.name, p.stage, p.reads, p.writes, p.donated, options)
                for number, p in enumerate(lowered.stage_programs)
                if lowered.stage_program_mesh[number] == mesh
            },
            program=program,
            transfers={number: lowered.transfers[number] for i in sent for number in i.transfers},
            recv_order=recv_order(lowered.programs, mesh),
            endpoints={number: self.meshes[number].endpoints for number in sorted(peers)},
            used_up=tuple(
                place
                for place, argument in enumerate(self._arguments[mesh].buffers)
                if argument.position in lowered.donated
            ),
        )

    def _load(self, exported: Mapping[int, bytes]) -> None:
        """Send the programs to the workers, which compile them, and connect the workers."""
        lowered, session = self._lowered, self._session
        session.tasks[self.number] = lowered
        compiling: list[tuple[int, PendingReply]] = []
        announced: list[PendingReply] = []
        for number, mesh in enumerate(self.meshes):
            task = self._task(number)
            code = [
                np.frombuffer(exported[p], np.uint8) for p in task.stage_programs if p in exported
            ]
            announced += session.announce(mesh, task, code)
            for program in task.stage_programs:
                replies = mesh.submit("compiled", self.number, program)
                compiling += [(program, reply) for reply in replies]
        for reply in announced:
            reply.result(_COMPILE_LIMIT_S)
        what = f"compiling {lowered.name} on workers"
        with Progress(what, len(compiling)) as progress, logged(what):
            for program, reply in compiling:
                self._stage_program_bytes[program] = reply.result(_COMPILE_LIMIT_S)
                progress.step()
        loaded = [mesh.submit("load", self.number) for mesh in self.meshes]
        session.prepare_links(self.meshes, [reply for replies in loaded for reply in replies])

    # -- running

    def _run(self, leaves: Sequence[Any], recorder: Recorder | None) -> list[DistributedArray]:
        self._session.check()
        self._start_again()
        self._wait_for_room()
        with uninterrupted(), self._session.lock:
            return self._submit(leaves, recorder)

    def check_room(self, leaves: Sequence[Any]) -> None:
        """Raise JAX's error that memory is short, unless every device has as much left as XLA
        counts for a run of the step, beside the arguments that are there. Nothing runs."""
        self._session.check()
        self._start_again()
        asked: list[tuple[int, Sequence[PendingReply]]] = []
        with uninterrupted(), self._session.lock:
            for mesh, peak, wanted in zip(
                self.meshes, self.mesh_memory_bytes(), self._arguments, strict=True
            ):
                mesh.free_released()
                needed = max(0, peak - wanted.bytes_there(mesh, leaves))
                asked.append((needed, mesh.submit("has_room", needed)))
        answers = [(needed, [r.result() for r in replies]) for needed, replies in asked]
        short = {m: needed for m, (needed, has) in enumerate(answers) if not all(has)}
        if short:
            where = ", ".join(f"mesh {mesh}, {format_bytes(n)}" for mesh, n in short.items())
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: {self.plan.name}: no room for what a run needs beside the "
                f"arguments that are there, per device: {where}. No worker has begun the step."
            )

    def _wait_for_room(self) -> None:
        """Wait until fewer than `MAX_STEPS_AHEAD` steps are in flight."""
        with self._session.lock:
            num_due = max(0, len(self._ahead) - MAX_STEPS_AHEAD + 1)
            due = [self._ahead[place] for place in range(num_due)]
        for replies in due:  # meanwhile others may send commands, such as a data loader
            for reply in replies:
                reply.result()
        with self._session.lock:
            while self._ahead and all(reply.done() for reply in self._ahead[0]):
                self._ahead.popleft()

    def _submit(self, leaves: Sequence[Any], recorder: Recorder | None) -> list[DistributedArray]:
        session = self._session
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, DistributedArray) and leaf.is_deleted():
                raise DeletedArrayError(self.plan.name, position, leaf)
        arguments = StepArguments(session, leaves, self._lowered.donated)
        first_tag = session.new_tags(self._num_tags)
        calls: list[list[StepCall]] = []
        outputs: list[range] = []
        for number, mesh in enumerate(self.meshes):
            numbers, dropped, puts = arguments.gather(mesh, self._arguments[number])
            outputs.append(session.new_numbers(mesh, len(self._results[number])))
            freed = mesh.take_released()
            if ended := mesh.take_ended():
                mesh.submit("unload", ended)
                arguments.num_calls += len(mesh.places)
            watched = self._watched[number]
            calls.append(
                [
                    StepCall(
                        self.number, numbers, outputs[-1], put, freed, dropped, first_tag, watched
                    )
                    for put in puts
                ]
            )
        if recorder is not None:
            collector_of(recorder, session).step(self.description, self.meshes, first_tag)
        replies = [
            mesh.group.submit("step", [(call,) for call in mesh_calls], fatal=True)
            for mesh, mesh_calls in zip(self.meshes, calls, strict=True)
        ]
        num_calls = arguments.num_calls + sum(map(len, calls))
        self.last_call = CallStats(num_calls, arguments.uploaded_bytes)
        arguments.use_up()
        self._ahead.append([reply for mesh_replies in replies for reply in mesh_replies])
        return self._handles(outputs, replies)

    def _handles(
        self, outputs: Sequence[range], replies: Sequence[Sequence[PendingReply]]
    ) -> list[DistributedArray]:
        meshes, watched = self.meshes, self._watched
        done = [mesh_replies[0] for mesh_replies in replies]
        unwatched = [_waiter(reply, None) for reply in done]
        handles = []
        for (shape, dtype, is_weak), held in zip(self._out_types, self._held, strict=True):
            copies = [
                Copy(meshes[m], outputs[m][place], type_, rows) for m, place, type_, rows in held
            ]
            waiters = [
                _waiter(done[m], place) if place in watched[m] else unwatched[m]
                for m, place, _, _ in held
            ]
            known = waiters[0] if len(waiters) == 1 else _all_waiters(waiters)
            handles.append(
                DistributedArray(self._session, shape, dtype, is_weak, tuple(copies), known)
            )
        return handles

    def place_inputs(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        self._start_again()
        placed = dict(leaves)
        by_mesh: dict[int, list[BoundBuffer]] = {}
        known: set[int] = set()
        for argument in self._lowered.arguments:
            position, rows = argument.position, argument.rows
            if position not in leaves or (position in known and rows is None):
                continue
            known.add(position)
            if not isinstance(leaves[position], DistributedArray):
                by_mesh.setdefault(argument.mesh, []).append(argument)
        copies: dict[int, list[Copy]] = {}
        for mesh, arguments in by_mesh.items():
            values = [(rows_of(leaves[a.position], a.rows), a.type) for a in arguments]
            numbers = self._session.place(self.meshes[mesh], values)
            for argument, number in zip(arguments, numbers, strict=True):
                copy = Copy(self.meshes[mesh], number, argument.type, argument.rows)
                copies.setdefault(argument.position, []).append(copy)
        for position, held in copies.items():
            aval = self.avals[position]
            is_weak = getattr(aval, "weak_type", False)
            in_order = tuple(sorted(held, key=lambda copy: copy.first_row))
            shape = tuple(aval.shape)
            placed[position] = DistributedArray(self._session, shape, aval.dtype, is_weak, in_order)
        return placed

    def wait(self) -> None:
        """Wait for all steps that were called."""
        with self._session.lock:
            due, self._ahead = list(self._ahead), deque()
        for replies in due:
            for reply in replies:
                reply.result()

    # -- inspection

    @cached_property
    def _buffer_types(self) -> dict[Buffer, ShardedType]:
        lowered = self._lowered
        types = {(a.mesh, a.buffer): a.type for a in lowered.arguments}
        for mesh, program in enumerate(self.programs.meshes):
            for instruction in program.instructions:
                if isinstance(instruction, Run):
                    buffers = instruction.writes
                    written = lowered.stage_programs[instruction.stage_program].writes
                elif isinstance(instruction, Recv):
                    buffers = instruction.buffers
                    written = [lowered.transfers[t].target for t in instruction.transfers]
                else:
                    continue
                types |= {(mesh, b): type_ for b, type_ in zip(buffers, written, strict=True)}
        return types

    def _bytes_of(self, buffer: Buffer) -> int:
        return self._buffer_types[buffer].shard_bytes

    def _program_bytes(self) -> list[int]:
        return [self._stage_program_bytes[number] for number in range(len(self.names))]

    def hlo_texts(self) -> dict[str, str]:
        texts: dict[int, str] = {}
        for mesh in self.meshes:
            first = [(self.number,)] + [None] * (len(mesh.places) - 1)
            texts |= mesh.group.submit("hlo_texts", first)[0].result(_COMPILE_LIMIT_S)
        return {self.names[number]: texts[number] for number in sorted(texts)}

    def annotated_text(self, name: str) -> str:
        program = self._lowered.stage_programs[self.names.index(name)]
        platform = self._session.cluster.platform
        return str(exported_stage_program(self._lowered.name, program, platform).mlir_module())

    @property
    def transfers(self) -> Mapping[int, RemoteTransfer]:
        """Transfers between stages, by number."""
        return self._lowered.transfers


def _by_mesh(lowered: LoweredStep, bound: Sequence[BoundBuffer]) -> list[list[BoundBuffer]]:
    return [[one for one in bound if one.mesh == mesh] for mesh in range(len(lowered.meshes))]


def _waiter(reply: PendingReply, place: int | None) -> Callable[[], np.ndarray | None]:
    """Waits for a step, then gives the raw value of a result, if it came with the answer."""

    def wait() -> np.ndarray | None:
        done = reply.result()
        return None if place is None else done.values.get(place)

    return wait


def _all_waiters(
    waiters: Sequence[Callable[[], np.ndarray | None]],
) -> Callable[[], np.ndarray | None]:
    """Waits for all parts of a stack; a value that came with the answer is no part of one."""
    if len(waiters) == 1:
        return waiters[0]

    def wait() -> None:
        for waiter in waiters:
            waiter()

    return wait


_Held = tuple[int, int, ShardedType, Rows | None]


def _held_results(results: Sequence[Sequence[BoundBuffer]], count: int) -> list[list[_Held]]:
    """Per result, where it is: mesh, place among the mesh's results, type and rows."""
    held: list[list[_Held]] = [[] for _ in range(count)]
    for mesh, of_mesh in enumerate(results):
        for place, one in enumerate(of_mesh):
            held[one.position].append((mesh, place, one.type, one.rows))
    return [sorted(parts, key=lambda part: part[3] or (0, 0)) for parts in held]


def _is_watched(result: BoundBuffer, is_state: bool) -> bool:
    """Whether a result's value is returned with the answer to the step: small ones, such as a loss;
    of the state only single numbers, such as its step."""
    limit = 1 if is_state else _WATCHED_BYTES // np.dtype(result.type.dtype).itemsize
    is_small = prod(result.type.shape) <= limit and result.type.num_shards == 1
    return is_small and result.rows is None

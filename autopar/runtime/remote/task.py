"""A worker's part of a step: from a `MeshTask` and compiled stage programs to operations on slots.

Slots are the buffers of the mesh's list. Received tiles are joined only when a stage program reads
the array or sends it on, so they can arrive while the mesh computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import jax

from autopar.ir.pipeline import Free, Instruction, Recv, Run, Send
from autopar.ir.remote import MeshTask, RemoteTransfer
from autopar.runtime.recording import MeshLog, clock, may_be_used_up, one_to_watch
from autopar.runtime.remote.transfers import IncomingTiles, OutgoingTiles, same_mesh_copier
from autopar.runtime.threads import must_leave_first, run_alone
from autopar.runtime.transports.base import Link, Transport

Slots = list[Any]
Operation = Callable[[Slots, int], None]  # on slots, with the first tag of the step


class _Arriving:
    """Arrays of one `Recv`, whose tiles may still be in flight."""

    def __init__(self, incoming: IncomingTiles, tiles: Sequence[jax.Array]) -> None:
        self._incoming = incoming
        self._tiles: Sequence[jax.Array] | None = tiles
        self._arrays: list[jax.Array] = []
        self.when_joined: Callable[[list[jax.Array]], None] | None = None

    def arrays(self) -> list[jax.Array]:
        if self._tiles is not None:
            self._arrays, self._tiles = self._incoming.assemble(self._tiles), None
            if self.when_joined is not None:
                self.when_joined(self._arrays)
        return self._arrays


class _ArrivingArray:
    """One of the arrays of a `Recv`."""

    def __init__(self, arriving: _Arriving, number: int) -> None:
        self.arriving = arriving
        self._number = number

    def array(self) -> jax.Array:
        return self.arriving.arrays()[self._number]


def array_in(slots: Slots, slot: int) -> jax.Array:
    """The array of a slot; joins its tiles if it was received and not read yet."""
    value = slots[slot]
    if isinstance(value, _ArrivingArray):
        value = slots[slot] = value.array()
    return value


def _micro_batch(instruction: Instruction) -> int:
    """The micro-batch of an instruction, as progress is told; -1 for none."""
    micro_batch = getattr(instruction, "micro_batch", None)
    return -1 if micro_batch is None else micro_batch


class WorkerTask:
    """The operations of a step, one per instruction.

    stage_programs: compiled, by number.
    devices:        all devices of the mesh, including those of other processes.
    transport:      None if the step has no transfers between meshes.
    """

    def __init__(
        self,
        task: MeshTask,
        stage_programs: Mapping[int, jax.stages.Compiled],
        devices: list[Any],
        worker: int,
        transport: Transport | None,
        runs_alone: bool,
    ) -> None:
        self.task = task
        self.stage_programs = stage_programs
        self._devices = devices
        self._worker = worker
        self._transport = transport
        self._runs_alone = runs_alone
        self._local = [d for d in devices if d.process_index == jax.process_index()]
        self._incoming: dict[int, IncomingTiles] = {}
        self._posted: dict[int, _Arriving] = {}  # by the place of the Recv, while a step runs
        self._copied: dict[int, list[Any]] = {}  # by tag, between stages of this mesh
        donated = {
            number: stage_program.donated for number, stage_program in task.stage_programs.items()
        }
        self._used_up = may_be_used_up(task.program, donated)
        instructions = task.program.instructions
        self._received = {b for one in instructions if isinstance(one, Recv) for b in one.buffers}
        self.operations = [
            self._operation(place, instruction) for place, instruction in enumerate(instructions)
        ]
        self._micro_batches = [_micro_batch(instruction) for instruction in instructions]
        self.smallest_output = self._smallest_output()

    def run(self, slots: Slots, first_tag: int, at: Callable[[int, int], None]) -> None:
        """Run the list; calls `at(instruction, micro-batch)` before each instruction."""
        in_order = zip(self.operations, self._micro_batches, strict=True)
        for place, (operation, micro_batch) in enumerate(in_order):
            at(place, micro_batch)
            operation(slots, first_tag)

    def run_recorded(
        self, slots: Slots, first_tag: int, at: Callable[[int, int], None], log: MeshLog
    ) -> None:
        """The same, with a log: a run ends when its results are ready, a `Recv` when its arrays are
        joined, a `Send` when the transport has taken it."""
        used_up = self._used_up
        for place, (operation, instruction) in enumerate(
            zip(self.operations, self.task.program.instructions, strict=True)
        ):
            at(place, self._micro_batches[place])
            began_s = clock()
            operation(slots, first_tag)
            match instruction:
                case Run(writes=writes):
                    log.began(place, began_s)
                    if writes:
                        best, may_vanish = one_to_watch(writes, lambda b: slots[b].size, used_up)
                        log.ends_with(place, [slots[best]], may_vanish)
                case Send():
                    log.began(place, began_s)
                    log.ended(place, clock())
                case Recv(buffers=buffers):
                    log.began(place, began_s)
                    first = slots[buffers[0]]
                    if isinstance(first, _ArrivingArray):
                        first.arriving.when_joined = partial(log.ends_with, place, may_vanish=True)
                    else:
                        log.ends_with(place, [slots[b] for b in buffers], may_vanish=True)

    def _smallest_output(self) -> int | None:
        """The place of the smallest result of the step; None if it has none."""
        sizes = {
            buffer: type_.nbytes
            for one in self.task.program.instructions
            if isinstance(one, Run)
            for buffer, type_ in zip(
                one.writes, self.task.stage_programs[one.stage_program].writes, strict=True
            )
        }
        outputs = self.task.program.outputs
        by_size = [(sizes.get(buffer, inf), place) for place, (_, buffer) in enumerate(outputs)]
        return min(by_size)[1] if by_size else None

    def warm_up(self) -> None:
        """Load the programs that cut, join and make room for tiles, before any transfer waits
        (`Transport.expect`). Stage programs load as they first run: what they wait for is under way
        by then."""
        outgoing = [
            self._outgoing(place, instruction)
            for place, instruction in enumerate(self.task.program.instructions)
            if isinstance(instruction, Send) and instruction.to_mesh != self.task.mesh
        ]
        warmed: set[Any] = set()
        for tiles in (*outgoing, *self._incoming.values()):
            tiles.warm_up(warmed)
        if self._transport is not None:
            self._transport.expect([t for one in self._incoming.values() for t in one.tiles])

    def links(self) -> list[Link]:
        """The links on which this worker sends and receives."""
        links: dict[Link, None] = {}
        for place, instruction in enumerate(self.task.program.instructions):
            if isinstance(instruction, Recv) and place in self._incoming:
                for tile in self._incoming[place].tiles:
                    links[Link(tile.source, tile.targets)] = None
            elif isinstance(instruction, Send) and instruction.to_mesh != self.task.mesh:
                for link in self._outgoing(place, instruction).links():
                    links[link] = None
        return list(links)

    def _operation(self, place: int, instruction: Instruction) -> Operation:
        match instruction:
            case Run():
                return self._run(instruction)
            case Send():
                if instruction.to_mesh == self.task.mesh:
                    return self._copy(instruction)
                return self._send(place, instruction)
            case Recv():
                if instruction.from_mesh == self.task.mesh:
                    return self._take(instruction)
                return self._recv(place, instruction)
            case Free():
                return self._free(instruction)

    def _run(self, run: Run) -> Operation:
        program, spec = (
            self.stage_programs[run.stage_program],
            self.task.stage_programs[run.stage_program],
        )
        used_up = [run.reads[position] for position in spec.donated]
        received = [slot for slot in run.reads if slot in self._received]
        local, runs_alone = self._local, self._runs_alone

        def operation(slots: Slots, first_tag: int) -> None:
            for slot in received:
                array_in(slots, slot)
            values = [slots[slot] for slot in run.reads]
            if runs_alone:
                results = run_alone(program, values, local)
            else:
                results = program(*values)
            del values
            for slot in used_up:
                slots[slot] = None
            for slot, result in zip(run.writes, results, strict=True):
                slots[slot] = result

        return operation

    def _transfers(self, numbers: Sequence[int]) -> list[RemoteTransfer]:
        return [self.task.transfers[number] for number in numbers]

    def _outgoing(self, place: int, send: Send) -> OutgoingTiles:
        later = self.task.program.instructions[place + 1 :]
        used_up = {
            run.reads[position]
            for run in later
            if isinstance(run, Run)
            for position in self.task.stage_programs[run.stage_program].donated
        }
        return OutgoingTiles(
            self._transfers(send.transfers),
            [buffer not in used_up for buffer in send.buffers],
            self.task.endpoints[self.task.mesh],
            self.task.endpoints[send.to_mesh],
            self._worker,
            self._local,
        )

    def _send(self, place: int, send: Send) -> Operation:
        outgoing, transport = self._outgoing(place, send), self._transport
        assert transport is not None
        local, runs_alone = self._local, self._runs_alone

        def operation(slots: Slots, first_tag: int) -> None:
            tiles = outgoing.tiles([array_in(slots, slot) for slot in send.buffers])
            if runs_alone:
                must_leave_first([tile.data for tile in tiles], local)
            transport.send(first_tag + send.tag, tiles)

        return operation

    def _recv(self, place: int, recv: Recv) -> Operation:
        instructions = self.task.program.instructions
        due = []
        for other in self.task.recv_order[place]:
            posted = instructions[other]
            assert isinstance(posted, Recv)
            due.append((other, posted.tag, self._incoming_of(other, posted)))
        transport, waiting = self._transport, self._posted
        assert transport is not None

        def operation(slots: Slots, first_tag: int) -> None:
            for other, tag, incoming in due:
                tiles = transport.recv(first_tag + tag, incoming.tiles) if incoming.tiles else []
                waiting[other] = _Arriving(incoming, tiles)
            arriving = waiting.pop(place)
            for number, slot in enumerate(recv.buffers):
                slots[slot] = _ArrivingArray(arriving, number)

        return operation

    def _incoming_of(self, place: int, recv: Recv) -> IncomingTiles:
        if place not in self._incoming:
            self._incoming[place] = IncomingTiles(
                self._transfers(recv.transfers),
                self.task.endpoints[recv.from_mesh],
                self.task.endpoints[self.task.mesh],
                self._worker,
                self._devices,
                self._local,
            )
        return self._incoming[place]

    def _copy(self, send: Send) -> Operation:
        copiers = [same_mesh_copier(c, self._devices) for c in self._transfers(send.transfers)]

        def operation(slots: Slots, first_tag: int) -> None:
            arrays = [array_in(slots, slot) for slot in send.buffers]
            self._copied[send.tag] = [
                copy(array) for copy, array in zip(copiers, arrays, strict=True)
            ]

        return operation

    def _take(self, recv: Recv) -> Operation:
        def operation(slots: Slots, first_tag: int) -> None:
            for slot, array in zip(recv.buffers, self._copied.pop(recv.tag), strict=True):
                slots[slot] = array

        return operation

    def _free(self, free: Free) -> Operation:
        def operation(slots: Slots, first_tag: int) -> None:
            for slot in free.buffers:
                slots[slot] = None

        return operation

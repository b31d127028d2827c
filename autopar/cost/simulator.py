"""Simulates a step: from lists of instructions and seconds to when each of them runs.

Every mesh goes through its list in order. A run starts when the mesh is free and what it reads has
arrived. Sending and receiving take none of a mesh's time: a transfer begins when its `Send` and its
`Recv` have both been reached and its way is free, and goes on while both meshes compute. So a
schedule that receives right before use waits for every transfer, and one that receives ahead hides
them behind what runs after the `Recv`. So it is on GPUs, where room for what comes is made in the
order of the receiver's programs.

Ways are shared: two meshes in one host have links of their own, each way; what leaves a host, or
comes into it, goes over that host's network. A way carries one transfer at a time, those first that
were ready first: two that shared it at half the rate would both be there when the second is. What
the target's devices gather among themselves is part of the transfer.

In exact arithmetic the end of a step grows with every duration as long as no two pairs of meshes
share a network (then it is the longest path through the lists). With a shared one it may not: who
is late lets another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from autopar.ir.live import bytes_over_time
from autopar.ir.pipeline import (
    Free,
    Pipeline,
    PipelinePrograms,
    Recv,
    Ref,
    Run,
    Send,
    stage_program_names,
)
from autopar.ir.timeline import Event, Timeline

_RUN, _SEND, _RECV = range(3)
_UNKNOWN = -1.0

Routes = Callable[[int, int], Sequence[Hashable]]  # from mesh, to mesh -> the ways it takes


class TransferTime(NamedTuple):
    """Of one transfer of a pipeline. `latency_s` is the part of its seconds that is paid once for
    all that one `Send` sends."""

    num_bytes: float
    seconds: float
    latency_s: float = 0.0


class _Step(NamedTuple):
    """An instruction: the seconds of a run, or the number of a transfer. `waits` are transfers
    that must have arrived."""

    code: int
    value: float
    waits: tuple[int, ...]


class SimulatedSend(NamedTuple):
    """All that one `Send` sends."""

    source: int  # stages
    target: int
    micro_batch: int | None
    num_bytes: float
    seconds: float
    ways: tuple[int, ...]


@dataclass(frozen=True)
class SimulatedRun:
    """What is simulated: a list per mesh, and what the lists send."""

    meshes: tuple[tuple[_Step, ...], ...]
    sent: tuple[SimulatedSend, ...]
    num_ways: int

    @property
    def num_events(self) -> int:
        return sum(map(len, self.meshes))


@dataclass(frozen=True)
class Simulated:
    """When: the start of every run of a mesh, in order; of everything sent the start and the end on
    its way; and when the last mesh is done."""

    run_starts_s: tuple[tuple[float, ...], ...]
    sent_s: tuple[tuple[float, float], ...]
    step_s: float


def own_links(source: int, target: int) -> Sequence[Hashable]:
    """Every pair of meshes has a link of its own, each way."""
    return ((source, target),)


def host_routes(hosts: Sequence[frozenset[int]]) -> Routes:
    """The ways between meshes on these hosts: links of their own in a host, else the networks of
    all hosts that it leaves and of all that it enters."""

    def ways(source: int, target: int) -> Sequence[Hashable]:
        if len(hosts[source] | hosts[target]) == 1:
            return ((source, target),)
        out = [("out", host) for host in sorted(hosts[source])]
        return (*out, *(("in", host) for host in sorted(hosts[target])))

    return ways


def program_work(
    pipeline: Pipeline,
    programs: PipelinePrograms,
    stage_program_s: Sequence[float],
    transfers: Sequence[TransferTime],
    routes: Routes = own_links,
) -> SimulatedRun:
    """The lists as work. `stage_program_s` and `transfers` are by their numbers in the pipeline."""
    numbers: dict[tuple[int, int, int], int] = {}
    sent: list[SimulatedSend] = []
    ways: dict[Hashable, int] = {}
    known_ways: dict[tuple[int, int], tuple[int, ...]] = {}
    for mesh, program in enumerate(programs.meshes):
        for send in program.instructions:
            if not isinstance(send, Send):
                continue
            pair = mesh, send.to_mesh
            if pair not in known_ways:
                found = () if mesh == send.to_mesh else routes(*pair)
                known_ways[pair] = tuple(ways.setdefault(way, len(ways)) for way in found)
            own = [transfers[number] for number in send.transfers]
            latency_s = max(one.latency_s for one in own)
            first = pipeline.transfers[send.transfers[0]]
            numbers[mesh, send.to_mesh, send.tag] = len(sent)
            sent.append(
                SimulatedSend(
                    first.source,
                    first.target,
                    send.micro_batch,
                    sum(one.num_bytes for one in own),
                    latency_s + sum(one.seconds - one.latency_s for one in own),
                    known_ways[pair],
                )
            )
    lists = []
    for mesh, program in enumerate(programs.meshes):
        steps: list[_Step] = []
        coming: dict[int, int] = {}  # buffers that no run has waited for yet
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                waits = _waits(coming, instruction.reads) if coming else ()
                steps.append(_Step(_RUN, stage_program_s[instruction.stage_program], waits))
            elif isinstance(instruction, Send):
                number = numbers[mesh, instruction.to_mesh, instruction.tag]
                held = [coming[b] for b in instruction.buffers if b in coming] if coming else ()
                steps.append(_Step(_SEND, number, tuple(dict.fromkeys(held))))
            elif isinstance(instruction, Recv):
                number = numbers[instruction.from_mesh, mesh, instruction.tag]
                coming.update(dict.fromkeys(instruction.buffers, number))
                steps.append(_Step(_RECV, number, ()))
        lists.append(tuple(steps))
    return SimulatedRun(tuple(lists), tuple(sent), len(ways))


def _waits(coming: dict[int, int], reads: Sequence[int]) -> tuple[int, ...]:
    """The transfers that bring what is read and was not waited for before."""
    found = {coming.pop(buffer): None for buffer in reads if buffer in coming}
    return tuple(found)


def simulate(work: SimulatedRun) -> Simulated:
    """Each mesh is taken as far as it gets without what has not arrived; of the transfers that can
    begin, the one that was ready first comes next, and lets its receiver go on."""
    lists, num_sent = work.meshes, len(work.sent)
    seconds = [one.seconds for one in work.sent]
    ways = [one.ways for one in work.sent]
    one_side_s = [_UNKNOWN] * num_sent  # when the first of `Send` and `Recv` was reached
    arrival_s = [_UNKNOWN] * num_sent
    begin_s = [_UNKNOWN] * num_sent
    way_free_s = [0.0] * work.num_ways
    position, now_s = [0] * len(lists), [0.0] * len(lists)
    starts: list[list[float]] = [[] for _ in lists]
    stopped: dict[int, int] = {}  # by the transfer that a mesh needs to go on
    ready: list[tuple[float, int]] = []

    def advance(mesh: int) -> None:
        steps, now, own = lists[mesh], now_s[mesh], starts[mesh]
        for at in range(position[mesh], len(steps)):
            code, value, waits = steps[at]
            start = now
            for number in waits:
                there = arrival_s[number]
                if there < 0:
                    stopped[number] = mesh
                    position[mesh], now_s[mesh] = at, now
                    return
                if there > start:
                    start = there
            if code == _RUN:
                own.append(start)
                now = start + value
            else:
                number = int(value)
                other = one_side_s[number]
                if other < 0:
                    one_side_s[number] = start
                else:
                    heappush(ready, (start if start > other else other, number))
        position[mesh], now_s[mesh] = len(steps), now

    for mesh in range(len(lists)):
        advance(mesh)
    while ready:
        start, number = heappop(ready)
        for way in ways[number]:
            if way_free_s[way] > start:
                start = way_free_s[way]
        end = start + seconds[number]
        for way in ways[number]:
            way_free_s[way] = end
        begin_s[number], arrival_s[number] = start, end
        if number in stopped:
            advance(stopped.pop(number))
    assert all(at == len(own) for at, own in zip(position, lists, strict=True)), "lists that wait"
    return Simulated(
        tuple(map(tuple, starts)),
        tuple(zip(begin_s, arrival_s, strict=True)),
        max((*now_s, *arrival_s), default=0.0),
    )


def timeline(
    pipeline: Pipeline,
    programs: PipelinePrograms,
    work: SimulatedRun,
    found: Simulated,
    bytes_of: Callable[[int, Ref], int] | None = None,
) -> Timeline:
    """The same as events; with `bytes_of` (see `ir.live`) also the bytes that lie in buffers."""
    names = stage_program_names(pipeline)
    live = None if bytes_of is None else bytes_over_time(pipeline, programs, bytes_of)
    events: list[Event] = []
    memory: list[tuple[tuple[float, float], ...]] = []
    for mesh, program in enumerate(programs.meshes):
        starts = iter(found.run_starts_s[mesh])
        steps = iter(work.meshes[mesh])
        line: list[tuple[float, float]] = []
        now = 0.0
        for place, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Free):
                step = next(steps)
                if isinstance(instruction, Run):
                    stage_program = pipeline.stage_programs[instruction.stage_program]
                    start = next(starts)
                    now = start + step.value
                    events.append(
                        Event(
                            mesh,
                            "run",
                            names[instruction.stage_program],
                            stage_program.stage,
                            instruction.micro_batch,
                            start,
                            now,
                            stage_program.phase.value,
                        )
                    )
                else:
                    events.append(_transfer_event(mesh, instruction, work, found, int(step.value)))
            if live is not None:
                at = events[-1].start_s if isinstance(instruction, Run) else now
                line.append((at, float(live[mesh][place])))
        if live is not None:
            memory.append(_without_repeats(line))
    events.sort(key=lambda event: event.start_s)
    return Timeline(tuple(events), found.step_s, len(programs.meshes), tuple(memory))


def _transfer_event(
    mesh: int, instruction: Send | Recv, work: SimulatedRun, found: Simulated, number: int
) -> Event:
    sent, (start, end) = work.sent[number], found.sent_s[number]
    is_send = isinstance(instruction, Send)
    return Event(
        mesh,
        "send" if is_send else "recv",
        f"stage{sent.source} to stage{sent.target}",
        sent.source if is_send else sent.target,
        sent.micro_batch,
        start,
        end,
        "",
        sent.num_bytes,
    )


def _without_repeats(line: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Of several values at one time the last; and none that changes nothing."""
    latest: dict[float, float] = {}
    for at, value in line:
        latest[at] = value
    found: list[tuple[float, float]] = []
    for at, value in latest.items():
        if not found or found[-1][1] != value:
            found.append((at, value))
    return tuple(found)

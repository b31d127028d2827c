"""Simulation of a pipelined step: from `PipelinePrograms` and seconds to a `SimulationResult`.

Every mesh works through its instructions in order. A run starts when the mesh is free and its
operands have arrived. Sending and receiving take none of a mesh's time: a transfer begins when its
`Send` and its `Recv` have both been reached and its links are free, and proceeds while both meshes
compute. So a schedule that receives right before use waits for every transfer, and one that
receives ahead hides transfers behind the runs after the `Recv`. GPUs behave so, since buffers for
arriving data are allocated in the order of the receiver's programs.

Links are shared. Two meshes in one host have their own link in each direction; data that leaves or
enters a host goes over that host's network. A link carries one transfer at a time, in the order in
which they became ready: sharing it at half the rate would delay the first and not help the second.
The gather among the target's devices is part of the transfer.

In exact arithmetic the end of a step is monotone in every duration as long as no two pairs of
meshes share a network (then it is the longest path through the lists). With a shared network it
need not be: a late transfer lets another one pass.
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

Routes = Callable[[int, int], Sequence[Hashable]]  # from mesh, to mesh -> the links between them


class TransferTime(NamedTuple):
    """The time of one transfer. `latency_s`: the part of `seconds` that is paid once for everything
    in one `Send`."""

    num_bytes: float
    seconds: float
    latency_s: float = 0.0


class _Step(NamedTuple):
    """An instruction: `value` is the seconds of a run or the number of a send; `waits` are the
    sends that must have arrived."""

    code: int
    value: float
    waits: tuple[int, ...]


class SimulatedSend(NamedTuple):
    """Everything that one `Send` sends."""

    source: int  # stages
    target: int
    micro_batch: int | None
    num_bytes: float
    seconds: float
    links: tuple[int, ...]


@dataclass(frozen=True)
class SimulationInput:
    """A list of instructions per mesh, and the sends in them."""

    meshes: tuple[tuple[_Step, ...], ...]
    sent: tuple[SimulatedSend, ...]
    num_links: int

    @property
    def num_events(self) -> int:
        return sum(map(len, self.meshes))


@dataclass(frozen=True)
class SimulationResult:
    """The start of every run of each mesh, in order; the start and end of every send; and the end
    of the step."""

    run_starts_s: tuple[tuple[float, ...], ...]
    sent_s: tuple[tuple[float, float], ...]
    step_s: float


def separate_links(source: int, target: int) -> Sequence[Hashable]:
    """Every pair of meshes has a link of its own, each link."""
    return ((source, target),)


def host_routes(hosts: Sequence[frozenset[int]]) -> Routes:
    """The links between meshes on these hosts: their own link within a host, else the networks of
    all hosts on both sides."""

    def links(source: int, target: int) -> Sequence[Hashable]:
        if len(hosts[source] | hosts[target]) == 1:
            return ((source, target),)
        out = [("out", host) for host in sorted(hosts[source])]
        return (*out, *(("in", host) for host in sorted(hosts[target])))

    return links


def simulation_input(
    pipeline: Pipeline,
    programs: PipelinePrograms,
    stage_program_s: Sequence[float],
    transfers: Sequence[TransferTime],
    routes: Routes = separate_links,
) -> SimulationInput:
    """The programs with their times. `stage_program_s`, `transfers`: by number in the pipeline."""
    numbers: dict[tuple[int, int, int], int] = {}
    sent: list[SimulatedSend] = []
    links: dict[Hashable, int] = {}
    known_links: dict[tuple[int, int], tuple[int, ...]] = {}
    for mesh, program in enumerate(programs.meshes):
        for send in program.instructions:
            if not isinstance(send, Send):
                continue
            pair = mesh, send.to_mesh
            if pair not in known_links:
                route = () if mesh == send.to_mesh else routes(*pair)
                known_links[pair] = tuple(links.setdefault(link, len(links)) for link in route)
            times = [transfers[number] for number in send.transfers]
            latency_s = max(time.latency_s for time in times)
            first = pipeline.transfers[send.transfers[0]]
            numbers[mesh, send.to_mesh, send.tag] = len(sent)
            sent.append(
                SimulatedSend(
                    first.source,
                    first.target,
                    send.micro_batch,
                    sum(time.num_bytes for time in times),
                    latency_s + sum(time.seconds - time.latency_s for time in times),
                    known_links[pair],
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
    return SimulationInput(tuple(lists), tuple(sent), len(links))


def _waits(coming: dict[int, int], reads: Sequence[int]) -> tuple[int, ...]:
    """The sends that bring the buffers read here for the first time."""
    return tuple({coming.pop(buffer): None for buffer in reads if buffer in coming})


def simulate(work: SimulationInput) -> SimulationResult:
    """Advances each mesh until it waits for a transfer; of the transfers that can begin, the one
    that became ready first is next, and lets its receiver proceed."""
    lists, num_sent = work.meshes, len(work.sent)
    seconds = [one.seconds for one in work.sent]
    links = [one.links for one in work.sent]
    one_side_s = [_UNKNOWN] * num_sent  # when the first of `Send` and `Recv` was reached
    arrival_s = [_UNKNOWN] * num_sent
    begin_s = [_UNKNOWN] * num_sent
    link_free_s = [0.0] * work.num_links
    position, now_s = [0] * len(lists), [0.0] * len(lists)
    starts: list[list[float]] = [[] for _ in lists]
    stopped: dict[int, int] = {}  # by the transfer that a mesh needs to go on
    ready: list[tuple[float, int]] = []

    def advance(mesh: int) -> None:
        steps, now, run_starts = lists[mesh], now_s[mesh], starts[mesh]
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
                run_starts.append(start)
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
        for link in links[number]:
            if link_free_s[link] > start:
                start = link_free_s[link]
        end = start + seconds[number]
        for link in links[number]:
            link_free_s[link] = end
        begin_s[number], arrival_s[number] = start, end
        if number in stopped:
            advance(stopped.pop(number))
    assert position == list(map(len, lists)), "lists that wait"
    return SimulationResult(
        tuple(map(tuple, starts)),
        tuple(zip(begin_s, arrival_s, strict=True)),
        max((*now_s, *arrival_s), default=0.0),
    )


def timeline(
    pipeline: Pipeline,
    programs: PipelinePrograms,
    work: SimulationInput,
    result: SimulationResult,
    bytes_of: Callable[[int, Ref], int] | None = None,
) -> Timeline:
    """The result as events; with `bytes_of` (see `ir.live`) also the bytes in buffers."""
    names = stage_program_names(pipeline)
    live = None if bytes_of is None else bytes_over_time(pipeline, programs, bytes_of)
    events: list[Event] = []
    memory: list[tuple[tuple[float, float], ...]] = []
    for mesh, program in enumerate(programs.meshes):
        starts = iter(result.run_starts_s[mesh])
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
                            mesh=mesh,
                            kind="run",
                            name=names[instruction.stage_program],
                            stage=stage_program.stage,
                            micro_batch=instruction.micro_batch,
                            start_s=start,
                            end_s=now,
                            phase=stage_program.phase.value,
                        )
                    )
                else:
                    events.append(_transfer_event(mesh, instruction, work, result, int(step.value)))
            if live is not None:
                at = events[-1].start_s if isinstance(instruction, Run) else now
                line.append((at, float(live[mesh][place])))
        if live is not None:
            memory.append(_without_repeats(line))
    events.sort(key=lambda event: event.start_s)
    return Timeline(tuple(events), result.step_s, len(programs.meshes), tuple(memory))


def _transfer_event(
    mesh: int,
    instruction: Send | Recv,
    work: SimulationInput,
    result: SimulationResult,
    number: int,
) -> Event:
    sent, (start, end) = work.sent[number], result.sent_s[number]
    is_send = isinstance(instruction, Send)
    return Event(
        mesh=mesh,
        kind="send" if is_send else "recv",
        name=f"stage{sent.source} to stage{sent.target}",
        stage=sent.source if is_send else sent.target,
        micro_batch=sent.micro_batch,
        start_s=start,
        end_s=end,
        num_bytes=sent.num_bytes,
    )


def _without_repeats(line: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points without repeated values; of several values at one time, the last."""
    changes: list[tuple[float, float]] = []
    for at, value in dict(line).items():
        if not changes or changes[-1][1] != value:
            changes.append((at, value))
    return tuple(changes)

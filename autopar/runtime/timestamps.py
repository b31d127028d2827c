"""From marks (two times per instruction) to a measured `Timeline`.

Ends are measured. A device does one thing after another, so a run starts when it is dispatched, the
previous run has ended and its inputs are ready, whichever is last. An unknown end is set to the
earliest possible time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from autopar.ir.pipeline import Phase, PipelinePrograms, Recv, Run, Send
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Event, Timeline


class InstructionMark(NamedTuple):
    """An instruction, by its place in its mesh's list: when it was dispatched, and when its results
    were ready, if known."""

    place: int
    began_s: float
    ended_s: float | None


class ProgramLabel(NamedTuple):
    """How a timeline shows a program."""

    name: str
    stage: int
    phase: Phase = Phase.RESULTS


@dataclass(frozen=True, eq=False)
class StepDescription:
    """The step that marks refer to.

    stage_programs: by number.
    transfers:      source stage, target stage and bytes, by number.
    live_bytes:     per mesh, the bytes on one device while each instruction runs; empty if unknown.
    """

    plan: ParallelPlan
    programs: PipelinePrograms
    stage_programs: tuple[ProgramLabel, ...]
    transfers: Mapping[int, tuple[int, int, float]] = field(default_factory=dict)
    live_bytes: tuple[tuple[float, ...], ...] = ()


_Marks = list[dict[int, InstructionMark]]  # by mesh and place
_Message = tuple[int, int, int]  # from mesh, to mesh, tag


def measured_timeline(
    described: StepDescription,
    marks: Mapping[int, Sequence[InstructionMark]],
    free_s: Mapping[int, float] | None = None,
) -> tuple[Timeline, float]:
    """The events of a step, and when the first of them began, by the clock of the marks. A `Recv`
    without a mark, because one process does both ends, takes the mark of its `Send`. `free_s`: by
    mesh, when the previous step left it, since steps are dispatched ahead."""
    meshes = described.programs.meshes
    by_place = [{mark.place: mark for mark in marks.get(mesh, ())} for mesh in range(len(meshes))]
    sent = {
        (mesh, send.to_mesh, send.tag): by_place[mesh].get(place)
        for mesh, program in enumerate(meshes)
        for place, send in enumerate(program.instructions)
        if isinstance(send, Send)
    }
    before_s = [(free_s or {}).get(mesh, -inf) for mesh in range(len(meshes))]
    arrived_s = {
        message: _end(mark, before_s[message[0]])
        for message, mark in sent.items()
        if mark is not None
    }
    for mesh, program in enumerate(meshes):
        for place, recv in enumerate(program.instructions):
            if isinstance(recv, Recv) and (mark := by_place[mesh].get(place)) is not None:
                message = recv.from_mesh, mesh, recv.tag
                send = sent.get(message)
                if mark.ended_s is None and send is not None:
                    arrived_s[message] = max(mark.began_s, send.began_s, before_s[message[0]])
                else:
                    arrived_s[message] = _end(mark, before_s[mesh])
    by_mesh = [
        _MeshEvents(described, mesh, by_place, sent, arrived_s, before_s[mesh])
        for mesh in range(len(meshes))
    ]
    starts_s = {
        message: start_s
        for mesh_events in by_mesh
        for message, start_s in mesh_events.sends.items()
    }
    for mesh_events in by_mesh:
        for number, message in mesh_events.shared:
            event = mesh_events.events[number]
            start_s = min(starts_s.get(message, event.start_s), event.end_s)
            mesh_events.events[number] = replace(event, start_s=start_s)
    events = [event for mesh_events in by_mesh for event in mesh_events.events]
    first_s = min((event.start_s for event in events), default=0.0)
    last_s = max((event.end_s for event in events), default=0.0)
    shifted = [
        replace(e, start_s=e.start_s - first_s, end_s=e.end_s - first_s)
        for e in sorted(events, key=lambda event: event.start_s)
    ]
    memory = tuple(
        tuple((max(0.0, at - first_s), held) for at, held in mesh_events.memory.items())
        for mesh_events in by_mesh
    )
    if not any(memory):
        memory = ()
    return Timeline(tuple(shifted), last_s - first_s, len(meshes), memory), first_s


def _end(mark: InstructionMark, before_s: float) -> float:
    """When it ended; if unknown, as soon as it was dispatched and its mesh was free."""
    return max(mark.began_s, before_s) if mark.ended_s is None else mark.ended_s


class _MeshEvents:
    """Events of one mesh by the clock of the marks, and its bytes by time. `sends`: when each
    message was ready; `shared`: events of a `Recv` that use the mark of its `Send`."""

    def __init__(
        self,
        described: StepDescription,
        mesh: int,
        by_place: _Marks,
        sent: Mapping[_Message, InstructionMark | None],
        arrived_s: Mapping[_Message, float],
        before_s: float,
    ) -> None:
        self.described, self.mesh = described, mesh
        self.events: list[Event] = []
        self.memory: dict[float, float] = {}
        self.sends: dict[_Message, float] = {}
        self.shared: list[tuple[int, _Message]] = []
        now_s = before_s  # the end of the last run
        arrived_at: dict[int, float] = {}  # received buffer -> when it arrived
        live = described.live_bytes[mesh] if described.live_bytes else None
        by_runs: dict[float, float] = {}  # start of runs -> the most bytes that they held
        for place, instruction in enumerate(described.programs.meshes[mesh].instructions):
            mark = by_place[mesh].get(place)
            at_s = now_s
            if isinstance(instruction, Recv):
                message = instruction.from_mesh, mesh, instruction.tag
                if mark is None and (mark := sent.get(message)) is not None:
                    self.shared.append((len(self.events), message))
                if mark is not None:
                    arrived_at.update(dict.fromkeys(instruction.buffers, arrived_s[message]))
                    end_s = arrived_s[message]
                    self.add_transfer(instruction, max(mark.began_s, min(before_s, end_s)), end_s)
            elif isinstance(instruction, Run) and mark is not None:
                arrivals = [arrived_at[b] for b in instruction.reads if b in arrived_at]
                at_s = max([mark.began_s, now_s, *arrivals])
                now_s = max(at_s, _end(mark, before_s))
                self.add_run(instruction, at_s, now_s)
            elif isinstance(instruction, Send) and mark is not None:
                message = mesh, instruction.to_mesh, instruction.tag
                # The threads that note the ends of runs, also in the previous step, may be late.
                ready_s = max(mark.began_s, min(now_s, arrived_s.get(message, now_s)))
                self.sends[message] = ready_s
                self.add_transfer(instruction, ready_s, _end(mark, before_s))
            if live is not None and at_s > before_s:
                held = float(live[place])
                if isinstance(instruction, Run):  # it may take no time, and a `Free` follows
                    by_runs[at_s] = max(held, by_runs.get(at_s, 0.0))
                self.memory[at_s] = max(held, by_runs.get(at_s, 0.0))

    def add_run(self, run: Run, start_s: float, end_s: float) -> None:
        name, stage, phase = self.described.stage_programs[run.stage_program]
        shown = "" if phase is Phase.RESULTS else phase.value
        self.events.append(
            Event(self.mesh, "run", name, stage, run.micro_batch, start_s, end_s, shown)
        )

    def add_transfer(self, one: Send | Recv, start_s: float, end_s: float) -> None:
        ways = [self.described.transfers[number] for number in one.transfers]
        source, target, _ = ways[0]
        is_send = isinstance(one, Send)
        self.events.append(
            Event(
                self.mesh,
                "send" if is_send else "recv",
                f"stage{source} to stage{target}",
                source if is_send else target,
                one.micro_batch,
                start_s,
                max(start_s, end_s),
                "",
                sum(num_bytes for _, _, num_bytes in ways),
            )
        )

"""From marks (two times per instruction) to a measured `Timeline`.

Ends are measured. A run starts when it was dispatched, the run before it had ended and what it
reads was there, whichever was last: a device does one thing after another. An end that is not known
is set as early as it can have been.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from autopar.ir.pipeline import PipelinePrograms, Recv, Run, Send
from autopar.ir.timeline import Event, Timeline

_PHASE = re.compile(r"stage\d+_(prepare|forward|backward|weights|update)")


class InstructionMark(NamedTuple):
    """An instruction, by its place in its mesh's list: when it was dispatched, and when what it
    gives was there, if that is known."""

    place: int
    began_s: float
    ended_s: float | None


@dataclass(frozen=True, eq=False)
class StepDescription:
    """What the marks of a step speak of.

    plan:       the step's plan.
    stage programs:     name and stage, by number.
    transfers:  source stage, target stage and bytes, by number.
    live_bytes: per mesh, the bytes on one device while each instruction is run; empty if not known.
    """

    plan: Any
    programs: PipelinePrograms
    stage_programs: tuple[tuple[str, int], ...]
    transfers: Mapping[int, tuple[int, int, float]] = field(default_factory=dict)
    live_bytes: tuple[tuple[float, ...], ...] = ()


_Marks = list[dict[int, InstructionMark]]  # by mesh and place
_Way = tuple[int, int, int]  # from mesh, to mesh, tag


def measured_timeline(
    described: StepDescription,
    marks: Mapping[int, Sequence[InstructionMark]],
    free_s: Mapping[int, float] | None = None,
) -> tuple[Timeline, float]:
    """The events of a step, and by the clock of the marks when the first of them began. Where a
    `Recv` has no mark, because one process does both, that of its `Send` is for the whole way.
    `free_s`: by mesh, when the step before was done with it: steps are dispatched ahead."""
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
        way: _end(mark, before_s[way[0]]) for way, mark in sent.items() if mark is not None
    }
    for mesh, program in enumerate(meshes):
        for place, recv in enumerate(program.instructions):
            if isinstance(recv, Recv) and (mark := by_place[mesh].get(place)) is not None:
                way = recv.from_mesh, mesh, recv.tag
                send = sent.get(way)
                if mark.ended_s is None and send is not None:
                    arrived_s[way] = max(mark.began_s, send.began_s, before_s[way[0]])
                else:
                    arrived_s[way] = _end(mark, before_s[mesh])
    found = [
        _MeshEvents(described, mesh, by_place, sent, arrived_s, before_s[mesh])
        for mesh in range(len(meshes))
    ]
    starts_s = {way: start_s for own in found for way, start_s in own.sends.items()}
    for own in found:
        for number, way in own.shared:
            event = own.events[number]
            start_s = min(starts_s.get(way, event.start_s), event.end_s)
            own.events[number] = replace(event, start_s=start_s)
    events = [event for own in found for event in own.events]
    first_s = min((event.start_s for event in events), default=0.0)
    last_s = max((event.end_s for event in events), default=0.0)
    shifted = [
        replace(e, start_s=e.start_s - first_s, end_s=e.end_s - first_s)
        for e in sorted(events, key=lambda event: event.start_s)
    ]
    memory = tuple(
        tuple((max(0.0, at - first_s), held) for at, held in own.memory.items()) for own in found
    )
    if not any(memory):
        memory = ()
    return Timeline(tuple(shifted), last_s - first_s, len(meshes), memory), first_s


def _end(mark: InstructionMark, before_s: float) -> float:
    """When it ended: if that is not known, as soon as it was dispatched and its mesh was free."""
    return max(mark.began_s, before_s) if mark.ended_s is None else mark.ended_s


class _MeshEvents:
    """Events of one mesh by the clock of the marks, and its bytes by time. `sends`: when what is
    sent was ready; `shared`: events of a `Recv` that stand on the mark of its `Send`."""

    def __init__(
        self,
        described: StepDescription,
        mesh: int,
        by_place: _Marks,
        sent: Mapping[_Way, InstructionMark | None],
        arrived_s: Mapping[_Way, float],
        before_s: float,
    ) -> None:
        self.described, self.mesh = described, mesh
        self.events: list[Event] = []
        self.memory: dict[float, float] = {}
        self.sends: dict[_Way, float] = {}
        self.shared: list[tuple[int, _Way]] = []
        now_s = before_s  # the end of the last run
        there_s: dict[int, float] = {}  # buffers that were received -> since when they are there
        live = described.live_bytes[mesh] if described.live_bytes else None
        by_runs: dict[float, float] = {}  # the most that runs held which began at a time
        for place, instruction in enumerate(described.programs.meshes[mesh].instructions):
            mark = by_place[mesh].get(place)
            at_s = now_s
            if isinstance(instruction, Recv):
                way = instruction.from_mesh, mesh, instruction.tag
                if mark is None and (mark := sent.get(way)) is not None:
                    self.shared.append((len(self.events), way))
                if mark is not None:
                    there_s.update(dict.fromkeys(instruction.buffers, arrived_s[way]))
                    end_s = arrived_s[way]
                    self.add_transfer(instruction, max(mark.began_s, min(before_s, end_s)), end_s)
            elif isinstance(instruction, Run) and mark is not None:
                arrivals = [there_s[b] for b in instruction.reads if b in there_s]
                at_s = max([mark.began_s, now_s, *arrivals])
                now_s = max(at_s, _end(mark, before_s))
                self.add_run(instruction, at_s, now_s)
            elif isinstance(instruction, Send) and mark is not None:
                way = mesh, instruction.to_mesh, instruction.tag
                # Threads that note the ends of runs, also of the step before, may be late.
                ready_s = max(mark.began_s, min(now_s, arrived_s.get(way, now_s)))
                self.sends[way] = ready_s
                self.add_transfer(instruction, ready_s, _end(mark, before_s))
            if live is not None and at_s > before_s:
                held = float(live[place])
                if isinstance(instruction, Run):  # may take no time, and what follows frees
                    by_runs[at_s] = max(held, by_runs.get(at_s, 0.0))
                self.memory[at_s] = max(held, by_runs.get(at_s, 0.0))

    def add_run(self, run: Run, start_s: float, end_s: float) -> None:
        name, stage = self.described.stage_programs[run.stage_program]
        phase = _PHASE.match(name)
        which = phase.group(1) if phase else ""
        self.events.append(
            Event(self.mesh, "run", name, stage, run.micro_batch, start_s, end_s, which)
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

"""From a `Pipeline` and a `Schedule` to `PipelinePrograms`: the instructions of each mesh.

All runs of stage programs are first put into one order in which they could run one after the other
(`linearize`). A buffer is sent right after the last run that writes it, and received later in that
order. So no mesh ever waits for one that waits for it, however fast each works through its list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from autopar.ir.pipeline import (
    Free,
    Instruction,
    MeshProgram,
    Pipeline,
    PipelinePrograms,
    Place,
    Recv,
    Ref,
    Run,
    Send,
    Slot,
)
from autopar.ir.schedule import Schedule
from autopar.lower.linearize import ScheduledRun, copied_refs, linearize

START = -1  # the position before the first run


def emit_programs(pipeline: Pipeline, schedule: Schedule) -> PipelinePrograms:
    """The instructions of all meshes, without copies that nothing reads. An AssertionError means
    that the pipeline was sliced wrongly, or that the schedule is for another one."""
    assert schedule.stage_mesh == pipeline.stage_mesh, "the schedule is for other meshes"
    assert schedule.num_micro_batches == pipeline.num_micro_batches, "for other micro-batches"
    runs = linearize(pipeline, schedule)
    drafts = _drafts(pipeline, runs, _moves(pipeline, runs, schedule.eager))
    last_uses = [_last_uses(draft) for draft in drafts]
    live_out = [_live_out(pipeline, draft, mesh) for mesh, draft in enumerate(drafts)]
    return PipelinePrograms(
        tuple(
            _with_frees(pipeline, draft, mesh, last_uses[mesh], live_out[mesh])
            for mesh, draft in enumerate(drafts)
        ),
        _donated(pipeline, drafts, last_uses, live_out),
    )


def _slot(place: Place) -> Slot:
    return Slot(place.stage, Ref(place.value, None))


# -- when buffers are sent and received


class _Move(NamedTuple):
    """A copy of one buffer: sent right after the run `sent_after`, received right before or after
    the run `received`. `hops`: the number of earlier copies on its way."""

    transfer: int
    source: Slot
    target: Slot
    sent_after: int
    received: int
    before_run: bool
    hops: int


def _moves(pipeline: Pipeline, runs: Sequence[ScheduledRun], eager: bool) -> list[_Move]:
    """A copy is received right before its first use. It is received after the clock in which it was
    sent if the schedule is eager and a micro-batch's run wrote it, or if it is sent on."""
    complete = {_slot(place): START for place in pipeline.inputs}
    first_read: dict[Slot, int] = {}
    for place, run in enumerate(runs):
        complete.update(dict.fromkeys(run.writes, place))
        for slot in run.reads:
            first_read.setdefault(slot, place)
    copies: dict[Slot, tuple[int, Slot]] = {}
    for number, transfer in enumerate(pipeline.transfers):
        for ref in copied_refs(pipeline, transfer.ref):
            target = Slot(transfer.target, ref)
            assert target not in copies, f"{target} is sent twice"
            assert target not in complete, f"{target} is sent there, but is there already"
            copies[target] = number, Slot(transfer.source, ref)
    wanted = {*first_read, *map(_slot, pipeline.outputs)} & copies.keys()
    handed_on: set[Slot] = set()
    for target in wanted:
        source = copies[target][1]
        while source in copies and source not in handed_on:
            handed_on.add(source)
            source = copies[source][1]
    moves: dict[Slot, _Move] = {}

    def move_to(target: Slot, hops_left: int = pipeline.num_stages) -> _Move:
        if target in moves:
            return moves[target]
        assert hops_left, f"{target} is sent in a circle"
        number, source = copies[target]
        if source in complete:
            sent_after, hops = complete[source], 0
        else:
            assert source in copies, f"{source} is sent, but nothing writes it"
            previous = move_to(source, hops_left - 1)
            sent_after, hops = previous.received, previous.hops + 1
        clock_end = START if sent_after == START else runs[sent_after].clock_end
        read = first_read.get(target, len(runs))
        assert sent_after < read, f"{target} is read in run {read}, but sent after {sent_after}"
        ahead = eager and sent_after != START and runs[sent_after].micro_batch is not None
        if ahead or target in handed_on or read == len(runs):
            received, before_run = clock_end, False
        else:
            received, before_run = read, True
        moves[target] = _Move(number, source, target, sent_after, received, before_run, hops)
        return moves[target]

    return [move_to(target) for target in copies if target in wanted or target in handed_on]


# -- the lists


class _Draft(NamedTuple):
    """A mesh's list as far as it is written, and the numbers of its buffers."""

    instructions: list[Instruction]
    numbers: dict[Slot, int]

    def known(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        missing = [slot for slot in slots if slot not in self.numbers]
        assert not missing, f"{missing} are read, but nothing writes them before"
        return tuple(self.numbers[slot] for slot in slots)

    def new(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        written = [slot for slot in slots if slot in self.numbers]
        assert not written, f"{written} are written a second time"
        for slot in slots:
            self.numbers[slot] = len(self.numbers)
        return tuple(self.numbers[slot] for slot in slots)


def _drafts(
    pipeline: Pipeline, runs: Sequence[ScheduledRun], moves: Sequence[_Move]
) -> list[_Draft]:
    drafts = [_Draft([], {}) for _ in range(pipeline.num_meshes)]
    draft_of = [drafts[mesh] for mesh in pipeline.stage_mesh]
    for place in pipeline.inputs:
        draft_of[place.stage].new([_slot(place)])
    before, after = _grouped(moves)
    for now in range(START, len(runs)):
        for tag, group in before[now]:
            _receive(pipeline, draft_of, tag, group)
        if now != START:
            run = runs[now]
            draft = draft_of[pipeline.stage_programs[run.stage_program].stage]
            reads = draft.known(run.reads)
            in_place = set(run.reads)
            draft.new([slot for slot in run.writes if slot not in in_place])
            writes = draft.known(run.writes)
            draft.instructions.append(Run(run.stage_program, run.micro_batch, reads, writes))
        for _, is_recv, tag, group in after[now]:
            (_receive if is_recv else _send)(pipeline, draft_of, tag, group)
    return drafts


_Before = dict[int, list[tuple[int, list[_Move]]]]
_After = dict[int, list[tuple[int, bool, int, list[_Move]]]]


def _grouped(moves: Sequence[_Move]) -> tuple[_Before, _After]:
    """Moves that are sent and received together, under one tag: (tag, moves) before each run, and
    (hops, whether it is received, tag, moves) after it."""
    groups: dict[tuple, list[_Move]] = defaultdict(list)
    for move in moves:
        stages = move.source.stage, move.target.stage
        when = move.sent_after, move.hops, move.received, move.before_run
        groups[when, stages, move.source.ref.micro_batch].append(move)
    before: _Before = defaultdict(list)
    after: _After = defaultdict(list)
    in_order = sorted(groups.values(), key=lambda group: (group[0].sent_after, group[0].hops))
    for tag, group in enumerate(in_order):
        move = group[0]
        after[move.sent_after].append((move.hops, False, tag, group))
        if move.before_run:
            before[move.received].append((tag, group))
        else:
            after[move.received].append((move.hops, True, tag, group))
    for entries in after.values():
        entries.sort(key=lambda entry: entry[:3])
    return before, after


def _send(pipeline: Pipeline, draft_of: list[_Draft], tag: int, group: list[_Move]) -> None:
    draft, to_mesh = draft_of[group[0].source.stage], pipeline.stage_mesh[group[0].target.stage]
    buffers = draft.known([move.source for move in group])
    transfers = tuple(move.transfer for move in group)
    micro_batch = group[0].source.ref.micro_batch
    draft.instructions.append(Send(buffers, transfers, micro_batch, to_mesh, tag))


def _receive(pipeline: Pipeline, draft_of: list[_Draft], tag: int, group: list[_Move]) -> None:
    draft, from_mesh = draft_of[group[0].target.stage], pipeline.stage_mesh[group[0].source.stage]
    buffers = draft.new([move.target for move in group])
    transfers = tuple(move.transfer for move in group)
    micro_batch = group[0].target.ref.micro_batch
    draft.instructions.append(Recv(buffers, transfers, micro_batch, from_mesh, tag))


# -- which buffers are freed, and which are donated


def _last_uses(draft: _Draft) -> dict[int, int]:
    """{buffer: the instruction after which nothing needs it}."""
    last: dict[int, int] = {}
    for position, instruction in enumerate(draft.instructions):
        match instruction:
            case Run():
                last.update(dict.fromkeys((*instruction.reads, *instruction.writes), position))
            case Send() | Recv():
                last.update(dict.fromkeys(instruction.buffers, position))
    return last


def _live_out(pipeline: Pipeline, draft: _Draft, mesh: int) -> set[int]:
    """Buffers that are not freed: results, and arguments that were not donated."""
    places = [p for n, p in enumerate(pipeline.inputs) if n not in pipeline.donated]
    places += pipeline.outputs
    slots = [_slot(p) for p in places if pipeline.stage_mesh[p.stage] == mesh]
    return set(draft.known(slots))


def _with_frees(
    pipeline: Pipeline, draft: _Draft, mesh: int, last_use: dict[int, int], live_out: set[int]
) -> MeshProgram:
    def buffers(places: Sequence[Place]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (position, draft.numbers[_slot(place)])
            for position, place in enumerate(places)
            if pipeline.stage_mesh[place.stage] == mesh
        )

    inputs = buffers(pipeline.inputs)
    freed_after: dict[int, list[int]] = defaultdict(list)
    for buffer in draft.numbers.values():
        if buffer not in live_out:
            freed_after[last_use.get(buffer, START)].append(buffer)
    instructions: list[Instruction] = []
    for position in range(START, len(draft.instructions)):
        if position != START:
            instructions.append(draft.instructions[position])
        if position in freed_after:
            instructions.append(Free(tuple(freed_after[position])))
    return MeshProgram(tuple(instructions), inputs, buffers(pipeline.outputs), len(draft.numbers))


def _donated(
    pipeline: Pipeline,
    drafts: Sequence[_Draft],
    last_uses: Sequence[dict[int, int]],
    live_out: Sequence[set[int]],
) -> tuple[tuple[int, ...], ...]:
    """Per stage program, the positions of reads that it updates in place, or that nothing reads
    after any of its runs."""
    donated = [set(range(len(stage_program.reads))) for stage_program in pipeline.stage_programs]
    for draft, last_use, needed in zip(drafts, last_uses, live_out, strict=True):
        for position, instruction in enumerate(draft.instructions):
            if isinstance(instruction, Run):
                in_place = set(instruction.writes)
                donated[instruction.stage_program] -= {
                    n
                    for n, buffer in enumerate(instruction.reads)
                    if buffer not in in_place and (buffer in needed or last_use[buffer] != position)
                }
    return tuple(tuple(sorted(positions)) for positions in donated)

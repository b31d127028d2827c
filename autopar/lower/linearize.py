"""From a `Pipeline` and a `Schedule` to one sequential order of all runs: `ScheduledRun`s.

First come PREPARE stage programs, then the tasks of the schedule clock by clock, then UPDATE stage
programs. Stage programs that run once per step come after those that they wait for, on any stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.ir.pipeline import EACH, PER_MICRO_BATCH, Phase, Pipeline, Ref, Slot, slots_of
from autopar.ir.schedule import Schedule


class ScheduledRun(NamedTuple):
    """A run of a stage program; `clock_end` is the position of the last run in its clock."""

    stage_program: int
    micro_batch: int | None
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    clock_end: int


def linearize(pipeline: Pipeline, schedule: Schedule) -> list[ScheduledRun]:
    stage_programs_of: dict[tuple[Phase, int], list[int]] = defaultdict(list)
    for p in sorted(
        range(len(pipeline.stage_programs)), key=lambda p: pipeline.stage_programs[p].part
    ):
        stage_programs_of[
            pipeline.stage_programs[p].phase, pipeline.stage_programs[p].stage
        ].append(p)
    # The gradients of weights follow the backward pass unless they have their own tasks.
    has_weights = any(t and t.phase is Phase.WEIGHTS for clock in schedule.clocks for t in clock)
    followed_by = {} if has_weights else {Phase.BACKWARD: Phase.WEIGHTS}
    clocks: list[Sequence[tuple[int, int | None]]] = []
    clocks += [[(p, None)] for p in _by_need(pipeline, Phase.PREPARE)]
    clocks += [[(p, None)] for p in _by_need(pipeline, Phase.RESULTS)]
    for clock in schedule.clocks:
        tasks = [task for task in clock if task and task.phase in PER_MICRO_BATCH]
        clocks.append(
            [
                (p, task.micro_batch)
                for task in tasks
                for phase in (task.phase, followed_by.get(task.phase))
                if phase
                for p in stage_programs_of[phase, task.stage]
            ]
        )
    clocks += [[(p, None)] for p in _by_need(pipeline, Phase.UPDATE)]
    runs: list[ScheduledRun] = []
    for clock in clocks:
        clock_end = len(runs) + len(clock) - 1
        runs += [_run(pipeline, p, micro_batch, clock_end) for p, micro_batch in clock]
    left_out = set(range(len(pipeline.stage_programs))) - {run.stage_program for run in runs}
    assert not left_out, (
        f"schedule {schedule.name!r} does not run stage programs {sorted(left_out)}"
    )
    return runs


def copied_refs(pipeline: Pipeline, ref: Ref) -> list[Ref]:
    """The buffers that a transfer of this ref copies: one, or one for every micro-batch."""
    if ref.micro_batch != EACH:
        return [ref]
    return [ref.of(micro_batch) for micro_batch in range(pipeline.num_micro_batches)]


def _run(pipeline: Pipeline, p: int, micro_batch: int | None, clock_end: int) -> ScheduledRun:
    stage_program = pipeline.stage_programs[p]
    reads = slots_of(stage_program.stage, stage_program.reads, micro_batch)
    writes = slots_of(stage_program.stage, stage_program.writes, micro_batch)
    return ScheduledRun(p, micro_batch, reads, writes, clock_end)


def _by_need(pipeline: Pipeline, phase: Phase) -> Iterator[int]:
    """The stage programs of a phase that runs once per step, each after those that it waits for:
    the lower parts of its stage, and stage programs of other stages that write what it receives."""
    stage_programs = pipeline.stage_programs
    left = [p for p, stage_program in enumerate(stage_programs) if stage_program.phase is phase]
    left.sort(key=lambda p: (stage_programs[p].part, stage_programs[p].stage))
    sources = {
        Slot(transfer.target, ref): Slot(transfer.source, ref)
        for transfer in pipeline.transfers
        for ref in copied_refs(pipeline, transfer.ref)
    }
    writers: dict[Slot, list[int]] = defaultdict(list)
    for p in left:
        for ref in stage_programs[p].writes:
            writers[Slot(stage_programs[p].stage, ref)].append(p)
    awaited: dict[int, set[int]] = {}
    for p in left:
        same_stage = [q for q in left if stage_programs[q].stage == stage_programs[p].stage]
        awaited[p] = {q for q in same_stage if stage_programs[q].part < stage_programs[p].part}
        for ref in stage_programs[p].reads:
            slot = sources.get(Slot(stage_programs[p].stage, ref))
            for _ in range(pipeline.num_stages):
                if slot:
                    awaited[p].update(writers[slot])
                    slot = sources.get(slot)
    while left:
        ready = next((p for p in left if awaited[p].isdisjoint(left)), None)
        assert ready is not None, f"{phase} stage programs {left} wait for each other"
        left.remove(ready)
        yield ready

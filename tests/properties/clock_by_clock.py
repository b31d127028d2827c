"""A second way to time a schedule, for pipelines in which each stage only sends to the next one and
back: through the table of clocks, without instruction lists, links or events.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.pipeline import EACH, Phase
from autopar.ir.schedule import Schedule, Task
from autopar.ir.timeline import MeshTransferTime, PipelineTimes, StageProgramTime


def step_by_clocks(
    schedule: Schedule,
    seconds: dict[Phase, Sequence[float]],
    crossing_s: Sequence[float],
) -> float:
    """Runs tasks in the order of the table, each as soon as its mesh is free and its inputs have
    arrived. `crossing_s`: the transfer from stage k to k + 1, or back. In an eager schedule it
    overlaps with the receiver's work; otherwise it starts once the receiver waits for it."""
    num_stages = len(schedule.stage_mesh)
    free_s = [0.0] * (max(schedule.stage_mesh) + 1)
    end_s: dict[Task, float] = {}
    for clock in schedule.clocks:
        for mesh, task in enumerate(clock):
            if task is None:
                continue
            phase, stage, micro_batch = task
            start_s = free_s[mesh]
            other, delay_s = None, 0.0
            if phase is Phase.FORWARD and stage > 0:
                other, delay_s = Task(phase, stage - 1, micro_batch), crossing_s[stage - 1]
            if phase is Phase.BACKWARD and stage + 1 < num_stages:
                other, delay_s = Task(phase, stage + 1, micro_batch), crossing_s[stage]
            if other is not None and schedule.eager:
                start_s = max(start_s, end_s[other] + delay_s)
            elif other is not None:
                start_s = max(start_s, end_s[other]) + delay_s
            free_s[mesh] = end_s[task] = start_s + seconds[phase][stage]
    return max(free_s)


def chain_times(
    seconds: dict[Phase, Sequence[float]], crossing_s: Sequence[float]
) -> PipelineTimes:
    """The same pipeline as times of stage programs and crossings."""
    phases = [p for p in Phase if p in seconds]
    num_stages = len(seconds[Phase.FORWARD])
    stage_programs = [
        StageProgramTime(stage, phase.value, 0, float(seconds[phase][stage]))
        for stage in range(num_stages)
        for phase in phases
    ]
    number = {
        (stage_program.stage, stage_program.phase): n
        for n, stage_program in enumerate(stage_programs)
    }
    crossings = []
    for stage, took_s in enumerate(crossing_s):
        for phase, source, target in (
            (Phase.FORWARD, stage, stage + 1),
            (Phase.BACKWARD, stage + 1, stage),
        ):
            if phase in seconds:
                name = phase.value
                crossings.append(
                    MeshTransferTime(
                        source,
                        target,
                        name,
                        1.0,
                        float(took_s),
                        value=len(crossings),
                        micro_batch=EACH,
                        writers=((number[source, name], EACH),),
                        readers=((number[target, name], EACH),),
                    )
                )
    return PipelineTimes((), (), (), (), tuple(crossings), tuple(stage_programs))

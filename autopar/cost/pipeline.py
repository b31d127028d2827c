"""How long a schedule takes: from a `Schedule` and seconds per stage to seconds per step.

Tasks are run in the order of the table, each as soon as its mesh is free and what it waits for has
come. Clocks play no part: stages may be unequal, and then meshes wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.ir.program import Phase
from autopar.ir.schedule import Schedule, Task


class Simulated(NamedTuple):
    """Seconds of a step, and of them those in which each mesh works."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the step in which meshes wait."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    weights_s: Sequence[float] | None = None,
    transfer_s: Sequence[float] | None = None,
    update_s: Sequence[float] | None = None,
) -> Simulated:
    """Runs a schedule on paper. All figures are per stage and micro-batch; `update_s` is per stage.
    What is not given takes no time.

    backward_s: of the schedule's BACKWARD tasks, thus without the gradients of weights where these
                are tasks of their own, whose time is `weights_s`.
    transfer_s: from stage k to k + 1, and as long back; one fewer than stages. In an eager schedule
                it goes on while the receiver works; otherwise it starts once the receiver waits for
                it. The sender works on in either case.
    """
    num_stages = len(schedule.stage_mesh)
    none = [0.0] * num_stages
    seconds = {
        Phase.FORWARD: forward_s,
        Phase.BACKWARD: none if backward_s is None else backward_s,
        Phase.WEIGHTS: none if weights_s is None else weights_s,
        Phase.UPDATE: none if update_s is None else update_s,
    }
    crossing_s = none[:-1] if transfer_s is None else transfer_s
    free_s = [0.0] * (max(schedule.stage_mesh) + 1)
    busy_s = list(free_s)
    end_s: dict[Task, float] = {}
    for clock in schedule.clocks:
        for mesh, task in enumerate(clock):
            if task is None:
                continue
            start_s = free_s[mesh]
            for other, delay_s in _awaited(task, num_stages, crossing_s):
                if schedule.eager:
                    start_s = max(start_s, end_s[other] + delay_s)
                else:
                    start_s = max(start_s, end_s[other]) + delay_s
            took_s = seconds[task.phase][task.stage]
            busy_s[mesh] += took_s
            free_s[mesh] = end_s[task] = start_s + took_s
    return Simulated(max(free_s), tuple(busy_s))


def _awaited(task: Task, num_stages: int, crossing_s: Sequence[float]) -> list[tuple[Task, float]]:
    """What another stage's mesh must have sent, and how long that takes; what the same stage did
    before stands earlier in the order of its mesh."""
    phase, stage, micro_batch = task
    if phase is Phase.FORWARD and stage > 0:
        return [(Task(phase, stage - 1, micro_batch), crossing_s[stage - 1])]
    if phase is Phase.BACKWARD and stage + 1 < num_stages:
        return [(Task(phase, stage + 1, micro_batch), crossing_s[stage])]
    return []

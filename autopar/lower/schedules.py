"""Schedules: from a name, stages and micro-batches to a `Schedule`, a table of clocks × meshes.

One list scheduler makes all of them. In every clock each mesh takes the first task in its order of
preference that is ready: the tasks that it waits for ran in earlier clocks, and no more
micro-batches are in flight than the schedule allows. Schedules differ only in the preference and in
that bound. Each phase of a stage takes the micro-batches in order, so sums over them are the same
in all schedules.

With b stages on as many meshes, m micro-batches, and every task one clock:

| name        | prefers | in flight on stage i | clocks, without the update |
|---|---|---|---|
| gpipe       | F, B    | m                    | 2(m + b − 1) |
| 1f1b        | B, F    | min(m, b − i)        | 2(m + b − 1) |
| 1f1b_eager  | B, F    | min(m, 2(b − i) − 1) | 2(m + b − 1) |
| zero_bubble | B, F, W | min(m, b − i)        | 3m + 2(b − 1), where 1f1b takes 3m + 3(b − 1) |
| inference   | F       | 1                    | m + b − 1 |

1f1b_eager fills the time of transfers with more forward passes (Zhuang et al., 2022). zero_bubble
fills waiting time with gradients of weights (Qi et al., 2023); there a micro-batch is in flight
until these are done, and each stage keeps to the bound of 1f1b.

interleaved_1f1b puts v stages on each of M meshes, stage k on mesh k mod M (Narayanan et al.,
2021), and each mesh runs its tasks in a fixed order: micro-batches go in groups of M or more, and a
mesh runs its first stage for the whole group, then its next one. That takes 2(v·m + M − 1) clocks,
each 1/v as long, with M or more micro-batches. With one stage on each mesh it is 1f1b.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise

from autopar.errors import ArgumentError, MeshError, shortened
from autopar.ir.pipeline import PER_MICRO_BATCH, Phase
from autopar.ir.schedule import SCHEDULES, Schedule, Task

FORWARD, BACKWARD, WEIGHTS, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS, Phase.UPDATE

_PREFERENCE = {
    "gpipe": (FORWARD, BACKWARD),
    "1f1b": (BACKWARD, FORWARD),
    "1f1b_eager": (BACKWARD, FORWARD),
    "interleaved_1f1b": (BACKWARD, FORWARD),
    "zero_bubble": (BACKWARD, FORWARD, WEIGHTS),
    "inference": (FORWARD,),
}


def make_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    stage_mesh: Sequence[int] | None = None,
    num_meshes: int | None = None,
) -> Schedule:
    """The schedule of that name. Every stage has its own mesh unless `stage_mesh` gives the mesh of
    each, or `num_meshes` their number; then stage k is on mesh k mod `num_meshes`."""
    _check_name(name)
    for argument, given in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
        if given < 1:
            raise ArgumentError(f"{argument} is {given}; a schedule needs 1 or more.")
    meshes = _meshes(num_stages, stage_mesh, num_meshes)
    if name == "interleaved_1f1b":
        _check_interleaved(meshes)
    clocks = _scheduled(name, num_micro_batches, meshes)
    if name != "inference":
        clocks += _updates(meshes)
    schedule = Schedule(name, num_micro_batches, meshes, tuple(clocks), eager=name == "1f1b_eager")
    check_schedule(schedule)
    return schedule


def in_flight_bound(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    *,
    num_meshes: int | None = None,
) -> int:
    """The maximum number of micro-batches in flight on a stage, without making the schedule. Only
    interleaved_1f1b depends on `num_meshes`; the order of tasks on one mesh gives its bound."""
    _check_name(name)
    num_meshes = num_meshes or num_stages
    if name == "gpipe":
        return num_micro_batches
    if name == "inference":
        return 1
    if name == "1f1b_eager":
        return min(num_micro_batches, 2 * (num_stages - stage) - 1)
    if _is_interleaved(name, num_stages, num_meshes):
        line = _interleaved_line(stage % num_meshes, num_stages, num_meshes, num_micro_batches)
        return _max_in_flight(line, num_stages, BACKWARD)[stage]
    return min(num_micro_batches, num_stages - stage)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the maximum number of micro-batches in flight: from the clock of their forward
    pass to that of their last phase, inclusive."""
    tasks = (task for clock in schedule.clocks for task in clock if task)
    return _max_in_flight(tasks, len(schedule.stage_mesh), _phases(schedule.name)[-1])


def _max_in_flight(tasks: Iterable[Task], num_stages: int, last_phase: Phase) -> tuple[int, ...]:
    in_flight = [0] * num_stages
    maximum = list(in_flight)
    for task in tasks:
        in_flight[task.stage] += task.phase is FORWARD
        maximum[task.stage] = max(maximum[task.stage], in_flight[task.stage])
        in_flight[task.stage] -= task.phase is last_phase
    return tuple(maximum)


def check_schedule(schedule: Schedule) -> None:
    """Raises AssertionError, with the clock and the task, unless every task runs once, on its mesh,
    after the tasks that it waits for."""
    phases = _phases(schedule.name)
    num_stages, num_meshes = len(schedule.stage_mesh), max(schedule.stage_mesh) + 1
    before_update = {
        Task(phase, stage, i)
        for phase in phases
        for stage in range(num_stages)
        for i in range(schedule.num_micro_batches)
    }
    done: set[Task] = set()
    for t, clock in enumerate(schedule.clocks):
        where = f"schedule {schedule.name!r}, clock {t}"
        assert len(clock) == num_meshes, f"{where}: {len(clock)} entries for {num_meshes} meshes"
        for mesh, task in enumerate(clock):
            if task is None:
                continue
            assert schedule.stage_mesh[task.stage] == mesh, f"{where}: {task} on mesh {mesh}"
            assert task not in done, f"{where}: {task} a second time"
            awaited = before_update if task.phase is UPDATE else _waits_for(task, num_stages)
            for other in awaited:
                assert other in done, f"{where}: {task} before {other}"
        done.update(filter(None, clock))
    updates = {Task(UPDATE, s, None) for s in range(num_stages)} if len(phases) > 1 else set()
    wrong = done ^ (before_update | updates)
    assert not wrong, f"schedule {schedule.name!r}: {wrong} missing or not wanted"


def _phases(name: str) -> tuple[Phase, ...]:
    """The phases of every micro-batch, in order; after the last it is no longer in flight."""
    return tuple(phase for phase in PER_MICRO_BATCH if phase in _PREFERENCE[name])


def _is_interleaved(name: str, num_stages: int, num_meshes: int) -> bool:
    return name == "interleaved_1f1b" and num_meshes < num_stages  # else it is 1f1b


# -- arguments


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        known = ", ".join(map(repr, SCHEDULES))
        raise ArgumentError(f"unknown schedule {shortened(name)}; choose from {known}.")


def _meshes(
    num_stages: int, stage_mesh: Sequence[int] | None, num_meshes: int | None
) -> tuple[int, ...]:
    if stage_mesh is None:
        if num_meshes is not None and not 1 <= num_meshes <= num_stages:
            raise MeshError(
                f"num_meshes is {num_meshes} for {num_stages} stages; every mesh needs a stage. "
                f"Give a number from 1 to {num_stages}."
            )
        return tuple(stage % (num_meshes or num_stages) for stage in range(num_stages))
    if len(stage_mesh) != num_stages or set(stage_mesh) != set(range(max(stage_mesh) + 1)):
        raise MeshError(
            f"stage_mesh is {shortened(tuple(stage_mesh))} for {num_stages} stages; it needs the "
            "mesh of each stage, and meshes are numbered from 0 without a gap."
        )
    return tuple(stage_mesh)


def _check_interleaved(stage_mesh: tuple[int, ...]) -> None:
    num_stages, num_meshes = len(stage_mesh), max(stage_mesh) + 1
    if num_stages % num_meshes:
        raise MeshError(
            f"schedule 'interleaved_1f1b' puts equally many stages on every mesh, but {num_stages} "
            f"stages were given for {num_meshes} meshes. Ask for a multiple of {num_meshes} stages."
        )
    if stage_mesh != tuple(stage % num_meshes for stage in range(num_stages)):
        raise MeshError(
            f"schedule 'interleaved_1f1b' has stage k on mesh k mod {num_meshes}, but stage_mesh "
            f"is {shortened(stage_mesh)}. Give num_meshes={num_meshes} instead."
        )


# -- the list scheduler

Line = deque[Task]  # tasks of a mesh in the order in which they must be run


def _scheduled(
    name: str, num_micro_batches: int, stage_mesh: tuple[int, ...]
) -> list[tuple[Task | None, ...]]:
    num_stages, num_meshes = len(stage_mesh), max(stage_mesh) + 1
    phases = _phases(name)
    if _is_interleaved(name, num_stages, num_meshes):
        waiting = [
            [[_interleaved_line(mesh, num_stages, num_meshes, num_micro_batches)]]
            for mesh in range(num_meshes)
        ]
    else:
        waiting = [
            [_lines_of(phase, mesh, stage_mesh, num_micro_batches) for phase in _PREFERENCE[name]]
            for mesh in range(num_meshes)
        ]
    bounds = [
        in_flight_bound(name, num_stages, num_micro_batches, stage, num_meshes=num_meshes)
        for stage in range(num_stages)
    ]
    num_in_flight = [0] * num_stages
    done: set[Task] = set()

    def is_ready(task: Task) -> bool:
        if task.phase is FORWARD and num_in_flight[task.stage] >= bounds[task.stage]:
            return False
        return all(other in done for other in _waits_for(task, num_stages))

    clocks: list[tuple[Task | None, ...]] = []
    while len(done) < len(phases) * num_stages * num_micro_batches:
        clock = tuple(_take_first(choices, is_ready) for choices in waiting)
        assert any(clock), f"schedule {name!r} is stuck after {len(clocks)} clocks"
        for task in filter(None, clock):
            num_in_flight[task.stage] += (task.phase is FORWARD) - (task.phase is phases[-1])
        done.update(filter(None, clock))
        clocks.append(clock)
    return clocks


def _take_first(choices: list[list[Line]], is_ready: Callable[[Task], bool]) -> Task | None:
    """Removes and returns the task to run: the one with the earliest micro-batch in the most
    preferred lines that have a ready task."""
    for lines in choices:
        ready = [line for line in lines if line and is_ready(line[0])]
        if ready:
            return min(ready, key=lambda line: line[0].micro_batch or 0).popleft()
    return None


def _lines_of(
    phase: Phase, mesh: int, stage_mesh: tuple[int, ...], num_micro_batches: int
) -> list[Line]:
    return [
        deque(Task(phase, stage, i) for i in range(num_micro_batches))
        for stage, its_mesh in enumerate(stage_mesh)
        if its_mesh == mesh
    ]


def _interleaved_line(mesh: int, num_stages: int, num_meshes: int, num_micro_batches: int) -> Line:
    """All tasks of a mesh: enough forward passes to keep it busy until the first micro-batch comes
    back, then alternating backward and forward passes. Groups have num_meshes micro-batches; the
    remainder is distributed among them, since others would wait for a smaller group."""
    num_groups = max(1, num_micro_batches // num_meshes)
    cuts = [k * num_micro_batches // num_groups for k in range(num_groups + 1)]
    stages = range(mesh, num_stages, num_meshes)

    def in_groups(phase: Phase, order: Sequence[int]) -> list[Task]:
        return [
            Task(phase, stage, i)
            for start, end in pairwise(cuts)
            for stage in order
            for i in range(start, end)
        ]

    forward, backward = in_groups(FORWARD, stages), in_groups(BACKWARD, stages[::-1])
    group_size = max(end - start for start, end in pairwise(cuts))
    ahead = 2 * (num_meshes - mesh - 1) + (len(stages) - 1) * group_size
    alternating = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return deque([*forward[:ahead], *alternating, *backward[len(forward[ahead:]) :]])


def _updates(stage_mesh: tuple[int, ...]) -> list[tuple[Task | None, ...]]:
    """The clocks of the update, as many as a mesh has stages at most; the last one is full."""
    num_meshes = max(stage_mesh) + 1
    of_mesh = [[s for s, r in enumerate(stage_mesh) if r == mesh] for mesh in range(num_meshes)]
    length = max(map(len, of_mesh))
    padded = [[None] * (length - len(stages)) + stages for stages in of_mesh]
    return [
        tuple(None if s is None else Task(UPDATE, s, None) for s in clock)
        for clock in zip(*padded, strict=True)
    ]


def _waits_for(task: Task, num_stages: int) -> Iterator[Task]:
    phase, stage, i = task
    if i is None:
        return
    if i > 0:
        yield Task(phase, stage, i - 1)
    if phase is FORWARD and stage > 0:
        yield Task(FORWARD, stage - 1, i)
    if phase is BACKWARD:
        yield Task(FORWARD, stage, i)
        if stage + 1 < num_stages:
            yield Task(BACKWARD, stage + 1, i)
    if phase is WEIGHTS:
        yield Task(BACKWARD, stage, i)

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from autopar.errors import ArgumentError, MeshError
from autopar.ir.pipeline import Phase
from autopar.ir.schedule import SCHEDULES, Schedule, Task
from autopar.lower.schedules import check_schedule, in_flight_bound, make_schedule

F, B, W, U = "F", "B", "W", "U"
LETTERS = {Phase.FORWARD: F, Phase.BACKWARD: B, Phase.WEIGHTS: W, Phase.UPDATE: U}


def drawn(schedule: Schedule) -> list[str]:
    """One line per mesh: phase and micro-batch, with the stage as well where a mesh has several."""
    several = len(set(schedule.stage_mesh)) < len(schedule.stage_mesh)
    return [
        " ".join(
            f"{LETTERS[task.phase]}{f'{task.stage}:' if several else ''}"
            + ("" if task.micro_batch is None else str(task.micro_batch))
            if task
            else "."
            for task in line
        )
        for line in zip(*schedule.clocks, strict=True)
    ]


def test_gpipe():
    assert drawn(make_schedule("gpipe", 2, 3)) == [
        "F0 F1 F2 . . B0 B1 B2 U",
        ". F0 F1 F2 B0 B1 B2 . U",
    ]


def test_1f1b():
    assert drawn(make_schedule("1f1b", 3, 4)) == [
        "F0 F1 F2 . . B0 F3 B1 . B2 . B3 U",
        ". F0 F1 . B0 F2 B1 F3 B2 . B3 . U",
        ". . F0 B0 F1 B1 F2 B2 F3 B3 . . U",
    ]


def test_1f1b_eager_runs_further_ahead():
    schedule = make_schedule("1f1b_eager", 2, 4)
    assert schedule.eager
    assert drawn(schedule) == [
        "F0 F1 F2 B0 F3 B1 . B2 . B3 U",
        ". F0 B0 F1 B1 F2 B2 F3 B3 . U",
    ]


def test_zero_bubble_fills_waiting_with_weights():
    assert drawn(make_schedule("zero_bubble", 2, 3)) == [
        "F0 F1 . B0 W0 F2 B1 W1 . B2 W2 U",
        ". F0 B0 W0 F1 B1 W1 F2 B2 W2 . U",
    ]


def test_interleaved_runs_groups_stage_by_stage():
    assert drawn(make_schedule("interleaved_1f1b", 4, 2, num_meshes=2)) == [
        "F0:0 F0:1 F2:0 F2:1 . B2:0 . B2:1 B0:0 B0:1 U0: U2:",
        ". F1:0 F1:1 F3:0 B3:0 F3:1 B3:1 B1:0 B1:1 . U1: U3:",
    ]


def test_interleaved_with_one_stage_on_each_mesh_is_1f1b():
    schedule = make_schedule("interleaved_1f1b", 3, 5)
    assert schedule.clocks == make_schedule("1f1b", 3, 5).clocks


def test_inference():
    assert drawn(make_schedule("inference", 2, 3)) == ["F0 F1 F2 .", ". F0 F1 F2"]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "interleaved_1f1b"])
def test_stages_may_share_meshes_in_any_way(name: str):
    for meshes, m in product(([0, 0, 1], [0, 1, 0], [1, 0, 2, 1], [0, 0, 0]), (1, 2, 5)):
        schedule = make_schedule(name, len(meshes), m, stage_mesh=meshes)
        assert schedule.stage_mesh == tuple(meshes)  # it was checked when it was made
        assert all(len(clock) == max(meshes) + 1 for clock in schedule.clocks)


def test_num_meshes_deals_stages_out():
    assert make_schedule("gpipe", 5, 1, num_meshes=2).stage_mesh == (0, 1, 0, 1, 0)


# -- bad arguments


def test_an_unknown_name_is_refused_with_the_known():
    known = r"unknown schedule '2f2b'.*'gpipe', '1f1b'.*'inference'"
    with pytest.raises(ArgumentError, match=known):
        make_schedule("2f2b", 2, 2)
    with pytest.raises(ArgumentError, match="unknown schedule '2f2b'"):
        in_flight_bound("2f2b", 2, 2, 0)


def test_interleaved_needs_equally_many_stages_on_every_mesh():
    with pytest.raises(MeshError, match=r"5 stages were given for 2 meshes.*a multiple of 2"):
        make_schedule("interleaved_1f1b", 5, 4, num_meshes=2)
    with pytest.raises(MeshError, match=r"stage k on mesh k mod 2.*\(0, 0, 1, 1\)"):
        make_schedule("interleaved_1f1b", 4, 4, stage_mesh=(0, 0, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, {}), "num_stages is 0"),
        ((2, 0, {}), "num_micro_batches is 0"),
        ((2, 4, {"num_meshes": 3}), "num_meshes is 3 for 2 stages"),
        ((2, 4, {"stage_mesh": (0, 2)}), r"stage_mesh is \(0, 2\) for 2 stages"),
        ((2, 4, {"stage_mesh": (0,)}), r"stage_mesh is \(0,\) for 2 stages"),
    ],
)
def test_bad_arguments(arguments, message):
    num_stages, num_micro_batches, meshes = arguments
    with pytest.raises((ArgumentError, MeshError), match=message):
        make_schedule("1f1b", num_stages, num_micro_batches, **meshes)


# -- the checker


def changed(schedule: Schedule, *changes: tuple[int, int, Task | None]) -> Schedule:
    clocks = [list(clock) for clock in schedule.clocks]
    for t, mesh, task in changes:
        clocks[t][mesh] = task
    return replace(schedule, clocks=tuple(map(tuple, clocks)))


def test_the_checker_finds_what_is_wrong():
    good = make_schedule("1f1b", 2, 2)  # F0 F1 . B0 . B1 U / . F0 B0 F1 B1 . U
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert good.clocks[1] == (Task(forward, 0, 1), Task(forward, 1, 0))
    wrong = {
        "clock 0: .* before .*": changed(
            good, (0, 1, Task(forward, 1, 0)), (1, 1, None)
        ),  # in the clock of what it waits for
        "on mesh 1": changed(good, (0, 1, Task(forward, 0, 0)), (0, 0, None)),
        "a second time": changed(good, (4, 0, Task(backward, 0, 0))),
        "missing": changed(good, (6, 0, None)),
        "UPDATE.* before .*BACKWARD": changed(
            good, (5, 0, good.clocks[6][0]), (6, 0, good.clocks[5][0])
        ),
        "BACKWARD.* before .*BACKWARD.*, stage=1": changed(
            good, (3, 0, None), (2, 0, Task(backward, 0, 0))
        ),
        "3 entries": replace(good, clocks=((*good.clocks[0], None), *good.clocks[1:])),
    }
    one = make_schedule("gpipe", 1, 2)  # F0 F1 B0 B1 U
    wrong["micro_batch=1.* before .*micro_batch=0"] = changed(
        one, (2, 0, one.clocks[3][0]), (3, 0, one.clocks[2][0])
    )
    for message, schedule in wrong.items():
        with pytest.raises(AssertionError, match=message):
            check_schedule(schedule)

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.pipeline import Free, MeshProgram, Phase, PipelinePrograms, Recv, Run, Send
from autopar.runtime import recording
from autopar.runtime.recording import (
    ClockOffset,
    MeshLog,
    Recorder,
    Waiters,
    may_be_used_up,
    one_to_watch,
)
from autopar.runtime.remote.recording import WorkerRecord, combined, offset_of
from autopar.runtime.timestamps import (
    InstructionMark,
    ProgramLabel,
    StepDescription,
    measured_timeline,
)

# Mesh 0 runs stage program 0 and sends its result to mesh 1, which runs stage program 1 on it.
PROGRAMS = PipelinePrograms(
    (
        MeshProgram((Run(0, 3, (0,), (1,)), Send((1,), (7,), 3, 1, 0), Free((1,))), (), (), 2),
        MeshProgram((Recv((0,), (7,), 3, 0, 0), Run(1, 3, (0,), (1,))), (), ((0, 1),), 2),
    ),
    ((0,), ()),
)
STEP = StepDescription(
    None,
    PROGRAMS,
    (
        ProgramLabel("stage0_forward", 0, Phase.FORWARD),
        ProgramLabel("stage1_backward", 1, Phase.BACKWARD),
    ),
    {7: (0, 1, 64.0)},
    ((10.0, 10.0, 6.0), (4.0, 8.0)),
)


def test_a_run_starts_when_all_that_it_waits_for_is_there() -> None:
    """One process: the mark of the `Send` is for the whole way."""
    marks = {
        0: [InstructionMark(0, 100.0, 103.0), InstructionMark(1, 100.5, 105.0)],
        1: [InstructionMark(1, 101.0, 109.0)],
    }
    line, first_s = measured_timeline(STEP, marks)
    assert first_s == 100.0
    assert line.step_s == 9.0
    times = {(e.mesh, e.kind): (e.start_s, e.end_s) for e in line.events}
    assert times == {
        (0, "run"): (0.0, 3.0),
        (0, "send"): (3.0, 5.0),
        (1, "recv"): (3.0, 5.0),
        (1, "run"): (5.0, 9.0),
    }
    run = next(e for e in line.events if (e.mesh, e.kind) == (1, "run"))
    assert (run.phase, run.stage, run.micro_batch) == ("backward", 1, 3)
    assert {e.num_bytes for e in line.events if e.kind != "run"} == {64.0}
    assert line.memory == (((0.0, 10.0), (3.0, 6.0)), ((5.0, 8.0),))


def test_what_a_run_without_duration_held_is_not_lost() -> None:
    """The thread that notes ends may be late, so that the next run seems to take no time."""
    marks = {
        0: [InstructionMark(0, 100.0, 100.0), InstructionMark(1, 100.0, 105.0)],
        1: [InstructionMark(1, 101.0, 109.0)],
    }
    line, _ = measured_timeline(STEP, marks)
    assert max(held for _, held in line.memory[0]) == 10.0


def test_a_step_that_is_dispatched_ahead_starts_when_its_devices_are_free() -> None:
    marks = {
        0: [InstructionMark(0, 100.0, 103.0), InstructionMark(1, 100.5, 105.0)],
        1: [InstructionMark(1, 101.0, 109.0)],
    }
    line, first_s = measured_timeline(STEP, marks, {0: 102.0, 1: 106.0})
    assert first_s == 102.0
    times = {(e.mesh, e.kind): (e.start_s, e.end_s) for e in line.events}
    assert times == {
        (0, "run"): (0.0, 1.0),
        (0, "send"): (1.0, 3.0),
        (1, "recv"): (1.0, 3.0),
        (1, "run"): (4.0, 7.0),
    }


def test_an_end_that_was_noted_late_does_not_turn_time_around() -> None:
    marks = {
        0: [InstructionMark(0, 100.0, 106.0), InstructionMark(1, 100.5, 100.6)],
        1: [InstructionMark(0, 101.0, 105.0), InstructionMark(1, 101.0, 104.0)],
    }
    line, _ = measured_timeline(STEP, marks)
    times = {(e.mesh, e.kind): (e.start_s, e.end_s) for e in line.events}
    assert times[0, "send"] == (5.0, 5.0)
    assert times[1, "recv"] == (1.0, 5.0)
    assert times[1, "run"] == (5.0, 5.0)


def test_a_step_before_that_was_noted_late_does_not_turn_time_around() -> None:
    """What was sent at 100.5 and there at 105 left before 107, when a thread noted that the step
    before was done. Of an unknown arrival, that is all that is known."""
    marks = {
        0: [InstructionMark(0, 100.0, 106.0), InstructionMark(1, 100.5, 100.6)],
        1: [InstructionMark(0, 101.0, 105.0), InstructionMark(1, 101.0, 109.0)],
    }
    line, first_s = measured_timeline(STEP, marks, {0: 107.0})
    times = {(e.mesh, e.kind): (first_s + e.start_s, first_s + e.end_s) for e in line.events}
    assert times[0, "send"] == (105.0, 105.0)
    assert times[1, "recv"] == (101.0, 105.0)
    marks[1][0] = InstructionMark(0, 101.0, None)
    line, first_s = measured_timeline(STEP, marks, {0: 107.0})
    times = {(e.mesh, e.kind): (first_s + e.start_s, first_s + e.end_s) for e in line.events}
    assert times[0, "send"] == (107.0, 107.0)
    assert times[1, "run"] == (107.0, 109.0)


def test_an_end_that_is_not_known_is_as_early_as_it_can_be() -> None:
    marks = {
        0: [InstructionMark(0, 100.0, None), InstructionMark(1, 102.0, 102.5)],
        1: [InstructionMark(0, 101.0, None), InstructionMark(1, 101.0, 104.0)],
    }
    line, _ = measured_timeline(STEP, marks)
    times = {(e.mesh, e.kind): (e.start_s, e.end_s) for e in line.events}
    assert times == {
        (0, "run"): (0.0, 0.0),
        (0, "send"): (2.0, 2.5),
        (1, "recv"): (1.0, 2.0),
        (1, "run"): (2.0, 4.0),
    }


def test_what_has_no_mark_is_left_out() -> None:
    line, _ = measured_timeline(STEP, {0: [InstructionMark(0, 1.0, 2.0)]})
    assert [(e.kind, e.end_s) for e in line.events] == [("run", 1.0)]
    assert measured_timeline(STEP, {})[0].events == ()


def test_waiters_note_when_arrays_are_there() -> None:
    waiters = Waiters()
    log = MeshLog(waiters)
    before = recording.clock()
    log.began(0, before)
    log.ends_with(0, [jnp.ones(3) + 1], may_vanish=False)
    log.began(1, before)
    assert waiters.finish(10.0)
    waiters.close()
    first, second = log.marks()
    assert first.ended_s is not None and first.ended_s > before
    assert second.ended_s is None  # nothing was waited for


def test_an_array_that_is_used_up_is_waited_for_before() -> None:
    waiters = Waiters()
    log = MeshLog(waiters)
    use_up = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1000)
    for place in range(200):
        log.began(place, 0.0)
        x = use_up(x)
        log.ends_with(place, [x], may_vanish=True)
    assert waiters.finish(10.0)
    waiters.close()
    missed = [mark for mark in log.marks() if mark.ended_s is None]
    assert len(missed) == waiters.num_missed < 100  # a busy machine may stop a thread anywhere


def test_what_was_used_up_before_is_counted() -> None:
    waiters = Waiters()
    x = jnp.zeros(3)
    x.delete()
    seen: list[float] = []
    waiters.note([x], seen.append, may_vanish=False)
    assert waiters.finish(10.0)
    waiters.close()
    assert waiters.num_missed == 1
    assert seen == []


def test_a_limit_ends_the_wait() -> None:
    waiters = Waiters()
    forever = threading.Event()

    class Slow:
        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            forever.wait(30.0)

    slow: Any = Slow()
    waiters.note([slow], lambda at_s: None, may_vanish=False)
    assert not waiters.finish(0.05)
    forever.set()
    waiters.close()


def test_the_oldest_steps_are_dropped() -> None:
    recorder = Recorder(max_events=10)
    for _ in range(5):  # of 4 events each
        recorder.begin(STEP)
    assert len(recorder.steps) == 2
    assert recorder.num_dropped == 3
    recorder.finish(1.0)


def test_a_worker_drops_the_oldest_steps_too() -> None:
    record = WorkerRecord(max_events=5)
    for tag in range(4):
        log = record.begin(tag)
        for place in range(3):
            log.began(place, float(place))
    found = record.finished(1.0)
    assert sorted(found.steps) == [2, 3]
    assert found.num_dropped == 2
    assert found.is_complete


@pytest.mark.parametrize("mesh", [0, 1])
def test_what_may_be_used_up(mesh: int) -> None:
    expected = [{0}, {1}][mesh]  # what stage program 0 is given; a result of the step
    assert may_be_used_up(PROGRAMS.meshes[mesh], PROGRAMS.donated) == expected


def test_the_smallest_that_stays_is_watched() -> None:
    sizes = {1: 5.0, 2: 3.0, 3: 4.0}
    assert one_to_watch((1, 2, 3), sizes.__getitem__, frozenset([2])) == (3, False)
    assert one_to_watch((1, 2), sizes.__getitem__, frozenset([1, 2])) == (2, True)


def test_the_quickest_answer_tells_the_clock() -> None:
    """The other's clock is 50 ahead, and ways are unequal."""
    pings = [(0.0, 50.9, 1.0), (2.0, 52.1, 2.2), (3.0, 53.4, 3.8)]
    offset = offset_of(pings)
    assert offset.offset_s == pytest.approx(50.0)
    assert offset.uncertainty_s == pytest.approx(0.1)
    later = ClockOffset(50.5, 0.05)
    assert combined(offset, later) == pytest.approx((50.5, 0.5))

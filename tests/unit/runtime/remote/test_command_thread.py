"""Commands are carried out in the order of their numbers, whatever order they come in."""

import random
import threading
import time

import pytest

from autopar.runtime.remote.command_thread import NUM_WAITERS, CommandThread
from autopar.runtime.remote.place import Later
from autopar.runtime.remote.progress import WorkerProgress

WITHIN_S = 20


@pytest.fixture
def thread(tmp_path):
    progress = WorkerProgress(str(tmp_path / "progress"))
    made = CommandThread(progress)
    yield made
    made.close()
    made._thread.join(WITHIN_S)
    progress.close()


@pytest.mark.parametrize("seed", range(5))
def test_order(thread, seed):
    numbers = list(range(50))
    random.Random(seed).shuffle(numbers)
    done = []
    answers = [thread.submit(n, "note", lambda n=n: done.append(n)) for n in numbers]
    for answer in answers:
        answer.result(WITHIN_S)
    assert done == list(range(50))


def test_nothing_runs_before_its_turn(thread):
    second = thread.submit(1, "second", lambda: "second")
    with pytest.raises(TimeoutError):
        second.result(0.05)
    assert thread.standstill() is None
    assert thread.submit(0, "first", lambda: "first").result(WITHIN_S) == "first"
    assert second.result(WITHIN_S) == "second"


def test_a_step_is_answered_while_many_programs_compile(thread):
    go = threading.Event()
    compiling = [
        thread.submit(n, "compiled", lambda: Later(lambda: go.wait(WITHIN_S)))
        for n in range(2 * NUM_WAITERS)
    ]
    step = thread.submit(len(compiling), "step", lambda: Later(lambda: "done"), is_step=True)
    assert step.result(WITHIN_S) == "done"
    assert not any(one.done() for one in compiling)
    go.set()
    assert all(one.result(WITHIN_S) for one in compiling)


def test_later_answers_wait_elsewhere(thread):
    go = threading.Event()
    threads = []

    def wait():
        threads.append(threading.current_thread())
        go.wait(WITHIN_S)
        return "late"

    later = thread.submit(0, "later", lambda: Later(wait))
    assert thread.submit(1, "next", lambda: "next").result(WITHIN_S) == "next"
    assert not later.done()
    go.set()
    assert later.result(WITHIN_S) == "late"
    assert threads[0] is not thread._thread


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(1), KeyboardInterrupt()])
def test_exceptions_are_answers(thread, error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        thread.submit(0, "fail", fail).result(WITHIN_S)
    with pytest.raises(type(error)):
        thread.submit(1, "fail", lambda: Later(fail)).result(WITHIN_S)
    assert thread.submit(2, "add", lambda: 3).result(WITHIN_S) == 3
    assert thread.standstill() is None


def test_stop_iteration_becomes_another_error(thread):
    answer = thread.submit(0, "next", lambda: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        answer.result(WITHIN_S)


def test_standstill_is_that_of_the_oldest_step(thread):
    go = threading.Event()
    save = thread.submit(0, "save", lambda: Later(lambda: go.wait(WITHIN_S)))
    while thread.standstill() is None:
        pass
    assert thread.standstill().command == "save"
    assert not thread.standstill().is_step
    step = thread.submit(1, "step", lambda: go.wait(WITHIN_S), is_step=True)
    while thread.standstill().command != "step":
        pass
    assert thread.standstill().is_step
    go.set()
    assert save.result(WITHIN_S) and step.result(WITHIN_S)
    assert thread.standstill() is None


def test_progress_and_answers_end_a_standstill(thread, monkeypatch):
    start = time.monotonic() + 100
    clock = [start]
    monkeypatch.setattr("autopar.runtime.remote.command_thread.time.monotonic", lambda: clock[0])
    begun, go = threading.Event(), threading.Event()

    def run():
        begun.set()
        return go.wait(WITHIN_S)

    step = thread.submit(0, "step", run, is_step=True)
    assert begun.wait(WITHIN_S)
    clock[0] = start + 30
    assert thread.standstill().seconds == pytest.approx(30)
    thread.progress.at(0, 1, 0)  # by the same clock, since both modules share `time`
    assert thread.standstill().seconds == 0.0
    clock[0] = start + 35
    assert thread.standstill().seconds == pytest.approx(5)
    go.set()
    assert step.result(WITHIN_S)


def test_a_clock_that_jumps_is_no_standstill(thread, monkeypatch):
    """A host's clock was set forward by ten minutes, as happens at a start without a network."""
    go, begun = threading.Event(), threading.Event()

    def wait():
        begun.set()
        go.wait(WITHIN_S)

    answer = thread.submit(0, "step", wait, is_step=True)
    assert begun.wait(WITHIN_S)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 600)
    assert thread.standstill().seconds < 60
    go.set()
    answer.result(WITHIN_S)

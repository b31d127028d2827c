"""Planning processes: they share jobs, and nothing is lost with one of them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.sharding import planning_processes
from autopar.sharding.planning_processes import (
    VARIABLE,
    PlanningProcesses,
    SharedJobs,
    num_processes,
)
from tests.unit.sharding.odd_jobs import Squares

ROOT = Path(__file__).parents[3]
COUNT = 40


@pytest.fixture(scope="module")
def started() -> Iterator[PlanningProcesses]:
    """Processes that tests may use and end; `running` tops them up."""
    with PlanningProcesses() as processes:
        yield processes


@pytest.fixture
def two(started: PlanningProcesses, monkeypatch: pytest.MonkeyPatch) -> PlanningProcesses:
    """Two processes beside this one, ready for work."""
    monkeypatch.setenv(VARIABLE, "3")
    started.start(Squares.__module__, 1e9)
    assert len(started.running) == 2
    for process in started.running:
        assert process.is_ready_within(60)
    return started


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def ends(pid: int, limit_s: float = 20.0) -> bool:
    until = time.monotonic() + limit_s
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


class Outcome:
    """What became of jobs."""

    def __init__(self) -> None:
        self.results: dict[int, tuple[int, int]] = {}
        self.errors: dict[int, str] = {}

    def run(
        self,
        processes: PlanningProcesses | None,
        subject: Squares,
        admits_again: bool = True,
        hurry: bool = False,
    ) -> Outcome:
        jobs = SharedJobs(
            iter(range(COUNT)),
            lambda job: admits_again,
            lambda job, result, took_s: self.results.update({job: result}),
            lambda job, error: self.errors.update({job: str(error)}),
            lambda: hurry,
        )
        jobs.run(processes, subject, "square")
        return self

    @property
    def squares(self) -> dict[int, int]:
        return {job: square for job, (square, _) in self.results.items()}

    @property
    def pids(self) -> set[int]:
        return {pid for _, pid in self.results.values()}


ALL = {job: job**2 for job in range(COUNT)}


def test_without_processes_all_is_done_here() -> None:
    outcome = Outcome().run(None, Squares(os.getpid(), seconds=0))
    assert outcome.squares == ALL and outcome.pids == {os.getpid()}


def test_all_take_part(two: PlanningProcesses) -> None:
    outcome = Outcome().run(two, Squares(os.getpid()))
    assert outcome.squares == ALL
    assert outcome.pids == {os.getpid(), *(process.pid for process in two.running)}


@pytest.mark.parametrize("fault", ["ends", "raises", "returns what cannot be sent"])
def test_what_another_cannot_do_is_done_here(two: PlanningProcesses, fault: str) -> None:
    outcome = Outcome().run(two, Squares(os.getpid(), fault))
    assert outcome.squares == ALL and not outcome.errors
    assert outcome.pids == {os.getpid()}
    assert len(two.running) == (0 if fault == "ends" else 2)


def test_an_error_is_this_process_own(two: PlanningProcesses) -> None:
    outcome = Outcome().run(two, Squares(os.getpid(), "raises everywhere"))
    assert outcome.errors == {5: "five"}
    assert outcome.squares == {job: square for job, square in ALL.items() if job != 5}


@pytest.mark.parametrize("in_time", [True, False])
def test_nobody_waits_long_for_one_that_hangs(
    two: PlanningProcesses,
    in_time: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its job is done here if there is time, and left out if not."""
    monkeypatch.setattr(planning_processes, "_PATIENCE_S", 1.0)
    pids = [process.pid for process in two.running]
    with caplog.at_level(logging.INFO, "autopar"):
        outcome = Outcome().run(
            two, Squares(os.getpid(), "hangs"), admits_again=in_time, hurry=not in_time
        )
    assert outcome.pids == {os.getpid()} and len(outcome.squares) == COUNT - (0 if in_time else 2)
    assert two.running == [] and all(ends(pid) for pid in pids)
    assert caplog.text.count("takes too long") == 2


def test_what_cannot_be_sent_is_done_here(two: PlanningProcesses) -> None:
    class Local(Squares):  # no other process can import it
        pass

    outcome = Outcome().run(two, Local(os.getpid()))
    assert outcome.squares == ALL and outcome.pids == {os.getpid()}


def test_an_error_of_whoever_takes_results_comes_through(two: PlanningProcesses) -> None:
    def take(job: int, result: object, took_s: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("in a thread")

    jobs = SharedJobs(
        iter(range(COUNT)), lambda job: True, take, lambda job, error: None, lambda: False
    )
    with pytest.raises(KeyError, match="in a thread"):
        jobs.run(two, Squares(os.getpid()), "square")


def test_an_interrupt_ends_what_is_under_way(two: PlanningProcesses) -> None:
    pids = [process.pid for process in two.running]

    def jobs() -> Iterator[int]:
        yield from range(10)  # others hang
        raise KeyboardInterrupt

    shared = SharedJobs(jobs(), lambda job: True, lambda *_: None, lambda *_: None, lambda: False)
    with pytest.raises(KeyboardInterrupt), two:
        shared.run(two, Squares(os.getpid(), "hangs"), "square")
    assert all(ends(pid) for pid in pids)


def test_none_is_started_for_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    with PlanningProcesses() as processes:
        processes.start(Squares.__module__, 1.0)
        assert processes.running == []


def test_one_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with PlanningProcesses() as processes:
        processes.start(Squares.__module__, 1e9)
        assert processes.running == []


def test_what_cannot_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setattr(planning_processes, "get_executable", lambda: "/no/such/python")
    with caplog.at_level(logging.INFO, "autopar"), PlanningProcesses() as processes:
        processes.start(Squares.__module__, 1e9)
        assert processes.running == []
    assert "/no/such/python" in caplog.text


def test_one_that_ends_while_it_starts_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    with PlanningProcesses() as processes:
        processes.start("no.such.module", 1e9)
        (process,) = processes.running
        assert ends(process.pid, 60)
        assert Outcome().run(processes, Squares(os.getpid())).squares == ALL
        assert processes.running == []


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert num_processes() == 1
    monkeypatch.setenv(VARIABLE, "auto")
    assert 1 <= num_processes() <= 4
    monkeypatch.setenv(VARIABLE, "7")
    assert num_processes() == 7
    for given in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(VARIABLE, given)
        with pytest.raises(ArgumentError, match=f"{VARIABLE}='{given}'"):
            num_processes()


def test_a_wrong_number_is_refused_by_small_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(ArgumentError, match=f"{VARIABLE}='many'"):
        autopar.plan(lambda x: 2 * x, np.ones(8), cluster=autopar.ClusterSpec(1, 2, "h100-sxm"))


@pytest.mark.parametrize(
    ("limit", "most"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("?", 4)]
)
def test_a_container_may_have_less_than_all_cores(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{limit}\n")
    monkeypatch.setattr(planning_processes, "_CPU_LIMIT", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setenv(VARIABLE, "auto")
    assert num_processes() == most


SCRIPT = """
import os, sys, time
print("begins", flush=True)
from autopar.sharding.planning_processes import PlanningProcesses
processes = PlanningProcesses()
processes.start("autopar.stages.table_bench", 1e9)
(process,) = processes.running
assert process.is_ready_within(120)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    """Nor does it run the owner's script once more."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, VARIABLE: "2", "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "begins\n"
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.send_signal(number)
        rest, _ = owner.communicate(timeout=30)
        assert rest == "" and ends(pid)
    finally:
        owner.kill()

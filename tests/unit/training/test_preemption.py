"""Training that is asked to end saves a checkpoint, and the next start goes on exactly there: real
processes, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.training.preemption import Preempted, StopRequests

PROGRAM = Path(__file__).with_name("stopped_training.py")
LIMIT_S = 120.0
MANY = 100_000


def losses_in(path: Path) -> list[tuple[int, str]]:
    if not path.exists():
        return []
    return [(int(line.split()[0]), line.split()[1]) for line in path.read_text().splitlines()]


class Run:
    """A training in processes of its own."""

    def __init__(
        self, folder: Path, losses: Path, num_steps: int, count: int = 1, **env: str
    ) -> None:
        self.losses = losses
        port = _free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), str(losses), str(num_steps)]
                + ([str(process), str(count), str(port)] if count > 1 else []),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **env},
            )
            for process in range(count)
        ]

    def wait_for_steps(self, count: int) -> None:
        until_s = time.monotonic() + LIMIT_S
        while len(losses_in(self.losses)) < count:
            assert all(p.poll() is None for p in self.processes), self.end()
            assert time.monotonic() < until_s, "no step"
            time.sleep(0.02)

    def end(self) -> list[tuple[int, str, str]]:
        """(exit code, output, errors) of each process."""
        outputs = [process.communicate(timeout=LIMIT_S) for process in self.processes]
        return [(p.returncode, *texts) for p, texts in zip(self.processes, outputs, strict=True)]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    begun: list[Run] = []
    yield begun
    for run in begun:
        run.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("number", "count", "code", "env"),
    [
        (signal.SIGTERM, 1, 143, {}),
        pytest.param(signal.SIGINT, 1, -signal.SIGINT, {}, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, 138, {"SLURM_JOB_ID": "7"}, marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, 2, 143, {"STATEFUL": "1"}, marks=pytest.mark.ci),
    ],
)
def test_the_next_start_goes_on_exactly_where_a_signal_ended_the_last(
    tmp_path: Path, runs: list[Run], number: int, count: int, code: int, env: dict[str, str]
) -> None:
    losses, folder = tmp_path / "losses", tmp_path / "checkpoints"
    runs.append(Run(folder, losses, MANY, count, **env))
    runs[-1].wait_for_steps(5)
    runs[-1].processes[-1].send_signal(number)  # only one of several
    ended = runs[-1].end()
    assert [one[0] for one in ended] == [code] * count, ended
    first = losses_in(losses)
    done = len(first)
    assert [n for n, _ in first] == list(range(1, done + 1)) and done < MANY
    assert autopar.latest_step(folder) == done
    assert "was written in" in ended[0][2]

    runs.append(Run(folder, losses, done + 5, count, **env))
    ended = runs[-1].end()
    assert [one[0] for one in ended] == [0] * count, ended
    assert ended[0][1].splitlines()[-1] == f"count {done + 5}"
    whole = tmp_path / "whole"
    runs.append(Run(tmp_path / "other", whole, done + 5, count, **env))
    runs[-1].end()
    assert losses_in(losses) == losses_in(whole), "bitwise those of a run without a signal"


def test_a_second_interrupt_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="checkpoint of step 7"), StopRequests(60) as stops:
        assert not stops.wanted_after(7, 7)
        signal.raise_signal(signal.SIGINT)
        assert stops.wanted_after(8, 7) and 50 < stops.left_s <= 60
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_end_of_the_grace_time_interrupts_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.training.preemption._LATE_S", 0.0)
    with pytest.raises(Preempted) as raised, StopRequests(0.1) as stops:
        stops.wanted_after(0, None)
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(LIMIT_S)
    assert (raised.value.code, raised.value.step) == (143, None)
    assert str(raised.value) == "training ended after SIGTERM; no checkpoint was written"


def test_waits_for_nodes_end_with_a_request() -> None:
    with pytest.raises(Preempted), StopRequests(60) as stops:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        timer.start()
        stops.sleep(LIMIT_S)
        timer.join()


def test_other_threads_have_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def look() -> None:
        with StopRequests(1) as stops:
            assert signal.getsignal(signal.SIGTERM) is before
            assert not stops.wanted_after(1, None)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

"""Logs, the line on a terminal, and AUTOPAR_DEBUG."""

from __future__ import annotations

import logging
import os
import pty
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import progress
from autopar.progress import Progress, debugs, tell

CLUSTER = autopar.ClusterSpec(1, 4, "cpu")
ARGS = np.ones((8, 16), np.float32), np.ones((8, 8), np.float32)


def step(weights, batch):
    return weights - 0.1 * (batch @ weights), jnp.sum(batch)


class Terminal:
    """stderr is a terminal, and what was written to it is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __enter__(self) -> Terminal:
        self.main, other = pty.openpty()
        self.file = os.fdopen(other, "w")
        assert self.file.isatty()
        self.monkeypatch.setattr(sys, "stderr", self.file)
        return self

    def __exit__(self, *_: object) -> None:
        self.monkeypatch.undo()
        self.file.close()
        os.set_blocking(self.main, False)
        text = b""
        while True:
            try:
                part = os.read(self.main, 65536)
            except OSError:  # nothing more, or the other side is closed
                break
            if not part:
                break
            text += part
        os.close(self.main)
        self.text = text.decode()


def drawing_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "autopar-progress"]


def test_long_work_is_drawn_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.05)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    with Terminal(monkeypatch) as terminal, Progress("planning step"):
        with Progress("solving meshes", 4) as bar:
            bar.step()
            deadline = time.monotonic() + 5
            while not progress._SCREEN._is_drawn and time.monotonic() < deadline:
                time.sleep(0.02)
        assert drawing_threads()
    assert "autopar: planning step: solving meshes [#####...............] 1 of 4, 0 s" in (
        terminal.text
    )
    assert terminal.text.endswith("\r\x1b[K")
    assert not drawing_threads()


def test_short_work_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    with Terminal(monkeypatch) as terminal, Progress("short"):
        time.sleep(0.05)
    assert terminal.text == "" and not drawing_threads()


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Progress("one"), Progress("two")
    with Terminal(monkeypatch) as terminal, pytest.raises(ZeroDivisionError), one, two:
        raise ZeroDivisionError
    assert not drawing_threads() and not progress._SCREEN._under_way
    assert terminal.text == ""


def test_silent_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    with Progress("no terminal"):
        assert not drawing_threads()
    assert capsys.readouterr().err == ""
    with Terminal(monkeypatch) as terminal:
        monkeypatch.setenv("AUTOPAR_PROGRESS", "0")
        with Progress("not wanted"):
            assert not drawing_threads()
    assert terminal.text == ""
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("no stderr at all"):
        assert not drawing_threads()


def test_planning_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    with Terminal(monkeypatch) as terminal:
        autopar.plan(step, *ARGS, cluster=CLUSTER, method=autopar.ShardParallel())
    assert "autopar: planning step: " in terminal.text
    assert not drawing_threads()


def test_passes_are_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "autopar"):
        autopar.plan(step, *ARGS, cluster=CLUSTER, method=autopar.ShardParallel())
    told = [(r.levelname, r.getMessage().partition(":")[0]) for r in caplog.records]
    assert ("DEBUG", "trace begins") in told
    for name in ("trace", "graph", "shard", "assign", "planning step"):
        assert ("INFO", name) in told
    assert told.index(("INFO", "trace")) < told.index(("INFO", "shard"))


def test_text_on_demand(monkeypatch: pytest.MonkeyPatch, capfd, caplog) -> None:
    monkeypatch.setenv("AUTOPAR_DEBUG", "plan, strategies,solver,plans")
    plan = autopar.plan(step, *ARGS, cluster=CLUSTER, method=autopar.ShardParallel((4,)))
    out, err = capfd.readouterr()
    assert out == ""
    assert plan.explain(detail="full") in err
    assert "operators of step (mesh x=4):" in err and "dot_general" in err
    assert "autopar solver, mesh (4,): " in err and "gap 0.00%" in err
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1  # once, though it is asked many times
    assert "'plans' is unknown. Choose from plan, strategies, solver" in warned[0]
    monkeypatch.setenv("AUTOPAR_DEBUG", "")
    assert not debugs("plan")
    tell("plan", "nothing")
    assert capfd.readouterr().err == ""


def test_the_solvers_own_log(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """HiGHS writes to where stderr is, not to stdout."""
    from autopar.sharding.ilp import solve_ilp
    from autopar.sharding.reduce import PairwiseProblem

    rng = np.random.default_rng(0)
    problem = PairwiseProblem({n: rng.random(3) for n in range(4)})
    for u in range(4):
        for v in range(u + 1, 4):
            problem.add_edge(u, v, rng.random((3, 3)))
    quiet = solve_ilp(problem)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("AUTOPAR_DEBUG", "solver")
    assert solve_ilp(problem).objective == quiet.objective
    out, err = capfd.readouterr()
    assert out == "" and "Model status" in err


def test_elsewhere_the_best_plan_so_far_is_logged(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.02)
    best = progress.Best(lambda: 34.4)
    with (
        caplog.at_level(logging.INFO, "autopar"),
        Progress("planning train_step"),
        progress.showing(best),
        Progress("solving stages", 8) as stages,
    ):
        wait_for(lambda: "planning train_step: solving stages" in caplog.text)
        stages.step()
        best.take(1.25, 0.004)
        best.take(1.5, 0.0)  # is no better
        wait_for(lambda: "1 of 8, best step 1.25 s (gap 0.4%), 34 s left, 0 s" in caplog.text)


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited 30 s in vain"
        time.sleep(0.01)


def test_the_line_says_when_time_is_up() -> None:
    assert progress.Best(lambda: 0.0).text() == "time is up"
    assert progress.Best(lambda: float("inf")).text() == ""

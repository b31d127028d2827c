"""`autopar profile --enumerate`, `--database` and `--forget`: what they print, and bad input."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from autopar.cli import main
from autopar.cli.enumerate import comparison, correlations
from autopar.ir.profile import Timing
from autopar.measure.database import FILE, Database, Key
from autopar.measure.enumerate_plans import TimedPlan
from autopar.measure.time_step import StepTiming

FACTORY = """
import jax
import jax.numpy as jnp

def make_step(batch: int = 64):
    def step(weights, batch):
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return weights - 0.1 * grads

    return step, (jnp.ones((32, 64)), jnp.ones((batch, 32)))
"""


@pytest.mark.ci
def test_plans_are_run_and_compared(tmp_path, capsys):
    (tmp_path / "train.py").write_text(FACTORY)
    target = tmp_path / "figures.json"
    line = ["profile", "--model", f"{tmp_path}/train.py:make_step", "--enumerate", "--limit", "2"]
    assert main([*line, "--mesh", "8", "--json", str(target)]) == 0
    text = capsys.readouterr().out
    assert "step: 2 plans on 8 × cpu, meshes 8" in text
    assert "plan 1 of 2: mesh 8, predicted" in text and "plan 2: like plan 1, but " in text
    assert "rank correlation, predicted with measured: step" in text
    document = json.loads(target.read_text())
    assert len(document["plans"]) == 2
    assert {*document["plans"][0]} == {"mesh", "strategies", "sent_bytes", "predicted", "measured"}
    assert set(document["rank_correlation"]) >= {"step", "communication", "computation", "memory"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "2x2x2"], "--mesh 2x2x2: needs one or two sizes"),
        (["--mesh", "4x4"], "needs 16 devices, got 8"),
        (["--devices", "9"], "requested 9 devices, found 8"),
        (["--devices", "1"], "needs at least two devices, got 1"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json"),
        (["--quick"], "autopar profile --quick: belongs to"),
    ],
)
def test_bad_input_is_said(tmp_path, capsys, options, message):
    (tmp_path / "train.py").write_text(FACTORY)
    line = ["profile", "--model", f"{tmp_path}/train.py:make_step", "--enumerate", *options]
    assert main(line) == 2
    assert message in capsys.readouterr().err


def timed(predicted_s, measured_s, communication_s=0.0):
    plan = SimpleNamespace(
        mesh_shape=(8,),
        axis_names=("x",),
        estimated_step_s=predicted_s,
        estimated_peak_bytes=2.0**20,
        communication_bytes=1024.0,
        modules=(SimpleNamespace(communication_s=0.0, compute_s=predicted_s),),
    )
    step = None if measured_s is None else Timing(measured_s, 0.01, 5)
    failure = "" if step else "RESOURCE_EXHAUSTED"
    timing = StepTiming(step, 1.0, 2.0**21, failure)
    words = (("product", f"x: {predicted_s}"),)
    return TimedPlan(SimpleNamespace(plan=plan), timing, communication_s, words)


def test_what_misleads_most_is_said():
    # All take ten times their prediction, but the second takes thirty times, so it is overtaken.
    found = [timed(1.0, 10.0, 12.0), timed(2.0, 60.0), timed(3.0, 30.0), timed(4.0, 40.0)]
    found.append(timed(0.5, None))
    lines = comparison(found)
    text = "\n".join(lines)
    assert "a step takes 10× its prediction (median)" in text
    assert "plan 2: 3.00× slower (predicted 2.00 s, measured 60.00 s)" in text
    assert "best predicted: plan 1, 10.00 s, also the fastest" in text
    assert "out of memory" in text
    assert correlations(found)["step"] == pytest.approx(1 - 6 * (4 + 1 + 1) / (4 * 15))
    first = next(line for line in lines if line.startswith("  1 "))
    assert "12.00 s  0.0 µs" in first  # computation is never below nothing


def test_nothing_ran():
    assert comparison([timed(1.0, None)])[-1] == "No plan ran: all ran out of memory."


def test_the_database_is_listed_and_cleared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    database = Database(tmp_path / FILE)
    database.keep(Key("abc", "b", "8 × cpu", "v"), StepTiming(Timing(0.5), 1.0, 1024.0), "mine")
    assert main(["profile", "--database"]) == 0
    text = capsys.readouterr().out
    assert "1 timing, latest first" in text and "500.00 ms ± 0%" in text and "mine" in text
    assert main(["profile", "--forget"]) == 0
    assert "removed 1 timing." in capsys.readouterr().out and database.rows() == []
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert main(["profile", "--database"]) == 0
    assert "database is off" in capsys.readouterr().out

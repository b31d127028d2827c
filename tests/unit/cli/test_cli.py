"""The `autopar` command, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import cli
from autopar.cli import demo
from autopar.errors import AutoparError

ROOT = Path(__file__).parents[3]


def run_autopar(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the demo chooses devices, which a process can do once."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles faster
    }
    command = [sys.executable, "-m", "autopar", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("gpt", marks=pytest.mark.ci),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "moe", "pipeline")),
    ],
)
def test_demo(model: str) -> None:
    done = run_autopar("demo", "--platform", "cpu", "--steps", "3", "--model", model)
    assert done.returncode == 0, done.stderr
    for part in (
        "Training a small ",
        "8 virtual CPU devices",
        "cannot be faster than",
        "one device   compiling ",
        "all devices  planning and compiling ",
        "then 2 steps of ",
        "train_step: a pipeline of 2" if model == "pipeline" else "train_step: on a mesh ",
        "TransformerBlock_",
        "losses agree",
        "verdict: autopar ran the step on 8 devices with the results of one.",
        "next: ",
        "autopar plan my_train.py:make_step",
    ):
        assert part in " ".join(done.stdout.split()) or part in done.stdout
    assert len(done.stdout.splitlines()) <= 30


def test_the_verdict_on_real_devices_has_the_speed_up() -> None:
    alone, sharded = (demo.DemoRun([1.0], 9.0, step_s) for step_s in (0.6, 0.15))
    real = demo._verdict(True, alone, sharded, 8, is_virtual=False)
    assert "on 8 devices with the results of one, 4.00 times as fast" in real
    assert "times as fast" not in demo._verdict(True, alone, sharded, 8, is_virtual=True)
    differs = demo._verdict(False, alone, sharded, 8, is_virtual=False)
    assert "bug of autopar" in differs and "times as fast" not in differs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: command"),
        (("dmeo",), "unknown command 'dmeo' (did you mean 'demo'?); choose from demo, plan"),
        (("demo", "--steps", "0"), "0 is not a whole number ≥ 1"),
        (("demo", "--steps", "few"), "--steps"),
        (("demo", "--batch-size", "-1"), "-1 is not a whole number ≥ 1"),
        (("demo", "--platform", "abacus"), "invalid choice: 'abacus'"),
        (("demo", "--layers", "4"), "unrecognized arguments: --layers 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_arguments(arguments, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in ("demo", "plan", "sweep", "report", "explain", "diff", "doctor", "devices"):
        assert f"    {name} " in out


@pytest.mark.parametrize(("agrees", "code"), [(True, 0), (False, 1)])
def test_exit_code_says_whether_the_losses_agree(monkeypatch, agrees: bool, code: int) -> None:
    monkeypatch.setattr("autopar.cli.demo.run_demo", lambda *arguments: agrees)
    assert cli.main(["demo"]) == code


def test_an_error_of_autopar_is_told_without_a_traceback(monkeypatch, capsys) -> None:
    def fails(*arguments: object) -> bool:
        raise AutoparError("flax is not installed")

    monkeypatch.setattr("autopar.cli.demo.run_demo", fails)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "autopar: flax is not installed\n"

"""`autopar plan … --verify`, with a stand-in for the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli import main
from autopar.measure.verify import targets, verify_plan
from autopar.measure.verify.jobs import ProgramCosts

STEP = f"{Path(__file__).parent / 'factories_for_tests.py'}:make_step"
PLAN = ["plan", STEP, "--cluster", "1x4:h100-sxm", "--method", "shard", "--quiet", "--verify"]


@pytest.mark.parametrize(
    ("gib", "code", "said"), [(1, 0, "fits, 66.1 GiB left"), (70, 1, "does not fit: the mesh ")]
)
def test_the_exit_status_says_whether_it_fits(
    capsys, monkeypatch: pytest.MonkeyPatch, gib: int, code: int, said: str
) -> None:
    figures = ProgramCosts(0, 0, gib * 2**30, 0, (), 0.0, 0.1)
    monkeypatch.setattr(verify_plan, "compile_all", lambda jobs, *_: [figures for _ in jobs])
    monkeypatch.setattr(verify_plan, "cuda_version", lambda target: 13)
    assert main(PLAN) == code
    out = capsys.readouterr().out
    assert "compiled for NVIDIA H100 80GB HBM3 (h100-80gb) without a GPU" in out
    assert said in out


@pytest.mark.parametrize(("num_bytes", "fits"), [(60_000, True), (80_000, False)])
def test_a_step_that_is_predicted_not_to_fit_by_a_little_is_left_to_xla(
    capsys, monkeypatch: pytest.MonkeyPatch, num_bytes: int, fits: bool
) -> None:
    """The smallest plan is predicted at 68 KiB."""
    figures = ProgramCosts(0, 0, num_bytes, 0, (), 0.0, 0.1)
    monkeypatch.setattr(verify_plan, "compile_all", lambda jobs, *_: [figures for _ in jobs])
    monkeypatch.setattr(verify_plan, "cuda_version", lambda target: 13)
    assert main([*PLAN[:-1], "--budget", "66KB"]) == 1
    assert "more than the budget of" in capsys.readouterr().err
    assert main([*PLAN, "--budget", "66KB"]) == (0 if fits else 1)
    told = capsys.readouterr()
    assert ("h100-80gb" in told.out) == fits
    assert fits or "XLA's count: train_step: no plan fits" in told.err


def test_a_missing_compiler_is_told_before_anything_is_planned(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_is_there", lambda module: False)
    arguments = ["plan", "no_such_file.py:f", "--cluster", "1x4:h100-sxm", "--verify"]
    assert main(arguments) == 2
    assert "pip install 'autopar[verify]'" in capsys.readouterr().err


def test_another_target(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = ProgramCosts(0, 0, 2**30, 0, (), 0.0, 0.1)
    monkeypatch.setattr(verify_plan, "compile_all", lambda jobs, *_: [figures for _ in jobs])
    monkeypatch.setattr(verify_plan, "cuda_version", lambda target: 13)
    assert main([*PLAN, "--target", "a100-80gb"]) == 0
    assert "(a100-80gb) without a GPU" in capsys.readouterr().out
    assert main([*PLAN, "--target", "a100-80"]) == 2
    assert "a100-80gb" in capsys.readouterr().err

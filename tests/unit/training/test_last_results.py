"""A training run that is started again after its end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from autopar import run_training
from autopar.training.last_results import FILE, read_last_results, write_last_results


def step(state, batch):
    return state + batch, {"loss": jnp.float32(2.5) * batch, "parts": (1, [batch])}


def train(folder: Path, num_steps: int | None, batches: int = 3):
    source = [jnp.float32(n) for n in range(batches)]
    return run_training(
        step, jnp.float32(0), source, checkpoint_dir=folder / "run", num_steps=num_steps
    )


@pytest.mark.parametrize("num_steps", [None, 3, 2])
def test_a_finished_run_says_so_and_returns_its_last_results(tmp_path, caplog, num_steps):
    state, results = train(tmp_path, num_steps)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autopar"):
        again, last = train(tmp_path, num_steps)
    assert float(again) == float(state)
    assert last == {"loss": float(results["loss"]), "parts": (1, [float(results["parts"][1][0])])}
    (record,) = caplog.records
    text = record.getMessage()
    assert f"is finished: its {num_steps or 3} steps are done" in text
    assert ("more batches" if num_steps is None else "a larger num_steps") in text


def test_a_run_that_goes_on_says_nothing(tmp_path, caplog):
    train(tmp_path, 1)
    caplog.clear()
    state, results = train(tmp_path, 3)
    assert float(state) == 3.0 and float(results["loss"]) == 5.0
    assert not [r for r in caplog.records if "finished" in r.getMessage()]


@pytest.mark.parametrize(
    "results", [None, 1.5, True, {"a": 1, "b": [2.0, (3, False)]}, (), np.float32(2)]
)
def test_numbers_come_back_as_they_were(tmp_path, results):
    write_last_results(tmp_path, 7, results)
    assert read_last_results(tmp_path, 7) == results
    assert read_last_results(tmp_path, 8) is None


@pytest.mark.parametrize("results", ["text", np.ones(3), {1: 2.0}, {"a": object()}, 1j])
def test_other_results_are_not_kept(tmp_path, results):
    write_last_results(tmp_path, 7, results)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", "nan", '{"step": 7, "results": {"tuple": 3}}', "\xff"])
def test_a_damaged_file_is_no_result(tmp_path, text):
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    assert read_last_results(tmp_path, 7) is None


def test_a_large_file_is_not_read(tmp_path, caplog):
    (tmp_path / FILE).write_text(
        json.dumps({"step": 7, "results": {"number": 1}}) + " " * (1 << 20)
    )
    assert read_last_results(tmp_path, 7) is None
    assert "cannot be read" in caplog.text

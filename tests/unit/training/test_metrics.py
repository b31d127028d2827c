"""Figures of a training run: what is measured, and what Prometheus, TensorBoard and the log get."""

from __future__ import annotations

import logging
import urllib.request
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import TrainingMetrics
from autopar.errors import ArgumentError
from autopar.training.metrics import Meter

FIGURES = TrainingMetrics(
    step=20,
    step_s=0.5,
    tokens_per_s=1024.0,
    mfu=0.4,
    memory_bytes=3 * 2**30,
    loss=2.25,
    restarts=1,
    checkpoint_step=10,
    checkpoint_age_s=7.0,
)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(state)
    return state - grad, loss


def run(tmp_path: Path, **options: Any) -> list[TrainingMetrics]:
    told: list[TrainingMetrics] = []
    batches = [np.full((16, 8), number, np.float32) for number in range(12)]
    autopar.run_training(
        autopar.parallelize(train_step, method=autopar.ShardParallel()),
        np.ones((8, 8), np.float32) / 8,
        batches,
        checkpoint_dir=tmp_path,
        checkpoint_every=5,
        metrics=autopar.MetricsPolicy([told.append], every=3, tokens_per_step=100),
        **options,
    )
    return told


def test_what_is_measured(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    told = run(tmp_path, on_step=lambda number, loss: losses.update({number: float(loss)}))
    assert [one.step for one in told] == [3, 6, 9, 12]
    for one in told:
        assert one.tokens_per_s == pytest.approx(100 / one.step_s)
        assert one.loss == losses[one.step]
        assert one.mfu is not None and 0 < one.mfu < 1
        assert one.restarts == 0 and one.checkpoint_age_s is not None
    assert told[0].checkpoint_step == 0 and told[-1].checkpoint_step in (5, 10)


def test_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        autopar.log_metrics(FIGURES)
    assert caplog.messages == [
        "step 20, loss 2.25, 500.0 ms per step, 1024 tokens/s, MFU 40.0 %, 3.0 GiB in use, "
        "1 restarts, checkpoint 10, 7 s old"
    ]


def test_nothing_is_measured_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def loss() -> float:
        asked.append(1)
        return 1.0

    meter = Meter(None, autopar.MetricsPolicy(every=1))
    for level, count in ((logging.WARNING, 0), (logging.INFO, 2)):
        with caplog.at_level(level, "autopar"):
            for step in (1, 2, 3):
                meter.done(step, loss)
        assert len(asked) == count


def test_prometheus_reads_the_newest_figures() -> None:
    sink = autopar.PrometheusMetrics(port=0)
    try:
        sink(FIGURES)
        url = f"http://127.0.0.1:{sink.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    finally:
        sink.close()
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert float(values["autopar_step_s"]) == 0.5 and float(values["autopar_restarts"]) == 1
    assert float(values["autopar_mfu"]) == 0.4


def test_tensorboard_gets_event_files(tmp_path: Path) -> None:
    sink = autopar.TensorBoardMetrics(tmp_path)
    sink(FIGURES)
    sink.close()
    (file,) = tmp_path.iterdir()
    assert b"training/tokens_per_s" in file.read_bytes()


def test_sinks_are_functions_and_are_closed(tmp_path: Path) -> None:
    class Sink:
        closed = 0

        def __call__(self, metrics: TrainingMetrics) -> None:
            raise ValueError("of the sink")

        def close(self) -> None:
            self.closed += 1

    sink = Sink()
    policy = autopar.MetricsPolicy([sink], every=1)
    batches = [np.ones((16, 8), np.float32)] * 3
    step, state = jax.jit(train_step), np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="of the sink"):
        autopar.run_training(step, state, batches, checkpoint_dir=tmp_path, metrics=policy)
    assert sink.closed == 1
    with pytest.raises(ArgumentError, match="needs functions of TrainingMetrics"):
        autopar.MetricsPolicy([3])  # type: ignore[list-item]

"""Shared by the examples at real size: a run with checkpoints, metrics and resume.

A run is a folder: `checkpoints/`, `metrics.jsonl` (a line of figures every few steps) and
`plan.html`. Start the same command again and it goes on where it stopped: batch n is the same
whoever draws it, and the checkpoint of step n holds the state after n steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

import autopar
from examples import common, data
from examples.models import Example

Batches = Callable[[int], Iterator[data.Batch]]


def arguments(
    description: str | None, *, sizes: Iterable[str], size: str, steps: int, batch: int
) -> argparse.ArgumentParser:
    """A parser with the options of all examples, and those of a run."""
    parser = common.arguments(description, steps=steps, batch=batch, sizes=sizes, size=size)
    parser.add_argument("--run", default="run", help="folder of the run; default: run")
    parser.add_argument("--checkpoint-every", type=common.whole_number, default=500)
    parser.add_argument("--metrics-every", type=common.whole_number, default=10)
    parser.add_argument("--layers", type=common.whole_number, help="fewer than the size has")
    return parser


def train(example: Example, batches: Batches, given: argparse.Namespace, unit: str) -> None:
    """Train for `--steps` steps in all, those of earlier runs of this folder included.

    batches: from the number of the first batch to all from there on.
    unit:    what a batch has rows of, such as "sequences".
    """
    folder = Path(given.run)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints, shapes = folder / "checkpoints", example.abstract_batch()
    with common.devices(given):
        train_step = autopar.parallelize(example.train_step)
        # The state is created in the step's shards, never whole on one device.
        method = autopar.CreateStateParallel(train_step, shapes)
        state = autopar.parallelize(example.create_state, method=method)(jax.random.key(0))
        plan = train_step.plan(state, shapes)
        plan.report(folder / "plan.html")
        common.show(plan)
        done = autopar.latest_step(checkpoints) or 0
        print(f"{example.num_params:,} parameters, from step {done}", flush=True)
        tokens = shapes["tokens"].shape if "tokens" in shapes else None
        autopar.run_training(
            train_step,
            state,
            lambda first: itertools.islice(batches(first), max(0, given.steps - first)),
            checkpoint_dir=checkpoints,
            checkpoint_every=given.checkpoint_every,
            metrics=autopar.MetricsPolicy(
                [_Figures(folder / "metrics.jsonl", given.batch, unit)],
                every=given.metrics_every,
                tokens_per_step=tokens and math.prod(tokens),
            ),
        )
    print(f"trained to step {given.steps}; the same command with more --steps goes on", flush=True)


@dataclasses.dataclass(frozen=True)
class _Figures:
    """Prints figures, and adds them to a file of JSON lines."""

    path: Path
    rows: int
    unit: str

    def __call__(self, figures: autopar.TrainingMetrics) -> None:
        per_s = self.rows / figures.step_s if figures.step_s else 0.0
        print(f"{figures.text()}, {per_s:,.1f} {self.unit}/s", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(figures)) + "\n")


def make_step(example: Example) -> tuple[Any, tuple[Any, Any]]:
    """The step and the shapes of its arguments, for `autopar plan`."""
    return example.train_step, (example.abstract_state(), example.abstract_batch())

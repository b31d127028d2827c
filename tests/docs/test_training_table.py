"""The faults that docs/training.md says were measured are in benchmarks/results/kills.json."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/kills.json").read_text())
PAGE = (ROOT / "docs/training.md").read_text()

SAID = {
    "kill": "{count} kills: error after {low} to {high} s",
    "checkpoint": "{count} while a checkpoint was written: {low} to {high} s",
    "start": "{count} while workers started: {low} to {high} s",
    "stop": "{count} stopped workers: {low} to {high} s",
    "node": "{count} lost nodes: {low} to {high} s",
}


def test_the_command_and_every_kind_are_named():
    assert f"`{RESULTS['command']}`" in PAGE
    assert set(SAID) == set(RESULTS["summary"])


@pytest.mark.parametrize("kind", SAID)
def test_figures(kind: str):
    row = RESULTS["summary"][kind]
    low, _, high = row["error_s"]
    assert SAID[kind].format(count=row["count"], low=f"{low:.1f}", high=f"{high:.1f}") in PAGE
    assert row["exact"] == row["within_stated"] == row["count"]

"""The faults that docs/training.md says were measured are in benchmarks/results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("kills", "kills_15", "kills_300", "kills_processes")
RESULTS = {n: json.loads((ROOT / f"benchmarks/results/{n}.json").read_text()) for n in FILES}
PAGE = (ROOT / "docs/training.md").read_text()

SAID = {
    ("kills", "kill"): "{count} kills: error after {low} to {high} s",
    ("kills", "checkpoint"): "{count} while a checkpoint was written: {low} to {high} s",
    ("kills", "start"): "{count} while workers started: {low} to {high} s",
    ("kills", "stop"): "{count} stopped workers: {low} to {high} s",
    ("kills", "node"): "{count} lost nodes: {low} to {high} s",
    ("kills_15", "network"): "{count} cut: error after {high} s",
    ("kills_15", "sigterm"): "{count} signals on Ray: ended after {high} s",
    ("kills_15", "ctrl_c"): "{count} on Ray: ended after {high} s",
    ("kills_15", "torn"): "{count} torn checkpoint before a kill: error of the kill after {high} s",
    ("kills_300", "cut"): "{count} cut networks: error after {low} to {high} s",
    ("kills_300", "disk"): "{count} full disk: error after {high} s",
    ("kills_processes", "kill"): "{count} killed processes: the other ended after {low} to {high}",
    ("kills_processes", "stop"): "{count} stopped: {low} to {high} s",
    ("kills_processes", "cut"): "{count} cut off: {low} to {high} s",
    ("kills_processes", "sigterm"): "{count} by SIGTERM: all ended after {low} to {high} s",
    ("kills_processes", "ctrl_c"): "{count} by Ctrl-C: {low} to {high} s",
}


def test_every_kind_of_fault_is_said():
    kinds = {kind for result in RESULTS.values() for kind in result["summary"]}
    assert kinds == {kind for _, kind in SAID}


@pytest.mark.parametrize("name", FILES)
def test_every_fault_behaved_as_stated(name: str):
    assert f"`{RESULTS[name]['command']}`" in PAGE.replace("\n", " ")
    for row in RESULTS[name]["summary"].values():
        assert row["exact"] == row["within_stated"] == row["count"]


@pytest.mark.parametrize(("name", "kind"), SAID)
def test_figures(name: str, kind: str):
    row = RESULTS[name]["summary"][kind]
    low, _, high = (f"{seconds:.1f}" for seconds in row["error_s"])
    assert SAID[name, kind].format(count=row["count"], low=low, high=high) in PAGE

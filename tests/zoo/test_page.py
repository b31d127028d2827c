"""docs/zoo.md is what the benchmark writes, and its rows are what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.zoo.checking import outcomes
from benchmarks.zoo.page import page, share
from benchmarks.zoo.planning import ROOT, plan_in_a_process, without_folders

REPORT = """<testsuites><testsuite>
<testcase name="test_as_on_one_device[vit-8]"/>
<testcase name="test_as_on_one_device[vit-2x4]"><failure message="Not equal&#10;more"/></testcase>
<testcase name="test_as_on_one_device[gan-8]"><skipped type="pytest.xfail" message="x"/></testcase>
</testsuite></testsuites>"""


def test_page_is_what_the_command_writes() -> None:
    """If this fails: python -m benchmarks.zoo --page."""
    results = json.loads(Path(ROOT, "benchmarks/results/zoo.json").read_text())
    assert Path(ROOT, "docs/zoo.md").read_text() == page(results)


def test_the_readme_says_what_the_page_says() -> None:
    results = json.loads(Path(ROOT, "benchmarks/results/zoo.json").read_text())
    right, checked = share(results["checks"])
    runs = [outcome for row in results["checks"].values() for outcome in row.values()]
    readme = " ".join(Path(ROOT, "README.md").read_text().split())
    assert right == checked
    assert f"All {right} train steps of [the zoo]" in readme
    assert f"{runs.count('right')} of {len(runs)} runs" in readme


def test_outcomes_of_a_report() -> None:
    found = outcomes(REPORT)
    assert found == {
        "vit-8": "right",
        "vit-2x4": "failure: Not equal",
        "gan-8": "known failure: x",
    }


def test_a_program_counts_where_every_method_is_right() -> None:
    checks = {"one": {"8": "right", "2x4": "right"}, "two": {"8": "right", "2x4": "failure: x"}}
    assert share(checks) == (1, 2)


def test_paths_start_at_the_root_or_the_package() -> None:
    assert without_folders(f"{ROOT}/tests/zoo/check.py:1") == "tests/zoo/check.py:1"
    assert without_folders("at /a/b/site-packages/optax/x.py:2") == "at optax/x.py:2"


@pytest.mark.ci
def test_a_program_that_takes_too_long_is_ended() -> None:
    row = plan_in_a_process("optax-lamb", 8, "shard", limit_s=0.5)
    assert row["error"] == "no plan within 0.5 s"


@pytest.mark.slow
def test_a_row() -> None:
    row = plan_in_a_process("optax-lamb", 8, "shard", limit_s=500)
    assert "error" not in row
    assert row["planned_s"] > 0 and row["peak_gib"] > 0 and row["step_s"] > 0

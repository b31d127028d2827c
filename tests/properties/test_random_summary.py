"""The kept result of ten thousand random programs says what the documents say of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_kept_result_is_whole_and_documented() -> None:
    kept = json.loads((ROOT / "benchmarks/results/random_programs.json").read_text())
    first, last = kept["seeds"]
    outcomes = kept["outcomes"]
    assert (first, last) == (0, 10_000)
    assert kept["cases"] == sum(outcomes.values()) == last - first
    failed = {seed["seed"] for seed in kept["rows"]}
    assert len(failed) == kept["cases"] - outcomes["right"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    said = re.search(r"with JAX (\S+): ([\d,]+) right, (\w+) wrong, (\w+) crashed", text)
    assert said is not None
    assert kept["versions"] == [said[1]]
    assert int(said[2].replace(",", "")) == outcomes["right"]
    for word, outcome in ((said[3], "wrong"), (said[4], "crashed")):
        assert (0 if word == "none" else int(word)) == outcomes.get(outcome, 0)

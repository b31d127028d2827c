"""The page of faults is made of the results of several runs, and says what was not as promised."""

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ArgumentError
from benchmarks import kills_page
from benchmarks.kills import STATED_S
from tests.ray.kills import Record, names_the_lost

TABLE = "".join(f"| {name} | a promise | a test | old |\n" for name in kills_page.ROWS)
PAGE = (
    f"head\n\n{TABLE}| another | a promise | a test | |\n\n<!-- kills -->\n<!-- /kills -->\nend\n"
)


def fault(what: str, error_s: float | None, **changes: Any) -> dict[str, Any]:
    row = {"what": what, "error_s": error_s, "exact": True, "wrong": "", "num_again": 0}
    return row | {"driver_bytes": 0, "worker_bytes": 0} | changes


def run(seed: int, rows: list[dict[str, Any]], *, mode: str = "", asked: int = 0) -> dict[str, Any]:
    return {
        "command": f"python -m benchmarks.kills{mode} --seed {seed} --json a/kills_{seed}.json",
        "machine": "x86_64, 16 cores",
        "jax": "0.12.0",
        "seed": seed,
        "kills": len(rows),
        "asked_kills": asked or len(rows),
        "stated_s": {"kill": 10.0, "stop": 20.0, "clock": 0.0},
        "rows": rows,
    }


def cells(text: str) -> dict[str, str]:
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if " | a promise | " in line
    ]
    return {row[0]: row[3] if len(row) > 3 else "" for row in rows}


def test_faults_of_all_files_are_counted_together():
    results = {
        "kills_301.json": run(301, [fault("kill", 0.5), fault("kill", 1.5), fault("stop", 11.0)]),
        "kills_302.json": run(302, [fault("kill", 2.0), fault("clock", 0.0)], asked=4),
        "p.json": run(7, [fault("kill", 3.0)], mode=" --mode processes"),
    }
    text = kills_page.with_figures(PAGE, results)
    found = cells(text)
    assert found["a worker process dies"] == (
        "3 kills: median 1.5, worst 2.0 s; all in time and exact"
    )
    assert found["a worker or node falls silent"] == (
        "1 stopped worker: after 11.0 s; all in time and exact"
    )
    assert found["the clock jumps forward"].startswith("1 jump: training went on")
    (processes,) = [name for name in found if name.startswith("without Ray") and "dies" in name]
    assert found[processes] == "1 killed: after 3.0 s; all in time and exact"
    assert found["the disk is full"] == "" and found["another"] == ""
    assert "6 faults at random moments" in text
    assert (
        "- `python -m benchmarks.kills --seed SEED --json FILE`, SEED 301, 302 "
        "(5 of 7 faults done, x86_64, 16 cores, JAX 0.12.0)\n" in text
    )
    assert kills_page.files_of(text) == list(results)
    assert kills_page.with_figures(text, results) == text
    assert text.startswith("head\n") and text.endswith("end\n")


def test_what_is_not_as_promised_is_said():
    rows = [
        fault("kill", 0.5),
        fault("kill", 10.5, wrong="told after 10.5 s"),
        fault("kill", None, wrong="no error"),
        fault("kill", 1.0, exact=False, wrong="another loss"),
        fault("kill", 1.0, wrong="names another worker"),
    ]
    cell = cells(kills_page.with_figures(PAGE, {"a.json": run(1, rows)}))["a worker process dies"]
    assert cell == (
        "5 kills: median 1.0, worst 10.5 s; **1 of 5 kills not exact**; "
        "**2 of 5 kills too late**; **1 of 5 kills not as stated**"
    )


def test_growth_of_memory():
    rows = [
        fault("kill", 1.0, driver_bytes=(400 + 2 * n) * 10**6, worker_bytes=300 * 10**6)
        for n in range(20)
    ]
    text = kills_page.with_figures(PAGE, {"long.json": run(1, rows), "b.json": run(2, rows[:5])})
    assert "| long.json | 20 | 402 → 436 | +2.0 | 300 → 300 | +0.0 |" in text
    assert "| b.json" not in text, "too short to tell"


def test_memory_is_that_of_one_process():
    rows = [
        fault("kill", 1.0, driver_bytes=megabytes * 10**6, worker_bytes=10**8, start=start)
        for start, count, megabytes in ((0, 3, 900), (3, 12, 400))
        for _ in range(count)
    ]
    text = kills_page.with_figures(PAGE, {"resumed.json": run(1, rows)})
    assert "| resumed.json | 12 | 400 → 400 | +0.0 | 100 → 100 | +0.0 |" in text


def test_growth_of_workers_in_a_soak():
    rows = [
        fault("kill", 1.0, driver_bytes=10**8, worker_bytes=300 * 10**6)
        | {"worker_bytes_before": 302 * 10**6, "steps_done": 500 * n}
        for n in range(1, 13)
    ]
    text = kills_page.with_figures(PAGE, {"soak.json": run(1, rows)})
    assert "soak.json: 6,000 steps up to the last fault." in text
    assert "next fault, 500 steps later, the\nlargest worker grew by 2.0 MB (medians)." in text


def test_every_kind_of_fault_has_a_row():
    known = {(mode, kind) for kinds in kills_page.ROWS.values() for mode, kind, *_ in kinds}
    assert known == {(mode, kind) for mode, stated in STATED_S.items() for kind in stated}


def test_pages_and_files_that_do_not_fit(tmp_path: Path):
    results = {"a.json": run(1, [fault("kill", 1.0)])}
    with pytest.raises(ArgumentError, match="no row for 'Ctrl-C'"):
        kills_page.with_figures(PAGE.replace("| Ctrl-C |", "| Control-C |"), results)
    with pytest.raises(ArgumentError, match="0 places"):
        kills_page.with_figures(PAGE.replace("<!-- /kills -->", ""), results)
    other = run(1, [fault("meteor", 1.0)])
    other["stated_s"]["meteor"] = 1.0
    with pytest.raises(ArgumentError, match="meteor"):
        kills_page.with_figures(PAGE, {"a.json": other})
    for text in ("{", "[]", '{"rows": []}', json.dumps({**run(1, []), "rows": [{"what": "kill"}]})):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ArgumentError, match=r"x.json: expected a results file"):
            kills_page.read_results([tmp_path / "x.json"])
    with pytest.raises(ArgumentError, match=r"y.json: expected"):
        kills_page.read_results([tmp_path / "y.json"])


def test_a_lost_node_is_named_by_any_of_its_workers_if_all_are_listed():
    said = (
        "Worker 2 was lost with its node, which Ray cannot reach any more.\n"
        "  worker 6 (host 2, mesh 0) was lost with its node.\n"
        "  worker 7 (host 3, mesh 0) died too.\n"
    )
    assert names_the_lost(Record(0, "node", "", workers=(6,)), said)
    assert not names_the_lost(Record(0, "node", "", workers=(6, 7)), said)
    assert not names_the_lost(Record(0, "kill", "", workers=(6,)), said)
    assert names_the_lost(Record(0, "kill", "", workers=(2,)), said)

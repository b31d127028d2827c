"""Cases of benchmarks run in processes of their own, and leave none behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.zoo.planning import ROOT, row_of_a_process

CASE = "tests.unit.benchmarks.sleeping_case"
BENCHMARK = (
    "import sys; from benchmarks.zoo.planning import row_of_a_process; "
    f"row_of_a_process({CASE!r}, [sys.argv[1], '600'], 600.0)"
)
PATIENCE_S = 120.0


def is_running(pid: int) -> bool:
    """Not a process that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def becomes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_case_returns_its_row_unless_its_limit_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert row_of_a_process(CASE, [str(file), "0"], PATIENCE_S) == {"slept": "0"}
    row = row_of_a_process(CASE, [str(file), "600"], 5.0)
    assert row == {"error": "no plan within 5 s"}
    assert not is_running(int(file.read_text()))


def test_a_case_ends_with_its_benchmark(tmp_path: Path) -> None:
    """However that ends: `timeout` and Ctrl-C do not reach the case's session."""
    file = tmp_path / "pid"
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, str(file)], cwd=ROOT)
    try:
        assert becomes_true(file.exists)
        case = int(file.read_text())
        assert is_running(case)
    finally:
        benchmark.kill()
        benchmark.wait()
    assert becomes_true(lambda: not is_running(case))

"""A zoo program → the outcome of its tests by method: "right", or what pytest said.

The tests of one program run in one pytest of their own, so that a crash costs one program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.zoo.planning import ROOT, without_folders

RIGHT = "right"


def check_program(name: str, limit_s: float) -> dict[str, str]:
    """Empty where a package is not installed."""
    from tests.zoo.check import methods_of
    from tests.zoo.program import all_programs

    program = all_programs()[name]
    if program.missing():
        return {}
    test = "tests/zoo/test_zoo.py::test_as_on_one_device"
    methods = list(methods_of(program))
    tests = [f"{test}[{name}-{method}]" for method in methods]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "ci or slow",
            "-p",
            "no:cacheprovider",
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        try:
            subprocess.run(
                [*command, f"--junitxml={report}", *tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(methods, f"no result within {limit_s:g} s")
        if not report.exists():
            return dict.fromkeys(methods, "pytest crashed")
        found = outcomes(report.read_text())
    return {method: found.get(f"{name}-{method}", "pytest crashed") for method in methods}


def outcomes(report: str) -> dict[str, str]:
    """From JUnit's XML: a test's parameters → "right", or its first complaint."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        parameters = case.get("name", "").partition("[")[2].rstrip("]")
        complaint = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
        if complaint is None:
            found[parameters] = RIGHT
        else:
            lines = complaint.get("message", "").strip().splitlines() or ["no message"]
            kind = "known failure" if "xfail" in complaint.get("type", "") else complaint.tag
            found[parameters] = without_folders(f"{kind}: {lines[0]}")
    return found

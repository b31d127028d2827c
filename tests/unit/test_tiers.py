"""The tiers and the options of `tests/conftest.py`, tried on a suite of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.representatives("test_a_family_is_run_by_its_representatives")

ROOT = Path(__file__).parents[2]
ALL_BUT_SLOW = ("-m", "not slow and not gpu")
FAMILY = """
import pytest

@pytest.mark.representatives("one", "test_shown[2]")
class TestFamily:
    @pytest.mark.parametrize("name", ["one", "other"])
    def test_case(self, name): ...

    @pytest.mark.parametrize("number", [1, 2])
    def test_shown(self, number): ...

@pytest.mark.ci
def test_of_ci(): ...

def test_plain(): ...
"""
SKIPS = {
    "a test": """
import pytest

def test_without_a_package():
    pytest.importorskip("no_such_package")
""",
    "a file": """
import pytest

pytest.importorskip("no_such_package")
""",
}


@pytest.fixture
def run(tmp_path: Path):
    """Runs pytest, set up as here, on a file of tests."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    # No plugin that happens to be installed, but those that the options need.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("no:cacheprovider", "xdist.plugin", "pytest_timeout")

    def run(suite: str, *arguments: str) -> tuple[int, str]:
        (tmp_path / "tests" / "test_suite.py").write_text(suite)
        options = [option for plugin in plugins for option in ("-p", plugin)]
        command = [sys.executable, "-m", "pytest", "-q", *options, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_family_is_run_by_its_representatives(run) -> None:
    status, output = run(FAMILY, "-vv")
    assert status == 0 and "3 passed, 3 deselected" in output
    for name in ("test_case[one]", "test_shown[2]", "test_plain"):
        assert f"::{name} PASSED" in output


def test_ci_runs_them_all(run) -> None:
    status, output = run(FAMILY, *ALL_BUT_SLOW)
    assert status == 0 and "6 passed" in output


def test_a_representative_that_is_gone_is_an_error(run) -> None:
    status, output = run(FAMILY.replace('["one", "other"]', '["an", "other"]'))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "tests/test_suite.py" in output and "no test ['one']" in output


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "xdist"])
@pytest.mark.parametrize("skipping", SKIPS.values(), ids=SKIPS.keys())
def test_a_skip_fails_where_none_is_allowed(
    run, skipping: str, processes: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "tests" / "test_other.py").write_text("def test_that_passes(): ...")
    assert run(skipping, *processes)[0] == pytest.ExitCode.OK
    status, output = run(skipping, "--no-skips", *processes)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 passed, 1 skipped" in output
    assert "could not import 'no_such_package'" in output

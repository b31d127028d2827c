"""What is shipped: one version everywhere, and archives that hold what they should."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_everywhere():
    cited = [
        line.split(":")[1].strip()
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if line.startswith("version:")
    ]
    assert cited == [autopar.__version__]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    said = subprocess.run(
        [sys.executable, "-m", "autopar", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert said.stdout.strip() == f"autopar {autopar.__version__}"


def test_every_supported_python_is_in_the_workflow_and_the_classifiers():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    versions = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert len(versions) >= 3
    matrix = ", ".join(f'"3.{version}"' for version in versions)
    assert workflow.count(f"python: [{matrix}]") == 2
    assert ".ci/run" in workflow and ".ci/release" in workflow


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The files of the sdist, and of the wheel made from the tree."""
    pytest.importorskip("hatchling", reason="what builds autopar is not installed")
    folder = tmp_path_factory.mktemp("dist")
    build = (
        "import sys, hatchling.build as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, check=True, timeout=120)
    (source,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    return in_source, in_wheel


def data_files() -> list[str]:
    """All that is not Python below the package: profiles, targets, the report's page."""
    found = (ROOT / "autopar").rglob("*")
    return [
        str(path.relative_to(ROOT))
        for path in found
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]


@pytest.mark.ci
def test_the_wheel_has_the_package_with_its_data_and_nothing_else(archives):
    _, wheel = archives
    assert len(data_files()) > 5
    assert not [name for name in data_files() if name not in wheel]
    tops = {name.partition("/")[0] for name in wheel}
    assert tops == {"autopar", f"autopar-{autopar.__version__}.dist-info"}


def test_the_sdist_can_be_tested_and_built_from(archives):
    source, _ = archives
    needed = ["README.md", "LICENSE", "CITATION.cff", "tests/conftest.py", "examples/gpt.py"]
    needed += ["benchmarks/__init__.py", ".ci/run", "mkdocs.yml", *data_files()]
    assert not [name for name in needed if name not in source]

"""`autopar doctor` on machines that have everything, that lack things, and whose drivers hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar._requirements import CACHE, INTERNALS, REQUIRED, STEPS
from autopar.cli import doctor
from autopar.cli.doctor import ProbeOutcome, Problem, examine, run_probe
from autopar.runtime.ranks import shared_gpu
from tests.unit.runtime.ranks.test_launch import is_running, wait_for

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0

# A package that cannot be imported and has no metadata is one that is not installed.
HIDDEN = """
import importlib.metadata as metadata
import sys

hidden = {names!r}
sys.modules.update(dict.fromkeys(hidden))
of = metadata.version


def version(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return of(name)


metadata.version = version
"""


@pytest.fixture(autouse=True)
def no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver and no packages of CUDA but those that a test puts into its folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    all_of = doctor.metadata.distributions

    def distributions() -> list[Any]:
        return [
            found
            for found in all_of()
            if not (found.metadata["Name"] or "").startswith(("jax-cuda", "nvidia-", "cupy"))
            or Path(str(found.locate_file(""))) == tmp_path
        ]

    monkeypatch.setattr(doctor.metadata, "distributions", distributions)


def python_path(folder: Path) -> str:
    return os.pathsep.join((str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")))


def run_doctor(folder: Path, *arguments: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    """In a Python, and with probes, that import a module `sitecustomize` of ours first."""
    (folder / "sitecustomize.py").write_text(setup)
    return subprocess.run(
        [sys.executable, "-m", "autopar", "doctor", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(folder), "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.ci
def test_where_all_is_well(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    report = json.loads(done.stdout)
    facts = report["facts"]
    assert report["can_run"] and not [p for p in report["problems"] if p["is_required"]]
    assert facts["packages"]["jax"].startswith(f"{jax.__version__}, tested: ")
    assert set(REQUIRED) < set(facts["packages"])
    assert facts["devices"] == {"cpu": f"{jax.device_count()} × cpu"}
    assert facts["solvers"]["HiGHS"].endswith(", works")
    assert facts["train step"] == {"planned and run": "matches jax.jit on 8 devices"}
    paths = [path for paths in INTERNALS.values() for path in paths]
    assert facts["JAX internals"] == dict.fromkeys(paths, "found")


@pytest.mark.ci
def test_without_highs_and_ray_and_an_internal(tmp_path: Path) -> None:
    removed = "jax.experimental.compilation_cache.compilation_cache.reset_cache"
    done = run_doctor(
        tmp_path,
        setup=HIDDEN.format(names=["highspy", "ray"])
        + "from jax.experimental.compilation_cache import compilation_cache\n"
        + "del compilation_cache.reset_cache\n",
    )
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    _, _, problems = done.stdout.partition("\nproblems\n")
    assert problems.splitlines() == [
        "  1. highspy is not installed. (required)",
        f"     pip install '{REQUIRED['highspy']}'",
        f"  2. JAX {jax.__version__} has no {removed}, which autopar needs for {CACHE}.",
        f"     pip install '{REQUIRED['jax']}'; if it already matches, please report it",
        "",
        "autopar cannot plan and run on this machine.",
    ]
    for line in (
        "not installed (for clusters: pip install 'autopar[ray]')",
        "highspy, which autopar needs, cannot be imported",
        f"× {jax.devices()[0].device_kind}",
    ):
        assert line in done.stdout


def test_without_jax(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, setup=HIDDEN.format(names=["jax"]))
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    assert f"jax is not installed. (required)\n     pip install '{REQUIRED['jax']}'" in done.stdout
    assert ", works" in done.stdout


@pytest.fixture
def setup_of_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What all probes run before anything else."""
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    return (tmp_path / "sitecustomize.py").write_text


def test_what_hangs_is_given_up_with_all_that_it_started(
    tmp_path: Path, setup_of_probes: Any
) -> None:
    setup_of_probes(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if child := os.fork():\n"
        f"    pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child))\n"
        "time.sleep(1000)\n"
    )
    assert run_probe("devices", 2.0) == ProbeOutcome(error="No answer within 2 s.")
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not is_running(child))  # a process that is killed may take a moment to end


def test_what_crashes_is_told_with_its_last_words(setup_of_probes: Any) -> None:
    setup_of_probes("import os\nprint('CUDA: out of luck', flush=True)\nos.abort()\n")
    error = run_probe("devices", LIMIT_S).error
    assert "ended with status -6" in error and "CUDA: out of luck" in error


def test_an_internal_that_is_missing_is_found(setup_of_probes: Any) -> None:
    setup_of_probes("from jax._src import xla_bridge\ndel xla_bridge.backends_are_initialized\n")
    found = run_probe("internals", LIMIT_S).result["internals"]
    assert [(s["path"], s["use"]) for s in found if s["fault"]] == [
        ("jax._src.xla_bridge.backends_are_initialized", STEPS)
    ]


def test_files_in_the_current_folder_are_not_taken_for_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('not HiGHS')")
    monkeypatch.chdir(tmp_path)
    assert "version" in run_probe("highs", LIMIT_S).result


# -- other machines, as probes would find them


WELL: dict[str, ProbeOutcome] = {
    "internals": ProbeOutcome({"version": jax.__version__, "internals": []}),
    "devices": ProbeOutcome(
        {"devices": [{"platform": "cpu", "kind": "cpu", "memory_bytes": 0}], "versions": {}}
    ),
    "highs": ProbeOutcome({"version": "1.15.1"}),
    "pulp": ProbeOutcome({"solvers": ["HiGHS"]}),
    "ray": ProbeOutcome({"nodes": [], "refused": ""}),
    "compiler": ProbeOutcome({}),
    "cupy": ProbeOutcome({"version": "14.0", "nccl": "2.28.0"}),
    "step": ProbeOutcome({"devices": 8}),
}
GPU = {"platform": "gpu", "kind": "NVIDIA H200", "memory_bytes": 100 * 2**30}


def problems(**outcomes: ProbeOutcome) -> list[Problem]:
    known = {**WELL, **outcomes}
    return [problem for section in examine(known.__getitem__) for problem in section.problems]


def with_driver(folder: Path, *lines: str, status: int = 0) -> None:
    file = folder / "nvidia-smi"
    file.write_text("#!/bin/sh\n" + "".join(f"echo '{x}'\n" for x in lines) + f"exit {status}\n")
    file.chmod(0o755)
    assert shutil.which("nvidia-smi") == str(file)


def with_package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


def without_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in names else version(name))


def test_no_problem_where_there_is_none() -> None:
    assert problems() == []


@pytest.mark.parametrize(("driver", "extra"), [("570.86.15", "cuda12"), ("580.65.06", "cuda13")])
def test_a_gpu_without_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, extra: str
) -> None:
    with_driver(tmp_path, *[f"NVIDIA H200, 143771 MiB, {driver}"] * 2)
    without_packages(monkeypatch, "ray", "jax-cuda12-plugin", "jax-cuda13-plugin")
    monkeypatch.setattr(shared_gpu, "_installed_nccl", lambda: None)
    (section,) = [s for s in examine(WELL.__getitem__) if s.title == "CUDA"]
    assert section.facts["GPUs"] == f"2 × NVIDIA H200, 143771 MiB; driver {driver}"
    assert "need NCCL 2.30 or newer" in section.facts["ranks on one GPU"]
    assert section.problems == [
        Problem(
            "This machine has GPUs, but JAX has no CUDA plugin.", f"pip install 'autopar[{extra}]'"
        )
    ]


@pytest.mark.ci
def test_a_plugin_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(tmp_path, "NVIDIA H200, 143771 MiB, 580.65.06")
    with_package(tmp_path, monkeypatch, "jax-cuda13-plugin", "0.1.2")
    with_package(tmp_path, monkeypatch, "cupy-cuda13x", "14.0")
    (problem,) = problems()
    assert "jax-cuda13-plugin 0.1.2 does not match jaxlib" in problem.what
    assert problem.remedy == "pip install --upgrade 'autopar[cuda13]'" and not problem.is_required


@pytest.mark.ci
def test_a_gpu_that_jax_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(tmp_path, "NVIDIA H200, 143771 MiB, 580.65.06")
    with_package(tmp_path, monkeypatch, "jax-cuda13-plugin", doctor._version("jaxlib"))
    with_package(tmp_path, monkeypatch, "cupy-cuda13x", "14.0")
    (problem,) = problems()
    assert problem.what == "This machine has GPUs, but JAX does not use them."
    assert "unset JAX_PLATFORMS" in problem.remedy
    versions = {"cuda": "13000", "cudnn": "91400", "driver": "13010"}
    used = ProbeOutcome({"devices": [GPU], "versions": versions})
    sections = {s.title: s for s in examine({**WELL, "devices": used}.__getitem__)}
    cuda = sections["CUDA"]
    assert not cuda.problems
    assert sections["devices"].facts == {"gpu": "1 × NVIDIA H200, 100.0 GiB each for JAX"}
    assert (cuda.facts["CUDA"], cuda.facts["cuDNN"]) == ("13.0", "9.14")
    assert cuda.facts["CUDA supported by the driver"] == "13.1"
    assert cuda.facts["GPU compiler"] == "compiles for an H100"


def test_a_gpu_without_cupy_matters_to_ray(tmp_path: Path) -> None:
    with_driver(tmp_path, "NVIDIA V100, 32768 MiB, 535.1")
    used = ProbeOutcome({"devices": [GPU], "versions": {}})
    (problem,) = problems(devices=used)
    assert "CuPy is not installed" in problem.what
    assert problem.remedy == "pip install 'autopar[cuda12]'"


def test_a_driver_that_does_not_work(tmp_path: Path) -> None:
    with_driver(tmp_path, "Failed to initialize NVML", status=9)
    (problem,) = problems()
    assert "Failed to initialize NVML" in problem.what and "nvidia-smi" in problem.remedy


@pytest.mark.ci
def test_a_ray_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(ray=ProbeOutcome(error="ImportError: libray"))
    assert problem == Problem(
        "Ray does not work. ImportError: libray", "pip install --force-reinstall 'autopar[ray]'"
    )
    refused = ProbeOutcome({"nodes": [], "refused": "another Python"})
    assert problems(ray=refused) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (problem,) = problems(ray=refused)
    assert "Cannot join Ray at RAY_ADDRESS=10.0.0.1:6379. another Python" in problem.what


@pytest.mark.parametrize(
    ("name", "said", "remedy"),
    [
        ("devices", "JAX finds no devices. broken", "JAX_PLATFORMS=cpu"),
        ("highs", "The solver HiGHS does not work. broken", "highspy>=1.11"),
        ("pulp", "PuLP does not work. broken", REQUIRED["pulp"]),
        ("internals", "cannot be imported. broken", REQUIRED["jax"]),
        ("step", "A small train step cannot be planned and run. broken", "report it"),
    ],
)
def test_what_is_required(name: str, said: str, remedy: str) -> None:
    (problem,) = problems(**{name: ProbeOutcome(error="broken")})
    assert said in problem.what and remedy in problem.remedy and problem.is_required


def test_a_step_that_fails_for_a_known_reason_is_no_problem_of_its_own() -> None:
    (problem,) = problems(highs=ProbeOutcome(error="broken"), step=ProbeOutcome(error="no solver"))
    assert "HiGHS" in problem.what


def test_an_untested_jax(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    found = {**WELL, "internals": ProbeOutcome({"version": "0.99.0", "internals": []})}
    monkeypatch.setattr(doctor, "run_probe", lambda name, limit: found[name])
    assert doctor.run_doctor(Namespace(json=False, time_limit=1.0)) == 0
    said = capsys.readouterr().out
    assert "JAX 0.99.0 is newer than what autopar is tested with" in said
    assert f"pip install '{REQUIRED['jax']}'" in said
    assert said.endswith("autopar can plan and run on this machine.\n")


def test_an_old_package(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    old = {"pulp": "2.9", "ray": "2.3"}
    monkeypatch.setattr(doctor, "_version", lambda name: old.get(name) or version(name))
    assert [(p.what, p.remedy) for p in problems()] == [
        ("pulp 2.9 is too old.", f"pip install '{REQUIRED['pulp']}'"),
        ("Ray 2.3 is too old.", "pip install 'ray>=2.40'"),
    ]

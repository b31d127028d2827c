"""Every example is run as a stranger would, on few steps: it ends well, its loss falls, and what it
says of itself is so."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 300


def run(path: str, *options: str, folder: Path | None = None, **env: str) -> str:
    """What `python examples/PATH` prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / path), *options],
        cwd=folder or ROOT,
        env={
            **inherited,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "AUTOPAR_PROGRESS": "0",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> tuple[float, float]:
    """The first and the last, as the last line that has both tells."""
    found = re.findall(r"^loss ([\d.]+) → ([\d.]+) in \d+ steps$", text, re.MULTILINE)
    assert found, text
    first, last = found[-1]
    return float(first), float(last)


def assert_learned(text: str, share: float) -> None:
    """The loss fell to less than `share` of what it was."""
    first, last = losses(text)
    assert last < share * first, text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        pytest.param("gpt", ("--steps", "25"), 0.9, marks=pytest.mark.slow),
        ("equinox_model", ("--steps", "40", "--blocks", "1"), 0.7),
        pytest.param("llama", ("--steps", "30"), 0.9, marks=pytest.mark.slow),
        pytest.param("moe", ("--steps", "30"), 0.9, marks=pytest.mark.slow),
        pytest.param("wide_resnet", ("--steps", "25"), 0.6, marks=pytest.mark.slow),
        pytest.param("bert", ("--steps", "60"), 0.9, marks=pytest.mark.slow),
    ],
)
def test_models_learn_on_several_devices(name: str, options: tuple[str, ...], share: float) -> None:
    text = run(f"{name}.py", "--devices", "4", *options)
    assert re.search(r"on a mesh [^\n]* of 4 devices|a pipeline of \d stages on 4 devices", text)
    assert "predicted step" in text
    assert re.search(r"[\d,]+ (tokens|images|samples)/s", text)
    assert_learned(text, share)


def figures(folder: Path) -> dict[int, float]:
    """Step -> loss, as the run's file has them; a step that came twice gave the same."""
    found: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert found.setdefault(row["step"], row["loss"]) == row["loss"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("train_vit", marks=pytest.mark.slow),
        pytest.param("finetune_llama", marks=pytest.mark.ci),
        pytest.param("train_moe", marks=pytest.mark.slow),
    ],
)
def test_a_run_at_real_size_resumes_exactly(name: str, tmp_path: Path) -> None:
    """As `--size tiny`: six steps at once, and three, then three more, give the same losses."""
    options = ["--size", "tiny", "--batch", "16", "--devices", "4", "--metrics-every", "1"]
    options += ["--checkpoint-every", "2"]
    if name == "finetune_llama":
        options += ["--text", str(ROOT / "README.md")]
    run(f"{name}.py", *options, "--steps", "6", "--run", str(tmp_path / "once"))
    for steps, begins in ((3, 0), (6, 3)):
        text = run(f"{name}.py", *options, "--steps", str(steps), "--run", str(tmp_path / "twice"))
        assert f"from step {begins}\n" in text
    once, twice = figures(tmp_path / "once"), figures(tmp_path / "twice")
    # The first step of a process compiles, and is not measured.
    assert sorted(once) == [2, 3, 4, 5, 6] and sorted(twice) == [2, 3, 5, 6]
    assert twice == {step: once[step] for step in twice}
    assert (tmp_path / "twice" / "plan.html").exists()


def test_a_port_is_two_lines() -> None:
    before, after = ((EXAMPLES / "port" / name).read_text() for name in ("before.py", "after.py"))
    changed = [
        line
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert changed == ["+import autopar", "-@jax.jit", "+@autopar.parallelize"]


@pytest.mark.slow
def test_a_ported_loop_gives_the_same_numbers() -> None:
    before, after = (
        run(f"port/{name}.py", JAX_NUM_CPU_DEVICES="8") for name in ("before", "after")
    )
    *steps, where = before.splitlines()
    *steps_after, where_after = after.splitlines()
    assert len(steps) == 5
    for line, line_after in zip(steps, steps_after, strict=True):
        numbers = [float(number) for number in re.findall(r"[\d.]+", line)]
        numbers_after = [float(number) for number in re.findall(r"[\d.]+", line_after)]
        assert numbers_after == pytest.approx(numbers, abs=0.011)
    first, last = (float(re.findall(r"loss ([\d.]+)", line)[0]) for line in (steps[0], steps[-1]))
    assert last < 0.2 * first
    assert where == "the largest kernel is on 1 device(s)"
    assert where_after == "the largest kernel is on 8 device(s)"


@pytest.mark.ci
def test_pins_are_kept() -> None:
    text = run("manual_pins.py", "--devices", "4", "--steps", "40")
    pinned = re.search(r"^pinned: up (.+), down (.+); predicted step \d+ µs$", text, re.MULTILINE)
    assert pinned and pinned.groups() == ("P(None, 'y')", "P('y',)"), text
    assert "up (64, 256) has the layout P(None, 'y')" in text
    assert "down (256, 64) has the layout P('y',)" in text
    assert_learned(text, 0.5)


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_batch() -> None:
    text = run(
        "gradient_accumulation.py", "--devices", "4", "--steps", "10", "--micro-batches", "4"
    )
    whole, parts = re.findall(r"predicted peak memory ([\d.]+) MiB", text)
    assert float(parts) < 0.6 * float(whole)
    assert "losses agree: True" in text
    assert_learned(text, 1.0)


@pytest.mark.ci
def test_a_cluster_is_planned_for(tmp_path: Path) -> None:
    text = run("plan_a_cluster.py", "--size", "tiny", "--hosts", "1", "2", folder=tmp_path)
    assert re.findall(r"^(\d) × 8 h100-sxm: mesh", text, re.MULTILINE) == ["1", "2"]
    assert "8 h100-sxm (74.5 GiB each)" in text
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert "<html" in (tmp_path / "plan" / "plan.html").read_text()


@pytest.mark.slow
def test_pipelines_on_ray_use_a_mesh_per_stage() -> None:
    text = run("pipelines_on_ray.py", "--steps", "12")
    assert "a pipeline of 2 stages on 4 devices" in text
    assert "on devices (0, 1) of mesh 0" in text and "on devices (2, 3) of mesh 1" in text
    assert "the state is on 2 meshes" in text
    assert_learned(text, 1.0)


@pytest.mark.slow
def test_training_goes_on_when_a_worker_is_killed(tmp_path: Path) -> None:
    options = ("--checkpoints", str(tmp_path / "run"), "--checkpoint-every", "4")
    text = run("elastic_restart.py", "--steps", "10", "--kill-at", "6", *options)
    assert re.search(r"^killed worker process \d+$", text, re.MULTILINE), text
    assert re.search(r"^lost: Worker \d.* died", text, re.MULTILINE), text
    assert "resuming from the checkpoint of step 4" in text
    steps = [int(step) for step in re.findall(r"^step (\d+) ", text, re.MULTILINE)]
    again = steps.index(5, steps.index(5) + 1)
    assert steps[:again] in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]), text
    assert steps[again:] == [5, 6, 7, 8, 9, 10]
    assert "again, the same" in text and "but different" not in text

    text = run("elastic_restart.py", "--steps", "12", "--kill-at", "0", *options)
    assert "resuming from the checkpoint of step 10" in text
    assert [int(step) for step in re.findall(r"^step (\d+) ", text, re.MULTILINE)] == [11, 12]

"""`autopar plan`, `sweep`, `explain`, `diff` and `devices`, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import autopar
from autopar.cli import main

FILE = str(Path(__file__).parent / "factories_for_tests.py")
STEP = f"{FILE}:make_step"
ROOT = Path(__file__).parents[3]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_is_shown_saved_and_reported(tmp_path, capsys) -> None:
    saved, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, out, err = run(
        capsys, "plan", STEP, "--cluster", "2x4:v100-32gb", "--method", "shard", "--batch", "64",
        "--set", "hidden=32", "--save", str(saved), "--report", str(page),
    )  # fmt: skip
    assert (code, err) == (0, "")
    plan = autopar.ParallelPlan.load(saved)
    assert plan.cluster == autopar.ClusterSpec(2, 4, "v100-32gb")
    assert plan.inputs[-1].shape == (64, 32)
    assert plan.explain().splitlines()[0] in out
    assert "cluster: 2 × 4 v100-32gb" in out and "s in total" in out
    assert page.read_text().lower().startswith("<!doctype html>")
    assert run(capsys, "explain", str(saved))[1].rstrip("\n") == plan.explain()
    assert run(capsys, "diff", str(saved), str(saved))[1].endswith("The plans are the same.\n")


def test_why_is_answered_while_the_program_is_there(capsys) -> None:
    typed = ("plan", STEP, "--cluster", "1x4:h100-sxm", "--method", "shard", "--quiet")
    code, out, _ = run(capsys, *typed, "--why", "params['up']")
    assert code == 0
    assert "params['up']: input" in out and "alternative layouts" in out
    code, _, err = run(capsys, *typed, "--why", "params['upp']")
    assert code == 2 and "params['up']" in err


@pytest.mark.ci
def test_a_reader_who_has_seen_enough() -> None:
    """As `autopar devices | head -1` does."""
    command = [sys.executable, "-m", "autopar", "devices"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (["--method", "data"], "DataParallel"),
        (["--method", "zero2", "--micro-batches", "2"], "Zero2Parallel"),
        (["--method", "pipeline", "--stages", "2", "--micro-batches", "2"], "PipeshardParallel"),
        (["--method", f"{FILE}:method"], "mesh_shape=(4,)"),
    ],
)
def test_methods_by_name(tmp_path, capsys, flags: list[str], method: str) -> None:
    saved = str(tmp_path / "plan.json")
    assert run(capsys, "plan", STEP, "--cluster", "1x4:v100", "--save", saved, *flags)[0] == 0
    assert method in autopar.ParallelPlan.load(saved).method


def test_a_step_may_have_its_own_method(tmp_path, capsys) -> None:
    saved, own = str(tmp_path / "plan.json"), f"{FILE}:make_parallel"
    common = ["plan", own, "--cluster", "1x4", "--quiet", "--save", saved]
    assert run(capsys, *common)[0] == 0
    assert "DataParallel" in autopar.ParallelPlan.load(saved).method
    code, _, err = run(capsys, *common, "--budget", "1GB")
    assert code == 2 and "the factory's step already has a method, DataParallel(" in err


def test_links_in_relative_units_price_communication_alone(tmp_path, capsys) -> None:
    cluster = tmp_path / "relative.toml"
    cluster.write_text(
        "[cluster]\nhosts = 2\ndevices_per_host = 4\n[device]\nmemory = '32 GB'\n"
        "[links]\nalpha = [1, 1]\nbeta = [1, 0.01]\n"
    )
    code, out, _ = run(capsys, "plan", STEP, "--cluster", str(cluster), "--quiet")
    assert code == 0 and "in the units of alpha and beta" in out
    code, _, err = run(capsys, "plan", STEP, "--cluster", str(cluster), "--method", "auto")
    assert code == 2 and "Use --method shard" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plan", STEP, "--cluster", "1x8:h10"], 2, "unknown device 'h10'"),
        (["plan", "nope.py:f", "--cluster", "1x8"], 2, "nope.py: no such file"),
        (["plan", STEP, "--cluster", "1x4", "--method", "shrd"], 2, "did you mean 'shard'"),
        (["plan", STEP, "--cluster", "1x4", "--save", "no/where.json"], 2, "'no' does not exist"),
        (["plan", STEP, "--cluster", "1x4", "--budget", "28"], 2, "--budget = '28': a number"),
        (["plan", STEP, "--cluster", "1x4", "--stages", "2"], 2, "not an option of --method auto"),
        (["plan", STEP, "--cluster", "1x4", "--method", "data", "--micro-batches", "auto"], 2,
         "--method data needs a number"),
        (["plan", STEP, "--cluster", "1x4", "--method", "pipeline", "--stages", "2"], 2,
         "needs --micro-batches N too"),
        (["plan", STEP, "--cluster", "1x4", "--method", f"{FILE}:not_a_method"], 2,
         "is 7; needs a method"),
        (["plan", STEP, "--cluster", "1x4", "--method", "shard", "--budget", "1 KB"], 1,
         "no sharding fits"),
        (["plan", STEP, "--cluster", "1x4", "--budget", "1 KB"], 1, "What was tried:   - micro-"),
        (["plan", STEP, "--cluster", "1x4", "--method", "data", "--memory", "1 KB"], 1,
         "the plan does not fit: each device has 1000 B"),
        (["explain", "no.json"], 2, "no.json"),
        (["report", "no.json"], 2, "no.json"),
        (["sweep", STEP, "--cluster", "1x8"], 2, "nothing varies"),
        (["sweep", STEP, "--cluster", "1x8", "--devices", "1,x"], 2, "'x' is not a whole number"),
        (["sweep", STEP, "--cluster", "1x8", "--devices", "8,12"], 2, "needs a multiple of that"),
        (["sweep", STEP, "--cluster", "1x8", "--devices", "4,4"], 2, "a value occurs twice"),
        (["sweep", STEP, "--cluster", "1x8", "--devices", "1,2", "--batch", "8,16", "--budget",
          "1GB,2GB"], 2, "at most two may"),
        (["sweep", STEP, "--cluster", "1x8", "--set", "hiden=8", "--batch", "8"], 2,
         "did you mean 'hidden'"),
    ],
)  # fmt: skip
def test_wrong_input(capsys, arguments: list[str], code: int, said: str) -> None:
    found, _, err = run(capsys, *arguments)
    assert found == code
    assert said in err.replace("\n", " ")
    assert "Traceback" not in err


def test_an_error_that_a_factory_raises_is_one_line(capsys) -> None:
    code, _, err = run(capsys, "plan", f"{FILE}:make_failing", "--cluster", "1x8")
    assert code == 2
    assert "Traceback" not in err and len(err.splitlines()) == 1
    assert "make_failing() raised ValueError: no weights here, in factories_for_tests.py" in err
    assert err.rstrip().endswith('raise ValueError("no weights here")')


def test_a_traceback_of_the_users_own_code_is_shown(capsys) -> None:
    code, _, err = run(capsys, "plan", f"{FILE}:make_failing_inside", "--cluster", "1x8")
    assert code == 2
    assert "Traceback" in err and "return make_failing()" in err and "importlib" not in err
    assert "make_failing_inside() raised ValueError" in err.splitlines()[-1]


def test_an_unknown_size_of_an_example_is_one_line(capsys) -> None:
    target = "examples.llama:make_step"
    code, _, err = run(capsys, "plan", target, "--cluster", "1x8", "--set", "size=huge")
    assert code == 2
    assert "Traceback" not in err and "unknown size 'huge'; " in err and "tiny" in err


def test_devices_needs_no_jax() -> None:
    code = (
        "import sys; from autopar.cli import main; main(['devices']); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_saved_plan_explains_an_array(tmp_path, capsys) -> None:
    file = str(tmp_path / "plan.json")
    flags = ("--cluster", "1x8:h100-sxm", "--method", "zero3", "--save", file, "--quiet")
    assert run(capsys, "plan", STEP, *flags)[0] == 0
    code, out, _ = run(capsys, "explain", file, "params*['up']")
    assert code == 0
    assert "sharded as" in out and "on each device, of" in out and "--why PATH" in out


def test_a_plan_of_a_newer_version(tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "autopar-plan", "version": 999}))
    for command in ("explain", "report"):
        code, _, err = run(capsys, command, str(path))
        assert code == 2 and "Update autopar" in err


def test_devices_lists_all_presets(capsys) -> None:
    code, out, _ = run(capsys, "devices")
    assert code == 0
    assert all(f"  {name} " in out for name in ("v100-32gb", "a100-sxm", "b200-sxm", "l40s"))
    assert "32 GB" in out and "100 Gb/s" in out


def test_a_sweep_of_devices(tmp_path, capsys) -> None:
    page, points = tmp_path / "sweep.html", tmp_path / "sweep.json"
    code, out, err = run(
        capsys, "sweep", STEP, "--cluster", "1x8:v100", "--set", "hidden=256", "--devices",
        "1,2,8", "--method", "shard", "--memory", "3MB", "--price-per-hour", "3", "--jobs", "1",
        "--html", str(page), "--json", str(points),
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(points.read_text())["points"]
    assert [point["values"] for point in found] == [{"devices": n} for n in (1, 2, 8)]
    one, two, eight = found
    assert one["problem"].startswith("does not fit: needs ") and not two["problem"]
    assert eight["peak_bytes"] < two["peak_bytes"]
    assert eight["samples_per_s"] == pytest.approx(32 / eight["step_s"])
    assert eight["cost"] == pytest.approx(3 * 8 * eight["step_s"] / 3600 / (32 / 1e6))
    assert "no fitting plan: devices 1." in out and "cheapest: " in out
    text = page.read_text()
    assert text.count("<svg") == 4 and "http" not in text.replace("http-equiv", "")


def test_a_sweep_of_two(tmp_path, capsys) -> None:
    points = tmp_path / "sweep.json"
    page = tmp_path / "sweep.html"
    code, out, _ = run(
        capsys, "sweep", f"{FILE}:make_tokens", "--cluster", "1x4:v100", "--devices", "2,4",
        "--batch", "8,16", "--method", "data", "--jobs", "1", "--json", str(points),
        "--html", str(page),
    )  # fmt: skip
    assert code == 0
    found = json.loads(points.read_text())
    assert found["unit"] == "tokens" and len(found["points"]) == 4
    last = found["points"][-1]
    assert last["values"] == {"devices": 4, "batch": 16}
    assert last["tokens_per_s"] == pytest.approx(16 * 128 / last["step_s"])
    assert "tokens/s by devices / batch:" in out
    assert page.read_text().count('<li><i style="background: var(--series-') == 2


@pytest.mark.ci
def test_nothing_of_a_sweep_fits(capsys) -> None:
    code, out, _ = run(
        capsys, "sweep", STEP, "--cluster", "1x4", "--method", "shard", "--budget", "1KB,2KB",
        "--jobs", "1",
    )  # fmt: skip
    assert code == 1 and "No plan fits." in out


@pytest.mark.slow
def test_points_are_planned_in_other_processes(tmp_path, capsys) -> None:
    points = tmp_path / "sweep.json"
    code, _, err = run(
        capsys, "sweep", STEP, "--cluster", "1x4:v100", "--devices", "2,4", "--method", "data",
        "--jobs", "2", "--json", str(points),
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(points.read_text())["points"]
    assert [point["num_devices"] for point in found] == [2, 4]
    code, _, err = run(
        capsys, "sweep", f"{FILE}:make_nothing", "--cluster", "1x4", "--devices", "2,4"
    )
    assert code == 2 and "returned None" in err


def test_baselines_are_planned_beside_it(tmp_path, capsys) -> None:
    page = tmp_path / "plan.html"
    flags = ("--cluster", "1x4:h100-sxm", "--method", "shard", "--report", str(page), "--quiet")
    assert run(capsys, "plan", STEP, *flags, "--baselines")[0] == 0
    text = page.read_text(encoding="utf-8")
    for name in ("this plan", "data parallel", "ZeRO-2", "FSDP (ZeRO-3)", "Megatron"):
        assert f'"name":"{name}"' in text


def test_baselines_without_a_report_or_without_times_are_refused(tmp_path, capsys) -> None:
    code, _, err = run(capsys, "plan", STEP, "--cluster", "1x4:h100-sxm", "--baselines")
    assert code == 2 and "add --report plan.html" in err
    cluster = tmp_path / "relative.toml"
    cluster.write_text(
        "[cluster]\nhosts = 2\ndevices_per_host = 4\n[device]\nmemory = '32 GB'\n"
        "[links]\nalpha = [1, 1]\nbeta = [1, 0.01]\n"
    )
    page = tmp_path / "plan.html"
    flags = ("--cluster", str(cluster), "--report", str(page), "--baselines")
    code, _, err = run(capsys, "plan", STEP, *flags)
    assert code == 2 and "baselines need step times" in err and not page.exists()

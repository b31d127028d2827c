"""The benchmark that holds judge and planner against measured steps: cases, dry run, figures."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from autopar.measure.judge import judge
from benchmarks.judge_h200 import __main__ as command
from benchmarks.judge_h200.cases import (
    DEVELOPMENT,
    FORMERLY_HELD_OUT,
    HELD_OUT,
    LOOPS,
    STUDIED,
    all_cases,
    example_cases,
    planned_cases,
    planned_name,
)
from benchmarks.judge_h200.comparing import archive_of, read_programs, summary, text
from benchmarks.judge_h200.measuring import DEVICE, file_of
from benchmarks.judge_h200.operations import all_operations, rarer_operations
from benchmarks.judge_h200.unmeasured import UNMEASURED
from benchmarks.judge_h200.unseen import UNSEEN
from benchmarks.step_profile import kernels_of

DECIDING = DEVELOPMENT | FORMERLY_HELD_OUT | STUDIED


def test_halves_share_no_model_and_files_no_name() -> None:
    cases = list(all_cases())
    assert {case.name for case in cases if case.held_out} == HELD_OUT.keys()
    assert {case.name for case in cases if not case.held_out} == DECIDING.keys()
    assert len(cases) == len(DECIDING) + len(HELD_OUT) >= 84 + 20
    assert len(HELD_OUT) >= 20, "as many as the bars ask for"
    assert set(UNSEEN) < STUDIED.keys() and len(DEVELOPMENT) == len(FORMERLY_HELD_OUT)
    assert len({file_of(Path(), case.name, "") for case in cases}) == len(cases)


@pytest.mark.parametrize("name", ["lstm", "scanned llama", "nerf"])
def test_a_real_size_is_larger_than_the_dry_run_s(name: str) -> None:
    (case,) = (case for case in all_cases() if case.name == name)

    def num_elements(tiny: bool) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(case.make(tiny).make_state))
        return sum(leaf.size for leaf in leaves)

    assert num_elements(False) > 20 * num_elements(True)


def test_held_out_steps_need_no_package_but_jax() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('optax', 'flax', 'chex'))); "
    listed = "from benchmarks.judge_h200.cases import held_out_cases, planned_cases; "
    run = f"{blocked}{listed}print(sum(1 for _ in held_out_cases()))"
    found = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert int(found.stdout) == len(HELD_OUT)
    assert {case.name for case in planned_cases()} == {planned_name(name) for name in LOOPS}
    assert all(case.planned for case in planned_cases())


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_held_out_step_returns_its_state(name: str) -> None:
    make, rows, small = UNMEASURED[name]
    for made in (make(2, **small), make(rows)):
        state = jax.eval_shape(made.make_state)
        batch = jax.eval_shape(partial(made.make_batch, 0))
        new, metrics = jax.eval_shape(made.step, state, *batch)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
        assert jax.tree.leaves(metrics)


def test_rarer_operations_are_some_of_all() -> None:
    rarer, every = ([case.name for case in found()] for found in (rarer_operations, all_operations))
    assert len(rarer) == 14 and set(rarer) < set(every) and len(set(every)) == len(every)
    for case in rarer_operations():
        made = case.make(True)
        state = jax.eval_shape(made.make_state)
        _, results = jax.eval_shape(made.step, state)
        assert len(results) == len(state)


def test_a_dry_run_measures_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rows"
    typed = ["judge_h200", "measure", "--tiny", "--out", str(folder), "--only", "many labels"]
    monkeypatch.setattr(sys, "argv", typed)
    command.main()
    (row,) = json.loads((folder / "rows.json").read_text())["rows"]
    assert row["name"] == "many labels" and row["held_out"]
    assert row["step_s"] > 0 and row["memory"]["peak"] > 0
    assert b"HloModule" in gzip.decompress(file_of(folder, "many labels", ".hlo.gz").read_bytes())
    assert gzip.decompress(file_of(folder, "many labels", ".xplane.gz").read_bytes())

    out = tmp_path / "figures.json"
    monkeypatch.setattr(
        sys, "argv", ["judge_h200", "compare", str(folder), "--tiny", "--json", str(out)]
    )
    command.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["predicted_s"] > 0
    assert "held out: decide nothing" in capsys.readouterr().out

    out.write_text(json.dumps({"rows": [{**row, "predicted_s": 0.0}]}))
    monkeypatch.setattr(sys, "argv", ["judge_h200", "predict", str(out), "--tiny"])
    command.main()
    (again,) = json.loads(out.read_text())["rows"]
    assert again == row


def test_an_example_is_measured_as_autopar_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["judge_h200", "measure", "--examples", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*typed, "--only", "finetune_llama.py"])
    command.main()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["step_s"] > 0 and row["memory"]["peak"] > 0
    ours = gzip.decompress(file_of(tmp_path, row["name"], ".hlo.gz").read_bytes()).decode()
    (case,) = (case for case in example_cases() if case.name == row["name"])
    made = case.make(True)
    state = jax.eval_shape(made.make_state)
    batch = jax.eval_shape(lambda: made.make_batch(0))
    plain = jax.jit(made.step).lower(state, *batch).compile().as_text() or ""
    # Only `autopar.rewrite.product_orders` transposes queries in place of scores.
    assert "bngqk" in ours and ours.count("transpose(") != plain.count("transpose(")


def test_kernels_are_those_of_a_gpu_s_streams() -> None:
    def line(name: str, *events: tuple[str, str | None, float]) -> SimpleNamespace:
        made = [
            SimpleNamespace(name=kernel, stats=[("hlo_op", op)] if op else [], duration_ns=ns)
            for kernel, op, ns in events
        ]
        return SimpleNamespace(name=name, events=made)

    streams = line("Stream #1", ("k1", "dot.1", 2e9), ("k1", "dot.1", 1e9), ("nvjet", None, 5e8))
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[streams, line("Steps", ("s", None, 9e9))])
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream", ("h", "dot.1", 9e9))])
    found = kernels_of(SimpleNamespace(planes=[host, gpu]))
    assert found == {"dot.1": (2, 3.0), "nvjet": (1, 0.5)}


def test_summary_counts_what_is_near() -> None:
    rows = [
        {"name": "a", "held_out": False, "step_s": 1.0, "judged_s": 1.05, "predicted_s": 0.8},
        {"name": "b", "held_out": False, "step_s": 1.0, "judged_s": 0.85},
        {"name": "c", "held_out": True, "error": "OOM"},
    ]
    assert summary(rows, "judged_s")["within_10"] == 0.5
    assert summary(rows, "judged_s")["within_25"] == 1.0
    assert summary(rows, "predicted_s")["rows"] == 1
    shown = text([{**row, "memory": {"peak": 1.0}, "predicted_bytes": 2.0} for row in rows])
    assert "judge: 50% of 2 within 10 %" in shown and "OOM" in shown


def test_studied_steps_are_summed_up_apart() -> None:
    """Neither among the held-out ones, nor among those whose kernels were profiled."""
    near = {"step_s": 1.0, "judged_s": 1.0}
    studied = {"name": next(iter(STUDIED)), "held_out": False, "step_s": 1.0, "judged_s": 2.0}
    rows = [
        studied,
        {"name": "a", "held_out": True, **near},
        {"name": "b", "held_out": False, **near},
    ]
    shown = text(rows)
    assert shown.count("judge: 100% of 1 within 10 %") == 2
    assert shown.count("judge: 0% of 1 within 10 %") == 1
    assert shown.index("studied") < shown.index(studied["name"]) < shown.index("held out: decide")


def test_documentation_counts_held_out_steps_apart() -> None:
    """Held-out steps that nobody measured are named. The others are counted as the results say."""
    root = Path(__file__).parents[3]
    rows = json.loads((root / "benchmarks/results/judge_h200.json").read_text())["rows"]
    documented = (root / "docs/benchmarks.md").read_text(encoding="utf-8")
    start = documented.index(f"**Held out: {len(HELD_OUT)} models")
    section = " ".join(documented[start : documented.index("\nStudied, thirty", start)].split())
    measured = {row["name"] for row in rows if row["name"] in HELD_OUT}
    assert not measured and "They are not measured yet" in section
    assert set(re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", section)) == HELD_OUT.keys()

    groups = {
        "Thirty": UNSEEN,
        "Eighteen": STUDIED.keys() - UNSEEN.keys(),
        "Development": DEVELOPMENT | FORMERLY_HELD_OUT,
    }
    for title, names in groups.items():
        own = [row for row in rows if row["name"] in names]
        assert len(own) == len(names)
        counts = [
            round(summary(own, name)[within] * len(own))
            for name in ("judged_s", "predicted_s")
            for within in ("within_10", "within_25")
        ]
        form = r"{}, within 10 and 25 %:\sjudge (\d+) and (\d+), planner (\d+) and (\d+)"
        said = re.search(form.format(title), documented)
        assert said is not None and [int(number) for number in said.groups()] == counts, title


@pytest.mark.parametrize("name", ["dlrm", "ensemble", "lstm", "q-learning", "two towers"])
def test_recorded_figures_are_those_of_today_s_judge(name: str) -> None:
    """Else: `python -m benchmarks.judge_h200 judge benchmarks/results/judge_h200.json`."""
    file = Path(__file__).parents[3] / "benchmarks/results/judge_h200.json"
    (row,) = (r for r in json.loads(file.read_text())["rows"] if r["name"] == name)
    (program,) = (text for other, text in read_programs(archive_of(file)) if other == name)
    assert judge(program, DEVICE).step_s == pytest.approx(row["judged_s"], rel=1e-6)


def test_documentation_has_the_rows_that_were_measured() -> None:
    root = Path(__file__).parents[3]
    rows = json.loads((root / "benchmarks/results/judge_h200.json").read_text())["rows"]
    halves = {True: HELD_OUT, False: DECIDING}
    assert len(rows) >= 20 and all(row["name"] in halves[row["held_out"]] for row in rows)
    documented = (root / "docs/benchmarks.md").read_text(encoding="utf-8")
    for row in rows:
        ratios = [row[name] / row["step_s"] for name in ("judged_s", "predicted_s")]
        line = " | ".join(
            [row["name"], f"{1e3 * row['step_s']:.2f} ms", *(f"{r:.3f}" for r in ratios)]
        )
        assert f"| {line} |" in documented

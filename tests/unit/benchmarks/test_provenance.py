import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.plan_cache import key
from benchmarks import provenance

ROOT = Path(provenance.__file__).parents[1]
CURRENT = "abcdef0123456789"


def row(model: str, *planners: str | None, **facts: object) -> dict:
    results = [
        {"family": "autopar", "made": {"planner": planner}} if planner else {"family": "autopar"}
        for planner in planners
    ]
    return {"model": model, "devices": 8, "results": results, **facts}


def test_a_result_says_what_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    made = provenance.provenance()
    assert made["planner"] == key.planner_digest()
    assert (
        made["flags"].items() >= {"XLA_FLAGS": "--xla_some_flag=1", "JAX_ENABLE_X64": "0"}.items()
    )
    assert {"jax", "jaxlib"} <= set(made["versions"])
    assert json.loads(json.dumps(made)) == made


def test_the_commit_is_that_of_the_tree_and_marked_if_files_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"rev-parse": "f" * 40, "status": ""}
    monkeypatch.setattr(provenance, "_git", lambda *args: answers[args[0]])
    assert provenance.commit() == "f" * 40
    answers["status"] = " M autopar/api.py"
    assert provenance.commit() == "f" * 40 + "+"
    monkeypatch.setattr(provenance, "_git", lambda *args: None)
    assert provenance.commit() is None


def test_files_that_a_benchmark_writes_do_not_mark_the_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> None:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *named, *arguments], check=True)

    git("init", "-q")
    for folder in ("code", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("first")
    git("add", "-A")
    git("commit", "-q", "-m", "all")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "results" / "file").write_text("second")
    assert (provenance.commit() or "").endswith("+")
    assert len(provenance.commit("results") or "") == 40
    (tmp_path / "code" / "file").write_text("second")
    assert (provenance.commit("results") or "").endswith("+")


def test_rows_of_another_planner_are_stale() -> None:
    rows = [
        row("fresh", CURRENT),
        row("old", "0123456789abcdef"),
        row("older", None),
        row("mixed", CURRENT, "0123456789abcdef", layers=4),
    ]
    document = {"h100": {"rows": rows}, "h200": {"rows": [{"label": "not planned"}]}}
    assert list(provenance.stale_rows(document, CURRENT)) == [
        "h100: old on 8: planner 01234567",
        "h100: older on 8: planner not recorded",
        "h100: mixed, 4 layers on 8: planner 01234567 and abcdef01",
    ]


def test_experts_do_not_age() -> None:
    found = row("m", CURRENT)
    found["results"].append({"family": "FSDP"})
    assert provenance.planner_of(found) == CURRENT[:8]
    found["results"].append({"family": "3-D by hand"})
    assert provenance.planner_of(found) == "not recorded", "autopar plans the rest of it"


def test_the_command_names_the_stale_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [row("fresh", key.planner_digest()), row("old", "0" * 64)]
    file.write_text(json.dumps({"cpu": {"rows": rows}}))
    command = [sys.executable, "-m", "benchmarks.provenance", str(file)]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "rows.json: 1 of 2 rows were made by another planner" in printed
    assert "cpu: old on 8: planner 00000000" in printed and "fresh" not in printed

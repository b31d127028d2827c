"""`autopar report`: from files to a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.inspect.perfetto import ShownStep, TraceContent, trace_json
from tests.report_plans import one_mesh, pipeline, timeline


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A pipeline on four meshes, and a trace of two of its steps among one of another plan."""
    pipeline().save(tmp_path / "plan.json")
    lines = [timeline(4, 8), timeline(4, 8, 1.5), timeline(2, 8)]
    steps = tuple(ShownStep("train_step", float(n), line) for n, line in enumerate(lines))
    (tmp_path / "trace.json").write_text(trace_json(TraceContent(steps)))
    return tmp_path / "plan.json", tmp_path / "trace.json"


def data_of(page: Path) -> Any:
    text = page.read_text(encoding="utf-8").split('id="plan-data">')[1]
    return json.loads(text.split("</script>")[0])


def test_the_page_is_written_beside_the_plan(files: tuple[Path, Path], capsys: Any) -> None:
    plan, _ = files
    assert main(["report", str(plan)]) == 0
    page = plan.with_suffix(".html")
    assert capsys.readouterr().out == f"report: {page}\n"
    assert [line["title"] for line in data_of(page)["timelines"]] == ["predicted"]


def test_the_last_step_by_this_plan_is_drawn_as_measured(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, trace = files
    page = tmp_path / "other.html"
    assert main(["report", str(plan), "-o", str(page), "--measured", str(trace)]) == 0
    predicted, measured = data_of(page)["timelines"]
    assert (predicted["title"], measured["title"]) == ("predicted", "measured")
    assert measured["step_s"] == pytest.approx(timeline(4, 8, 1.5).step_s, rel=1e-3)


def test_a_trace_of_something_else(files: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    _, trace = files
    one_mesh().save(tmp_path / "one.json")
    assert main(["report", str(tmp_path / "one.json"), "--measured", str(trace)]) == 2
    message = capsys.readouterr().err
    assert (
        "the plan has 1 mesh, but none of the 3 traced steps" in message
        and "Give the trace" in message
    )
    assert not (tmp_path / "one.html").exists()


def test_other_plans_stand_beside_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        one_mesh().save(tmp_path / f"{name}.json")
    page = tmp_path / "page.html"
    other = str(tmp_path / "b.json")
    assert main(["report", str(tmp_path / "a.json"), "-o", str(page), "--compare", other]) == 0
    data = data_of(page)["compare"]
    assert [row["name"] for row in data["rows"]] == ["this plan", "b"]
    assert data["diff"]

"""Writing a report: what is refused, what is left on disk, and that names stay names."""

from __future__ import annotations

import html
import json
import os
import re
import stat
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import ArgumentError, PlanError
from autopar.inspect.report_page import write_report
from autopar.inspect.report_page.page import SCRIPTS, embedded_json
from autopar.ir.timeline import Event, Timeline
from tests.report_plans import one_mesh, pipeline, timeline

FOLDER = Path(autopar.__file__).parent / "inspect" / "report_page"


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="plan-data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_plan_writes_its_own_report(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    one_mesh().report(target)
    page = target.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert data_of(page)["head"]["name"] == "train_step"
    assert os.listdir(tmp_path) == ["plan.html"]


def test_a_plan_read_from_its_file_gives_the_same_report(tmp_path: Path) -> None:
    plan = pipeline()
    plan.save(tmp_path / "plan.json")
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    write_report(plan, tmp_path / "a.html", timeline(4, 8))
    write_report(loaded, tmp_path / "b.html", timeline(4, 8))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_page_names_nothing_outside_of_itself(tmp_path: Path) -> None:
    write_report(one_mesh(), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a kind of element
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|<script src|WebSocket", page)
    assert "default-src 'none'" in page


def test_every_script_of_the_folder_is_in_the_page() -> None:
    assert {path.name for path in FOLDER.glob("*.js")} == set(SCRIPTS)
    assert all("</script" not in path.read_text().lower() for path in FOLDER.glob("*.js"))


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>&amp;\"'`\\",
    "\u2028\u2029\x00\x1b[31m",
    "@DATA@ @SCRIPT@ @NOTHING@",
    "\ud800",
    "名前/レイヤー_0 🙂",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    plan = replace(one_mesh(num_layers=1), name=name, warnings=(name,))
    assert plan.details is not None
    ops = plan.details.ops
    strings = tuple(name if text == "GPT/layer_0" else text for text in ops.strings)
    details = replace(plan.details, ops=replace(ops, strings=strings))
    write_report(replace(plan, details=details), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    data = data_of(page)
    assert data["head"]["name"] == name and data["head"]["warnings"] == [name]
    assert name in data["texts"]
    assert page.count("<script") == page.count("</script>") == 2
    if name.isprintable():
        assert f"<title>{html.escape(name)}: parallel plan</title>" in page


def test_embedded_json_is_refused_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json([float("nan")])


# -- files


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not exist; create it first"):
        write_report(one_mesh(), tmp_path / "missing" / "plan.html")


def test_a_target_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"this is a folder; give the path of a file"):
        one_mesh().report(tmp_path)


def test_a_target_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.html"
    target.write_text("old")

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlanError, match=r"No space left on device.*Choose a writable folder"):
        write_report(one_mesh(), target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.html"]


def test_a_write_that_is_interrupted_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.html"
    target.write_text("old")

    def stop(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_report(one_mesh(), target)
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["plan.html"]


def test_the_file_can_be_read_by_whom_the_mask_allows(tmp_path: Path) -> None:
    plain, target = tmp_path / "plain", tmp_path / "plan.html"
    plain.write_text("")
    write_report(one_mesh(), target)
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("given", ["plan.json", None, {"plan": 1}])
def test_what_is_no_plan_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(PlanError, match=r"needs a ParallelPlan, got a \w+.*ParallelPlan.load"):
        write_report(given, tmp_path / "plan.html")


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="measured must be a Timeline, got a str"):
        one_mesh().report(tmp_path / "plan.html", measured="trace.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (
            timeline(3, 8),
            "the plan has 4 meshes, the measured timeline 3. Pass a timeline of a step",
        ),
        (replace(timeline(4, 8), num_meshes=1), "the plan has 4 meshes, the measured timeline 1"),
        (replace(timeline(5, 8), num_meshes=4), "events on unknown meshes"),
        (Timeline((Event(0, "run", "", 0, None, 2.0, 1.0),), 3.0, 4), "end before they start"),
        (Timeline((Event(0, "run", "", 0, None, 0.0, inf),), 3.0, 4), "end before they start"),
    ],
)
def test_a_timeline_of_something_else_is_refused(
    tmp_path: Path, measured: Timeline, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        write_report(pipeline(), tmp_path / "plan.html", measured)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ArgumentError, match="needs the path of a file"):
        one_mesh().report(3)  # type: ignore[arg-type]


def test_a_plan_of_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    document = json.loads(one_mesh().to_json())
    document["version"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match="Update autopar"):
        autopar.ParallelPlan.load(tmp_path / "plan.json")

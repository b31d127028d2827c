"""Weak scaling: cases, published counts by hand, rows into tables and plots, and a run of two."""

from __future__ import annotations

import json
import pathlib
from typing import Any
from xml.etree import ElementTree

import pytest

from autopar.errors import ArgumentError
from benchmarks.published import PUBLISHED, published_flops
from benchmarks.scaling import cases, plots, running, tables
from benchmarks.scaling.__main__ import DOCS, RESULTS
from benchmarks.scaling.cases import CASES, Case
from examples.models import build


def stage(submesh: tuple[int, int], mesh: list[int], remat: bool = False) -> dict[str, Any]:
    return {"submesh": list(submesh), "mesh": mesh, "remat": remat}


def row_of(name: str, tflops: float | None, **changes: Any) -> dict[str, Any]:
    case = CASES[name]
    row: dict[str, Any] = {"case": name, "cluster": case.cluster, "family": case.family}
    row |= {"model": case.model, "devices": case.gpus, "planned_s": 3.0}
    if tflops is None:
        return {**row, "error": "MemoryBudgetError: too large\nby far"}
    return {
        **row,
        "batch_size": 1024,
        "tflops_per_device": tflops,
        "published_tflops": tflops * 4 / 3,
        "items_per_gpu_s": tflops * 10,
        "num_micro_batches": 8,
        "peak_gib": 12.0,
        "mesh": [8],
        "remat_layers": 0,
        "stages": [stage((1, 4), [4]), stage((1, 4), [2, 2], True)],
        **changes,
    }


def test_cases_cover_the_published_models_on_their_gpus() -> None:
    v100 = {(c.model, c.gpus) for c in CASES.values() if c.cluster == "v100"}
    assert v100 == {(model, m.gpus) for model, m in PUBLISHED.items()}
    assert sorted({m.gpus for m in PUBLISHED.values()}) == [1, 2, 4, 8, 16, 32, 64]
    h100 = {c.gpus for c in CASES.values() if c.cluster == "h100" and c.family == "gpt"}
    assert sorted(h100) == [8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("name", CASES)
def test_cases_name_models_and_clusters_that_are(name: str) -> None:
    case = CASES[name]
    cluster, example = case.cluster_spec(), case.example()
    assert cluster.num_devices == case.gpus and case.name == name
    assert example.batch_size % (case.micro_batches or 1) == 0
    if case.cluster == "v100":
        assert example.batch_size == (1536 if case.family == "wresnet" else 1024)
    elif case.gpus > 64 and case.family != "llama2":  # beyond 64, batches grow with GPUs
        smaller = next(
            c for c in CASES.values() if (c.cluster, c.family, c.gpus) == ("h100", case.family, 64)
        )
        assert example.batch_size * 64 == smaller.example().batch_size * case.gpus


def test_cases_are_chosen_by_parts_of_their_names() -> None:
    assert [c.name for c in cases.chosen(["v100-64-gpt-39b"])] == ["v100-64-gpt-39b"]
    assert {c.cluster for c in cases.chosen(["v100"])} == {"v100"}
    assert {c.family for c in cases.chosen(["v100-moe", "gpt"])} == {"moe", "gpt"}
    with pytest.raises(ArgumentError, match=r"only='gtp': no case.*v100, h100"):
        cases.chosen(["gpt", "gtp"])


def test_published_count_of_gpt_counts_the_forward_pass_twice() -> None:
    """By hand for one layer of width 4, 8 tokens in 2 rows, 16 words: per token 2 · 12 H² of
    weights and 4 S H of attention, four times; the head three times."""
    example = build(
        "gpt-tiny", 2, hidden_size=4, num_layers=1, num_heads=1, seq_len=4, vocab_size=16
    )
    layer = 2 * 12 * 4**2 + 4 * 4 * 4
    assert published_flops(example) == pytest.approx(8 * (4 * layer + 3 * 2 * 4 * 16))


def test_published_count_of_moe_is_ours_with_the_forward_pass_twice() -> None:
    """They count six products of dispatch and combine where there are five, and the sums over
    groups; without these the two differ by the recomputed forward pass."""
    example = build("moe-2.4b")
    ratio = published_flops(example) / example.flops_per_step()
    assert 1.30 < ratio < 1.40


def test_no_count_is_made_up() -> None:
    with pytest.raises(ValueError, match="no published count is known for 'llama2-7b'"):
        published_flops(build("llama2-7b"))


def test_best_row_of_each_number_of_gpus() -> None:
    rows = [
        row_of("v100-8-wresnet-2b-m32", 4.0),
        row_of("v100-8-wresnet-2b-m64", 5.0),
        row_of("v100-2-wresnet-500m-m32", None),
        row_of("v100-8-gpt-2.6b", 40.0),
    ]
    best = tables.best_rows(rows, "v100", "wresnet")
    assert [row["case"] for row in best] == ["v100-2-wresnet-500m-m32", "v100-8-wresnet-2b-m64"]


def test_tables_have_the_published_beside_ours() -> None:
    rows = [row_of("v100-8-gpt-2.6b", 45.0), row_of("v100-64-moe-70b", None)]
    lines = tables.v100_table(rows, "gpt")
    assert len(lines) == 3 and {one.count("|") for one in lines} == {9}
    assert "| 60.0 | 61.6 | Megatron-LM 50.4 |" in lines[2]
    assert "2 stages: 1×4 as (4,), 1×4 as (2, 2); recomputing in 1" in lines[2]
    failed = tables.v100_table(rows, "moe")[2]
    assert "| – | 36.6 | DeepSpeed failed | MemoryBudgetError: too large |" in failed
    assert "by far" not in failed
    lines = tables.h100_table([row_of("h100-1024-gpt-39b", 494.5)], "gpt")
    assert "| gpt-39b | 1,024 | 1,024 | 4,945 | 494 | 50 % |" in lines[2]
    assert {one.count("|") for one in lines} == {11}
    text = tables.tables(rows)
    assert "**GPT, V100**" in text and "H100" not in text


def test_pages_get_their_tables() -> None:
    marks = "{0}a\n<!-- scaling:v100 -->\nold\n<!-- /scaling:v100 -->\n"
    page = marks.format("") + "b\n<!-- scaling:h100 -->\n<!-- /scaling:h100 -->\n"
    rows = [row_of("v100-8-gpt-2.6b", 45.0)]
    made = tables.in_page(page, rows)
    assert "old" not in made and "61.6" in made and made.count("<!--") == 4
    assert tables.in_page(made, rows) == made
    with pytest.raises(ValueError, match="no <!-- scaling:h100 -->"):
        tables.in_page(marks.format(""), rows)


def test_the_page_has_the_tables_and_plots_of_the_results(tmp_path: pathlib.Path) -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    page = (DOCS / "scaling.md").read_text()
    assert tables.in_page(page, rows) == page
    for path in plots.write_plots(rows, tmp_path):
        assert path.read_text() == (DOCS / "images" / path.name).read_text()


def test_one_mesh_is_not_called_a_stage() -> None:
    one = row_of("v100-8-gpt-2.6b", 1.0, stages=[stage((1, 8), [2, 4])], remat_layers=3)
    assert tables.plan_text(one) == "one mesh (2, 4); recomputing"
    alone = row_of("v100-1-gpt-350m", 1.0, stages=[], mesh=[1])
    assert tables.plan_text(alone) == "one GPU"


def test_plots_say_what_is_predicted_and_what_is_measured(tmp_path: pathlib.Path) -> None:
    rows = [
        row_of("v100-8-gpt-2.6b", 45.0),
        row_of("v100-64-gpt-39b", None),
        row_of("h100-1024-gpt-39b", 400.0),
        row_of("h100-8-llama2-7b", 400.0),
    ]
    written = plots.write_plots(rows, tmp_path)
    assert [path.name for path in written] == ["scaling-v100.svg", "scaling-h100.svg"]
    for path in written:
        root = ElementTree.fromstring(path.read_text())
        words = " ".join(node.text or "" for node in root.iter() if node.tag.endswith("text"))
        assert "autopar: predicted by its cost model, never run" in words
        assert "autopar, predicted" in words and "measured" in words
    v100 = (tmp_path / "scaling-v100.svg").read_text()
    assert "Alpa, measured by its authors" in v100 and "OSDI" in v100
    # Ours: a point and a failure. Alpa has all seven of each family, the baselines failed thrice.
    assert v100.count('class="cross"') == 1 + 1 + 2
    assert v100.count("<circle") == 1 + 3 * 7 + 7 + 6 + 5
    assert "MaxText" in (tmp_path / "scaling-h100.svg").read_text()


def test_plots_of_one_cluster_only(tmp_path: pathlib.Path) -> None:
    assert [p.name for p in plots.write_plots([row_of("h100-8-gpt-2.6b", 1.0)], tmp_path)] == [
        "scaling-h100.svg"
    ]


def test_rows_are_kept_and_made_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cases in processes of their own: one is planned, of the other time runs out."""
    good = Case("h100", "mlp-tiny", 8)
    late = Case("h100", "gpt-tiny", 8)
    monkeypatch.setattr(cases, "CASES", {case.name: case for case in (good, late)})
    monkeypatch.setattr(running, "CASES", cases.CASES)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / f"{good.name}.json").write_text(json.dumps({"case": good.name, "step_s": 1.0}))
    rows = running.run(tmp_path, jobs=2, row_limit_s=0.5)
    assert rows[0] == {"case": good.name, "step_s": 1.0}  # not planned again
    assert rows[1]["error"] == "OutOfTime: more than 0 s"
    assert "OutOfTime" in capsys.readouterr().out
    assert not running.has_row(folder, late)
    assert json.loads((tmp_path / "scaling.json").read_text())["rows"] == rows
    kept = tmp_path / "kept.json"
    running.write_results(kept, [{"case": late.name, "step_s": 2.0}])
    both = [rows[0], {"case": late.name, "step_s": 2.0}]  # in place of a row without a plan
    assert running.keep_results(tmp_path, kept) == both
    assert json.loads(kept.read_text())["rows"] == both
    running.run(tmp_path, time_limit_s=0.0)
    assert "no time was left for 1: h100-8-gpt-tiny" in capsys.readouterr().out


@pytest.mark.ci
def test_a_case_becomes_a_row(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("h100", "mlp-tiny", 2, 64)
    monkeypatch.setattr(running, "CASES", {case.name: case})
    running.plan_case(case.name, tmp_path)
    row = json.loads((tmp_path / f"{case.name}.json").read_text())
    assert row["items_per_gpu_s"] * row["step_s"] * 2 == pytest.approx(64)
    assert row["devices"] == 2 and "GiB" in tables.line(row)


@pytest.mark.ci
def test_a_case_that_fails_is_a_row_too(tmp_path: pathlib.Path) -> None:
    missing = Case("h100", "gpt-17b", 8)
    job = running._Job(missing, tmp_path)
    try:
        job.process.wait(timeout=60)
        assert job.is_done(60)
    finally:
        job.end()
    row = json.loads((tmp_path / f"{missing.name}.json").read_text())
    assert row["error"].startswith("Failed: exit code 1: KeyError: 'h100-8-gpt-17b'")

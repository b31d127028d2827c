"""The suite of `autopar bench`: rows, processes, tables. What it compiles is tested in
`tests/unit/measure/test_judge.py` and by `tests/unit/benchmarks/test_experts.py`."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import ArgumentError
from benchmarks.experts import experts_for
from benchmarks.suite import command, tables
from benchmarks.suite.cases import H100_ROWS, QUICK_ROWS, Row, chosen_rows, example_of
from benchmarks.suite.pool import Task, run_tasks
from examples.models import MODELS

ROOT = Path(__file__).parents[3]
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


# -- rows


def test_rows_are_of_models_that_exist_and_every_family_has_all_sizes():
    assert {row.model for row in (*H100_ROWS, *QUICK_ROWS)} <= set(MODELS)
    sizes = {(row.family, row.devices) for row in H100_ROWS}
    families = ("gpt", "llama", "moe", "bert", "wresnet")
    assert sizes == {(family, number) for family in families for number in (8, 16, 64)}


def test_a_row_says_its_depth_for_every_family():
    for row in chosen_rows(H100_ROWS, devices=(8,), layers=2):
        config = example_of(row).config
        assert config.stage_sizes == (2,) * 4 if row.family == "wresnet" else config.num_layers == 2
        assert row.name.endswith("-2layers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (command.Options(only=("h101",)), ["--only h101", "'h100'", "cpu, h100, h200"]),
        (command.Options(only=("h100",), models=("gtp",)), ["--models gtp", "'gpt'", "wresnet-2b"]),
        (command.Options(only=("h100",), devices=(7,)), ["--devices 7", "8, 16, 64"]),
        (
            command.Options(only=("h100",), models=("gpt-15b",), devices=(8,)),
            ["gpt-15b", "8", "no row has both", "--list"],
        ),
    ],
)
def test_names_that_no_row_has_are_told_with_those_there_are(options, words):
    with pytest.raises(ArgumentError) as error:
        command.list_rows(options)
    for word in words:
        assert word in str(error.value)


def test_every_family_of_experts_has_its_turn():
    rows = chosen_rows(H100_ROWS, devices=(8, 16), layers=2)
    families = {
        expert.family for row in rows for expert in experts_for(example_of(row), row.devices, 8)
    }
    assert families <= set(command.PLAN_ORDER) and len(families) > 5


def test_plans_that_nobody_makes_are_told():
    with pytest.raises(ArgumentError, match=r"--plans fsdp: .*'FSDP'.*Megatron"):
        command.check_plans(("autopar", "fsdp"))


# -- processes


def writing(folder: Path, name: str, text: str) -> Task:
    result = folder / f"{name}.json"
    return Task(name, ("-S", "-c", WRITES, str(result), text), result)


def test_what_is_done_is_not_run_again(tmp_path):
    tasks = [writing(tmp_path, "a", "1"), writing(tmp_path, "b", "2")]
    (tmp_path / "a.json").write_text("from before")
    told = []
    left = run_tasks(tasks, 2, time.time() + 60, lambda task, problem: told.append(task.name))
    assert left == 0 and told == ["b"]
    assert [task.result.read_text() for task in tasks] == ["from before", "2"]


def test_a_process_that_fails_says_why_and_is_tried_again(tmp_path):
    failing = Task("f", ("-S", "-c", "raise SystemExit('out of luck')"), tmp_path / "f.json")
    problems = []
    left = run_tasks([failing], 1, time.time() + 60, lambda _, problem: problems.append(problem))
    assert left == 1 and "status 1" in problems[0] and "out of luck" in problems[0]
    assert not failing.is_done


def test_when_the_time_is_up_processes_end(tmp_path):
    sleeping = Task("s", ("-S", "-c", "import time; time.sleep(60)"), tmp_path / "s.json")
    problems = []
    started = time.time()
    left = run_tasks(
        [sleeping, writing(tmp_path, "late", "1")],
        1,
        started + 1,
        lambda _, problem: problems.append(problem),
    )
    assert left == 2 and time.time() - started < 30
    assert sorted(problems) == ["the time was up before it began", "the time was up while it ran"]


# -- tables


def result(family, step_ms, *, fits=True, plan=None, **more):
    figures = {"step_ms": step_ms, "compute_ms": step_ms - 1, "communication_ms": 1.0}
    own = {"plan": plan or family, "family": family, "fits": fits, "peak_gb": 50.0}
    return own | figures | more


def row(*results, **more):
    return {"model": "m", "devices": 8, "batch": 16, "results": list(results), **more}


def test_the_ratio_is_to_the_fastest_expert_that_fits():
    experts = [result("FSDP", 20.0), result("TP", 8.0, fits=False), result("FSDP", 12.5)]
    found = row(result("autopar", 10.0), *experts)
    assert tables.ratio_of(found) == pytest.approx(0.8)
    text = tables.h100_table({"rows": [found]})
    assert "12.5 ms, FSDP" in text and "TP does not fit" in text and "| 0.80 |" in text
    assert "worse" not in text


def test_where_autopar_is_worse_the_table_says_so_and_of_what_there_is_more():
    ours = result("autopar", 12.0, compute_ms=7.0, communication_ms=5.0)
    found = row(ours, result("FSDP", 10.0))
    text = tables.h100_table({"rows": [found]})
    assert "| 1.20 |" in text and "worse: compute -2.0 ms, communication +4.0 ms" in text


def test_the_planners_figure_is_beside_the_judges():
    ours = result("autopar", 9.5, judge="schedule", predicted_ms=10.0, exposed_ms=0.5)
    expert = result("FSDP", 9.0, judge="schedule", exposed_ms=0.1)
    found = row(ours, expert)
    text = tables.h100_table({"rows": [found]})
    assert "9.5 ms (predicted 10.0)" in text and "exposed communication +0.4 ms" in text
    details = tables.h100_details({"rows": [found]})
    assert "| 9.5 | 10.0 | 8.5 | 1.0 | 0.5 |" in details


def test_figures_of_different_judges_are_not_compared():
    found = row(result("autopar", 10.0, judge="schedule"), result("FSDP", 5.0))
    assert tables.ratio_of(found) is None


def test_a_row_without_ours_has_no_ratio():
    assert tables.ratio_of(row(result("FSDP", 1.0))) is None
    assert tables.ratio_of(row(result("autopar", 1.0), result("FSDP", 1.0, fits=False))) is None
    assert "none fits" in tables.h100_table({"rows": [row(result("autopar", 1.0))]})


def test_tables_say_where_a_plan_runs():
    plan = result("autopar", 9.5, mesh="4×2", num_micro_batches=2, remat_layers=3)
    found = tables.tables_of({"h100": {"rows": [row(plan)]}})["h100"]
    assert "9.5 ms on a 4×2 mesh, 2 micro-batches, recomputing 3 layers" in found
    pipeline = result("autopar", 9.5, mesh="2×4, 8", remat_layers=1)
    found = tables.tables_of({"h100": {"rows": [row(pipeline)]}})["h100"]
    assert "9.5 ms on meshes 2×4, 8, recomputing 1 layer |" in found


def test_measured_parts_have_their_tables():
    ours = result("autopar", 9.5, mesh="8")
    measured = {"ratio": 0.951, "ratio_spread": 0.02, "num_experts": 9, "num_experts_run": 8}
    cpu = row(ours, result("FSDP", 10.0), **measured)
    gpu = {"label": "gpt", "jit_step_s": 0.1, "autopar_step_s": 0.1, "ratio": 1.0, "tflops": 500}
    gpu |= {"ratio_spread": 0.002, "share_of_peak": 0.5, "jit_xla_bytes": 2**30}
    gpu |= {"autopar_xla_bytes": 2**31}
    percentiles = {"p50": 1.0, "p90": 2.0, "p99": 3.5}
    decode = {"kind": "decode", "label": "gpt2, 8", "engine": "engine_8", "loop": "loop_scan"}
    decode |= {"tokens_per_s": {"engine_8": 990.0, "loop_scan": 1000.0}, "ratio": 0.99}
    decode["ratio_spread"] = 0.01
    http = {"kind": "http", "label": "gpt2, 1 client", "tokens_per_s": 123.4}
    http |= dict.fromkeys(("first_token_ms", "per_token_ms", "whole_ms"), percentiles)
    found = tables.tables_of(
        {"cpu": {"rows": [cpu]}, "h200": {"rows": [gpu]}, "serving": {"rows": [decode, http]}}
    )
    assert set(found) == {"cpu", "h200", "decode", "http"}
    assert (
        "| m | 8 | 9.5 ms on a mesh of 8 | 10.0 ms, FSDP | – | 0.95 ± 0.02 | not recorded | "
        "8 of 9 experts run |" in found["cpu"]
    )
    assert "| gpt | 100.0 ms | 100.0 ms | 1.000 ± 0.002 | 500 (50%) | 1.0 / 2.0 |" in found["h200"]
    assert "| gpt2, 8 | 990 | 1000 | 0.990 ± 0.010 |" in found["decode"]
    assert "| gpt2, 1 client | 123 | 1.0 / 2.0 / 3.5 |" in found["http"]


def test_tables_go_between_their_markers_and_nowhere_else():
    text = "a\n<!-- bench:h100 -->\nold\n<!-- /bench:h100 -->\nb\n"
    found = tables.with_tables(text, {"h100": "| new |\n"})
    assert found == "a\n<!-- bench:h100 -->\n| new |\n<!-- /bench:h100 -->\nb\n"
    assert tables.with_tables(found, {"h100": "| new |\n"}) == found
    with pytest.raises(ArgumentError, match=r"bench:h100.*no such table"):
        tables.with_tables(text, {"cpu": ""})


def test_parts_of_a_run_replace_those_of_a_results_file(tmp_path):
    target = tmp_path / "suite.json"
    command.merge({"h100": {"rows": []}}, target)
    command.merge({"cpu": {"rows": [1]}}, target)
    assert json.loads(target.read_text()) == {"h100": {"rows": []}, "cpu": {"rows": [1]}}


def test_a_file_that_is_no_results_is_told(tmp_path):
    path = tmp_path / "x.json"
    for text, words in (("[1]", "none of the parts"), ("{", "not readable")):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=words):
            command.read_results(path)


def test_the_readme_says_what_the_tables_say():
    """Its two ranges of ratios are those of docs/benchmarks.md."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for table, form in (
        ("bench:h100", "takes {} to {} of the time of the best hand-tuned"),
        ("shared-gpu:steps", "it takes {} to {}."),
    ):
        rows = text.split(f"<!-- {table} -->")[1].split("<!-- /")[0].strip().splitlines()
        at = [cell.strip() for cell in rows[0].split("|")].index("ratio")
        ratios = sorted(row.split("|")[at].strip() for row in rows[2:])
        assert form.format(ratios[0], ratios[-1]) in readme
        if table == "bench:h100":
            index = " ".join((ROOT / "docs/index.md").read_text(encoding="utf-8").split())
            assert form.format(ratios[0], ratios[-1]) in index
        if table == "bench:h100":
            assert f"[{len(ratios)} models]" in readme


def test_the_readme_is_two_screens():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 900


@pytest.mark.parametrize("name", ["docs/benchmarks.md"])
def test_tables_in_texts_are_those_of_the_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    document = command.read_results(ROOT / "benchmarks" / "results" / command.RESULTS)
    assert tables.with_tables(text, tables.tables_of(document)) == text


def test_a_wide_resnet_of_another_depth_is_not_deeper_than_the_model():
    config = example_of(Row("wresnet-4b", 16, 16, layers=8)).config
    assert config.stage_sizes == (3, 4, 6, 3)


def test_kept_programs_are_judged_again_at_any_depth(tmp_path):
    from benchmarks.suite.judging import judge_folder
    from benchmarks.suite.programs import SUFFIX, write_program

    row = Row("gpt-2.6b", 8, 8, layers=4)
    folder = tmp_path / "h100" / row.name
    folder.mkdir(parents=True)
    older = {"plan": "FSDP", "family": "FSDP", "step_ms": -1.0, "peak_gb": 1.5, "fits": True}
    pipeline = {**older, "plan": "3-D", "family": "3-D by hand"}
    for name, result in (("fsdp", older), ("3-d", pipeline)):
        document = {"row": asdict(row), "who": name, "jax": jax.__version__, "results": [result]}
        (folder / f"{name}.json").write_text(json.dumps(document))
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((256, 256))).compile()
    write_program(folder / f"fsdp-0{SUFFIX}", compiled.as_text(), None)
    suite = tmp_path / command.RESULTS
    suite.write_text(json.dumps({"h100": {"target": "H100", "rows": []}, "cpu": {"rows": [1]}}))

    assert judge_folder(tmp_path) == 1
    found = json.loads(suite.read_text())
    assert found["cpu"] == {"rows": [1]} and found["h100"]["target"] == "H100"
    (line,) = found["h100"]["rows"]
    assert line["layers"] == 4
    by_plan = {one["plan"]: one for one in line["results"]}
    assert by_plan["FSDP"]["step_ms"] > 0 and by_plan["FSDP"]["peak_gb"] == 1.5
    assert by_plan["3-D"]["step_ms"] == -1.0  # it has no program


def test_a_folder_without_results_is_not_judged(tmp_path):
    from benchmarks.suite.judging import judge_folder

    with pytest.raises(ArgumentError, match="not readable as results"):
        judge_folder(tmp_path)
    (tmp_path / command.RESULTS).write_text(json.dumps({"cpu": {"rows": []}}))
    with pytest.raises(ArgumentError, match="no results for H100s"):
        judge_folder(tmp_path)

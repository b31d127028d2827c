"""The data of the page: equal to the plan's, and small."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from autopar.inspect.report_page import charts
from autopar.inspect.report_page.charts import (
    breakdown,
    collective_data,
    memory_data,
    timeline_data,
)
from autopar.inspect.report_page.data import page_data
from autopar.inspect.report_page.encode import Texts, run_text, runs, short
from autopar.inspect.report_page.headline import headline_of
from autopar.inspect.report_page.model import array_rows, held_bytes, model_data
from autopar.inspect.report_page.page import embedded_json
from autopar.ir.judged import JudgedStep
from autopar.ir.plan import Tensor
from autopar.ir.timeline import Event, Timeline
from tests.report_plans import GIB, one_mesh, pipeline, timeline


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.0, 0), (1234.5678, 1235), (1.23456e-7, 1.235e-7), (3.0, 3), (float("inf"), None)],
)
def test_short(value: float, wanted: float | None) -> None:
    assert short(value) == wanted


def test_runs_of_numbers() -> None:
    assert runs((4, 0, 1, 2, 9, 8)) == [[0, 3], [4, 5], [8, 10]]
    assert run_text((4, 0, 1, 2, 9, 8)) == "0–2, 4, 8–9"
    assert runs(()) == []


def test_the_page_says_what_the_judge_read() -> None:
    plan = replace(one_mesh(), judged=JudgedStep(0.02, 0.015, 0.01, 0.005))
    (line,) = (line for line in page_data(plan)["head"]["limits"] if "XLA's schedule" in line)
    assert "20.00 ms" in line and "collectives 10.00 ms" in line and "wait for 5.00 ms" in line
    assert not any("schedule" in line for line in page_data(one_mesh())["head"]["limits"])


# -- operators


def test_operators_come_back_as_they_were() -> None:
    plan = pipeline(num_stages=3)
    texts = Texts()
    data = model_data(plan, texts)
    words = texts.all()
    for stage, (rows, modules) in zip(plan.stages, data["ops"], strict=True):
        assert stage.plan is not None and stage.plan.details is not None
        ops = list(stage.plan.details.ops.rows())
        assert [words[module] for module in modules] == [op.module for op in ops]
        for number, op in zip(rows, ops, strict=True):
            row = data["rows"][number]
            names = (op.name, op.region, op.array, op.spec, op.words, op.source)
            assert tuple(words[text] for text in row[:6]) == names
            assert row[6:] == pytest.approx(op[7:], rel=1e-3)


def test_equal_layers_cost_little_room() -> None:
    """Rows are kept once, so a page grows by a few bytes per operator."""
    few, many = (
        len(embedded_json(page_data(one_mesh(num_layers=n, ops_per_region=128)))) for n in (4, 40)
    )
    assert (many - few) / (36 * 256) < 20
    plans = (one_mesh(num_layers=n, ops_per_region=128) for n in (4, 40))
    few, many = (len(model_data(plan, Texts())["rows"]) for plan in plans)
    assert few == many


def test_a_plan_without_details_shows_its_modules() -> None:
    plan = replace(one_mesh(), details=None)
    texts = Texts()
    data = model_data(plan, texts)
    assert sum(data["rows"][row][8] for row in data["ops"][0][0]) == pytest.approx(
        sum(module.compute_s for module in plan.modules), rel=1e-2
    )
    assert data["params"] == []
    assert page_data(plan)["memory"] is None


def test_parameters_have_specs_and_bytes_per_device() -> None:
    plan = one_mesh(num_layers=1)
    texts = Texts()
    words_of = lambda row: [texts.all()[number] for number in (row[3], row[4], row[5])]  # noqa: E731
    up, down = model_data(plan, texts)["params"]
    assert words_of(up) == ["float32[512,2048]", "P(None, 'y')", "x: data, y: tensor, column"]
    assert words_of(down) == ["float32[2048,512]", "P('y',)", "x: data, y: tensor, row"]
    assert up[7] == down[7] == short(512 * 2048 * 4 / 4)


@pytest.mark.parametrize(
    ("dtype", "layout", "size"),
    [
        ("float32", (-1, -1), 8 * 16 * 4),
        ("bfloat16", (0, -1), 8 * 16 * 2 / 2),
        ("int8", (0, 1), 8 * 16 / 8),
        ("key<fry>", (-1, -1), 8 * 16 * 8),
    ],
)
def test_bytes_of_one_device(dtype: str, layout: tuple[int, ...], size: float) -> None:
    assert held_bytes(Tensor("a", (8, 16), dtype, layout), one_mesh()) == size


def test_arrays_that_differ_in_numbers_are_one_row() -> None:
    rows = array_rows(pipeline(num_stages=3))
    assert [(row["path"], row["count"], row["stages"]) for row in rows] == [
        ("state.params['layer_*']['up']", 6, "0–2"),
        ("state.params['layer_*']['down']", 6, "0–2"),
        ("batch['tokens']", 1, "0"),
    ]


# -- timelines


def decoded(data: dict[str, Any], words: list[str]) -> list[tuple[Any, ...]]:
    events, at = [], 0
    kinds, micro_batches, starts, lengths = data["events"]
    for mesh, count in enumerate(data["counts"]):
        clock = 0
        for index in range(at, at + count):
            clock += starts[index]
            kind, phase, name, stage, num_bytes = data["kinds"][kinds[index]]
            texts = (words[kind], words[phase], words[name])
            times = (clock * data["tick_s"], (clock + lengths[index]) * data["tick_s"])
            events.append((mesh, *texts, stage, micro_batches[index], num_bytes, *times))
        at += count
    return events


def test_events_come_back_as_they_were() -> None:
    made = random.Random(0)
    events = []
    for _ in range(300):
        start = made.uniform(0, 5)
        end = start + made.choice([0.0, 1e-6, made.uniform(0, 1)])
        mesh = made.randrange(4)
        micro_batch = made.choice([None, 0, 7])
        events.append(Event(mesh, "run", f"n{mesh}", mesh, micro_batch, start, end, "forward", 8.0))
    texts = Texts()
    data = timeline_data(Timeline(tuple(made.sample(events, 300)), 6.0, 5), texts)
    found = decoded(data, texts.all())
    wanted = sorted(events, key=lambda e: (e.mesh, e.start_s, e.end_s))
    assert data["counts"][4] == 0 and len(found) == 300
    for one, event in zip(found, wanted, strict=True):
        micro_batch = -1 if event.micro_batch is None else event.micro_batch
        assert one[:7] == (event.mesh, "run", "forward", event.name, event.stage, micro_batch, 8)
        assert one[7:] == pytest.approx((event.start_s, event.end_s), abs=2e-6)


def test_a_timeline_takes_little_room() -> None:
    many = timeline(64, 64)
    room = len(embedded_json(timeline_data(many, Texts())))
    assert room / len(many.events) < 30


def test_a_timeline_of_very_many_events_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    many = timeline(4, 100)  # 800 runs, 400 sends
    assert timeline_data(many, Texts())["left_out"] == ""
    monkeypatch.setattr(charts, "MOST_EVENTS", 900)
    data = timeline_data(many, Texts())
    assert sum(data["counts"]) == 800
    assert data["left_out"] == "Transfers are not drawn: the step has 1,200 events."
    monkeypatch.setattr(charts, "MOST_EVENTS", 400)
    data = timeline_data(many, Texts())
    assert sum(data["counts"]) == 400  # all forward passes, the last of which ends after 103 ms
    assert data["left_out"] == "Only runs up to 103.00 ms are drawn, of 1,200 events."
    assert data["busy_s"] == [short(s) for s in many.busy_s()]


# -- memory, collectives, time


def test_stages_alike_share_a_memory_chart() -> None:
    plan = pipeline(num_stages=8)
    data = memory_data(plan, Texts())
    assert data is not None
    assert data["of"] == [0] * 8 and len(data["charts"]) == 1
    (chart,) = data["charts"]
    assert sum(chart["at_peak"]) == pytest.approx(6.1 * GIB, rel=1e-2)
    highest = [c * chart["unit"] for c in (chart["held"][0][0], max(chart["held"][3]))]
    assert highest == pytest.approx([GIB, 3 * GIB], rel=1e-2)
    assert len(chart["held"][0]) == 1 and len(chart["held"][3]) == len(chart["seconds"])


def test_collectives_of_equal_layers_and_stages_are_one_row() -> None:
    plan = pipeline(num_stages=4, layers_per_stage=2)
    texts = Texts()
    data = collective_data(plan, texts)
    words = texts.all()
    assert [(words[r[0]], words[r[6]], r[10], r[13], words[r[14]]) for r in data["rows"]] == [
        ("all-reduce", "GPT/layer_*/ffn/down", 2, 2, "0–3"),
        ("all-gather", "GPT/layer_*/ffn/down", 2, 2, "0–3"),
    ]
    assert data["totals"][0] == ["all-reduce", "y", "partial sums", 2, short(2 * 2**20), 4e-5]


def test_the_parts_of_a_step_add_up() -> None:
    plan = one_mesh()
    data = breakdown(plan)
    (mesh,) = data["meshes"]
    assert sum(mesh["seconds"]) == pytest.approx(plan.estimated_step_s, rel=1e-3)


def test_candidates_and_the_chosen_one() -> None:
    data = page_data(pipeline())["search"]
    assert [row["chosen"] for row in data["rows"]] == [True, False, False]
    assert data["rows"][0]["what"].startswith(
        "2 layers on 1×8 devices as a 2×4 mesh, recomputed; 3 × ("
    )
    assert data["rows"][-1]["what"] == "one mesh, without a pipeline"
    assert page_data(one_mesh())["search"] is None


# -- the headline


def test_headline_of_the_headline() -> None:
    plan = one_mesh()
    headline = headline_of(plan)
    assert plan.details is not None and plan.cluster is not None
    assert headline.num_devices == 8 and headline.batch_rows == 64
    per_device_s = 8 * plan.estimated_step_s
    assert headline.model_rate == pytest.approx(plan.details.model_flops / per_device_s)
    assert headline.computed_rate == pytest.approx(plan.details.flops / plan.estimated_step_s)
    assert headline.peak_rate == plan.cluster.spec.flops_16bit  # products are in bfloat16
    assert headline.bubble == 0 and headline.limits[0].startswith("Compute takes")


def test_a_pipeline_waits_as_its_timeline_says() -> None:
    """Four stages, eight micro-batches of 3 ms: devices compute for 24 ms and wait for 9."""
    headline = headline_of(pipeline())
    assert headline.bubble == pytest.approx(9 / 33, abs=0.03)
    seconds = page_data(pipeline())["breakdown"]["meshes"][0]["seconds"]
    assert sum(seconds) == pytest.approx(0.0331, rel=0.02)


def test_a_batch_of_many_lengths_has_no_rows() -> None:
    plan = one_mesh()
    other = Tensor("batch['mask']", (32,), "int32", (-1, -1), "batch")
    assert headline_of(replace(plan, inputs=(*plan.inputs, other))).batch_rows is None

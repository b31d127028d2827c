"""The report in a real browser: it draws, it can be used, and it holds what the plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import SearchReport, TriedPlan
from tests.report_plans import one_mesh, pipeline, timeline

SECTIONS = [
    "summary",
    "cluster",
    "time",
    "timeline",
    "model",
    "memory",
    "collectives",
    "arrays",
    "plans",
]


def shown(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_text_contents()]


def not_wider_than_the_window(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(("scheme", "size"), [("light", (1280, 900)), ("dark", (390, 844))])
def test_every_section_is_there_and_fits(
    open_page: Any, tmp_path: Path, scheme: str, size: tuple[int, int]
) -> None:
    page = open_page(pipeline(), timeline(4, 8, 1.2), size, scheme)
    ids = page.eval_on_selector_all("section", "nodes => nodes.map(node => node.id)")
    assert ids == SECTIONS
    assert all(page.locator(f"#{name}").bounding_box()["height"] > 60 for name in ids)
    assert "[object" not in page.inner_text("body")
    assert "NaN" not in page.inner_text("body") and "undefined" not in page.inner_text("body")
    assert not_wider_than_the_window(page)
    page.screenshot(path=tmp_path / f"report-{scheme}-{size[0]}.png", full_page=True)


def test_the_headline_says_what_the_plan_says(open_page: Any) -> None:
    plan = one_mesh()
    page = open_page(plan)
    cards = " ".join(shown(page, ".card"))
    assert f"{plan.estimated_step_s * 1e3:.2f} ms" in cards
    assert "6.1 GiB" in cards and "7.0 GiB" in cards
    rate = 64 / plan.estimated_step_s
    assert f"{round(rate, -1):,.0f}"[:4] in cards
    assert shown(page, "h1") == ["train_step"]


def test_warnings_and_pins_are_shown(open_page: Any) -> None:
    plan = replace(one_mesh(), warnings=("mind the gap",), pinned=(("a/kernel", "P('x')"),))
    page = open_page(plan)
    assert "mind the gap" in page.inner_text(".box.warn")
    page.click("text=How the plan was made")
    assert "a/kernel as P('x')" in page.inner_text("#summary")


def test_plans_that_were_run_are_shown(open_page: Any) -> None:
    tried = (
        TriedPlan("mesh 8", 0.02, None, 0.0, 1e9, 2e9, failure="RESOURCE_EXHAUSTED"),
        TriedPlan("mesh 2×4", 0.03, 0.05, 0.02, 1e9, 1e9, is_chosen=True),
    )
    page = open_page(replace(one_mesh(), search=SearchReport(0, 0, 0, 0, tried=tried)))
    text = page.inner_text("#plans")
    assert "the fastest that fits was chosen" in text and "no stages to search" not in text
    assert "50.0 ms ± 2%" in text and "RESOURCE_EXHAUSTED" in text
    assert shown(page, "#plans tr.chosen td:first-child") == ["mesh 2×4 (chosen)"]


# -- the tree


def modules(page: Any) -> list[str]:
    return page.eval_on_selector_all(".tree tr.module", "rows => rows.map(r => r.dataset.path)")


def search(page: Any, words: str) -> None:
    page.fill("#search", words)
    status = "document.querySelector('#model [role=status]').textContent"
    page.wait_for_function(f"() => {status} !== ''")


def test_modules_open_and_close(open_page: Any) -> None:
    page = open_page(one_mesh(num_layers=3))
    rows = page.locator(".tree tbody tr")
    assert modules(page) == ["", "GPT", "GPT/layer_0", "GPT/layer_1", "GPT/layer_2"]
    before = rows.count()
    page.click(".tree tr[data-path='GPT/layer_1']")
    assert rows.count() > before
    opened = page.locator(".tree tr[data-path='GPT/layer_1/ffn']")
    assert opened.count() == 1
    opened.click()
    page.click(".tree tr[data-path='GPT/layer_1/ffn/up']")
    assert shown(page, ".tree .pname") == ["up"]
    tip = page.locator(".tree .pname").get_attribute("data-tip")
    assert tip.startswith("state.params['layer_1']['up']\ndot_general of GPT/layer_1/ffn/up")
    assert "y: tensor, column" in page.inner_text(".tree tr.param")
    page.click(".tree tr[data-path='GPT/layer_1']")
    assert rows.count() == before


def test_the_tree_works_by_keys(open_page: Any) -> None:
    page = open_page(one_mesh(num_layers=3))
    focused = "document.activeElement.dataset.path"
    page.focus(".tree tr[tabindex='0']")
    assert page.evaluate(focused) == ""
    for key, path in (
        ("ArrowDown", "GPT"),
        ("ArrowDown", "GPT/layer_0"),
        ("ArrowRight", "GPT/layer_0"),
        ("ArrowRight", "GPT/layer_0/attention"),
        ("ArrowLeft", "GPT/layer_0"),
        ("ArrowLeft", "GPT/layer_0"),
        ("ArrowLeft", "GPT"),
        ("Home", ""),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == path, key
    assert page.locator("tr[data-path='GPT/layer_0']").get_attribute("aria-expanded") == "false"


def test_search_opens_what_matches(open_page: Any) -> None:
    page = open_page(one_mesh(num_layers=4))
    page.fill("#search", "layer_2 down")
    page.wait_for_function(
        "() => document.querySelector('#model [role=status]').textContent !== ''"
    )
    assert "1 module, 1 parameter" in page.inner_text("#model [role=status]")
    assert modules(page) == ["", "GPT", "GPT/layer_2", "GPT/layer_2/ffn", "GPT/layer_2/ffn/down"]
    assert shown(page, ".tree .pname") == ["down"]
    page.fill("#search", "layer_2 dot_general forward")
    page.wait_for_function("() => document.querySelectorAll('.tree tr.op').length === 4")
    assert {text.split()[0] for text in shown(page, ".tree .opname")} == {"dot_general"}
    assert not any("layer_1" in path for path in modules(page))
    page.fill("#search", "no such thing")
    page.wait_for_function("() => document.querySelectorAll('.tree tbody tr').length === 1")
    page.fill("#search", "")
    page.wait_for_function("() => document.querySelectorAll('.tree tr.module').length === 6")


def test_ten_thousand_operators_are_rendered_as_far_as_they_are_open(open_page: Any) -> None:
    page = open_page(one_mesh(num_layers=40, ops_per_region=128))
    assert "10,241 operators" in page.inner_text("#model .lead")
    assert page.locator(".tree tbody tr").count() < 200
    page.fill("#search", "dot_general backward")
    page.wait_for_function(
        "() => document.querySelector('#model [role=status]').textContent !== ''"
    )
    assert "1,280 operators match" in page.inner_text("#model [role=status]")
    assert page.locator(".tree tbody tr").count() < 450
    assert "type more" in page.inner_text(".tree tr.cut")
    page.fill("#search", "")
    page.wait_for_function("() => !document.querySelector('.tree tr.cut')")
    assert "layer_0 … layer_39" in page.inner_text(".tree tr.group")
    assert "40 equal" in page.inner_text(".tree tr.group")
    page.click(".tree tr.group")
    page.click(".tree tr[data-path='GPT/layer_7']")
    own = page.locator(".tree tr[data-path='oGPT/layer_7']")
    assert "192 operators outside these modules" in own.inner_text()
    assert page.locator(".tree tr.op").count() == 0
    own.click()
    assert page.locator(".tree tr.op").count() == 100
    page.click(".tree tr.more")
    assert page.locator(".tree tr.op").count() == 192


# -- charts


def _over_an_instruction(page: Any, box: Any, row: float) -> float:
    """Where in the row the tip shows: when the mesh works depends on the plan."""
    for x in range(100, int(box["width"]), 20):
        page.mouse.move(box["x"] + x, row)
        page.wait_for_timeout(50)
        if page.locator("#tip").is_visible():
            return box["x"] + x
    raise AssertionError("no instruction in this row")


def test_the_timeline_zooms_and_tells(open_page: Any, tmp_path: Path) -> None:
    page = open_page(pipeline(), timeline(4, 8))
    whole = page.inner_text("#range")
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    row = box["y"] + box["height"] - 4 * 12
    where = _over_an_instruction(page, box, row)
    words = page.inner_text("#tip")
    assert "micro-batch" in words and "stage" in words and "ms" in words

    page.mouse.click(where, row)
    page.mouse.wheel(0, -300)
    page.wait_for_function("was => document.getElementById('range').textContent !== was", arg=whole)
    page.click("#timeline >> text=Reset")
    page.wait_for_function("was => document.getElementById('range').textContent === was", arg=whole)

    page.mouse.move(box["x"] + 300, row)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, row, steps=3)
    page.mouse.up()
    page.wait_for_function("was => document.getElementById('range').textContent !== was", arg=whole)
    page.screenshot(path=tmp_path / "zoomed.png")
    page.focus("#timeline canvas")
    page.keyboard.press("0")
    page.wait_for_function("was => document.getElementById('range').textContent === was", arg=whole)


def test_timelines_of_different_length_can_be_compared(open_page: Any) -> None:
    page = open_page(pipeline(), timeline(4, 8, scale=10))
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    right = (box["x"] + box["width"] - 60, box["y"] + 22 + 20 + 8)  # the end of the first mesh
    page.mouse.move(*right)
    assert page.locator("#tip").is_hidden()  # the predicted step is over by then
    page.click("#timeline >> text=Equal lengths")
    page.wait_for_function("() => document.getElementById('range').textContent === '0% to 100%'")
    page.mouse.move(*right)
    page.wait_for_function("() => !document.getElementById('tip').hidden")
    assert "predicted: run, backward" in page.inner_text("#tip")


def test_the_wheel_scrolls_the_page_unless_the_timeline_was_chosen(open_page: Any) -> None:
    page = open_page(pipeline(), timeline(4, 8))
    whole = page.inner_text("#range")
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    at = page.evaluate("window.scrollY")
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.wheel(0, 200)
    page.wait_for_function("at => window.scrollY > at", arg=at)
    assert page.inner_text("#range") == whole


def test_many_meshes_with_thousands_of_events_are_painted(open_page: Any) -> None:
    """All of them: the last event of the last mesh is where it belongs."""
    plan = pipeline(num_stages=64, num_micro_batches=16, layers_per_stage=1)
    run = timeline(64, 32)
    page = open_page(plan, run)
    found = page.evaluate(
        "readTimeline(DATA.timelines.at(-1)).meshes.map(m => [m.start.length, m.end.at(-1)])"
    )
    events = run.events
    for mesh, (count, last) in enumerate(found):
        own = [event for event in events if event.mesh == mesh]
        assert count == len(own)
        assert last == pytest.approx(max(event.end_s for event in own), rel=1e-5)
    assert page.locator("#cluster .host").count() == 64


def test_the_theme_can_be_switched(open_page: Any) -> None:
    page = open_page(pipeline(), timeline(4, 8))
    colour = "getComputedStyle(document.body).backgroundColor"
    canvas = "document.querySelector('canvas').toDataURL()"
    light, painted = page.evaluate(colour), page.evaluate(canvas)
    assert page.inner_text("#theme") == "Dark"
    page.click("#theme")
    page.wait_for_function(f"was => {canvas} !== was", arg=painted)
    assert page.evaluate(colour) != light
    assert page.inner_text("#theme") == "Light"
    page.click("#theme")
    assert page.evaluate(colour) == light


def test_tables_sort(open_page: Any) -> None:
    page = open_page(pipeline())
    column = "#cluster tbody td:nth-child(9)"
    first = shown(page, column)
    page.click("#cluster th button:has-text('Peak memory')")
    assert shown(page, column) == first  # from the largest down, as stages are here
    page.click("#cluster th button:has-text('Peak memory')")
    assert shown(page, column) == first[::-1]
    head = page.locator("#cluster th:has-text('Peak memory')")
    assert head.get_attribute("aria-sort") == "ascending"


def test_it_prints_in_light_colours_without_controls(open_page: Any, tmp_path: Path) -> None:
    page = open_page(pipeline(), scheme="dark", size=(800, 1100))
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible() and not page.locator("#search").is_visible()
    assert not_wider_than_the_window(page)
    page.screenshot(path=tmp_path / "print.png", full_page=True)
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_devices_tell_their_place(open_page: Any) -> None:
    page = open_page(pipeline())
    page.hover("#cluster .cell >> nth=13")  # of the second stage, 2 × 4: the sixth device
    assert page.inner_text("#tip").split("\n") == ["device 13, host 1", "stage 1: x = 1, y = 1"]


def test_memory_of_another_stage(open_page: Any) -> None:
    page = open_page(pipeline())
    label = page.locator("#memory svg").first.get_attribute("aria-label")
    step = page.locator("#memory svg").nth(1).get_attribute("aria-label")
    assert "over the whole step: at most 6.0 GiB" in step  # 3 + 4 micro-batches of ½ + 1
    assert "6.1 GiB" in label and "budget of 7.2 GiB" in label and "activations 3.0 GiB" in label
    page.select_option("#memory-stage", "2")
    assert page.locator("#memory svg >> nth=0").locator("path").count() == 5
    assert "peak 6.1 GiB" in shown(page, "#memory svg text")


# -- what a page must bear


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def hostile_plan() -> ParallelPlan:
    plan = one_mesh(num_layers=1)
    assert plan.details is not None
    strings = tuple(HOSTILE if s == "GPT/layer_0" else s for s in plan.details.ops.strings)
    ops = replace(plan.details.ops, strings=strings)
    uses = tuple(replace(use, module=HOSTILE, reason=HOSTILE) for use in plan.details.parallelism)
    details = replace(plan.details, ops=ops, parallelism=uses)
    return replace(plan, name=HOSTILE, warnings=(HOSTILE,), method=HOSTILE, details=details)


def test_names_are_text_whatever_they_hold(open_page: Any) -> None:
    page = open_page(hostile_plan())
    assert shown(page, "h1") == [HOSTILE]
    assert page.title() == f"{HOSTILE}: parallel plan"
    assert page.locator("img").count() == 0
    page.fill("#search", "owned")
    page.wait_for_function(
        "() => document.querySelector('#model [role=status]').textContent !== ''"
    )
    assert page.title().startswith("</script>")


@pytest.mark.parametrize(
    "plan",
    [
        replace(one_mesh(), details=None, cluster=None),
        replace(one_mesh(), details=None, modules=(), inputs=(), outputs=(), estimated_step_s=0.0),
        one_mesh(num_layers=1, shape=(1, 1)),
        pipeline(num_stages=1, layers_per_stage=1),
        pipeline(num_stages=16, num_micro_batches=2, layers_per_stage=1, shape=(16, 16)),
    ],
    ids=["no details", "almost nothing", "one device", "one stage", "4,096 devices"],
)
def test_plans_of_all_kinds(open_page: Any, plan: ParallelPlan) -> None:
    page = open_page(plan)
    words = page.inner_text("body")
    assert not any(sign in words for sign in ("[object", "NaN", "undefined", "Infinity"))
    assert not_wider_than_the_window(page)


# -- plans beside it, cuts and pins


def test_baselines_stand_beside_the_plan(open_page: Any) -> None:
    plan = one_mesh()
    slow = replace(plan, estimated_step_s=1.5 * plan.estimated_step_s)
    page = open_page(plan, compare={"data parallel": slow, "ZeRO-2": "no sharding fits"})
    text = page.inner_text("#compare")
    assert "data parallel, is predicted to take 1.50 times as long" in text
    assert "no sharding fits" in text
    assert shown(page, "#compare tr.chosen strong") == ["this plan"]
    assert open_page(plan).locator("#compare").count() == 0


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(open_page: Any, size: Any, scheme: str) -> None:
    plan = one_mesh()
    page = open_page(plan, compare={"data parallel": plan}, size=size, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_arrays_are_cut_and_their_pins_are_copied(open_page: Any) -> None:
    page = open_page(one_mesh())
    cut = page.locator("#arrays svg.cut").first
    assert "device" in cut.get_attribute("aria-label")
    assert cut.locator("rect.own").count() == 1
    page.evaluate("copyText = (words) => { window.copied = words; return Promise.resolve(true); }")
    page.locator("#arrays button.pin").first.click()
    path = page.locator("#arrays td.wrap .code").first.inner_text()
    assert page.evaluate("window.copied").startswith(f'"{path}": P(')
    assert page.locator("#arrays button.pin").first.inner_text() == "copied"


def test_modules_have_the_colour_of_their_parallelism(open_page: Any) -> None:
    page = open_page(one_mesh())
    assert page.locator("#model .axis .swatch").count() > 0
    assert "tensor" in page.inner_text("#model .legend >> nth=0")

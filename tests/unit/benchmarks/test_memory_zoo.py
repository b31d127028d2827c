"""The page of the memory benchmark, its cases, and a row without compiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from benchmarks.memory_zoo import __main__ as main
from benchmarks.memory_zoo.__main__ import Limits, in_order, rows_in_time, take_row
from benchmarks.memory_zoo.by_hand import plans_by_hand
from benchmarks.memory_zoo.cases import (
    BUDGET_SHARES,
    DEVELOPMENT,
    HELD_OUT,
    KINDS,
    all_cases,
    budget_cases,
    case_of,
)
from benchmarks.memory_zoo.page import page, ratio, when_made
from benchmarks.memory_zoo.rows import layouts_digest, state_bytes


def row(model: str, held_out: bool, predicted: list[float], xla: list[float]) -> dict:
    return {
        "model": model,
        "kind": "mesh",
        "made": "2030-01-01T00:00:00+00:00",
        "held_out": held_out,
        "meshes": [[8]] * len(xla),
        "predicted_bytes": [p * 2**30 for p in predicted],
        "xla_bytes": [x * 2**30 for x in xla],
    }


def test_the_page_counts_and_names_the_worst() -> None:
    rows = [
        row("a", False, [1.0], [1.0]),
        row("b", False, [0.8, 1.0], [1.0, 1.0]),
        row("c", True, [1.2], [1.0]),
        row("e", True, [150.0], [100.0]),
        {"model": "d", "kind": "mesh", "error": "PlanningError: no | plan\nmore"},
    ]
    text = page(rows)
    assert "- all plans: 1 of 3 within 10%, 1 below 0.85" in text
    assert "- held out: 0 of 1 within 10%, 0 below 0.85" in text
    assert "- the worst: b (mesh) 0.80, c (mesh) 1.20, a (mesh) 1.00" in text
    assert "| b | mesh | 8, 8 | 0.80, 1.00 | 1.00, 1.00 | 0.80, 1.00 |" in text
    assert text.index("| b |") < text.index("## Held out") < text.index("| c |")
    assert "- e, mesh: 150.00 of 100.00 GiB, 1.50" in text and "| e |" not in text
    assert "- d, mesh: PlanningError: no \\| plan" in text
    assert ratio(rows[1]) == pytest.approx(0.8)
    assert "Without a row" not in text
    assert "Without a row, new or with other layouts than before: f (one), g (mesh).\n" in page(
        rows, missing=["f (one)", "g (mesh)"]
    )


def test_the_page_names_the_commits_that_made_the_predictions() -> None:
    former = row("a", False, [1.0], [1.0])
    compiled = {**former, "commit": "0123456789+"}
    again = {**compiled, "predicted_commit": "fedcba987654"}
    text = page([former, compiled, again, again])
    assert "- Predicted: 2 by `fedcba98`, 1 by an unknown commit, 1 by `01234567+`.\n" in text


def test_every_case_is_one_of_a_kind() -> None:
    cases = list(all_cases())
    assert len(cases) >= 40 and len(set(cases)) == len(cases)
    assert {case.kind for case in cases} <= set(KINDS)
    assert {case.model for case in cases if case.held_out} == set(HELD_OUT)
    assert DEVELOPMENT.keys().isdisjoint(HELD_OUT)
    stages = [case for case in cases if "stages" in case.kind]
    assert len(stages) >= 6 and {case.held_out for case in stages} == {True, False}
    assert {case.kind for case in stages if "scanned" in case.model} == {
        "stages",
        "recomputed stages",
    }
    assert case_of("gpt", "one").num_devices == 1 and case_of("gpt", "mesh").num_devices == 8


def test_plans_to_a_budget_are_of_every_share_and_kind() -> None:
    cases = list(budget_cases())
    assert len(cases) >= 30 and len(set(cases)) == len(cases)
    assert {share for _, share in cases} == set(BUDGET_SHARES)
    assert {case.kind for case, _ in cases} == {"mesh", "one", "stages"}


def test_rows_come_in_the_order_of_the_cases() -> None:
    first, second, *_ = all_cases()
    rows: dict = {("former", "mesh"): {"model": "former"}}
    take_row(rows, second, row("b", False, [1.0], [1.0]), predicts=False)
    take_row(rows, first, row("a", False, [1.0], [1.0]), predicts=False)
    assert [r["model"] for r in in_order(rows)] == ["a", "b", "former"]


def test_a_model_that_was_studied_since_is_no_longer_held_out() -> None:
    case = next(case for case in all_cases() if not case.held_out)
    rows = {(case.model, case.kind): row(case.model, True, [1.0], [1.0])}
    assert [r["held_out"] for r in in_order(rows)] == [False]


def test_a_new_prediction_keeps_xlas_figure_while_layouts_stay() -> None:
    case = next(all_cases())
    key = (case.model, case.kind)
    known = {**row("a", False, [1.0], [2.0]), "layouts": "one"}
    rows = {key: known}
    again = {"layouts": "one", "predicted_bytes": [3.0], "made": "later", "commit": "abc"}
    take_row(rows, case, again, predicts=True)
    predicted = {"predicted_bytes": [3.0], "predicted": "later", "predicted_commit": "abc"}
    assert rows[key] == {**known, **predicted}
    take_row(rows, case, {"layouts": "two", "predicted_bytes": [3.0]}, predicts=True)
    assert key not in rows


def test_equal_layouts_have_equal_digests() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    arguments = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")

    def digest(method: Any) -> str:
        return layouts_digest(autopar.plan(step, *arguments, cluster=cluster, method=method))

    data = digest(autopar.DataParallel())
    assert data == digest(autopar.DataParallel()) != digest(autopar.Zero3Parallel())


def test_what_the_limit_ends_has_no_row_and_what_fails_has_one() -> None:
    limits = Limits(1e6, 1e6, num_jobs=2)

    def row_of(name: str, limit_s: float) -> dict[str, Any]:
        assert 0 < limit_s <= 1e6
        if name == "long":
            limits.end = 0.0
            return {"error": "no plan within the limit"}
        return {"error": "too large"} if name == "fails" else {"name": name}

    rows = dict(rows_in_time(["a", "fails"], row_of, limits))
    assert rows == {"a": {"name": "a"}, "fails": {"error": "too large"}}
    limits.num_jobs = 1
    assert dict(rows_in_time(["b", "long", "never"], row_of, limits)) == {"b": {"name": "b"}}


def test_the_page_marks_rows_of_the_former_products_and_shows_budgets() -> None:
    new, former = row("a", False, [1.0], [1.0]), row("b", False, [1.0], [1.0])
    del former["made"]
    assert "†" not in page([new])
    text = page([new, former])
    assert "| b † |" in text and "| a |" in text and "Rows with †" in text
    about = {"model": "a", "kind": "one", "budget_bytes": 2.0 * 2**30}
    budgets = [
        {**about, "share": 0.6, "predicted_bytes": 1.5 * 2**30, "xla_bytes": 1.75 * 2**30,
         "within": True, "replanned": 1},
        {**about, "share": 0.7, "refused": "nothing fits"},
        {"model": "a", "kind": "one", "share": 0.8, "error": "PlanningError: no plan"},
    ]  # fmt: skip
    text = page([new], budgets)
    assert "3 plans to a budget: 1 within, 0 over, " in text
    assert "1 refused and not compared, 1 failed." in text
    assert "Compiled: 3 on an unknown day." in text
    assert "| a | one | 0.6 | 2.00 | 1.50 | 1.75 | within, planned 2 times |" in text
    assert "| a | one | 0.7 | 2.00 | – | – | refused |" in text
    assert "| a | one | 0.8 | – | – | – | PlanningError: no plan |" in text


def test_the_page_says_when_rows_were_made() -> None:
    days = [("2026-11-18T11:31:06", "0.11.2"), ("2026-11-19T05:30:22", "0.12.0")]
    rows = [{**row("a", False, [1.0], [1.0]), "made": day, "jax": jax} for day, jax in days]
    said = "Compiled: 2 on 2026-11-19 by JAX 0.12.0, 1 on 2026-11-18 by JAX 0.11.2."
    assert when_made([*rows, rows[1]]) == said
    assert f"- {said}" in page([*rows, rows[1]])


def test_refusals_are_judged_by_the_state_and_by_plans_written_by_hand() -> None:
    gib = 2.0**30
    about = {"model": "a", "kind": "one", "budget_bytes": 2 * gib, "refused": "nothing fits"}
    by_hand = {"jax.jit": 4.0 * gib, "all layers recomputed": 3.0 * gib}
    rows = [
        {**about, "share": 0.6, "state_bytes": 2.5 * gib},
        {**about, "share": 0.7, "state_bytes": gib, "by_hand": by_hand},
        {**about, "share": 0.8, "state_bytes": gib, "by_hand": {**by_hand, "jax.jit": 1.9 * gib}},
        {**about, "share": 0.9, "state_bytes": gib, "not_by_hand": {"error": "too long"}},
    ]
    text = page([row("a", False, [1.0], [1.0])], rows)
    assert (
        "4 plans to a budget: 0 within, 0 over, 2 refused where nothing fits, 1 refused although a "
        "plan written by hand fits, 1 refused and not compared." in text
    )
    assert "| refused: the state alone takes 2.50 GiB |" in text
    assert "| refused; the smallest by hand: all layers recomputed, 3.00 GiB |" in text
    assert "| refused; although this fits: jax.jit, 1.90 GiB |" in text


def test_plans_by_hand_are_of_the_kind_that_was_refused() -> None:
    def plans(model: str, kind: str) -> list[str]:
        return [what for what, _ in plans_by_hand(case_of(model, kind))]

    assert plans("llama", "one") == [
        "jax.jit",
        "jax.jit, jax.checkpoint around each layer",
        "all layers recomputed",
        "all layers recomputed, 2 micro-batches",
    ]
    assert plans("vit", "stages") == ["all layers recomputed, 4 micro-batches"]
    assert plans("t5", "mesh") == [
        "all layers recomputed",
        "all layers recomputed, 32 micro-batches",
    ]


def test_the_state_of_a_step_is_counted_in_bytes() -> None:
    state = {"w": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), "n": jnp.zeros(()), "name": "a"}
    assert state_bytes(state, 4) == (4 * 8 * 2 + 4) / 4


def test_budgets_are_made_anew_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple] = []

    def in_a_process(model: str, kind: str, share: float, limit_s: float) -> dict[str, Any]:
        made.append((model, kind, share))
        about = {"model": model, "kind": kind, "share": share, "made": f"{len(made):03}"}
        return {**about, "within": True}

    monkeypatch.setattr(main, "budget_in_a_process", in_a_process)
    path = tmp_path / "budgets.json"

    def run(anew: bool) -> list[tuple]:
        made.clear()
        main.run_budgets(path, Limits(1e6, 1e6, 1), lambda case: case.model == "vit", anew)
        return list(made)

    of_vit = [(c.model, c.kind, share) for c, share in budget_cases() if c.model == "vit"]
    assert run(False) == of_vit and run(False) == [] and sorted(run(True)) == sorted(of_vit)
    rows = main.read_budgets(path)
    assert [(row["model"], row["kind"], row["share"]) for row in rows] == of_vit
    assert f"{len(of_vit)} plans to a budget: {len(of_vit)} within" in capsys.readouterr().out

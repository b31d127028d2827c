"""How well predictions hold, on rows whose answer is known."""

import pytest

from benchmarks.accuracy_tables import one_gpu_text, plan_line, summary, summary_text


def row(mesh, measured, good, bad, chosen_by=()):
    def figures(seconds):
        return {"step_s": seconds, "compute_s": seconds, "communication_s": 0.0}

    return {
        "model": "gpt",
        "label": "gpt, batch 8",
        "mesh": mesh,
        "chosen_by": list(chosen_by),
        "step_s": measured,
        "spread": 0.01,
        "predicted": {"good": figures(good), "bad": figures(bad)},
        "predicted_bytes": 90.0,
        "xla_bytes": 100.0,
    }


ROWS = [
    row([8], 1.0, 0.5, 4.0, ["good"]),
    row([8], 2.0, 1.0, 3.0),
    row([2, 4], 3.0, 1.5, 2.0),
    row([2, 4], 4.0, 2.0, 1.0, ["bad"]),
]


def test_order_ratio_and_regret():
    found = summary(ROWS)
    good, bad = found["by"]["good"], found["by"]["bad"]
    assert good["rank_correlation"] == pytest.approx(1)
    assert bad["rank_correlation"] == pytest.approx(-1)
    assert good["by_mesh"] == {"2x4": pytest.approx(1), "8": pytest.approx(1)}
    assert good["ratio"] == pytest.approx(0.5) and good["off"] == pytest.approx(0, abs=1e-9)
    assert (good["regret"], bad["regret"]) == (1.0, 4.0)
    assert bad["regret_of_best_predicted"] == 4.0
    assert found["memory_ratio"] == [0.9, 0.9, 0.9] and found["num_plans"] == 4


def test_a_cost_model_that_chose_none_has_no_regret_of_its_own():
    assert summary(ROWS[1:3])["by"]["good"]["regret"] is None


def test_text_says_the_figures():
    text = summary_text("gpt", summary(ROWS))
    assert "4 plans" in text and "rank correlation 1.000" in text and "300.0% above" in text
    assert "chosen by good" in plan_line(ROWS[0]) and "chosen" not in plan_line(ROWS[1])
    assert "0.500" in one_gpu_text(ROWS) and "0.900" in one_gpu_text(ROWS)

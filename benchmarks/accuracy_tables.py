"""How accurate predictions are: from rows of predicted and measured plans to figures and text.

A row has `step_s` and `predicted`: for each cost model its `step_s`, `compute_s` and
`communication_s`; `chosen_by` names the cost models that choose this plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import exp, log
from typing import Any

import autopar
from autopar.measure.ranking import rank_correlation

GIB = 2**30
Row = dict[str, Any]


def figures(plan: autopar.ParallelPlan) -> dict[str, float]:
    """What a plan predicts, as rows have it."""
    return {
        "step_s": plan.estimated_step_s,
        "compute_s": sum(module.compute_s for module in plan.modules),
        "communication_s": sum(module.communication_s for module in plan.modules),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures over all plans of one model. `off` is the error of predictions after removing their
    mean ratio to measurements: the standard deviation of the log ratio."""
    fastest = min(row["step_s"] for row in rows)
    memory = [row["predicted_bytes"] / row["xla_bytes"] for row in rows]
    return {
        "num_plans": len(rows),
        "fastest_s": fastest,
        "slowest_s": max(row["step_s"] for row in rows),
        "spread": statistics.median(row["spread"] for row in rows),
        "memory_ratio": [min(memory), statistics.median(memory), max(memory)],
        "memory_correlation": rank_correlation(
            [row["predicted_bytes"] for row in rows], [row["xla_bytes"] for row in rows]
        ),
        "by": {name: _of_cost_model(rows, name, fastest) for name in rows[0]["predicted"]},
    }


def _of_cost_model(rows: Sequence[Row], name: str, fastest: float) -> dict[str, Any]:
    predicted = [row["predicted"][name]["step_s"] for row in rows]
    measured = [row["step_s"] for row in rows]
    ratios = [log(p / m) for p, m in zip(predicted, measured, strict=True)]
    meshes = {tuple(row["mesh"]) for row in rows}
    chosen = [row for row in rows if name in row["chosen_by"]]
    best = rows[predicted.index(min(predicted))]
    return {
        "rank_correlation": rank_correlation(predicted, measured),
        "by_mesh": {
            "x".join(map(str, mesh)): _correlation_on(rows, name, mesh) for mesh in sorted(meshes)
        },
        "ratio": exp(statistics.mean(ratios)),
        "off": statistics.pstdev(ratios),
        "regret": chosen[0]["step_s"] / fastest if chosen else None,
        "regret_of_best_predicted": best["step_s"] / fastest,
    }


def _correlation_on(rows: Sequence[Row], name: str, mesh: tuple[int, ...]) -> float:
    here = [row for row in rows if tuple(row["mesh"]) == mesh]
    predicted = [row["predicted"][name]["step_s"] for row in here]
    return rank_correlation(predicted, [row["step_s"] for row in here])


def plan_line(row: Row) -> str:
    mesh = "×".join(map(str, row["mesh"]))
    predicted = "  ".join(
        f"{name} {1e3 * costs['step_s']:7.1f} ({1e3 * costs['communication_s']:6.1f} sent)"
        for name, costs in row["predicted"].items()
    )
    memory = f"{row['predicted_bytes'] / 2**20:6.1f} / {row['xla_bytes'] / 2**20:6.1f} MiB"
    chosen = f"  chosen by {', '.join(row['chosen_by'])}" if row["chosen_by"] else ""
    return (
        f"{row['model']:5s} {mesh:5s} {1e3 * row['step_s']:7.1f} ms ± {row['spread']:5.1%}  "
        f"{predicted}  {memory}{chosen}"
    )


def summary_text(name: str, figures: dict[str, Any]) -> str:
    low, middle, high = figures["memory_ratio"]
    lines = [
        f"{name}: {figures['num_plans']} plans, {1e3 * figures['fastest_s']:.1f} to "
        f"{1e3 * figures['slowest_s']:.1f} ms, spread {figures['spread']:.1%}; memory predicted / "
        f"XLA {low:.2f} to {high:.2f}, median {middle:.2f}"
    ]
    for model, errors in figures["by"].items():
        regret = "–" if errors["regret"] is None else f"{errors['regret'] - 1:.1%}"
        meshes = ", ".join(f"{mesh} {value:.2f}" for mesh, value in errors["by_mesh"].items())
        lines.append(
            f"  {model:9s} rank correlation {errors['rank_correlation']:.3f} ({meshes}); "
            f"predicted / measured {errors['ratio']:.2f} ± {errors['off']:.1%}; "
            f"its plan is {regret} above the fastest, "
            f"the best predicted {errors['regret_of_best_predicted'] - 1:.1%}"
        )
    return "\n".join(lines)


def one_gpu_text(rows: Sequence[Row]) -> str:
    names = list(rows[0]["predicted"])
    head = f"{'predicted / measured':55s} {'step':>9s} {'spread':>7s}"
    lines = [head + "".join(f" {name:>10s}" for name in names) + "  memory      XLA's"]
    for row in rows:
        ratios = (row["predicted"][name]["step_s"] / row["step_s"] for name in names)
        memory = row["predicted_bytes"] / row["xla_bytes"]
        spread = "" if row["spread"] is None else f"{row['spread']:.1%}"
        lines.append(
            f"{row['label']:55s} {1e3 * row['step_s']:6.1f} ms {spread:>7s}"
            + "".join(f" {ratio:10.3f}" for ratio in ratios)
            + f"  {memory:6.3f} {row['xla_bytes'] / GIB:6.2f} GiB"
        )
    return "\n".join(lines)

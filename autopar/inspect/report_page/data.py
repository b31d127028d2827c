"""The data of a page: from a `ParallelPlan` and a measured `Timeline` to JSON values.

The scripts know these names (`head`, `cluster`, `stages` …). Tables of many rows come from
`model.py` (modules, operators, arrays) and `charts.py` (timelines, memory, collectives).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any

from autopar.inspect.breakdown import mesh_plans
from autopar.inspect.explain import costs_text, judged_sentences
from autopar.inspect.memory_text import found_sentences, freeing_sentences, host_sentences
from autopar.inspect.report_page.charts import (
    breakdown,
    collective_data,
    memory_data,
    timeline_data,
)
from autopar.inspect.report_page.compare import compare_data
from autopar.inspect.report_page.encode import Texts, run_text, runs, short
from autopar.inspect.report_page.headline import Headline, headline_of
from autopar.inspect.report_page.layer_timeline import layer_timeline
from autopar.inspect.report_page.model import array_rows, model_data
from autopar.inspect.report_page.search import search_data
from autopar.ir.plan import ParallelPlan, StagePlan
from autopar.ir.text import layer_names
from autopar.ir.timeline import Timeline

PAGE_VERSION = 1


def page_data(
    plan: ParallelPlan,
    measured: Timeline | None = None,
    compare: Mapping[str, ParallelPlan | str] | None = None,
) -> dict[str, Any]:
    """Texts that occur often are indices into `texts`."""
    texts = Texts()
    headline = headline_of(plan)
    data: dict[str, Any] = {
        "version": PAGE_VERSION,
        "head": _head(plan, headline),
        "cluster": _cluster(plan),
        "stages": [_stage(plan, n) for n in range(plan.num_stages)],
        "model": model_data(plan, texts),
        "arrays": array_rows(plan),
        "timelines": [],
        "memory": memory_data(plan, texts),
        "collectives": collective_data(plan, texts),
        "breakdown": breakdown(plan),
        "search": search_data(plan),
        "solver": _solver(plan),
        "compare": compare_data(plan, compare or {}),
    }
    predicted = layer_timeline(plan, headline.predicted)
    for title, timeline in (("predicted", predicted), ("measured", measured)):
        if timeline is not None and timeline.events:
            data["timelines"].append({"title": title, **timeline_data(timeline, texts)})
    data["texts"] = texts.all()
    return data


def _head(plan: ParallelPlan, headline: Headline) -> dict[str, Any]:
    budget = min((p.memory_budget_bytes for p in mesh_plans(plan)), default=inf)
    return {
        "name": plan.name,
        "method": plan.asked or plan.method,
        "device": plan.device,
        "pipeline": plan.is_pipeline,
        "devices": headline.num_devices,
        "mesh": list(plan.mesh_shape),
        "axes": list(plan.axis_names),
        "micro_batches": plan.num_micro_batches,
        "schedule": plan.schedule,
        "step_s": short(plan.estimated_step_s),
        "rows": headline.batch_rows,
        "model_rate": short(headline.model_rate),
        "computed_rate": short(headline.computed_rate),
        "peak_rate": short(headline.peak_rate),
        "peak_bytes": short(plan.estimated_peak_bytes),
        "budget_bytes": short(budget),
        "communication_bytes": short(plan.communication_bytes),
        "bubble": short(headline.bubble),
        "limits": [
            *headline.limits,
            *judged_sentences(plan),
            *host_sentences(plan),
            *found_sentences(plan),
            *freeing_sentences(plan),
        ],
        "warnings": list(plan.warnings),
        "remat": layer_names(plan.remat),
        "pinned": [list(pin) for pin in plan.pinned],
        "unpinned_step_s": None if plan.unpinned_step_s is None else short(plan.unpinned_step_s),
        "jax": plan.fingerprint.jax_version,
        "program": plan.fingerprint.program[:12],
    }


def _cluster(plan: ParallelPlan) -> dict[str, Any]:
    cluster = plan.cluster
    if cluster is None:  # the user gave a mesh, not a cluster
        return {"hosts": 1, "per_host": plan.num_devices, "device": None}
    device = {
        key: value if value is None or isinstance(value, str) else short(value)
        for key, value in asdict(cluster.spec).items()
    }
    return {
        "hosts": cluster.num_hosts,
        "per_host": cluster.devices_per_host,
        "device": device,
        "costs": costs_text(plan),
    }


def _stage(plan: ParallelPlan, number: int) -> dict[str, Any]:
    stage = plan.stages[number]
    mesh_plan = stage.plan or plan
    return {
        "mesh": stage.mesh,
        "layers": layer_names(plan.layers[slice(*stage.layers)]),
        "num_layers": stage.layers[1] - stage.layers[0] if plan.layers else 0,
        "submesh": list(stage.submesh),
        "shape": list(mesh_plan.mesh_shape),
        "axes": list(mesh_plan.axis_names),
        "devices": runs(_devices(plan, stage)),
        "device_text": run_text(_devices(plan, stage)),
        "forward_s": short(stage.forward_s),
        "backward_s": short(stage.backward_s),
        "once_s": short(stage.once_s),
        "transfer_s": short(stage.transfer_s),
        "peak_bytes": short(mesh_plan.estimated_peak_bytes),
        "budget_bytes": short(mesh_plan.memory_budget_bytes),
        "remat": stage.remat or bool(mesh_plan.remat),
        "gap": short(mesh_plan.solver.gap),
    }


def _devices(plan: ParallelPlan, stage: StagePlan) -> tuple[int, ...]:
    return stage.devices or tuple(range((stage.plan or plan).num_devices))


def _solver(plan: ParallelPlan) -> dict[str, Any]:
    solver = plan.solver
    return {
        "objective": short(solver.objective, 6),
        "lower_bound": short(solver.lower_bound, 6),
        "gap": short(solver.gap),
        "sizes": dict(solver.sizes),
        "seconds": {name: short(value) for name, value in solver.seconds.items()},
        "unbounded": [short(value) for value in solver.unbounded],
    }

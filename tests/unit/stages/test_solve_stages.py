"""Stages of a pipeline: what equal ones share, and which of them must be solved well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import MemoryBudgetError
from autopar.rewrite.step_source import StepSource
from autopar.sharding import plan_mesh
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import stage_plans
from autopar.stages.looped import LoopedStep, StageSpec, find_looped
from autopar.stages.pipeline_task import PipelineTask
from autopar.stages.solve_pipeline import pipeline_gap
from autopar.stages.solve_stages import _enough, solve_stages
from autopar.tracer.trace import StepOptions

CLUSTER = autopar.ClusterSpec(4, 2, "v100", memory_bytes=1e9, host_bandwidth=1e8)
SPECS = [StageSpec((k, k + 1), (1, 2), (2,)) for k in range(4)]


def step_of(layer: Any):
    def train_step(weights: Any, batch: Any) -> tuple[Any, Any]:
        def loss(weights: Any) -> Any:
            x = batch["x"]
            for weight in weights:
                x = layer(weight, x)
            return jnp.mean(x)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return train_step


def looped_of(layer: Any) -> LoopedStep:
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    source = StepSource.of(step_of(layer), (weights, batch), {}, StepOptions())
    return find_looped(source.as_loop(4), autopar.AutoLayers(4))


def task(schedule: str = "gpipe", **options: Any) -> PipelineTask:
    method = autopar.PipeshardParallel(
        4, schedule=schedule, options=autopar.ShardingOptions(**options)
    )
    return PipelineTask(method, CLUSTER, PlanningLog())


@pytest.fixture(scope="module")
def looped() -> LoopedStep:
    return looped_of(lambda w, x: jnp.tanh(x @ w))


def test_equal_stages_are_solved_once(looped, monkeypatch) -> None:
    """In gpipe all stages keep as many micro-batches: the two in the middle are one problem."""
    names = []
    solve = stage_plans.solve_mesh

    def counted(problem: Any, log: Any) -> Any:
        names.append(problem.step.name)
        return solve(problem, log)

    monkeypatch.setattr(stage_plans, "solve_mesh", counted)
    shared = task()
    stages = solve_stages(shared, looped, list(SPECS))
    assert len(names) == 3
    first, second = stages.solved[1], stages.solved[2]
    assert first.costs is second.costs
    assert first.plan.program == second.plan.program
    assert [t.path for t in first.plan.inputs] != [t.path for t in second.plan.inputs]
    solve_stages(shared, looped, list(SPECS))  # another pipeline with the same stages
    assert len(names) == 3
    for k in (1, 2):  # as if each were solved by itself
        alone = solve_stages(task(), looped, list(SPECS)).solved[k].plan
        assert alone.program == stages.solved[k].plan.program
        found = stages.solved[k].plan.inputs
        assert [t.layout for t in alone.inputs] == [t.layout for t in found]


def test_equal_stages_share_the_layouts_on_their_programs(looped, monkeypatch) -> None:
    assigned = []
    assign = plan_mesh.assign_layouts

    def counted(*args: Any, **options: Any) -> Any:
        assigned.append(assign(*args, **options))
        return assigned[-1]

    monkeypatch.setattr(plan_mesh, "assign_layouts", counted)
    shared = solve_stages(task(), looped, list(SPECS)).solved
    assert len(assigned) == 3
    monkeypatch.setattr(stage_plans, "_known_layouts", lambda *_: None)
    alone = solve_stages(task(), looped, list(SPECS)).solved
    assert len(assigned) == 7
    assert [s.plan.program for s in shared] == [s.plan.program for s in alone]


@pytest.mark.parametrize("share", [None, 0.9])
def test_a_stage_takes_what_fits_an_equal_one_that_keeps_more(looped, monkeypatch, share) -> None:
    """In 1f1b, the second of the two in the middle keeps one micro-batch less."""
    names = []
    solve = stage_plans.solve_mesh

    def counted(problem: Any, log: Any) -> Any:
        names.append(problem.step.name)
        return solve(problem, log)

    options = {}
    if share is not None:
        first = solve_stages(task("1f1b"), looped, list(SPECS)).solved[1]
        options = {"memory_budget_bytes": share * first.plan.estimated_peak_bytes}
    monkeypatch.setattr(stage_plans, "solve_mesh", counted)
    specs = [replace(spec, submesh=(1, 2), mesh_shape=(2,)) for spec in SPECS]
    try:
        shared = solve_stages(task("1f1b", **options), looped, specs)
    except MemoryBudgetError:
        pytest.skip("a stage at the ends does not fit")
    one, other = shared.solved[1], shared.solved[2]
    assert one.objective == pytest.approx(max(s.objective for s in (one, other)))
    assert other.lower_bound <= other.objective
    if share is None:
        assert len(names) == 3
    monkeypatch.setattr(stage_plans, "_known_to_fit", lambda *_: None)
    alone = solve_stages(task("1f1b", **options), looped, specs)
    assert pipeline_gap(shared.solved, 4) >= 0
    for mine, own in zip(shared.solved, alone.solved, strict=True):
        assert own.objective <= mine.objective <= max(s.objective for s in alone.solved) * 1.005
        assert mine.lower_bound <= own.objective * (1 + 1e-9)


@pytest.mark.parametrize("is_late", [False, True])
def test_past_the_deadline_a_stage_takes_what_fits_an_equal_one(
    looped, monkeypatch, is_late: bool
) -> None:
    """Though it could be better: there is no time to look for that."""
    names = []
    solve = stage_plans.solve_mesh

    def counted(problem: Any, log: Any) -> Any:
        names.append(problem.step.name)
        return solve(problem, log)

    monkeypatch.setattr(stage_plans, "solve_mesh", counted)
    monkeypatch.setattr(stage_plans, "is_good", lambda *_: False)
    pipeline = task("1f1b")
    if is_late:
        pipeline.log.deadline.interrupt()
    solved = solve_stages(pipeline, looped, list(SPECS)).solved
    assert len(names) == (3 if is_late else 4)
    assert all(stage.lower_bound <= stage.objective for stage in solved)


def test_what_is_asked_of_a_stage_by_name_is_not_shared(looped, monkeypatch) -> None:
    names = []
    solve = stage_plans.solve_mesh
    monkeypatch.setattr(
        stage_plans,
        "solve_mesh",
        lambda problem, log: names.append(problem.step.name) or solve(problem, log),
    )
    pinned = task(pins={"weights[2]": jax.sharding.PartitionSpec("x")})
    solve_stages(pinned, looped, list(SPECS))
    assert len(names) == 4


def test_a_stage_that_did_not_fit_is_not_tried_again(looped, monkeypatch) -> None:
    tight = task(memory_budget_bytes=10_000, remat="none")
    with pytest.raises(MemoryBudgetError) as first:
        solve_stages(tight, looped, list(SPECS))
    (misfit,) = tight.misfits
    assert misfit.spec in SPECS
    assert misfit.peak_bytes == first.value.peak_bytes > 10_000
    monkeypatch.setattr(stage_plans, "solve_mesh", lambda *_: pytest.fail("was solved again"))
    with pytest.raises(MemoryBudgetError) as again:
        solve_stages(tight, looped, list(SPECS))
    assert str(again.value) == str(first.value)


def test_layers_that_free_nothing_are_not_recomputed() -> None:
    """`jax.checkpoint` leaves nothing to free, so the stages are cut once."""

    @jax.checkpoint
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    looped = looped_of(layer)
    assert not looped.worth_recomputing(range(3))
    tight = task(memory_budget_bytes=10_000)
    with pytest.raises(MemoryBudgetError):
        solve_stages(tight, looped, list(SPECS))
    assert len(tight.cuts) == 1
    assert not tight.misfits[0].spec.remat


def test_the_first_stage_must_be_solved_well(looped) -> None:
    assert _enough((), 4, 16) is None
    stages = solve_stages(task(), looped, list(SPECS))
    enough = _enough(stages.solved, 4, 16)
    assert enough is not None
    assert enough.cost == max(stage.objective for stage in stages.solved)
    few = _enough(stages.solved, 4, 1)
    assert few is not None
    assert few.gap < enough.gap  # with one micro-batch, every stage counts as much

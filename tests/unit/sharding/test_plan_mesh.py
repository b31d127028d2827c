"""Planning on one mesh: operators whose rules failed, and the floor of a step's memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import PlanningError
from autopar.ir.failures import Failure
from autopar.ir.graph import Unruled
from autopar.methods import ShardParallel
from autopar.sharding import plan_mesh
from autopar.sharding.budget import GOOD_GAP
from autopar.sharding.plan_mesh import ShardingTask, peak_floor
from autopar.sharding.planning_log import PlanningLog
from autopar.tracer import known_graphs
from autopar.tracer.build import BuiltGraph
from autopar.tracer.trace_step import trace_step
from examples.models import build

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
CLUSTER = autopar.ClusterSpec(1, 4, "a100-sxm")
FAILURE = Failure.of("the rule of dot_general", IndexError("tuple index out of range"))


def product(x: Any, y: Any) -> Any:
    return jnp.tanh(x @ y)


@pytest.fixture
def share_without_rules(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Graphs in which this share of the flops has no rule, for a failure."""
    build = known_graphs.build

    def built(*args: Any) -> BuiltGraph:
        made = build(*args)
        graph = made.graph
        flops = request.param * sum(node.weight * node.flops for node in graph.nodes)
        unruled = Unruled("dot_general", "model.py:3", "runs replicated", 1, flops, FAILURE)
        return replace(made, graph=replace(graph, unruled=(unruled,)))

    monkeypatch.setattr(known_graphs, "build", built)


@pytest.mark.usefixtures("share_without_rules")
@pytest.mark.parametrize("share_without_rules", [0.09], indirect=True)
def test_a_little_work_without_rules_is_a_warning() -> None:
    (warning,) = autopar.plan(product, X, X, cluster=CLUSTER, method=ShardParallel()).warnings
    assert warning == (
        "1 × dot_general at model.py:3 runs replicated: IndexError: tuple index out of range"
    )


@pytest.mark.usefixtures("share_without_rules")
@pytest.mark.parametrize("share_without_rules", [0.11], indirect=True)
@pytest.mark.parametrize("method", [ShardParallel(), autopar.AutoParallel()])
def test_much_work_without_rules_is_an_error(method: Any) -> None:
    with pytest.raises(PlanningError, match="11% of the step's flops would run") as error:
        autopar.plan(product, X, X, cluster=CLUSTER, method=method)
    assert "the rule of dot_general: IndexError: tuple index out of range" in str(error.value)


def test_no_plan_is_below_the_floor() -> None:
    step = trace_step(product, (X, X))
    floor = peak_floor(ShardingTask(step, CLUSTER, ShardParallel()), PlanningLog())
    assert floor >= 3 * 64 * 64 * 4 / 4  # both operands and the result, divided evenly
    method = ShardParallel(options=autopar.ShardingOptions(memory_budget_bytes=floor))
    try:
        peak = autopar.plan(product, X, X, cluster=CLUSTER, method=method).estimated_peak_bytes
    except autopar.MemoryBudgetError as error:
        peak = error.peak_bytes
    assert peak >= floor


def test_memory_depends_on_how_fast_the_device_computes() -> None:
    """For an H200, XLA keeps a float32 tanh that it computes again on an H100. Of the last layer's,
    the gradient takes over the buffer, so there are more layers than that one."""

    def step(w, x):
        def loss_of(w):
            return jnp.sum(jax.nn.gelu(jax.nn.gelu(jax.nn.gelu(x @ w) @ w) @ w))

        return w - jax.grad(loss_of)(w)

    arguments = jax.ShapeDtypeStruct((64, 64), "float32"), X
    h100, h200 = (
        autopar.plan(step, *arguments, cluster=autopar.ClusterSpec(1, 1, name))
        for name in ("h100-sxm", "h200-sxm")
    )
    assert h200.estimated_peak_bytes > h100.estimated_peak_bytes


@pytest.mark.parametrize("share", [None, pytest.param(0.8, marks=pytest.mark.ci)])
def test_meshes_that_were_not_solved_to_the_end_are_solved_when_they_matter(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a budget that the best mesh does not keep: the plan is the same, however
    early meshes are given up."""
    example = build("gpt-tiny")
    step = example.train_step, example.abstract_state(), example.abstract_batch()
    free = autopar.plan(*step, cluster=CLUSTER, method=ShardParallel())
    budget = None if share is None else int(share * free.estimated_peak_bytes)
    options = autopar.ShardingOptions(memory_budget_bytes=budget, remat="none")
    plans = []
    for same in (plan_mesh._SAME, 1.0):  # every mesh but the first is given up at once
        monkeypatch.setattr(plan_mesh, "_SAME", same)
        plans.append(autopar.plan(*step, cluster=CLUSTER, method=ShardParallel(options=options)))
    exact, rough = plans
    assert rough.estimated_step_s == pytest.approx(exact.estimated_step_s, rel=GOOD_GAP)
    assert rough.solver.gap == pytest.approx(exact.solver.gap, abs=GOOD_GAP)


def test_a_mesh_is_not_solved_again_without_time_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """First solves were given up, and took long even so."""
    example = build("gpt-tiny")
    step = example.train_step, example.abstract_state(), example.abstract_batch()
    free = autopar.plan(*step, cluster=CLUSTER, method=ShardParallel())
    options = autopar.ShardingOptions(
        memory_budget_bytes=int(0.8 * free.estimated_peak_bytes),
        remat="none",
        planning_time_s=1000,
    )
    solve = plan_mesh._sharding_on
    meshes = []

    def slow(mesh: Any, *args: Any) -> Any:
        meshes.append(mesh)
        sharding = solve(mesh, *args)
        stats = replace(sharding.stats, seconds={"solve": 1000.0})
        return replace(sharding, stats=stats, is_rough=meshes.count(mesh) == 1)

    monkeypatch.setattr(plan_mesh, "_sharding_on", slow)
    monkeypatch.setattr(plan_mesh, "GOOD_GAP", -inf)  # no mesh is good enough
    plan = autopar.plan(*step, cluster=CLUSTER, method=ShardParallel(options=options))
    assert len(meshes) == len(set(meshes)) + 1  # the best, for which there is always time
    assert plan.solver.stopped is not None and "memory makes slower" in plan.solver.stopped


@pytest.mark.parametrize(("axis_costs", "shape"), [({1: 2.0, 2: 1.0}, (2, 2)), ({1: 1.0}, (4,))])
def test_past_the_deadline_the_mesh_is_solved_that_tables_found_best(
    axis_costs: dict[int, float], shape: tuple[int, ...]
) -> None:
    log = PlanningLog(axis_costs=axis_costs)
    log.deadline.interrupt()
    step = trace_step(product, (X, X))
    planned = plan_mesh.plan_mesh(ShardingTask(step, CLUSTER, ShardParallel()), log)
    assert planned.plan.mesh_shape == shape
    assert log.deadline.left_out

"""The default method: when it looks for a pipeline at all, and what it says if it does not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import MemoryBudgetError
from autopar.ir.stages import SearchReport
from autopar.ir.xla_options import LATENCY_HIDING
from autopar.lower.planned_step import PlannedStep
from autopar.rewrite.step_source import StepSource
from autopar.sharding.memory_limits import memory_by_rows
from autopar.sharding.plan_whole import WholeStep
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import auto, auto_task, plan_pipeline
from autopar.tracer.build import build_graph
from autopar.tracer.trace import StepOptions
from tests.unit.stages.traced_sizes import zero_by_factors

WEIGHTS = [jnp.ones((16, 16))] * 4
BATCH = {"x": jnp.ones((8, 16))}
HOSTS = autopar.ClusterSpec(2, 2, "a100-sxm")


def forward(weights: list[Any], x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def step_of(loss):
    def train_step(weights: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return train_step


def small_task() -> auto_task.AutoTask:
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    source = StepSource.of(step, (WEIGHTS, BATCH), {}, StepOptions())
    return auto_task.AutoTask(source, autopar.AutoParallel(), HOSTS, PlanningLog())


def notes_of(loss, planning_time_s: float | None = 60) -> str:
    """Of a step whose gradients, over a slow network, are a reason for a pipeline."""
    hosts = autopar.ClusterSpec(2, 2, "a100-sxm", host_bandwidth=1e9)
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((8192, 4096), jnp.float32)}
    method = autopar.AutoParallel(options=autopar.ShardingOptions(planning_time_s=planning_time_s))
    plan = autopar.plan(step_of(loss), weights, batch, cluster=hosts, method=method)
    assert not plan.is_pipeline
    assert plan.num_micro_batches == 1
    assert plan.search is not None
    return " ".join(plan.search.notes)


def test_a_step_that_takes_the_whole_batch_alone_is_left_whole() -> None:
    def picky(weights, batch):
        if batch["x"].shape[0] != 8192:
            raise ValueError("needs 8192 rows")
        return jnp.sum(forward(weights, batch["x"])) + zero_by_factors(batch["x"])

    notes = notes_of(picky)
    assert "traces it with 1024 of the batch's 8192 rows, and it fails at" in notes
    assert notes.endswith("ValueError: needs 8192 rows.")


def test_a_batch_is_not_cut_where_that_would_change_results() -> None:
    def normalised(weights, batch):
        x = forward(weights, batch["x"])
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.mean(jnp.square(x @ weights[0]))

    assert "would change results" in notes_of(normalised)


def test_no_pipeline_is_searched_where_none_can_win() -> None:
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    plan = autopar.plan(step, WEIGHTS, BATCH, cluster=HOSTS)
    assert not plan.is_pipeline and plan.search is not None
    assert "Pipelines were not tried: it would take" in " ".join(plan.search.notes)


@pytest.mark.parametrize(("share", "first"), [(0.4, True), (0.6, False)])
def test_across_hosts_one_mesh_comes_first_where_memory_is_not_short(
    monkeypatch: pytest.MonkeyPatch, share: float, first: bool
) -> None:
    """Pipelines take most of the time there is; the plan on one mesh must not wait for them."""
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((64, 4096), jnp.float32)}
    state_bytes = 4 * 4096 * 4096 * 4 / HOSTS.num_devices
    options = autopar.ShardingOptions(memory_budget_bytes=state_bytes / share)
    ways: list[str] = []
    for name in ("_one_mesh_first", "_pipeline_first"):
        monkeypatch.setattr(auto, name, lambda *_, name=name: ways.append(name))
    monkeypatch.setattr(auto, "_smallest", lambda task, outcomes: _end())
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    with pytest.raises(_EndError):
        method = autopar.AutoParallel(options=options)
        autopar.plan(step, weights, batch, cluster=HOSTS, method=method)
    assert ways[:1] == ["_one_mesh_first" if first else "_pipeline_first"]


class _EndError(Exception):
    """No plan is needed."""


def _end() -> None:
    raise _EndError


def test_one_device_is_planned_as_it_is() -> None:
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    plan = autopar.plan(step, WEIGHTS, BATCH, cluster=autopar.ClusterSpec(1, 1, "a100-sxm"))
    assert not plan.is_pipeline
    assert plan.num_devices == 1


@pytest.mark.parametrize("share", [0.55, 0.3])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_on_a_host_that_is_short_of_memory_no_number_of_micro_batches_is_faster(
    share: float, checkpoints: bool
) -> None:
    """Tables are made at many micro-batches; a step that has to be cut in two is not cut in eight.
    Layers that the user recomputes leave none for the planner to recompute."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["in"]) @ w["out"]

    def loss(weights, batch):
        x = batch["x"]
        for weight in weights:
            x = (jax.checkpoint(layer) if checkpoints else layer)(x, weight)
        return jnp.mean(jnp.square(x))

    def train_step(weights, batch):
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    array = jax.ShapeDtypeStruct
    weight = {"in": array((512, 2048), jnp.float32), "out": array((2048, 512), jnp.float32)}
    args = [weight] * 6, {"x": array((65536, 512), jnp.float32)}

    def planned(method: Any, budget: float | None) -> autopar.ParallelPlan | None:
        options = autopar.ShardingOptions(
            memory_budget_bytes=budget, xla_options={LATENCY_HIDING: True}
        )
        cluster = autopar.ClusterSpec(1, 4, "h100-sxm")
        try:
            return autopar.plan(train_step, *args, cluster=cluster, method=method(options=options))
        except MemoryBudgetError:
            return None

    free = planned(autopar.ShardParallel, None)
    assert free is not None
    budget = share * free.estimated_peak_bytes
    chosen = planned(autopar.AutoParallel, budget)
    assert chosen is not None
    assert chosen.estimated_peak_bytes <= budget
    assert chosen.num_stages > 1 or not chosen.is_pipeline
    for number in (1, 2, 4, 8):
        by_hand = planned(partial(autopar.ShardParallel, num_micro_batches=number), budget)
        if by_hand is not None:
            assert chosen.estimated_step_s <= 1.0001 * by_hand.estimated_step_s, number


@pytest.mark.parametrize(("slower", "is_kept"), [(1.0, False), (1e6, True)])
def test_a_stage_alone_is_kept_if_one_program_is_slower(
    monkeypatch: pytest.MonkeyPatch, slower: float, is_kept: bool
) -> None:
    """Of a pipeline of one stage and one program on the same mesh, the latter if it is as fast.
    Then the stage is not solved at all."""
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    plan_whole, solve_pipeline = auto_task.plan_whole, plan_pipeline.solve_pipeline
    solved: list[int] = []

    def solve(task: Any, looped: Any, specs: Any, *report: Any) -> PlannedStep:
        solved.append(len(specs))
        return solve_pipeline(task, looped, specs, *report)

    def slowed(whole: WholeStep) -> PlannedStep:
        planned = plan_whole(whole)
        seconds = planned.plan.estimated_step_s * slower
        return replace(planned, plan=replace(planned.plan, estimated_step_s=seconds))

    monkeypatch.setattr(auto_task, "plan_whole", slowed)
    monkeypatch.setattr(plan_pipeline, "solve_pipeline", solve)
    method = autopar.AutoParallel(num_micro_batches=2)
    plan = autopar.plan(step, WEIGHTS, BATCH, cluster=HOSTS, method=method)
    assert plan.num_stages == 1
    assert plan.is_pipeline == is_kept
    assert (1 in solved) == is_kept


def test_the_whole_batch_on_one_mesh_is_worked_out_whatever_tables_say_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"])))
    plan_pipeline = auto_task.plan_pipeline
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))

    def far_ahead(loop: Any, _: Any, cluster: Any, timer: Any) -> PlannedStep:
        planned = plan_pipeline(loop, method, cluster, timer)
        report = SearchReport(0, 0, 0, 0, intra_only_s=100 * planned.plan.estimated_step_s)
        return replace(planned, plan=replace(planned.plan, search=report))

    monkeypatch.setattr(auto_task, "plan_pipeline", far_ahead)
    plan = autopar.plan(step, WEIGHTS, BATCH, cluster=HOSTS)
    pipeline = autopar.plan(step, WEIGHTS, BATCH, cluster=HOSTS, method=method)
    assert not plan.is_pipeline
    assert plan.estimated_step_s < pipeline.estimated_step_s


# -- one device

ONE = autopar.ClusterSpec(1, 1, "h100-sxm")
BLOCKS = [(0.3 * jnp.eye(16, 64), 0.2 * jnp.eye(64, 16))] * 6
TALL = {"x": jnp.linspace(-1.0, 1.0, 4096 * 16).reshape(4096, 16)}


def mean_step(blocks: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
    def loss(blocks: list[Any]) -> Any:
        x = batch["x"]
        for up, down in blocks:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(jnp.square(x))

    value, grads = jax.value_and_grad(loss)(blocks)
    return jax.tree.map(lambda w, g: w - 0.1 * g, blocks, grads), value


def one_device_plan(budget_bytes: float | None, **options: Any) -> autopar.ParallelPlan:
    chosen = autopar.ShardingOptions(memory_budget_bytes=budget_bytes, **options)
    method = autopar.AutoParallel(options=chosen)
    return autopar.plan(mean_step, BLOCKS, TALL, cluster=ONE, method=method)


def test_a_step_that_fits_on_one_device_is_left_alone() -> None:
    plan = one_device_plan(None)
    assert (plan.num_micro_batches, plan.remat) == (1, ())
    assert plan.memory_budget_bytes == pytest.approx(0.9 * 80e9)


def test_one_device_short_of_memory_cuts_the_batch_or_recomputes() -> None:
    peak = one_device_plan(None).estimated_peak_bytes
    plan = one_device_plan(0.6 * peak)
    assert plan.num_micro_batches > 1 or plan.remat
    assert plan.estimated_peak_bytes <= 0.6 * peak


def test_of_both_ways_to_save_memory_the_faster_one_is_taken() -> None:
    """Few micro-batches cost less than computing a forward pass twice."""
    peak = one_device_plan(None).estimated_peak_bytes
    plan = one_device_plan(0.7 * peak)
    shard = autopar.ShardParallel(
        options=autopar.ShardingOptions(memory_budget_bytes=0.7 * peak, remat="all")
    )
    recomputed = autopar.plan(mean_step, BLOCKS, TALL, cluster=ONE, method=shard)
    assert recomputed.remat
    assert plan.estimated_step_s <= recomputed.estimated_step_s


def test_one_device_that_nothing_fits_on_says_what_was_tried() -> None:
    with pytest.raises(autopar.MemoryBudgetError, match="does not fit on one device") as caught:
        one_device_plan(100e3)
    error = caught.value
    assert error.budget_bytes == 100e3 < error.peak_bytes
    assert error.tried["pipelines"] == "not tried: there is one device"
    assert error.tried["micro-batches"].startswith("tried: ")


def test_a_cpu_has_no_limit_but_the_budget_that_is_given() -> None:
    cluster = autopar.ClusterSpec(1, 1, "cpu", memory_bytes=1000.0)
    plan = autopar.plan(mean_step, BLOCKS, TALL, cluster=cluster)
    assert (plan.num_micro_batches, plan.remat) == (1, ())


def test_a_step_made_to_fit_on_one_device_trains_like_jit() -> None:
    peak = one_device_plan(None).estimated_peak_bytes
    options = autopar.ShardingOptions(memory_budget_bytes=0.6 * peak)
    autopar.init(devices=jax.devices()[:1])
    try:
        method = autopar.AutoParallel(options=options)
        step = autopar.parallelize(mean_step, method=method, donate_argnums=())
        got, oracle = (BLOCKS, None), (BLOCKS, None)
        for _ in range(3):
            got, oracle = step(got[0], TALL), jax.jit(mean_step)(oracle[0], TALL)
        assert step.last_executable is not None
        assert step.last_executable.plan.num_micro_batches > 1
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(oracle), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    finally:
        autopar.init()


def test_no_pipeline_is_searched_where_compute_alone_takes_as_long(monkeypatch: Any) -> None:
    """Nearly all of the step is compute, evenly divided: the wait for a first micro-batch alone
    makes every pipeline slower, so not even one micro-batch is traced."""

    def loss(weights: list[Any], batch: dict[str, Any]) -> Any:
        return jnp.mean(forward(weights, batch["x"]) ** 2)

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((4096, 256), jnp.float32)}
    cluster = autopar.ClusterSpec(1, 4, "cpu", intra_host_bandwidth=1e12)
    monkeypatch.setattr(auto, "why_not_cut", lambda *_: pytest.fail("a micro-batch was traced"))
    plan = autopar.plan(step_of(loss), weights, batch, cluster=cluster)
    assert not plan.is_pipeline
    assert plan.search is not None
    assert any("it would take" in note and "at least" in note for note in plan.search.notes)


def test_without_time_for_pipelines_no_micro_batch_is_traced(monkeypatch: Any) -> None:
    monkeypatch.setattr(auto, "why_not_cut", lambda *_: pytest.fail("a micro-batch was traced"))
    notes = notes_of(
        lambda weights, batch: jnp.mean(forward(weights, batch["x"]) ** 2), planning_time_s=1e-6
    )
    assert "there was no time left" in notes


def made_plan(
    number: int, step_s: float, remat: tuple[str, ...] = (), unrolled: bool = False
) -> Any:
    plan = SimpleNamespace(
        remat=remat,
        solver=SimpleNamespace(unbounded=(), stopped=None),
        estimated_step_s=step_s,
        num_micro_batches=number,
        unrolled=unrolled,
    )
    return SimpleNamespace(plan=plan)


@pytest.mark.parametrize("is_cramped", [False, True])
def test_a_scan_that_stays_for_want_of_memory_is_cut(
    monkeypatch: pytest.MonkeyPatch, is_cramped: bool
) -> None:
    """Written out, its layers lack memory with the whole batch, and take less in two."""
    task = small_task()
    scan, written_out = made_plan(1, 1.0), made_plan(2, 0.9, unrolled=True)
    monkeypatch.setattr(auto_task, "plan_whole", lambda step: written_out)
    if is_cramped:
        task.log.cramped.add(1)
    found = auto._or_cut(task, auto_task.Outcomes(task), scan)
    assert found is (written_out if is_cramped else scan)


def test_an_early_plan_that_recomputes_layers_is_cut_while_that_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = small_task()
    step_s, numbers = {1: 2.0, 2: 1.5, 4: 1.6, 8: 1.0}, []

    def plan_whole(step: WholeStep) -> Any:
        number = step.num_micro_batches
        numbers.append(number)
        return made_plan(number, step_s[number], remat=("layer 0",))

    monkeypatch.setattr(auto, "most_gained", lambda task: 0.0)
    monkeypatch.setattr(auto, "may_fit", lambda task, number=1: True)
    monkeypatch.setattr(auto_task, "plan_whole", plan_whole)
    outcomes = auto_task.Outcomes(task)
    found = auto._early_on_one_mesh(task, outcomes)
    assert found is not None and found.plan.num_micro_batches == 2
    assert numbers == [1, 2, 4]
    assert outcomes.found[2] is found
    monkeypatch.setattr(  # these numbers are not planned again in place of a pipeline
        auto_task.AutoTask, "as_pipeline", lambda task, leaves, on_one_mesh: on_one_mesh(2, 1.5)
    )
    assert outcomes.as_pipeline() is found
    assert numbers == [1, 2, 4]


@pytest.mark.parametrize("is_late", [False, True])
def test_past_the_deadline_what_is_likely_to_fit_comes_first(monkeypatch, is_late: bool) -> None:
    """By the estimate, four micro-batches fit and fewer do not."""
    task = small_task()
    if is_late:
        task.log.deadline.interrupt()
    numbers = []

    def plan_whole(step: WholeStep) -> Any:
        numbers.append(step.method.num_micro_batches)
        if step.method.num_micro_batches < 4:
            raise MemoryBudgetError("too large", 2.0, 1.0)
        return made

    made = made_plan(4, 1.0)
    monkeypatch.setattr(auto, "may_fit", lambda task, number=1: number >= 4)
    monkeypatch.setattr(auto_task, "plan_whole", plan_whole)
    assert auto._fitted_on_one_mesh(task, auto_task.Outcomes(task)) is made
    assert numbers == ([4] if is_late else [1, 2, 4])


def test_once_time_is_up_the_finest_cut_is_the_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches seem to fit, and do not; of the numbers that are left, it is the last."""
    task, numbers = small_task(), []
    task.log.deadline.interrupt()

    def plan_whole(step: WholeStep) -> Any:
        numbers.append(step.num_micro_batches)
        raise MemoryBudgetError("too large", 2.0, 1.0)

    monkeypatch.setattr(auto_task, "plan_whole", plan_whole)
    assert auto._or_cut(task, auto_task.Outcomes(task), None) is None
    assert numbers == [2, task.numbers[-1]]
    assert f"fewer than {numbers[-1]} micro-batches" in task.log.deadline.left_out


@pytest.mark.parametrize("fits", [True, False], ids=["whole batch fits", "nothing fits"])
def test_begun_too_late_the_whole_batch_comes_first_if_it_is_likely_to_fit(
    monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A GAN was cut into single rows, with all layers recomputed, for twice its time."""
    task, plan_whole, tried = small_task(), auto_task.plan_whole, []
    task.log.deadline.interrupt()

    def noted(step: WholeStep) -> Any:
        tried.append(step.num_micro_batches)
        if not fits:
            raise MemoryBudgetError("too large", 2.0, 1.0)
        return plan_whole(step)

    def plan_smallest(step: WholeStep) -> Any:
        tried.append(step.num_micro_batches)
        return plan_whole(step)

    monkeypatch.setattr(auto_task, "plan_whole", noted)
    monkeypatch.setattr(auto, "plan_smallest", plan_smallest)
    with task.log.limited(task.method.options):
        planned = auto.plan_automatically(task)
    assert tried == ([1] if fits else [1, task.numbers[-1]])
    assert planned.plan.num_micro_batches == tried[-1]


def test_another_way_that_is_begun_too_late_has_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    task, tried = small_task(), []
    task.log.deadline.interrupt()
    monkeypatch.setattr(auto, "_fits_easily", lambda task: False)

    def plan_smallest(step: WholeStep) -> Any:
        tried.append(step.num_micro_batches)
        raise MemoryBudgetError("too large", 2.0, 1.0)

    monkeypatch.setattr(auto, "plan_smallest", plan_smallest)
    with task.log.limited(task.method.options), pytest.raises(MemoryBudgetError) as caught:
        auto.plan_automatically(task)
    assert tried == [task.numbers[-1]]
    by_number = caught.value.tried["micro-batches"]
    assert f"{tried[0]} of them; for others there was no time left" in by_number
    assert "no time left" in caught.value.tried["pipelines"]
    assert any("least memory" in what for what in task.log.deadline.left_out)


def test_what_is_likely_to_fit_is_planned_without_a_look_at_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every number is traced anew, and for large models a trace takes seconds."""
    task = small_task()
    micro_batch, traced = StepSource.micro_batch, set()

    def noted(source: StepSource, number: int) -> Any:
        traced.add(number)
        return micro_batch(source, number)

    monkeypatch.setattr(StepSource, "micro_batch", noted)
    planned = auto._or_cut(task, auto_task.Outcomes(task), None)
    assert planned is not None and planned.plan.num_micro_batches == 2
    assert traced == {2}


@pytest.mark.parametrize("remat", ["none", pytest.param("auto", marks=pytest.mark.ci)])
def test_micro_batches_that_another_number_shows_to_be_too_large_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, remat: str
) -> None:
    """Four fit; of fewer, no program is made, not even to see whether recomputation helps."""
    rows = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    weights = [(jax.ShapeDtypeStruct((16, 64), jnp.float32),) * 2] * 3

    @jax.checkpoint
    def layer(x: Any, up: Any, down: Any) -> Any:
        return x + jnp.tanh(x @ up) @ down.T

    def loss(weights: Any, batch: Any) -> Any:
        x = batch["x"]
        for up, down in weights:
            x = layer(x, up, down)
        return jnp.mean(x**2)

    def train_step(weights: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    source = StepSource.of(train_step, (weights, {"x": rows}), {}, StepOptions())
    graph = build_graph(replace(source.as_loop(8), is_stage=True))  # as tables of stages read it
    memory = memory_by_rows(graph, 8, HOSTS.num_devices)
    options = autopar.ShardingOptions(memory_budget_bytes=memory.floor(4) * 1.5, remat=remat)
    task = auto_task.AutoTask(source, autopar.AutoParallel(options=options), HOSTS, PlanningLog())
    task.log.memory = memory
    numbers = []
    plan_whole = auto_task.plan_whole

    def noted(step: WholeStep) -> PlannedStep:
        numbers.append(step.num_micro_batches)
        return plan_whole(step)

    monkeypatch.setattr(auto_task, "plan_whole", noted)
    planned = next(auto._cut_plans(task, auto_task.Outcomes(task)))
    assert planned.plan.num_micro_batches == 4
    assert numbers == [4]
    task.log.memory = None
    numbers.clear()
    again = next(auto._cut_plans(task, auto_task.Outcomes(task)))
    assert again.plan.estimated_step_s == planned.plan.estimated_step_s
    assert numbers == [2, 4]


def test_the_batch_is_cut_further_while_memory_costs_time_and_that_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, steps = small_task(), {2: 9.0, 4: 5.0, 8: 3.0, 16: 4.0, 32: 1.0}

    def made(number: int, step_s: float) -> Any:
        solver = SimpleNamespace(unbounded=(1.0, 2.0))
        plan = SimpleNamespace(
            remat=(), solver=solver, estimated_step_s=step_s, num_micro_batches=number
        )
        return SimpleNamespace(plan=plan)

    tried = []

    def cut_plans(task: Any, outcomes: Any) -> Any:
        for number, step_s in steps.items():
            tried.append(number)
            yield made(number, step_s)

    monkeypatch.setattr(auto, "_cut_plans", cut_plans)
    best = auto._or_cut(task, auto_task.Outcomes(task), None)
    assert best is not None and best.plan.num_micro_batches == 8
    assert tried == [2, 4, 8, 16]


def scanned_step(stack: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    def loss(stack: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], stack)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(stack)
    return stack - 0.1 * grads, value


@pytest.mark.parametrize("planning_time_s", [1e-6, pytest.param(None, marks=pytest.mark.ci)])
def test_scanned_layers_have_a_plan_on_one_mesh_before_pipelines(
    monkeypatch: pytest.MonkeyPatch, planning_time_s: float | None
) -> None:
    """Pipelines write the layers out, which takes time that there may not be."""
    stack = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)
    batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    budget = 44 * 2**20
    options = autopar.ShardingOptions(memory_budget_bytes=budget, planning_time_s=planning_time_s)
    searched: list[bool] = []
    search = auto_task.AutoTask.as_pipeline

    def as_pipeline(task: auto_task.AutoTask, *asked: Any) -> PlannedStep:
        searched.append(True)
        return search(task, *asked)

    monkeypatch.setattr(auto_task.AutoTask, "as_pipeline", as_pipeline)
    method = autopar.AutoParallel(options=options)
    plan = autopar.plan(scanned_step, stack, batch, cluster=HOSTS, method=method)
    assert plan.estimated_peak_bytes <= budget
    assert bool(searched) == (planning_time_s is None)
    if not searched:
        assert not plan.is_pipeline and plan.num_micro_batches > 1
        assert plan.solver.stopped is not None and "pipelines" in plan.solver.stopped


@pytest.mark.parametrize(("host_bandwidth", "is_early"), [(1e11, True), (1e8, False)])
def test_where_pipelines_have_little_to_gain_one_mesh_comes_first(
    monkeypatch: pytest.MonkeyPatch, host_bandwidth: float, is_early: bool
) -> None:
    """What is left to gain is the time to gather parameters, which the network decides."""
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((2**18, 1024), jnp.float32)}
    hosts = autopar.ClusterSpec(2, 2, "a100-sxm", host_bandwidth=host_bandwidth)
    options = autopar.ShardingOptions(memory_budget_bytes=2**30, planning_time_s=1e-6)
    searched: list[bool] = []
    search = auto_task.AutoTask.as_pipeline

    def as_pipeline(task: auto_task.AutoTask, *asked: Any) -> PlannedStep:
        searched.append(True)
        return search(task, *asked)

    @jax.checkpoint
    def layer(x: Any, weight: Any) -> Any:
        return jnp.tanh(x @ weight)

    def loss(weights: Any, batch: Any) -> Any:
        x = batch["x"]
        for weight in weights:
            x = layer(x, weight)
        return jnp.mean(x**2)

    monkeypatch.setattr(auto_task.AutoTask, "as_pipeline", as_pipeline)
    method = autopar.AutoParallel(options=options)
    plan = autopar.plan(step_of(loss), weights, batch, cluster=hosts, method=method)
    assert plan.estimated_peak_bytes <= 2**30
    assert bool(searched) == (not is_early)
    if is_early:
        assert not plan.is_pipeline and plan.num_micro_batches > 1
        assert plan.solver.stopped is not None and "pipelines" in plan.solver.stopped


@pytest.mark.parametrize("is_late", [False, True])
def test_pipelines_that_promise_less_than_a_plan_at_hand_are_left_if_time_is_short(
    is_late: bool,
) -> None:
    task = small_task()
    with task.log.limited(autopar.ShardingOptions(planning_time_s=None)):
        assert task.log.best is not None
        task.log.best.take(1.0, 0.0)
        if is_late:
            task.log.deadline.interrupt()
        assert task.leaves(1.1) == is_late
        assert not task.leaves(0.9)


@pytest.mark.ci
def test_with_a_plan_at_hand_no_pipeline_is_solved_for_which_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)
    batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    options = autopar.ShardingOptions(memory_budget_bytes=44 * 2**20, planning_time_s=None)
    choose = plan_pipeline.choose_stages

    def until_time_is_up(*args: Any, **kwargs: Any) -> Any:
        search = choose(*args, **kwargs)
        args[3].deadline.interrupt()
        return search

    monkeypatch.setattr(plan_pipeline, "choose_stages", until_time_is_up)
    monkeypatch.setattr(
        plan_pipeline, "solve_pipeline", lambda *_: pytest.fail("a pipeline was solved")
    )
    method = autopar.AutoParallel(options=options)
    plan = autopar.plan(scanned_step, stack, batch, cluster=HOSTS, method=method)
    assert not plan.is_pipeline
    assert plan.solver.stopped is not None and "pipelines" in plan.solver.stopped


@pytest.mark.parametrize(
    ("gain", "moved", "is_solved"), [(10.0, 0.0, False), (1.0, 0.0, True), (10.0, 1.0, True)]
)
def test_where_time_is_short_what_promises_more_comes_first(
    monkeypatch: pytest.MonkeyPatch, gain: float, moved: float, is_solved: bool
) -> None:
    """Without a plan, and with time for a pipeline or a plan on one mesh: the pipeline, unless its
    step takes longer than the operators and what one mesh moves, relative to it."""
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    options = autopar.ShardingOptions(memory_budget_bytes=44 * 2**20, planning_time_s=None)
    choose, solve = plan_pipeline.choose_stages, plan_pipeline.solve_pipeline
    solved: list[bool] = []

    def until_time_is_up(*args: Any, **kwargs: Any) -> Any:
        search, log = choose(*args, **kwargs), args[3]
        assert search.choice is not None
        assert 0 < log.ideal_s <= search.choice.step_s
        log.ideal_s = search.choice.step_s / gain
        log.deadline.interrupt()
        gathered_s = moved * search.choice.step_s
        monkeypatch.setattr(
            auto_task,
            "one_mesh_s",
            lambda task, number, work_s: auto_task.recomputed_s(task, number, work_s) + gathered_s,
        )
        return search

    def noted(*args: Any) -> PlannedStep:
        solved.append(True)
        return solve(*args)

    monkeypatch.setattr(plan_pipeline, "choose_stages", until_time_is_up)
    monkeypatch.setattr(plan_pipeline, "solve_pipeline", noted)
    method = autopar.AutoParallel(options=options)
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"]) ** 2))
    plan = autopar.plan(step, weights, batch, cluster=HOSTS, method=method)
    assert bool(solved) == is_solved
    if not is_solved:
        assert not plan.is_pipeline and plan.num_micro_batches > 1
        assert plan.solver.stopped is not None and "pipelines" in plan.solver.stopped


def test_a_pipeline_that_was_left_is_solved_if_nothing_fits_on_one_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    options = autopar.ShardingOptions(memory_budget_bytes=44 * 2**20, planning_time_s=None)
    asked: list[float] = []

    def leaves(task: auto_task.AutoTask, step_s: float) -> bool:
        asked.append(step_s)
        return True

    monkeypatch.setattr(auto_task.AutoTask, "leaves", leaves)
    monkeypatch.setattr(auto, "_fitted_on_one_mesh", lambda *_: None)
    method = autopar.AutoParallel(options=options)
    step = step_of(lambda weights, batch: jnp.mean(forward(weights, batch["x"]) ** 2))
    plan = autopar.plan(step, weights, batch, cluster=HOSTS, method=method)
    assert len(asked) == 1
    assert plan.is_pipeline and plan.estimated_peak_bytes <= 44 * 2**20

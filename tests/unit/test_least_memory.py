"""XLA's schedule for the least memory: how it is predicted, and when it is chosen."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import compiler
from autopar.ir.plan import ParallelPlan
from autopar.ir.xla_options import LATENCY_HIDING, hides_latency
from autopar.sharding.memory_limits import MemoryByRows
from autopar.stages import auto
from autopar.stages.auto_task import Outcomes

H100S = autopar.ClusterSpec(1, 8, "h100-sxm")
ROWS, WIDTH, LAYERS = 65536, 256, 8
CHOSEN = ((LATENCY_HIDING, "false"),)


def step(state, batch):
    """Recomputes wide layers: the backward pass decides the peak."""

    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w["in"]) @ w["out"]

    def loss_of(params):
        x = batch["x"]
        for w in params:
            x = layer(x, w)
        return (x**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def arguments():
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layer = {"in": array((WIDTH, 4 * WIDTH)), "out": array((4 * WIDTH, WIDTH))}
    return [layer] * LAYERS, {"x": array((ROWS, WIDTH))}


def plan_of(cluster=H100S, method=autopar.ShardParallel, **options) -> ParallelPlan:
    options = autopar.ShardingOptions(remat="none", host_memory="never", **options)
    return autopar.plan(step, *arguments(), cluster=cluster, method=method(options=options))


@pytest.fixture(scope="module")
def peaks() -> tuple[float, float]:
    """(least memory, default schedule)"""
    lean = plan_of(xla_options={LATENCY_HIDING: False})
    return lean.estimated_peak_bytes, plan_of().estimated_peak_bytes


@pytest.mark.parametrize(
    ("value", "hides"), [(True, True), (1, True), (False, False), (0, False), ("false", False)]
)
def test_values_of_the_option(value, hides: bool) -> None:
    assert hides_latency({LATENCY_HIDING: value}) is hides
    assert hides_latency({})


def test_recomputed_operands_of_gradients_are_kept_only_to_hide_collectives(peaks) -> None:
    least, default = peaks
    hidden = ROWS // 8 * 4 * WIDTH * 4  # of one layer, on one device
    assert default - least > hidden


def test_chosen_where_nothing_else_fits(peaks, tmp_path) -> None:
    least, default = peaks
    plan = plan_of(memory_budget_bytes=(least + default) / 2)
    assert plan.xla_options == CHOSEN
    assert plan.estimated_peak_bytes <= (least + default) / 2
    assert any("for the least memory" in warning for warning in plan.warnings)
    assert f"{LATENCY_HIDING}=false" in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert ParallelPlan.load(tmp_path / "plan.json").xla_options == CHOSEN


def test_not_chosen_where_the_default_fits(peaks) -> None:
    plan = plan_of(memory_budget_bytes=1.1 * peaks[1])
    assert LATENCY_HIDING not in dict(plan.xla_options or ())
    assert not plan.warnings


def test_the_users_choice_stays(peaks) -> None:
    least, default = peaks
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        plan_of(memory_budget_bytes=(least + default) / 2, xla_options={LATENCY_HIDING: True})
    assert "XLA's schedule" not in caught.value.tried


def test_nothing_is_hidden_on_cpus(peaks) -> None:
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        plan_of(cluster=autopar.ClusterSpec(1, 8, "cpu"), memory_budget_bytes=peaks[0] / 2)
    assert "XLA's schedule" not in caught.value.tried


def test_an_error_says_that_it_was_tried(peaks) -> None:
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        plan_of(memory_budget_bytes=peaks[0] / 2)
    assert "the one for the least memory" in caught.value.tried["XLA's schedule"]


@pytest.mark.parametrize("is_chosen", [False, True], ids=["XLA's choice", "the user's"])
def test_the_default_schedules_pipelines_leave_time_for_the_other_schedule(
    monkeypatch, peaks, is_chosen: bool
) -> None:
    """Of a GAN that fits on no mesh they took all of it: the other schedule had one last try."""
    least, default = peaks
    left: list[tuple[float, float]] = []

    def as_pipeline(outcomes: Outcomes) -> None:
        deadline = outcomes.task.log.deadline
        left.append((deadline.left_s, (deadline.whole or deadline).left_s))

    fits = (least + default) / 2  # in the other schedule; cuts are left out
    monkeypatch.setattr(Outcomes, "as_pipeline", as_pipeline)
    monkeypatch.setattr(auto, "_why_too_slow", lambda task, whole: None)
    monkeypatch.setattr(auto, "_or_cut", lambda task, outcomes, best: best)
    flags = {LATENCY_HIDING: True} if is_chosen else {}
    with pytest.raises(autopar.MemoryBudgetError) if is_chosen else nullcontext():
        plan_of(method=autopar.AutoParallel, memory_budget_bytes=fits, xla_options=flags)
    shares = [part / whole for part, whole in left]
    assert shares == pytest.approx([1.0] if is_chosen else [0.5, 1.0], rel=0.01)


def test_the_second_search_knows_nothing_of_the_first_ones_memory(monkeypatch) -> None:
    """Else it would rule out micro-batches by the memory of the default schedule."""
    plans, known = compiler.plan_automatically, []

    def plan_automatically(task, **options):
        known.append(task.log.memory)
        if len(known) == 1:
            task.log.memory = MemoryByRows(2, 1e12, 1e12, 1e12)
            raise autopar.MemoryBudgetError("too large")
        return plans(task, **options)

    monkeypatch.setattr(compiler, "plan_automatically", plan_automatically)
    assert plan_of(method=autopar.AutoParallel).xla_options == CHOSEN
    assert known == [None, None]

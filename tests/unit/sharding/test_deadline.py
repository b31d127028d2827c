"""The deadline of a plan: what is asked of it, and plans that it cuts short."""

import os
import signal

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.sharding.deadline import Deadline, interrupts_end
from autopar.sharding.planning_log import PlanningLog
from examples.models import build

CLUSTER = autopar.ClusterSpec(2, 4, "h100-sxm")


def plan_of(method, name="gpt-tiny"):
    example = build(name)
    state, batch = example.abstract_state(), example.abstract_batch()
    return autopar.plan(example.train_step, state, batch, cluster=CLUSTER, method=method)


def test_without_a_limit_everything_is_allowed():
    deadline = Deadline()
    assert deadline.allows(1e9) and deadline.part(0.5).allows(1e9)
    assert deadline.seconds(60.0) == 60.0
    assert deadline.text() is None


def test_a_part_has_its_share_and_tells_the_whole():
    whole = Deadline(1000.0)
    part = whole.part(0.25)
    assert 249 < part.left_s <= 250
    assert part.allows(200) and not part.allows(300)
    assert whole.allows(300) and not whole.allows(300, share=0.2)
    assert 124 < part.seconds(1000.0) <= 125
    part.cut("half of it")
    text = whole.text()
    assert text is not None and "planning_time_s=1000" in text and text.endswith("half of it")


def test_work_that_shares_the_time_left_gives_the_rest_back():
    log = PlanningLog(deadline=Deadline(1000.0))
    whole = log.deadline
    with log.sharing(0.25):
        assert log.deadline.whole is whole and 249 < log.deadline.left_s <= 250
        log.deadline.cut("a stage")
    assert log.deadline is whole and "a stage" in (whole.text() or "")


def test_work_leaves_what_is_reserved_for_later():
    log = PlanningLog(deadline=Deadline(1000.0))
    whole = log.deadline
    with log.reserving(300.0):
        assert log.deadline.allows(600) and not log.deadline.allows(800)
        with log.reserving(900.0):
            assert not log.deadline.allows()
    assert log.deadline is whole and whole.allows(800)
    assert Deadline().before(1e9).allows(1e9)


def test_the_longest_work_of_a_kind_is_known():
    log = PlanningLog()
    log.took_s["graph"] = 1e6
    with log.measured("graph"), log.measured("tables"):
        pass
    assert log.took_s["graph"] == 1e6 and 0 <= log.took_s["tables"] < 1e6
    with pytest.raises(ZeroDivisionError), log.measured("other"):
        raise ZeroDivisionError
    assert "other" not in log.took_s


def test_time_is_short_once_less_is_left_than_was_spent():
    deadline, unlimited = Deadline(1000.0), Deadline()
    assert not deadline.is_short
    for each in (deadline, unlimited):
        each.started -= 600
    assert deadline.is_short and not unlimited.is_short
    assert not deadline.part(0.5).is_short  # a new search


def test_when_time_is_up_solves_are_short():
    deadline = Deadline(1e-9)
    assert not deadline.allows()
    assert deadline.seconds(60.0, least_s=2.0) == 2.0


def test_the_first_interrupt_ends_the_deadline_and_the_second_raises():
    deadline = Deadline(1000.0)
    others = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT)
    with interrupts_end(deadline):
        os.kill(os.getpid(), signal.SIGINT)
        assert not deadline.allows() and deadline.part(0.5).left_s == 0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 1)
    assert signal.signal(signal.SIGINT, others) is before
    deadline.cut("pipelines")
    assert (deadline.text() or "").startswith("stopped by an interrupt")


@pytest.mark.parametrize(
    "method",
    [
        lambda options: autopar.ShardParallel(options=options),
        lambda options: autopar.PipeshardParallel("auto", options=options),
        lambda options: autopar.AutoParallel(options=options),
    ],
)
def test_a_plan_without_time_is_a_plan_that_says_what_is_missing(method):
    plan = plan_of(method(autopar.ShardingOptions(planning_time_s=1e-3)))
    assert plan.num_devices == 8
    assert plan.solver.stopped is not None
    assert plan.solver.stopped.startswith("stopped by planning_time_s=0.001 after ")
    assert " ".join(plan.solver.stopped.split()[:2]) in plan.explain(detail="full")
    assert plan.estimated_peak_bytes <= plan.memory_budget_bytes
    read = autopar.ParallelPlan.from_json(plan.to_json())
    assert read.solver.stopped == plan.solver.stopped


def test_a_plan_with_time_to_spare_says_nothing_and_is_that_without_a_limit():
    limited = plan_of(autopar.ShardParallel(options=autopar.ShardingOptions(planning_time_s=3600)))
    free = plan_of(autopar.ShardParallel(options=autopar.ShardingOptions(planning_time_s=None)))
    assert limited.solver.stopped is free.solver.stopped is None
    assert limited.inputs == free.inputs and limited.outputs == free.outputs
    assert limited.solver.objective == free.solver.objective


def test_what_does_not_fit_is_not_blamed_on_time():
    options = autopar.ShardingOptions(planning_time_s=1e-3, memory_budget_bytes=1e3)
    with pytest.raises(autopar.MemoryBudgetError):
        plan_of(autopar.AutoParallel(options=options))


def test_without_time_a_tight_budget_is_still_kept():
    """All that fits here needs a mesh, micro-batches or recomputation that come late."""

    def step(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    for budget in (60e6, 20e6):
        options = autopar.ShardingOptions(planning_time_s=1e-3, memory_budget_bytes=budget)
        plan = autopar.plan(
            step, params, batch, cluster=CLUSTER, method=autopar.AutoParallel(options=options)
        )
        assert plan.estimated_peak_bytes <= budget

"""Plans of one step, run and compared: that each is another plan, and what its figures mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import ArgumentError, MeshError
from autopar.ir.identity import placement, plan_digest
from autopar.measure.candidates import repriced
from autopar.measure.enumerate_plans import (
    covering_plans,
    enumerate_plans,
    strategies_in_words,
    timed_plans,
)
from examples.models import build


@pytest.fixture(scope="module")
def step():
    def train(state, batch):
        def loss(weights):
            return jnp.mean((jnp.tanh(batch @ weights["a"]) @ weights["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    state = {"a": jnp.ones((64, 256)), "b": jnp.ones((256, 64))}
    return train, (state, jnp.ones((256, 64)))


@pytest.fixture(scope="module")
def timed(step):
    return enumerate_plans(*step, jax.devices(), 3, mesh_shapes=[(8,)], limit_s=0.01, rounds=2)


@pytest.mark.ci
def test_plans_differ_and_their_figures_add_up(timed):
    assert len(timed) == 3
    assert len({plan_digest(one.plan) for one in timed}) == 3
    assert len({one.strategies for one in timed}) == 3
    assert {name for one in timed for name, _ in one.strategies} == {"product #1", "product #2"}
    measured = [one.step_s for one in timed]
    assert measured == sorted(measured)
    for one in timed:
        row = one.as_row()
        assert row["measured"]["computation_s"] == max(0, one.step_s - one.communication_s)
        predicted = row["predicted"]
        parts = predicted["communication_s"] + predicted["computation_s"]
        assert parts == pytest.approx(predicted["step_s"])
        assert row["measured"]["peak_bytes"] > 0 and row["measured"]["num_samples"] >= 10
        assert one.communication_s >= 0
        assert all(words.startswith("x: ") for words in row["strategies"].values())
    assert all((one.plan.communication_bytes > 0) == (one.communication_s > 0) for one in timed)


def test_the_best_predicted_is_the_solvers_own(step):
    plans = covering_plans(*step, jax.devices(), 6)
    seconds = [planned.plan.estimated_step_s for planned in plans]
    assert seconds == sorted(seconds) and len(plans) <= 6
    best = autopar.parallelize(step[0], method=autopar.ShardParallel()).plan(*step[1])
    assert seconds[0] == pytest.approx(best.estimated_step_s)


def test_a_plan_is_the_same_with_the_figures_of_another_cluster(step):
    plans = covering_plans(*step, jax.devices(), 3, mesh_shapes=[(2, 4)])
    for planned in plans:
        same = repriced(planned, planned.plan.cluster)
        assert same.plan.estimated_step_s == pytest.approx(planned.plan.estimated_step_s)
        other = repriced(planned, autopar.ClusterSpec(1, 8, "h100-sxm"))
        assert plan_digest(other.plan) == plan_digest(same.plan) == plan_digest(planned.plan)
        assert other.plan.estimated_step_s < planned.plan.estimated_step_s
        assert other.plan.device != planned.plan.device


@pytest.mark.ci
def test_operators_are_named_and_equal_layers_are_one():
    example = build("gpt-tiny", num_layers=2)
    args = jax.eval_shape(example.create_state), example.make_batch()
    plan = autopar.parallelize(example.train_step, method=autopar.DataParallel()).plan(*args)
    words = dict(strategies_in_words(plan))
    assert words["GPT/layer_*/ffn/up"] == "x: data"
    assert len(words) == 7  # of a layer: four products of attention, two others; the logits


def test_out_of_memory_is_a_row(step, monkeypatch):
    plans = covering_plans(*step, jax.devices(), 2, mesh_shapes=[(8,)])

    class Full:
        def memory_bytes(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("autopar.measure.enumerate_plans.make_executable", lambda *_: Full())
    rows = [one.as_row() for one in timed_plans(plans, jax.devices())]
    assert all(row["measured"]["step_s"] is None for row in rows)
    assert all("RESOURCE_EXHAUSTED" in row["measured"]["failure"] for row in rows)


def test_what_cannot_be_enumerated_is_said(step):
    with pytest.raises(ArgumentError, match="needs at least two devices, got 1"):
        enumerate_plans(*step, jax.devices()[:1])
    with pytest.raises(MeshError, match="needs 32 devices, got 8"):
        enumerate_plans(*step, jax.devices(), mesh_shapes=[(4, 8)])


def test_layouts_that_put_the_same_parts_on_the_same_devices_are_the_same():
    assert placement((0,), (8,)) == placement((0, 0), (2, 4)) == ((0, ((1, 8),)),)
    assert placement((0, 0), (2, 4)) == placement((0, 0), (4, 2))
    assert placement((0, 1), (2, 4)) != placement((1, 0), (2, 4))
    assert placement((-1, 1), (2, 4)) == ((1, ((1, 4),)),)
    assert placement((0, -1), (2, 4)) == ((0, ((4, 2),)),)

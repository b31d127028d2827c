"""`plan.explain(path)` and `plan.with_pins(…)`, as users meet them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import (
    ClusterSpec,
    ParallelPlan,
    PipeshardParallel,
    ShardingOptions,
    ShardParallel,
    UniformStages,
)
from autopar.errors import ArgumentError, MeshError, PlanError, SpecError
from autopar.inspect.layouts_text import layout_sentence, layout_text
from autopar.inspect.why import why
from autopar.inspect.why_text import explain_why, pin_lines

RNG = np.random.default_rng(0)
STATE = {
    f"layer_{i}": {
        "up": (RNG.normal(size=(16, 64)) / 4).astype(np.float32),
        "down": (RNG.normal(size=(64, 16)) / 8).astype(np.float32),
    }
    for i in range(2)
}
BATCH = RNG.normal(size=(32, 16)).astype(np.float32)
CLUSTER = ClusterSpec(1, 4, "v100")
UP = "state['layer_1']['up']"


def loss_of(params, batch):
    x = batch
    for name in sorted(params):
        x = autopar.constrain(jnp.tanh(x @ params[name]["up"]), "hidden")
        x = x @ params[name]["down"]
    return (x**2).mean(), x


def step(state, batch):
    (loss, x), grads = jax.value_and_grad(loss_of, has_aux=True)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss, "x": x}


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    method = ShardParallel((2, 2))
    return autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=method)


@pytest.fixture(scope="module")
def pipeline() -> ParallelPlan:
    method = PipeshardParallel(2, stages=UniformStages(2))
    return autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=method)


def spec_at(plan: ParallelPlan, path: str) -> P:
    tensors = (*plan.inputs, *plan.outputs, *plan.named)
    return plan.spec_of(next(t for t in tensors if t.path == path))


# -- why


@pytest.mark.parametrize(
    "path", [UP, "batch", "hidden", "result[1]['x']", "state['layer_*']['up']"]
)
def test_alternatives_are_the_best_plans_with_a_pin(plan: ParallelPlan, path: str) -> None:
    answer = why(plan, path)
    assert len(answer.alternatives) == 9  # no, x, y on two dimensions; every size is divisible
    (chosen,) = [a for a in answer.alternatives if a.is_chosen]
    assert chosen.spec == answer.spec and not chosen.changes
    assert chosen.step_s == pytest.approx(plan.estimated_step_s, rel=1e-5)
    assert answer.alternatives[0].step_s == pytest.approx(plan.estimated_step_s, rel=1e-5)
    for other in (answer.alternatives[1], answer.alternatives[-1]):
        pinned = plan.with_pins({path: eval(other.spec, {"P": P})})
        assert other.step_s == pytest.approx(pinned.estimated_step_s, rel=1e-4)
        gained = pinned.communication_bytes - plan.communication_bytes
        if not path.startswith("result"):  # there a pin adds a node, which a free output has not
            assert other.extra_bytes == pytest.approx(gained, rel=1e-6, abs=1.0)
            assert other.peak_bytes == pytest.approx(pinned.estimated_peak_bytes, rel=1e-6)


def test_neighbours_say_who_binds_it(plan: ParallelPlan) -> None:
    answer = why(plan, UP)
    roles = {(n.role, n.operator, n.region) for n in answer.neighbours}
    assert ("its next value is made by", "sub", "update") in roles
    assert any(o == "dot_general" and r == "forward" for _, o, r in roles)
    assert any(o == "dot_general" and r == "backward" for _, o, r in roles)
    hidden = why(plan, "hidden")
    assert hidden.neighbours[0].role == "made by"
    assert len(hidden.paths) == 2 and hidden.kind == "named value"
    # A pin that does not suit its readers is moved to them, and the edge says what that costs.
    worst = eval(answer.alternatives[-1].spec, {"P": P})
    moved = why(plan.with_pins({UP: worst}), UP)
    assert any(n.seconds > 0 and n.steps for n in moved.neighbours)


def test_text(plan: ParallelPlan) -> None:
    text = plan.explain(UP)
    assert text.startswith(f"{UP}: input (state), float32[16, 64]\n  sharded as ")
    assert "neighbours:" in text and "the best step that has it:" in text
    assert text.count("→ P(") >= 1 and "chosen" in text
    unsolved = why(plan, UP, most=2)
    assert sum(a.is_bound for a in unsolved.alternatives) == 7
    assert "≥ " in explain_why(unsolved)
    assert "infeasible" in explain_why(
        replace(unsolved, alternatives=(replace(unsolved.alternatives[0], step_s=inf),))
    )


def test_pins_are_said_and_set_aside(plan: ParallelPlan) -> None:
    pinned = plan.with_pins({"state['layer_*']['up']": P("x")})
    answer = why(pinned, UP)
    assert "P('x')" in answer.pinned
    best = answer.alternatives[0]
    assert not best.is_chosen and best.step_s < pinned.estimated_step_s
    assert "the costs below ignore this" in explain_why(answer)


def test_a_budget_is_kept_to(plan: ParallelPlan) -> None:
    budget = plan.estimated_peak_bytes * 1.01
    options = ShardingOptions(memory_budget_bytes=budget, remat="none")
    method = ShardParallel((2, 2), options=options)
    tight = autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=method)
    answer = why(tight, UP, most=4)
    assert answer.budget_bytes == budget
    for one in answer.alternatives:
        if not one.is_bound:
            assert one.fits == (one.peak_bytes <= budget)
    assert any(not one.fits for one in answer.alternatives) == (
        "exceeds the budget" in explain_why(answer)
    )


def test_of_a_stage(pipeline: ParallelPlan) -> None:
    answer = why(pipeline, UP)
    assert answer.stage == 1
    own = pipeline.stages[1].plan
    assert own is not None
    (chosen,) = [a for a in answer.alternatives if a.is_chosen]
    assert chosen.step_s == pytest.approx(own.estimated_step_s, rel=1e-5)
    assert "in stage 1" in pipeline.explain(UP)
    assert "this is stage 0" in pipeline.explain("state['layer_*']['up']")
    assert why(pipeline, "batch").stage == 0


def test_single_numbers_and_single_devices(plan: ParallelPlan) -> None:
    assert "a scalar" in plan.explain("result[1]['loss']")
    alone = autopar.plan(step, STATE, BATCH, cluster=ClusterSpec(1, 1, "cpu"))
    assert "one device" in alone.explain("batch")


def test_other_methods() -> None:
    plan = autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=autopar.DataParallel())
    assert "allows no other layout" in plan.explain(UP)
    pinned = plan.with_pins({UP: P("x")})
    assert spec_at(pinned, UP) == P("x")
    assert spec_at(pinned, "state['layer_0']['up']") == P()
    assert pinned.estimated_step_s > plan.estimated_step_s


def test_plans_from_files(plan: ParallelPlan, pipeline: ParallelPlan) -> None:
    for made in (plan, pipeline):
        pinned = made.with_pins({UP: P()})
        read = ParallelPlan.from_json(pinned.to_json())
        with pytest.raises(PlanError, match="Bind the plan to its function"):
            read.with_pins({UP: P()})
        stored, known = read.explain(UP), pinned.explain(UP)
        assert stored.splitlines()[:2] == known.splitlines()[:2]  # what it is, and its spec
        assert "on each device, of" in stored and "Prices of other layouts" in stored
        with autopar_devices(4):
            bound = autopar.parallelize(step, method=read).plan(STATE, BATCH)
        assert "pins[" in why(bound, UP).pinned
        assert spec_at(bound, UP) == P()
        again = bound.with_pins({"batch": P()})
        assert spec_at(again, UP) == spec_at(again, "batch") == P()
        assert [pattern for pattern, _ in again.pinned] == [UP, "batch"]


class autopar_devices:
    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        autopar.init(devices=jax.devices()[: self.count])

    def __exit__(self, *_: object) -> None:
        autopar.shutdown()


def test_mistakes(plan: ParallelPlan) -> None:
    with pytest.raises(ArgumentError, match=r"matches no input.*Closest paths: state\['layer_1'\]"):
        plan.explain("state['layer_1']['upp']")
    with pytest.raises(ArgumentError, match="different shapes or layouts"):
        plan.explain("state*")
    with pytest.raises(ArgumentError, match="needs the path"):
        plan.explain("")


# -- pins


def test_pins_are_kept_and_priced(plan: ParallelPlan) -> None:
    first = plan.with_pins({UP: P("x", "y")})
    assert spec_at(first, UP) == P("x", "y")
    assert first.mesh_shape == plan.mesh_shape and first.pinned == ((UP, "P('x', 'y')"),)
    assert first.unpinned_step_s == plan.estimated_step_s
    second = first.with_pins({"batch": P(("x", "y"))})
    assert spec_at(second, UP) == P("x", "y") and spec_at(second, "batch") == P(("x", "y"))
    assert second.unpinned_step_s == plan.estimated_step_s
    assert second.estimated_step_s >= first.estimated_step_s * (1 - 1e-9)
    text = second.explain(detail="full")
    assert "pins cost" in text and pin_lines(second)[-1] in text
    assert not pin_lines(plan)
    back = second.with_pins({UP: plan.spec_of(plan.inputs[0])})  # the last word counts
    assert back.estimated_step_s <= second.estimated_step_s * (1 + 1e-9)
    read = ParallelPlan.from_json(second.to_json())
    assert (read.pinned, read.unpinned_step_s) == (second.pinned, second.unpinned_step_s)


def test_pinned_plans_run(plan: ParallelPlan, pipeline: ParallelPlan) -> None:
    want_state, want = jax.jit(step)(STATE, BATCH)
    with autopar_devices(4):
        for made in (plan, pipeline):
            pinned = made.with_pins({UP: P(), "state['layer_0']['down']": P("x")})
            got_state, got = autopar.parallelize(step, method=pinned)(STATE, BATCH)
            assert got_state["layer_0"]["down"].sharding.spec == P("x")
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
                (want_state, want),
                (got_state, got),
            )


def test_micro_batches_and_recomputation_are_kept() -> None:
    options = ShardingOptions(remat="all")
    method = ShardParallel((4,), num_micro_batches=2, options=options)
    made = autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=method)
    pinned = made.with_pins({UP: P("x")})
    assert made.remat and pinned.remat == made.remat and pinned.num_micro_batches == 2
    (chosen,) = [a for a in why(made, UP).alternatives if a.is_chosen]
    assert chosen.step_s == pytest.approx(made.estimated_step_s, rel=1e-5)
    want_state, want = jax.jit(step)(STATE, BATCH)
    with autopar_devices(4):
        got_state, got = autopar.parallelize(step, method=pinned)(STATE, BATCH)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-5)
    assert got_state["layer_1"]["up"].sharding.spec == P("x")
    np.testing.assert_allclose(
        got_state["layer_1"]["up"], want_state["layer_1"]["up"], rtol=2e-5, atol=1e-6
    )


def test_only_stages_that_pins_speak_of_are_solved(pipeline: ParallelPlan) -> None:
    pinned = pipeline.with_pins({UP: P()})
    assert pinned.stages[0].plan is pipeline.stages[0].plan
    assert pinned.stages[1].plan is not pipeline.stages[1].plan
    assert [s.mesh_shape for s in pinned.stages] == [s.mesh_shape for s in pipeline.stages]
    assert pinned.num_micro_batches == pipeline.num_micro_batches
    assert spec_at(pinned, UP) == P()
    again = pinned.with_pins({"state['layer_0']['up']": P()})
    assert again.stages[1].plan is pinned.stages[1].plan
    assert spec_at(again, UP) == P()


def test_wrong_pins(plan: ParallelPlan, pipeline: ParallelPlan) -> None:
    for made in (plan, pipeline):
        with pytest.raises(SpecError, match=r"matches no input.*Closest paths"):
            made.with_pins({"state['layer_9']['up']": P()})
        with pytest.raises(SpecError, match="names the mesh axis 'z'"):
            made.with_pins({UP: P("z")})
        with pytest.raises(SpecError, match="3 entries but the array has 2"):
            made.with_pins({UP: P(None, None, None)})
        for wrong in ({}, None, {UP: ("x",)}, {3: P()}):
            with pytest.raises(ArgumentError, match="with_pins"):
                made.with_pins(wrong)
    odd = autopar.plan(step, STATE, BATCH[:30], cluster=CLUSTER, method=ShardParallel((2, 2)))
    with pytest.raises(SpecError, match="does not divide"):
        odd.with_pins({"batch": P(("x", "y"))})
    stage = pipeline.stages[1].plan
    assert stage is not None
    with pytest.raises(PlanError, match="one stage"):
        stage.with_pins({UP: P()})
    alone = autopar.plan(step, STATE, BATCH, cluster=ClusterSpec(1, 1, "cpu"))
    with pytest.raises(PlanError, match="one device"):
        alone.with_pins({UP: P()})


def test_layouts_as_text() -> None:
    assert layout_text((0, 0), 2, ("x", "y")) == "P(('x', 'y'))"
    assert layout_text((-1, 1), 2, ("x", "y")) == "P(None, 'y')"
    assert layout_text((-2, -1), 2, ("x", "y")) == "P() partial along x"
    assert (
        layout_sentence((-1, 1), (2, 4), ("x", "y")) == "dimension 1 split 4 ways over y, 2 copies"
    )
    assert layout_sentence((-1, -1), (2, 4), ("x", "y")) == "replicated on 8 devices"


def test_what_only_a_mesh_knows() -> None:
    """Costs without a device are in the mesh's own units."""
    found = autopar.solve_sharding(step, STATE, BATCH, mesh=autopar.LogicalMesh((4,)))
    answer = why(found.plan, UP)
    assert not answer.is_timed and "ms" not in explain_why(answer)
    with pytest.raises((SpecError, MeshError)):
        found.plan.with_pins({UP: P("y")})
    read = ParallelPlan.from_json(found.plan.to_json())
    text = read.explain(UP)
    assert "sharded as" in text and "Prices of other layouts" in text and "ms" not in text
    with pytest.raises(PlanError, match="link costs of the mesh"):
        read.with_pins({UP: P()})

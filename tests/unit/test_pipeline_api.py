"""Pipelines as users meet them: results, plan files, explanations, figures, and mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import (
    AutoLayers,
    AutoParallel,
    ClusterSpec,
    ManualLayers,
    ManualStages,
    ParallelPlan,
    PipeshardParallel,
    ShardingOptions,
    UniformStages,
)
from autopar.errors import (
    ArgumentError,
    MemoryBudgetError,
    MeshError,
    PlanError,
    SpecError,
    TraceError,
)
from autopar.ir.plan import check_plan
from autopar.ir.sealed import digest

RNG = np.random.default_rng(0)
STATE = {
    "w": [(RNG.normal(size=(16, 16)) / 4).astype(np.float32) for _ in range(4)],
    "step": np.int32(0),
}
BATCH = RNG.normal(size=(16, 16)).astype(np.float32)
CPU = ClusterSpec(1, 8, "cpu")
TWO = PipeshardParallel(4, stages=UniformStages(2), layers=AutoLayers(4))


def loss_of(params, batch):
    x = batch
    for w in params["w"]:
        x = autopar.constrain(jnp.tanh(x @ w), "hidden")
    return (x**2).mean()


def step(state, batch):
    loss, grads = jax.value_and_grad(loss_of, allow_int=True)(state, batch)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads["w"])
    return {"w": new, "step": state["step"] + 1}, loss


def evaluate(state, batch):
    return loss_of(state, batch)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """(a parallelized step that has run once, the state after that)."""
    train = autopar.parallelize(step, method=TWO)
    state, _ = train(STATE, BATCH)
    return train, state


@pytest.fixture(scope="module")
def plan(trained: Any) -> ParallelPlan:
    return trained[0].last_planned.plan


def assert_same(got: Any, want: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


# -- results


@pytest.mark.ci
def test_state_lies_on_its_stages(trained: Any, plan: ParallelPlan) -> None:
    _, state = trained
    assert_same(state, jax.jit(step)(STATE, BATCH)[0])
    stages = plan.output_stages[0]["w"]
    assert stages == [(0,), (0,), (1,), (1,)]
    assert plan.input_stages[0]["w"] == stages
    for leaf, (stage,), spec in zip(state["w"], stages, plan.output_specs[0]["w"], strict=True):
        on = {jax.devices()[d] for d in plan.stages[stage].devices}
        assert leaf.sharding.device_set == on
        assert leaf.sharding.spec == spec
    assert plan.input_specs[0]["w"] == plan.output_specs[0]["w"]


def test_results_are_ordinary_arrays(trained: Any) -> None:
    train, state = trained
    assert "Array(" in repr(state["w"][3])
    on_host = jax.tree.map(np.asarray, state)
    want, want_loss = jax.jit(step)(on_host, BATCH)
    # As a checkpoint does it: to the host and back; numpy arrays are placed by the step.
    got, loss = train(on_host, BATCH)
    assert_same((got, loss), (want, want_loss))
    # Put back where it was, it is taken as it is.
    placed = jax.tree.map(lambda host, leaf: jax.device_put(host, leaf.sharding), on_host, got)
    assert_same(train(placed, BATCH), (want, want_loss))


def test_orbax_saves_and_restores(trained: Any, tmp_path: Any) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    _, state = trained
    with checkpoint.StandardCheckpointer() as writer:
        writer.save(tmp_path / "state", state)
        writer.wait_until_finished()
        shapes = jax.tree.map(checkpoint.utils.to_shape_dtype_struct, state)
        again = writer.restore(tmp_path / "state", shapes)
    assert_same(again, state)
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert one.sharding == two.sharding


# -- live bytes and the rest of `last_executable`


@pytest.mark.ci
def test_live_bytes_are_what_the_plan_says(trained: Any) -> None:
    train, _ = trained
    planned, executable = train._compile((STATE, BATCH), {})
    leaves = jax.tree.leaves((STATE, BATCH))
    results, stats = executable.run_tracked(leaves)
    assert_same(planned.traced.rebuild_output(results), jax.jit(step)(STATE, BATCH))
    live = executable.live_bytes()
    assert stats.peak_live_bytes == live
    assert all(live)
    for one, peak in zip(live, executable.mesh_memory_bytes(), strict=True):
        assert one <= peak
    for stage in planned.plan.stages:
        assert live[stage.mesh] <= stage.plan.estimated_peak_bytes  # counts temporaries too


def test_the_executable_tells_as_much_as_that_of_one_mesh(trained: Any, tmp_path: Any) -> None:
    executable = trained[0].last_executable
    assert executable.memory_bytes() == max(executable.mesh_memory_bytes())
    assert "// stage1_backward" in executable.hlo_text()
    assert {op.group_size for op in executable.collectives()} <= {2, 4}
    executable.dump_debug_info(tmp_path)
    assert ParallelPlan.load(tmp_path / "plan.json") == executable.plan
    assert "stages" in (tmp_path / "plan.txt").read_text()
    assert (tmp_path / "instructions_mesh1.txt").read_text().startswith("Run(")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["live_bytes"] == list(executable.live_bytes())
    assert figures["memory_bytes"] == executable.memory_bytes()
    assert "HloModule" in (tmp_path / "stage1_backward.optimized.hlo.txt").read_text()


def test_every_stage_program_is_compiled(trained: Any, plan: ParallelPlan) -> None:
    programs = autopar.compile(step, STATE, BATCH, plan=plan)
    phases = ("prepare", "forward", "backward", "update")
    assert set(programs) == {f"stage{s}_{phase}" for s in (0, 1) for phase in phases}
    for program in programs.values():
        assert isinstance(program, jax.stages.Compiled)
    with pytest.raises(MeshError, match="needs 8 devices, got 4"):
        autopar.compile(step, STATE, BATCH, plan=plan, devices=jax.devices()[:4])


# -- plan files


@pytest.fixture(scope="module")
def searched() -> ParallelPlan:
    method = PipeshardParallel(4, options=ShardingOptions(memory_budget_bytes=1e9))
    return autopar.plan(step, STATE, BATCH, cluster=ClusterSpec(2, 2, "v100"), method=method)


def test_round_trip(plan: ParallelPlan, searched: ParallelPlan, tmp_path: Any) -> None:
    assert searched.search is not None and searched.search.best
    for one in (plan, searched):
        one.save(tmp_path / "plan.json")
        again = ParallelPlan.load(tmp_path / "plan.json")
        assert again == one
        assert again.search == one.search
        assert again.explain(detail="full") == one.explain(detail="full")
        assert again.input_stages == {t.path: t.stages for t in one.inputs}
        assert again.output_specs == {t.path: one.spec_of(t) for t in one.outputs}


def test_a_saved_plan_is_a_method(plan: ParallelPlan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.json")
    train = autopar.parallelize(step, method=ParallelPlan.load(tmp_path / "plan.json"))
    assert_same(train(STATE, BATCH), jax.jit(step)(STATE, BATCH))
    assert train.last_planned.plan.stages[1].devices == plan.stages[1].devices


def test_plans_for_something_else(plan: ParallelPlan) -> None:
    train = autopar.parallelize(step, method=plan)
    with pytest.raises(PlanError, match=r"batch: the plan was made for float32\[16, 16\]"):
        train.plan(STATE, BATCH[:6])

    def other(state, batch):
        state, loss = step(state, batch)
        return state, loss + 1

    with pytest.raises(PlanError, match=r"does not fit other.*not the one it was made for"):
        autopar.parallelize(other, method=plan).plan(STATE, BATCH)
    with pytest.raises(PlanError, match="has 6 input arrays, this call of step has 3"):
        train.plan({"w": STATE["w"][:1], "step": STATE["step"]}, BATCH)
    autopar.init(devices=jax.devices()[:4])
    try:
        with pytest.raises(MeshError, match="needs 8 devices, got 4"):
            train(STATE, BATCH)
    finally:
        autopar.shutdown()


def stage_with(number: int, **fields: Any) -> Any:
    def change(plan: ParallelPlan) -> ParallelPlan:
        stages = list(plan.stages)
        stages[number] = replace(stages[number], **fields)
        return replace(plan, stages=tuple(stages))

    return change


def tensor_with(**fields: Any) -> Any:
    return lambda plan: replace(plan, inputs=(replace(plan.inputs[0], **fields), *plan.inputs[1:]))


MALFORMED = {
    "an unknown schedule": (lambda p: replace(p, schedule="2f2b"), "schedule '2f2b'"),
    "no schedule": (lambda p: replace(p, schedule=""), "schedule ''"),
    "no layering": (lambda p: replace(p, layering=None), "does not say how its layers were found"),
    "a gap between layers": (stage_with(1, layers=(3, 4)), "do not cover 4 layers"),
    "layers left over": (stage_with(1, layers=(2, 3)), "do not cover 4 layers"),
    "an empty stage": (
        lambda p: stage_with(0, layers=(0, 0))(stage_with(1, layers=(0, 4))(p)),
        "stage 0 has",
    ),
    "devices twice": (stage_with(1, devices=(0, 1, 2, 3)), "do not tile 8 devices"),
    "devices beyond": (stage_with(1, devices=(8, 9, 10, 11)), "do not tile 8 devices"),
    "too few devices": (stage_with(1, devices=(4, 5)), "stage 1 has 2 devices"),
    "a mesh that is not there": (stage_with(1, mesh=2), "do not tile 8 devices"),
    "another stage's mesh": (stage_with(1, mesh=0), "other devices than its mesh"),
    "a mesh of another shape": (stage_with(0, mesh_shape=(8,)), "stage 0 has no plan"),
    "a stage without a plan": (stage_with(1, plan=None), "stage 1 has no plan"),
    "a stage that is not there": (tensor_with(stages=(2,)), r"on the stages \(2,\)"),
    "no stage": (tensor_with(stages=()), r"on the stages \(\)"),
    "a layout of too many axes": (tensor_with(layout=(-1, -1, -1)), "has the layout"),
    "a layout of a dimension too many": (tensor_with(layout=(3,), shape=()), "has the layout"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_plans(plan: ParallelPlan, case: str) -> None:
    change, message = MALFORMED[case]
    text = change(plan).to_json()
    with pytest.raises(PlanError, match=message):
        ParallelPlan.from_json(text)


def test_an_unknown_layering(plan: ParallelPlan) -> None:
    document = json.loads(plan.to_json())
    document["plan"]["layering"] = "by feel"
    document["sha256"] = digest(document["plan"])
    with pytest.raises(PlanError, match="layering: 'by feel' is not a valid LayerSource"):
        ParallelPlan.from_json(json.dumps(document))


def test_malformed_search(searched: ParallelPlan) -> None:
    document = json.loads(searched.to_json())
    document["plan"]["search"]["best"][0]["stages"][0]["layers"] = "all"
    document["sha256"] = digest(document["plan"])
    with pytest.raises(PlanError, match="malformed plan"):
        ParallelPlan.from_json(json.dumps(document))


# -- explanations


def test_explanation(plan: ParallelPlan) -> None:
    text = plan.explain(detail="full")
    lines = text.split("\n")
    assert lines[0] == "step: a pipeline of 2 stages on 8 devices"
    assert "  schedule  1f1b, 4 micro-batches" in lines
    assert any(line.startswith("predicted step: ") for line in lines)
    assert any(line.startswith("  pipeline bubble") for line in lines)
    table = lines[lines.index("stages (times per micro-batch):") :]
    assert table[1].split()[:6] == ["stage", "layers", "submesh", "mesh", "devices", "forward"]
    assert table[3].split()[:3] == ["0", "0–1", "1×4"]
    assert table[4].split()[4] == "4–7"
    assert "  stage 0: layer * (2 layers)" in lines
    # Both stages hold the same, apart from numbers and the batch.
    arrays = lines[lines.index("inputs:") :]
    held = [line for line in arrays if "state['w'][*]" in line]
    assert [line.split()[-2:] for line in held] == [["4", "0–1"]]
    assert "outputs other than state:" in lines
    assert "named values:" in lines
    assert max(map(len, lines)) <= 100


def test_explanation_of_a_search(searched: ParallelPlan) -> None:
    text = searched.explain(detail="full")
    assert "without a pipeline: " in text
    assert "best pipelines by the cost tables:" in text
    assert f"search: priced {searched.search.num_candidates} stage candidates over " in text
    assert f"pruned {searched.search.num_pruned}, " in text
    found = text[text.index("by the cost tables:") :].split("\n")[1]
    assert "4 micro-batches: " in found and " on 2×2" in found
    assert max(map(len, text.split("\n"))) <= 100


def test_equal_stages_are_shown_once() -> None:
    method = PipeshardParallel(2, stages=UniformStages(4), layers=AutoLayers(4))
    plan = autopar.plan(step, STATE, BATCH, cluster=ClusterSpec(1, 4, "cpu"), method=method)
    text = plan.explain(detail="full")
    arrays = text[text.index("inputs:") :].split("\n\n")[0]
    (line,) = (line for line in arrays.split("\n") if "['w'][*]" in line)
    assert line.split()[-2:] == ["4", "0–3"]


def test_a_plan_on_one_mesh_says_why_it_is_no_pipeline() -> None:
    plan = autopar.plan(step, STATE, BATCH[:1], cluster=CPU, method=AutoParallel())
    assert not plan.is_pipeline and plan.search is not None and plan.search.notes
    text = " ".join(plan.explain(detail="full").split())
    assert all(note in text for note in plan.search.notes)


# -- mistakes


def scan_with_marks(state, batch):
    def body(x, w):
        x = jnp.tanh(x @ w)
        autopar.mark_layer_boundary()
        return x, None

    def loss(weights):
        return (jax.lax.scan(body, batch, weights)[0] ** 2).mean()

    return state - 0.1 * jax.grad(loss)(state)


def manual(*submeshes: Any, **options: Any) -> PipeshardParallel:
    count = len(submeshes)
    ids = [[s] for s in range(count - 1)] + [list(range(count - 1, 4))]
    return PipeshardParallel(2, stages=ManualStages(ids, list(submeshes)), **options)


def uniform(count: int, num: int | str = 2, **options: Any) -> PipeshardParallel:
    return PipeshardParallel(num, stages=UniformStages(count), **options)


BAD: dict[str, tuple[Any, PipeshardParallel, type, str]] = {
    "more stages than layers": (
        step,
        uniform(8, layers=AutoLayers(4)),
        ArgumentError,
        r"num_stages=8.*there are 4\. Ask for 4 stages or fewer",
    ),
    "more layers than can be cut": (
        step,
        uniform(2, layers=AutoLayers(99)),
        ArgumentError,
        r"99 layers.*can be cut into 1 to",
    ),
    "devices left over": (step, manual((1, 4), (1, 2)), MeshError, "6 devices.*2 are left over"),
    "a mesh larger than the devices": (
        step,
        manual((1, 8), (1, 8)),
        MeshError,
        "need 16 devices.*8 are missing",
    ),
    "stages that do not divide the devices": (
        step,
        uniform(3),
        MeshError,
        r"cannot be divided into 3 equal parts.*\[1, 2, 4, 8\]",
    ),
    "micro-batches that do not divide the batch": (
        step,
        uniform(2, 3),
        MeshError,
        "batch: its batch dimension of 16 is not divisible by num_micro_batches=3",
    ),
    "no backward pass": (
        evaluate,
        uniform(2),
        ArgumentError,
        "evaluate has no backward pass. Use schedule='inference'",
    ),
    "no backward pass, searched": (
        evaluate,
        PipeshardParallel(2),
        ArgumentError,
        "evaluate has no backward pass",
    ),
    "a backward pass in inference": (
        step,
        uniform(2, schedule="inference"),
        ArgumentError,
        "step takes a gradient. Use a training schedule",
    ),
    "a boundary in a scan": (
        scan_with_marks,
        uniform(2, layers=ManualLayers()),
        TraceError,
        "inside a scan body: .*test_pipeline_api.py.*unroll the loop",
    ),
    "no boundary": (step, uniform(2, layers=ManualLayers()), TraceError, "marks no layer boundary"),
    "an odd number of interleaved stages": (
        step,
        uniform(3, schedule="interleaved_1f1b"),
        ArgumentError,
        "num_stages=3.*even number",
    ),
    "interleaved submeshes that do not repeat": (
        step,
        manual((1, 4), (1, 4), (1, 4), schedule="interleaved_1f1b"),
        ArgumentError,
        "must be a multiple of 2",
    ),
    "a number of micro-batches to be found for given stages": (
        step,
        uniform(2, "auto"),
        ArgumentError,
        r"num_micro_batches='auto'.*needs stages=AutoStages\(\)",
    ),
    "a pin that matches nothing": (
        step,
        uniform(2, options=ShardingOptions(pins={"state['v']": P("x")})),
        SpecError,
        r"\"state\['v'\]\" matches no input.*Near it are: state\['w'\]",
    ),
    "an axis that no stage has": (
        step,
        uniform(2, options=ShardingOptions(pins={"state['w'][3]": P("z")})),
        SpecError,
        r"state\['w'\]\[3\].*names the mesh axis 'z'",
    ),
    "forbidden axes of nothing": (
        step,
        uniform(2, options=ShardingOptions(forbid_axes={"states*": "x"})),
        SpecError,
        "forbid_axes.*'states.' matches no input",
    ),
    "layers that are not there": (
        step,
        PipeshardParallel(
            2,
            layers=AutoLayers(3),
            stages=ManualStages([[0, 1], [2, 3]], [(1, 4), (1, 4)]),
        ),
        ArgumentError,
        "there is no layer 3: the step has 3 layers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes(case: str) -> None:
    fn, method, kind, message = BAD[case]
    state = np.stack(STATE["w"]) if fn is scan_with_marks else STATE
    with pytest.raises(kind) as caught:
        autopar.plan(fn, state, BATCH, cluster=CPU, method=method)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("num", [1, 2])
def test_a_step_that_reads_no_batch(num: int) -> None:
    with pytest.raises(TraceError, match="batch"):
        autopar.plan(lambda s: step(s, BATCH), STATE, cluster=CPU, method=uniform(2, num))


def test_a_stage_that_cannot_fit() -> None:
    small = ShardingOptions(memory_budget_bytes=1000)
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.plan(step, STATE, BATCH, cluster=CPU, method=uniform(2, options=small))
    text = str(caught.value)
    assert text.startswith("stage 1 of 2 (layers ")  # solved first: it has the most work
    assert "more than the budget of 1000 B" in text
    assert "give the stage fewer layers or more devices" in text
    assert "rematerialisation" not in text  # was tried
    assert caught.value.peak_bytes > caught.value.budget_bytes == 1000
    with pytest.raises(MemoryBudgetError, match=r"no pipeline of its .* layers fits.*Layer 0"):
        autopar.plan(step, STATE, BATCH, cluster=CPU, method=PipeshardParallel(2, options=small))


# -- options


def plan_with(**options: Any) -> ParallelPlan:
    method = replace(TWO, options=ShardingOptions(**options))
    return autopar.plan(step, STATE, BATCH, cluster=CPU, method=method)


def test_pins_of_one_stage() -> None:
    plan = plan_with(pins={"state['w'][3]": P(None, "x")})
    assert plan.input_specs[0]["w"][3] == P(None, "x")
    assert plan.output_specs[0]["w"][3] == P(None, "x")
    assert plan.input_stages[0]["w"][3] == (1,)


def test_pins_of_named_values() -> None:
    plan = plan_with(pins={"hidden": P(None, "x")})
    assert {t.stages[0] for t in plan.named} == {0, 1}
    assert {plan.spec_of(t) for t in plan.named} == {P(None, "x")}


def test_the_batch_axis_splits_the_batch_and_no_stack_of_activations() -> None:
    plan = plan_with(batch_axis="x")
    assert plan.input_specs[1] == P("x")
    assert plan.stages[0].plan is not None and plan.stages[1].plan is not None
    (arrival,) = [t for t in plan.stages[1].plan.inputs if t.path.startswith("value")]
    assert arrival.shape == (4, 4, 16)  # a stack of micro-batches
    assert 0 not in arrival.layout


def test_forbidden_axes() -> None:
    plan = plan_with(forbid_axes={"*": "x"})
    tensors = (*plan.inputs, *plan.outputs, *plan.named)
    assert not any("x" in str(plan.spec_of(t)) for t in tensors)


OPTIONS: dict[str, dict[str, Any]] = {
    "pins and batch axis": {
        "pins": {"state['w'][3]": P(None, "x"), "hidden": P(None, "x")},
        "batch_axis": "x",
    },
    "moved state": {"pins": {"state['w'][1]": P("x"), "result[0]['w'][1]": P(None, "x")}},
    "no reduce-scatter": {"allow_reduce_scatter": False, "pins": {"state['w']*": P("x")}},
    "no all-to-all": {"allow_all_to_all": False, "pins": {"hidden": P(None, "x")}},
    "no replicated parameters": {"allow_replicated_parameters": False},
    "all layers recomputed": {"remat": "all"},
}


@pytest.mark.representatives("pins and batch axis", "moved state")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_give_the_same_results(options: dict[str, Any]) -> None:
    train = autopar.parallelize(step, method=replace(TWO, options=ShardingOptions(**options)))
    result = train(STATE, BATCH)
    want = jax.jit(step)(STATE, BATCH)
    assert_same(result, want)
    plan = train.last_planned.plan
    assert [leaf.sharding.spec for leaf in result[0]["w"]] == plan.output_specs[0]["w"]
    pinned = {t.path: plan.spec_of(t) for t in (*plan.inputs, *plan.outputs)}
    for path, spec in options.get("pins", {}).items():
        assert pinned.get(path, spec) == spec
    assert all(stage.remat for stage in plan.stages) == (options.get("remat") == "all")
    assert_same(train(result[0], BATCH), jax.jit(step)(want[0], BATCH))


@pytest.mark.ci
def test_an_evaluation_follows_a_plan_from_a_file(plan: ParallelPlan) -> None:
    train = autopar.parallelize(step, method=ParallelPlan.from_json(plan.to_json()))
    state, _ = train(STATE, BATCH)
    follow = autopar.parallelize(evaluate, method=autopar.FollowParallel(train))
    want = jax.jit(evaluate)(jax.device_get(state), BATCH)
    np.testing.assert_allclose(follow(state, BATCH), want, rtol=2e-5)
    shardings = follow.last_executable.input_shardings
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == shardings[:-1]


@pytest.mark.ci
def test_submeshes_of_which_a_stage_can_use_a_part() -> None:
    method = PipeshardParallel(4, stages=ManualStages([[0, 1], [2, 3]], [(1, 3), (1, 5)]))
    train = autopar.parallelize(step, method=method)
    assert_same(train(STATE, BATCH), jax.jit(step)(STATE, BATCH))
    plan = train.last_planned.plan
    check_plan(plan)
    assert [len(stage.devices) for stage in plan.stages] == [2, 4]
    assert any("2 of 3 devices are used" in warning for warning in plan.warnings)


def test_the_last_search_is_kept() -> None:
    method = PipeshardParallel(4, layers=AutoLayers(4))
    plan = autopar.plan(step, STATE, BATCH, cluster=ClusterSpec(1, 2, "cpu"), method=method)
    report = autopar.get_last_dp_result()
    assert report is not None and report == plan.search
    assert report.best and report.checked and report.num_candidates > 0

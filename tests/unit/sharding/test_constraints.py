"""What options and methods ask for, and that plans keep to it or say why they cannot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import ClusterSpec, LogicalMesh, ManualParallel, ShardingOptions, ShardParallel
from autopar.cost.reshard import reshard_table
from autopar.errors import ArgumentError, AutoparError, MeshError, SpecError
from autopar.ir.spec import PARTIAL, WHOLE, all_layouts
from examples.models import build

MESH = LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(state, batch):
    def loss_of(params):
        h = autopar.constrain(jnp.tanh(batch["x"] @ params["w"]), "hidden")
        return ((h @ params["v"] + params["b"]) ** 2).mean(), h

    (loss, h), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss, h


STATE = {"w": array(16, 32), "v": array(32, 16), "b": array(16)}
BATCH = {"x": array(8, 16)}


def plan_of(mesh: LogicalMesh = MESH, fn=step, args=(STATE, BATCH), **options: Any):
    return autopar.solve_sharding(fn, *args, mesh=mesh, options=ShardingOptions(**options)).plan


def specs_of(plan: autopar.ParallelPlan) -> dict[str, P]:
    return {t.path: plan.spec_of(t) for t in (*plan.inputs, *plan.outputs, *plan.named)}


def refused(error: type[AutoparError], *parts: str, **options: Any) -> str:
    with pytest.raises(error) as caught:
        plan_of(**options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


# -- pins


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("state['w']", P("y", "x")),
        ("batch['x']", P(None, ("x", "y"))),
        ("result[2]", P(None, "x")),
        ("hidden", P("y")),
        ("result[0]['v']", P("x")),
    ],
)
def test_a_pin_is_kept(path: str, spec: P) -> None:
    plan = plan_of(pins={path: spec})
    assert specs_of(plan)[path] == spec
    # It cannot be cheaper than where the solver is free.
    assert plan.solver.objective >= plan_of().solver.objective - 1e-9


def test_the_pin_of_a_state_output_is_that_of_its_input() -> None:
    specs = specs_of(plan_of(pins={"result[0]['w']": P("x", "y")}))
    assert specs["state['w']"] == specs["result[0]['w']"] == P("x", "y")


def test_state_pinned_in_two_ways_is_no_state() -> None:
    plan = plan_of(pins={"state['w']": P("x"), "result[0]['w']": P(None, "y")})
    specs = specs_of(plan)
    assert (specs["state['w']"], specs["result[0]['w']"]) == (P("x"), P(None, "y"))
    assert {t.path: t.role for t in plan.inputs}["state['w']"] == ""


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("state['?']", {"state['w']", "state['v']", "state['b']"}),
        ("*['w']", {"state['w']", "result[0]['w']"}),
        ("*", set(specs_of(plan_of()))),
        ("state[?w?]", {"state['w']"}),
    ],
)
def test_in_patterns_only_stars_and_question_marks_are_special(
    pattern: str, matched: set[str]
) -> None:
    """Every array is pinned whole, so that those that are not show themselves."""
    pinned = specs_of(plan_of(pins={pattern: P()}))
    assert {path for path in matched if pinned[path] != P()} == set()
    free = specs_of(plan_of())
    both = matched | {"state" + m[9:] for m in matched if m.startswith("result[0]")}
    both |= {"result[0]" + m[5:] for m in matched if m.startswith("state")}
    assert pattern == "*" or any(spec != P() for p, spec in pinned.items() if p not in both)
    assert any(free[path] != P() for path in matched)


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    message = refused(SpecError, "pins", "\"state['q']\"", pins={"state['q']": P()})
    assert "state['w']" in message
    assert "'*' stands for any text" in message
    refused(SpecError, "forbid_axes", "'hiden'", "hidden", forbid_axes={"hiden": "x"})


def test_patterns_that_ask_for_different_specs() -> None:
    pins = {"state['w']": P("x"), "*['w']": P(None, "x")}
    parts = ("state['w']", "pins[\"state['w']\"]", "pins[\"*['w']\"]", "Ask for one spec")
    refused(SpecError, *parts, pins=pins)
    same = {"state['w']": P("x"), "*['w']": P(("x",), None)}
    assert specs_of(plan_of(pins=same))["state['w']"] == P("x")


@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        ({"state['b']": P(None, "x")}, ("state['b'] (pins[", "1 dimensions")),
        ({"hidden": P("z")}, ("hidden (pins['hidden'])", "mesh axis 'z'", "('x', 'y')")),
    ],
)
def test_a_spec_that_does_not_fit(pins: dict[str, P], parts: tuple[str, ...]) -> None:
    refused(SpecError, *parts, pins=pins)


def test_equal_layers_pinned_in_different_ways() -> None:
    """Folding ties equal layers; pins that differ untie them."""

    def layers(state, batch):
        def loss_of(ws):
            h = batch
            for i, w in enumerate(ws):
                h = autopar.constrain(jnp.tanh(h @ w), f"layer{i}")
            return (h**2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    args = ([array(16, 16)] * 16, array(16, 16))
    tied = plan_of(fn=layers, args=args)
    assert tied.solver.sizes["classes"] < tied.solver.sizes["nodes"] / 2
    pins = {"state[5]": P("x", "y"), "layer8": P(None, ("x", "y"))}
    specs = specs_of(plan_of(fn=layers, args=args, pins=pins))
    assert {path: specs[path] for path in pins} == pins
    assert specs["state[4]"] != P("x", "y")


# -- other constraints


def test_axes_that_are_forbidden_split_nothing() -> None:
    free = specs_of(plan_of())
    assert any("y" in str(spec) for spec in free.values())
    for path, spec in specs_of(plan_of(forbid_axes={"*": "y"})).items():
        assert "y" not in str(spec), path
    specs = specs_of(plan_of(forbid_axes={"hidden": ("x", "y"), "result[2]": ["x"]}))
    assert specs["hidden"] == P()
    assert "x" not in str(specs["result[2]"])


def test_what_is_pinned_to_a_forbidden_axis() -> None:
    parts = ("hidden", "P", "forbid_axes", "('y',)", "Drop one")
    refused(SpecError, *parts, pins={"hidden": P("y")}, forbid_axes={"hid*": "y"})


def test_state_of_which_too_much_is_asked() -> None:
    options = {"pins": {"state['w']": P("y")}, "forbid_axes": {"result[0]['w']": "y"}}
    refused(SpecError, "result[0]['w']", "leave no layout", **options)


@pytest.mark.parametrize("axes", ["x", "y", ("x", "y")])
def test_the_batch_is_split_over_its_axis_and_no_other(axes: Any) -> None:
    assert specs_of(plan_of(batch_axis=axes))["batch['x']"] == P(axes)


def test_a_batch_axis_needs_a_batch_that_it_divides() -> None:
    args = (STATE, {"x": array(6, 16)})
    refused(SpecError, "batch['x']", "batch_axis=('y',)", "evenly", args=args, batch_axis="y")
    refused(
        ArgumentError, "without a batch", fn=lambda x: x @ x, args=(array(8, 8),), batch_axis="x"
    )


def test_the_batch_axis_and_a_pin_may_not_differ() -> None:
    parts = ("batch['x']", "batch_axis=('x',)", "pins['batch*']")
    refused(SpecError, *parts, batch_axis="x", pins={"batch*": P("y")})


def test_parameters_that_may_not_be_replicated() -> None:
    """Where every collective takes long, data parallelism with whole parameters needs fewest."""
    mesh = LogicalMesh((8,), alpha=(100,), beta=(1e-3,))
    whole = {"pins": {"batch*": P("x"), "hidden": P("x")}}
    free = specs_of(plan_of(mesh, **whole))
    assert free["state['w']"] == free["state['v']"] == P()
    split = specs_of(plan_of(mesh, allow_replicated_parameters=False, **whole))
    assert P() not in (split["state['w']"], split["state['v']"])
    assert split["state['b']"] == P()  # one dimension


def test_parameters_that_cannot_be_split_or_are_pinned_may_be_whole() -> None:
    state = {"w": array(16, 33), "v": array(33, 5), "b": array(5)}
    mesh = LogicalMesh((8,), alpha=(100,), beta=(1e-3,))
    options = {"allow_replicated_parameters": False, "pins": {"state['w']": P()}}
    specs = specs_of(plan_of(mesh, args=(state, BATCH), **options))
    assert specs["state['w']"] == specs["state['v']"] == P()


# -- collectives


def collectives(plan: autopar.ParallelPlan) -> str:
    return " ".join(kind for module in plan.modules for kind, _ in module.collectives)


def test_reduce_scatters_can_be_forbidden() -> None:
    """A product split where it contracts, wanted split over its rows."""

    def product(x, w):
        return x @ w

    args = (array(16, 4096), array(4096, 16))
    options = {"pins": {"x": P(None, "x"), "w": P("x"), "result": P("x")}}
    mesh = LogicalMesh((8,))
    with_it = plan_of(mesh, product, args, **options)
    assert collectives(with_it) == "reduce-scatter(x)"
    without = plan_of(mesh, product, args, allow_reduce_scatter=False, **options)
    assert collectives(without) == "all-reduce(x)"
    assert without.solver.objective > with_it.solver.objective


def test_all_to_alls_can_be_forbidden() -> None:
    def transposed(x):
        return x * 2.0

    options = {"pins": {"x": P("x"), "result": P(None, "x")}}
    mesh = LogicalMesh((8,))
    with_it = plan_of(mesh, transposed, (array(64, 64),), **options)
    assert collectives(with_it) == "all-to-all(x)"
    without = plan_of(mesh, transposed, (array(64, 64),), allow_all_to_all=False, **options)
    assert collectives(without) == "all-gather(x)"
    assert without.solver.objective > with_it.solver.objective


@pytest.mark.parametrize("forbidden", ["reduce-scatter", "all-to-all"])
def test_all_layouts_are_reached_without_a_collective(forbidden: str) -> None:
    plain, less = LogicalMesh((2, 4)), LogicalMesh((2, 4), forbidden=frozenset((forbidden,)))
    shape = (16, 16)
    all_ways = reshard_table(plain, shape, 1024.0, True)
    fewer = reshard_table(less, shape, 1024.0, True)
    for source in all_layouts(shape, less.shape, with_partial=True):
        for target in all_layouts(shape, less.shape):
            assert fewer.cost(source, target) >= all_ways.cost(source, target) - 1e-9
            assert fewer.cost(source, target) < float("inf")
            here = source
            for there in fewer.path(source, target):
                moved = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
                if forbidden == "reduce-scatter":
                    assert all(a != PARTIAL or b == WHOLE for a, b in moved)
                else:
                    assert not any(a >= 0 and b >= 0 for a, b in moved)
                here = there


def test_a_mesh_forbids_what_can_be_avoided() -> None:
    with pytest.raises(MeshError, match=r"forbidden=.*all-to-all"):
        LogicalMesh((8,), forbidden=frozenset(("all-gather",)))


# -- time


@pytest.mark.ci
def test_a_solver_out_of_time_leaves_a_plan_with_its_gap() -> None:
    """The relaxation of this model alone takes seconds."""
    example = build("gpt-tiny")
    args = example.abstract_state(), example.abstract_batch()
    options = {"fold_layers": False, "solver_time_limit_s": 0.01}
    plan = plan_of(fn=example.train_step, args=args, **options)
    assert 0 < plan.solver.gap < 1
    assert plan.solver.lower_bound < plan.solver.objective
    assert f"within {plan.solver.gap:.2%} of optimal" in plan.explain(detail="full")


# -- meshes


def test_meshes_on_which_options_cannot_be_kept_are_left_out() -> None:
    """Of (8,), (2, 4) and (4, 2) the first has no axis y, and by the last 2 is not divided."""
    args = ({**STATE, "b": array(16)}, {"x": array(2, 16)})
    options = ShardingOptions(batch_axis="x", pins={"hidden": P(None, "y")})
    cluster = ClusterSpec(1, 8)
    plan = autopar.plan(step, *args, cluster=cluster, method=ShardParallel(options=options))
    assert plan.mesh_shape == (2, 4)


def test_an_error_says_why_each_mesh_was_refused() -> None:
    options = ShardingOptions(batch_axis=("x", "y"))
    args = (STATE, {"x": array(4, 16)})
    with pytest.raises(SpecError) as caught:
        cluster = ClusterSpec(1, 8)
        autopar.plan(step, *args, cluster=cluster, method=ShardParallel(options=options))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no mesh of 8 devices can be used:"
    assert lines[1].startswith("  (8,): batch['x']") and "'y'" in lines[1]
    assert lines[2].startswith("  (2, 4): batch['x']") and "evenly" in lines[2]
    assert lines[3].startswith("  (4, 2): batch['x']") and "evenly" in lines[3]


def test_an_error_that_is_the_same_on_all_meshes_is_raised_as_it_is() -> None:
    options = ShardingOptions(pins={"state['b']": P(None, "x")})
    with pytest.raises(SpecError, match=r"^state\['b'\]"):
        cluster = ClusterSpec(1, 8)
        autopar.plan(step, STATE, BATCH, cluster=cluster, method=ShardParallel(options=options))


# -- outputs of ManualParallel


def test_outputs_in_layouts_that_the_op_cannot_give() -> None:
    """A split by rows leaves the sum over rows partial; it is wanted split over its columns, and
    the array itself, returned twice, in two ways."""

    def fn(x):
        y = x.reshape(4, 24)
        return y, y, x, y.sum(0)

    out = (P("x"), P(None, ("x", "y")), P(None, "y"), P("y"))
    method = ManualParallel((2, 4), ("x", "y"), (P("x"),), out)
    plan = autopar.plan(fn, array(8, 12), cluster=ClusterSpec(1, 8), method=method)
    assert plan.output_specs == out
    assert plan.input_specs == (P("x"),)


def test_the_plan_says_what_was_asked() -> None:
    plan = plan_of(pins={"hidden": P("y")}, allow_all_to_all=False)
    assert "pins={'hidden': " + repr(P("y")) + "}" in plan.method
    assert "allow_all_to_all=False" in plan.method
    assert "solver" not in plan.method


@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_state_without_elements_is_not_split(method: str) -> None:
    """An empty buffer in the state, whose rows any number of devices divides."""

    def train(state, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(state["w"])
        return {"w": state["w"] - 0.1 * grads, "seen": state["seen"]}, loss

    state = {"w": array(64, 64), "seen": array(0, 4)}
    plan = autopar.plan(
        train, state, array(16, 64), cluster=ClusterSpec(1, 8, "h100-sxm"), method=method
    )
    specs = specs_of(plan)
    assert specs["state['seen']"] == P()
    assert (specs["state['w']"] != P()) == (method == "zero3")

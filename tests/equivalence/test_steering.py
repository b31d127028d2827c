"""Steps that users steer give what `jax.jit` gives, and lie where they were told to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import ManualParallel, ShardingOptions, ShardParallel

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 4).astype(np.float32)


STATE = {"w": array(16, 32), "v": array(32, 16), "b": array(16)}
BATCH = {"x": array(8, 16)}


def step(state, batch):
    def loss_of(params):
        h = autopar.constrain(jnp.tanh(batch["x"] @ params["w"]), "hidden")
        return ((h @ params["v"] + params["b"]) ** 2).mean(), h

    (loss, h), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss, h


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def assert_placed(arrays: Any, specs: Any) -> None:
    """That arrays really lie as the plan says."""
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    for own, spec in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    ):
        wanted = jax.sharding.NamedSharding(own.sharding.mesh, spec)
        assert own.sharding.is_equivalent_to(wanted, own.ndim)


OPTIONS: dict[str, dict[str, Any]] = {
    "pinned input": {"pins": {"state['w']": P("y", "x")}},
    "pinned output": {"pins": {"result[2]": P(None, ("x", "y"))}},
    "pinned name": {"pins": {"hidden": P("y", "x")}},
    "moved state": {"pins": {"state['w']": P("x"), "result[0]['w']": P(None, "y")}},
    "forbidden axes": {"forbid_axes": {"*": "y"}},
    "batch axis": {"batch_axis": ("x", "y")},
    "no reduce-scatter": {
        "allow_reduce_scatter": False,
        "pins": {"state*": P("x"), "batch*": P("x"), "hidden": P("x")},
    },
    "no all-to-all": {
        "allow_all_to_all": False,
        "pins": {"hidden": P("x"), "result[2]": P(None, "x")},
    },
    "no replicated parameters": {"allow_replicated_parameters": False},
    "no time": {"solver_time_limit_s": 1e-6, "fold_layers": False},
}


@pytest.mark.representatives("moved state", "pinned output")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    method = ShardParallel((2, 4), options=ShardingOptions(**options))
    parallel = autopar.parallelize(step, method=method)
    result = parallel(STATE, BATCH)
    assert_same(result, jax.jit(step)(STATE, BATCH))
    plan = parallel.last_executable.plan
    assert_placed(result, plan.output_specs)
    specs = {t.path: plan.spec_of(t) for t in (*plan.inputs, *plan.outputs, *plan.named)}
    for path, spec in options.get("pins", {}).items():
        assert path.endswith("*") or specs[path] == spec
    kinds = {op.kind for op in parallel.last_executable.collectives()}
    assert options.get("allow_all_to_all", True) or "all-to-all" not in kinds
    assert options.get("allow_reduce_scatter", True) or "reduce-scatter" not in kinds
    # The state that comes back can be passed again.
    again = parallel(result[0], BATCH)
    assert_same(again, jax.jit(step)(jax.jit(step)(STATE, BATCH)[0], BATCH))


def test_outputs_that_the_op_cannot_give() -> None:
    def fn(x):
        y = x.reshape(4, 24)
        return y, y, x, y.sum(0)

    out = (P("x"), P(None, ("x", "y")), P(None, "y"), P("y"))
    method = ManualParallel((2, 4), ("x", "y"), (P("x"),), out)
    x = array(8, 12)
    result = autopar.parallelize(fn, method=method)(x)
    assert_same(result, jax.jit(fn)(x))
    assert_placed(result, out)


def test_names_in_scans_vmaps_and_checkpoints() -> None:
    def fn(ws, x):
        def layer(h, w):
            h = jax.checkpoint(lambda h: autopar.constrain(jnp.tanh(h @ w), "h"))(h)
            rows = jax.vmap(lambda row: autopar.constrain(row * 2, "row"))(h)
            return rows, None

        return jax.grad(lambda ws: (jax.lax.scan(layer, x, ws)[0] ** 2).mean())(ws)

    pins = {"h": P("x", "y"), "row": P("y")}
    method = ShardParallel((2, 4), options=ShardingOptions(pins=pins))
    parallel = autopar.parallelize(fn, method=method)
    args = array(3, 16, 16), array(8, 16)
    assert_same(parallel(*args), jax.jit(fn)(*args))
    plan = parallel.last_executable.plan
    assert {plan.spec_of(t) for t in plan.named if t.path == "h"} == {P("x", "y")}
    assert {t.layout[1] for t in plan.named if t.path == "row"} == {1}
    assert {t.path for t in plan.named} == {"h", "row"}


def branches(x, y):
    one, other = (lambda x: autopar.constrain(x @ x, "t")), (lambda x: autopar.constrain(x, "f"))
    return jax.lax.cond(y.sum() > 0, one, other, x)


def loop(x, y):
    def body(carry):
        return carry[0] + 1, autopar.constrain(jnp.tanh(carry[1] @ x), "v")

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, y))[1]


def stacked(x, y):
    return jax.lax.scan(lambda c, row: (c + jnp.outer(row, row), row * c.sum()), x, y)


def untouched(x, y):
    return x, y * 2, 3.0, jnp.ones((8, 8)), x.T


@pytest.mark.parametrize(
    ("fn", "pins"),
    [
        (branches, {"t": P("x", "y"), "f": P("y", "x"), "result": P(None, "x")}),
        (loop, {"v": P("y", "x"), "result": P(("x", "y"))}),
        (stacked, {"x": P("x"), "result[0]": P("y"), "result[1]": P("y", "x")}),
        (untouched, {"x": P("x"), "result[0]": P(None, "y"), "result[3]": P("y")}),
        (untouched, {"result[2]": P(), "result[4]": P("y", "x")}),
    ],
    ids=["cond", "while", "scan", "input and constant", "literal and transpose"],
)
def test_pins_in_and_behind_loops(fn: Any, pins: dict[str, P]) -> None:
    method = ShardParallel((2, 4), options=ShardingOptions(pins=pins))
    parallel = autopar.parallelize(fn, method=method)
    args = array(8, 8), array(8, 8)
    result = parallel(*args)
    assert_same(result, jax.jit(fn)(*args))
    plan = parallel.last_executable.plan
    specs = {t.path: plan.spec_of(t) for t in (*plan.inputs, *plan.outputs, *plan.named)}
    assert {path: specs[path] for path in pins} == pins
    assert_placed(result, plan.output_specs)


def test_a_step_whose_dimensions_divide_by_nothing_runs_on_fewer_devices() -> None:
    state = {"w": array(5, 7), "v": array(7, 5), "b": array(5)}
    batch = {"x": array(3, 5)}
    parallel = autopar.parallelize(step)
    assert_same(parallel(state, batch), jax.jit(step)(state, batch))
    plan = parallel.last_executable.plan
    assert plan.num_devices == 7
    assert plan.warnings[0].startswith("7 of 8 devices are used")

"""Models that scan scans over their layers, on more stages than the outer scan has trips: each
stage holds its own layers of every stack, and three steps give what `jax.jit` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.runtime.stacks import StackedArray
from tests.equivalence.pipelines import WIDTH, assert_equal, batch_of, own_buffers
from tests.equivalence.test_stacks import (
    bytes_by_stage,
    layer,
    pipeline,
    splits,
    stacked,
    state_of,
    step_of,
)

ADAM = optax.adam(1e-2, eps=1e-3)


def nested(*lengths: int, seed: int = 0) -> dict[str, Any]:
    flat = stacked(int(np.prod(lengths)), seed)
    return jax.tree.map(lambda x: x.reshape(*lengths, *x.shape[1:]), flat)


def run(params: Any, x: Any, checkpoint: bool) -> Any:
    """Scans of scans, as deep as the weights say."""
    each: Callable[[Any, Any], Any] = layer
    for _ in range(params["w"].ndim - 3):
        inner = jax.checkpoint(each) if checkpoint else each
        each = lambda x, own, inner=inner: (jax.lax.scan(inner, x, own)[0], None)  # noqa: E731
    return jax.lax.scan(jax.checkpoint(each) if checkpoint else each, x, params)[0]


def plain(params: Any, batch: Any) -> Any:
    return jnp.mean((run(params, batch["x"], False) - batch["y"]) ** 2)


def recomputed(params: Any, batch: Any) -> Any:
    """As `nn.remat_scan` does."""
    return jnp.mean((run(params, batch["x"], True) - batch["y"]) ** 2)


def with_work_of_the_outer_scan(params: Any, batch: Any) -> Any:
    """Each outer trip has weights of its own before and after its layers."""

    def group(x: Any, own: Any) -> tuple[Any, None]:
        x = jnp.tanh(x @ own["before"])
        x = run(own["layers"], x, False)
        return x + jax.nn.gelu(x @ own["after"]), None

    x, _ = jax.lax.scan(group, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def squares(num: int, seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), (num, WIDTH, WIDTH)) / WIDTH**0.5


def on_three(*layers: list[int]) -> autopar.PipeshardParallel:
    submeshes = [(1, 2), (1, 2), (1, 4)]
    return autopar.PipeshardParallel(2, stages=autopar.ManualStages(list(layers), submeshes))


def in_halves(num_layers: int) -> autopar.PipeshardParallel:
    layers, stages = autopar.AutoLayers(num_layers), autopar.UniformStages(2)
    return autopar.PipeshardParallel(2, layers=layers, stages=stages)


# name -> (loss, parameters, method, rows of the layers' weights in each part, one array)
Case = tuple[
    Callable[[Any, Any], Any],
    Callable[[], Any],
    Callable[[], autopar.PipeshardParallel],
    tuple[int, ...],
    bool,
]
NESTED: Mapping[str, Case] = {
    "2x2 on 4": (plain, lambda: nested(2, 2), lambda: pipeline(4), (1, 1, 1, 1), True),
    "2x4 on 4": (plain, lambda: nested(2, 4), lambda: pipeline(4), (2, 2, 2, 2), True),
    "2x3 on 3": (
        plain,
        lambda: nested(2, 3),
        lambda: on_three([0, 1], [2, 3], [4, 5]),
        (2, 1, 1, 2),
        False,
    ),
    "3x2 on 2": (plain, lambda: nested(3, 2), lambda: in_halves(6), (2, 1, 1, 2), False),
    "2x2 on 3": (plain, lambda: nested(2, 2), lambda: on_three([0], [1], [2, 3]), (1, 1, 2), False),
    "2x2x2 on 4": (plain, lambda: nested(2, 2, 2), lambda: pipeline(4), (2, 2, 2, 2), True),
    "2x2x2 on 8": (plain, lambda: nested(2, 2, 2), lambda: pipeline(8), (1,) * 8, True),
    "recomputed, 2x2 on 4": (
        recomputed,
        lambda: nested(2, 2),
        lambda: pipeline(4),
        (1, 1, 1, 1),
        True,
    ),
    "recomputed, 2x3 on 3": (
        recomputed,
        lambda: nested(2, 3),
        lambda: on_three([0, 1], [2, 3], [4, 5]),
        (2, 1, 1, 2),
        False,
    ),
}


def trained(
    loss: Callable[[Any, Any], Any], params: Any, method: autopar.PipeshardParallel
) -> tuple[Any, autopar.ParallelPlan]:
    """The state after three steps, which is that of `jax.jit`, and the plan."""
    step, state = step_of(ADAM, loss), state_of(ADAM, params)
    parallel, serial = autopar.parallelize(step, method=method), jax.jit(step)
    mine, theirs = own_buffers(state), own_buffers(state)
    for index in range(3):
        mine, result = parallel(mine, batch_of(index))
        theirs, wanted = serial(theirs, batch_of(index))
        assert_equal(result, wanted)
    assert_equal(mine, theirs)
    return mine, parallel.last_executable.plan


@pytest.mark.representatives("2x3 on 3", "recomputed, 2x2 on 4")
@pytest.mark.parametrize("name", NESTED)
def test_each_stage_holds_its_own_layers(name: str) -> None:
    loss, params, method, rows, is_one_array = NESTED[name]
    state, plan = trained(loss, params(), method())
    assert set(splits(plan).values()) == {rows}
    assert len(splits(plan)) == 6  # weights, biases and two moments of each
    assert not plan.warnings
    leaf = state["params"]["w"]
    assert isinstance(leaf, jax.Array if is_one_array else StackedArray)
    tensor = next(t for t in plan.inputs if t.path == "state['params']['w']")
    parts = list(zip(rows, tensor.stages, strict=True))
    own = [sum(n for n, s in parts if s == stage) for stage in range(len(plan.stages))]
    whole = sum(x.nbytes for x in jax.tree.leaves(state)) - 4  # and a counter
    for held, number in zip(bytes_by_stage(state, plan), own, strict=True):
        assert held <= whole * number / sum(rows) + 4


@pytest.mark.parametrize("num_stages", [2, 4])
def test_work_of_the_outer_scan(num_stages: int) -> None:
    """Weights of the outer trips are split by trips, those of the inner ones by layers."""
    params = {"before": squares(2, 1), "layers": nested(2, 2), "after": squares(2, 2)}
    layers, stages = autopar.AutoLayers(8), autopar.UniformStages(num_stages)
    method = autopar.PipeshardParallel(2, layers=layers, stages=stages)
    _, plan = trained(with_work_of_the_outer_scan, params, method)
    found = splits(plan)
    assert sum(found["state['params']['layers']['w']"]) == (4 if num_stages == 4 else 2)
    assert found["state['params']['before']"] == found["state['params']['after']"] == (1, 1)
    assert not plan.warnings


@pytest.mark.parametrize("name", ["2x2 on 4", "2x3 on 3"])
def test_saved_restored_and_made_where_they_are(name: str, tmp_path: Path) -> None:
    loss, params, method, rows, _ = NESTED[name]
    state, _ = trained(loss, params(), method())
    step = step_of(ADAM, loss)
    train = autopar.parallelize(step, method=method())
    autopar.save_checkpoint(tmp_path / "state", state, 1)
    train.plan(state, batch_of(3))
    restored = autopar.restore_checkpoint(tmp_path / "state", train)
    on_host = jax.tree.map(np.asarray, state)
    jax.tree.map(np.testing.assert_array_equal, restored, on_host)
    want, _ = jax.jit(step)(on_host, batch_of(3))
    mine, _ = train(restored, batch_of(3))
    assert_equal(mine, want)
    on_one_mesh = autopar.parallelize(step, method="shard")
    on_one_mesh.plan(state, batch_of(3))
    restored = autopar.restore_checkpoint(tmp_path / "state", on_one_mesh)
    jax.tree.map(np.testing.assert_array_equal, restored, on_host)

    def init(key: Any) -> Any:
        shapes = jax.tree.map(lambda x: x.shape, params(), is_leaf=lambda x: hasattr(x, "shape"))
        made = {k: jax.random.normal(jax.random.fold_in(key, len(v)), v) for k, v in shapes.items()}
        return state_of(ADAM, made)

    make = autopar.parallelize(init, method=autopar.CreateStateParallel(train, batch_of(0)))
    made = make(jax.random.key(3))
    assert_equal(made, init(jax.random.key(3)))
    shardings = jax.tree.map(lambda x: x.sharding, made)
    follow = autopar.parallelize(loss, method=autopar.FollowParallel(train))
    value = follow(made["params"], batch_of(1))
    np.testing.assert_allclose(
        value, loss(init(jax.random.key(3))["params"], batch_of(1)), rtol=2e-5
    )
    assert set(splits(follow.last_executable.plan).values()) == {rows}
    again, _ = train(made, batch_of(1))
    assert jax.tree.map(lambda x: x.sharding, again) == shardings
    train.last_executable.plan.save(tmp_path / "plan.json")
    plan = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert plan.inputs == train.last_executable.plan.inputs
    loaded = autopar.parallelize(step, method=plan)
    assert_equal(loaded(own_buffers(want), batch_of(2))[0], jax.jit(step)(want, batch_of(2))[0])

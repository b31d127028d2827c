"""Models that scan over their layers, as pipelines: each stage holds its rows of every stack, and
three steps give what `jax.jit` gives."""

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
from autopar.errors import ArgumentError
from autopar.runtime.stacks import StackedArray
from tests.equivalence.pipelines import WIDTH, assert_equal, batch_of, check, own_buffers

NUM_LAYERS = 4


def stacked(num: int = NUM_LAYERS, seed: int = 0, width: int = WIDTH) -> dict[str, Any]:
    key = jax.random.key(seed)
    return {
        "w": jax.random.normal(key, (num, width, width)) / width**0.5,
        "b": jnp.full((num, width), 0.1, jnp.float32),
    }


def layer(x: Any, own: Any) -> tuple[Any, None]:
    return jnp.tanh(x @ own["w"] + own["b"]), None


def forward(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, params)[0]


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def step_of(
    optimizer: optax.GradientTransformation, loss: Callable[[Any, Any], Any] = loss_of
) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def state_of(optimizer: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    return {"params": params, "opt": optimizer.init(params)}


def pipeline(num_stages: int, num_micro_batches: int = 2) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(num_micro_batches, stages=autopar.UniformStages(num_stages))


def splits(plan: autopar.ParallelPlan) -> dict[str, tuple[int, ...]]:
    """Path of an argument that is split over stages -> its rows on each."""
    return {t.path: t.split for t in plan.inputs if t.split is not None}


def bytes_by_stage(state: Any, plan: autopar.ParallelPlan) -> list[int]:
    """Bytes of state on the first device of each stage."""
    held = []
    for stage in plan.stages:
        device = jax.devices()[stage.devices[0]]
        arrays = [part for x in jax.tree.leaves(state) for part in getattr(x, "parts", (x,))]
        shards = [s for x in arrays for s in x.addressable_shards]
        held.append(sum(s.data.nbytes for s in shards if s.device == device))
    return held


def trained(
    optimizer: optax.GradientTransformation,
    params: Any,
    num_stages: int,
    loss: Callable[[Any, Any], Any] = loss_of,
    **options: Any,
) -> autopar.ParallelPlan:
    step, state = step_of(optimizer, loss), state_of(optimizer, params)
    return check(step, state, pipeline(num_stages), **options).last_executable.plan


@pytest.mark.representatives("2")
@pytest.mark.parametrize("num_stages", [2, 4])
def test_each_stage_holds_its_own_rows(num_stages: int) -> None:
    optimizer = optax.adam(1e-2)
    step, state = step_of(optimizer), state_of(optimizer, stacked(8))
    parallel = autopar.parallelize(step, method=pipeline(num_stages))
    serial = jax.jit(step)
    mine, theirs = own_buffers(state), own_buffers(state)
    for index in range(3):
        mine, result = parallel(mine, batch_of(index))
        theirs, wanted = serial(theirs, batch_of(index))
        assert_equal(result, wanted)
    assert_equal(mine, theirs)
    plan = parallel.last_executable.plan
    rows = (8 // num_stages,) * num_stages
    assert set(splits(plan).values()) == {rows}
    assert len(splits(plan)) == 6  # weights, biases and two moments of each
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mine))
    # Stacks are all the state but a counter, so the stages hold the same bytes.
    held = [n - 4 * (k == 0) for k, n in enumerate(bytes_by_stage(mine, plan))]
    devices = 8 // num_stages
    whole = sum(x.nbytes for x in jax.tree.leaves(theirs)) - 4
    assert max(held) <= whole / num_stages and min(held) >= whole / num_stages / devices
    assert not plan.warnings
    moments = [t for t in plan.inputs if t.path == "state['opt'][0].mu['w']"]
    assert [t.held_shape() for t in moments] == [(rows[0], WIDTH, WIDTH)]
    assert moments[0].holders() == tuple(range(num_stages))
    # Between the loop over micro-batches and the update nothing but the counter is sent.
    transfers = parallel.last_executable.pipeline.transfers
    once = [t for t in transfers if t.ref.micro_batch is None]
    buffers = parallel.last_executable.buffers
    assert all(buffers[t.source, t.ref.value].size <= 1 for t in once)


def test_donated_stacks_are_updated_in_place() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    step, state = step_of(optimizer), state_of(optimizer, stacked())
    parallel = autopar.parallelize(step, method=pipeline(2))
    first, _ = parallel(own_buffers(state), batch_of(0))
    second, _ = parallel(first, batch_of(1))
    assert first["params"]["w"].is_deleted()
    assert not second["params"]["w"].is_deleted()
    assert second["params"]["w"].sharding == parallel.last_executable.output_shardings[1]


OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "average": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.representatives("clipped", "if finite")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Norms and means over a whole stack come from the parts' norms and means."""
    plan = trained(OPTIMIZERS[name](), stacked(), 2, rtol=1e-3, atol=1e-4)
    assert "state['params']['w']" in splits(plan)


def uneven(layers: list[list[int]], *submeshes: tuple[int, int]) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(2, stages=autopar.ManualStages(layers, list(submeshes)))


def interleaved() -> autopar.PipeshardParallel:
    stages = autopar.UniformStages(4)
    return autopar.PipeshardParallel(4, stages=stages, schedule="interleaved_1f1b")


# name -> (number of layers, method, rows of each stage)
UNLIKE: Mapping[str, tuple[int, Callable[[], autopar.PipeshardParallel], tuple[int, ...]]] = {
    "odd": (3, lambda: pipeline(2), (2, 1)),
    "rows": (4, lambda: uneven([[0, 1, 2], [3]], (1, 4), (1, 4)), (3, 1)),
    "meshes": (4, lambda: uneven([[0], [1], [2, 3]], (1, 2), (1, 2), (1, 4)), (1, 1, 2)),
    "shared": (4, interleaved, (1, 1, 1, 1)),
}


@pytest.mark.representatives("meshes", "shared")
@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_stages_hold_their_own_rows(name: str) -> None:
    """They cannot be one array of JAX's: stages with other rows or meshes, or that share one."""
    num, method, rows = UNLIKE[name]
    optimizer = optax.adam(1e-2)
    step, state = step_of(optimizer), state_of(optimizer, stacked(num))
    parallel = check(step, state, method())
    plan = parallel.last_executable.plan
    assert set(splits(plan).values()) == {rows} and len(splits(plan)) == 6
    assert not plan.warnings
    mine, _ = parallel(own_buffers(state), batch_of(0))
    weights: Any = mine["params"]["w"]
    assert isinstance(weights, autopar.DistributedArray) and isinstance(weights, StackedArray)
    assert [part.shape[0] for part in weights.parts] == list(rows)
    first, last = weights.meshes[0].devices, weights.meshes[-1].devices
    assert set(first).isdisjoint(last)
    held = bytes_by_stage(mine, plan)
    whole = sum(x.nbytes for x in jax.tree.leaves(state)) - 4  # and a counter
    for stage, num_bytes in zip(plan.stages, held, strict=True):
        own = sum(n for n, s in zip(rows, plan.stages, strict=True) if s.mesh == stage.mesh)
        assert num_bytes <= whole * own / num + 4
    again, _ = parallel(mine, batch_of(1))
    assert weights.is_deleted() and not again["params"]["w"].is_deleted()
    with pytest.raises(ArgumentError, match="is deleted"):
        np.asarray(weights)


def test_a_split_stack_is_passed_twice() -> None:
    """A buffer that is used up is not read by another argument."""
    params = stacked(3)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        old = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return {"params": params, "average": old}, value

    parallel = autopar.parallelize(step, method=pipeline(2))
    first, _ = parallel({"params": params, "average": params}, batch_of(0))
    mine, _ = parallel({"params": first["params"], "average": first["params"]}, batch_of(1))
    want, _ = jax.jit(step)({"params": params, "average": params}, batch_of(0))
    want, _ = jax.jit(step)({"params": want["params"], "average": want["params"]}, batch_of(1))
    assert_equal(mine, want)


# -- beside training


@pytest.mark.representatives("alike", "odd")
@pytest.mark.parametrize("name", ["alike", *UNLIKE])
def test_initialisers_and_evaluations_keep_rows_where_they_are(name: str, tmp_path: Path) -> None:
    alike = NUM_LAYERS, lambda: pipeline(2), (2, 2)
    num, method, rows = alike if name == "alike" else UNLIKE[name]
    optimizer = optax.adam(1e-2)
    step = step_of(optimizer)
    train = autopar.parallelize(step, method=method())

    def init(key: Any) -> Any:
        shape = (num, WIDTH, WIDTH)
        params = {"w": jax.random.normal(key, shape), "b": jnp.zeros(shape[:2])}
        return state_of(optimizer, params)

    make = autopar.parallelize(init, method=autopar.CreateStateParallel(train, batch_of(0)))
    state, want = make(jax.random.key(3)), init(jax.random.key(3))
    assert_equal(state, want)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    state, _ = train(state, batch_of(0))
    want, _ = jax.jit(step)(want, batch_of(0))
    assert_equal(state, want)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings  # nothing was moved
    follow = autopar.parallelize(loss_of, method=autopar.FollowParallel(train))
    np.testing.assert_allclose(
        follow(state["params"], batch_of(1)), loss_of(want["params"], batch_of(1)), rtol=2e-5
    )
    assert set(splits(follow.last_executable.plan).values()) == {rows}
    train.last_executable.plan.save(tmp_path / "plan.json")
    plan = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert plan.inputs == train.last_executable.plan.inputs
    again = autopar.parallelize(step, method=plan)
    got, _ = again(state, batch_of(1))
    assert_equal(got, jax.jit(step)(want, batch_of(1))[0])


@pytest.mark.ci
def test_saved_by_one_plan_and_restored_by_another(tmp_path: Path) -> None:
    """Or passed to it: arguments move to where it has them."""
    optimizer = optax.adam(1e-2)
    step, state = step_of(optimizer), state_of(optimizer, stacked())
    methods = [pipeline(2), "shard", UNLIKE["rows"][1](), interleaved()]
    steps = [autopar.parallelize(step, method=method) for method in methods]
    want, _ = jax.jit(step)(state, batch_of(0))
    after, _ = jax.jit(step)(want, batch_of(1))
    for number, one in enumerate(steps):
        mine, _ = one(own_buffers(state), batch_of(0))
        autopar.save_checkpoint(tmp_path / str(number), mine, 1)
        for other in steps:
            other.plan(state, batch_of(1))
            restored = autopar.restore_checkpoint(tmp_path / str(number), other)
            assert_equal(restored, want)
            got, _ = other(restored, batch_of(1))
            assert_equal(got, after)
        moved, _ = steps[number - 1](mine, batch_of(1))
        assert_equal(moved, after)


# -- how scans are written


def test_scanned_layers_take_no_more_memory_than_written_out_ones() -> None:
    """The update puts a stage's gradients together, which the model counts as a copy of them. In a
    loop they wait for the end of their own layer, written out for half of the backward pass."""
    width, num = 64, 8
    params = stacked(num, width=width)
    batch = batch_of(0, width=width)

    def written_out(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for own in params:
            x, _ = layer(x, own)
        return jnp.mean((x - batch["y"]) ** 2)

    optimizer = optax.adam(1e-2)
    apart = [jax.tree.map(lambda x, n=n: x[n], params) for n in range(num)]
    peaks = []
    for own, loss in ((params, loss_of), (apart, written_out)):
        state = jax.eval_shape(lambda own=own: state_of(optimizer, own))
        parallel = autopar.parallelize(step_of(optimizer, loss), method=pipeline(2))
        peaks.append(parallel.plan(state, batch).estimated_peak_bytes)
    assert 0.65 * peaks[1] <= peaks[0] <= 1.1 * peaks[1]


@pytest.mark.ci
def test_a_scanned_gpt_is_planned_like_its_layers() -> None:
    from examples.models import build

    stages = autopar.ManualStages([[0, 1], [2, 3, 4]], [(1, 4), (1, 4)])
    method = autopar.PipeshardParallel(4, stages=stages)
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    plans = []
    for scan in (True, False):
        example = build("gpt-2.6b", num_layers=4, batch_size=32, scan_layers=scan)
        arguments = (example.abstract_state(), example.abstract_batch())
        plans.append(autopar.plan(example.train_step, *arguments, cluster=cluster, method=method))
    scanned, written_out = plans
    assert set(splits(scanned).values()) == {(2, 2)}
    for ours, theirs in zip(scanned.stages, written_out.stages, strict=True):
        assert ours.plan is not None and theirs.plan is not None
        peaks = ours.plan.estimated_peak_bytes, theirs.plan.estimated_peak_bytes
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    assert scanned.estimated_step_s == pytest.approx(written_out.estimated_step_s, rel=0.02)


def several_scans(params: Any, batch: Any) -> Any:
    x = jnp.tanh(batch["x"] @ params["in"])
    x = forward(params["first"], x) + x
    x = jnp.tanh(x @ params["between"])
    return jnp.mean((forward(params["second"], x) @ params["out"] - batch["y"]) ** 2)


def with_inputs_of_their_own(params: Any, batch: Any) -> Any:
    """Per layer a key for dropout, and a scale that no step changes."""
    keys = jax.random.split(jax.random.key(7), NUM_LAYERS)
    scales = jnp.linspace(0.5, 1.0, NUM_LAYERS)

    def one(x: Any, own: Any) -> tuple[Any, Any]:
        weights, key, scale = own
        kept = jax.random.bernoulli(key, 0.9, (WIDTH,))
        x = layer(x, weights)[0] * scale * kept
        return x, jnp.mean(x)

    x, means = jax.lax.scan(one, batch["x"], (params, keys, scales))
    return jnp.mean((x - batch["y"]) ** 2) + 0.01 * jnp.mean(means**2)


def scan_of_scans(params: Any, batch: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, own: (forward(own, x), None), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def by_period(params: Any, batch: Any) -> Any:
    """Every second layer is of another kind."""

    def pair(x: Any, own: Any) -> tuple[Any, None]:
        x, _ = layer(x, own["even"])
        return x + jax.nn.gelu(x @ own["odd"]["w"]) @ own["odd"]["w"].T, None

    x, _ = jax.lax.scan(jax.checkpoint(pair), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def every_fourth(params: Any, batch: Any) -> Any:
    """Groups of three layers, scanned inside the scan, and one of another kind."""

    def group(x: Any, own: Any) -> tuple[Any, None]:
        x = forward(own["local"], x)
        return x + jax.nn.gelu(x @ own["global"]["w"]) @ own["global"]["w"].T, None

    x, _ = jax.lax.scan(group, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def half_precision(params: Any, batch: Any) -> Any:
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    return loss_of(half, batch)


def square(seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH)) / WIDTH**0.5


WRITTEN: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[], Any]]] = {
    "several": (
        several_scans,
        lambda: {
            "in": square(1),
            "first": stacked(seed=2),
            "between": square(3),
            "second": stacked(seed=4),
            "out": square(5),
        },
    ),
    "own inputs": (with_inputs_of_their_own, stacked),
    "of scans": (
        scan_of_scans,
        lambda: jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), stacked(8)),
    ),
    "every fourth": (
        every_fourth,
        lambda: {
            "local": jax.tree.map(lambda x: x.reshape(4, 3, *x.shape[1:]), stacked(12, 6)),
            "global": stacked(seed=7),
        },
    ),
    "by period": (by_period, lambda: {"even": stacked(seed=6), "odd": stacked(seed=7)}),
    "half precision": (half_precision, stacked),
}


@pytest.mark.representatives("of scans-2", "by period-2", "every fourth-4")
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", WRITTEN)
def test_scans(name: str, num_stages: int) -> None:
    loss, params = WRITTEN[name]
    plan = trained(optax.adam(1e-2), params(), num_stages, loss, rtol=1e-3, atol=1e-4)
    if name != "several":
        assert splits(plan)


@pytest.mark.representatives("4")
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_cache_per_layer(num_stages: int) -> None:
    """Each layer reads its row of a running mean and returns a new one, as it does its weights."""
    optimizer = optax.adam(1e-2)

    def loss(params: Any, cache: Any, batch: Any) -> Any:
        def one(x: Any, own: Any) -> tuple[Any, Any]:
            weights, mean = own
            x, _ = layer(x + mean, weights)
            return x, 0.9 * mean + 0.1 * jnp.mean(x, axis=0)

        x, cache = jax.lax.scan(one, batch["x"], (params, cache))
        return jnp.mean((x - batch["y"]) ** 2), cache

    def step(state: Any, batch: Any) -> Any:
        run = jax.value_and_grad(loss, has_aux=True)
        (value, cache), grads = run(state["params"], state["cache"], batch)
        updates, opt = optimizer.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "cache": cache}, value

    state = {**state_of(optimizer, stacked()), "cache": jnp.zeros((NUM_LAYERS, WIDTH))}
    plan = check(step, state, pipeline(num_stages)).last_executable.plan
    assert set(splits(plan).values()) == {(NUM_LAYERS // num_stages,) * num_stages}
    assert "state['cache']" in splits(plan) and "state['params']['w']" in splits(plan)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", ["gpt-tiny-scan", "llama-tiny-scan"])
def test_models(name: str, num_stages: int) -> None:
    from examples.models import build

    example = build(name, num_layers=4)
    state, batch = example.create_state(), example.make_batch()
    method = pipeline(num_stages)
    parallel = check(example.train_step, state, method, batches=[batch] * 3, rtol=1e-3, atol=1e-3)
    assert splits(parallel.last_executable.plan)


def with_new_keys(params: Any, batch: Any, key: Any) -> Any:
    """A key per layer, made of one of the state."""

    def one(x: Any, own: Any) -> tuple[Any, None]:
        weights, key = own
        kept = jax.random.bernoulli(key, 0.9, (WIDTH,))
        return layer(x, weights)[0] * kept, None

    x, _ = jax.lax.scan(one, batch["x"], (params, jax.random.split(key, NUM_LAYERS)))
    return jnp.mean((x - batch["y"]) ** 2)


def test_a_plan_from_a_file_splits_keys_as_it_did(tmp_path: Path) -> None:
    """No argument says how keys that the step makes were split over the stages."""

    def step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(with_new_keys)(state["params"], batch, own)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "key": key}, value

    state = {"params": stacked(), "key": jax.random.key(3)}
    plan = check(step, state, pipeline(2)).last_executable.plan
    plan.save(tmp_path / "plan.json")
    check(step, state, autopar.ParallelPlan.load(tmp_path / "plan.json"))

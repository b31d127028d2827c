"""What train steps do besides layers and losses, on pipelines: each equals `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.pipeline import EACH
from tests.equivalence.pipelines import (
    ROWS,
    WIDTH,
    assert_equal,
    batch_of,
    check,
    own_buffers,
    weights,
)

TWO = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
THREE = autopar.PipeshardParallel(
    2, stages=autopar.ManualStages([[0], [1], [2]], [(1, 2), (1, 2), (1, 4)])
)
FOUR_LAYERS = weights(jax.random.key(0), 4)
PARAMS = FOUR_LAYERS[:2]


TABLE = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def layer(x: Any, own: dict[str, Any]) -> Any:
    return jnp.tanh(x @ own["w"] + own["b"])


def mlp(params: Any, x: Any) -> Any:
    for own in params:
        x = layer(x, own)
    return x


def mean_square(params: Any, batch: Any) -> Any:
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def trained_by(
    optimizer: optax.GradientTransformation, loss_fn: Callable[..., Any] = mean_square
) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, loss

    return step


def check_optimizer(
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any] = mean_square,
    params: Any = PARAMS,
    method: Any = TWO,
    **options: Any,
) -> Any:
    state = {"params": params, "opt": optimizer.init(params)}
    return check(trained_by(optimizer, loss_fn), state, method, **options)


def sent_for_each(parallel: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """(from, to, shape) of what is sent for every micro-batch."""
    executable = parallel.last_executable
    return sorted(
        (t.source, t.target, executable.buffers[t.target, t.ref.value].shape)
        for t in executable.pipeline.transfers
        if t.ref.micro_batch == EACH
    )


def sent_once(parallel: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    executable = parallel.last_executable
    return sorted(
        (t.source, t.target, executable.buffers[t.target, t.ref.value].shape)
        for t in executable.pipeline.transfers
        if t.ref.micro_batch is None
    )


# -- what crosses between stages


@pytest.mark.ci
def test_one_activation_and_one_cotangent_cross_each_boundary() -> None:
    parallel = check_optimizer(optax.sgd(0.1), params=FOUR_LAYERS[:3], method=THREE)
    rows = (ROWS // 2, WIDTH)
    assert sent_for_each(parallel) == [(0, 1, rows), (1, 0, rows), (1, 2, rows), (2, 1, rows)]
    assert sent_once(parallel) == []


def tied_loss(params: Any, batch: Any) -> Any:
    x = params["table"][batch["tokens"]]
    x = mlp(params["layers"], x)
    logits = x @ params["table"].T
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["tokens"]])


def token_batches() -> list[Any]:
    keys = jax.random.split(jax.random.key(5), 3)
    return [{"tokens": jax.random.randint(key, (ROWS,), 0, 24)} for key in keys]


def test_weights_of_two_stages_get_one_summed_gradient() -> None:
    table = jax.random.normal(jax.random.key(3), (24, WIDTH))
    params = {"table": table, "layers": PARAMS}
    parallel = check_optimizer(
        optax.adam(1e-2), tied_loss, params, batches=token_batches(), method=TWO
    )
    rows = (ROWS // 2, WIDTH)
    assert [s for s in sent_for_each(parallel) if len(s[2]) > 1] == [(0, 1, rows), (1, 0, rows)]
    # The table goes to the last stage before, and its gradient comes back after the micro-batches.
    large = [s[:2] for s in sent_once(parallel) if sorted(s[2]) == sorted(table.shape)]
    assert large == [(0, 1), (1, 0)]


@pytest.mark.ci
def test_weight_of_every_stage() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for own in params["layers"]:
            x = layer(x, own) @ params["shared"] + x
        return jnp.mean((x - batch["y"]) ** 2)

    shared = jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)) / 4
    params = {"shared": shared, "layers": FOUR_LAYERS[:3]}
    check_optimizer(optax.sgd(0.1, momentum=0.9), loss_fn, params, THREE)


@pytest.mark.ci
def test_values_that_skip_stages() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        first = layer(batch["x"], params[0])
        second = layer(first, params[1])
        last = layer(second, params[2]) + first * batch["x"]
        return jnp.mean((last - batch["y"]) ** 2)

    parallel = check_optimizer(optax.sgd(0.1), loss_fn, FOUR_LAYERS[:3], THREE)
    assert (0, 2) in {s[:2] for s in sent_for_each(parallel)}


@pytest.mark.ci
def test_mask_that_every_stage_reads() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x, mask = batch["x"], jnp.where(batch["y"] > 0, 1.0, 0.5)
        for own in params:
            x = layer(x, own) * mask
        return jnp.sum(x**2 * mask) / jnp.sum(mask)

    check_optimizer(optax.sgd(0.1), loss_fn, FOUR_LAYERS[:3], THREE)


# -- updates


def test_norm_of_all_gradients() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    parallel = check_optimizer(optimizer)
    assert all(s[2] == () for s in sent_once(parallel))


@pytest.mark.ci
def test_schedules_and_counters_on_every_stage() -> None:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)
    parallel = check_optimizer(optax.adamw(schedule))
    assert all(s[2] == () for s in sent_once(parallel))


@pytest.mark.ci
def test_loss_scale_that_follows_overflows() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return mean_square(params, batch) * state["scale"]

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)

        def kept(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        good = jnp.where(is_finite, state["good"] + 1, 0)
        scale = jnp.where(is_finite, state["scale"], state["scale"] / 2)
        state = {
            "params": kept(params, state["params"]),
            "opt": kept(opt, state["opt"]),
            "scale": jnp.where(good >= 2, scale * 2, scale),
            "good": good,
        }
        return state, {"loss": loss, "finite": is_finite}

    state = {
        "params": PARAMS,
        "opt": optimizer.init(PARAMS),
        "scale": jnp.float32(8.0),
        "good": jnp.int32(0),
    }
    batches = [batch_of(0), batch_of(1), batch_of(2)]
    batches[1]["x"] = batches[1]["x"].at[3, 3].set(jnp.inf)
    check(step, state, TWO, batches=batches)


@pytest.mark.ci
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.lamb(1e-2),
        pytest.param(optax.adafactor(1e-2), marks=pytest.mark.slow),
        pytest.param(optax.apply_if_finite(optax.sgd(0.1), 3), marks=pytest.mark.slow),
    ],
    ids=["every second step", "norm of each array", "factored", "if finite"],
)
def test_optimizers_with_branches_and_norms(optimizer: Any) -> None:
    check_optimizer(optimizer)


@pytest.mark.ci
def test_average_of_parameters() -> None:
    optimizer = optax.sgd(0.1)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "opt": opt, "average": average, "step": state["step"] + 1}, loss

    state = {"params": PARAMS, "average": PARAMS, "opt": optimizer.init(PARAMS)}
    check(step, {**state, "step": jnp.int32(0)}, TWO)


@pytest.mark.ci
def test_two_optimizers_and_frozen_parameters() -> None:
    def label(params: Any) -> Any:
        kinds = ["adam", "frozen", "sgd", "adam"]
        return [dict.fromkeys(own, kind) for own, kind in zip(params, kinds, strict=True)]

    transforms = {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    check_optimizer(optax.multi_transform(transforms, label), params=FOUR_LAYERS)


@pytest.mark.ci
def test_weight_decay_in_the_loss() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return mean_square(params, batch) + 1e-2 * squares

    check_optimizer(optax.sgd(0.1), loss_fn)


# -- state and results


@pytest.mark.ci
def test_dropout_draws_what_the_serial_step_draws() -> None:
    def step(state: Any, batch: Any) -> Any:
        key, use = jax.random.split(state["key"])

        def loss_fn(params: Any) -> Any:
            x = batch["x"]
            for own, k in zip(params, jax.random.split(use, len(params)), strict=True):
                x = layer(x, own)
                x = jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "key": key}, loss

    check(step, {"params": PARAMS, "key": jax.random.key(7)}, TWO)


@pytest.mark.ci
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_batch_statistics(num_micro_batches: int) -> None:
    """With one micro-batch they are those of the batch. With two, each normalises by its own, so
    here all rows of the second half repeat the first, and both have the same."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x, stats = batch["x"], []
            for own, old in zip(params, state["stats"], strict=True):
                x = x @ own["w"]
                mean, square = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)
                x = jnp.tanh((x - mean) / jnp.sqrt(square - mean**2 + 1e-2) + own["b"])
                stats.append({"mean": 0.9 * old["mean"] + 0.1 * mean,
                              "square": 0.9 * old["square"] + 0.1 * square})  # fmt: skip
            return jnp.mean((x - batch["y"]) ** 2), stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "stats": stats}, loss

    zero = jnp.zeros(WIDTH)
    state = {"params": PARAMS, "stats": [{"mean": zero, "square": zero} for _ in PARAMS]}
    method = autopar.PipeshardParallel(num_micro_batches, stages=autopar.UniformStages(2))
    # Micro-batch i takes rows i, i + 2, …
    batches = [jax.tree.map(lambda a: jnp.repeat(a[::2], 2, axis=0), batch_of(i)) for i in range(3)]
    check(step, state, method, batches=batches)


@pytest.mark.ci
def test_state_that_is_no_parameter() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> tuple[Any, Any]:
            hidden = mlp(params[:1], batch["x"])
            return jnp.mean((mlp(params[1:], hidden) - batch["y"]) ** 2), hidden

        (loss, hidden), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        bins = jnp.clip(jnp.floor(hidden * 4 + 4), 0, 7).astype(jnp.int32)
        counts = state["counts"] + jnp.sum(jax.nn.one_hot(bins, 8, dtype=jnp.int32), axis=(0, 1))
        new = {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads),
            "counts": counts,
            "largest": jnp.maximum(state["largest"], jnp.max(batch["x"])),
            "seen": state["seen"] | (counts > 20),
            "rows": state["rows"] + batch["x"].shape[0],
            "fixed": state["fixed"],
            "name": state["name"],
        }
        return new, loss

    state = {
        "params": PARAMS,
        "counts": jnp.zeros(8, jnp.int32),
        "largest": jnp.float32(-1e9),
        "seen": jnp.zeros(8, bool),
        "rows": jnp.int32(0),
        "fixed": jnp.arange(5),
        "name": "run",
    }
    batches = [batch_of(i) for i in range(3)]
    method = TWO
    parallel = autopar.parallelize(step, method=method)
    mine, theirs = own_buffers(state), own_buffers(state)
    theirs.pop("name")
    for batch in batches:
        mine, loss = parallel(mine, batch)
        theirs, wanted = jax.jit(lambda s, b: _without_name(step, s, b))(theirs, batch)
        assert_equal(loss, wanted)
    assert mine.pop("name") == "run"
    assert_equal(mine, theirs)


def _without_name(step: Callable[..., Any], state: Any, batch: Any) -> Any:
    state, loss = step({**state, "name": "run"}, batch)
    state.pop("name")
    return state, loss


@pytest.mark.ci
def test_results_of_all_kinds() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> tuple[Any, Any]:
            middle = mlp(params[:1], batch["x"])
            last = mlp(params[1:], middle)
            rows = jnp.mean((last - batch["y"]) ** 2, axis=1)
            return jnp.mean(rows), (middle, last, rows)

        (loss, (middle, last, rows)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        metrics = {
            "loss": loss,
            "rows": rows,
            "middle": middle,
            "sign": jnp.sign(last).astype(jnp.int8),
            "worst": jnp.max(rows),
            "norm": jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))),
            "constant": jnp.float32(3.0),
            "table": jnp.arange(4.0),
            "given": batch["y"],
            "text": "as it is",
        }
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, metrics

    parallel = autopar.parallelize(step, method=TWO)
    mine, theirs = own_buffers(PARAMS), own_buffers(PARAMS)
    for index in range(3):
        mine, got = parallel(mine, batch_of(index))
        assert got.pop("text") == "as it is"
        theirs, want = jax.jit(lambda s, b: _without_text(step, s, b))(theirs, batch_of(index))
        assert_equal(got, want, f"step {index}:")
    assert_equal(mine, theirs)


def _without_text(step: Callable[..., Any], state: Any, batch: Any) -> Any:
    state, metrics = step(state, batch)
    metrics.pop("text")
    return state, metrics


@pytest.mark.ci
def test_state_that_changes_places() -> None:
    """What one stage makes replaces state of another; old state and new state come back too."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        state = {
            "params": new,
            "target": new,
            "old": state["params"],
            "swapped": [state["swapped"][1], new[0]],
        }
        return state, {"loss": loss, "again": loss, "params": new}

    state = {name: own_buffers(PARAMS) for name in ("params", "target", "old", "swapped")}
    check(step, state, TWO)


@pytest.mark.ci
def test_metrics_of_every_layer() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> tuple[Any, Any]:
            x, metrics = batch["x"] * batch["scale"], []
            for own in params:
                x = layer(x @ jnp.asarray(TABLE), own)
                metrics.append({"mean": jnp.mean(jnp.abs(x)), "max": jnp.max(x),
                                "positive": jnp.mean(x > 0, axis=0)})  # fmt: skip
            return jnp.mean((x - batch["y"]) ** 2), metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norms = jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g**2)), grads)
        product = jnp.sum(grads[0]["b"]) * jnp.sum(grads[1]["b"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"loss": loss, "layers": metrics, "norms": norms, "product": product}

    batches = [{**batch_of(i), "scale": jnp.float32(1 + i)} for i in range(3)]
    check(step, PARAMS, TWO, batches=batches)


@pytest.mark.ci
def test_two_losses_in_one_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        def generator_loss(params: Any) -> Any:
            return jnp.mean(mlp(state["judge"], mlp(params, batch["x"])) ** 2)

        first, judge = jax.value_and_grad(mean_square)(state["judge"], batch)
        second, generator = jax.value_and_grad(generator_loss)(state["generator"])
        grads = {"judge": judge, "generator": generator}
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (first, second)

    check(step, {"judge": PARAMS, "generator": FOUR_LAYERS[2:]}, TWO)


@pytest.mark.ci
def test_callbacks_see_what_they_see_in_the_serial_step() -> None:
    seen: list[float] = []

    def loss_fn(params: Any, batch: Any) -> Any:
        x = layer(batch["x"], params[0])
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.max(x))
        return jnp.mean((layer(x, params[1]) - batch["y"]) ** 2)

    parallel = autopar.parallelize(
        lambda params, batch: jax.grad(loss_fn)(params, batch), method=TWO
    )
    jax.block_until_ready(parallel(PARAMS, batch_of(0)))
    jax.effects_barrier()
    largest = float(jnp.max(layer(batch_of(0)["x"], PARAMS[0])))
    np.testing.assert_allclose(seen, [largest], rtol=1e-5)


@pytest.mark.ci
def test_gradient_of_the_inputs() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any, x: Any) -> Any:
            return mean_square(params, {**batch, "x": x})

        loss, (grads, wrt_x) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, batch["x"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"loss": loss, "wrt_x": wrt_x}

    check(step, PARAMS, TWO)


@pytest.mark.ci
def test_step_without_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(mean_square)(params, batch)

    parallel = autopar.parallelize(step, method=TWO)
    assert_equal(parallel(PARAMS, batch_of(0)), jax.jit(step)(PARAMS, batch_of(0)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))


# -- how layers are written


@pytest.mark.representatives("True")
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(lambda x, own: (body(x, own), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *FOUR_LAYERS)
    check_optimizer(optax.sgd(0.1, momentum=0.9), loss_fn, params)


@pytest.mark.ci
def test_checkpointed_layers() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for own in params:
            x = jax.checkpoint(layer)(x, own)
        return jnp.mean((x - batch["y"]) ** 2)

    check_optimizer(optax.sgd(0.1), loss_fn)


@pytest.mark.ci
def test_mixed_precision() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        out = mlp(half, batch["x"].astype(jnp.bfloat16))
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    check_optimizer(optax.sgd(0.1), loss_fn, rtol=2e-2, atol=2e-3)


@pytest.mark.ci
def test_marked_layers() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = layer(batch["x"], params[0])
        autopar.mark_layer_boundary()
        x = mlp(params[1:], x)
        return jnp.mean((x - batch["y"]) ** 2)

    method = autopar.PipeshardParallel(
        2, layers=autopar.ManualLayers(), stages=autopar.UniformStages(2)
    )
    parallel = check_optimizer(optax.sgd(0.1), loss_fn, FOUR_LAYERS, method)
    stages = parallel.last_executable.plan.input_stages[0]["params"]
    assert [own["w"] for own in stages] == [(0,), (1,), (1,), (1,)]


# -- how steps are called


@pytest.mark.ci
def test_buffers_that_are_kept() -> None:
    optimizer = optax.sgd(0.1)
    state = {"params": PARAMS, "opt": optimizer.init(PARAMS)}
    step = trained_by(optimizer)
    parallel = autopar.parallelize(step, method=TWO, donate_argnums=())
    want = jax.jit(step)(state, batch_of(0))
    first, _ = parallel(state, batch_of(0))
    for _ in range(2):  # the same state twice, and one that lies as planned
        assert_equal(parallel(state, batch_of(0)), want)
    parallel(first, batch_of(1))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, first)))


@pytest.mark.ci
def test_keywords_and_static_arguments() -> None:
    def step(params: Any, batch: Any, power: int, *, rate: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** power)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    parallel = autopar.parallelize(step, method=TWO, static_argnums=2, donate_argnums=())
    serial = jax.jit(step, static_argnums=2)
    for power in (2, 4):
        got = parallel(PARAMS, batch_of(0), power, rate=0.1)
        assert_equal(got, serial(PARAMS, batch_of(0), power, rate=0.1))


@pytest.mark.ci
def test_batches_of_several_sizes() -> None:
    optimizer = optax.sgd(0.1)
    batches = [batch_of(0), batch_of(1, rows=8), batch_of(2)]
    check_optimizer(optimizer, batches=batches)


def test_step_inside_of_another_program() -> None:
    optimizer = optax.sgd(0.1)
    step = trained_by(optimizer)
    state = {"params": PARAMS, "opt": optimizer.init(PARAMS)}
    parallel = autopar.parallelize(step, method=TWO, donate_argnums=())
    batches = jax.tree.map(lambda *a: jnp.stack(a), *(batch_of(i) for i in range(3)))
    got = jax.jit(lambda s, b: jax.lax.scan(parallel, s, b))(state, batches)
    assert_equal(got, jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches))


@pytest.mark.ci
def test_plan_that_was_saved(tmp_path: Path) -> None:
    parallel = check_optimizer(optax.adam(1e-2))
    path = tmp_path / "plan.json"
    parallel.last_executable.plan.save(path)
    again = check_optimizer(optax.adam(1e-2), method=autopar.ParallelPlan.load(path))
    assert again.last_executable.plan.input_stages == parallel.last_executable.plan.input_stages


# -- memory and communication within stages


@pytest.mark.ci
def test_state_is_split_within_stages_if_it_must_be() -> None:
    width = 64
    params = weights(jax.random.key(0), 2, width)
    batches = [batch_of(i, width=width) for i in range(2)]
    options = autopar.ShardingOptions(memory_budget_bytes=40_000)
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2), options=options)
    parallel = check_optimizer(optax.adam(1e-2), params=params, method=method, batches=batches)
    plan = parallel.last_executable.plan
    assert plan.estimated_peak_bytes <= 40_000
    moments = [t for t in plan.inputs if "mu" in t.path and "['w']" in t.path]
    assert len(moments) == 2 and all(any(e >= 0 for e in t.layout) for t in moments)


@pytest.mark.ci
def test_recomputed_stages_keep_less() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for own in params:
            x = x + jnp.tanh(jnp.sin(x @ own["w"]) @ own["w"].T)
        return jnp.mean((x - batch["y"]) ** 2)

    kept = []
    for remat in ("none", "all"):
        options = autopar.ShardingOptions(remat=remat)
        method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2), options=options)
        parallel = check_optimizer(optax.sgd(0.1), loss_fn, FOUR_LAYERS, method)
        pipeline = parallel.last_executable.pipeline
        forward = next(p for p in pipeline.stage_programs if p.phase.value == "forward")
        kept.append(len(forward.writes))
    assert kept[1] < kept[0]


@pytest.mark.ci
def test_gradients_are_reduced_once() -> None:
    width = 64
    params = weights(jax.random.key(0), 2, width)
    options = autopar.ShardingOptions(pins={"state['params']*": P(), "batch*": P("x")})
    stages = autopar.ManualStages([[0], [1]], [(1, 4), (1, 4)], [(4,), (4,)])
    method = autopar.PipeshardParallel(4, stages=stages, options=options)
    parallel = check_optimizer(
        optax.sgd(0.1), params=params, method=method,
        batches=[batch_of(i, rows=1024, width=width) for i in range(2)],
    )  # fmt: skip
    programs = parallel.last_executable.compiled
    assert set(programs) == {
        f"stage{s}_{p}" for s in (0, 1) for p in ("prepare", "forward", "backward", "update")
    }
    for name, program in programs.items():
        has_reduction = "all-reduce" in program.as_text()
        assert has_reduction == name.endswith("update"), name


# -- without a backward pass


def test_inference() -> None:
    def infer(params: Any, batch: Any) -> Any:
        out = mlp(params, batch["x"])
        return {"rows": out, "loss": jnp.mean((out - batch["y"]) ** 2)}

    method = autopar.PipeshardParallel(4, stages=autopar.UniformStages(2), schedule="inference")
    parallel = autopar.parallelize(infer, method=method)
    for index in range(2):
        assert_equal(parallel(PARAMS, batch_of(index)), jax.jit(infer)(PARAMS, batch_of(index)))
    rows = (ROWS // 4, WIDTH)
    assert sent_for_each(parallel) == [(0, 1, rows)]


@pytest.mark.ci
def test_results_lie_where_they_were_made() -> None:
    optimizer = optax.sgd(0.1)
    parallel = autopar.parallelize(trained_by(optimizer), method=TWO)
    state = {"params": own_buffers(FOUR_LAYERS), "opt": optimizer.init(FOUR_LAYERS)}
    for index in range(2):
        state, _ = parallel(state, batch_of(index))
        on = [{d.id for d in own["w"].devices()} for own in state["params"]]
        assert on == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2
    stages = parallel.last_executable.plan.input_stages[0]["params"]
    assert [own["w"] for own in stages] == [(0,), (0,), (1,), (1,)]

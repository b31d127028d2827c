"""Steps run on micro-batches equal the step on the whole batch, or say where they cannot."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import MeshError, PlanError, TraceError
from autopar.ir.sealed import digest
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.accumulate import batch_size
from autopar.rewrite.step_source import StepSource
from autopar.tracer.trace import StepOptions, trace
from autopar.tracer.trace_step import trace_step

NUM = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
W = RNG.normal(size=(6, 5)).astype(np.float32)


def accumulated(fn: Any, *args: Any, num: int = NUM) -> TracedStep:
    return StepSource.of(fn, args, {}, StepOptions()).with_recomputation((), num)


def parallel(fn: Any, num: int = NUM) -> Any:
    method = autopar.ShardParallel((1,), num_micro_batches=num)
    return autopar.parallelize(fn, method=method, donate_argnums=())


def check_exact(fn: Any, *args: Any, num: int = NUM, rtol: float = 2e-5) -> Any:
    """The step equals `jax.jit`'s, without notes; its plan is returned."""
    step = parallel(fn, num)
    got, want = step(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=1e-5
        )
    plan = step.last_executable.plan
    # Of while loops that the data ends, another warning says how they are priced.
    assert not [warning for warning in plan.warnings if "expected_trips" not in warning]
    assert plan.num_micro_batches == num
    return plan


def loop_of(step: TracedStep) -> Any:
    (loop,) = [e for e in step.program.equations if e.name == "scan"]
    return loop


def in_loop(step: TracedStep) -> list[str]:
    return [e.name for e in loop_of(step).bodies[0].equations]


def outside(step: TracedStep) -> list[str]:
    return [e.name for e in step.program.equations]


# -- what is exact


def mean_loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def sgd(loss: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grad), value

    return step


def test_mean_loss():
    check_exact(sgd(mean_loss), W, X)


def test_sum_loss():
    check_exact(sgd(lambda w, x: jnp.sum(jnp.sin(x @ w))), W, X)


def test_weight_decay_in_the_loss_counts_once():
    check_exact(sgd(lambda w, x: mean_loss(w, x) + 0.1 * jnp.sum(w**2)), W, X)


def test_gradient_clipping_runs_after_the_loop():
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(mean_loss)(w, x)
        norm = jnp.sqrt(jnp.sum(grad**2))
        return w - 0.1 * grad / jnp.maximum(norm, 0.01)

    check_exact(step, W, X)
    traced = accumulated(step, W, X)
    assert "sqrt" in outside(traced) and "sqrt" not in in_loop(traced)


def test_masked_mean_divides_by_the_mask_of_the_whole_batch():
    batch = {"x": X, "mask": (RNG.random(16) < 0.4).astype(np.float32)}

    def loss(w: Any, batch: Any) -> Any:
        each = jnp.sum(jnp.tanh(batch["x"] @ w), axis=-1)
        return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])

    check_exact(sgd(loss), W, batch)


def test_rows_come_back_in_their_order():
    def step(w: Any, x: Any) -> Any:
        each = jnp.sum(x @ w, axis=-1)
        return jnp.mean(each), {"each": each, "twice": (x @ w).T, "x": x}

    check_exact(step, W, X)


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min, jnp.prod])
def test_reductions_other_than_sums(reduce: Any):
    check_exact(lambda w, x: reduce(x @ w, axis=0), W, X)


def test_integer_and_boolean_reductions():
    def step(w: Any, x: Any) -> Any:
        hit = (x @ w) > 0
        return {"any": hit.any(0), "all": hit.all(0), "count": hit.sum(), "max": hit.max(0)}

    check_exact(step, W, X)


def test_metrics_and_has_aux():
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = x @ w
            return jnp.mean(y**2), {"accuracy": jnp.mean((y > 0).astype(jnp.float32)), "y": y}

        (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grad, value, aux

    check_exact(step, W, X)


def test_scalars_in_the_batch_are_passed_as_they_are():
    check_exact(
        sgd(lambda w, b: jnp.mean((b["x"] @ w) ** 2) * b["scale"]), W, {"x": X, "scale": 0.5}
    )


def test_embedding_gradient_is_a_scatter_to_zeros():
    tokens = RNG.integers(0, 6, size=(16, 3))
    check_exact(sgd(lambda w, t: jnp.mean(jnp.sin(w[t]) ** 2)), W, tokens)


def test_gradients_are_added_up_in_the_order_of_their_weights():
    """JAX transposes the gradient of a weight; the update would do so behind the loop."""

    def loss(w, x):
        hidden = jnp.einsum("bi,ihk->bhk", x, w["in"])
        return jnp.sum(jnp.tanh(jnp.einsum("bhk,hkj->bj", hidden, w["out"])))

    def step(w, x):
        grads = jax.grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - g, w, grads)

    weights = {"in": RNG.normal(size=(6, 2, 3)), "out": RNG.normal(size=(2, 3, 5))}
    weights = jax.tree.map(lambda w: w.astype(np.float32), weights)
    traced = trace(step, (weights, X), {}, StepOptions())
    assert "transpose" in outside(traced)
    in_a_loop = accumulated(step, weights, X)
    assert in_a_loop.loop is not None
    assert "transpose" not in outside(in_a_loop)[in_a_loop.loop :]
    check_exact(step, weights, X)


def test_what_a_scatter_adds_to_counts_once():
    rows = RNG.integers(0, 6, size=(16,))
    check_exact(lambda w, rows: w.at[rows].add(0.5) * 2, W, rows)


def test_bfloat16_sums_are_kept_in_float32():
    w = W.astype(jnp.bfloat16)

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(x.astype(jnp.bfloat16) @ w))(w)

    (carry,) = {str(v.dtype) for v in _carry_avals(accumulated(step, w, X)) if len(v.shape) == 2}
    assert carry == "float32"
    check_exact(step, w, X, rtol=2e-2)


def _carry_avals(step: TracedStep) -> list[Any]:
    loop = loop_of(step)
    first = loop.params["num_consts"]
    return [
        step.program.avals[v] for v in loop.bodies[0].inputs[first:][: loop.params["num_carry"]]
    ]


def test_groups_of_neighbouring_rows_stay_together():
    def step(w: Any, x: Any) -> Any:
        groups = (x @ w).reshape(-1, 2, 5)  # of two rows
        soft = jax.nn.softmax(groups, axis=1)
        return jnp.mean(soft[:, :, 0] ** 2), soft.reshape(-1, 5)

    check_exact(step, W, X)


def test_groups_that_straddle_rows_stay_together():
    def step(w: Any, x: Any) -> Any:
        groups = jax.nn.softmax(x.reshape(-1, 4), axis=-1)  # 6 to a row, 4 to a group
        return jnp.mean(groups[:, 0] ** 2) * w.sum(), groups

    check_exact(step, W, X)


def test_remat():
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)
    check_exact(sgd(lambda w, x: jnp.mean(layer(w, layer(w, x)) ** 2)), W, X)


def test_a_weight_is_cast_once_for_the_forward_pass_and_its_recomputation():
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(layer(w, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    step = accumulated(sgd(loss), W, X)
    before = step.program.equations[: step.loop]
    (cast,) = [e for e in before if e.name == "convert_element_type"]
    assert loop_of(step).operands.count(cast.results[0]) == 1
    check_exact(sgd(loss), W, X, rtol=2e-2)


def test_batch_as_a_later_dimension():
    def step(w: Any, x: Any) -> Any:
        turned = (x @ w).T  # (5, B)
        merged = jnp.sin(turned.reshape(-1))  # the batch five times
        return merged.reshape(5, -1), jnp.mean(merged)

    check_exact(step, W, X)


# -- random numbers


def dropout(w: Any, batch: Any) -> Any:
    y = batch["x"] @ w
    keep = jax.random.bernoulli(batch["key"], 0.5, y.shape)
    return jnp.sum(jnp.where(keep, y, 0.0) ** 2)


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)])
def test_dropout_draws_the_bits_of_the_whole_batch(key: Any):
    def step(w: Any, x: Any, key: Any) -> Any:
        return sgd(lambda w, x: dropout(w, {"x": x, "key": key}))(w, x)

    check_exact(step, W, X, key)


@pytest.mark.ci
def test_a_key_for_every_row():
    def step(w: Any, x: Any, key: Any) -> Any:
        keys = jax.random.split(key, x.shape[0])
        noise = jax.vmap(lambda k: jax.random.normal(k, (5,)))(keys)
        return jnp.mean((x @ w + noise) ** 2), noise

    check_exact(step, W, X, jax.random.key(1))


@pytest.mark.ci
def test_dropout_in_a_scan_over_layers():
    def step(w: Any, x: Any, key: Any) -> Any:
        def layer(x: Any, parts: Any) -> Any:
            w, key = parts
            x = jnp.tanh(x @ w)
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0), None

        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(layer, x, (w, jax.random.split(key, 3)))[0] ** 2)

        return jax.value_and_grad(loss)(w)

    check_exact(step, RNG.normal(size=(3, 6, 6)).astype(np.float32), X, jax.random.key(1))


def test_keys_without_positions_draw_per_micro_batch_and_say_so():
    step = parallel(lambda w, x, key: dropout(w, {"x": x, "key": key}))
    key = jax.random.key(0, impl="rbg")
    same_rows = np.repeat(X[:1], 16, axis=0)
    step(W, same_rows, key)
    (warning,) = step.last_executable.plan.warnings
    assert "random numbers" in warning and "test_accumulate.py" in warning
    mask = parallel(lambda w, x, key: jax.random.bits(key, (x.shape[0], 8)) * (x[:, :1] * 0 == 0))
    bits = np.asarray(mask(W, X, key)).reshape(4, NUM, 8)
    assert len({bits[:, i].tobytes() for i in range(NUM)}) == NUM


# -- loops in the step


def test_scan_over_layers_sums_its_stacked_gradients():
    w = RNG.normal(size=(3, 6, 6)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    check_exact(sgd(loss), w, X)


def test_shared_weights_in_a_scan():
    w = RNG.normal(size=(6, 6)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x))

    check_exact(sgd(loss), w, X)


def test_affine_results_of_a_scan_are_exact():
    def step(w: Any, x: Any) -> Any:
        def body(total: Any, w: Any) -> Any:
            return total + jnp.sum(x @ w) * 0.5 + 1.0, jnp.mean(x @ w) + 2.0

        return jax.lax.scan(body, jnp.float32(3.0), w.T)

    check_exact(step, W, X)


def test_while_and_cond():
    def step(w: Any, x: Any) -> Any:
        y = jax.lax.while_loop(
            lambda c: c[1] < 3, lambda c: (jnp.sin(c[0] @ w @ w.T), c[1] + 1), (x, 0)
        )
        z = jax.lax.cond(w.sum() > 0, jnp.sin, lambda a: a * 2, y[0])
        return jnp.mean(z), y[1]

    check_exact(step, W, X)


def sums_of_rows(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + jnp.tanh(row @ w), None), jnp.zeros(5), x)[0]


def stepped_by_each_row(w: Any, x: Any) -> Any:
    slope = jax.grad(lambda w, row: jnp.mean(jnp.tanh(row @ w) ** 2))
    return jax.lax.scan(lambda w, row: (w - 0.1 * slope(w, row), None), w, x)[0]


def halved_alone(w: Any, x: Any) -> Any:
    """A loop of each row, and how often it ran."""

    def halve(row: Any) -> Any:
        start = jnp.tanh(row @ w), 0
        is_open = lambda carry: jnp.max(jnp.abs(carry[0])) > 0.1  # noqa: E731
        return jax.lax.while_loop(is_open, lambda c: (c[0] / 2, c[1] + 1), start)

    rows, counts = jax.vmap(halve)(x)
    return jnp.sum(rows, axis=0), jnp.sum(counts), jnp.max(counts)


@pytest.mark.parametrize(
    "run",
    [
        lambda w, x: jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x)),
        lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=2),
        sgd(lambda w, x: jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x) ** 2)),
        sums_of_rows,
        stepped_by_each_row,
        halved_alone,
    ],
    ids=["map", "map in parts", "gradients of a map", "sums", "steps", "while"],
)
def test_loops_over_rows_are_exact(run: Any):
    check_exact(run, W, X)


def halved_together(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.while_loop(lambda y: jnp.sum(y**2) > 0.5, lambda y: y / 2, x @ w))


def shrunk_until_small(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda w: jnp.mean((x @ w) ** 2) > 0.1, lambda w: w / 2, w)


def trained_inside(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda w, _: (w - jax.grad(mean_loss)(w, x), None), w, length=3)[0]


def running_sums(w: Any, x: Any) -> Any:
    def add(total: Any, row: Any) -> Any:
        return total + row, total + row

    return jnp.mean(jax.lax.scan(add, jnp.zeros(5), x @ w)[1] ** 2)


@pytest.mark.parametrize("run", [halved_together, shrunk_until_small, trained_inside, running_sums])
def test_loops_that_read_all_rows_are_noted(run: Any):
    notes = accumulated(run, W, X).notes
    assert notes and all("test_accumulate.py" in note for note in notes)


def test_averages_in_a_scan_are_noted():
    def step(w: Any, x: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            return carry, jnp.mean(x @ w) ** 2

        return jax.lax.scan(body, 0, w.T)[1]

    parts = X.reshape(-1, NUM, 6)
    want = np.mean([np.mean(parts[:, i] @ W, axis=0) ** 2 for i in range(NUM)], axis=0)
    parallel_step = parallel(step)
    np.testing.assert_allclose(parallel_step(W, X), want, rtol=1e-5)
    (warning,) = parallel_step.last_executable.plan.warnings
    assert "averaged" in warning and "test_accumulate.py" in warning


# -- values that cross the batch


def test_statistics_of_the_input_are_those_of_the_whole_batch():
    def loss(w: Any, x: Any) -> Any:
        x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
        return jnp.mean(jnp.tanh(x @ w))

    check_exact(sgd(loss), W, X)


def normalised(w: Any, scale: Any, x: Any) -> Any:
    y = x @ w
    y = (y - jnp.mean(y, axis=0)) * (scale * jax.lax.rsqrt(jnp.var(y, axis=0) + 1e-3))
    return jnp.mean(jnp.sin(y) ** 2)


@pytest.mark.ci
def test_statistics_behind_a_product_are_those_of_the_micro_batch():
    """As if the user had written the loop: gradients of micro-batches, averaged."""

    def step(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: normalised(p["w"], p["scale"], x))(params)

    params = {"w": W, "scale": np.arange(1, 6).astype(np.float32)}
    parallel_step = parallel(step)
    got = parallel_step(params, X)
    parts = [step(params, X.reshape(-1, NUM, 6)[:, i]) for i in range(NUM)]
    want = jax.tree.map(lambda *each: sum(each) / NUM, *parts)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    warnings = parallel_step.last_executable.plan.warnings
    assert warnings and all("its own reduction" in text for text in warnings)
    assert "test_accumulate.py" in warnings[0]


def test_a_sum_that_crosses_is_exact_outside_of_the_loop():
    def step(w: Any, x: Any) -> Any:
        y = x @ w
        mean = jnp.mean(y, axis=0)
        return jnp.mean((y - mean) ** 2), mean

    _, mean = parallel(step)(W, X)
    np.testing.assert_allclose(mean, np.mean(X @ W, axis=0), rtol=1e-5, atol=1e-6)


def test_products_of_rows_with_rows_are_noted(caplog):
    step = parallel(lambda w, x: jnp.sum(jnp.tanh((x @ w) @ (x @ w).T)))
    step(W, X)
    (warning,) = step.last_executable.plan.warnings
    assert "one micro-batch only" in warning
    assert f"micro-batches change its results: {warning}" in caplog.text


def test_differences_of_rows_are_noted():
    def loss(w: Any, x: Any) -> Any:
        y = x @ w
        return jnp.mean((y[:, None] - y[None]) ** 2)

    step = parallel(sgd(loss))
    step(W, X)
    (warning,) = step.last_executable.plan.warnings
    assert "sub combines different rows of the batch" in warning


@pytest.mark.parametrize(
    "weigh",
    [
        jnp.tril,
        lambda y: y * jnp.arange(y.shape[0])[:, None],
        lambda y: jnp.where(jnp.arange(y.shape[0])[:, None] < 3, y, 0),
    ],
    ids=["tril", "weights", "mask"],
)
def test_places_of_rows_are_noted(weigh: Any):
    step = parallel(sgd(lambda w, x: jnp.mean(weigh(x @ w))))
    step(W, X)
    (warning,) = step.last_executable.plan.warnings
    assert "uses the place of rows in the batch" in warning


def convolved(x: Any, filters: Any, **groups: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, filters, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **groups
    )


def pooled(y: Any) -> Any:
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "SAME")


def cumulative(y: Any) -> Any:
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jax.pure_callback(lambda y: np.cumsum(y, axis=0), shape, y)


MIXES = {
    "half of the largest": lambda y: jax.lax.top_k(y.T, y.shape[0] // 2)[0],
    "approximately": lambda y: jax.lax.approx_max_k(y, y.shape[0] // 2, reduction_dimension=0)[0],
    "ordered": lambda y: jax.lax.top_k(y.T, y.shape[0])[0] ** 2,
    "fft": lambda y: jnp.abs(jnp.fft.fft(y, axis=0)),
    "fft of two dimensions": lambda y: jnp.abs(jnp.fft.fft2(y)),
    "convolution along rows": lambda y: convolved(y[None], jnp.ones((3, 5, 2))),
    "groups of rows": lambda y: convolved(y[:, :, None], jnp.ones((3, 1, 4)), batch_group_count=4),
    "pooling": pooled,
    "rows by batch": lambda y: y[jnp.argsort(y[:, 0])],
    "the next row": lambda y: y[(jnp.arange(y.shape[0]) + 1) % y.shape[0]] * y,
    "every row twice": lambda y: y[jnp.arange(y.shape[0]) // 2] * y,
    "random rows": lambda y: y[jax.random.permutation(jax.random.key(0), y.shape[0])] * y,
    "a place for each": lambda y: jnp.zeros_like(y).at[jnp.argsort(y[:, 0])].add(y) * y,
    "rows from some place": lambda y: jax.lax.dynamic_slice_in_dim(y, 1, y.shape[0] // 2),
    "the first half": lambda y: y[: y.shape[0] // 2],
    "given groups": lambda y: jax.lax.ragged_dot(y, jnp.ones((2, 5, 3)), jnp.array([10, 6])),
    "merged features": lambda y: jnp.sort(y.T.reshape(-1, 5), axis=1),
    "a callback": cumulative,
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_what_mixes_rows_is_noted(mix: Any):
    """Each of these gives other results on micro-batches, and a product depends on it."""

    def step(w: Any, x: Any) -> Any:
        y = jnp.sin(mix(jnp.tanh(x @ w)))
        return jnp.sum(jnp.sin(y @ jnp.ones((y.shape[-1], 2))))

    notes = accumulated(step, W, X).notes
    assert notes and all("test_accumulate.py" in note for note in notes)


ROW_BY_ROW = {
    "every other row": lambda y: y[::2] - y[1::2],
    "every other row of more": lambda y: jax.lax.pad(y, 0.0, ((0, 1, 1), (0, 0, 0)))[::2] * y,
    "largest features": lambda y: jax.lax.top_k(y, 2)[0],
    "fft of features": lambda y: jnp.abs(jnp.fft.fft(y)),
    "matrices": lambda y: jnp.linalg.cholesky(jax.vmap(jnp.outer)(y, y) + jnp.eye(5)),
    "right-hand sides": lambda y: jax.scipy.linalg.solve_triangular(3 * jnp.eye(5), y.T),
    "filters of its own": lambda y: jax.vmap(convolved)(
        y[:, None, :, None], jnp.tile(y[:, :3, None, None], (1, 1, 1, 2))
    ),
    "interpolated": lambda y: jnp.interp(y, jnp.linspace(-1, 1, 5), jnp.arange(5.0)),
    "its own column": lambda y: y[jnp.arange(y.shape[0]), jnp.argmax(y, axis=1)],
    "its own columns": lambda y: y[jnp.arange(y.shape[0])[:, None], jnp.argsort(y, 1)[:, :2]],
    "put in its own column": lambda y: y.at[jnp.arange(y.shape[0]), jnp.argmax(y, axis=1)].set(0),
    "its own key": lambda y: y * row_noise(y.shape[0]),
}


def row_noise(num_rows: int) -> Any:
    keys = jax.random.split(jax.random.key(0), num_rows)
    return jax.vmap(lambda key: jax.random.normal(key, (5,)))(keys)


@pytest.mark.parametrize("treat", ROW_BY_ROW.values(), ids=ROW_BY_ROW)
def test_what_treats_rows_one_by_one_is_exact(treat: Any):
    check_exact(lambda w, x: jnp.sum(jnp.sin(treat(jnp.tanh(x @ w)))), W, X)


def test_places_of_rows_are_noted_where_they_choose_columns():
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.take_along_axis(x @ w, (jnp.arange(len(x)) % 5)[:, None], 1))

    step = accumulated(sgd(loss), W, X)
    assert any("uses the place of rows" in note for note in step.notes)


def test_places_of_rows_are_noted_inside_of_loops():
    def loss(w: Any, x: Any) -> Any:
        weights = jnp.arange(len(x), dtype=jnp.float32)[:, None]
        return jnp.sum(jax.lax.scan(lambda y, _: (y * weights, None), x @ w, length=2)[0])

    assert any("uses the place of rows" in note for note in accumulated(loss, W, X).notes)


def test_arrays_of_numpy_with_a_number_for_each_row_are_noted():
    step = accumulated(sgd(lambda w, x: jnp.sum((x @ w) * np.arange(len(x))[:, None])), W, X)
    assert any("uses the place of rows" in note for note in step.notes)


def test_rows_that_pick_their_own_columns_are_not_noted():
    """Indexing with `arange` is how many write the loss of a classifier."""
    labels = jnp.argmax(X[:, :5], axis=1)

    def loss(w: Any, batch: Any) -> Any:
        x, labels = batch
        scores = jax.nn.log_softmax(x @ w)
        picked = scores[jnp.arange(x.shape[0]), labels]
        return -jnp.mean(picked) - jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    check_exact(sgd(loss), W, (X, labels))


def test_rows_regrouped_by_the_user_are_noted():
    step = parallel(lambda w, x: jnp.sum(jnp.sin((x @ w).reshape(2, -1, 5) @ w.T)))
    np.testing.assert_allclose(step(W, X), jnp.sum(jnp.sin(X @ W @ W.T)), rtol=1e-5)
    (warning,) = step.last_executable.plan.warnings
    assert "far apart" in warning and "test_accumulate.py" in warning


# -- rows by their place


@pytest.mark.parametrize(
    "pick",
    [
        lambda rows: rows[0],
        lambda rows: rows[-3:],
        lambda rows: jnp.argmax(rows, axis=0),
        lambda rows: jnp.median(rows),
        lambda rows: jax.lax.top_k(jnp.sum(rows, axis=1), 4),
        lambda rows: jnp.zeros((32, 5)).at[10 + jnp.arange(len(rows))].set(rows),
        lambda rows: jax.lax.dynamic_update_slice(jnp.zeros((32, 5)), rows, (7, 0)),
    ],
    ids=["row", "rows", "argmax", "median", "largest", "scattered", "queue"],
)
def test_what_takes_rows_by_their_place_waits_for_all_rows(pick: Any):
    def step(w: Any, x: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w) ** 2))(w)
        return w - slope, loss, pick(jnp.sin(x @ w))

    check_exact(step, W, X)


def test_a_row_of_the_batch_that_all_rows_use_is_exact():
    check_exact(sgd(lambda w, x: jnp.mean(jnp.sin((x - x[0]) @ w))), W, X)


def test_groups_of_sorted_rows_are_those_of_a_micro_batch():
    """Tokens sent to experts: that sorting loses nothing is not known, so it is noted."""

    def loss(w: Any, x: Any) -> Any:
        chosen = jnp.argmax(x @ w["router"], axis=1)
        order = jnp.argsort(chosen)
        rows = jax.lax.ragged_dot(x[order], w["experts"], jnp.bincount(chosen, length=3))
        return jnp.mean(jnp.zeros_like(rows).at[order].add(rows) ** 2)

    w = {"router": W[:, :3], "experts": jnp.stack([W, 2 * W, -W])}
    step = parallel(sgd(loss))
    for got, want in zip(
        jax.tree.leaves(step(w, X)), jax.tree.leaves(jax.jit(sgd(loss))(w, X)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert any("sort combines" in note for note in step.last_executable.plan.warnings)


# -- errors


def test_rows_that_are_returned_out_of_order_are_an_error():
    with pytest.raises(TraceError, match=r"result \(made at .*rows .* no longer adjacent"):
        accumulated(lambda w, x: (x @ w).reshape(2, -1, 5) @ w.T, W, X)
    check_exact(lambda w, x: (x @ w).reshape(2, -1, 5), W, X)  # after the loop
    check_exact(lambda w, x: jnp.sin((x @ w).T.reshape(-1)), W, X)  # an order that is known


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: jnp.sum(jnp.sin(x @ w)[0]),
        lambda w, x: jnp.sum((x @ w)[jnp.array([1, 5])] ** 2),
        lambda w, x: jnp.sum(jax.lax.dynamic_index_in_dim(x @ w, 3)),
        lambda w, x: jnp.mean(jax.lax.top_k(jnp.sum(x @ w, axis=1), 4)[0]),
    ],
    ids=["row", "rows", "dynamic", "largest"],
)
def test_gradients_of_picked_rows_are_an_error(loss: Any):
    """Also where the loss is not returned: each micro-batch would have its own row 0."""
    with pytest.raises(TraceError, match=r"test_accumulate\.py.*particular rows"):
        accumulated(lambda w, x: w - jax.grad(loss)(w, x), W, X)


def test_a_picked_row_that_other_rows_use_is_an_error():
    with pytest.raises(TraceError, match=r"test_accumulate\.py.*other rows depend on it"):
        accumulated(lambda w, x: jnp.sum(jnp.sin((x @ w - (x @ w)[0]) @ w.T)), W, X)


def test_a_program_that_depends_on_the_batch_size_is_an_error():
    def step(w: Any, x: Any) -> Any:
        x = x[jnp.arange(len(x))]  # places in the batch matter, so a micro-batch is traced
        return jnp.sum(x @ w) if x.shape[0] > 8 else jnp.max(x @ w)

    with pytest.raises(TraceError, match=r"test_accumulate\.py.*depends on the batch size"):
        accumulated(step, W, X)


def test_a_step_that_asks_for_the_batch_size_gets_that_of_the_whole_batch():
    def step(w: Any, x: Any) -> Any:
        return jnp.sum(x @ w) if x.shape[0] > 8 else jnp.max(x @ w)

    check_exact(step, W, X)


def test_rows_that_are_cut_off_are_an_error():
    with pytest.raises(TraceError, match="15 rows from the batch, and one of 3 rows"):
        accumulated(lambda w, x: jnp.sum(jnp.sin(x[1:] @ w)), W, X)


def test_batch_that_micro_batches_do_not_divide():
    with pytest.raises(
        MeshError, match=r"x: its batch dimension of 16 .*num_micro_batches=3.*2 or 4"
    ):
        accumulated(lambda w, x: jnp.sum(x @ w), W, X, num=3)


def test_micro_batches_that_the_devices_do_not_divide():
    step = autopar.parallelize(sgd(mean_loss), method=autopar.DataParallel(num_micro_batches=NUM))
    with pytest.raises(MeshError, match=r"x: each of num_micro_batches=4 has 4 .* multiple of 32"):
        step.plan(W, X)


def test_batch_arrays_of_different_sizes():
    batch = {"x": X, "y": X[:8]}
    with pytest.raises(MeshError, match=r"batch\['y'\] has 8 rows and batch\['x'\] has 16"):
        accumulated(lambda w, batch: jnp.sum(batch["x"] @ w) + batch["y"].sum(), W, batch)


def test_no_batch():
    traced = trace_step(lambda w: w * 2, (W,))
    with pytest.raises(TraceError, match="needs a batch"):
        batch_size(traced, 2)


# -- plans


def test_plan_with_micro_batches_is_saved_and_used_again(tmp_path: Any):
    step = sgd(mean_loss)
    method = autopar.ShardParallel((2,), num_micro_batches=NUM)
    plan = autopar.parallelize(step, method=method).plan(W, X)
    assert "4 micro-batches" in plan.explain(detail="full")
    plan.save(tmp_path / "plan.json")
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.num_micro_batches == NUM
    again = autopar.parallelize(step, method=loaded, donate_argnums=())
    for got, want in zip(again(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    compiled = autopar.compile(step, W, X, plan=loaded)
    assert "while" in str(compiled["step"].as_text())


def test_each_micro_batch_is_a_part_of_what_a_device_has():
    """Cutting a batch that lies split over devices moves nothing."""
    method = autopar.DataParallel(num_micro_batches=2)
    step = autopar.parallelize(sgd(mean_loss), method=method, donate_argnums=())
    for got, want in zip(step(W, X), jax.jit(sgd(mean_loss))(W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    kinds = {c.kind for c in step.last_executable.collectives()}
    assert kinds == {"all-reduce"}


def test_lanes_of_a_plan_are_checked():
    method = autopar.ShardParallel(autopar.LogicalMesh((2,)), num_micro_batches=NUM)
    plan = autopar.parallelize(sgd(mean_loss), method=method).plan(W, X)
    text = plan.to_json()
    document = json.loads(text)
    (loop,) = [e for e in document["plan"]["program"]["equations"] if e["bodies"]]
    (body,) = loop["bodies"]
    laned = [e for e in body["equations"] if e["lanes"]]
    assert laned and all(e["lanes"]["axes"] == [0] for e in laned)
    assert autopar.ParallelPlan.from_json(text) == plan

    def refused(lanes: Any, match: str) -> None:
        laned[0]["lanes"] = lanes
        sealed = {**document, "sha256": digest(document["plan"])}
        with pytest.raises(PlanError, match=match):
            autopar.ParallelPlan.from_json(json.dumps(sealed))

    layouts = laned[0]["lanes"]["operands"]
    refused({"axes": [1], "operands": layouts}, "lanes .* mesh of 1 axes")
    refused({"axes": [], "operands": layouts}, "lanes .* mesh of 1 axes")
    refused({"axes": [0], "operands": layouts[:-1]}, "lanes .* mesh of 1 axes")
    refused({"axes": [0], "operands": [[-3], *layouts[1:]]}, r"a layout \(-3,\)")
    refused({"axes": ["x"], "operands": layouts}, "malformed")


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3)], ids=["raw", "typed"])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_counted_beside_rows_is_counted_once(key: Any, stages: int) -> None:
    """A key and counters that a loop or branch with rows returns too are the same in every
    micro-batch (optax's sophia evaluates the loss in a branch of its update)."""

    def step(state: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            def apply(carry: Any, layer: Any) -> tuple[Any, None]:
                rows, key, count = carry
                return (jnp.tanh(rows @ layer), jax.random.split(key)[0], count + 1), None

            (rows, key, count), _ = jax.lax.scan(apply, (x, *state[1:]), layers)
            return jnp.mean(rows**2), (key, count)

        (value, (key, count)), slopes = jax.value_and_grad(loss, has_aux=True)(state[0])
        again, count = jax.lax.cond(
            state[2] % 2 == 0,
            lambda: (jnp.mean(x @ state[0][0]), state[2] + 1),
            lambda: (jnp.float32(0), state[2] + 2),
        )
        return (state[0] - 0.1 * slopes, key, count), value + again

    def plain(array: Any) -> Any:
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(array) if is_key else array

    layers = jax.random.normal(jax.random.key(0), (4, 8, 8))
    args = (layers, key, jnp.int32(0)), jax.random.normal(jax.random.key(1), (16, 8))
    method = autopar.ShardParallel((4,), num_micro_batches=2)
    if stages > 1:
        method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(stages))
    got = autopar.parallelize(step, method=method, donate_argnums=())(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(plain(a), plain(b), rtol=1e-5, atol=1e-6)


def test_a_batch_without_rows_is_an_error():
    with pytest.raises(MeshError, match="batch dimension is 0, so there are no rows"):
        accumulated(sgd(mean_loss), W, X[:0])


def test_the_error_of_an_operation_that_nobody_looks_into_says_so():
    """Its gradient is a sum over rows, which only its inside tells."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    product = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    with pytest.raises(TraceError, match=r"test_accumulate\.py.*shard_map .*not look into it"):
        accumulated(sgd(lambda w, x: jnp.mean(jnp.sin(product(jnp.sin(x @ w), w.T)))), W, X)

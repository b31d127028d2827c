"""What does not fit is a `MemoryBudgetError` under every method. It says whether micro-batches,
recomputation and pipelines were tried, and advises nothing that was tried in vain or cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import (
    AutoParallel,
    AutoStages,
    ManualStages,
    MemoryBudgetError,
    PipeshardParallel,
    ShardingOptions,
    ShardParallel,
    UniformStages,
)
from autopar.methods import DataParallel, Zero2Parallel, Zero3Parallel
from autopar.stages import auto_task
from tests.unit.stages.traced_sizes import zero_by_factors

WIDTH, LAYERS, ROWS = 64, 3, 32
HOST = autopar.ClusterSpec(1, 4, "h100-sxm")
HOSTS = autopar.ClusterSpec(2, 2, "h100-sxm")
OPTIMIZER = optax.adam(1e-3)


def make_state() -> dict[str, Any]:
    params = [jnp.ones((WIDTH, WIDTH))] * LAYERS
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """With one row, optax's loss is another program."""

    def loss_of(params: list[Any]) -> Any:
        x = batch["x"]
        for weight in params:
            x = jnp.tanh(x @ weight)
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def batch_of(rows: int = ROWS) -> dict[str, Any]:
    return {
        "x": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


STATE = jax.eval_shape(make_state)
STATE_BYTES = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(STATE))


def misfit(
    method: Any, fn: Any = train_step, cluster: Any = HOST, rows: int = ROWS
) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.plan(fn, STATE, batch_of(rows), cluster=cluster, method=method)
    error = caught.value
    assert set(error.tried) >= {"micro-batches", "recomputation", "pipelines"}
    lines = str(error).split("\n")
    for what, text in error.tried.items():
        assert f"  - {what}: {text}" in lines
    return error


def within(num_bytes: float, **options: Any) -> ShardingOptions:
    return ShardingOptions(memory_budget_bytes=num_bytes, **options)


SMALL = within(1000)
UNIFORM = UniformStages(2)
MANUAL = ManualStages([[0], [1, 2]], [(1, 2), (1, 2)])


METHODS = {
    "one mesh": ShardParallel(options=SMALL),
    "one mesh, cut": ShardParallel((2, 2), num_micro_batches=4, options=SMALL),
    "one mesh, nothing recomputed": ShardParallel(options=within(1000, remat="none")),
    "one mesh, all recomputed": ShardParallel(options=within(1000, remat="all")),
    "default": AutoParallel(options=SMALL),
    "default, cut": AutoParallel(num_micro_batches=4, options=SMALL),
    "searched": PipeshardParallel("auto", options=SMALL),
    "searched stages": PipeshardParallel(4, stages=AutoStages(), options=SMALL),
    "uniform": PipeshardParallel(4, stages=UNIFORM, options=SMALL),
    "uniform, nothing recomputed": PipeshardParallel(
        4, stages=UNIFORM, schedule="gpipe", options=within(1000, remat="none")
    ),
    "manual, all recomputed": PipeshardParallel(
        4, stages=MANUAL, options=within(1000, remat="all")
    ),
}


@pytest.mark.representatives("default", "searched", "uniform", "one mesh, cut")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_says_that_it_does_not_fit(method: Any) -> None:
    error = misfit(method)
    assert error.peak_bytes > error.budget_bytes == 1000
    assert "more devices" in error.remedies


@pytest.mark.parametrize("method", [DataParallel(), Zero2Parallel(), Zero3Parallel()], ids=str)
def test_methods_that_fix_layouts_have_no_budget_and_warn(method: Any) -> None:
    tiny = autopar.ClusterSpec(1, 4, "h100-sxm", memory_bytes=2000)
    plan = autopar.plan(train_step, STATE, batch_of(), cluster=tiny, method=method)
    assert any("more than the device's" in warning for warning in plan.warnings)


# -- the default


@pytest.mark.representatives("one host")
@pytest.mark.parametrize("cluster", [HOST, HOSTS], ids=["one host", "two hosts"])
def test_a_batch_that_cannot_be_cut_to_single_rows_does_not_hide_the_misfit(cluster: Any) -> None:
    """The state fits, so everything is tried, down to one row, which is another program."""

    def traced(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        state, loss = train_step(state, batch)
        return state, loss + zero_by_factors(batch["x"])

    error = misfit(AutoParallel(options=within(1.05 * STATE_BYTES / 4)), traced, cluster)
    batch, pipelines = error.tried["micro-batches"], error.tried["pipelines"]
    assert batch.startswith("tried: ")
    assert "32 are not possible: traced: at " in batch
    assert "depends on the batch size" in batch
    assert "16 of them need " in batch
    assert "recomputes" in error.tried["recomputation"]
    assert pipelines.startswith("tried: traced: no pipeline of its ")
    assert error.num_micro_batches is None and "num_micro_batches=" not in str(error)


def test_a_state_that_cannot_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pipeline is searched and no batch is cut, and the error explains the best sharding."""
    searched: list[Any] = []
    monkeypatch.setattr(auto_task, "plan_pipeline", searched.append)
    error = misfit(AutoParallel(options=within(0.9 * STATE_BYTES / 4)))
    assert not searched
    reason = "not tried: the state alone takes 36.0 KiB per device, divided evenly over all 4"
    assert {error.tried[what] for what in ("micro-batches", "pipelines")} == {reason}
    assert "The smallest peak found is" in str(error)
    assert "state['opt'][0].mu[*]" in str(error)
    assert error.peak_bytes > STATE_BYTES / 4


def test_micro_batches_of_the_default_that_fit_are_taken() -> None:
    """Half of the peak is too little for the whole batch, and enough for a part of it."""
    rows = 4096
    whole = autopar.plan(
        train_step, STATE, batch_of(rows), cluster=HOST, method=ShardParallel(options=within(1e9))
    )
    options = within(0.5 * whole.estimated_peak_bytes, remat="none")
    plan = autopar.plan(
        train_step, STATE, batch_of(rows), cluster=HOST, method=AutoParallel(options=options)
    )
    assert plan.num_micro_batches > 1
    assert plan.estimated_peak_bytes <= 0.5 * whole.estimated_peak_bytes


# -- a batch size that the step closes over


def test_the_smallest_peak_is_also_that_of_cut_batches() -> None:
    """Nearly all memory is the batch's, so plans with many micro-batches take far less. An error
    just below the least that a plan takes says so."""

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64, 8))]
    x = jax.ShapeDtypeStruct((512, 8), jnp.float32)

    def plan(num_devices: int, num_bytes: float, method: Any = AutoParallel) -> float:
        cluster = autopar.ClusterSpec(1, num_devices, "cpu")
        given = method(options=within(num_bytes))
        found = autopar.plan(step, weights, x, cluster=cluster, method=given)
        return found.estimated_peak_bytes

    def refused(*arguments: Any) -> MemoryBudgetError:
        with pytest.raises(MemoryBudgetError) as raised:
            plan(*arguments)
        return raised.value

    peak = plan(1, 40_000)
    error = refused(1, 0.3 * peak)
    assert 0.3 * peak < error.peak_bytes <= peak
    assert "with 512 micro-batches" in error.problem.splitlines()[0]
    error = refused(4, 4_000)
    assert error.peak_bytes < 0.25 * refused(4, 4_000, ShardParallel).peak_bytes
    assert "with 128 micro-batches" in error.problem.splitlines()[0]


def closed_over(method: Any, rows: int) -> MemoryBudgetError:
    def fixed(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        state, loss = train_step(state, {**batch, "x": batch["x"].reshape(rows, WIDTH)})
        return state, loss + zero_by_factors(batch["x"])

    return misfit(method, fixed, rows=rows)


@pytest.mark.parametrize("kind", [ShardParallel, AutoParallel])
def test_micro_batches_that_cannot_be_are_not_advised(kind: Any) -> None:
    """Activations are most of the peak, so that micro-batches would help if there were any."""
    rows = 4096
    free = autopar.plan(
        train_step, STATE, batch_of(rows), cluster=HOST, method=ShardParallel(options=within(1e9))
    )
    options = within(0.5 * free.estimated_peak_bytes, remat="none")
    error = closed_over(kind(options=options), rows)
    tried = error.tried["micro-batches"]
    assert "not possible: fixed: num_micro_batches=2 traces it with 2048 of the batch's" in tried
    assert error.num_micro_batches is None and "num_micro_batches=3" not in str(error)
    assert "micro-batches" not in error.remedies
    cut = misfit(ShardParallel(options=options), rows=rows)
    assert cut.num_micro_batches is not None and rows % cut.num_micro_batches == 0
    assert f"num_micro_batches={cut.num_micro_batches} or more" in cut.remedies["micro-batches"]


def test_what_is_advised_fits() -> None:
    """The number of micro-batches in the advice is enough, and divides the rows."""
    rows = 3 * 2**10
    free = autopar.plan(
        train_step, STATE, batch_of(rows), cluster=HOST, method=ShardParallel(options=within(1e9))
    )
    options = within(0.5 * free.estimated_peak_bytes, remat="none")
    number = misfit(ShardParallel(options=options), rows=rows).num_micro_batches
    assert number is not None and rows % number == 0
    method = ShardParallel(num_micro_batches=2 * number, options=options)
    plan = autopar.plan(train_step, STATE, batch_of(rows), cluster=HOST, method=method)
    assert plan.estimated_peak_bytes <= 0.5 * free.estimated_peak_bytes


def test_a_pin_that_needs_two_axes_does_not_hide_the_misfit() -> None:
    """The error is explained on one mesh, but on one that has the axes of the pin."""
    pins = {"state['params'][0]": jax.sharding.PartitionSpec("x", "y")}
    error = misfit(ShardParallel(options=within(1000, pins=pins)))
    assert "on mesh (2, 2)" in str(error)

"""Three steps of every kind of model with `remat="all"`, sharded, equal three of `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import ParallelPlan
from examples.models.gpt import GPTConfig, example
from tests.equivalence.test_models import check_model
from tests.unit.rewrite import test_partial_remat as part_model

MESH = autopar.LogicalMesh((2, 4), alpha=(1e-7, 1e-7), beta=(1e-9, 2e-9))
ALL = autopar.ShardParallel(MESH, options=autopar.ShardingOptions(remat="all"))

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


PARAMS = [(array(16, 32), array(32, 16)) for _ in range(4)]
X = array(16, 16)


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1])


def loss_fn(params: Any, x: Any, block: Callable[..., Any] = block) -> Any:
    for w in params:
        x = block(x, w)
    return (x**2).mean()


def train_step(params: Any, x: Any, loss_fn: Callable[..., Any] = loss_fn) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def check(
    step: Callable[..., Any], state: Any, batch: Any, method: Any = ALL
) -> autopar.ParallelFunction:
    ours = autopar.parallelize(step, method=method)
    reference, want, got = jax.jit(step), state, jax.tree.map(jnp.array, state)
    for _ in range(3):
        got, result = ours(got, batch)
        want, expected = reference(want, batch)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    return ours


@pytest.mark.parametrize(
    "method", [autopar.DataParallel, autopar.Zero2Parallel, autopar.Zero3Parallel]
)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_data_parallelism_that_recomputes(method: Any, num_micro_batches: int) -> None:
    step = check(train_step, PARAMS, X, method(num_micro_batches, remat="all"))
    assert len(step.last_executable.plan.remat) == len(PARAMS) - 1  # all but the last one
    assert "remat='all'" in step.last_executable.plan.method


@pytest.mark.representatives("mlp-tiny-4", slow=["gpt-tiny-scan-2"])
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mlp-tiny", 4),
        ("gpt-tiny", 2),
        ("gpt-tiny-scan", 2),
        pytest.param("llama-tiny", 2, marks=pytest.mark.slow),
        pytest.param("llama-tiny-scan", 2, marks=pytest.mark.slow),
        pytest.param("moe-tiny", 6, marks=pytest.mark.slow),
        pytest.param("wresnet-tiny", 3, marks=pytest.mark.slow),
        pytest.param("bert-tiny", 2, marks=pytest.mark.slow),
    ],
)
def test_model(name: str, layers: int) -> None:
    plan = check_model(name, ALL)
    assert len(plan.remat) == layers


@pytest.mark.ci
def test_plain_jax() -> None:
    plan = check(train_step, PARAMS, X).last_executable.plan
    assert plan.remat == ("layer 0", "layer 1", "layer 2")
    assert "recomputed in the backward pass: layer * (3 layers)" in plan.explain(detail="full")


def test_recomputation_is_in_the_estimates() -> None:
    def plan_of(remat: str) -> ParallelPlan:
        cluster = autopar.ClusterSpec(1, 8, device="h100-sxm")
        method = autopar.ShardParallel((8,), options=autopar.ShardingOptions(remat=remat))
        return autopar.plan(train_step, PARAMS, X, cluster=cluster, method=method)

    none, everything = plan_of("none"), plan_of("all")
    compute = [sum(m.compute_s for m in p.modules) for p in (none, everything)]
    assert compute[1] > compute[0]


@pytest.mark.ci
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_own_checkpoint_of_the_user(policy: str | None) -> None:
    chosen = getattr(jax.checkpoint_policies, policy) if policy else None
    own = jax.checkpoint(block, policy=chosen)
    check(lambda p, x: train_step(p, x, lambda p, x: loss_fn(p, x, own)), PARAMS, X)


@pytest.mark.ci
def test_dropout() -> None:
    def step(state: Any, x: Any) -> Any:
        params, key = state
        key, own = jax.random.split(key)

        def loss(params: Any, x: Any) -> Any:
            for index, w in enumerate(params):
                mask = jax.random.bernoulli(jax.random.fold_in(own, index), 0.5, x.shape)
                x = jnp.where(mask, block(x, w) * 2, 0)
            return (x**2).mean()

        params, value = train_step(params, x, loss)
        return (params, key), value

    plan = check(step, (PARAMS, jax.random.key(0)), X).last_executable.plan
    assert len(plan.remat) == 3


@pytest.mark.slow
def test_gpt_with_dropout() -> None:
    config = GPTConfig(32, 3, 8, seq_len=16, vocab_size=64, dropout=0.5)
    model = example(config, batch_size=8)
    state, batch = model.create_state(), model.make_batch()
    ours = autopar.parallelize(model.train_step, method=ALL)
    want, expected = jax.jit(model.train_step)(state, batch)
    _, result = ours(jax.tree.map(jnp.array, state), batch)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert ours.last_executable.plan.remat == tuple(f"GPT/layer_{i}" for i in range(3))
    del want


@pytest.mark.ci
def test_scan_with_dropout() -> None:
    stacked = jax.tree.map(lambda *p: np.stack(p), *PARAMS)

    def step(state: Any, x: Any) -> Any:
        params, key = state
        key, own = jax.random.split(key)

        def loss(params: Any, x: Any) -> Any:
            def body(carry: Any, w: Any) -> Any:
                x, key = carry
                key, now = jax.random.split(key)
                mask = jax.random.bernoulli(now, 0.5, x.shape)
                return (jnp.where(mask, block(x, w) * 2, 0), key), None

            return (lax.scan(body, (x, own), params)[0][0] ** 2).mean()

        params, value = train_step(params, x, loss)
        return (params, key), value

    check(step, (stacked, jax.random.key(0)), X)


@pytest.mark.ci
@pytest.mark.parametrize("scan", [False, True])
def test_micro_batches(scan: bool) -> None:
    method = autopar.ShardParallel(
        MESH, num_micro_batches=2, options=autopar.ShardingOptions(remat="all")
    )
    if not scan:
        plan = check(train_step, PARAMS, X, method).last_executable.plan
    else:
        stacked = jax.tree.map(lambda *p: np.stack(p), *PARAMS)

        def loss(params: Any, x: Any) -> Any:
            return (lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2).mean()

        step = lambda p, x: train_step(p, x, loss)  # noqa: E731
        plan = check(step, stacked, X, method).last_executable.plan
    assert plan.remat
    assert plan.num_micro_batches == 2


def test_one_device_runs_the_recomputing_program() -> None:
    method = autopar.ShardParallel((1,), options=autopar.ShardingOptions(remat="all"))
    step = check(train_step, PARAMS, X, method)
    assert step.last_executable.plan.remat
    lowered = step.last_executable.jitted.lower(*step.last_executable.avals).as_text()
    assert lowered.count("optimization_barrier") == 3


@pytest.mark.representatives("1-mesh1", "1-mesh0")
@pytest.mark.parametrize("mesh", [(2, 4), (1,)])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_saved_plan_recomputes_the_same_layers(
    tmp_path: Path, mesh: tuple[int, ...], num_micro_batches: int
) -> None:
    method = autopar.ShardParallel(
        mesh, num_micro_batches, options=autopar.ShardingOptions(remat="all")
    )
    plan = autopar.parallelize(train_step, method=method).plan(PARAMS, X)
    plan.save(tmp_path / "plan.json")
    loaded = ParallelPlan.load(tmp_path / "plan.json")
    assert loaded.remat == plan.remat
    assert check(train_step, PARAMS, X, loaded).last_executable.plan.remat == plan.remat


def test_plan_of_other_layers_is_refused() -> None:
    plan = autopar.parallelize(train_step, method=ALL).plan(PARAMS, X)
    own = jax.checkpoint(block)
    other = lambda p, x: train_step(p, x, lambda p, x: loss_fn(p, x, own))  # noqa: E731
    with pytest.raises(PlanError, match="the traced programs differ"):
        autopar.parallelize(other, method=plan)(PARAMS, X)


@pytest.mark.ci
@pytest.mark.parametrize(("share", "names"), [(0.7, {"in part"}), (0.6, {"", "in part"})])
def test_scores_are_recomputed_before_whole_layers(
    tmp_path: Path, share: float, names: set[str]
) -> None:
    """Attention's scores are most of the memory and little of the work. A saved plan recomputes the
    same."""
    state, rows = part_model.params_of(), array(16, part_model.LENGTH, part_model.WIDTH)
    step = lambda params, x: train_step(params, x, scores_loss)  # noqa: E731
    plain = autopar.parallelize(step, method=autopar.ShardParallel((8,))).plan(state, rows)
    options = autopar.ShardingOptions(memory_budget_bytes=int(share * plain.estimated_peak_bytes))
    run = check(step, state, rows, autopar.ShardParallel((8,), options=options))
    plan = run.last_executable.plan
    assert {name[len("layer 0 ") :] for name in plan.remat} == names
    plan.save(tmp_path / "plan.json")
    loaded = ParallelPlan.load(tmp_path / "plan.json")
    assert check(step, state, rows, loaded).last_executable.plan.remat == plan.remat


def scores_loss(params: Any, x: Any) -> Any:
    for own in params:
        x = part_model.attention(x, own)
    return (x**2).mean()

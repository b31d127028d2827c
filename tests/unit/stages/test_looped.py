"""Stages as they are wanted: even ranges of layers, judged by all there are."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.rewrite.step_source import StepSource
from autopar.stages.looped import even_ranges, first_micro_batches
from autopar.tracer.trace import StepOptions


@pytest.mark.parametrize("seed", range(20))
def test_even_ranges_have_the_least_largest_sum(seed):
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 9, size=rng.integers(2, 8)).astype(float)
    count = int(rng.integers(1, len(work) + 1))

    def largest(ranges):
        return max(work[a:b].sum() for a, b in ranges)

    found = even_ranges(list(work), count)
    ends = [0, *(b for _, b in found)]
    assert found == list(pairwise(ends)) and ends[-1] == len(work) and len(found) == count
    assert all(a < b for a, b in found)
    cuts = combinations(range(1, len(work)), count - 1)
    best = min(largest(list(pairwise((0, *c, len(work))))) for c in cuts)
    assert largest(found) == best


@pytest.mark.parametrize("stages", [autopar.UniformStages(2), autopar.AutoStages()])
def test_a_step_that_updates_inside_of_a_scan_has_no_layers(stages: Any) -> None:
    """WGAN's critic steps, PPO's epochs: a pipeline is refused, with the line of the scan."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def step(weights, x):
        def update(weights, _):
            value, grads = jax.value_and_grad(loss)(weights, x)
            return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

        return jax.lax.scan(update, weights, length=3)

    args = [jnp.ones((8, 8))] * 4, jnp.ones((16, 8))
    cluster = autopar.ClusterSpec(1, 4, "h100-sxm")
    method = autopar.PipeshardParallel(1, stages=stages)
    with pytest.raises(autopar.TraceError) as caught:
        autopar.plan(step, *args, cluster=cluster, method=method)
    text = str(caught.value)
    assert "inside of a scan" in text and "test_looped.py" in text
    assert text.endswith("Use ShardParallel or AutoParallel.")
    assert not autopar.plan(step, *args, cluster=cluster).is_pipeline


def test_more_micro_batches_are_searched_first_where_memory_is_short() -> None:
    def step(weights, x):
        def loss(weights):
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights)), x[:0]

    weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    source = StepSource.of(step, (weights, x), {}, StepOptions())
    cluster = autopar.ClusterSpec(2, 4, "v100")
    numbers = [first_micro_batches(source.whole, cluster, budget) for budget in (1e9, 1e3, 1e1)]
    assert numbers[0] == first_micro_batches(source.whole, cluster) == 8
    assert numbers[0] < numbers[1] < numbers[2] == 1024 // 4


def stored(buffer: Any, x: Any) -> Any:
    """A replay buffer."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, 8, axis=0)


@pytest.mark.parametrize("update", [stored, lambda kept, x: x], ids=["a buffer", "the last batch"])
def test_a_step_that_only_stores_its_batch_is_refused_with_the_reason(update: Any) -> None:
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
    step = autopar.parallelize(update, method=method, donate_argnums=())
    with pytest.raises(autopar.TraceError, match=r"only stores the batch.*Use ShardParallel"):
        step.plan(jnp.zeros((64, 6)), jnp.ones((16, 6)))

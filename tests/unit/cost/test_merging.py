"""Sizes up to which XLA merges collectives of weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.merging import OPTION
from autopar.ir.mesh import ClusterSpec

MIB = 2**20
GATHER, SCATTER = OPTION["all-gather"], OPTION["reduce-scatter"]
CLUSTER = ClusterSpec(1, 8, "h100-sxm")


def layers(num: int, width: int, *, scanned: bool = False) -> tuple[Callable[..., Any], Any, Any]:
    def loss_of(weights: Any, batch: Any) -> Any:
        if scanned:
            hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, weights)
            return jnp.mean(hidden**2)
        for weight in weights:
            batch = jnp.tanh(batch @ weight)
        return jnp.mean(batch**2)

    def step(weights: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    one = jax.ShapeDtypeStruct((width, width), jnp.float32)
    weights = jax.ShapeDtypeStruct((num, width, width), jnp.float32) if scanned else [one] * num
    return step, weights, jax.ShapeDtypeStruct((8192, width), jnp.float32)


def options(method: Any, cluster: ClusterSpec = CLUSTER, **kind: Any) -> dict[str, str]:
    plan = autopar.plan(*layers(16, 1024, **kind), cluster=cluster, method=method)
    return dict(plan.xla_options or ())


def best_chunk(num_bytes: float) -> float:
    """Where β·c + α·G/c is least, for eight devices."""
    device = CLUSTER.spec
    per_byte_s = 7 / 8 / device.intra_host_bandwidth
    return sqrt(device.intra_host_alpha_s * num_bytes / per_byte_s)


def test_gradients_of_zero_are_summed_in_chunks_by_what_a_device_keeps() -> None:
    found = options(autopar.Zero3Parallel())
    num_bytes = 16 * 4 * MIB  # each is gathered once and summed once
    assert int(found[SCATTER]) * 8 == int(found[GATHER])
    assert best_chunk(num_bytes) / 1.5 < int(found[GATHER]) < best_chunk(num_bytes) * 1.5


def test_slow_starts_ask_for_larger_chunks_but_none_larger_than_xlas() -> None:
    device = replace(CLUSTER.spec, name="slow", intra_host_alpha_s=5e-3)
    found = options(autopar.Zero3Parallel(), ClusterSpec(1, 8, device))
    assert GATHER not in found  # XLA's own 30 MiB
    assert int(found[SCATTER]) == 32 * MIB // 8  # which would be 240 of gradients


@pytest.mark.parametrize(
    "method, cluster, kind",
    [
        (autopar.Zero3Parallel(), ClusterSpec(1, 8, "cpu"), {}),
        (autopar.Zero3Parallel(), ClusterSpec(1, 1, "h100-sxm"), {}),
        (autopar.DataParallel(), CLUSTER, {}),
        (autopar.Zero3Parallel(num_micro_batches=2), CLUSTER, {}),
        (autopar.Zero3Parallel(), CLUSTER, {"scanned": True}),
    ],
    ids=["CPU", "one device", "all-reduces", "loop over micro-batches", "loop over layers"],
)
def test_xlas_own_sizes_stay_where_nothing_is_hidden(
    method: Any, cluster: ClusterSpec, kind: dict[str, Any]
) -> None:
    assert options(method, cluster, **kind) == {}


def test_the_users_sizes_and_schedule_come_first() -> None:
    given = autopar.ShardingOptions(xla_options={GATHER: 7 * MIB})
    found = options(autopar.ShardParallel((8,), options=given))
    assert found[GATHER] == str(7 * MIB)
    lean = {"xla_gpu_enable_latency_hiding_scheduler": False}
    given = autopar.ShardingOptions(xla_options=lean)
    assert set(options(autopar.ShardParallel((8,), options=given))) == set(lean)


def test_flags_of_the_process_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{SCATTER}=1000 --xla_gpu_autotune_level=0")
    assert set(options(autopar.Zero3Parallel())) == {GATHER}
    given = autopar.ShardingOptions(xla_options={SCATTER: 2000})
    assert options(autopar.ShardParallel((8,), options=given))[SCATTER] == "2000"


def test_they_are_told_and_saved(tmp_path: Any) -> None:
    plan = autopar.plan(*layers(16, 1024), cluster=CLUSTER, method=autopar.Zero3Parallel())
    assert SCATTER in plan.explain().replace("\n", "")
    plan.save(tmp_path / "plan.json")
    assert autopar.ParallelPlan.load(tmp_path / "plan.json").xla_options == plan.xla_options

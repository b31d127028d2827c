"""Scans over layers are written out where that fits and pays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.sharding import plan_whole
from examples.models import build

ONE_H100 = autopar.ClusterSpec(1, 1, "h100-sxm")
EIGHT_H100S = autopar.ClusterSpec(1, 8, "h100-sxm")
SIZES = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "seq_len": 512, "vocab_size": 1024}


def plan_of(
    method: Any = None, cluster: autopar.ClusterSpec = ONE_H100, **changes: Any
) -> autopar.ParallelPlan:
    sizes = {"batch_size": 8, "scan_layers": True, **SIZES, **changes}
    model = build("gpt-2.6b", **sizes)
    state, batch = model.abstract_state(), model.abstract_batch()
    return autopar.plan(model.train_step, state, batch, cluster=cluster, method=method)


def test_a_short_scan_is_written_out() -> None:
    plan, loop = plan_of(), plan_of(scan_layers=False)
    assert plan.unrolled
    assert "scans over layers are written out" in plan.explain()
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    assert not loop.unrolled


def test_a_short_scan_is_written_out_on_a_mesh() -> None:
    large = {"cluster": EIGHT_H100S, "batch_size": 64, "hidden_size": 1024}
    plan, loop = plan_of(**large), plan_of(**large, scan_layers=False)
    assert plan.unrolled and plan.num_devices == 8 and not plan.is_pipeline
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)
    text = plan.explain()
    assert "layers_0–3 (4)" in text, "all layers have the parallelism of their stack"
    assert "resharded parameters" in text and "partial sums of gradients" in text
    assert not plan_of(autopar.Zero3Parallel(), **large).unrolled, "each trip gathers its layer"


def test_a_scan_in_micro_batches_is_written_out() -> None:
    method = autopar.ShardParallel(num_micro_batches=2)
    for cluster, batch_size in ((ONE_H100, 8), (EIGHT_H100S, 64)):
        sizes = {"cluster": cluster, "batch_size": batch_size, "hidden_size": 1024}
        plan, loop = plan_of(method, **sizes), plan_of(method, **sizes, scan_layers=False)
        assert plan.unrolled and plan.num_micro_batches == 2
        assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)


def test_as_many_layers_are_recomputed_as_of_those_written_out_by_hand() -> None:
    sizes = {"hidden_size": 1024, "num_layers": 6}
    budget = int(0.8 * plan_of(**sizes, scan_layers=False).estimated_peak_bytes)
    method = autopar.ShardParallel(options=autopar.ShardingOptions(memory_budget_bytes=budget))
    plan, loop = plan_of(method, **sizes), plan_of(method, **sizes, scan_layers=False)
    assert plan.unrolled and len(plan.remat) == len(loop.remat) > 0
    assert max(plan.estimated_peak_bytes, loop.estimated_peak_bytes) <= budget
    assert plan.estimated_step_s == pytest.approx(loop.estimated_step_s, rel=0.02)


def test_a_scan_that_would_not_fit_written_out_stays() -> None:
    unrolled = plan_of()
    budget = int(0.9 * unrolled.estimated_peak_bytes)
    options = autopar.ShardingOptions(memory_budget_bytes=budget, remat="none")
    plan = plan_of(autopar.ShardParallel(options=options))
    assert not plan.unrolled, "the scan that stacks less fits as it is"
    assert plan.estimated_peak_bytes <= budget
    free = autopar.ShardingOptions(memory_budget_bytes=budget)
    cut = plan_of(autopar.AutoParallel(options=free))
    assert cut.unrolled and cut.num_micro_batches > 1, "written-out layers fit in micro-batches"
    assert cut.estimated_step_s < plan.estimated_step_s


def test_a_scan_that_the_user_recomputes_stays() -> None:
    assert not plan_of(remat=True).unrolled


def test_a_long_scan_stays() -> None:
    assert not plan_of(num_layers=64).unrolled


@pytest.fixture
def one_session() -> Iterator[None]:
    yield
    autopar.shutdown()


@pytest.mark.usefixtures("one_session")
@pytest.mark.parametrize(("num_micro_batches", "remat"), [(1, "none"), (2, "none"), (2, "all")])
@pytest.mark.parametrize("cluster", [ONE_H100, EIGHT_H100S], ids=["one device", "a mesh"])
def test_a_saved_plan_writes_the_scan_out_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: autopar.ClusterSpec,
    num_micro_batches: int,
    remat: Any,
) -> None:
    monkeypatch.setattr(plan_whole, "_WORTH_UNROLLING", 2.0)  # whatever it gains
    model = build("gpt-tiny-scan", num_layers=2)
    state, batch = model.create_state(), model.make_batch()
    options = autopar.ShardingOptions(remat=remat)
    method = autopar.ShardParallel((cluster.num_devices,), num_micro_batches, options)
    plan = autopar.plan(model.train_step, state, batch, cluster=cluster, method=method)
    assert plan.unrolled and bool(plan.remat) == (remat == "all")
    plan.save(tmp_path / "plan.json")
    autopar.init(devices=jax.devices()[: cluster.num_devices])
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    _, loss = autopar.parallelize(model.train_step, method=loaded)(state, batch)
    _, expected = jax.jit(model.train_step)(model.create_state(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

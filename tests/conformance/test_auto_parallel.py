"""What the default method must choose: pipelines where links between hosts are slow, none where
all links are fast."""

from __future__ import annotations

from functools import lru_cache

import pytest

import autopar
from autopar.ir.plan import ParallelPlan
from examples.models import mlp


@lru_cache
def planned(num_hosts: int, per_host: int, **links: float) -> ParallelPlan:
    """8 layers of 16384 × 16384 on a batch of 4096: 53 TFLOP in products, 8.6 GB of gradients, but
    0.27 GB between two layers."""
    example = mlp.example(mlp.MLPConfig(hidden_size=16384, num_layers=8), batch_size=4096)
    cluster = autopar.ClusterSpec(num_hosts, per_host, "a100-sxm", **links)
    state, batch = example.abstract_state(), example.abstract_batch()
    return autopar.plan(example.train_step, state, batch, cluster=cluster)


def test_slow_links_between_hosts_make_pipelines_of_hosts() -> None:
    plan = planned(2, 4, host_bandwidth=30e9)
    assert plan.is_pipeline
    assert [stage.submesh for stage in plan.stages] == [(1, 4), (1, 4)]
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.num_micro_batches > 1
    for stage in plan.stages:
        assert stage.plan is not None
        split = [t for t in stage.plan.inputs if any(entry >= 0 for entry in t.layout)]
        assert split  # operators are sharded inside of a host
    # It says what else was considered: the same without a pipeline is slower.
    assert plan.search is not None
    assert plan.search.intra_only_s is not None
    assert plan.search.intra_only_s > plan.estimated_step_s
    (by_tables, exact), *_ = plan.search.checked
    assert 0.8 < exact / by_tables < 1.2


@pytest.mark.ci
def test_one_fast_host_needs_no_pipeline() -> None:
    plan = planned(1, 8)
    assert not plan.is_pipeline
    assert plan.num_devices == 8
    assert plan.search is not None


@pytest.mark.ci
def test_fast_links_between_hosts_need_no_pipeline() -> None:
    plan = planned(2, 4, host_bandwidth=2e12)
    assert not plan.is_pipeline

"""On many devices, what cannot be part of a better plan is left out; the plan is the same."""

from __future__ import annotations

import pytest

import autopar
from autopar.stages import choose_stages
from examples.models import build


@pytest.mark.ci
def test_the_plan_is_that_of_all_tables(monkeypatch) -> None:
    example = build("gpt-tiny", 16)
    method = autopar.PipeshardParallel(2)
    cluster = autopar.ClusterSpec(2, 2, "v100", host_bandwidth=1e9)

    def planned() -> autopar.ParallelPlan:
        args = example.abstract_state(), example.abstract_batch()
        return autopar.plan(example.train_step, *args, cluster=cluster, method=method)

    assert cluster.num_devices < choose_stages.MANY_DEVICES
    all_tables = planned()
    monkeypatch.setattr(choose_stages, "MANY_DEVICES", 1)
    pruned = planned()
    assert pruned.estimated_step_s == pytest.approx(all_tables.estimated_step_s)
    assert [s.submesh for s in pruned.stages] == [s.submesh for s in all_tables.stages]
    assert pruned.search is not None and all_tables.search is not None
    assert pruned.search.num_candidates <= all_tables.search.num_candidates

"""A Ray cluster of two workers is measured."""

import pytest

from autopar.ir.profile import load_profile
from autopar.measure.profile.cluster import profile_cluster
from autopar.measure.profile.unfinished import part_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_of_two_hosts_is_measured(local_ray, tmp_path, monkeypatch):
    """Some samples of every kind that needs several hosts, and one product."""
    from autopar.measure.profile import cluster

    wanted = cluster.planned_samples

    def few(able, quick):
        own = wanted(able, quick)
        products = [p for p in own if p.group == "products"][:1]
        collectives = [p for p in own if p.group == "collectives" and p.sample.ranks == 2][:2]
        return [*products, *collectives, *(p for p in own if p.group == "crossings")]

    monkeypatch.setattr(cluster, "planned_samples", few)
    output = tmp_path / "cluster.json"
    said = []
    profile = profile_cluster(
        output, num_hosts=2, devices_per_host=1, quick=True, report=said.append
    )
    assert load_profile(output) == profile and not part_path(output).exists()
    assert (profile.num_hosts, profile.devices_per_host, profile.platform) == (2, 1, "cpu")
    assert len(profile.products) == 1
    assert {c.ranks_per_host for c in profile.collectives} == {1}
    assert all(c.time.seconds > 0 for c in profile.collectives)
    assert [c.same_host for c in profile.crossings] == [False, False]
    assert profile.usable_memory_bytes is not None

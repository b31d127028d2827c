"""What an array costs on its way from mesh to mesh."""

from __future__ import annotations

import pytest

from autopar.cost.pipeline_links import boundary_s, transfer_s
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.spec import WHOLE
from autopar.lower.tiles import plan_tiles
from tests.machine_profiles import machine_profile


def test_a_transfer_to_a_replicated_target() -> None:
    mesh = LogicalMesh((4,), alpha=(2.0,), beta=(0.1,))
    plan = plan_tiles((8, 5), 4, (0,), (4,), (WHOLE,), (4,))
    # 160 bytes, 40 per sender; then all of them gather 160.
    assert transfer_s(plan, 3.0, 1.0, mesh) == pytest.approx(3 + 40 + 2 + 0.1 * 3 / 4 * 160)
    uneven = plan_tiles((7,), 4, (WHOLE,), (4,), (WHOLE,), (4,))
    assert transfer_s(uneven, 3.0, 1.0, mesh) == pytest.approx(3 + 28 + 2 + 0.1 * 28)


def test_boundaries_use_all_links_between_two_submeshes() -> None:
    cluster = ClusterSpec(4, 8, intra_host_bandwidth=100.0, host_bandwidth=400.0)
    alpha, far = cluster.spec.intra_host_alpha_s, cluster.spec.inter_host_alpha_s
    assert boundary_s(800, 2, 4, True, cluster) == pytest.approx(alpha + 800 / 200)
    assert boundary_s(800, 8, 8, False, cluster) == pytest.approx(far + 800 / 400)
    assert boundary_s(800, 16, 8, False, cluster) == pytest.approx(far + 800 / 400)
    assert boundary_s(800, 16, 16, False, cluster) == pytest.approx(far + 800 / 800)
    # Two devices have two links, however wide the host's network is.
    assert boundary_s(800, 2, 8, False, cluster) == pytest.approx(far + 800 / 200)
    assert boundary_s(0, 2, 8, False, cluster) == 0


def test_links_that_were_measured_are_priced_by_samples() -> None:
    cluster = ClusterSpec(1, 8, profile=machine_profile())
    for num_bytes in (4**8, 4**11):
        took = boundary_s(4 * num_bytes, 4, 4, True, cluster)
        assert took == pytest.approx(1e-5 + num_bytes / 100e9), "each of four devices sends a part"
    plain = ClusterSpec(1, 8, "h200-sxm")
    between_hosts = boundary_s(1e6, 4, 4, False, cluster)
    assert between_hosts == boundary_s(1e6, 4, 4, False, plain), "no samples of these"

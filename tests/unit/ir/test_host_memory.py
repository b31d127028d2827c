"""What a plan says of host memory is checked when it is read."""

from __future__ import annotations

from math import inf, nan

import pytest

from autopar.errors import ArgumentError
from autopar.ir.devices import device_spec
from autopar.ir.host_memory import HostCut, HostGroup, HostMemory
from autopar.ir.mesh import ClusterSpec


def test_a_cut_knows_its_inputs_in_order() -> None:
    cut = HostCut((HostGroup((3, 5), (7, 9)), HostGroup((4,), (9, 12))), 30.0, 20.0)
    assert cut.inputs == (3, 5, 4) and cut.early == (0, 7)


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (HostMemory((0, 0), (0, 1), 1), "inputs"),
        (HostMemory((4,), (0,), 1), "inputs"),
        (HostMemory((0,), (-1,), 1), "outputs"),
        (HostMemory((), (0,), 2), "num_groups"),
        (HostMemory((0,), (0,), -1), "num_groups"),
        (HostMemory((0,), (0,), 1, inf), "num_bytes"),
        (HostMemory((0,), (0,), 1, 1.0, nan), "transfer_s"),
    ],
)
def test_faults_are_named(host: HostMemory, named: str) -> None:
    fault = host.fault(4, 4)
    assert fault is not None and fault.startswith(named)


def test_sound_ones_have_none() -> None:
    assert HostMemory((0, 2), (1, 3), 2, 8.0, 0.5).fault(4, 4) is None
    assert HostMemory(outputs=(1,)).fault(0, 2) is None


def test_links_to_the_host_have_presets_and_can_be_given() -> None:
    assert device_spec("h100-sxm").bytes_per_s_to_host == 50e9
    assert device_spec("h200-sxm").bytes_per_s_to_host == 65e9
    assert ClusterSpec(1, 8, "h100-sxm", host_link_bandwidth=20e9).spec.bytes_per_s_to_host == 20e9
    with pytest.raises(ArgumentError, match="host_link_bandwidth=0"):
        ClusterSpec(1, 8, "h100-sxm", host_link_bandwidth=0)

"""Clusters of devices: their hosts, presets and memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

import autopar
from autopar import session
from autopar.ir.devices import DEVICES, known_preset
from autopar.ir.profile import SHIPPED_FOR, find_profile
from autopar.runtime.ranks.machines import ProcessPlace
from autopar.session import Session, cluster_of_devices
from tests.machine_profiles import machine_profile

H200_BYTES = 141e9


def device(kind: str, process: int = 0, platform: str = "gpu", limit: float | None = None) -> Any:
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": 1}
    return SimpleNamespace(
        device_kind=kind, process_index=process, platform=platform, memory_stats=lambda: stats
    )


def h200s(*processes: int, limit: float | None = None) -> list[Any]:
    return [device("NVIDIA H200", process, limit=limit) for process in processes]


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_devices_are_recognised(kind: str, preset: str) -> None:
    cluster = cluster_of_devices([device(kind, process) for process in (0, 0, 1, 1)])
    assert cluster == autopar.ClusterSpec(2, 2, preset)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ((0, 0, 1), "2 of process 0, 1 of process 1"),
        ((0, 1, 0, 1), r"not ordered by process: \[0, 1, 0, 1\]"),
    ],
)
def test_processes_need_equally_many_devices_ordered_by_process(processes, message) -> None:
    with pytest.raises(autopar.MeshError, match=message):
        cluster_of_devices(h200s(*processes))


def test_cpu_devices_are_one_host() -> None:
    assert cluster_of_devices(jax.devices()) == autopar.ClusterSpec(1, 8, "cpu")


# -- processes and machines


def cluster_on(monkeypatch, places: list[ProcessPlace], devices: list[Any]) -> autopar.ClusterSpec:
    monkeypatch.setattr(jax, "process_count", lambda: len(places))
    monkeypatch.setattr(session, "places_of_processes", lambda: tuple(places))
    return cluster_of_devices(devices)


@pytest.mark.parametrize(
    ("machines", "processes", "hosts"),
    [
        ("aaaa", (0, 1, 2, 3), (1, 4)),  # a process per GPU of one machine
        ("aabb", (0, 1, 2, 3), (2, 2)),
        ("aabb", (0, 0, 1, 1, 2, 2, 3, 3), (2, 4)),
        ("abcd", (0, 0, 1, 1, 2, 2, 3, 3), (4, 2)),  # a process per machine
        ("abab", (0, 1, 2, 3), (4, 1)),  # machines that take turns are no hosts
        ("aaab", (0, 0, 1, 1, 2, 2, 3, 3), (4, 2)),  # nor are unequal ones
        ("abba", (0, 1, 2, 3), (4, 1)),
        ("bbaa", (0, 1, 2, 3), (2, 2)),
    ],
)
def test_processes_of_one_machine_are_one_host(monkeypatch, machines, processes, hosts) -> None:
    places = [ProcessPlace(machine) for machine in machines]
    cluster = cluster_on(monkeypatch, places, h200s(*processes))
    assert cluster == autopar.ClusterSpec(*hosts, "h200-sxm")


def test_the_least_memory_of_all_processes_counts(monkeypatch) -> None:
    places = [
        ProcessPlace("a", 90e9),
        ProcessPlace("a", 80e9),
        ProcessPlace("b"),
        ProcessPlace("b"),
    ]
    cluster = cluster_on(monkeypatch, places, h200s(0, 1, 2, 3))
    assert cluster == autopar.ClusterSpec(2, 2, "h200-sxm", memory_bytes=80e9)


# -- memory


@pytest.mark.parametrize(
    ("limit", "ranks", "wanted"),
    [
        (None, "", H200_BYTES),
        (150e9, "", H200_BYTES),  # never more than the preset has
        (0, "", H200_BYTES),
        (112e9, "", 112e9),
        (15e9, "8", 15e9),
        (112e9, "8", H200_BYTES / 8),  # an allocator that knows nothing of the other ranks
        (None, "8", H200_BYTES / 8),
        (None, "1", H200_BYTES),
    ],
)
def test_devices_have_the_memory_that_jax_may_allocate(monkeypatch, limit, ranks, wanted) -> None:
    monkeypatch.setenv("AUTOPAR_RANKS_PER_GPU", ranks)
    cluster = cluster_of_devices(h200s(0, 0, limit=limit))
    assert cluster.spec.memory_bytes == wanted
    shares = int(ranks or 1)
    assert cluster.spec.flops_16bit == DEVICES["h200-sxm"].flops_16bit / shares
    assert (cluster.device == "h200-sxm") == (shares == 1)


def test_a_share_of_a_gpu_is_no_share_of_a_cpu(monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_RANKS_PER_GPU", "4")
    assert cluster_of_devices(jax.devices()) == autopar.ClusterSpec(1, 8, "cpu")


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_a_share_is_a_count(monkeypatch, given) -> None:
    monkeypatch.setenv("AUTOPAR_RANKS_PER_GPU", given)
    with pytest.raises(autopar.ArgumentError, match=f"AUTOPAR_RANKS_PER_GPU='{given}'"):
        cluster_of_devices(h200s(0))


@pytest.mark.parametrize(
    ("limit", "measured", "wanted"),
    [(112e9, 100e9, 100e9), (80e9, 100e9, 80e9), (None, 100e9, 100e9), (112e9, None, 112e9)],
)
def test_a_profile_does_not_give_more_memory_than_jax_has(limit, measured, wanted) -> None:
    h200 = device("NVIDIA H200", limit=limit)
    here = Session(0, (h200,), profile=machine_profile(memory_bytes=measured))
    assert here.cluster().spec.memory_bytes == wanted


@pytest.mark.parametrize("limit", [None, 112e9])
def test_gpus_with_a_table_in_the_package_are_priced_by_it(limit) -> None:
    """An example took 261 ms on an H200: 170 by its data sheet, 235 by the table."""
    cluster = Session(0, (device("NVIDIA H200", limit=limit),)).cluster()
    assert cluster.measured is find_profile("h200")
    assert cluster.spec.memory_bytes == (limit or H200_BYTES)
    own = machine_profile()
    given = Session(0, (device("NVIDIA H200", limit=limit),), profile=own)
    assert given.cluster().measured is own
    for kind, platform in (("NVIDIA H100 80GB HBM3", "gpu"), ("cpu", "cpu")):
        other = Session(0, (device(kind, platform=platform),)).cluster()
        assert other.profile is None


def test_a_share_of_a_gpu_has_no_such_table(monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_RANKS_PER_GPU", "8")
    assert Session(0, (device("NVIDIA H200", limit=15e9),)).cluster().profile is None


def test_tables_are_of_whole_devices_of_their_presets() -> None:
    for preset, table in SHIPPED_FOR.items():
        profile = find_profile(table)
        assert known_preset(profile.platform, profile.device_kind) == preset
        assert profile.gpu_share is None


def test_a_plan_stays_within_that_memory(monkeypatch) -> None:
    """The state fits only if it is split, and the error names the memory that there is."""
    monkeypatch.setattr(session, "memory_limit", lambda device: 2e6)

    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state)
        return state - grad, loss

    floats = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((8, 512), "float32")
    plan = autopar.parallelize(step).plan(*floats)
    assert plan.cluster is not None and plan.cluster.memory_bytes == 2e6
    assert plan.memory_budget_bytes == pytest.approx(1.8e6)
    assert plan.estimated_peak_bytes <= 1.8e6
    monkeypatch.setattr(session, "memory_limit", lambda device: 1e5)
    autopar.shutdown()  # forgets the plan
    with pytest.raises(autopar.MemoryBudgetError, match=r"the device.s 97\.7 KiB"):
        autopar.parallelize(step).plan(*floats)

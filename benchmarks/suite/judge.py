"""The time of a compiled step on a cluster: from XLA's optimized HLO to seconds, by one formula.

    step          = compute + communication
    compute       = flops of all products and convolutions on one device / (efficiency · peak)
    communication = Σ over collectives, once per loop iteration, of α + bytes / bandwidth

For a group of n devices, k of them on each of the hosts that it spans, and B bytes of the result on
one device:

    all-reduce          2(n − 1)/n · B  sent in a ring
    all-gather           (n − 1)/n · B  sent in a ring
    reduce-scatter       (n − 1) · B    sent in a ring
    all-to-all           (n − 1)/n · B  of which (n − k)/n · B leave the host
    collective-permute             B

A ring inside a host has the bandwidth of a device's link. A ring through several hosts has that of
the k network adapters of its devices together, at most that of the link. An all-to-all sends its
bytes for other hosts through the device's adapter, and the rest over the link at the same time; a
permutation is as fast as its slowest pair. Nothing else overlaps, and everything but products and
transfers is free, for all plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.runtime.hlo import CollectiveOp, read_collectives, read_dot_flops


@dataclass(frozen=True)
class Machine:
    """One device and its two links, within and between hosts; bytes per second each way."""

    name: str = "H100 80GB, 8 to a host"
    flops: float = 989e12
    efficiency: float = 0.7
    memory_bytes: float = 80e9
    usable_share: float = 0.9
    link_bandwidth: float = 450e9
    adapter_bandwidth: float = 50e9
    link_alpha_s: float = 5e-6
    adapter_alpha_s: float = 15e-6
    devices_per_host: int = 8

    @property
    def usable_bytes(self) -> float:
        return self.usable_share * self.memory_bytes


H100 = Machine()


@dataclass(frozen=True)
class Judged:
    """Figures of one program on one device. `sent_bytes` by placement: "8 in a host", "8 hosts ×
    8"."""

    flops: float
    compute_s: float
    communication_s: float
    sent_bytes: dict[str, float] = field(default_factory=dict)
    place_s: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


def added(parts: Sequence[Judged]) -> Judged:
    """The sum of programs that run one after another."""

    def sums(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        total: Counter[str] = Counter()
        for one in counts:
            total.update(one)
        return dict(total)

    return Judged(
        sum(part.flops for part in parts),
        sum(part.compute_s for part in parts),
        sum(part.communication_s for part in parts),
        sums([part.sent_bytes for part in parts]),
        sums([part.place_s for part in parts]),
        sums([part.collectives for part in parts]),
    )


def repeated(part: Judged, num_runs: int) -> Judged:
    return added([part] * num_runs)


def judge(hlo_text: str, machine: Machine = H100, hosts: Sequence[int] | None = None) -> Judged:
    """`hosts`: the host of every device, in the program's order; by default devices fill one host
    after another."""
    flops = read_dot_flops(hlo_text)
    sent: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for op in read_collectives(hlo_text):
        if op.group_size <= 1:
            continue
        place, op_s = _place_and_seconds(op, machine, hosts)
        sent[place] += op.sent_bytes
        seconds[place] += op.trips * op_s
        kinds[op.kind] += op.trips
    return Judged(
        flops,
        flops / (machine.efficiency * machine.flops),
        sum(seconds.values()),
        dict(sent),
        dict(seconds),
        dict(kinds),
    )


def _place_and_seconds(
    op: CollectiveOp, machine: Machine, hosts: Sequence[int] | None
) -> tuple[str, float]:
    """The placement and time of one run. Groups work side by side, so the slowest one counts."""
    placed = [_hosts_of(group, machine, hosts) for group in op.groups]
    if op.kind == "collective-permute":
        crosses = any(len(set(pair)) > 1 for pair in placed)
        bandwidth = machine.adapter_bandwidth if crosses else machine.link_bandwidth
        place = "pairs across hosts" if crosses else "pairs in a host"
        return place, _alpha_s(crosses, machine) + op.num_bytes / bandwidth
    times = {}
    for group in placed:
        counts = Counter(group)
        num_hosts, on_host = len(counts), min(counts.values())
        times[num_hosts, on_host] = _group_s(op, num_hosts, on_host, len(group), machine)
    (num_hosts, on_host), slowest_s = max(times.items(), key=lambda item: item[1])
    place = f"{on_host} in a host" if num_hosts == 1 else f"{num_hosts} hosts × {on_host}"
    return place, slowest_s


def _group_s(
    op: CollectiveOp, num_hosts: int, on_host: int, num_devices: int, machine: Machine
) -> float:
    crosses = num_hosts > 1
    alpha_s = _alpha_s(crosses, machine)
    sent = op.sent_bytes / op.trips
    if not crosses:
        return alpha_s + sent / machine.link_bandwidth
    if op.kind == "all-to-all":
        away = (num_devices - on_host) / num_devices * op.num_bytes
        near = sent - away
        return alpha_s + max(away / machine.adapter_bandwidth, near / machine.link_bandwidth)
    ring = min(on_host * machine.adapter_bandwidth, machine.link_bandwidth)
    return alpha_s + sent / ring


def _alpha_s(crosses: bool, machine: Machine) -> float:
    return machine.adapter_alpha_s if crosses else machine.link_alpha_s


def _hosts_of(
    group: Sequence[int], machine: Machine, hosts: Sequence[int] | None
) -> tuple[int, ...]:
    if hosts is None:
        return tuple(device // machine.devices_per_host for device in group)
    return tuple(hosts[device] for device in group)

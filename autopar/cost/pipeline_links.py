"""Costs of transfers between meshes: from a `TilePlan` and a cluster to seconds.

`transfer_s` prices a plan on one kind of link; `transfer_time` on the links of a cluster, where
bytes that leave a host share its network, or by samples of such links for the bytes of the busiest
device. `boundary_s` is the closed form for the stage search, which has no layouts yet: all bytes
cross once, over all links between the two submeshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from autopar.cost.collectives import all_gather_s, shift_s
from autopar.cost.measured import measured_costs
from autopar.cost.simulator import TransferTime
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.spec import WHOLE, num_shards
from autopar.ir.tiles import TilePlan, num_elements


def transfer_s(plan: TilePlan, alpha: float, beta: float, target_mesh: LogicalMesh) -> float:
    """α + β · (bytes of the busiest sender or receiver) on the link between the meshes, plus the
    gather on the target mesh."""
    if prod(plan.shape) == 0:
        return 0.0
    seconds = alpha + beta * max(plan.max_sender_bytes, plan.max_receiver_bytes)
    return seconds + _gather_s(plan, target_mesh)


def transfer_time(
    plan: TilePlan,
    source_hosts: Sequence[int],
    target_hosts: Sequence[int],
    cluster: ClusterSpec,
    target_mesh: LogicalMesh,
) -> TransferTime:
    """The bytes that cross and the seconds: those of the busiest device's link or host's network,
    plus the gather on the target mesh. `source_hosts`, `target_hosts`: of each device of a mesh."""
    if prod(plan.shape) == 0:
        return TransferTime(0.0, 0.0)
    device = cluster.spec
    on_device: dict[tuple[bool, int], int] = {}
    on_network: dict[tuple[bool, int], int] = {}
    for tile in plan.tiles:
        size = plan.itemsize * num_elements(tile.box)
        hosts = source_hosts[tile.source], target_hosts[tile.target]
        for is_target, place in ((False, tile.source), (True, tile.target)):
            on_device[is_target, place] = on_device.get((is_target, place), 0) + size
            if hosts[0] != hosts[1]:
                end = is_target, hosts[is_target]
                on_network[end] = on_network.get(end, 0) + size
    latency_s = device.inter_host_alpha_s if on_network else device.intra_host_alpha_s
    rest_s = max(on_device.values(), default=0) / device.intra_host_bandwidth
    rest_s = max(rest_s, max(on_network.values(), default=0) / device.host_bandwidth)
    pairs = len([key for key in on_device if key[0]])
    known = _measured(cluster, not on_network, pairs, max(on_device.values(), default=0))
    if known is not None:
        latency_s, rest_s = known
    rest_s += _gather_s(plan, target_mesh)
    return TransferTime(float(plan.link_bytes), latency_s + rest_s, latency_s)


def _measured(
    cluster: ClusterSpec, same_host: bool, num_pairs: int, num_bytes: float
) -> tuple[float, float] | None:
    """(latency, seconds beyond it), by samples of such links."""
    if cluster.measured is None or not cluster.measured.crossings:
        return None
    costs = measured_costs(cluster.measured)
    latency_s = costs.transfer_s(same_host, num_pairs, 0.0)
    whole_s = costs.transfer_s(same_host, num_pairs, num_bytes)
    return None if latency_s is None or whole_s is None else (latency_s, whole_s - latency_s)


def _gather_s(plan: TilePlan, target_mesh: LogicalMesh) -> float:
    """The time that the devices of the target mesh take to send each other their tiles."""
    seconds = 0.0
    shard_bytes = plan.lower_bound_bytes / num_shards(plan.target_layout, plan.target_mesh)
    cut = tuple(axis for axis, dim in enumerate(plan.landing) if dim != WHOLE)
    copied = tuple(
        axis
        for axis, (dim, goal) in enumerate(zip(plan.landing, plan.target_layout, strict=True))
        if dim == goal == WHOLE and plan.target_mesh[axis] > 1
    )
    if copied:
        parts = prod(plan.target_mesh[axis] for axis in cut)
        seconds += shift_s(target_mesh, copied, shard_bytes / parts)
    if cut:
        seconds += all_gather_s(target_mesh, cut, shard_bytes)
    return seconds


def boundary_s(
    num_bytes: float,
    num_source_devices: int,
    num_target_devices: int,
    same_host: bool,
    cluster: ClusterSpec,
) -> float:
    """Bytes over the joint bandwidth of the links between two submeshes, plus one α. Within a host
    every device has its own link; between hosts the devices of a host share its network."""
    if num_bytes == 0:
        return 0.0
    device = cluster.spec
    num_links = min(num_source_devices, num_target_devices)
    known = _measured(cluster, same_host, num_links, num_bytes / num_links)
    if known is not None:
        return sum(known)
    bandwidth = num_links * device.intra_host_bandwidth
    if same_host:
        return device.intra_host_alpha_s + num_bytes / bandwidth
    num_hosts = ceil(num_links / cluster.devices_per_host)
    bandwidth = min(bandwidth, num_hosts * device.host_bandwidth)
    return device.inter_host_alpha_s + num_bytes / bandwidth

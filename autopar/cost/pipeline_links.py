"""What it costs to take an array from one mesh to another.

`transfer_s` prices a plan; `boundary_s` is the closed form that the stage search uses before there
are any layouts: all bytes cross once, over all the links that the two submeshes have between them.
"""

from __future__ import annotations

from math import ceil, prod

from autopar.cost.collectives import all_gather_s
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.spec import WHOLE, num_shards
from autopar.ir.tiles import TilePlan


def transfer_s(plan: TilePlan, alpha: float, beta: float, target_mesh: LogicalMesh) -> float:
    """α + β · (bytes of the busiest sender or receiver) on the link between the meshes, and what
    the devices of the target mesh then send each other."""
    if prod(plan.shape) == 0:
        return 0.0
    seconds = alpha + beta * max(plan.max_sender_bytes, plan.max_receiver_bytes)
    shard_bytes = plan.lower_bound_bytes / num_shards(plan.target_layout, plan.target_mesh)
    cut = tuple(axis for axis, dim in enumerate(plan.landing) if dim != WHOLE)
    copied = tuple(
        axis
        for axis, (dim, own) in enumerate(zip(plan.landing, plan.target_layout, strict=True))
        if dim == own == WHOLE and plan.target_mesh[axis] > 1
    )
    if copied:
        local_alpha, local_beta = target_mesh.link(copied)
        parts = prod(plan.target_mesh[axis] for axis in cut)
        seconds += local_alpha + local_beta * shard_bytes / parts
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
    """Bytes over the joint bandwidth of the links between two submeshes, and one α. Inside of a
    host every device has a link of its own; between hosts those of a host share its network."""
    if num_bytes == 0:
        return 0.0
    device = cluster.spec
    num_links = min(num_source_devices, num_target_devices)
    bandwidth = num_links * device.intra_host_bandwidth
    if same_host:
        return device.intra_host_alpha_s + num_bytes / bandwidth
    num_hosts = ceil(num_links / cluster.devices_per_host)
    bandwidth = min(bandwidth, num_hosts * device.host_bandwidth)
    return device.inter_host_alpha_s + num_bytes / bandwidth

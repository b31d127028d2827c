"""Measured time of an op on one device: from a node and its layouts to seconds.

Products, convolutions and attention kernels take the time of samples of their local sizes. All
other ops are bound by memory: each kernel that ends with the node takes the minimum time of its
kind, and the bytes that the node moves (see `Traffic`) take the time of so many bytes. So are the
copies that a ragged product makes of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from autopar.cost.compute import compute_s, exact_s, local_size, local_sizes
from autopar.cost.convolution_tiles import transposed_kernel_s
from autopar.cost.measured import MeasuredCosts, measured_costs, row_bytes
from autopar.ir.graph import Node, NodeKind, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, num_shards


def measured_op_s(
    node: Node,
    values: Sequence[Value],
    mesh: LogicalMesh,
    layouts: Sequence[Layout],
    parallelism: int,
) -> float:
    """Seconds of one run; `layouts`: of operands, then of results."""
    assert mesh.profile is not None and mesh.device is not None
    if node.kind is not NodeKind.OP:
        return 0.0
    costs = measured_costs(mesh.profile)
    dtype = values[(*node.operands, *node.results)[0]].dtype
    if node.work is not None:
        seconds = _work_s(node, values, mesh, layouts, costs, dtype)
        if seconds is not None:
            seconds = max(seconds, exact_s(mesh.device, node, parallelism))
            return seconds + _kernels_s(node, values, mesh, layouts, costs, parallelism)
        moved = _moved(node.touched_bytes, layouts, mesh)
        seconds = compute_s(mesh.device, node.flops / parallelism, moved, dtype)
        return max(seconds, exact_s(mesh.device, node, parallelism))
    return _kernels_s(node, values, mesh, layouts, costs, parallelism)


def _kernels_s(
    node: Node,
    values: Sequence[Value],
    mesh: LogicalMesh,
    layouts: Sequence[Layout],
    costs: MeasuredCosts,
    parallelism: int,
) -> float:
    traffic = node.traffic
    if traffic is None:
        return 0.0
    assert mesh.device is not None
    moved = _moved(traffic.num_bytes, layouts, mesh)
    moved += traffic.exposed / parallelism
    result = values[node.results[0]].dtype
    kernels = traffic.stream, result, traffic.num_kernels, moved
    seconds = costs.kernels_s(*kernels, in_loop=node.trips > 1)
    if seconds is None:
        return moved / mesh.device.memory_bandwidth + traffic.num_kernels * costs.launch_s
    return seconds


def _moved(num_bytes: Sequence[float], layouts: Sequence[Layout], mesh: LogicalMesh) -> float:
    return sum(
        size / num_shards(layout, mesh.shape)
        for size, layout in zip(num_bytes, layouts, strict=True)
        if size
    )


def _work_s(
    node: Node,
    values: Sequence[Value],
    mesh: LogicalMesh,
    layouts: Sequence[Layout],
    costs: MeasuredCosts,
    dtype: str,
) -> float | None:
    work = node.work
    assert work is not None
    local = local_sizes(node, work, values, mesh, layouts)
    if work.kind == "product":
        used = {array for dims in work.sizes for array, _ in dims} | {len(layouts) - 1}
        arrays = enumerate((*node.operands, *node.results))
        shapes = [values[array].shape if place in used else () for place, array in arrays]
        rows = [
            local_size(place, len(shape) - 1, node, values, mesh, layouts[place])
            for place, shape in enumerate(shapes)
            if shape
        ]
        rows = [row for row in rows if row > 1]  # the others are vectors
        return costs.product_s(dtype, *local, row_bytes(rows, dtype))
    if work.kind.startswith("attention"):
        heads, queries, keys, head_dim = local
        length = sqrt(queries * keys)
        backward = work.kind == "attention-gradient"
        return costs.attention_s(dtype, backward, work.is_causal, heads, length, head_dim)
    seconds = costs.convolution_s(dtype, work.kind, *map(float, local))
    if seconds is None or not work.apart or costs.profile.platform == "cpu":
        return seconds
    assert mesh.device is not None
    images, positions, into, out, window = local
    item = values[node.operands[0]].num_bytes // max(prod(values[node.operands[0]].shape), 1)
    peak = mesh.device.flops_16bit if item <= 2 else mesh.device.flops_32bit
    depth = images * positions / work.apart
    return max(seconds, transposed_kernel_s(depth, into, out, window, item, peak / 2))

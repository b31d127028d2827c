"""Cost of an op on one device: from flops and bytes to seconds, by the roofline model.

Time is the larger of flops over the device's effective peak and bytes over its memory bandwidth,
for the shard on the device, so replicated work has its price. A mesh without a device prices no
compute; then only a tie-break, far below any communication, prefers less work and fewer bytes per
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import numpy as np

from autopar.ir.devices import DeviceSpec
from autopar.ir.graph import Node, OpSize, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout

_WIDE = ("float32", "float64", "int32", "uint32", "int64", "uint64", "complex64")
# Relative to sending a byte: too small to outweigh a collective.
TIE_BREAK = 1e-7
# Relative to reading the bytes once, on a mesh that prices compute.
TIE_BREAK_SHARE = 1e-5
# Of the peak of vector lanes, for 32-bit products that are not rounded; by tiles on an H200, whose
# prologue and epilogue take little there.
EXACT_EFFICIENCY = 0.68


_Bytes = TypeVar("_Bytes", float, np.ndarray)


def rates(device: DeviceSpec, dtype: str) -> tuple[float, float]:
    """Flops and bytes that a device gets done in a second."""
    peak = device.flops_32bit if dtype in _WIDE else device.flops_16bit
    return peak * device.efficiency, device.memory_bandwidth


def compute_s(device: DeviceSpec, flops: float, num_bytes: float, dtype: str) -> float:
    """Seconds for one device's share of an op."""
    flops_per_s, bytes_per_s = rates(device, dtype)
    return max(flops / flops_per_s, num_bytes / bytes_per_s)


def exact_s(device: DeviceSpec, node: Node, parallelism: int = 1) -> float:
    """The least seconds of a product whose 32-bit numbers are not rounded; 0 for all else."""
    if node.work is None or not node.work.is_exact:
        return 0.0
    efficiency = min(device.efficiency, EXACT_EFFICIENCY)
    return node.flops / parallelism / (device.flops_32bit_exact * efficiency)


def local_size(
    array: int, dim: int, node: Node, values: Sequence[Value], mesh: LogicalMesh, layout: Layout
) -> int:
    """A dimension of one device's shard of the node's `array`: an operand, or a result after all
    operands, in this layout."""
    size = values[(*node.operands, *node.results)[array]].shape[dim]
    for entry, ways in zip(layout, mesh.shape, strict=True):
        if entry == dim:
            size //= ways
    return size


def local_sizes(
    node: Node,
    work: OpSize,
    values: Sequence[Value],
    mesh: LogicalMesh,
    layouts: Sequence[Layout],
) -> list[int]:
    """The sizes of a product, convolution or attention kernel on one device; `layouts`: of
    operands, then of results."""
    return [
        max(prod(local_size(a, d, node, values, mesh, layouts[a]) for a, d in dims), 1)
        for dims in work.sizes
    ]


def tie_break_s(mesh: LogicalMesh, num_bytes: _Bytes) -> _Bytes:
    if mesh.device is not None:
        return TIE_BREAK_SHARE * num_bytes / mesh.device.memory_bandwidth
    return TIE_BREAK * max(*mesh.beta, 1e-30, 0.0) * num_bytes

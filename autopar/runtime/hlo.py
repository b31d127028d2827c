"""Collectives and matrix products of a compiled program, read from XLA's optimized HLO.

Bytes are those of the result on one device: for an all-gather the gathered tensor, for a
reduce-scatter one shard of it. `collective_seconds` prices all collectives by the ring formulas of
`autopar.cost.collectives`, so that programs compiled by different means can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.runtime.hlo_text import HloModule, Instruction

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CUBLAS = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')
_LHS_CONTRACTING = re.compile(
    r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]'
)
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


@dataclass(frozen=True)
class CollectiveOp:
    """One collective instruction: how often it runs in a step, over how many ranks, and the
    shapes it moves. `groups`: of devices by number; of a permutation, (source, target) pairs.
    `dtype`: of the first array, as HLO writes it."""

    kind: str
    num_bytes: int
    group_size: int
    shapes: tuple[tuple[int, ...], ...]
    trips: int = 1
    op_name: str = ""
    in_loop: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""

    @property
    def is_scalar(self) -> bool:
        return all(shape == () for shape in self.shapes)

    @property
    def sent_bytes(self) -> float:
        """Bytes each device sends in a ring, all trips."""
        n = max(self.group_size, 1)
        ring = (n - 1) / n
        if self.kind == "all-reduce":
            return self.trips * 2 * ring * self.num_bytes
        if self.kind == "reduce-scatter":
            return self.trips * ring * self.num_bytes * n
        if self.kind == "collective-permute":
            return float(self.trips * self.num_bytes) if n > 1 else 0.0
        return self.trips * ring * self.num_bytes


def read_collectives(hlo_text: str) -> tuple[CollectiveOp, ...]:
    """Every collective of an HLO module, asynchronous pairs once. Those in loops carry the trip
    count."""
    module = HloModule(hlo_text)
    return tuple(
        read_collective(one, module)
        for one in module.instructions
        if one.is_first and one.kind in _KINDS
    )


def read_collective(one: Instruction, module: HloModule) -> CollectiveOp:
    """A collective, or the start of one."""
    arrays, groups = one.results, one.groups(module.num_devices)
    if one.kind == "collective-permute":
        group_size = 2 if any(source != target for source, target in groups) else 1
    else:
        group_size = len(groups[0])
    return CollectiveOp(
        one.kind,
        sum(array.num_bytes for array in arrays),
        group_size,
        tuple(array.shape for array in arrays),
        module.runs[one.computation],
        one.op_name,
        one.computation in module.looped,
        groups,
        arrays[0].dtype if arrays else "",
    )


def read_dot_flops(hlo_text: str) -> float:
    """Flops of an HLO module on one device: matrix products, including cuBLAS calls, and cuDNN
    convolutions. Loops count by their trips."""
    module = HloModule(hlo_text)
    by_name = {(one.computation, one.name): one for one in module.instructions}
    total = 0.0
    for one in module.instructions:
        is_call = one.opcode == "custom-call"
        if one.opcode == "dot" or (is_call and _CUBLAS.search(one.attributes)):
            flops = product_flops
        elif is_call and _CUDNN.search(one.attributes):
            flops = convolution_flops
        else:
            continue
        operands = [by_name[one.computation, n].results[0].shape for n in one.operands[:2]]
        total += flops(one, operands) * module.runs[one.computation]
    return total


def product_flops(one: Instruction, operands: Sequence[tuple[int, ...]]) -> float:
    """Two per multiply-add: for every element of the result, as many as the contracted size."""
    match = _LHS_CONTRACTING.search(one.attributes)
    contracting = re.findall(r"\d+", match[1] or match[2] or "") if match else []
    return 2.0 * prod(one.results[0].shape) * prod(operands[0][int(d)] for d in contracting)


def convolution_flops(one: Instruction, operands: Sequence[tuple[int, ...]]) -> float:
    """Two per multiply-add: for every output of the forward convolution, a window of the filter
    over all input features. Gradients take equally many, with their operands in other places."""
    kind, window, labels = (
        match[1] if (match := form.search(one.attributes)) else ""
        for form in (_CUDNN, _WINDOW, _KERNEL_LABELS)
    )
    result = one.results[0].shape
    if kind == "BackwardFilter":
        outputs, kernel = operands[1], result
    elif kind == "BackwardInput":
        outputs, kernel = operands
    else:
        outputs, kernel = result, operands[1]
    # A convolution over no spatial dimension has no window.
    size = prod(int(n) for n in window.split("x") if n)
    return 2.0 * prod(outputs) * size * kernel[labels.index("i")]


def collective_seconds(
    ops: tuple[CollectiveOp, ...], bandwidth: float, alpha_s: float = 0.0
) -> float:
    """Time of all collectives by the ring formulas, on links of one bandwidth."""
    return sum(op.trips * alpha_s + op.sent_bytes / bandwidth for op in ops)

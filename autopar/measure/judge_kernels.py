"""What one kernel of a compiled program does, and how long a GPU takes for it.

A kernel has three kinds of work that run side by side, so that the slowest nearly decides
(`seconds`): matrix products on tensor cores, arithmetic on vector lanes, and traffic.

    products     in tiles (`judge_tiles`); rows that are no multiple of 16 bytes cannot be copied
                 in blocks, and only a library splits a contraction. A convolution is the product
                 that it stands for; one with few channels in each of its groups runs on lanes.
                 What cuDNN keeps in scratch memory are its arrays in another layout, copied
                 before; or their transforms, if it is many times as large as they are.
    arithmetic   by instruction. A fusion computes a value again for every place that reads it at
                 another index. A value that only some threads need is loaded in a branch, and the
                 others wait.
    traffic      what is touched (`judge_traffic`).

In tiles that hold rows between two sums, traffic and arithmetic take turns.

The shares of the peak are those of an H200 in the table that comes with autopar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd, prod

from autopar.ir.devices import DeviceSpec
from autopar.measure.judge_lanes import lane_ops, plain_lane_ops, tiled_lane_ops
from autopar.measure.judge_tiles import PRODUCTS, SPLITS, convolution_s, tiled_s, wide_window_s
from autopar.measure.judge_traffic import (
    CACHE_SPEED,
    Named,
    Work,
    fusion_traffic,
    item_bytes,
    minor_dimension,
    operands_of,
    plain_traffic,
    size_of,
)
from autopar.runtime.hlo import convolution_flops, product_flops
from autopar.runtime.hlo_text import HloModule, Instruction

MEMORY = 0.9  # of the bandwidth
LAUNCH_S = 1.8e-6
GRAPH_LAUNCH_S = 1.1e-6  # of a kernel in a CUDA graph; by profiles of single loops
PRODUCT_S = 1e-6  # more for products, which fill their pipeline first
ROWS_S = 1e-6  # more for sums across rows, whose parts are added last
# Prologue and epilogue of a tile, as elements of the contraction; at most another contraction.
EXTRA_DEPTH = {2: 96, 4: 192}
LEAST_EXTRA = 32
# Of a product's rate, by the alignment of rows; less if the contraction is along such rows.
UNALIGNED = {8: 0.8, 4: 0.8, 2: 0.5, 1: 0.5}
UNALIGNED_32BIT = 1.0
LIBRARY_32BIT, TRITON_32BIT = 0.9, 0.55  # of the rate of a 16-bit product, as a share of the peak
UNALIGNED_DEPTH = {8: 0.43, 4: 0.43, 2: 0.3, 1: 0.3}
SINGLE_LOADS = 2.0  # traffic of a tile with rows aligned to 2 bytes, as if it were so much more
HELD_LOAD = 26.0  # instructions for each number of such rows that a tile holds between two sums
CHANNELS = 8  # fewer of them, in each of several groups, leave a convolution to vector lanes
GROUPED = {2: 0.25, 4: 0.16}  # by bytes, of the vector rate, for convolutions in groups
ALONG_ONE = 650.0  # instructions more for every element of those along one dimension
FILTER_SCRATCH = 2.5  # times the traffic of other scratch memory, for gradients of their kernels
IN_LANES = 40.0  # instructions of a multiply-add; where channels are very few, that is faster
VECTOR = 1 / 30  # lanes' instructions per second, as a share of 16-bit product flops
VECTOR_SHARE = 0.6  # of that in practice
SCRATCH = 4.0  # traffic per byte of a convolution's scratch memory: written and read, transposed
SCRATCH_KERNELS = 3  # more of them, which do that
LEAST_SCRATCH = 2.0**17  # bytes below which it holds no array
TRANSFORMED = 4.0  # times its arrays: scratch memory of a convolution that is made by transforms
SMOOTH = 4.0  # the larger, the more the slowest kind of work decides alone
SMOOTH_ROWS = 2.0  # of sums across rows

LEAST_ROWS = 1e5  # elements of a sum across rows that takes ROWS_S
_CUBLAS = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$)')
_CUDNN_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(?P<kind>[A-Za-z]*)')
_CUDNN_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(?P<back>Backward)?"')
_BACKWARD_ATTENTION = 2.5  # five products in place of two
_EXACT = re.compile(r'operand_precision"?[=:][\[{]"?highest', re.IGNORECASE)  # not rounded to TF32
_TRITON = re.compile(r'"kind":"__triton')
_BATCH = re.compile(r'lhs_batch_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]')
_ALONG = re.compile(r"dimensions=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(?P<kernel>\w+)->(?P<result>\w+)")
_GROUPS = re.compile(r"feature_group_count=(\d+)")
_WINDOW_SIZE = re.compile(r"window=\{[^}]*\bsize=([\dx]+)")
_WINDOW_STRIDE = re.compile(r"window=\{[^}]*\bstride=([\dx]+)")


def seconds(
    work: Work, cached_bytes: float, device: DeviceSpec, launch_s: float = LAUNCH_S
) -> float:
    """Of one run; `cached_bytes` of its traffic stay in the cache."""
    bandwidth = MEMORY * device.memory_bandwidth
    traffic_s = (work.num_bytes - cached_bytes + cached_bytes / CACHE_SPEED) / bandwidth
    lanes_s = work.lane_ops / (VECTOR_SHARE * VECTOR * device.flops_16bit)
    parts = (work.products_s, traffic_s, lanes_s, work.waits_s)
    if work.in_turn:
        parts = (sum(parts),)
    largest = max(parts)
    begin_s = launch_s + (ROWS_S if work.sums_rows else 0.0)
    if work.scratch > LEAST_SCRATCH:
        begin_s += SCRATCH_KERNELS * launch_s + SCRATCH * work.scratch / bandwidth
    if not largest:
        return begin_s
    if work.products_s:
        begin_s += PRODUCT_S
    smooth = SMOOTH_ROWS if work.sums_rows else SMOOTH
    return begin_s + largest * sum((part / largest) ** smooth for part in parts) ** (1 / smooth)


def work_of(one: Instruction, module: HloModule, by_name: Named, device: DeviceSpec) -> Work:
    """An instruction that is a kernel: a fusion, a library's call, or one on its own."""
    if one.kind == "fusion":
        inner = module.computations[one.called[0]]
        work = fusion_traffic(one, module, inner)
        inside: Named = {other.name: other for other in inner}
        _add_products(work, inner, inside, device)
        is_tiled = _TRITON.search(one.attributes) is not None
        if is_tiled:
            _add_tiled(work, one, inner, inside, by_name)
            return work
        is_reduction = "kind=kInput" in one.attributes
        work.sums_rows = is_reduction and any(_sums_rows(other, inside) for other in inner)
        is_loop = "kind=kLoop" in one.attributes
        work.lane_ops += lane_ops(work, inner, inside, by_name, is_loop)
        return work
    work = plain_traffic(one, module, by_name)
    _add_products(work, [one], by_name, device)
    work.lane_ops += plain_lane_ops(one)
    return work


def _slow_single_loads(work: Work, fusion: Instruction, by_name: Named) -> None:
    for name in work.reads:
        if _alignment(by_name[name]) <= 2:
            work.reads[name] *= SINGLE_LOADS
    if _alignment(fusion) <= 2:
        work.written *= SINGLE_LOADS


def _add_tiled(
    work: Work, fusion: Instruction, inner: Sequence[Instruction], inside: Named, by_name: Named
) -> None:
    """A Triton kernel. One with two sums, as a softmax's gradient has, holds its rows in registers
    between them: few tiles are under way at a time, so that loading, computing and storing take
    turns. Rows are padded to a power of two."""
    _slow_single_loads(work, fusion, by_name)
    work.lane_ops += tiled_lane_ops(inner, inside)
    sums = [one for one in inner if one.opcode == "reduce" and one.operands[0] in inside]
    if len(sums) > 1:
        work.in_turn = True
        summed = inside[sums[0].operands[0]]
        length = summed.results[0].shape[minor_dimension(summed)]
        padded = (1 << (length - 1).bit_length()) / max(length, 1)
        arrays = [*(by_name[name] for name in work.reads), fusion]
        whole = [one for one in arrays if size_of(one) >= size_of(summed)]
        single = sum(size_of(one) for one in whole if _alignment(one) <= 2)
        work.lane_ops += padded * HELD_LOAD * single


def _sums_rows(one: Instruction, inside: Named) -> bool:
    along = _ALONG.search(one.attributes)
    if one.opcode != "reduce" or along is None or one.operands[0] not in inside:
        return False
    source = inside[one.operands[0]]
    is_along_rows = str(minor_dimension(source)) in along[1].split(",")
    return size_of(source) >= LEAST_ROWS and not is_along_rows


# Products


def _add_products(
    work: Work, listed: Sequence[Instruction], by_name: Named, device: DeviceSpec
) -> None:
    for one in listed:
        is_call = one.opcode == "custom-call"
        if one.opcode == "dot" or (is_call and _CUBLAS.search(one.attributes)):
            operands = operands_of(one, by_name)[:2]
            flops = product_flops(one, [other.results[0].shape for other in operands])
            work.flops += flops
            work.products_s += _product_s(one, operands, flops, device)
        elif is_call and (found := _CUDNN_CONVOLUTION.search(one.attributes)):
            _add_convolution(work, one, found["kind"], operands_of(one, by_name)[:2], device)
        elif is_call and (found := _CUDNN_ATTENTION.search(one.attributes)):
            flops = _attention_flops(one, by_name, backward=bool(found["back"]))
            work.flops += flops
            work.products_s += flops / (PRODUCTS * _peak(operands_of(one, by_name)[0], device))


def _product_s(
    one: Instruction, operands: Sequence[Instruction], flops: float, device: DeviceSpec
) -> float:
    if not flops:
        return 0.0
    (left, right), result = (prod(o.results[0].shape) for o in operands), one.results[0]
    found = _BATCH.search(one.attributes)
    shape = operands[0].results[0].shape
    batch = prod(shape[int(n)] for n in re.findall(r"\d+", found[1])) if found else 1
    depth = flops / 2 / prod(result.shape)
    sides = (left / depth / batch, right / depth / batch)
    is_wide = item_bytes(operands[0]) >= 4
    splits = SPLITS if one.opcode == "custom-call" else (1,)
    rate = _product_rate(one, operands, depth, device)
    extra = min(EXTRA_DEPTH[4 if is_wide else 2], max(depth, LEAST_EXTRA))
    if _is_exact(one, operands):  # as long as a tensor core's, so fewer elements of lanes
        extra *= rate / _peak(operands[0], device)
    return tiled_s(batch, *sides, depth, rate, extra, splits=splits)


def _is_exact(one: Instruction, operands: Sequence[Instruction]) -> bool:
    """Whether 32-bit numbers are multiplied as they are, not rounded to TF32."""
    return item_bytes(operands[0]) >= 4 and _EXACT.search(one.attributes) is not None


def _product_rate(
    one: Instruction, operands: Sequence[Instruction], depth: float, device: DeviceSpec
) -> float:
    item, rate = item_bytes(operands[0]), _peak(operands[0], device)
    if _is_exact(one, operands):  # on lanes, which load numbers one by one
        return min(rate, 2 * VECTOR * device.flops_16bit)
    if item >= 4:
        rate *= LIBRARY_32BIT if one.opcode == "custom-call" else TRITON_32BIT
    alignment = min(_alignment(other) for other in (*operands, one))
    if depth * item % 16:
        return rate * UNALIGNED_DEPTH.get(alignment, 1.0)
    return rate * (UNALIGNED_32BIT if item >= 4 else UNALIGNED.get(alignment, 1.0))


def _add_convolution(
    work: Work, one: Instruction, kind: str, operands: Sequence[Instruction], device: DeviceSpec
) -> None:
    flops = convolution_flops(one, [other.results[0].shape for other in operands])
    labels = _LABELS.search(one.attributes)
    if not flops or labels is None:
        return
    work.flops += flops
    work.scratch = one.results[-1].num_bytes if len(one.results) > 1 else 0.0
    found = _GROUPS.search(one.attributes)
    groups = int(found[1]) if found else 1
    is_filter, is_input = kind.startswith("BackwardFilter"), kind.startswith("BackwardInput")
    if work.scratch > TRANSFORMED * work.num_bytes:
        work.scratch *= FILTER_SCRATCH if is_filter and groups > 1 else 1.0
        return
    outputs = operands[1] if is_filter else operands[0] if is_input else one
    kernel = (one if is_filter else operands[1]).results[0].shape
    inputs = kernel[labels["kernel"].index("i")]
    features = kernel[labels["kernel"].index("o")] / groups
    positions = prod(outputs.results[0].shape) / (features * groups)
    window, strides = (_window_sizes(form, one) for form in (_WINDOW_SIZE, _WINDOW_STRIDE))
    item, rate = item_bytes(operands[0]), _peak(operands[0], device)
    if groups > 1 and min(inputs, features) < CHANNELS:
        work.lane_ops += flops / 2 / GROUPED[2 if item <= 2 or is_filter else 4]
        if len(window) == 1:
            work.lane_ops += ALONG_ONE * positions * features * groups
        return
    if _is_exact(one, operands):
        rate = min(rate, 2 * VECTOR * device.flops_16bit)
    per_image = positions / outputs.results[0].shape[labels["result"].index("b")]
    is_wide = len(window) > 2 or per_image > 1  # at one place, it is a plain product
    if not (is_filter or is_input) and prod(window) > per_image and is_wide:
        work.products_s += wide_window_s(positions, inputs, features, window, item, rate)
        return
    in_tiles_s = convolution_s(
        "BackwardFilter" if is_filter else "BackwardInput" if is_input else "Forward",
        groups,
        positions,
        inputs,
        features,
        window,
        strides or [1] * len(window),
        item,
        rate,
    )
    on_lanes = IN_LANES * positions * prod(window) * inputs * features * groups
    if on_lanes < in_tiles_s * VECTOR_SHARE * VECTOR * device.flops_16bit:
        work.lane_ops += on_lanes
    else:
        work.products_s += in_tiles_s


def _window_sizes(form: re.Pattern[str], one: Instruction) -> list[int]:
    found = form.search(one.attributes)
    return [int(size) for size in found[1].split("x")] if found else []


def _attention_flops(one: Instruction, by_name: Named, *, backward: bool) -> float:
    queries, keys = (other.results[0].shape for other in operands_of(one, by_name)[:2])
    if len(queries) != 4 or len(keys) != 4:  # by its bytes alone
        return 0.0
    batch, length, heads, width = queries
    factor = _BACKWARD_ATTENTION if backward else 1.0
    return 4.0 * batch * heads * length * keys[1] * width * factor


def _peak(operand: Instruction, device: DeviceSpec) -> float:
    dtype = operand.results[0].dtype
    if dtype.startswith(("f8", "s8", "u8")):
        return 2 * device.flops_16bit
    return device.flops_16bit if dtype in ("bf16", "f16") else device.flops_32bit


def _alignment(one: Instruction) -> int:
    """Of its rows, along the dimension that is contiguous: the largest power of two in their bytes,
    at most 16."""
    if not one.results or not one.results[0].shape:
        return 16
    return gcd(one.results[0].shape[minor_dimension(one)] * item_bytes(one), 16)

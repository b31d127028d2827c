"""What one kernel of a compiled program does, and how long a GPU takes for it.

A kernel has three kinds of work that run side by side, so that the slowest nearly decides
(`seconds`): matrix products on tensor cores, arithmetic on vector lanes, and traffic.

    products     in tiles (`judge_tiles`); rows that are no multiple of 16 bytes cannot be copied
                 in blocks. A convolution is the product that it stands for; one with few channels
                 in each of its groups, or of 32 bits with holes in its filter, runs on lanes.
                 What cuDNN keeps in scratch memory are its arrays in another layout, copied
                 before; or their transforms, if it is many times as large as they are.
    arithmetic   by instruction. A fusion computes a value again for every place that reads it at
                 another index. A value that only some threads need is loaded in a branch, and the
                 others wait.
    traffic      what is touched: of an operand that is only sliced, the slice (with a stride, all
                 that lies between; of gathered rows, whole lines of memory); of a buffer that is
                 updated in place, the update. Atomic updates are slower, most of all of 16 bits.

The shares of the peak are those of an H200 in the table that comes with autopar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd, prod

from autopar.ir.devices import DeviceSpec
from autopar.measure.judge_tiles import PRODUCTS, convolution_s, tiled_s
from autopar.runtime.hlo import convolution_flops, product_flops
from autopar.runtime.hlo_text import ArrayType, HloModule, Instruction

Named = Mapping[str, Instruction]

MEMORY = 0.9  # of the bandwidth
LAUNCH_S = 1.8e-6
PRODUCT_S = 1e-6  # more for products, which fill their pipeline first
ROWS_S = 4e-6  # more for sums across rows, whose parts are added last
EXTRA_DEPTH = {2: 96, 4: 192}  # prologue and epilogue of a tile, as elements of the contraction
# Of a product's rate, by the alignment of rows; less if the contraction is along such rows.
UNALIGNED = {8: 0.6, 4: 0.6, 2: 0.25, 1: 0.25}
UNALIGNED_DEPTH = {8: 0.43, 4: 0.43, 2: 0.25, 1: 0.25}
SINGLE_LOADS = 2.0  # traffic of a tile with rows aligned to 2 bytes, as if it were so much more
CHANNELS = 8  # fewer of them, in each of several groups, leave a convolution to vector lanes
GROUPED = 0.25  # of the vector rate, for convolutions in groups
VECTOR = 1 / 30  # lanes' instructions per second, as a share of 16-bit product flops
VECTOR_SHARE = 0.6  # of that in practice
SCRATCH = 4.0  # traffic per byte of a convolution's scratch memory: written and read, transposed
SCRATCH_KERNELS = 3  # more of them, which do that
LEAST_SCRATCH = 2.0**17  # bytes below which it holds no array
TRANSFORMED = 4.0  # times its arrays: scratch memory of a convolution that is made by transforms
LINE_BYTES = 64  # that memory is read by
CACHE_BYTES = 40e6  # of an H100 or H200: 50 MB, not all of which hold what is wanted
CACHE_SPEED = 1.6  # of the memory's
SMOOTH = 4.0  # the larger, the more the slowest kind of work decides alone

# Instructions of a lane per element; what is not listed takes one.
_COSTS = {
    **dict.fromkeys(("parameter", "constant", "bitcast", "reshape", "broadcast", "iota"), 0.0),
    **dict.fromkeys(("tuple", "get-tuple-element", "copy", "bitcast-convert"), 0.0),
    "convert": 1.5,
    "divide": 8.0,
    "remainder": 12.0,
    **dict.fromkeys(("sqrt", "rsqrt", "exponential"), 6.0),
    **dict.fromkeys(("log", "exponential-minus-one", "logistic"), 16.0),
    **dict.fromkeys(("tanh", "erf", "log-plus-one"), 30.0),
    **dict.fromkeys(("sine", "cosine", "tan", "cbrt", "atan2"), 40.0),
    "power": 80.0,
    **dict.fromkeys(("slice", "transpose", "concatenate", "reverse", "dynamic-slice"), 3.0),
    **dict.fromkeys(("pad", "gather"), 6.0),
    **dict.fromkeys(("dot", "convolution", "custom-call"), 0.0),
}
LEAST_ROWS = 1e5  # elements of a sum across rows that takes ROWS_S
WARP = 32  # lanes that take branches together
LOAD = 1.0
LOAD_ELSEWHERE = 4.0  # at an index of its own
LOAD_IN_BRANCH = 6.0
_MOVES = frozenset(
    (
        *("slice", "dynamic-slice", "gather", "pad", "concatenate", "transpose", "reverse"),
        *("broadcast", "reduce", "reduce-window", "dynamic-update-slice", "scatter"),
    )
)
_BRANCHES = frozenset(("pad", "concatenate"))
_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds the update
_ATOMIC = 1.5  # traffic of a scatter, as if it were so much more
_ATOMIC_16BIT = 19.0  # in a loop of compare and swap; by samples of single scatters
_CUBLAS = re.compile(r'custom_call_target="__cublas\$')
_CUDNN_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(?P<kind>[A-Za-z]*)')
_CUDNN_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(?P<back>Backward)?"')
_BACKWARD_ATTENTION = 2.5  # five products in place of two
_TRITON = re.compile(r'"kind":"__triton')
_LAYOUT = re.compile(r"\]\{(\d+)")
_SLICE_SIZES = re.compile(r"slice_sizes=\{([\d,]*)\}")
_STRIDES = re.compile(r"\[\d+:\d+(?::(\d+))?\]")
_BATCH = re.compile(r'lhs_batch_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_PADDING = re.compile(r"padding=([\dx_\-]+)")
_DIMENSIONS = re.compile(r"dimensions=\{([\d,]*)\}")
_FFT_LENGTH = re.compile(r"fft_length=\{([\d,]+)\}")
_GROUPS = re.compile(r"feature_group_count=(\d+)")
_WINDOW_SIZE = re.compile(r"window=\{[^}]*\bsize=([\dx]+)")
_WINDOW_STRIDE = re.compile(r"window=\{[^}]*\bstride=([\dx]+)")


@dataclass
class Work:
    """products_s: of its tiles, at the device's rate. flops: of its products. lane_ops:
    instructions of vector lanes. sums_rows: whether it reduces along another dimension than that
    which is contiguous. reads: operand → bytes that are touched of it. written: bytes. scratch:
    bytes of arrays that a library copies to another layout first.
    """

    products_s: float = 0.0
    flops: float = 0.0
    lane_ops: float = 0.0
    sums_rows: bool = False
    reads: dict[str, float] = field(default_factory=dict)
    written: float = 0.0
    scratch: float = 0.0

    @property
    def num_bytes(self) -> float:
        return sum(self.reads.values()) + self.written


def seconds(work: Work, cached_bytes: float, device: DeviceSpec) -> float:
    """Of one run; `cached_bytes` of its traffic stay in the cache."""
    bandwidth = MEMORY * device.memory_bandwidth
    traffic_s = (work.num_bytes - cached_bytes + cached_bytes / CACHE_SPEED) / bandwidth
    lanes_s = work.lane_ops / (VECTOR_SHARE * VECTOR * device.flops_16bit)
    parts = (work.products_s, traffic_s, lanes_s)
    largest = max(parts)
    begin_s = LAUNCH_S + (ROWS_S if work.sums_rows else 0.0)
    if work.scratch > LEAST_SCRATCH:
        begin_s += SCRATCH_KERNELS * LAUNCH_S + SCRATCH * work.scratch / bandwidth
    if not largest:
        return begin_s
    if work.products_s:
        begin_s += PRODUCT_S
    return begin_s + largest * sum((part / largest) ** SMOOTH for part in parts) ** (1 / SMOOTH)


def work_of(one: Instruction, module: HloModule, by_name: Named, device: DeviceSpec) -> Work:
    """An instruction that is a kernel: a fusion, a library's call, or one on its own."""
    if one.kind == "fusion":
        inner = module.computations[one.called[0]]
        work = _fusion_traffic(one, inner)
        inside: Named = {other.name: other for other in inner}
        _add_products(work, inner, inside, device)
        is_tiled = _TRITON.search(one.attributes) is not None
        if is_tiled:
            _slow_single_loads(work, one, by_name)
        is_reduction = "kind=kInput" in one.attributes
        work.sums_rows = is_reduction and any(_sums_rows(other, inside) for other in inner)
        work.lane_ops += _tiled_lane_ops(inner, inside) if is_tiled else _lane_ops(inner, inside)
        return work
    work = _plain_traffic(one, by_name)
    _add_products(work, [one], by_name, device)
    work.lane_ops += _COSTS.get(one.opcode, 1.0) * _size(one)
    return work


def _slow_single_loads(work: Work, fusion: Instruction, by_name: Named) -> None:
    for name in work.reads:
        if _alignment(by_name[name]) <= 2:
            work.reads[name] *= SINGLE_LOADS
    if _alignment(fusion) <= 2:
        work.written *= SINGLE_LOADS


# Products


def _add_products(
    work: Work, listed: Sequence[Instruction], by_name: Named, device: DeviceSpec
) -> None:
    for one in listed:
        is_call = one.opcode == "custom-call"
        if one.opcode == "dot" or (is_call and _CUBLAS.search(one.attributes)):
            operands = _operands(one, by_name)[:2]
            flops = product_flops(one, [other.results[0].shape for other in operands])
            work.flops += flops
            work.products_s += _product_s(one, operands, flops, device)
        elif is_call and (found := _CUDNN_CONVOLUTION.search(one.attributes)):
            _add_convolution(work, one, found["kind"], _operands(one, by_name)[:2], device)
        elif is_call and (found := _CUDNN_ATTENTION.search(one.attributes)):
            flops = _attention_flops(one, by_name, backward=bool(found["back"]))
            work.flops += flops
            work.products_s += flops / (PRODUCTS * _peak(_operands(one, by_name)[0], device))


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
    rate = _peak(operands[0], device)
    item = _item(operands[0])
    alignment = min(_alignment(other) for other in (*operands, one))
    shares = UNALIGNED if depth * item % 16 == 0 else UNALIGNED_DEPTH
    extra = EXTRA_DEPTH[4 if item >= 4 else 2]
    return tiled_s(batch, *sides, depth, shares.get(alignment, 1.0) * rate, extra)


def _add_convolution(
    work: Work, one: Instruction, kind: str, operands: Sequence[Instruction], device: DeviceSpec
) -> None:
    flops = convolution_flops(one, [other.results[0].shape for other in operands])
    labels = _KERNEL_LABELS.search(one.attributes)
    if not flops or labels is None:
        return
    work.flops += flops
    work.scratch = one.results[-1].num_bytes if len(one.results) > 1 else 0.0
    if work.scratch > TRANSFORMED * work.num_bytes:
        return
    is_filter, is_input = kind.startswith("BackwardFilter"), kind.startswith("BackwardInput")
    outputs = operands[1] if is_filter else operands[0] if is_input else one
    kernel = (one if is_filter else operands[1]).results[0].shape
    found = _GROUPS.search(one.attributes)
    groups = int(found[1]) if found else 1
    inputs = kernel[labels[1].index("i")]
    features = kernel[labels[1].index("o")] / groups
    is_depthwise = groups > 1 and min(inputs, features) < CHANNELS
    item = _item(operands[0])
    if is_depthwise or (not is_filter and item >= 4 and "rhs_dilate=" in one.attributes):
        work.lane_ops += flops / 2 / (GROUPED if is_depthwise else 1.0)
        return
    positions = prod(outputs.results[0].shape) / (features * groups)
    window, strides = (_window_sizes(form, one) for form in (_WINDOW_SIZE, _WINDOW_STRIDE))
    work.products_s += convolution_s(
        "BackwardFilter" if is_filter else "BackwardInput" if is_input else "Forward",
        groups,
        positions,
        inputs,
        features,
        window,
        strides or [1] * len(window),
        item,
        _peak(operands[0], device),
    )


def _window_sizes(form: re.Pattern[str], one: Instruction) -> list[int]:
    found = form.search(one.attributes)
    return [int(size) for size in found[1].split("x")] if found else []


def _attention_flops(one: Instruction, by_name: Named, *, backward: bool) -> float:
    queries, keys = (other.results[0].shape for other in _operands(one, by_name)[:2])
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


def _item(one: Instruction) -> int:
    array = one.results[0]
    return array.num_bytes // max(prod(array.shape), 1)


def _alignment(one: Instruction) -> int:
    """Of its rows, along the dimension that is contiguous: the largest power of two in their bytes,
    at most 16."""
    if not one.results or not one.results[0].shape:
        return 16
    return gcd(one.results[0].shape[_minor(one)] * _item(one), 16)


def _minor(one: Instruction) -> int:
    """The dimension that is contiguous."""
    found = _LAYOUT.search(one.type_text)
    return int(found[1]) if found else len(one.results[0].shape) - 1


# Arithmetic


def _tiled_lane_ops(inner: Sequence[Instruction], inside: Named) -> float:
    """Triton computes every value of a tile once."""
    total = 0.0
    for one in inner:
        elements = _size(one) * _reads_per_value(one, inside)
        total += elements * (LOAD if one.opcode == "parameter" else _COSTS.get(one.opcode, 1.0))
    return total


def _lane_ops(inner: Sequence[Instruction], inside: Named) -> float:
    """Every value of a fusion is computed once for all who read it at the same index, and again for
    each who reads it at another."""
    here: dict[str, float] = {}
    elsewhere: dict[str, float] = {}
    in_branch: dict[str, bool] = {}
    total = 0.0
    for one in reversed(inner):
        if one.is_root:
            here[one.name] = float(_size(one))
        times = here.get(one.name, 0.0) + elsewhere.get(one.name, 0.0)
        branched = in_branch.get(one.name, False)
        if one.opcode == "tuple":
            here.update({name: float(_size(inside[name])) for name in one.operands})
            continue
        if one.opcode == "parameter":
            moved = elsewhere.get(one.name, 0.0)
            load = LOAD_IN_BRANCH if branched else LOAD_ELSEWHERE
            total += LOAD * here.get(one.name, 0.0) + load * moved
            continue
        reads = _reads_per_value(one, inside)
        total += times * max(reads, 1.0) * _COSTS.get(one.opcode, 1.0)
        for place, name in enumerate(one.operands):
            if name not in inside:
                continue
            value = times * reads
            if one.opcode in _UPDATES:
                if place != _UPDATES[one.opcode]:
                    continue
                value = float(_size(inside[name]))
            elif one.opcode in _BRANCHES:
                if _diverges(one, inside):
                    in_branch[name] = True
                else:
                    value *= min(1.0, _size(inside[name]) / max(_size(one), 1))
            if one.opcode in _MOVES and one.opcode != "reduce" and _size(inside[name]) > 1:
                elsewhere[name] = elsewhere.get(name, 0.0) + value
            else:
                here[name] = max(here.get(name, 0.0), value)
            if branched:
                in_branch[name] = True
    return total


def _diverges(one: Instruction, inside: Named) -> bool:
    """Whether neighbours along a row take different branches."""
    if one.is_root:  # a loop for each part
        return False
    minor = _minor(one)
    if one.opcode == "pad":
        padding = _PADDING.search(one.attributes)
        parts = padding[1].split("x")[minor].split("_") if padding else []
        return len(parts) == 3 and parts[2] != "0"
    along = _DIMENSIONS.search(one.attributes)
    if along is None or along[1] != str(minor):
        return False
    return min(inside[name].results[0].shape[minor] for name in one.operands) < WARP


def _sums_rows(one: Instruction, inside: Named) -> bool:
    along = _DIMENSIONS.search(one.attributes)
    if one.opcode != "reduce" or along is None or one.operands[0] not in inside:
        return False
    source = inside[one.operands[0]]
    is_along_rows = str(_minor(source)) in along[1].split(",")
    return _size(source) >= LEAST_ROWS and not is_along_rows


def _reads_per_value(one: Instruction, inside: Named) -> float:
    """How many elements of an operand go into one of the result."""
    if one.opcode not in ("reduce", "dot") or one.operands[0] not in inside:
        return 1.0
    return max(1.0, _size(inside[one.operands[0]]) / max(_size(one), 1))


# Traffic


def _operands(one: Instruction, by_name: Named) -> list[Instruction]:
    return [by_name[name] for name in one.operands if name in by_name]


def _size(one: Instruction) -> int:
    """Elements of the first result; of a tuple, those of the largest."""
    return max((prod(array.shape) for array in one.results), default=0)


def _bytes(one: Instruction) -> float:
    return sum(array.num_bytes for array in one.results)


def _atomic(update: ArrayType) -> float:
    return _ATOMIC_16BIT if update.dtype in ("bf16", "f16") else _ATOMIC


def _plain_traffic(one: Instruction, by_name: Named) -> Work:
    """Of an instruction that is a kernel of its own."""
    reads = {other.name: _bytes(other) for other in _operands(one, by_name)}
    if one.opcode in _SLICES:
        reads[one.operands[0]] = _sliced_bytes(one, by_name[one.operands[0]])
        return Work(reads=reads, written=_bytes(one))
    if (place := _UPDATES.get(one.opcode)) is not None and len(one.operands) > place:
        update = by_name[one.operands[place]]
        reads[one.operands[0]], written = 0.0, _bytes(update)
        if one.opcode == "scatter":
            reads[one.operands[0]] = written
            written *= _atomic(update.results[0])
        return Work(reads=reads, written=written)
    if one.opcode == "fft":  # a pass for every dimension
        found = _FFT_LENGTH.search(one.attributes)
        passes = len(found[1].split(",")) if found else 1
        between = 2 * (passes - 1) * max(_bytes(one), *reads.values())
        return Work(reads=reads, written=_bytes(one) + between)
    written = _bytes(one)
    if one.opcode == "custom-call" and len(one.results) > 1:  # the last result is scratch memory
        written -= one.results[-1].num_bytes
    return Work(reads=reads, written=written)


def _fusion_traffic(fusion: Instruction, inner: Sequence[Instruction]) -> Work:
    inside = {one.name: one for one in inner}
    users: dict[str, list[Instruction]] = {}
    for one in inner:
        for name in one.operands:
            users.setdefault(name, []).append(one)
    root = next(one for one in inner if one.is_root)
    outputs = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
    work = Work(written=sum(_written_bytes(output, inside) for output in outputs))
    for one in inner:
        if one.opcode == "parameter":
            operand = fusion.operands[int(one.operands[0])]
            read = _read_bytes(one, users, inside)
            work.reads[operand] = work.reads.get(operand, 0.0) + read
    return work


def _sliced_bytes(one: Instruction, source: Instruction) -> float:
    """What a slice touches of its source: with a stride along rows, all between."""
    touched = _bytes(one)
    if one.opcode == "gather":
        return touched * _line_share(one, source)
    if one.opcode == "slice":
        strides = [int(stride or 1) for stride in _STRIDES.findall(one.attributes)]
        if strides:
            touched *= strides[_minor(source)]
    return min(touched, _bytes(source))


def _line_share(gather: Instruction, source: Instruction) -> float:
    """Bytes that memory reads for each that a gather takes: its slices lie anywhere, and each is
    in lines of its own. A small source stays in the cache."""
    found = _SLICE_SIZES.search(gather.attributes)
    sizes = [int(size) for size in found[1].split(",")] if found and found[1] else []
    run = _item(source)
    for size, whole in zip(reversed(sizes), reversed(source.results[0].shape), strict=False):
        run *= size
        if size < whole:
            break
    share = ceil(run / LINE_BYTES) * LINE_BYTES / max(run, 1)
    return share / CACHE_SPEED if _bytes(source) <= CACHE_BYTES else share


def _read_bytes(value: Instruction, users: Mapping[str, list[Instruction]], inside: Named) -> float:
    """What a fusion reads of a parameter: all, unless every use takes only parts of it."""
    total = gathered = 0.0
    for user in users.get(value.name, ()):
        if user.operands[0] != value.name:
            touched = _bytes(value)
        elif user.opcode == "gather":  # rows that are taken twice are read twice
            gathered += _sliced_bytes(user, value)
            continue
        elif user.opcode in _SLICES:
            touched = _sliced_bytes(user, value)
        elif user.opcode == "dynamic-update-slice":
            touched = 0.0
        elif user.opcode == "scatter":
            touched = _bytes(inside[user.operands[_UPDATES["scatter"]]])
        elif user.opcode in _VIEWS and user.name in users:
            touched = _read_bytes(user, users, inside)
        else:
            touched = _bytes(value)
        total += touched
    return min(total, _bytes(value)) + gathered


def _written_bytes(output: Instruction, inside: Named) -> float:
    while output.opcode in _VIEWS and output.operands and output.operands[0] in inside:
        source = inside[output.operands[0]]
        if source.opcode not in _VIEWS and source.opcode not in _UPDATES:
            break
        output = source
    place = _UPDATES.get(output.opcode)
    if place is None:
        return _bytes(output)
    update = inside[output.operands[place]]
    return _bytes(update) * (_atomic(update.results[0]) if output.opcode == "scatter" else 1.0)

"""The memory traffic of a kernel: from an instruction to bytes that are read and written.

What is touched counts: of an operand that is only sliced, the slice (with a stride, all that lies
between); of a buffer that is updated in place, the update. Rows that are gathered or scattered lie
anywhere, each in lines of memory of its own. Sums in memory are atomic, and slower; what the
hardware cannot combine by itself (numbers of 16 bits, and all but sums) is a loop of compare and
swap for every element, and updates of the same row wait for each other: with few rows, that takes
most of the time. Indices are taken to be spread evenly. A Fourier transform passes over its arrays
(`ir.ffts`).

The constants are from samples of single operations on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from autopar.ir.ffts import fft_bytes
from autopar.runtime.hlo_text import HloModule, Instruction

Named = Mapping[str, Instruction]

SECTOR_BYTES = 32  # of the cache, that updates are made in
LINE_BYTES = 64  # that memory is read by
CACHE_BYTES = 40e6  # of an H100 or H200: 50 MB, not all of which hold what is wanted
CACHE_SPEED = 1.6  # of the memory's
_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert"))
_MIXING = frozenset(("tuple", "reduce", "dot", "custom-call", "scatter", "dynamic-update-slice"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds the update
ORDERED_RANK = 3
_ATOMIC = 1.5  # traffic of sums in memory, as if it were so much more
_SWAP_BYTES = 38.0  # per element, in a loop of compare and swap
SWAP_S = 6e-6  # of an update, while others of its row wait; by profiled steps
_LAYOUT = re.compile(r"\]\{(\d+)")
_SLICE_SIZES = re.compile(r"slice_sizes=\{([\d,]*)\}")
_TARGET_DIMS = re.compile(r"scatter_dims_to_operand_dims=\{([\d,]*)\}")
_UPDATE_WINDOW = re.compile(r"update_window_dims=\{([\d,]*)\}")
_FFT_LENGTHS = re.compile(r"fft_length=\{([\d,]+)\}")
_FFT_KIND = re.compile(r"fft_type=(\w+)")
_STRIDES = re.compile(r"\[\d+:\d+(?::(\d+))?\]")


@dataclass
class Work:
    """products_s: of its tiles, at the device's rate. flops: of its products. lane_ops:
    instructions of vector lanes. sums_rows: whether it reduces along another dimension than that
    which is contiguous. reads: operand → bytes that are touched of it. written: bytes. scratch:
    bytes of arrays that a library copies to another layout first. waits_s: of the updates of a row
    one after the other. in_turn: whether its kinds of work take turns in place of running side by
    side.
    """

    products_s: float = 0.0
    flops: float = 0.0
    lane_ops: float = 0.0
    sums_rows: bool = False
    reads: dict[str, float] = field(default_factory=dict)
    written: float = 0.0
    scratch: float = 0.0
    waits_s: float = 0.0
    in_turn: bool = False

    @property
    def num_bytes(self) -> float:
        return sum(self.reads.values()) + self.written


def operands_of(one: Instruction, by_name: Named) -> list[Instruction]:
    return [by_name[name] for name in one.operands if name in by_name]


def size_of(one: Instruction) -> int:
    """Elements of the first result; of a tuple, those of the largest."""
    return max((prod(array.shape) for array in one.results), default=0)


def bytes_of(one: Instruction) -> float:
    return sum(array.num_bytes for array in one.results)


def plain_traffic(one: Instruction, module: HloModule, by_name: Named) -> Work:
    """Of an instruction that is a kernel of its own."""
    reads = {other.name: bytes_of(other) for other in operands_of(one, by_name)}
    if one.opcode in _SLICES:
        reads[one.operands[0]] = _sliced_bytes(one, by_name[one.operands[0]])
        return Work(reads=reads, written=bytes_of(one))
    if (place := UPDATES.get(one.opcode)) is not None and len(one.operands) > place:
        update = by_name[one.operands[place]]
        reads[one.operands[0]], written, waits_s = 0.0, bytes_of(update), 0.0
        if one.opcode == "scatter":
            target = by_name[one.operands[0]]
            reads[one.operands[0]] = _combined_bytes(one, target, update)
            written = _scattered_bytes(one, target, update, module)
            waits_s = _waits_s(one, target, update, module)
        return Work(reads=reads, written=written, waits_s=waits_s)
    if one.opcode == "fft":  # passes over both arrays
        found, kind = _FFT_LENGTHS.search(one.attributes), _FFT_KIND.search(one.attributes)
        lengths = [int(n) for n in found[1].split(",")] if found else [1]
        read = sum(reads.values())
        total = fft_bytes(kind[1] if kind else "FFT", lengths, read, bytes_of(one))
        return Work(reads=reads, written=total - read)
    written = bytes_of(one)
    if one.opcode == "custom-call" and len(one.results) > 1:  # the last result is scratch memory
        written -= one.results[-1].num_bytes
    return Work(reads=reads, written=written)


def fusion_traffic(fusion: Instruction, module: HloModule, inner: Sequence[Instruction]) -> Work:
    inside = {one.name: one for one in inner}
    reads = _Reads(inner)
    root = next(one for one in inner if one.is_root)
    outputs = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
    work = Work(written=sum(_written_bytes(output, module, inside) for output in outputs))
    for one in inner:
        if one.opcode == "scatter" and one.operands[0] in inside:
            target, update = inside[one.operands[0]], inside[one.operands[UPDATES["scatter"]]]
            work.waits_s += _waits_s(one, target, update, module)
        if one.opcode == "parameter":
            operand = fusion.operands[int(one.operands[0])]
            read = reads.bytes_of(one)
            work.reads[operand] = work.reads.get(operand, 0.0) + read
    return work


def _sliced_bytes(one: Instruction, source: Instruction) -> float:
    """What a slice touches of its source: with a stride along rows, all between."""
    touched = bytes_of(one)
    if one.opcode == "gather":
        return touched * _line_share(one, source)
    if one.opcode == "slice":
        strides = [int(stride or 1) for stride in _STRIDES.findall(one.attributes)]
        if strides:
            touched *= strides[minor_dimension(source)]
    return min(touched, bytes_of(source))


def _line_share(gather: Instruction, source: Instruction) -> float:
    """Bytes that memory reads for each that a gather takes: its slices lie anywhere, each in lines
    of its own. A small source stays in the cache."""
    found = _SLICE_SIZES.search(gather.attributes)
    sizes = [int(size) for size in found[1].split(",")] if found and found[1] else []
    run = item_bytes(source)
    for size, whole in zip(reversed(sizes), reversed(source.results[0].shape), strict=False):
        run *= size
        if size < whole:
            break
    share = _lines(run, LINE_BYTES)
    return share / CACHE_SPEED if bytes_of(source) <= CACHE_BYTES else share


def _lines(run: int, line: int) -> float:
    """Bytes of all lines that a run of bytes touches, per byte, on average over the places where
    such runs begin one after another."""
    return (line + run - gcd(run, line)) / max(run, 1)


def _update_share(scatter: Instruction, target: Instruction, update: Instruction) -> float:
    """Bytes of lines that a scatter touches for each byte of its update: in memory, or in sectors
    of the cache if that holds the target."""
    found = _UPDATE_WINDOW.search(scatter.attributes)
    along = [int(n) for n in found[1].split(",")] if found and found[1] else []
    run = item_bytes(update) * prod(update.results[0].shape[n] for n in along)
    return _lines(run, SECTOR_BYTES if bytes_of(target) <= CACHE_BYTES else LINE_BYTES)


def _combined_bytes(scatter: Instruction, target: Instruction, update: Instruction) -> float:
    """What a scatter reads of its target."""
    if bytes_of(target) <= CACHE_BYTES:
        return min(bytes_of(update), bytes_of(target))
    return _touched_bytes(scatter, target, update)


def _touched_bytes(scatter: Instruction, target: Instruction, update: Instruction) -> float:
    """Lines of the target. Where every dimension of several has an index, as in a pooling's
    gradient, updates come nearly in the target's order, so that neighbours share them."""
    touched = bytes_of(update) * _update_share(scatter, target, update)
    found = _TARGET_DIMS.search(scatter.attributes)
    num_indexed = len(found[1].split(",")) if found else 0
    if num_indexed == len(target.results[0].shape) >= ORDERED_RANK:
        return min(touched, bytes_of(target))
    return touched


def _scattered_bytes(
    scatter: Instruction, target: Instruction, update: Instruction, module: HloModule
) -> float:
    """What a scatter writes, as plain traffic that takes as long."""
    if _swaps(scatter, update, module):
        return _SWAP_BYTES * size_of(update)
    written = _ATOMIC * _touched_bytes(scatter, target, update)
    return written / CACHE_SPEED if bytes_of(target) <= CACHE_BYTES else written


def _swaps(scatter: Instruction, update: Instruction, module: HloModule) -> bool:
    """Whether it combines numbers in a loop of compare and swap."""
    root = module.computations[scatter.called[0]][-1] if scatter.called else None
    is_sum = root is None or root.opcode == "add"
    return not is_sum or update.results[0].dtype in ("bf16", "f16")


def _waits_s(
    scatter: Instruction, target: Instruction, update: Instruction, module: HloModule
) -> float:
    """Of the updates that go to the same row, if indices are spread evenly over all rows."""
    if not _swaps(scatter, update, module) or "unique_indices=true" in scatter.attributes:
        return 0.0
    return SWAP_S * max(0.0, size_of(update) / max(size_of(target), 1) - 1)


class _Reads:
    """What a fusion reads of its values: all, unless every use takes only parts of them."""

    def __init__(self, inner: Sequence[Instruction]) -> None:
        self.inside = {one.name: one for one in inner}
        self.users: dict[str, list[Instruction]] = {}
        for one in inner:
            for name in one.operands:
                self.users.setdefault(name, []).append(one)
        self.found: dict[str, float] = {}
        for one in reversed(inner):  # users first
            self.found[one.name] = self._bytes_of(one)

    def bytes_of(self, value: Instruction) -> float:
        return self.found[value.name]

    def _bytes_of(self, value: Instruction) -> float:
        """Rows that are taken twice are read twice."""
        if value.is_root or value.name not in self.users:
            return bytes_of(value)
        parts = [self._taken(value, user) for user in self.users[value.name]]
        whole = sum(taken for taken, anywhere in parts if not anywhere)
        rows = sum(taken for taken, anywhere in parts if anywhere)
        return min(whole, bytes_of(value)) + rows

    def _taken(self, value: Instruction, user: Instruction) -> tuple[float, bool]:
        """By one user, and whether in rows that lie anywhere."""
        share = min(1.0, self.bytes_of(user) / max(bytes_of(user), 1))
        if user.operands[0] == value.name:
            if user.opcode == "gather":
                return _sliced_bytes(user, value), True
            if user.opcode == "scatter":
                update = self.inside[user.operands[UPDATES["scatter"]]]
                return _combined_bytes(user, value, update), True
            if user.opcode == "dynamic-update-slice":
                return 0.0, False
            if user.opcode in _SLICES:
                return _sliced_bytes(user, value) * share, False
        if user.opcode in _MIXING or size_of(user) != size_of(value):
            return bytes_of(value), False
        return bytes_of(value) * share, False


def _written_bytes(output: Instruction, module: HloModule, inside: Named) -> float:
    while output.opcode in _VIEWS and output.operands and output.operands[0] in inside:
        source = inside[output.operands[0]]
        if source.opcode not in _VIEWS and source.opcode not in UPDATES:
            break
        output = source
    place = UPDATES.get(output.opcode)
    if place is None:
        return bytes_of(output)
    update = inside[output.operands[place]]
    if output.opcode == "scatter":
        return _scattered_bytes(output, inside[output.operands[0]], update, module)
    return bytes_of(update)


def item_bytes(one: Instruction) -> int:
    array = one.results[0]
    return array.num_bytes // max(prod(array.shape), 1)


def minor_dimension(one: Instruction) -> int:
    """The dimension that is contiguous."""
    found = _LAYOUT.search(one.type_text)
    return int(found[1]) if found else len(one.results[0].shape) - 1

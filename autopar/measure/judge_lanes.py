"""The arithmetic of a kernel: from its instructions to those of vector lanes.

A fusion computes a value again for every place that reads it at another index. A value that only
some threads need is loaded in a branch, and the others wait. A kernel without tiles loads and
stores four elements at once, or two or one where the number of them is no multiple of that: then
these accesses take longer than their traffic. Rows are sorted by a network of comparisons, padded
to a power of two.

The constants are from samples of single operations on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd, log2

from autopar.measure.judge_traffic import UPDATES, Named, Work, item_bytes, minor_dimension, size_of
from autopar.runtime.hlo_text import Instruction

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
AT_ONCE = 4  # elements of an access
ACCESS = 31.0  # instructions, of one with fewer elements
COMPARISON = 27.0  # of two elements of a row that is sorted, with what is sorted beside them
WHOLE_NUMBERS = 0.7  # of an instruction's time
_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
_DIMENSIONS = re.compile(r"dimensions=\{([\d,]*)\}")
_PADDING = re.compile(r"padding=([\dx_\-]+)")


def plain_lane_ops(one: Instruction) -> float:
    """Of an instruction that is a kernel of its own."""
    return _cost(one) * size_of(one)


def lane_ops(
    work: Work, inner: Sequence[Instruction], inside: Named, by_name: Named, is_loop: bool
) -> float:
    """Of a fusion without tiles; `is_loop`: one that goes over its result."""
    total = _computed(inner, inside)
    root = next(one for one in inner if one.is_root)
    made = inside[root.operands[0]] if root.opcode == "tuple" else root
    at_once = gcd(size_of(made), AT_ONCE) if is_loop else AT_ONCE
    if at_once == AT_ONCE or made.opcode in UPDATES:
        return total
    accesses = work.written / item_bytes(made)
    accesses += sum(
        touched / item_bytes(by_name[name])
        for name, touched in work.reads.items()
        if touched and item_bytes(by_name[name])
    )
    return total + ACCESS * accesses / at_once


def _cost(one: Instruction) -> float:
    """Instructions per element."""
    if one.opcode == "sort":
        return _sorted(one)
    cost = _COSTS.get(one.opcode, 1.0)
    is_whole = bool(one.results) and one.results[0].dtype in _INTEGERS
    return WHOLE_NUMBERS * cost if is_whole else cost


def _sorted(one: Instruction) -> float:
    """Comparisons of a sorting network, per element of the row."""
    along = _DIMENSIONS.search(one.attributes)
    length = one.results[0].shape[int(along[1])] if along else size_of(one)
    if length < 2:
        return 0.0
    padded = 1 << (length - 1).bit_length()
    steps = log2(padded) * (log2(padded) + 1) / 2
    return COMPARISON * padded / length * steps / 2


def tiled_lane_ops(inner: Sequence[Instruction], inside: Named) -> float:
    """Triton computes every value of a tile once."""
    total = 0.0
    for one in inner:
        elements = size_of(one) * _reads_per_value(one, inside)
        total += elements * (LOAD if one.opcode == "parameter" else _cost(one))
    return total


def _computed(inner: Sequence[Instruction], inside: Named) -> float:
    """Every value of a fusion is computed once for all who read it at the same index, and again for
    each who reads it at another."""
    here: dict[str, float] = {}
    elsewhere: dict[str, float] = {}
    in_branch: dict[str, bool] = {}
    rotated = _rotated(inner, inside)
    total = 0.0
    for one in reversed(inner):
        if one.is_root:
            here[one.name] = float(size_of(one))
        times = here.get(one.name, 0.0) + elsewhere.get(one.name, 0.0)
        if (place := UPDATES.get(one.opcode)) is not None and one.operands[place] in inside:
            times = min(times, float(size_of(inside[one.operands[place]])))
        branched = in_branch.get(one.name, False)
        if one.opcode == "tuple":
            here.update({name: float(size_of(inside[name])) for name in one.operands})
            continue
        if one.opcode == "parameter":
            moved = elsewhere.get(one.name, 0.0)
            load = LOAD_IN_BRANCH if branched else LOAD_ELSEWHERE
            total += LOAD * here.get(one.name, 0.0) + load * moved
            continue
        reads = _reads_per_value(one, inside)
        if one.name not in rotated:
            total += times * max(reads, 1.0) * _cost(one)
        for place, name in enumerate(one.operands):
            if name not in inside:
                continue
            value = times * reads
            if one.opcode in UPDATES:
                if place != UPDATES[one.opcode]:
                    continue
                value = float(size_of(inside[name]))
            elif one.opcode in _BRANCHES:
                if _diverges(one, inside):
                    in_branch[name] = True
                else:
                    value *= min(1.0, size_of(inside[name]) / max(size_of(one), 1))
            if one.opcode in _MOVES and one.opcode != "reduce" and size_of(inside[name]) > 1:
                elsewhere[name] = elsewhere.get(name, 0.0) + value
            else:
                here[name] = max(here.get(name, 0.0), value)
            if branched:
                in_branch[name] = True
    return total


def _rotated(inner: Sequence[Instruction], inside: Named) -> set[str]:
    """Shifts of one number by which it is rotated, as random bits are made: with the `or` of both
    they are one instruction."""
    found: set[str] = set()
    for one in inner:
        if one.opcode != "or" or not all(name in inside for name in one.operands):
            continue
        left, right = (inside[name] for name in one.operands)
        opcodes = {left.opcode, right.opcode}
        if (
            opcodes == {"shift-left", "shift-right-logical"}
            and left.operands[0] == right.operands[0]
        ):
            found |= {left.name, right.name}
    return found


def _diverges(one: Instruction, inside: Named) -> bool:
    """Whether neighbours along a row take different branches."""
    if one.is_root:  # a loop for each part
        return False
    minor = minor_dimension(one)
    if one.opcode == "pad":
        padding = _PADDING.search(one.attributes)
        parts = padding[1].split("x")[minor].split("_") if padding else []
        return len(parts) == 3 and parts[2] != "0"
    along = _DIMENSIONS.search(one.attributes)
    if along is None or along[1] != str(minor):
        return False
    return min(inside[name].results[0].shape[minor] for name in one.operands) < WARP


def _reads_per_value(one: Instruction, inside: Named) -> float:
    """How many elements of an operand go into one of the result."""
    if one.opcode not in ("reduce", "dot") or one.operands[0] not in inside:
        return 1.0
    return max(1.0, size_of(inside[one.operands[0]]) / max(size_of(one), 1))

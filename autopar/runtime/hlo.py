"""Collectives of a compiled program, read from XLA's optimized HLO.

Bytes are those of the result on one device (for an all-gather the gathered tensor, for a
reduce-scatter one part of it). `collective_seconds` prices the lot by the ring formulas of
`autopar.cost.collectives`, so that programs compiled by different means can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1, "f8e8m0fnu": 1,
}  # fmt: skip
_ASSIGNMENT = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*")
_OPCODE = re.compile(r"\s*(?P<kind>" + "|".join(_KINDS) + r")(?P<start>-start)?\(")
_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/ in long tuples
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_GROUPS_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_GROUPS_TILES = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_EACH = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")
_GROUPS_MESH = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:,\s*device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?\s*\{(?P<axes>[^}]*)\}"
)
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|async_computation|(?:true|false)_computation)=(%?[\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_NUM_DEVICES = re.compile(r"(?:replica_count|num_partitions)=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


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
    """Every collective of an HLO module; those in loops carry the trip count."""
    trips = _trip_counts(hlo_text)
    num_devices = _product(tuple(int(n) for n in _NUM_DEVICES.findall(hlo_text.partition("\n")[0])))
    found = []
    computation = ""
    for line in hlo_text.splitlines():
        header = _COMPUTATION.match(line)
        if header and not line.startswith(" "):
            computation = header[1]
            continue
        match = _read_instruction(line)
        if match is None:
            continue
        kind, results = match
        arrays = [
            (dtype, tuple(int(d) for d in dims.split(",") if d))
            for dtype, dims in _ARRAY.findall(results)
            if dtype in _BYTES
        ]
        num_bytes = sum(_BYTES[d] * _product(shape) for d, shape in arrays)
        name = re.search(r'op_name="([^"]*)"', line)
        found.append(
            CollectiveOp(
                kind,
                num_bytes,
                _group_size(line, num_devices),
                tuple(shape for _, shape in arrays),
                trips.get(computation, 1),
                name[1] if name else "",
                computation in trips,
                _groups(line, num_devices),
                arrays[0][0] if arrays else "",
            )
        )
    return tuple(found)


def _read_instruction(line: str) -> tuple[str, str] | None:
    """(kind, type of the results) of a line that is a collective."""
    line = _COMMENT.sub("", line)
    assignment = _ASSIGNMENT.match(line)
    if assignment is None:
        return None
    rest = line[assignment.end() :]
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else (rest + " ").index(" ")
    opcode = _OPCODE.match(rest, type_end)
    if opcode is None:
        return None
    type_text = rest[:type_end]
    if not opcode["start"] or not type_text.startswith("("):
        return opcode["kind"], type_text
    # An all-reduce-start has the type of its results. Others hold (operands, results, contexts…).
    operands = _split(rest[opcode.end() : _closing(rest, opcode.end() - 1)])
    parts = _split(type_text[1:-1])
    is_plain = len(parts) == len(operands) and not parts[0].startswith("(")
    return opcode["kind"], type_text if is_plain else parts[1]


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return len(text) - 1


def _split(text: str) -> list[str]:
    """Split at the commas outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _group_size(line: str, num_devices: int) -> int:
    match = _GROUPS_MESH.search(line)
    if match:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match["mesh"]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match["axes"])  # 'x', or a part of it
        return _product(tuple(int(part or sizes[axis]) for axis, part in axes))
    match = _GROUPS_IOTA.search(line)
    if match:
        return int(match[2])
    match = _GROUPS_LIST.search(line)
    if match:
        return len(match[1].split(","))
    if "source_target_pairs=" not in line:
        return num_devices  # no groups: all devices are one
    pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2])
    return 2 if any(source != target for source, target in pairs) else 1


def _groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Which devices take part together, by number; of a permutation, who sends to whom."""
    if "source_target_pairs=" in line:
        pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2])
        return tuple((int(source), int(target)) for source, target in pairs)
    if match := _GROUPS_MESH.search(line):
        return _mesh_groups(match["mesh"], match["axes"], match["ids"] or "")
    if match := _GROUPS_TILES.search(line):
        numbers = np.arange(num_devices).reshape(_sizes(match[3]))
        if match[4]:
            numbers = numbers.transpose(_sizes(match[4]))
        return _rows(numbers.reshape(int(match[1]), int(match[2])))
    if match := _GROUPS_EACH.search(line):
        return tuple(_sizes(group) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    return (tuple(range(num_devices)),)


def _mesh_groups(mesh: str, axes: str, ids: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh. Its devices are numbered in order, or as `ids` says: one by one,
    or `[2,8]T(1,0)`, a grid of 2 by 8 read the other way. An axis may be a part of one: `'x':(2)4`
    is the part of 4 behind one of 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = {
        name: (int(before), int(part)) if part else (1, sizes[name])
        for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    }
    shape, grouped = [], []
    for name, size in sizes.items():
        before, part = wanted.get(name, (size, 1))
        grouped += [] if name not in wanted else [len(shape) + 1]
        shape += [before, part, size // before // part]
    others = [axis for axis in range(len(shape)) if axis not in grouped]
    numbers = _numbered(ids, _product(tuple(shape))).reshape(shape).transpose(*others, *grouped)
    return _rows(numbers.reshape(-1, _product(tuple(shape[axis] for axis in grouped))))


def _numbered(ids: str, num_devices: int) -> np.ndarray:
    """Devices in the order of the mesh."""
    if order := _ORDER.fullmatch(ids.strip()):
        grid = np.arange(num_devices).reshape(_sizes(order[1]))
        return grid.transpose(_sizes(order[2])) if order[2] else grid
    return np.array(_sizes(ids)) if ids else np.arange(num_devices)


def _rows(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in row) for row in numbers)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _trip_counts(hlo_text: str) -> dict[str, int]:
    """computation -> how often it runs because of while loops around it."""
    calls: dict[str, list[tuple[str, int]]] = {}
    computation = ""
    for line in hlo_text.splitlines():
        header = _COMPUTATION.match(line)
        if header and not line.startswith(" "):
            computation = header[1]
            continue
        callees = ",".join("".join(called) for called in _CALLED.findall(line)).split(",")
        for callee in (name.strip(" %") for name in callees if name):
            is_body = re.search(rf"body=%?{re.escape(callee)}\b", line) is not None
            known = _TRIPS.search(line)
            count = int(known[1]) if is_body and known else 1
            calls.setdefault(callee, []).append((computation, count))
    loops: dict[str, int] = {}

    def trips(name: str, depth: int = 0) -> int:
        if depth > 32 or name not in calls:
            return 1
        return max(count * trips(parent, depth + 1) for parent, count in calls[name])

    for name in calls:
        total = trips(name)
        if total > 1:
            loops[name] = total
    return loops


_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*[a-z]\w*\[([\d,]*)\]")
_DOT = re.compile(r"\sdot\(\s*(?:[a-z]\w*\[[^\]]*\]\S*\s+)?%?([\w.\-]+)")
_CONVOLUTION = re.compile(
    r"= \(?\w+\[(?P<result>[\d,]*)\].* custom-call\((?P<operands>[^)]*)\)"
    r".*window=\{size=(?P<window>[\dx]+).*dim_labels=\w+_(?P<kernel>\w+)->"
    r".*custom_call_target=\"__cudnn\$conv(?P<kind>\w+)\""
)
_MATMUL = re.compile(
    r"= \(?\w+\[(?P<result>[\d,]*)\].* custom-call\(\s*"
    r"(?:[a-z]\w*\[[^\]]*\]\S*\s+)?%?(?P<lhs>[\w.\-]+)"
    r".*custom_call_target=\"__cublas\$(?:gemm|lt\$matmul)"
    r".*\"lhs_contracting_dimensions\":\[(?P<contracting>[\d\",]*)\]"
)
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def read_dot_flops(hlo_text: str) -> float:
    """Flops of all matrix products, those of cuBLAS too, and of cuDNN's convolutions, of an HLO
    module on one device, loops counted by trips."""
    trips = _trip_counts(hlo_text)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    computation, total = "", 0.0
    for line in hlo_text.splitlines():
        header = _COMPUTATION.match(line)
        if header and not line.startswith(" "):
            computation = header[1]
            continue
        convolution = _CONVOLUTION.search(line)
        if convolution is not None:
            names = re.findall(r"%([\w.\-]+)", convolution["operands"])[:2]
            flops = _convolution_flops(convolution, [shapes[computation, n] for n in names])
            total += flops * trips.get(computation, 1)
            continue
        matmul = _MATMUL.search(line)
        if matmul is not None:
            depth = re.findall(r"\d+", matmul["contracting"])
            flops = _matmul_flops(matmul["result"], shapes[computation, matmul["lhs"]], depth)
            total += flops * trips.get(computation, 1)
        own = _INSTRUCTION.match(line)
        if own is None:
            continue
        shape = tuple(int(d) for d in own[2].split(",") if d)
        shapes[computation, own[1]] = shape
        dot = _DOT.search(line)
        if dot is None:
            continue
        lhs = shapes[computation, dot[1]]
        contracting = _CONTRACTING.search(line)
        depth = re.findall(r"\d+", contracting[1]) if contracting else []
        total += _matmul_flops(own[2], lhs, depth) * trips.get(computation, 1)
    return total


def _matmul_flops(result: str, lhs: tuple[int, ...], contracting: Sequence[str]) -> float:
    """Two per multiply-add: for every element of the result, as many as are summed over."""
    shape = tuple(int(d) for d in result.split(",") if d)
    return 2.0 * _product(shape) * _product(tuple(lhs[int(d)] for d in contracting))


def _convolution_flops(found: re.Match[str], operands: Sequence[tuple[int, ...]]) -> float:
    """Two per multiply-add: for every output of the forward convolution, a window of the filter
    over all input features. The gradients are as many, with operands in other places."""
    result = tuple(int(d) for d in found["result"].split(",") if d)
    kind = found["kind"]
    if kind == "BackwardFilter":
        outputs, kernel = operands[1], result
    elif kind == "BackwardInput":
        outputs, kernel = operands
    else:
        outputs, kernel = result, operands[1]
    window = _product(tuple(int(n) for n in found["window"].split("x")))
    return 2.0 * _product(outputs) * window * kernel[found["kernel"].index("i")]


def collective_seconds(
    ops: tuple[CollectiveOp, ...], bandwidth: float, alpha_s: float = 0.0
) -> float:
    """Time of all collectives by the ring formulas on links of one bandwidth."""
    return sum(op.trips * alpha_s + op.sent_bytes / bandwidth for op in ops)

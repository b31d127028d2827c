"""A parser of XLA's HLO: from `compiled.as_text()` to instructions, array types and groups.

It reads what the compilers of the tested JAX versions print:

    types           f32[8,4]{1,0}, bf16[16,128]{1,0:T(8,128)(2,1)S(1)}, (f32[8]{0}, s32[])
    replica groups  {{0,1},{2,3}} as lists; {} is one group of all devices
                    [2,4]<=[4,2]T(1,0): 0…7 as a grid of 4 by 2, transposed, in rows of 4
                    mesh['x'=2,'y'=4] {'y'}: along axes of a mesh of devices in order
                    mesh['x'=8] {'x':(2)4}: along the minor factor 4 of an axis, behind a factor 2
                    mesh[…], device_ids=([2,4]T(1,0)) {…}, or (1,0,2,3): devices in the given order
    async pairs     all-gather-start and all-gather-done, call-start, async-start with `calls=`

An unknown form is an error that shows the line: a guess would be priced as a fact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NoReturn

import numpy as np

from autopar._requirements import TESTED_RANGE
from autopar.errors import DependencyError

Groups = tuple[tuple[int, ...], ...]

_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = "
    r"(?P<type>.*?[)}\]]) (?P<opcode>[a-z][\w\-]*)(?P<rest>\(.*)"
)
_COMPUTATION = re.compile(r"(?:ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{")
_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/ in long tuples
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[<=\d,]*)\]")
_BRACKET = re.compile(r"[()\[\]{}]")
_NUM_DEVICES = re.compile(r"(?:replica_count|num_partitions)=(\d+)")

_CALLED = re.compile(
    r"(?P<how>body|calls|to_apply|async_computation|(?:true|false)_computation|"
    r"branch_computations|called_computations)=(?:%?(?P<one>[\w.\-]+)|\{(?P<several>[^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

_NUMBERS = r"\d+(?:,\d+)*"
_GRID = rf"\[(?P<grid>{_NUMBERS})\](?:T\((?P<order>{_NUMBERS})\))?"
_LISTS = re.compile(rf"\{{(?P<lists>(?:\{{{_NUMBERS}\}}(?:,\{{{_NUMBERS}\}})*)?)\}}")
_TILES = re.compile(rf"\[(?P<count>\d+),(?P<size>\d+)\]<={_GRID}")
_MESH = re.compile(
    rf"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?:{_GRID}|(?P<ids>{_NUMBERS}))\))? "
    r"\{(?P<axes>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUPED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class ArrayType:
    """One array of an instruction's result, without its layout in memory."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The name of a type tells the bits of an element, as in bf16, c64 or f8e4m3fn."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return prod(self.shape) * -(-bits // 8)


def array_types(type_text: str) -> tuple[ArrayType, ...]:
    """All arrays of a type, in order; tokens are left out."""
    return tuple(
        ArrayType(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", type_text))
        if dtype not in ("token", "opaque")
    )


@dataclass(frozen=True)
class Instruction:
    """One line. `rest`: what follows the opcode, operands in brackets and then attributes."""

    computation: str
    name: str
    type_text: str
    opcode: str
    rest: str
    line: str

    @cached_property
    def _closed(self) -> int:
        return _closing(self.rest)

    @cached_property
    def operands(self) -> list[str]:
        """Names of the operands; some versions write their types before them."""
        parts = _split(_COMMENT.sub("", self.rest[1 : self._closed]))
        return [part.split(" ")[-1].lstrip("%") for part in parts if part]

    @property
    def attributes(self) -> str:
        return self.rest[self._closed + 1 :]

    @property
    def kind(self) -> str:
        """The opcode; for both halves of an asynchronous pair, that of the operation itself."""
        return re.sub("-(start|update|done)$", "", self.opcode)

    @property
    def is_first(self) -> bool:
        """Whether it is not the second half of an asynchronous pair."""
        return not self.opcode.endswith(("-update", "-done"))

    @cached_property
    def results(self) -> tuple[ArrayType, ...]:
        """The results of the operation. The type of a start is (operands, results, contexts…), but
        an all-reduce-start may have its results alone."""
        if not self.opcode.endswith("-start") or not self.type_text.startswith("("):
            return array_types(self.type_text)
        parts = _split(_COMMENT.sub("", self.type_text)[1:-1])
        is_plain = len(parts) == len(self.operands) and not parts[0].startswith("(")
        return array_types(self.type_text if is_plain else parts[1])

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def is_root(self) -> bool:
        return self.line.lstrip().startswith("ROOT ")

    @property
    def trips(self) -> int | None:
        """Of a loop, if XLA knows them."""
        match = _TRIPS.search(self.rest)
        return int(match[1]) if match else None

    @property
    def called(self) -> list[str]:
        """The computations that it runs; of a loop the body, not the condition."""
        names: dict[str, None] = {}
        for call in _CALLED.finditer(self.rest):
            for name in (call["one"] or call["several"]).split(","):
                names[name.strip(" %")] = None
        return list(names)

    def groups(self, num_devices: int) -> Groups:
        """The groups of devices of a collective; for a permutation, (source, target) pairs."""
        _, is_permutation, text = self.attributes.partition("source_target_pairs=")
        if not is_permutation:
            _, has_groups, text = self.attributes.partition("replica_groups=")
            if not has_groups:
                self._raise("no replica groups")
        try:
            return _groups(text, () if is_permutation else (tuple(range(num_devices)),))
        except (KeyError, ValueError):
            self._raise("replica groups in a form that autopar cannot read")

    def _raise(self, what: str) -> NoReturn:
        raise DependencyError(
            f"XLA's HLO has a collective with {what}:\n  {self.line.strip()}\nautopar reads what "
            f"the compilers of JAX {TESTED_RANGE} print: install one of these versions, and report "
            "this line with the output of `autopar doctor`."
        )


class HloModule:
    """The instructions of a module, and how often its computations run."""

    def __init__(self, text: str) -> None:
        header = text[text.find("HloModule") :].partition("\n")[0] if "HloModule" in text else ""
        self.num_devices = prod(int(n) for n in _NUM_DEVICES.findall(header))
        self.is_scheduled = "is_scheduled=true" in header
        self.entry = ""
        self.instructions: list[Instruction] = []
        computation = ""
        for line in text.splitlines():
            if not line.startswith(" ") and (start := _COMPUTATION.match(line)):
                computation = start[1]
                if line.startswith("ENTRY"):
                    self.entry = computation
            elif match := _INSTRUCTION.match(line):
                parts = match["name"], match["type"], match["opcode"], match["rest"]
                self.instructions.append(Instruction(computation, *parts, line))

    @cached_property
    def computations(self) -> dict[str, list[Instruction]]:
        """The instructions of each computation, in XLA's order; of a scheduled module, as run."""
        listed: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            listed.setdefault(one.computation, []).append(one)
        return listed

    @cached_property
    def _calls(self) -> dict[str, list[tuple[str, int | None]]]:
        """computation -> (its caller, trips of the loop whose body it is, or None)."""
        calls: dict[str, list[tuple[str, int | None]]] = {}
        for one in self.instructions:
            if not one.is_first:  # some versions repeat the computation of the start
                continue
            count = (one.trips or 1) if one.opcode == "while" else None
            for callee in one.called:
                calls.setdefault(callee, []).append((one.computation, count))
        return calls

    @cached_property
    def runs(self) -> dict[str, int]:
        """computation -> how often it runs per run of the module. A loop with an unknown trip count
        counts once, and so does every branch of a conditional."""
        counts: dict[str, int] = {}

        def runs(name: str) -> int:
            if name not in counts:
                calls = self._calls.get(name)
                counts[name] = sum((n or 1) * runs(caller) for caller, n in calls) if calls else 1
            return counts[name]

        for one in self.instructions:
            runs(one.computation)
        return counts

    @cached_property
    def looped(self) -> frozenset[str]:
        """Computations that run in a loop."""
        in_loops: set[str] = set()
        while more := {
            name
            for name, calls in self._calls.items()
            if name not in in_loops and any(n is not None or who in in_loops for who, n in calls)
        }:
            in_loops |= more
        return frozenset(in_loops)


def _closing(text: str) -> int:
    """The index at which the bracket that starts `text` is closed."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return bracket.start()
    return len(text)


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


def _groups(text: str, empty: Groups) -> Groups:
    """The groups that `replica_groups=` or `source_target_pairs=` lists; `empty` is what {} means.
    Raises `ValueError` or `KeyError` for an unknown or inconsistent form."""
    if lists := _form(_LISTS, text):
        if not lists["lists"]:
            return empty
        return tuple(_sizes(group) for group in lists["lists"][1:-1].split("},{"))
    if tiles := _form(_TILES, text):
        numbers = _numbered(tiles["grid"], tiles["order"])
        return _rows(numbers.reshape(int(tiles["count"]), int(tiles["size"])))
    if mesh := _form(_MESH, text):
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh["mesh"])}
        devices = np.arange(prod(sizes.values()))
        if mesh["grid"]:
            devices = _numbered(mesh["grid"], mesh["order"])
        elif mesh["ids"]:
            devices = np.array(_sizes(mesh["ids"]))
        return _mesh_groups(sizes, _split(mesh["axes"]), devices)
    raise ValueError(text)


def _form(form: re.Pattern[str], text: str) -> re.Match[str] | None:
    """A match up to the end of the attribute."""
    match = form.match(text)
    return match if match and text[match.end() :].lstrip()[:1] in ("", ",") else None


def _mesh_groups(sizes: dict[str, int], axes: Sequence[str], devices: np.ndarray) -> Groups:
    """Groups along axes of a mesh, or factors of axes. Every axis is cut where a factor begins or
    ends; the dimensions of the factors go last, in XLA's order of the mesh."""
    parts: dict[str, list[tuple[int, int]]] = {axis: [] for axis in sizes}
    for text in axes:
        match = _GROUPED_AXIS.fullmatch(text)
        if match is None:
            raise ValueError(text)
        axis, before, part = match.groups()
        parts[axis].append((int(before), int(part)) if part else (1, sizes[axis]))
    shape: list[int] = []
    grouped: list[int] = []
    for axis, size in sizes.items():
        cuts = sorted({1, size, *(cut for b, n in parts[axis] for cut in (b, b * n))})
        for before, part in parts[axis]:
            if cuts.index(before * part) != cuts.index(before) + (part > 1):
                raise ValueError(f"parts of {axis} overlap")
            grouped += [len(shape) + cuts.index(before)] if part > 1 else []
        shape += [end // start for start, end in pairwise(cuts)]
    others = [dimension for dimension in range(len(shape)) if dimension not in grouped]
    moved = devices.reshape(shape).transpose(*others, *grouped)
    return _rows(moved.reshape(-1, prod(shape[dimension] for dimension in grouped)))


def _numbered(grid: str, order: str | None) -> np.ndarray:
    """Device numbers as a grid, transposed."""
    sizes = _sizes(grid)
    numbers = np.arange(prod(sizes)).reshape(sizes)
    return numbers.transpose(_sizes(order)) if order else numbers


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in numbers)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))

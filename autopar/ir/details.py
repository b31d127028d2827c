"""The details of a plan: operators, collectives with their causes, memory over time.

They are part of the plan and of its file, so that `inspect/` needs neither the program nor the
solver. All figures are predictions for one mesh (every stage of a pipeline has its own), per device
and step unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# What memory is used for, in the order of reports.
MEMORY_CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "batch",
    "resharded copies",
    "other",
)

# How an axis of the mesh is used by an operator or a parameter, in words (see `Parallelism`).
DATA = "data"
COLUMN = "tensor, column"
ROW = "tensor, row"
TENSOR = "tensor"  # features of activations, between a product by columns and one by rows
EXPERT = "expert"
SEQUENCE = "sequence"
ZERO = "ZeRO"
REPLICATED = "replicated"
ADDENDS = "partial sums"  # of an operator on values that are not yet reduced over the axis

# Why a collective is there.
PARTIAL_SUMS = "partial sums"  # a reduction dimension was split, so partial sums are reduced
OTHER_LAYOUT = "other layout"  # produced in one layout, read in another
STATE = "state"  # updated state returns to its layout
WINDOWS = "windows"  # a convolution or pooling reads rows of neighbours


class OpRow(NamedTuple):
    """One operator.

    name:   the primitive's.
    array:  its first result as text, such as `bfloat16[8,1024]`; `spec`: that result's layout.
    words:  how each axis is used: `x: data, y: tensor, column`.
    source: the user's line.
    flops:  of one device.
    """

    name: str
    module: str
    region: str
    array: str
    spec: str
    words: str
    source: str
    runs: float
    flops: float
    compute_s: float
    communication_s: float
    communication_bytes: float


@dataclass(frozen=True)
class OpTable:
    """Operators in program order, as columns; texts are indices into `strings`. An operator runs
    `runs` times in a step; its other figures are of all these runs together."""

    strings: tuple[str, ...] = ()
    name: tuple[int, ...] = ()
    module: tuple[int, ...] = ()
    region: tuple[int, ...] = ()
    array: tuple[int, ...] = ()
    spec: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    runs: tuple[float, ...] = ()
    flops: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    communication_s: tuple[float, ...] = ()
    communication_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        texts = (self.name, self.module, self.region, self.array, self.spec, self.words)
        numbers = (self.runs, self.flops, self.compute_s, self.communication_s)
        columns = (*texts, self.source, *numbers, self.communication_bytes)
        if len(set(map(len, columns))) != 1:
            raise ValueError("columns of different length")
        last = len(self.strings)
        entries = [entry for column in (*texts, self.source) for entry in set(column)]
        if not all(0 <= entry < last for entry in entries):
            raise ValueError("a text that is not there")

    def __len__(self) -> int:
        return len(self.name)

    def rows(self) -> Iterator[OpRow]:
        text = self.strings.__getitem__
        texts = (self.name, self.module, self.region, self.array, self.spec, self.words)
        numbers = (self.runs, self.flops, self.compute_s, self.communication_s)
        columns = [map(text, column) for column in (*texts, self.source)]
        return map(OpRow, *columns, *numbers, self.communication_bytes)


def op_table(rows: list[OpRow]) -> OpTable:
    """Rows as columns."""
    strings: dict[str, int] = {}
    if not rows:
        return OpTable()
    columns = list(zip(*rows, strict=True))
    for column in columns[:7]:
        for text in dict.fromkeys(column):
            strings.setdefault(text, len(strings))
    texts = [tuple(map(strings.__getitem__, column)) for column in columns[:7]]
    return OpTable(tuple(strings), *texts, *columns[7:])


@dataclass(frozen=True)
class CollectiveCost:
    """Collectives of one kind, with one cause and between the same two operators. Equal layers
    have one each, told apart by `module`. `num_bytes`: sent by a device in all `count` of them;
    `seconds`: of all of them."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "shift"
    axes: tuple[str, ...]
    cause: str  # one of the above
    module: str
    region: str
    value: str  # the path or the array type of what is moved
    producer: str  # `dot_general of Block_0/Dense_0`, or an input's path
    consumer: str
    before: str  # spec as text, with "partial along x"
    after: str
    count: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class HeldArray:
    """An array in memory at the peak. `what` is a path, or an operator and its array."""

    what: str
    module: str
    category: str
    num_bytes: float


@dataclass(frozen=True)
class MemoryUse:
    """Bytes over the program's time, by category in the order of `MEMORY_CATEGORIES`.

    seconds:   predicted time of each point since the program began, at most a few hundred points;
               for a stage of a pipeline, in one pass over its program with one micro-batch.
    held:      bytes at each point, by category.
    at_peak:   bytes by category at the peak.
    peak_s:    when the peak is.
    largest:   the largest arrays at the peak.
    """

    seconds: tuple[float, ...]
    held: tuple[tuple[float, ...], ...]
    at_peak: tuple[float, ...]
    peak_s: float
    largest: tuple[HeldArray, ...]


@dataclass(frozen=True)
class Parallelism:
    """How a parameter is used and stored: (axis, word) for every axis of its mesh. `reason`: the
    operator and dimension that show it. `layers`: modules beside the first, each of which uses a
    row of it."""

    path: str
    module: str
    words: tuple[tuple[str, str], ...]
    reason: str = ""
    layers: tuple[str, ...] | None = field(default=None, metadata={"omit_none": True})


@dataclass(frozen=True)
class PlanDetails:
    """`flops`: of one device, recomputation included; `model_flops`: of the whole step on all
    devices of the mesh, each product counted once and recomputation left out."""

    flops: float
    model_flops: float
    ops: OpTable
    collectives: tuple[CollectiveCost, ...]
    memory: MemoryUse | None
    parallelism: tuple[Parallelism, ...]

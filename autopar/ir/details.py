"""What a plan says of itself: operators, collectives with their causes, memory over time.

These figures are kept with the plan, in its file too, so that whatever shows a plan (`inspect/`)
needs neither the program nor the solver. All are predictions, per device and step unless said
otherwise, of one mesh: every stage of a pipeline has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Memory is told by what it is held for, in this order.
MEMORY_CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "batch",
    "copies in another layout",
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
ADDENDS = "partial sums"  # of an operator that adds what is not yet summed over the axis

# Why a collective is there.
PARTIAL_SUMS = "partial sums"  # a reduction dimension was split, so addends are summed
OTHER_LAYOUT = "other layout"  # made in one layout, read in another
STATE = "state"  # updated state returns to the layout in which it is kept
WINDOWS = "windows"  # rows of neighbours that a convolution or pooling reads


class OpRow(NamedTuple):
    """One operator. `name` is JAX's, `array` its first result as text (`bfloat16[8,1024]`), `spec`
    that result's layout as text, `words` how each axis is used (`x: data, y: tensor, column`),
    `source` the user's line. `flops` are those of one device."""

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
    """Operators in program order, as columns; text is a number into `strings`. `runs` is how
    often an operator runs in a step; its other figures are of all these runs together."""

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
        if not all(0 <= entry < last for column in (*texts, self.source) for entry in column):
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
    texts = [
        tuple([strings.setdefault(text, len(strings)) for text in column]) for column in columns[:7]
    ]
    return OpTable(tuple(strings), *texts, *columns[7:])


@dataclass(frozen=True)
class CollectiveCost:
    """Collectives of one kind, with one cause and between the same two operators. Equal ones of
    equal layers are one each: `module` tells them apart. `num_bytes` are those that a device
    sends in all `count` of them, `seconds` what they take."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "shift"
    axes: tuple[str, ...]
    cause: str  # one of the above
    module: str
    region: str
    value: str  # what is moved: its path, or its array type
    producer: str  # what makes it, as `dot_general of Block_0/Dense_0`, or an input's path
    consumer: str  # what reads it
    before: str  # spec as text; "partial along x" is said so
    after: str
    count: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class HeldArray:
    """Something that is in memory when most is. `what` is a path, or an operator and its array."""

    what: str
    module: str
    category: str
    num_bytes: float


@dataclass(frozen=True)
class MemoryUse:
    """Bytes over the program's time, by category in the order of `MEMORY_CATEGORIES`.

    seconds:   predicted time of each point since the program began, at most a few hundred points;
               of a stage of a pipeline, in one pass over its program with a single micro-batch.
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
    """How a parameter is used and kept: (axis, word) for every axis of its mesh. `reason` says
    which operator and dimension it is told from, in a few words."""

    path: str
    module: str
    words: tuple[tuple[str, str], ...]
    reason: str = ""


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

"""Values between segments and the reshardings they may need: from `CutStep` to `Reshard`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.spec import Layout, NodeLayouts
from autopar.measure.segments.cut import CutStep
from autopar.measure.segments.files import MeshSpace


@dataclass(frozen=True)
class Reshard:
    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class SegmentBoundary:
    """A value that one part makes and another reads, with its layout per combination of either
    segment."""

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str
    made: tuple[Layout, ...]
    wanted: tuple[Layout, ...]


def crossings(
    cut: CutStep, space: MeshSpace, layouts: Sequence[Sequence[Sequence[NodeLayouts]]]
) -> Iterator[SegmentBoundary]:
    """`layouts`: of every node, by segment and combination."""
    segment_of = {p: n for n, segment in enumerate(space.segments) for p in segment.parts}
    places = [{whole: n for n, whole in enumerate(part.nodes)} for part in cut.parts]
    for number, part in enumerate(cut.parts):
        for port in part.ports:
            value = part.graph.values[port.value]
            if not value.shape:
                continue
            wanted = tuple(nodes[port.node][1][0] for nodes in layouts[segment_of[number]])
            for source in port.sources:
                node = places[source.part][source.node]
                made = tuple(
                    nodes[node][1][source.result] for nodes in layouts[segment_of[source.part]]
                )
                yield SegmentBoundary(source.part, number, value.shape, value.dtype, made, wanted)


def reshards(
    cut: CutStep, space: MeshSpace, layouts: Sequence[Sequence[Sequence[NodeLayouts]]]
) -> list[Reshard]:
    """Every resharding that may occur between two segments."""
    moves = {
        Reshard(c.shape, c.dtype, made, wanted): None
        for c in crossings(cut, space, layouts)
        for made in c.made
        for wanted in c.wanted
        if made != wanted
    }
    return list(moves)

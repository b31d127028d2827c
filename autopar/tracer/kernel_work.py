"""What it takes to compute a value again: from a `Dataflow` and what is in memory to `KernelWork`.

A kernel computes an op once for all who read the same element of its result, and again for each who
reads another: two slices of a value that are added compute what it is made of twice. So each level
of an associative scan, which combines slices of the level before, doubles the work of a kernel that
begins at the first. XLA counts in the same way when it fuses (`GpuHloCostAnalysis`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from autopar.tracer.costs import INSTRUCTIONS
from autopar.tracer.dataflow import Dataflow

MOVES = ("slice", "transpose", "rev")  # ops that read other elements than they make


class KernelWork(NamedTuple):
    """Per element of a value: instructions of the ops between it and the written values that it is
    made of, and how many elements of each of these are read there, if moved."""

    instructions: float
    reads: Mapping[int, int]


def work_of(
    value: int, flow: Dataflow, written: Collection[int], moves: Collection[str] = MOVES
) -> KernelWork:
    """What is made of fewer elements, as a norm's statistics are, is written by a kernel of its
    own and left out."""
    instructions, reads = 0.0, dict[int, int]()
    elements, last = prod(flow.values[value].shape), flow.producer[value]
    # Where a node's result is read, by the node whose result was last moved on the way there. All
    # that is read in one place is at the same index.
    places: dict[int, frozenset[int]] = {last: frozenset((last,))}
    times = {last: 1}  # that each of these places is computed
    frontier = [-last]
    while frontier:  # readers before what they read
        index = -heappop(frontier)
        node, at, is_view = flow.nodes[index], places[index], flow.views[index]
        count = sum([times[place] for place in at])
        if not is_view:
            instructions += count * INSTRUCTIONS.get(node.name, 1.0)
        is_move = node.name in moves
        for operand in node.operands:
            maker = flow.producer[operand]
            if operand in written:
                if is_move or is_view:
                    reads[operand] = reads.get(operand, 0) + count
                continue
            if prod(flow.values[operand].shape) < elements or maker >= index:
                continue
            known = places.get(maker)
            if known is None:
                heappush(frontier, -maker)
            if is_move:
                times[maker] = times.get(maker, 0) + count
                places[maker] = (known or frozenset()) | {maker}
            else:
                places[maker] = at if known is None or known is at else known | at
    return KernelWork(instructions, reads)

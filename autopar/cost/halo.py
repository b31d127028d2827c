"""Costs of split windows: from a node and its layouts to the shifts of rows between neighbours.

An op that reads a window around each of its results (a convolution, a pooling) can be split along
the windowed dimension if every device gets the rows next to its own: one shift of `rows` to either
side, along the axes that split the dimension.

    shift    α + β · B      B the bytes of the rows on one device

If the window reaches beyond the neighbours' rows, the dimension is gathered instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from autopar.cost.collectives import all_gather_s, shift_s
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, num_shards


def halo_steps(
    node: Node, values: Sequence[Value], mesh: LogicalMesh, operands: Sequence[Layout]
) -> Iterator[tuple[tuple[int, ...], float, float, int]]:
    """(axes, seconds, bytes each device sends, number of shifts) for each split window."""
    for halo in node.rule.halos:
        layout = operands[halo.operand]
        axes = tuple(a for a, entry in enumerate(layout) if entry == halo.dim)
        if not axes or not any(halo.rows):
            continue
        value = values[node.operands[halo.operand]]
        length = value.shape[halo.dim]
        ranks = prod(mesh.shape[a] for a in axes)
        local_bytes = value.num_bytes / num_shards(layout, mesh.shape)
        if max(halo.rows) > length // ranks:
            yield axes, all_gather_s(mesh, axes, local_bytes * ranks), local_bytes * (ranks - 1), 1
            continue
        shifts = sum(1 for rows in halo.rows if rows)
        sent_bytes = local_bytes * ranks / length * sum(halo.rows)
        seconds = shifts * shift_s(mesh, axes, sent_bytes / max(shifts, 1))
        yield axes, seconds, sent_bytes, shifts


def halo_s(
    node: Node, values: Sequence[Value], mesh: LogicalMesh, operands: Sequence[Layout]
) -> float:
    return sum(seconds for _, seconds, _, _ in halo_steps(node, values, mesh, operands))

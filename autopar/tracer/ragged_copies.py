"""Copies that XLA makes for ragged products: from nodes to `RaggedRead`s and `Life`s of copies.

XLA for GPUs (JAX 0.12, compiled for H100s) multiplies all rows with the matrix of every group. What
it reads of a value is

    masked    once for every group, rows of other groups as zeros, groups first: a product that
              contracts rows reads this, and so does the next copy, if a product needs both
    turned    the same with groups beside the rows: a product of rows reads this

One masked copy serves all products, the backward pass's too, so it lives from the first to the last
of them, and the value itself ends where the copy is made, unless something else reads it. One
kernel masks all values of a shape and of the same groups that can be there when the first of them
is needed, such as the gradients of two products of one array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import Life, Node, Value
from autopar.tracer.op_sizes import RAGGED_PRODUCT


@dataclass(frozen=True)
class RaggedRead:
    """An operand of a ragged product that XLA reads from a copy. `num_groups`: copies of it that
    lie together; `contracts_rows`: the product reads the masked copy, not the turned one."""

    node: int
    position: int
    num_groups: int
    contracts_rows: bool


def ragged_reads(nodes: Sequence[Node], values: Sequence[Value]) -> Iterator[RaggedRead]:
    """In the order of the nodes. A product over a single group, or over a batch, copies nothing."""
    for index, node in enumerate(nodes):
        if node.name != RAGGED_PRODUCT or node.work is None:
            continue
        num_groups, contracts_rows = _groups_of(node, values)
        for position in (0, 1) if contracts_rows else (0,):
            if num_groups > 1:
                yield RaggedRead(index, position, num_groups, contracts_rows)


def _groups_of(node: Node, values: Sequence[Value]) -> tuple[int, bool]:
    """(groups of a ragged product that XLA masks, whether its rows are contracted)."""
    assert node.work is not None
    arrays = (*node.operands, *node.results)
    if any(array >= len(node.operands) for array, _ in node.work.sizes[0]):
        return values[node.results[0]].shape[0], True
    batch, rows, _, summed = (
        prod(values[arrays[array]].shape[d] for array, d in dims) for dims in node.work.sizes
    )
    return round(batch * rows * summed / max(prod(values[node.operands[0]].shape), 1)), False


def ragged_copies(
    nodes: Sequence[Node],
    values: Sequence[Value],
    times: Sequence[int],
    source: Callable[[int], int],
    may_be_made: Callable[[int], int],
) -> tuple[list[Life], dict[int, tuple[set[int], int]]]:
    """(lives of the copies; a value -> the nodes that read copies of it, when the first is made).
    `source`: of a value, the one that it is a view of; `may_be_made`: when, at the earliest."""
    reads: dict[int, list[RaggedRead]] = defaultdict(list)
    for read in ragged_reads(nodes, values):
        reads[source(nodes[read.node].operands[read.position])].append(read)
    lives: list[Life] = []
    copied: dict[int, tuple[set[int], int]] = {}
    kernels: dict[tuple, list[int]] = defaultdict(list)  # what one kernel may mask -> when
    for value, those in sorted(reads.items(), key=lambda item: min(times[r.node] for r in item[1])):
        masked = [times[read.node] for read in those if read.contracts_rows]
        turned = [times[read.node] for read in those if not read.contracts_rows]
        first = min(masked + turned)
        operand, count = nodes[those[0].node].operands[those[0].position], those[0].num_groups
        if masked:
            last = max([*masked, min(turned, default=first)])
            starts = kernels[values[value].shape, nodes[those[0].node].operands[2:]]
            first = next((start for start in starts if may_be_made(value) < start), first)
            starts.append(first)
            lives.append(Life(operand, first, last, count))
        if turned:
            lives.append(Life(operand, min(turned), max(turned), count))
        copied[value] = ({read.node for read in those}, first)
    return lives, copied

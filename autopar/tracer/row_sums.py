"""Arrays that XLA writes in another order of dimensions to sum them along rows.

From a `Dataflow` to such values. XLA's layout assignment makes the dimensions that a sum goes over
the last in memory, if the sum's result keeps its order for what it is combined with, as the
gradient of a broadcast `relu` is with the slope. All that elementwise ops make the array of is then
read in that order: a product is read transposed, but what another product reads too, such as an
activation, is written in both orders. So it is in models that score a grid of pairs. Sums to
vectors and matrices leave the order alone: products take those either way.
"""

from __future__ import annotations

from math import prod

from autopar.ir.graph import Node, NodeKind
from autopar.tracer.costs import REDUCTIONS, UNFUSED
from autopar.tracer.dataflow import Dataflow

_LEAST_SUMMED = 32  # elements: fewer are summed along columns
_LEAST_RANK = 3  # of the sum's result
_MAX_SEEN = 64  # ops between a sum and the product that its operand is made of


def summed_along_rows(flow: Dataflow) -> frozenset[int]:
    """Values that are written in the order of a sum over them."""
    return frozenset(
        flow.source(node.operands[0])
        for node in flow.nodes
        if _sums_inner(flow, node) and _is_combined(flow, node.results[0])
        if _is_made_of_product(flow, node.operands[0])
    )


def _sums_inner(flow: Dataflow, node: Node) -> bool:
    """Whether a node sums over enough elements of dimensions that are not the last ones."""
    if node.name not in REDUCTIONS or not node.operands or not node.rule.operands:
        return False
    if sum(size > 1 for size in flow.shape_of(node)) < _LEAST_RANK:
        return False
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    shape, dims = flow.values[node.operands[0]].shape, node.rule.operands[0]
    sums = [kept.isdisjoint(factors) for factors in dims]
    summed = prod(size for size, is_summed in zip(shape, sums, strict=True) if is_summed)
    return summed >= _LEAST_SUMMED and not all(sums[sums.index(True) :])


def _is_combined(flow: Dataflow, value: int) -> bool:
    """Whether an elementwise op combines a value with another of its shape."""
    frontier, size = [value], prod(flow.values[value].shape)
    while frontier:
        for index in flow.direct_readers.get(frontier.pop(), ()):
            node = flow.nodes[index]
            if flow.is_view(node) or node.name in REDUCTIONS:
                if prod(flow.shape_of(node)) == size:
                    frontier += node.results
            elif _is_elementwise(node) and _num_of_size(flow, node, size) > 1:
                return True
    return False


def _num_of_size(flow: Dataflow, node: Node, size: int) -> int:
    return sum(prod(flow.values[v].shape) == size for v in node.operands)


def _is_made_of_product(flow: Dataflow, value: int) -> bool:
    """Whether elementwise ops make a value of a product of its shape; not the product itself."""
    shape, frontier, seen = flow.values[value].shape, [flow.source(value)], set[int]()
    while frontier and len(seen) < _MAX_SEEN:
        node = flow.maker(frontier.pop())
        if node.name == "dot_general":
            return bool(seen)
        if not _is_elementwise(node):
            continue
        sources = {flow.source(v) for v in node.operands if flow.values[v].shape == shape}
        frontier += sources - seen
        seen |= sources
    return False


def _is_elementwise(node: Node) -> bool:
    return node.kind is NodeKind.OP and node.name not in UNFUSED and node.name not in REDUCTIONS

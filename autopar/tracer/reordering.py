"""Values that kernels read in another order of dimensions: from a `Dataflow` to what is copied.

A product can turn its result: swap the groups of dimensions that come from its two operands. Other
transposes (grouped queries: keys, queries, groups → groups, queries, keys) are left to the kernels
that read it, and those compute in the order of the product's memory. Where such a kernel meets a
later product in the order that the program says, XLA writes that one again first, converted as the
kernel wants it (`copied`). A kernel with such a transpose writes its result once for every product
that contracts other dimensions of it, if these are several (`num_orders`). Zeros that are added to
such a value, and dimensions of size 1, leave it in its order.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from autopar.ir.graph import Node, NodeKind
from autopar.tracer.costs import REDUCTIONS, UNFUSED
from autopar.tracer.dataflow import Dataflow


def is_reordering(flow: Dataflow, node: Node) -> bool:
    """Whether a node is a transpose that no product makes itself."""
    if not flow.is_transpose(node) or not node.rule.operands:
        return False
    before = [factors for factors in node.rule.operands[0] if factors]
    order = [before.index(factors) for factors in node.rule.results[0] if factors in before]
    while order and order[0] == len(before) - len(order):
        order.pop(0)  # a prefix that stays
    if not order:
        return False
    first = order.index(min(order))
    return order[first:] + order[:first] != sorted(order)


class Reordering:
    """made_of: values made by elementwise ops with a reordering among them.
    copied: elementwise values that are written in another order, after products that they are made
    of."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.made_of: set[int] = set()
        self.copied: set[int] = set()
        # Value -> the product that it is made of by elementwise ops, and the first such value.
        self._products: dict[int, tuple[int, int | None]] = {}
        if any(is_reordering(flow, node) for node in flow.nodes):
            for index, node in enumerate(flow.nodes):
                self._visit(index, node)

    def _visit(self, index: int, node: Node) -> None:
        flow = self.flow
        if node.name == "dot_general":
            self._products.update((value, (index, None)) for value in node.results)
            return
        if node.kind is NodeKind.MERGE or node.name in UNFUSED or node.name in REDUCTIONS:
            return
        if is_reordering(flow, node):
            self.made_of.update(node.results)
            return
        is_view = flow.is_view(node)
        keeps = is_view or self._keeps_order(node)
        operands = [v for v in node.operands if keeps or self._is_as_large(node, v)]
        turned = [v for v in operands if v in self.made_of]
        plain = [v for v in operands if v in self._products and v not in self.made_of]
        if turned:
            self.made_of.update(node.results)
            for value in () if is_view else plain:
                _, first = self._products[value]
                self.copied.add(value if first is None else first)
        elif plain and not flow.is_transpose(node):
            product, first = self._products[plain[0]]
            for value in node.results:
                first = first if first is not None or is_view else value
                self._products[value] = (product, first)

    def _keeps_order(self, node: Node) -> bool:
        """Whether a node only adds to the dimensions of its operand: zeros, or others of size 1."""
        if node.name == "broadcast_in_dim" and node.operands:
            sizes = [prod(self.flow.values[v].shape) for v in (node.operands[0], node.results[0])]
            return sizes[0] == sizes[1]
        return node.name == "pad"

    def _is_as_large(self, node: Node, value: int) -> bool:
        values = self.flow.values
        return values[value].shape == values[node.results[0]].shape


def num_orders(
    flow: Dataflow, value: int, readers: Collection[int], swapped: Collection[int] = ()
) -> int:
    """In how many orders products among the readers want a value. A product of matrices takes
    either order; several dimensions are first merged to one of a matrix. For that, those that the
    product contracts come last in its first operand, and first in its second one. `swapped`:
    products whose operands XLA swaps."""
    wanted = set()
    for index in readers:
        node = flow.nodes[index]
        if node.name != "dot_general" or len(node.operands) != 2:
            continue
        kept = {f for result in node.rule.results for factors in result for f in factors}
        one, other = ({f for factors in dims for f in factors} for dims in node.rule.operands)
        batch = one & other & kept
        for position, operand in enumerate(node.operands):
            if flow.source(operand) != value:
                continue
            own = [f for f in node.rule.operands[position] if f and batch.isdisjoint(f)]
            contracted = [kept.isdisjoint(factors) for factors in own]
            is_second = (position == 1) != (index in swapped)
            if max(sum(contracted), len(own) - sum(contracted)) > 1:
                order = sorted(range(len(own)), key=lambda dim: contracted[dim] is not is_second)
                wanted.add(tuple(order))
    return max(1, len(wanted))

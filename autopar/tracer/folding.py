"""Ops that XLA makes inside another op: from a `Dataflow` to what is folded, and into which ops.

- *Products.* cuBLAS adds the other addend of a sum itself, and multiplies by a constant: then the
  sum is the product's result (`folded_products`). It also turns its result (`turned_products`).
- *Products over one element*, such as the gradient of a head with one output, are multiplications
  (`without_single_products`).
- *Scatters.* A scatter-add into zeros whose result is then added to something is made in that
  buffer: it has no memory of its own (`folded_scatters`).
"""

from __future__ import annotations

from autopar.ir.graph import Node, NodeKind
from autopar.tracer.dataflow import Dataflow
from autopar.tracer.regions import UPDATE
from autopar.tracer.run_order import is_scatter_add

_ADDITIONS = ("add", "add_any")
_EPILOGUES = (*_ADDITIONS, "mul")  # what cuBLAS does with a product, beside a sum or a constant


def folded_scatters(flow: Dataflow) -> dict[int, int]:
    """Scatter-adds into zeros that a single addition reads, with these additions: XLA computes the
    other addend and scatters into it."""
    folded: dict[int, int] = {}
    for index, node in enumerate(flow.nodes):
        if not is_scatter_add(node.name) or not node.operands:
            continue
        reading = flow.direct_readers.get(flow.finished(node.results[0]), [])
        only = flow.nodes[reading[0]] if len(reading) == 1 else None
        if flow.is_constant(node.operands[0]) and only is not None and only.name in _ADDITIONS:
            folded[index] = reading[0]
    return folded


def without_single_products(flow: Dataflow) -> Dataflow:
    """The flow with multiplications for products that sum over dimensions of size 1 alone."""
    nodes = [n.having(name="mul") if _is_single(flow, n) else n for n in flow.nodes]
    return Dataflow(nodes, flow.values, flow.zeros)


def _is_single(flow: Dataflow, node: Node) -> bool:
    if node.name != "dot_general" or len(node.operands) != 2:
        return False
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    shape, dims = flow.values[node.operands[0]].shape, node.rule.operands[0]
    return all(
        size == 1 or not kept.isdisjoint(factors) for size, factors in zip(shape, dims, strict=True)
    )


def turned_products(flow: Dataflow) -> set[int]:
    """Transposes of products of matrices: the product itself turns its result."""
    turned: set[int] = set()
    products = {v for n in flow.nodes if n.name == "dot_general" for v in n.results}
    for node in flow.nodes:
        turns = node.name == "transpose" and len(flow.shape_of(node)) == 2
        passes = turns or node.kind is NodeKind.FINISH
        if passes and node.operands and node.operands[0] in products:
            products.update(node.results)
            if turns:
                turned.update(node.results)
    return turned


def folded_products(flow: Dataflow) -> dict[int, int]:
    """Products that a single addition, or multiplication by a constant, reads, with these: XLA lets
    cuBLAS do it. Of two products that are added, the first waits for the second and is added to
    it."""
    folded: dict[int, int] = {}
    for index, node in enumerate(flow.nodes):
        if node.name not in _EPILOGUES or node.kind is not NodeKind.OP:
            continue
        if node.region == UPDATE:  # gradients are reduced before it
            continue
        scales = node.name not in _ADDITIONS
        if scales and sum(not flow.is_constant(v) for v in node.operands) != 1:
            continue
        for operand in node.operands:
            product = _only_read_product(flow, operand)
            if product is None or flow.values[operand].shape != flow.shape_of(node):
                continue
            folded[product] = index
            break
    return folded


def _only_read_product(flow: Dataflow, value: int) -> int | None:
    """The node of the product that a value is or is a view of, if nothing else reads it."""
    index = flow.producer[value]
    while len(flow.direct_readers.get(value, ())) == 1:
        node = flow.nodes[index]
        if node.name == "dot_general":
            return index
        if not flow.is_view(node) or node.name == "optimization_barrier":
            return None
        value = node.operands[0]
        index = flow.producer[value]
    return None

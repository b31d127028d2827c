"""Who makes and who reads each value of a graph, for the model of XLA's memory: `Dataflow`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from autopar.ir.graph import Node, NodeKind, Value
from autopar.tracer.costs import VIEWS
from autopar.tracer.regions import BACKWARD

Type = tuple[tuple[int, ...], str]


class Dataflow:
    """The nodes of a graph by what they read and make.

    `zeros`: values known to be zero everywhere; `turned`: transposes that products make themselves,
    which are views of their operands like a reshape.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        zeros: Collection[int] = (),
        turned: Collection[int] = (),
    ) -> None:
        self.nodes = nodes
        self.values = values
        self.zeros = frozenset(zeros)
        self.turned = frozenset(turned)

    def with_turned(self, turned: Collection[int]) -> Dataflow:
        changed = Dataflow(self.nodes, self.values, self.zeros, turned)
        changed.producer, changed.finish_of = self.producer, self.finish_of
        changed.direct_readers = self.direct_readers
        changed.recomputed = self.recomputed
        return changed

    @cached_property
    def producer(self) -> dict[int, int]:
        """Value -> the node that makes it."""
        return {v: i for i, node in enumerate(self.nodes) for v in node.results}

    @cached_property
    def finish_of(self) -> dict[int, int]:
        """Partial sums -> their result."""
        return {n.operands[0]: n.results[0] for n in self.nodes if n.kind is NodeKind.FINISH}

    @cached_property
    def views(self) -> list[bool]:
        """Per node, whether it is a view: every pass asks it of every node."""
        return list(map(self.is_view, self.nodes))

    @cached_property
    def direct_readers(self) -> dict[int, list[int]]:
        """Value -> the nodes that read it; those of its views are not among them."""
        readers: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in node.operands:
                readers.setdefault(value, []).append(index)
        return readers

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """Nodes of the backward pass that compute a layer again: they read what a barrier passes on
        of the forward pass, and no gradients."""
        given, again = set[int](), set[int]()  # values of the forward pass; those computed again
        constants: set[int] = set()
        found: set[int] = set()
        for index, node in enumerate(self.nodes):
            is_merge = node.kind is NodeKind.MERGE
            read = [v for v in node.operands[: 1 if is_merge else None] if v not in constants]
            if node.kind is NodeKind.OP and not read:
                constants.update(node.results)
            elif not is_merge and node.region != BACKWARD:
                given.update(node.results)
            elif given.issuperset(read):
                if node.name == "optimization_barrier":
                    again.update(node.results)
                elif is_merge or self.is_view(node) or self._is_slice_of_forward(node):
                    given.update(node.results)
            elif not again.isdisjoint(read) and all(v in again or v in given for v in read):
                again.update(node.results)
                found.add(index)
        return frozenset(found)

    def _is_slice_of_forward(self, node: Node) -> bool:
        """Whether a loop slices what the forward pass has made or read. A slice of an argument that
        the backward pass alone reads is a gradient, which a stage of a pipeline receives."""
        if node.name != "scan_slice":
            return False
        if self.maker(node.operands[0]).kind is not NodeKind.INPUT:
            return True
        readers = [i for v in node.results for i in self.direct_readers.get(v, ())]
        return any(self.nodes[i].region != BACKWARD for i in readers)

    def maker(self, value: int) -> Node:
        return self.nodes[self.producer[value]]

    def finished(self, value: int) -> int:
        """The value itself, or the result of its partial sums, which shares its buffer."""
        return self.finish_of.get(value, value)

    def source(self, value: int) -> int:
        """The value that a view is a view of."""
        node = self.maker(value)
        while self.is_view(node) and node.operands:
            value = node.operands[0]
            node = self.maker(value)
        return value

    def is_view(self, node: Node) -> bool:
        if node.kind in (NodeKind.USE, NodeKind.FINISH) or node.name in VIEWS:
            return True
        return node.name == "transpose" and node.results[0] in self.turned

    def is_constant(self, value: int) -> bool:
        """A filled array: constants are no operands of nodes."""
        node = self.maker(value)
        return node.kind is NodeKind.OP and not node.operands

    def is_transpose(self, node: Node) -> bool:
        """Whether a node writes more than a matrix in another order of dimensions."""
        return node.name == "transpose" and len(self.shape_of(node)) > 2

    def shape_of(self, node: Node) -> tuple[int, ...]:
        return self.values[node.results[0]].shape

    def type_of(self, value: int) -> Type:
        return self.values[value].shape, self.values[value].dtype

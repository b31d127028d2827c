"""What compiled kernels move: from a graph and the values it writes to the `Traffic` of every node.

Every value that is written ends a kernel (`liveness` says which are). The kernel holds the ops
between it and the written values that it is made from, and reads each of these once, however many
of its ops use it; an op that several kernels compute again is part of each. What is read is
charged to the first op of the kernel that reads it, what is written to the op that makes it, so
that it is divided as that op's sharding divides it.

Updated state is written although it takes no new memory. The updates of one parameter and of its
moments are one kernel: they read the same gradient. Products, convolutions and attention kernels
have no traffic of their own: what they move is part of what they take.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar.ir.graph import Node, NodeKind, Traffic, Value
from autopar.trace.figures import VIEWS
from autopar.trace.regions import UPDATE

_NOTHING = ("scan_slice", "scan_stack", "iota", "random_seed")
_REDUCTIONS = ("reduce_", "arg", "cum")
_GATHERS = ("gather", "dynamic_slice", "take")
_LARGEST = 256  # ops of a kernel that are looked at


@dataclass
class _Moved:
    num_bytes: list[float]
    num_kernels: float = 0.0
    stream: str = "elementwise"
    kernels: set[int] = field(default_factory=set)


def node_traffic(
    nodes: Sequence[Node],
    values: Sequence[Value],
    in_memory: Collection[int],
    in_place: Collection[int | None],
) -> list[Traffic | None]:
    """`in_place`: updated state, which is in memory without being new there."""
    return _Kernels(nodes, values, in_memory, in_place).traffic()


class _Kernels:
    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        in_memory: Collection[int],
        in_place: Collection[int | None],
    ) -> None:
        self.nodes, self.values, self.in_memory = nodes, values, in_memory
        self.producer = {v: i for i, node in enumerate(nodes) for v in node.results}
        finish = {n.operands[0]: n.results[0] for n in nodes if n.kind is NodeKind.FINISH}
        self.written = {v for v in in_memory if not self.is_view(self.producer[v])}
        self.written |= {v for v in self.producer if finish.get(v, v) in in_place}
        self.moved: dict[int, _Moved] = {}
        self.seen: dict[int, set[int]] = {}  # kernel -> written values that it has read
        self.update_of: dict[int, int] = {}  # a gradient -> the kernel of the update that reads it

    def is_view(self, index: int) -> bool:
        node = self.nodes[index]
        return node.kind in (NodeKind.USE, NodeKind.FINISH) or node.name in VIEWS

    def source(self, value: int) -> int:
        """What a view is a view of."""
        index = self.producer[value]
        while self.is_view(index) and self.nodes[index].operands:
            value = self.nodes[index].operands[0]
            index = self.producer[value]
        return value

    def traffic(self) -> list[Traffic | None]:
        for index, node in enumerate(self.nodes):
            if node.kind is NodeKind.OP and self.ends_kernel(index):
                self.add_kernel(index)
        found: list[Traffic | None] = []
        for index in range(len(self.nodes)):
            own = self.moved.get(index)
            found.append(
                None
                if own is None or not (any(own.num_bytes) or own.num_kernels)
                else Traffic(tuple(own.num_bytes), own.stream, own.num_kernels)
            )
        return found

    def ends_kernel(self, index: int) -> bool:
        node = self.nodes[index]
        if node.work is not None or node.name in _NOTHING or self.is_view(index):
            return False
        return any(v in self.written for v in node.results)

    def of(self, index: int) -> _Moved:
        if index not in self.moved:
            node = self.nodes[index]
            self.moved[index] = _Moved([0.0] * (len(node.operands) + len(node.results)))
        return self.moved[index]

    def add_kernel(self, root: int) -> None:
        node = self.nodes[root]
        kernel, is_new = self.kernel_of(root)
        own = self.of(root)
        own.num_kernels += 1.0 if is_new else 0.0
        for position, value in enumerate(node.results):
            if value in self.written and (size := self.written_bytes(node, value)):
                own.num_bytes[len(node.operands) + position] += size
        self.read(root, self.seen[kernel])
        own.stream = self.stream_of(root)

    def written_bytes(self, node: Node, value: int) -> float:
        size = float(self.values[value].num_bytes)
        if _is_in_place(node):
            # In place: the rest of the array is neither read nor written.
            position = 1 if node.name == "dynamic_update_slice" else len(node.operands) - 1
            size = min(size, float(self.values[node.operands[position]].num_bytes))
        return size

    def kernel_of(self, root: int) -> tuple[int, bool]:
        """The kernel that a node ends, and whether it is the first to."""
        node = self.nodes[root]
        if node.region == UPDATE and self.values[node.results[0]].shape:
            shape = self.values[node.results[0]].shape
            for value in self.sources_of(root):
                own = self.values[value]
                if prod(own.shape) != prod(shape) or self.is_state(value):
                    continue
                known = self.update_of.setdefault(value, root)
                if known != root:
                    return known, False
        self.seen[root] = set()
        return root, True

    def is_state(self, value: int) -> bool:
        return self.nodes[self.producer[value]].kind is NodeKind.INPUT

    def sources_of(self, root: int) -> list[int]:
        """Written values that a kernel is made from."""
        found: dict[int, None] = {}
        frontier, seen = [root], {root}
        while frontier and len(seen) < _LARGEST:
            for value in self.nodes[frontier.pop()].operands:
                value = self.source(value)
                maker = self.producer[value]
                if value in self.written or self.nodes[maker].kind is NodeKind.INPUT:
                    found[value] = None
                elif maker not in seen:
                    seen.add(maker)
                    frontier.append(maker)
        return list(found)

    def read(self, root: int, seen: set[int]) -> None:
        """Charge what a kernel reads."""
        frontier, visited = [root], {root}
        while frontier and len(visited) < _LARGEST:
            index = frontier.pop()
            node = self.nodes[index]
            for position, operand in enumerate(node.operands):
                value = self.source(operand)
                maker = self.producer[value]
                if value in self.written or self.nodes[maker].kind is NodeKind.INPUT:
                    if value not in seen:
                        seen.add(value)
                        size = self.read_bytes(node, position, operand)
                        self.of(index).num_bytes[position] += size
                elif maker not in visited and self.nodes[maker].kind is NodeKind.OP:
                    visited.add(maker)
                    frontier.append(maker)

    def read_bytes(self, node: Node, position: int, operand: int) -> float:
        size = float(self.values[operand].num_bytes)
        if position == 0 and node.name in _GATHERS:
            size = min(size, float(self.values[node.results[0]].num_bytes))
        elif position == 0 and _is_in_place(node):
            size = self.written_bytes(node, node.results[0])
        return size

    def stream_of(self, root: int) -> str:
        node = self.nodes[root]
        name = node.name
        if name.startswith("scatter"):
            return "scatter"
        if name in _GATHERS:
            return "gather"
        if name.startswith(_REDUCTIONS):
            return "reduce-last" if self.sums_last(node) else "reduce-first"
        if name == "transpose" and self.moves_last(node):
            return "transpose"
        if name in ("concatenate", "dynamic_update_slice", "copy", "convert_element_type", "pad"):
            return "copy"
        return "elementwise"

    def sums_last(self, node: Node) -> bool:
        dims = node.rule.operands[0] if node.rule.operands else ()
        kept = {f for own in node.rule.results for factors in own for f in factors}
        last = next((factors for factors in reversed(dims) if factors), ())
        return not any(f in kept for f in last)

    def moves_last(self, node: Node) -> bool:
        return node.rule.operands[0][-1:] != node.rule.results[0][-1:]


def _is_in_place(node: Node) -> bool:
    return node.name.startswith("scatter") or node.name == "dynamic_update_slice"

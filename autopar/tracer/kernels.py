"""Memory traffic of compiled kernels: from the nodes of a graph to the `Traffic` of every node.

Every value written to memory (`liveness` says which) ends a kernel. The kernel consists of the ops
between that value and the written values it is computed from. It reads each of these once, however
many of its ops use it; an op that several kernels recompute belongs to each. As XLA does on GPUs,
kernels merge if they go over the same large value and do not wait for each other: sums of the same
values, a residual beside an activation's result, the updates of a parameter and of its moments. An
elementwise kernel, or a sum over rows, also merges with the kernel that makes its operand; a value
that only the merged kernel reads is then not written at all.

A read is charged to the first op of the kernel that does it, a write to the op that makes the
value, so that op's sharding divides it. Updated state is written although it takes no new memory.
Products, convolutions and attention kernels have no traffic here: their times include it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar.ir.graph import Node, NodeKind, Traffic, Value
from autopar.tracer.costs import INSTRUCTIONS, UNFUSED, VIEWS

_FREE = ("scan_slice", "scan_stack", "iota", "random_seed")
_REDUCTIONS = ("reduce_", "arg", "cum")
_GATHERS = ("gather", "dynamic_slice")
_MAX_MEMBERS = 256  # ops of a kernel, in the search for its sources
_MAX_BETWEEN = 64  # kernels between two that may merge, in the search for a dependence
_SMALL = 2**16  # elements of a value that is too small to merge kernels


@dataclass(eq=False)
class _Kernel:
    """sources: the written values it reads; size: elements of the largest value it goes over;
    members: all its ops; roots: those that write."""

    first: int
    last: int
    region: str
    size: int
    may_grow: bool
    sources: set[int] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    roots: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _OpTraffic:
    """What kernels do in one op: bytes per operand and result, and by kind of access."""

    num_bytes: list[float]
    num_kernels: float = 0.0
    instructions: float = 0.0
    by_stream: dict[str, float] = field(default_factory=dict)


def node_traffic(
    nodes: Sequence[Node],
    values: Sequence[Value],
    in_memory: Collection[int],
    in_place: Collection[int | None],
    outputs: Collection[int | None],
) -> list[Traffic | None]:
    """`in_place`: updated state, which takes over the memory of the old one."""
    return _Kernels(nodes, values, in_memory, in_place, outputs).traffic()


class _Kernels:
    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        in_memory: Collection[int],
        in_place: Collection[int | None],
        outputs: Collection[int | None],
    ) -> None:
        self.nodes, self.values = nodes, values
        self.producer = {v: i for i, node in enumerate(nodes) for v in node.results}
        self.views = [n.kind in (NodeKind.USE, NodeKind.FINISH) or n.name in VIEWS for n in nodes]
        self.source = self.sources_of_views()
        self.elements = [prod(value.shape) for value in values]
        finish = {n.operands[0]: n.results[0] for n in nodes if n.kind is NodeKind.FINISH}
        self.written = {v for v in in_memory if not self.views[self.producer[v]]}
        updated, kept = set(in_place), {*outputs, *in_place}
        self.written |= {v for v in self.producer if finish.get(v, v) in updated}
        self.is_result = {v for v in self.producer if finish.get(v, v) in kept}
        self.users: dict[int, list[int]] = {}  # a written value -> ops that read it
        for index, node in enumerate(nodes):
            for operand in () if self.views[index] else node.operands:
                self.users.setdefault(self.source[operand], []).append(index)
        self.parts: dict[int, _OpTraffic] = {}
        self.kernels: list[_Kernel] = []
        self.writer: dict[int, _Kernel] = {}  # a written value -> its kernel
        self.readers: dict[int, list[_Kernel]] = {}  # a large written value -> its kernels

    def sources_of_views(self) -> list[int]:
        """Per value, the one that it is a view of, or itself."""
        source = list(range(len(self.values)))
        for node, is_view in zip(self.nodes, self.views, strict=True):
            if is_view and node.operands:
                for value in node.results:
                    source[value] = source[node.operands[0]]
        return source

    def is_source(self, value: int) -> bool:
        return value in self.written or self.nodes[self.producer[value]].kind is NodeKind.INPUT

    def traffic(self) -> list[Traffic | None]:
        for index, node in enumerate(self.nodes):
            if node.kind is NodeKind.OP and not self.written.isdisjoint(node.results):
                self.add_root(index)
        for kernel in self.kernels:
            self.charge(kernel)
        return [self.traffic_of(index) for index in range(len(self.nodes))]

    def traffic_of(self, index: int) -> Traffic | None:
        part = self.parts.get(index)
        if part is None or self.nodes[index].work is not None:
            return None
        if not (any(part.num_bytes) or part.num_kernels or part.instructions):
            return None
        by_stream = part.by_stream
        stream = max(by_stream, key=by_stream.__getitem__) if by_stream else "elementwise"
        return Traffic(tuple(part.num_bytes), stream, part.num_kernels, part.instructions)

    # -- which ops are one kernel

    def add_root(self, root: int) -> None:
        node = self.nodes[root]
        sources, members = self.made_from(root)
        size = max((self.elements[v] for v in (*sources, *node.results)), default=0)
        fuses = node.work is None and node.name not in UNFUSED
        kernel = self.kernel_for(node, sources, size) if fuses else None
        if kernel is None:
            kernel = _Kernel(root, root, node.region, size, fuses)
            self.kernels.append(kernel)
        kernel.last = root
        kernel.roots.append(root)
        kernel.sources |= sources
        kernel.members |= members
        for value in node.results:
            if value in self.written:
                self.writer[value] = kernel
        for value in sources:
            if fuses and self.elements[value] > _SMALL:
                readers = self.readers.setdefault(value, [])
                if kernel not in readers:
                    readers.append(kernel)

    def made_from(self, root: int) -> tuple[set[int], set[int]]:
        """(the written values that a root is computed from, the ops between)."""
        sources: set[int] = set()
        members, frontier = {root}, [root]
        while frontier and len(members) < _MAX_MEMBERS:
            for operand in self.nodes[frontier.pop()].operands:
                value = self.source[operand]
                maker = self.producer[value]
                if self.is_source(value):
                    sources.add(value)
                elif maker not in members and self.nodes[maker].kind is NodeKind.OP:
                    members.add(maker)
                    frontier.append(maker)
        return sources, members

    def kernel_for(self, node: Node, sources: set[int], size: int) -> _Kernel | None:
        """An existing kernel that a root can join, if there is one."""
        joins = self.sums_rows(node) or not node.name.startswith(_REDUCTIONS)
        candidates: list[_Kernel] = []
        for value in sources:
            if self.elements[value] < size or size <= _SMALL:
                continue
            candidates += self.readers.get(value, ())
            writer = self.writer.get(value)
            if joins and writer is not None and self.is_elementwise(value):
                candidates.append(writer)
        for kernel in reversed(candidates):
            matches = kernel.may_grow and kernel.region == node.region and kernel.size == size
            if matches and not self.waits(sources, kernel, joins):
                return kernel
        return None

    def is_elementwise(self, value: int) -> bool:
        name = self.nodes[self.producer[value]].name
        return name not in UNFUSED and not name.startswith(_REDUCTIONS)

    def waits(self, sources: set[int], kernel: _Kernel, joins: bool) -> bool:
        """Whether a root with these sources has to wait for a kernel to end."""
        frontier = []
        for value in sources:
            writer = self.writer.get(value)
            if writer is kernel:
                if not (
                    joins and self.is_elementwise(value) and self.elements[value] == kernel.size
                ):
                    return True
            elif writer is not None:
                frontier.append(writer)
        seen = set(map(id, frontier))
        while frontier:
            earlier = frontier.pop()
            if earlier is kernel or len(seen) > _MAX_BETWEEN:
                return True
            if earlier.last < kernel.first:
                continue
            for value in earlier.sources:
                writer = self.writer.get(value)
                if writer is not None and id(writer) not in seen:
                    seen.add(id(writer))
                    frontier.append(writer)
        return False

    # -- which op is charged

    def part(self, index: int) -> _OpTraffic:
        if index not in self.parts:
            node = self.nodes[index]
            self.parts[index] = _OpTraffic([0.0] * (len(node.operands) + len(node.results)))
        return self.parts[index]

    def charge(self, kernel: _Kernel) -> None:
        first = self.nodes[kernel.first]
        if first.work is not None or first.name in _FREE:
            return
        stream = self.stream_of(kernel)
        made = {v for root in kernel.roots for v in self.nodes[root].results}
        seen: set[int] = set()
        for index in sorted(kernel.members):
            node, part = self.nodes[index], self.part(index)
            part.instructions += self.instructions(node)
            for position, operand in enumerate(node.operands):
                value = self.source[operand]
                if value not in seen and value not in made and self.is_source(value):
                    seen.add(value)
                    self.add(part, position, self.read_bytes(node, position, operand), stream)
            for position, value in enumerate(node.results):
                if value in made and self.is_stored(value, kernel):
                    size = self.written_bytes(node, value)
                    self.add(part, len(node.operands) + position, size, stream)
        self.part(kernel.first).num_kernels += 1.0

    def is_stored(self, value: int, kernel: _Kernel) -> bool:
        if value not in self.written:
            return False
        users = self.users.get(value, ())
        return value in self.is_result or not users or not kernel.members.issuperset(users)

    def add(self, part: _OpTraffic, position: int, num_bytes: float, stream: str) -> None:
        part.num_bytes[position] += num_bytes
        part.by_stream[stream] = part.by_stream.get(stream, 0.0) + num_bytes

    def instructions(self, node: Node) -> float:
        if node.name in UNFUSED or node.name in VIEWS:
            return 0.0
        values = node.operands if node.name.startswith(_REDUCTIONS) else node.results
        elements = max((self.elements[v] for v in values), default=0)
        return INSTRUCTIONS.get(node.name, 1.0) * elements

    def written_bytes(self, node: Node, value: int) -> float:
        size = float(self.values[value].num_bytes)
        if node.part_bytes is not None and _is_in_place(node):
            # In place: it neither reads nor writes the rest of the array.
            size = min(size, node.part_bytes)
        return size

    def read_bytes(self, node: Node, position: int, operand: int) -> float:
        size = float(self.values[operand].num_bytes)
        part = node.part_bytes if position == 0 else None
        return size if part is None else min(size, part)

    def stream_of(self, kernel: _Kernel) -> str:
        """The hardest kind of access in a kernel."""
        nodes = [self.nodes[root] for root in kernel.roots]
        names = [node.name for node in nodes]
        if any(name.startswith("scatter") for name in names):
            return "scatter"
        sums = [node for node in nodes if node.name.startswith(_REDUCTIONS)]
        if sums:
            return "reduce-first" if any(map(self.sums_rows, sums)) else "reduce-last"
        if any(name in _GATHERS for name in names):
            return "gather"
        inside = (self.nodes[index] for index in kernel.members)
        if any(node.name == "transpose" and self.moves_last(node) for node in inside):
            return "transpose"
        plain = ("concatenate", "dynamic_update_slice", "copy", "convert_element_type", "pad")
        return "copy" if all(name in plain for name in names) else "elementwise"

    def sums_rows(self, node: Node) -> bool:
        """A reduction that keeps the last dimension."""
        if not node.name.startswith(_REDUCTIONS) or not node.rule.operands:
            return False
        in_results = {f for dims in node.rule.results for factors in dims for f in factors}
        last = next((factors for factors in reversed(node.rule.operands[0]) if factors), ())
        return any(f in in_results for f in last)

    def moves_last(self, node: Node) -> bool:
        return bool(node.operands) and node.rule.operands[0][-1:] != node.rule.results[0][-1:]


def _is_in_place(node: Node) -> bool:
    return node.name.startswith("scatter") or node.name == "dynamic_update_slice"

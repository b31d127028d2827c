"""Memory traffic of compiled kernels: from the nodes of a graph to the `Traffic` of every node.

Every value written to memory (`liveness` says which) ends a kernel. The kernel consists of the ops
between that value and the written values it is computed from. It reads each of these once, however
many of its ops use it; an op that several kernels recompute belongs to each. As XLA does on GPUs,
kernels merge if they go over the same large value and do not wait for each other: sums of the same
values, a residual beside an activation's result, the updates of a parameter and of its moments. A
kernel that concatenates what it is made from has one result, so it merges with no other. An
elementwise kernel, or a sum over rows, also merges with the kernel that makes its operand; a value
that only the merged kernel reads is then not written at all. A kernel that sums along rows holds
them in a tile, unless they are long, so a second sum along them that needs the first is made there
too: a softmax's maximum and sum. In a softmax's tile, and in that of its gradient, are also the
values that need these sums, if no other kernel does.

What a scan stacks is written twice: as zeros, and by the copy of each trip's slice. A slice of what
it goes over is copied if several kernels read it.

A read is charged to the first op of the kernel that does it, a write to the op that makes the
value, so that op's sharding divides it. Updated state is written although it takes no new memory.
Products, convolutions and attention kernels have no traffic here: their times include it, but for
the copies that ragged products need.

By data sheets, an op is priced by what it touches (`touched_bytes`), but that of an update by these
kernels (`GraphTraffic.of_updates`): they are few, of many ops, which hand moments to one another.

A scatter of 16-bit numbers takes as long as the updates of a row, which wait for each other. A
kernel's arithmetic runs beside its traffic, so only what takes longer is charged, to the ops that
do it. In a tile that holds rows between two sums they take turns, so all of it is. An op is
computed once for all who read its result at the same index, and again for each who reads it at
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autopar.ir.graph import Node, NodeKind, Traffic, Value
from autopar.tracer.costs import MAX_TILE_ROW, UNFUSED, VIEWS
from autopar.tracer.ragged_copies import ragged_reads
from autopar.tracer.regions import UPDATE

_FREE = ("scan_slice", "iota", "random_seed")
_REDUCTIONS = ("reduce_", "arg", "cum")
_GATHERS = ("gather", "dynamic_slice")
_MAX_MEMBERS = 256  # ops of a kernel, in the search for its sources
_MAX_BETWEEN = 64  # kernels between two that may merge, in the search for a dependence
_SMALL = 2**16  # elements of a value that is too small to merge kernels
# Instructions of a GPU's lanes per element; what is not listed takes one.
_LANE_OPS = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "copy", "select_and_gather_add"), 0.0),
    "convert_element_type": 1.5,
    "div": 8.0,  # by another value; by a constant it is a product
    "rem": 12.0,
    **dict.fromkeys(("sqrt", "rsqrt", "exp", "exp2"), 6.0),
    **dict.fromkeys(("log", "expm1", "logistic"), 16.0),
    **dict.fromkeys(("tanh", "erf", "log1p"), 30.0),
    **dict.fromkeys(("sin", "cos", "tan", "cbrt", "atan2", "erf_inv", "acos", "asin"), 40.0),
    **dict.fromkeys(("threefry2x32", "random_bits"), 60.0),
    "pow": 80.0,
    **dict.fromkeys(("slice", "transpose", "concatenate", "rev", "dynamic_slice"), 3.0),
    **dict.fromkeys(("pad", "gather"), 6.0),
}
_LOAD, _LOAD_ELSEWHERE = 1.0, 4.0  # of an element at the index of the result, or at another
_MOVES = frozenset(
    (
        *("slice", "dynamic_slice", "gather", "pad", "concatenate", "transpose", "rev"),
        *("reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("dynamic_update_slice", "scatter", "scatter-add"),
    )
)
_PARTS = ("pad", "concatenate")  # every operand makes a part of the result
_LANE_OPS_PER_BYTE = 5.0  # that a GPU does in the time of moving one byte
_SMOOTH = 4.0  # the larger, the more the slower of arithmetic and traffic decides alone
_GROUPED = 0.25  # of the lanes' rate, for convolutions in groups
_SWAP_BYTES = 5e6  # scattered in the time of an update for which others of its row wait
_SORTS = ("sort", "top_k", "argsort")
_COMPARISON = 27.0  # instructions, of two elements of a row with what is sorted beside them
_SINGLE_LOADS = 2.0  # bytes of a tile count so often if its rows are aligned to 2 bytes only
_HELD_LOAD = 26.0  # instructions for each number of such rows that a tile holds between two sums


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
    exposed: float = 0.0
    by_stream: dict[str, float] = field(default_factory=dict)


class GraphTraffic(NamedTuple):
    """by_node: of each node; of_updates: nodes that are in kernels of the update, which may make
    gradients on the way."""

    by_node: list[Traffic | None]
    of_updates: frozenset[int]


def node_traffic(
    nodes: Sequence[Node],
    values: Sequence[Value],
    in_memory: Collection[int],
    in_place: Collection[int | None],
    outputs: Collection[int | None],
    zeros: Collection[int] = (),
) -> GraphTraffic:
    """`in_place`: updated state, which takes over the memory of the old one; `zeros`: values known
    to be zero."""
    kernels = _Kernels(nodes, values, in_memory, in_place, outputs, zeros)
    return GraphTraffic(kernels.traffic(), kernels.of_updates())


class _Kernels:
    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        in_memory: Collection[int],
        in_place: Collection[int | None],
        outputs: Collection[int | None],
        zeros: Collection[int],
    ) -> None:
        self.nodes, self.values = [_without_product(node) for node in nodes], values
        self.producer = {v: i for i, node in enumerate(nodes) for v in node.results}
        self.views = [n.kind in (NodeKind.USE, NodeKind.FINISH) or n.name in VIEWS for n in nodes]
        self.source = self.sources_of_views()
        self.elements = [prod(value.shape) for value in values]
        finish = {n.operands[0]: n.results[0] for n in nodes if n.kind is NodeKind.FINISH}
        self.written = {v for v in in_memory if not self.views[self.producer[v]]}
        self.merge_zeros(zeros)
        updated, kept = set(in_place), {*outputs, *in_place}
        self.written |= {v for v in self.producer if finish.get(v, v) in updated}
        self.is_result = {v for v in self.producer if finish.get(v, v) in kept}
        self.users: dict[int, list[int]] = {}  # a written value -> ops that read it
        for index, node in enumerate(nodes):
            for operand in () if self.views[index] else node.operands:
                self.users.setdefault(self.source[operand], []).append(index)
        self.folded = self.folded_values()
        inputs = (v for node in nodes if node.kind is NodeKind.INPUT for v in node.results)
        self.sources = self.written.union(inputs)  # what kernels read from memory
        self.along_rows = [self.sums_along_rows(node) for node in nodes]
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

    def merge_zeros(self, zeros: Collection[int]) -> None:
        """XLA writes all zeros of a type once, but for those that scatters fill."""
        filled = {n.operands[0] for n in self.nodes if n.name.startswith("scatter") and n.operands}
        first: dict[tuple[tuple[int, ...], str], int] = {}
        same: dict[int, int] = {}
        for value in sorted(self.written.intersection(zeros).difference(filled)):
            kind = (self.values[value].shape, self.values[value].dtype)
            same[value] = first.setdefault(kind, value)
        self.source = [same.get(source, source) for source in self.source]
        self.written -= {value for value, source in same.items() if value != source}

    def folded_values(self) -> set[int]:
        """Small values made of constants alone, which XLA computes when it compiles."""
        folded: set[int] = set()
        for node in self.nodes:
            if node.kind is NodeKind.OP and folded.issuperset(node.operands):
                folded.update(v for v in node.results if self.elements[v] <= _SMALL)
        return folded

    def traffic(self) -> list[Traffic | None]:
        for index, node in enumerate(self.nodes):
            if node.kind is NodeKind.OP and not self.written.isdisjoint(node.results):
                self.add_root(index)
        for kernel in self.kernels:
            self.charge(kernel)
        self.charge_masks()
        self.charge_slices()
        return [self.traffic_of(index) for index in range(len(self.nodes))]

    def of_updates(self) -> frozenset[int]:
        updates = [kernel for kernel in self.kernels if kernel.region == UPDATE]
        members = frozenset[int]().union(*(kernel.members for kernel in updates))
        return frozenset(index for index in members if self.nodes[index].work is None)

    def traffic_of(self, index: int) -> Traffic | None:
        part = self.parts.get(index)
        if part is None or (self.nodes[index].work is not None and not part.num_kernels):
            return None
        if not (any(part.num_bytes) or part.num_kernels or part.exposed):
            return None
        by_stream = part.by_stream
        stream = max(by_stream, key=by_stream.__getitem__) if by_stream else "elementwise"
        return Traffic(tuple(part.num_bytes), stream, part.num_kernels, part.exposed)

    # -- which ops are one kernel

    def add_root(self, root: int) -> None:
        node = self.nodes[root]
        sources, members = self.made_from(root)
        size = max((self.elements[v] for v in (*sources, *node.results)), default=0)
        fuses = node.work is None and node.name not in UNFUSED
        fuses = fuses and not self.concatenates(members, size)
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

    def concatenates(self, members: set[int], size: int) -> bool:
        """Whether a kernel puts arrays together, as the gradients of layers whose state is a stack:
        XLA gives it a single result."""
        concatenated = [self.nodes[i] for i in members if self.nodes[i].name == "concatenate"]
        return any(self.elements[node.results[0]] == size for node in concatenated)

    def made_from(self, root: int) -> tuple[set[int], set[int]]:
        """(the written values that a root is computed from, the ops between)."""
        sources: set[int] = set()
        members, frontier = {root}, [root]
        while frontier and len(members) < _MAX_MEMBERS:
            for operand in self.nodes[frontier.pop()].operands:
                value = self.source[operand]
                maker = self.producer[value]
                if value in self.sources:
                    sources.add(value)
                elif maker not in members and self.nodes[maker].kind is NodeKind.OP:
                    members.add(maker)
                    frontier.append(maker)
        return sources, members

    def kernel_for(self, node: Node, sources: set[int], size: int) -> _Kernel | None:
        """An existing kernel that a root can join, if there is one."""
        joins = self.sums_rows(node) or not node.name.startswith(_REDUCTIONS)
        candidates: list[_Kernel] = []
        makers: list[_Kernel] = []
        for value in sources:
            if self.elements[value] < size or size <= _SMALL:
                continue
            candidates += self.readers.get(value, ())
            writer = self.writer.get(value)
            if joins and writer is not None and self.is_elementwise(value):
                makers.append(writer)
        candidates += makers
        # The one that shares most with the root; of equal ones, the last.
        shared = {k: len(k.sources & sources) + (k in makers) for k in candidates}
        for kernel in sorted(reversed(candidates), key=lambda k: -shared[k]):
            matches = kernel.may_grow and kernel.region == node.region and kernel.size == size
            if matches and not self.waits(node, sources, kernel, joins):
                return kernel
        return None

    def is_elementwise(self, value: int) -> bool:
        name = self.nodes[self.producer[value]].name
        return name not in UNFUSED and not name.startswith(_REDUCTIONS)

    def waits(self, root: Node, sources: set[int], kernel: _Kernel, joins: bool) -> bool:
        """Whether a root with these sources has to wait for a kernel to end."""
        frontier = []
        for value in sources:
            writer = self.writer.get(value)
            if writer is kernel:
                is_made_there = (
                    joins and self.is_elementwise(value) and self.elements[value] == kernel.size
                )
                if not is_made_there and not (
                    self.share_rows(root, value) or self.is_in_tile(root, value, kernel)
                ):
                    return True
            elif writer is not None:
                frontier.append(writer)
        seen = set(frontier)
        while frontier:
            earlier = frontier.pop()
            if earlier is kernel or len(seen) > _MAX_BETWEEN:
                return True
            if earlier.last < kernel.first:
                continue
            for value in earlier.sources:
                writer = self.writer.get(value)
                if writer is kernel and self.is_in_tile(root, value, kernel):
                    continue
                if writer is not None and writer not in seen:
                    seen.add(writer)
                    frontier.append(writer)
        return False

    def share_rows(self, root: Node, value: int) -> bool:
        """Whether a root and the maker of a value sum along the same rows, and these are short."""
        maker = self.nodes[self.producer[value]]
        if not (self.sums_along_rows(root) and self.sums_along_rows(maker)):
            return False
        shape, other = (self.values[node.operands[0]].shape for node in (root, maker))
        return shape == other and shape[-1] <= MAX_TILE_ROW

    def is_in_tile(self, root: Node, value: int, kernel: _Kernel) -> bool:
        """Whether an elementwise root is made in the tile of a softmax, in either pass: from a sum
        or maximum along its rows that no other kernel reads."""
        is_sum = self.along_rows[self.producer[value]]
        is_elementwise = root.name not in UNFUSED and not root.name.startswith(_REDUCTIONS)
        shape = self.values[root.results[0]].shape
        if not is_sum or not is_elementwise or not shape or shape[-1] > MAX_TILE_ROW:
            return False
        has_exponentials = root.name == "exp" or any(
            self.nodes[index].name == "exp" for index in kernel.members
        )
        if not has_exponentials:
            return False
        made = {v for index in kernel.roots for v in self.nodes[index].results}
        return self.written_from(value) <= made.union(root.results)

    def written_from(self, value: int) -> set[int]:
        """The written values that kernels make of a sum along rows, but for those with one element
        per row, and of these."""
        found: set[int] = set()
        frontier, seen = [value], {value}
        while frontier:
            for index in self.users.get(frontier.pop(), ()):
                for made in self.nodes[index].results:
                    if made in self.written and self.elements[made] > self.elements[value]:
                        found.add(made)
                    elif made not in seen:
                        seen.add(made)
                        frontier.append(made)
        return found

    # -- which op is charged

    def part(self, index: int) -> _OpTraffic:
        part = self.parts.get(index)
        if part is None:
            node = self.nodes[index]
            part = _OpTraffic([0.0] * (len(node.operands) + len(node.results)))
            self.parts[index] = part
        return part

    def charge(self, kernel: _Kernel) -> None:
        first = self.nodes[kernel.first]
        if first.name == "scan_stack":
            self.charge_stack(kernel.first)
            return
        if first.work is not None or first.name in _FREE:
            return
        stream = self.stream_of(kernel)
        made = {v for root in kernel.roots for v in self.nodes[root].results}
        is_softmax = self.is_softmax(kernel)
        seen: set[int] = set()
        moved = 0.0
        for index in sorted(kernel.members):
            node, part = self.nodes[index], self.part(index)
            for position, operand in enumerate(node.operands):
                value = self.source[operand]
                if value in self.sources and value not in seen and value not in made:
                    seen.add(value)
                    size = self.read_bytes(node, position, operand)
                    size *= self.load_factor(value) if is_softmax else 1.0
                    moved += self.add(part, position, size, stream)
            for position, value in enumerate(node.results):
                if value in made and self.is_stored(value, kernel):
                    size = self.written_bytes(node, value)
                    size *= self.load_factor(value) if is_softmax else 1.0
                    moved += self.add(part, len(node.operands) + position, size, stream)
        self.part(kernel.first).num_kernels += 1.0
        self.charge_arithmetic(kernel, made, moved)

    def is_softmax(self, kernel: _Kernel) -> bool:
        """Whether a kernel makes exponentials, and sums along rows or uses such sums."""
        if not any(self.nodes[index].name == "exp" for index in kernel.members):
            return False
        makers = kernel.members.union(self.producer[value] for value in kernel.sources)
        return any(self.along_rows[index] for index in makers)

    def load_factor(self, value: int) -> float:
        shape = self.values[value].shape
        if not shape or not 1 < shape[-1] <= MAX_TILE_ROW:
            return 1.0
        row_bytes = self.values[value].num_bytes * shape[-1] // max(1, self.elements[value])
        return _SINGLE_LOADS if row_bytes % 4 else 1.0

    def charge_masks(self) -> None:
        """Copies that XLA makes for ragged products (`ragged_copies`), and of matrices that do not
        lie one below the other."""
        reads = list(ragged_reads(self.nodes, self.values))
        masked: set[int] = set()
        for read in reads:
            value = self.source[self.nodes[read.node].operands[read.position]]
            if read.contracts_rows and value not in masked:
                masked.add(value)
                self.add_copy(read.node, read.position, 1.0, read.num_groups, "elementwise")
        turned: set[int] = set()
        for read in reads:
            if read.contracts_rows:
                continue
            node = self.nodes[read.node]
            value = self.source[node.operands[0]]
            if value not in turned:
                turned.add(value)
                written = read.num_groups if value in masked else 1.0
                self.add_copy(read.node, 0, written, read.num_groups, "transpose")
            dims = sorted(d for _, d in node.work.sizes[3]) if node.work else []
            if dims[-1] - dims[0] >= len(dims):  # matrices that do not lie one below the other
                self.add_copy(read.node, 1, 1.0, 1.0, "transpose")

    def add_copy(self, index: int, position: int, read: float, written: float, stream: str) -> None:
        """A kernel before a node that copies its operand, read and written so often."""
        part = self.part(index)
        size = float(self.values[self.nodes[index].operands[position]].num_bytes)
        self.add(part, position, (read + written) * size, stream)
        part.num_kernels += 1.0

    def charge_stack(self, index: int) -> None:
        """A stack is filled with zeros; then each trip copies its slice into it, unless an
        elementwise kernel makes the slice for the stack alone and writes it there."""
        (slice_,) = self.nodes[index].operands
        size, part = float(self.values[slice_].num_bytes), self.part(index)
        value = self.source[slice_]
        is_made_there = self.is_elementwise(value) and len(self.users.get(value, ())) == 1
        if is_made_there and self.nodes[self.producer[value]].kind is NodeKind.OP:
            self.add(part, 1, size, "copy")
            return
        self.add(part, 0, size, "copy")
        self.add(part, 1, 2 * size, "copy")
        part.num_kernels += 1.0

    def charge_slices(self) -> None:
        """A trip's slice of a stack that several kernels read is copied first."""
        readers: Counter[int] = Counter()
        for kernel in self.kernels:
            if self.nodes[kernel.first].work is None and self.nodes[kernel.first].name not in _FREE:
                readers.update(kernel.members)
                readers.update({self.producer[value] for value in kernel.sources})
        for index, count in readers.items():
            node = self.nodes[index]
            if node.name != "scan_slice" or count < 2:
                continue
            part, size = self.part(index), float(self.values[node.results[0]].num_bytes)
            self.add(part, len(node.operands), 2 * size, "copy")
            part.num_kernels += 1.0

    def charge_arithmetic(self, kernel: _Kernel, made: set[int], moved: float) -> None:
        lane_ops = self.lane_ops(kernel, made)
        held = self.held_sum(kernel)
        if held is not None:
            lane_ops[held] = lane_ops.get(held, 0.0) + self.held_loads(kernel, held, made)
        total = sum(lane_ops.values()) / _LANE_OPS_PER_BYTE
        if total <= 0.0:
            return
        longest = max(total, moved)
        parts = ((total / longest) ** _SMOOTH, (moved / longest) ** _SMOOTH)
        exposed = longest * sum(parts) ** (1 / _SMOOTH) - moved
        if held is not None:
            exposed = total
        for index, count in lane_ops.items():
            self.part(index).exposed += exposed * count / _LANE_OPS_PER_BYTE / total

    def held_sum(self, kernel: _Kernel) -> int | None:
        """The last of several sums between which a softmax's kernel, of either pass, holds rows.
        XLA finds their maximum again wherever it makes the exponentials."""
        if not self.is_softmax(kernel):
            return None
        own = {index for index in kernel.members if self.along_rows[index]}
        read = {self.producer[value] for value in kernel.sources}
        again = {i for i in read if self.along_rows[i] and self.nodes[i].name == "reduce_max"}
        if not own or len(own | again) < 2:
            return None
        last = max(own)
        shape = self.values[self.nodes[last].operands[0]].shape
        return last if shape[-1] <= MAX_TILE_ROW else None

    def held_loads(self, kernel: _Kernel, held: int, made: set[int]) -> float:
        """The instructions that hold rows which are loaded number by number, padded to a power of
        two."""
        summed = self.values[self.nodes[held].operands[0]].shape
        padded = (1 << (summed[-1] - 1).bit_length()) / max(summed[-1], 1)
        stored = {value for value in made if self.is_stored(value, kernel)}
        single = sum(
            self.elements[value]
            for value in stored.union(kernel.sources - made)
            if self.elements[value] >= prod(summed) and self.load_factor(value) > 1.0
        )
        return padded * _HELD_LOAD * single

    def lane_ops(self, kernel: _Kernel, made: set[int]) -> dict[int, float]:
        """Per op of the kernel, the instructions of its lanes."""
        here = {value: float(self.elements[value]) for value in made}
        elsewhere: dict[int, float] = {}
        found: dict[int, float] = {}
        # A sum along rows keeps them in a tile, with what is spread along them.
        is_tiled = any(self.along_rows[index] for index in kernel.members)
        for index in sorted(kernel.members, reverse=True):
            node = self.nodes[index]
            times = 0.0
            for value in node.results:
                times = max(times, here.get(value, 0.0) + elsewhere.get(value, 0.0))
            if not times or self.views[index] or self.folded.issuperset(node.results):
                continue
            if node.name in UNFUSED and node.name not in _LANE_OPS:
                found[index] = self.unfused_lane_ops(node)
                continue
            reads = 1.0
            if node.name.startswith(_REDUCTIONS) and node.operands:
                size = max(self.elements[operand] for operand in node.operands)
                reads = max(1.0, size / max(times, 1.0))
            is_by_constant = node.name == "div" and len(node.operands) < 2
            count = times * reads * (1.0 if is_by_constant else _LANE_OPS.get(node.name, 1.0))
            spreads = node.name == "broadcast_in_dim"
            may_move = not is_tiled if spreads else node.name in _MOVES
            for operand in node.operands:
                value, elements = self.source[operand], self.elements[operand]
                if value in self.folded:
                    continue
                needed = times * reads
                if is_tiled and spreads:
                    needed = min(needed, float(elements))
                elif node.name in _PARTS:
                    needed *= min(1.0, elements / max(self.elements[node.results[0]], 1))
                moves = may_move and elements > 1
                if value in self.sources and value not in made:
                    count += (_LOAD_ELSEWHERE if moves else _LOAD) * needed
                elif moves:
                    elsewhere[value] = elsewhere.get(value, 0.0) + needed
                else:
                    here[value] = max(here.get(value, 0.0), needed)
            found[index] = count
        return found

    def unfused_lane_ops(self, node: Node) -> float:
        """Of a convolution in groups, and of rows that are sorted by a network of comparisons,
        padded to a power of two."""
        if node.name == "conv_general_dilated":
            return node.flops / 2 / _GROUPED
        if node.name not in _SORTS or not node.operands:
            return 0.0
        shape = self.values[node.operands[0]].shape
        length = shape[-1] if shape else 1
        steps = (length - 1).bit_length()
        return _COMPARISON * prod(shape[:-1]) * 2**steps * steps * (steps + 1) / 4

    def is_stored(self, value: int, kernel: _Kernel) -> bool:
        if value not in self.written:
            return False
        users = self.users.get(value, ())
        return value in self.is_result or not users or not kernel.members.issuperset(users)

    def add(self, part: _OpTraffic, position: int, num_bytes: float, stream: str) -> float:
        part.num_bytes[position] += num_bytes
        part.by_stream[stream] = part.by_stream.get(stream, 0.0) + num_bytes
        return num_bytes

    def written_bytes(self, node: Node, value: int) -> float:
        size = node.passes * self.values[value].num_bytes
        is_narrow = self.values[value].dtype in ("bfloat16", "float16")
        if node.part_bytes is not None and node.name.startswith("scatter-") and is_narrow:
            # Compared and swapped one by one, however small the array is.
            per_row = node.part_bytes / max(self.values[value].num_bytes, 1)
            return max(node.part_bytes, _SWAP_BYTES * max(0.0, per_row - 1))
        if node.part_bytes is not None and _is_in_place(node):
            # In place: it neither reads nor writes the rest of the array.
            size = min(size, node.part_bytes)
        return size

    def read_bytes(self, node: Node, position: int, operand: int) -> float:
        size = node.passes * self.values[operand].num_bytes
        if node.name == "scan_slice":  # a trip's part of the stack
            return float(self.values[node.results[0]].num_bytes)
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
        if any(map(self.is_transpose, inside)):
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

    def sums_along_rows(self, node: Node) -> bool:
        return node.name.startswith(_REDUCTIONS) and not self.sums_rows(node)

    def is_transpose(self, node: Node) -> bool:
        """Whether a node moves the last dimension, and no product does that for it: its matrices
        are written in either order, but its batch stays first."""
        if node.name != "transpose" or not node.operands:
            return False
        maker = self.nodes[self.producer[self.source[node.operands[0]]]]
        if maker.name == "dot_general" and len(maker.operands) == 2:
            one, other = ({f for dim in dims for f in dim} for dims in maker.rule.operands)
            num_batched = len(one & other - maker.rule.reduction)
            order = [node.rule.operands[0].index(factors) for factors in node.rule.results[0]]
            if order[:num_batched] == list(range(num_batched)):
                return False
        return node.rule.operands[0][-1:] != node.rule.results[0][-1:]


def _without_product(node: Node) -> Node:
    """A product of a vector, or one that sums nothing, is arithmetic on lanes (`op_sizes`)."""
    if node.name != "dot_general" or node.work is not None or len(node.operands) != 2:
        return node
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    summed = {f for dims in node.rule.operands[0] for f in dims} - kept
    return node.having(name="reduce_sum" if summed else "mul")


def _is_in_place(node: Node) -> bool:
    return node.name.startswith("scatter") or node.name == "dynamic_update_slice"

"""Which values XLA for GPUs writes to memory: from a `Dataflow` to a `Fusion`.

The result of a product, reduction or gather is written to memory; an elementwise value is written
if such an op reads it. Otherwise each reader recomputes it, if that moves fewer bytes than writing
it once (`_is_written`). Rows that are stacked, such as the gradients of layers that a scan ran
over, are read where they lie by elementwise readers of the stack. A reshape, a barrier or a use is
a view and has no memory of its own, nor has what is made inside another op (`folding`). Zeros that
a scatter needs in memory are merged with all other zeros of that type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from math import prod
from typing import NamedTuple

from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.graph import Node, NodeKind, Value
from autopar.tracer.costs import INSTRUCTIONS, MAX_TILE_ROW, REDUCTIONS, UNFUSED, fits_tiles
from autopar.tracer.dataflow import Dataflow, Type
from autopar.tracer.kernel_work import MOVES, work_of
from autopar.tracer.regions import UPDATE
from autopar.tracer.run_order import is_scatter_add

# In `UNFUSED`, but XLA takes the slice inside its reader.
_FUSED_SLICES = {"scan_slice", "dynamic_slice", "gather"}
_READS_MEMORY = UNFUSED - _FUSED_SLICES
# A value this expensive (in instructions per element) that both passes need has at least this many
# readers: one forward, and backward the slope and its factors.
_EXPENSIVE = 20.0
_CROSSING_READERS = 4
# cuBLAS wants dimensions of these types in multiples of 8.
_PADDED_TYPES, _PADDED_TO = ("bfloat16", "float16"), 8
_MAX_SEEN = 32  # values, in a search through elementwise readers


class ValueReader(NamedTuple):
    """A node that reads a value, and whether it needs it in memory."""

    node: int
    unfused: bool


class Fusion:
    """What is in memory and what is fused.

    written:    values that have memory of their own.
    made_from:  written value -> the written ones that the kernel that makes it reads.
    readers:    value -> its readers, those of its views among them.
    epilogues:  addition or multiplication -> the product that it is a part of.
    transposed: values written by elementwise ops with a transpose among them.
    padded:     values that products of 16-bit numbers read with zeros at the end of a dimension.
                Other readers do not read that array.
    """

    def __init__(
        self,
        flow: Dataflow,
        scatters: Mapping[int, int],
        products: Mapping[int, int],
        outputs: Collection[int],
        in_place: Collection[int],
        copied: Collection[int] = (),
        rate: float = INSTRUCTIONS_PER_BYTE,
        fuses_updates: bool = True,
        is_split: bool = False,
    ) -> None:
        """`scatters` and `products`: those folded, with the ops that they are made in; `in_place`:
        outputs that take over the buffer of an input; `copied`: values that are written in
        another order of dimensions; `rate`: instructions in the time of moving a byte;
        `fuses_updates`: scatters make their updates and indices themselves, what gathers pick many
        times is written, and so are dear values that layers or sums compute again, and what each of
        several slices computes counts (`kernel_work`); prices know none of it; `is_split`: several
        devices have parts of all values."""
        self.flow = flow
        self.outputs, self.in_place, self.copied = outputs, in_place, copied
        self._rate, self._fuses_updates, self._is_split = rate, fuses_updates, is_split
        self._scatters = scatters
        self.scattered_into = frozenset(scatters.values())
        self._folded = {**scatters, **products}
        self.epilogues = {index: product for product, index in products.items()}
        self.readers: dict[int, list[ValueReader]] = {}
        self.made_from: dict[int, frozenset[int]] = {}
        self.transposed: set[int] = set()
        self._fused_stacks: set[int] = set()
        self._zero_types = self._scattered_zeros()
        self._read_whole: set[int] = set()  # what gathers and the slices of loops are made of
        self._find_readers()
        self.padded = self._find_padded()
        self.written: set[int] = set()
        self._for_sums: list[int] = []  # values written because sums would compute them again
        self._find_written()
        self._leave_inside()

    # -- kinds of nodes

    def is_unfused(self, node: Node) -> bool:
        return node.kind is NodeKind.MERGE or node.name in _READS_MEMORY

    def is_elementwise(self, index: int) -> bool:
        node = self.flow.nodes[index]
        if node.kind is not NodeKind.OP or self.flow.is_view(node) or index in self.epilogues:
            return False
        return (
            not self.is_unfused(node) and node.name not in REDUCTIONS and node.name not in UNFUSED
        )

    def is_of_product(self, index: int, value: int) -> bool:
        """Whether a value is the product that is made in an addition, or a view of it."""
        return self.flow.source(value) in self.flow.nodes[self.epilogues[index]].results

    def copies_slices(self, start: int, stop: int) -> bool:
        """Whether a loop's body copies a slice of what it goes over, such as a micro-batch: kernels
        make slices themselves, products and convolutions read them from memory."""
        nodes = self.flow.nodes[start:stop]
        slices = [v for n in nodes if n.name == "scan_slice" for v in n.results]
        return any(reader.unfused for v in slices for reader in self.readers.get(v, ()))

    # -- searches

    def fused_readers(self, value: int) -> Iterator[int]:
        """Nodes that read a value, directly or through a few elementwise ones."""
        frontier, seen = [value], {value}
        while frontier and len(seen) < _MAX_SEEN:
            for reader in self.readers.get(frontier.pop(), ()):
                node = self.flow.nodes[reader.node]
                if reader.unfused:
                    continue
                yield reader.node
                if node.name not in REDUCTIONS:
                    frontier += [v for v in node.results if v not in seen]
                    seen.update(node.results)

    def ends_of_kernels(self, value: int) -> set[int]:
        """The last nodes of the elementwise kernels that read a value and write arrays of its
        shape."""
        shape = self.flow.values[value].shape
        frontier, seen, found = [value], {value}, set[int]()
        while frontier:
            for reader in self.readers.get(frontier.pop(), ()):
                results = self.flow.nodes[reader.node].results
                if reader.unfused or not self.is_elementwise(reader.node) or not results:
                    continue
                made = results[0]
                if self.flow.values[made].shape != shape or made in seen:
                    continue
                seen.add(made)
                if made in self.written or self.flow.finished(made) in self.in_place:
                    found.add(reader.node)
                else:
                    frontier.append(made)
        return found

    def waits_for(self, node: int, earlier: int) -> bool:
        """Whether a node depends on another."""
        frontier, seen = [earlier], {earlier}
        while frontier:
            for value in self.flow.nodes[frontier.pop()].results:
                for reader in self.readers.get(value, ()):
                    if reader.node == node:
                        return True
                    if reader.node < node and reader.node not in seen:
                        seen.add(reader.node)
                        frontier.append(reader.node)
        return False

    def read_from_memory(self) -> frozenset[int]:
        """Written values and their views."""
        in_memory = set(self.written)
        for node, is_view in zip(self.flow.nodes, self.flow.views, strict=True):
            if is_view and in_memory.issuperset(node.operands):
                in_memory.update(node.results)
        return frozenset(in_memory)

    # -- readers

    def _find_readers(self) -> None:
        readers, views = self.readers, self.flow.views
        for index in range(len(views) - 1, -1, -1):
            node = self.flow.nodes[index]
            if views[index]:
                through = [r for v in node.results for r in readers.get(v, ())]
                for value in node.operands:
                    readers.setdefault(value, []).extend(through)
                continue
            is_unfused = self.is_unfused(node)
            if self._is_fused_stack(node):
                self._fused_stacks.update(node.results)
                is_unfused = False
            reader = ValueReader(index, is_unfused)
            if node.name == "concatenate":
                reader = ValueReader(index, False)
            is_scatter = _is_scatter(node)
            if not is_scatter and index not in self._scatters and index not in self.epilogues:
                for value in node.operands:
                    readers.setdefault(value, []).append(reader)
                continue
            for position, value in enumerate(node.operands):
                unfused = is_unfused or self._is_added(index, value)
                if position == 0 and index in self._scatters:
                    unfused = False
                if position > 0 and self._fuses_updates and is_scatter:
                    unfused = False
                readers.setdefault(value, []).append(ValueReader(index, unfused))

    def _is_fused_stack(self, node: Node) -> bool:
        """Whether a node stacks arrays for readers that need no stack in memory."""
        if node.name != "concatenate" or len(node.operands) < 2:
            return False
        values, (stack,) = self.flow.values, node.results
        shape = values[stack].shape
        if shape[0] != len(node.operands) or any(values[v].shape[0] != 1 for v in node.operands):
            return False
        readers = self.readers.get(stack, ())
        return bool(readers) and not any(reader.unfused for reader in readers)

    def _is_added(self, index: int, value: int) -> bool:
        """Whether a product is added to a value, which cuBLAS reads from memory unless it is a
        vector that all rows share."""
        if index not in self.epilogues or self.flow.is_constant(value):
            return False
        is_vector = self.flow.maker(value).name == "broadcast_in_dim"
        return not is_vector and not self.is_of_product(index, value)

    # -- written values

    def _find_written(self) -> None:
        flow, views = self.flow, self.flow.views
        written = self.written
        sources: dict[int, frozenset[int]] = {}
        transposed: set[int] = set()  # fused values with a transpose since the sources
        made_in = frozenset(self._folded.values())
        for index, node in enumerate(flow.nodes):
            made_from: frozenset[int] = frozenset()
            transposes = flow.is_transpose(node)
            for value in node.operands:
                made = sources.get(value)
                if made is None:  # a carry's last value, which its loop has yet to make
                    made = frozenset((value,))
                made_from = made_from | made if made_from else made
                transposes = transposes or value in transposed
            if node.name in ("gather", "scan_slice"):
                self._read_whole |= made_from
            for value in node.results:
                if index in made_in or (
                    index not in self._folded
                    and not views[index]
                    and self._is_written(node, value, made_from)
                ):
                    written.add(value)
                    sources[value] = frozenset((value,))
                    self.made_from[value] = made_from
                    if transposes and not self.is_unfused(node) and node.name not in REDUCTIONS:
                        self.transposed.add(value)
                else:
                    sources[value] = made_from
                    if transposes and node.name not in REDUCTIONS:
                        transposed.add(value)

    def copy(self) -> Fusion:
        """A copy that may absorb values of its own."""
        copied = copy(self)
        copied.written, copied.made_from = set(self.written), dict(self.made_from)
        copied.transposed = set(self.transposed)
        return copied

    def absorb(self, value: int, made: int) -> frozenset[int]:
        """Leaves a value inside the kernel that makes another of it; returns what it is made
        from."""
        sources = self.made_from.pop(value)
        self.made_from[made] = self.made_from[made] - {value} | sources
        self.written.discard(value)
        self.transposed.discard(value)
        return sources

    def _is_written(self, node: Node, value: int, made_from: frozenset[int]) -> bool:
        """Of a node that is no view."""
        flow = self.flow
        if node.kind in (NodeKind.INPUT, NodeKind.MERGE):
            return True
        readers = self.readers.get(value, [])
        finished = flow.finished(value)
        if finished in self.outputs and finished not in self.in_place:
            return True
        if value in self.copied:
            return True
        if not readers:
            return False
        if value in flow.zeros and flow.type_of(value) in self._zero_types:
            return any(flow.zeros.isdisjoint(flow.nodes[r.node].results) for r in readers)
        if any([reader.unfused for reader in readers]):
            return True
        if node.name in _READS_MEMORY and value not in self._fused_stacks:
            return True
        if node.name in REDUCTIONS:
            return True
        if node.name == "exp" and self._is_wide_softmax(value, made_from):
            shape = flow.values[value].shape
            if not self._fuses_updates:
                return not fits_tiles(shape)
            return not fits_tiles(shape, self._rate, self._is_split)
        # Recompute it in each reader, or write it once and read it back?
        elements = prod(flow.values[value].shape)
        count = sum([self._times_computed(i, elements) for i in {r.node for r in readers}])
        num_sums = 0
        if INSTRUCTIONS.get(node.name, 1.0) >= _EXPENSIVE and self._crosses(value):
            count = max(count, _CROSSING_READERS)
            num_sums = self._num_sums(value) if self._fuses_updates else 0
        if count == 1:
            return False
        size = flow.values[value].num_bytes
        work = work_of(value, flow, self.written, MOVES if self._fuses_updates else ())
        source_bytes = sum(
            self._read_bytes(v, elements * max(1, work.reads.get(v, 1))) for v in made_from
        )
        recompute = source_bytes + work.instructions * elements / self._rate
        if (count - 1) * recompute > (count + 1) * size:
            return True
        is_for_sums = (count + num_sums - 1) * recompute > (count + num_sums + 1) * size
        if is_for_sums:
            self._for_sums.append(value)
        return is_for_sums

    def _read_bytes(self, source: int, elements: int) -> float:
        """What an elementwise kernel that makes so many elements reads of an array: no more than as
        many of its elements, as of a slice."""
        value = self.flow.values[source]
        if source in self._read_whole:
            return value.num_bytes
        return value.num_bytes * min(1.0, elements / max(1, prod(value.shape)))

    def _leave_inside(self) -> None:
        """Leaves values inside their readers that sums do not compute again after all: what these
        read is in memory itself, as an activation that is also averaged."""
        inside: dict[int, frozenset[int]] = {}  # value -> what it is made of
        for value in self._for_sums:
            if not self._num_sums(value):
                inside[value] = self._without(self.made_from.pop(value), inside)
                self.written.discard(value)
                self.transposed.discard(value)
        if inside:
            self.made_from = {
                value: self._without(made, inside) for value, made in self.made_from.items()
            }

    def _without(self, made: frozenset[int], inside: dict[int, frozenset[int]]) -> frozenset[int]:
        if inside.keys().isdisjoint(made):
            return made
        return frozenset().union(*(inside.get(value, (value,)) for value in made))

    def _is_wide_softmax(self, value: int, made_from: frozenset[int]) -> bool:
        """Whether exponentials of 16-bit rows, less the maximum, are divided by their sum, and the
        backward pass needs them too."""
        flow, exponentials = self.flow, self.flow.values[value]
        if not exponentials.shape or exponentials.shape[-1] > MAX_TILE_ROW:
            return False
        elements = prod(exponentials.shape)
        rows = elements // max(1, exponentials.shape[-1])
        sources = [flow.values[v] for v in made_from]
        is_wide = any(
            prod(v.shape) == elements and v.num_bytes < exponentials.num_bytes for v in sources
        )
        made_in = self._pass_of(flow.producer[value])
        readers = [r.node for r in self.readers.get(value, ()) if self._pass_of(r.node) == made_in]
        names = {flow.nodes[index].name for index in readers}
        has_maximum = any(prod(v.shape) == rows for v in sources)
        is_softmax = has_maximum and "reduce_sum" in names and len(names) > 1
        return is_wide and is_softmax and self._crosses(value)

    def _times_computed(self, index: int, elements: int) -> float:
        """How often a reader computes each element of a value: a gather that picks more elements
        than there are, such as the nodes of all edges of a graph, picks some of them again."""
        node = self.flow.nodes[index]
        if node.name != "gather" or not self._fuses_updates:
            return 1.0
        return max(1.0, prod(self.flow.shape_of(node)) / max(1, elements))

    def _num_sums(self, value: int) -> int:
        """How many sums of another pass compute a value again, as that of the gradient of a
        condition does which an activation was multiplied by."""
        flow, frontier, seen, found = self.flow, [value], {value}, set[int]()
        made_in = self._pass_of(flow.producer[value])
        while frontier and len(seen) < _MAX_SEEN:
            for reader in self.readers.get(frontier.pop(), ()):
                node = flow.nodes[reader.node]
                if reader.unfused or self._pass_of(reader.node) == UPDATE:
                    continue
                if node.name in REDUCTIONS:
                    if self._pass_of(reader.node) != made_in:
                        found.add(reader.node)
                    continue
                for result in node.results:  # what is in memory is not computed again
                    if result not in seen and not self._is_read_from_memory(result):
                        frontier.append(result)
                seen.update(node.results)
        return len(found)

    def _is_read_from_memory(self, value: int) -> bool:
        if value in self.written:
            return True
        return any([reader.unfused for reader in self.readers.get(value, ())])

    def _find_padded(self) -> set[int]:
        flow = self.flow
        return {flow.source(v) for node in flow.nodes for v in padded_operands(node, flow.values)}

    def _scattered_zeros(self) -> frozenset[Type]:
        """Types of the zeros that scatters add to. XLA merges all zeros of one type, and what one
        reader needs in memory is not fused into the others."""
        return frozenset(
            self.flow.type_of(value)
            for index, node in enumerate(self.flow.nodes)
            if is_scatter_add(node.name) and index not in self._scatters
            for value in node.operands[:1]
            if value in self.flow.zeros
        )

    def _pass_of(self, index: int) -> str:
        """The region of a node, or that it computes a layer again."""
        again = self._fuses_updates and index in self.flow.recomputed
        return "recomputed" if again else self.flow.nodes[index].region

    def _crosses(self, value: int) -> bool:
        """Whether the backward pass reads a value of the forward pass, or of a layer that is
        computed again, directly or through elementwise ops."""
        flow, frontier, seen = self.flow, [value], {value}
        made_in = self._pass_of(flow.producer[value])
        while frontier and len(seen) < _MAX_SEEN:
            for reader in self.readers.get(frontier.pop(), ()):
                node = flow.nodes[reader.node]
                if self._pass_of(reader.node) != made_in:
                    return node.region != UPDATE
                if not reader.unfused and node.name not in REDUCTIONS:
                    frontier += [v for v in node.results if v not in seen]
                    seen.update(node.results)
        return False


def padded_operands(node: Node, values: Sequence[Value]) -> list[int]:
    """Operands that a product of 16-bit numbers reads with zeros at the end of a dimension."""
    if node.name != "dot_general" or len(node.operands) != 2:
        return []
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    one, other = ({f for factors in dims for f in factors} for dims in node.rule.operands)
    batch, padded = one & other & kept, []
    for operand, dims in zip(node.operands, node.rule.operands, strict=True):
        sizes = {True: 1, False: 1}  # of the dimensions that are kept, and of the others
        for size, factors in zip(values[operand].shape, dims, strict=True):
            if batch.isdisjoint(factors):
                sizes[not kept.isdisjoint(factors)] *= size
        is_padded = any(size % _PADDED_TO for size in sizes.values())
        if is_padded and values[operand].dtype in _PADDED_TYPES:
            padded.append(operand)
    return padded


def _is_scatter(node: Node) -> bool:
    """Of an array, indices and updates, none of them a constant."""
    return node.name.startswith("scatter") and len(node.operands) == 3

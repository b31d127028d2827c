"""Which values take memory, and when: from the nodes of a graph to its `Liveness`, before sharding.

Time is the position of a node in the graph, except where XLA is known to run it elsewhere
(`run_order`). The model follows how XLA compiles for GPUs:

- *Fusion.* The result of a product, reduction or gather is written to memory; an elementwise value
  is written if such an op reads it. Otherwise each reader recomputes it, if that moves fewer bytes
  than writing it once (`is_written`). Its sources then have to live until its last reader runs,
  which is why few activations survive until the backward pass.
- *Views.* A reshape, a barrier or a use has no memory of its own.
- *Donation.* Updated state takes over the buffer of the old state; an elementwise result that of an
  operand it is the last to read, and a scatter or an update of a slice that of the array it changes
  (`reuse_buffers`).
- *Products.* cuBLAS and cuDNN return a result together with a workspace, and XLA lets no kernel
  take over a part of such a pair. But cuBLAS adds the other addend of a sum itself, and multiplies
  by a constant: then the sum is the product's result (`folded_products`).
- *Scatters.* A scatter-add into zeros whose result is then added to something is made in that
  buffer: it has no memory of its own (`folded_scatters`).
- *Convolutions.* Kernels stay in the order that the library wants (`transposed_kernels`); inputs of
  transposed convolutions are written with zeros between their rows (`dilated_inputs`).

A value that a loop reads lives until the loop's end; a stack that it writes, from the loop's start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import INSTRUCTIONS_PER_BYTE, Life, Liveness, Node, NodeKind, Value
from autopar.tracer.costs import INSTRUCTIONS, REDUCTIONS, UNFUSED, VIEWS
from autopar.tracer.regions import UPDATE
from autopar.tracer.run_order import is_scatter_add, run_times

# In `UNFUSED`, but XLA takes the slice inside its reader.
_FUSED_SLICES = {"scan_slice", "dynamic_slice", "gather"}
# A value this expensive (in instructions per element) that both passes need has at least this many
# readers: one forward, and backward the slope and its factors.
_EXPENSIVE = 20.0
_CROSSING_READERS = 4
_MAX_SEEN = 32  # values, in a search through elementwise readers
_MAX_TILE_ROW = 2**14  # elements of a row that a Triton kernel takes as a whole
_ADDITIONS = ("add", "add_any")
_EPILOGUES = (*_ADDITIONS, "mul")  # what cuBLAS does with a product, beside a sum or a constant


def find_lives(
    nodes: Sequence[Node],
    values: Sequence[Value],
    outputs: Collection[int | None],
    in_place: Collection[int | None],
    loops: Sequence[tuple[int, int]],
    overlaps: bool = True,
    zeros: Collection[int] = (),
) -> Liveness:
    """`in_place`: outputs that take over the buffer of an input; `loops`: the half-open range of
    nodes of each loop, outer loops first; `overlaps`: there are collectives to hide under compute
    (`late_gradients`), as on every mesh of more than one device; `zeros`: values known to be zero
    everywhere."""
    return _Sweep(nodes, values, outputs, in_place, loops, overlaps, zeros).lives()


@dataclass(frozen=True)
class _Reader:
    node: int
    unfused: bool


class _Sweep:
    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        outputs: Collection[int | None],
        in_place: Collection[int | None],
        loops: Sequence[tuple[int, int]],
        overlaps: bool,
        zeros: Collection[int],
    ) -> None:
        self.nodes = nodes
        self.values = values
        self.outputs = {o for o in outputs if o is not None}
        self.in_place = {o for o in in_place if o is not None}
        self.loops = loops
        self.zeros = frozenset(zeros)
        self.producer = {v: i for i, node in enumerate(nodes) for v in node.results}
        self.finish_of = {
            node.operands[0]: node.results[0] for node in nodes if node.kind is NodeKind.FINISH
        }
        self.times = run_times(nodes, self.zeros, overlaps)
        self.readers: dict[int, list[_Reader]] = {}
        self.zero_types: frozenset[tuple[tuple[int, ...], str]] | None = None
        self.turned: set[int] = set()  # transposes that products make themselves
        # Scatters and products -> the additions or multiplications that they are made in.
        self.folded = self.folded_scatters()
        self.filled = frozenset(self.folded)
        self.epilogues: dict[int, int] = {}  # addition or multiplication -> product
        self.made_from: dict[int, frozenset[int]] = {}  # written value -> written ones it reads
        self.merged: dict[int, int] = {}  # elementwise value -> one that the same kernel writes
        self.transposed: set[int] = set()  # written by elementwise ops with a transpose among them
        if overlaps:
            self.in_place -= self.transposed_state()

    def transposed_state(self) -> set[int]:
        """State that is not updated in place on several devices: its gradient comes from a batched
        product with its dimensions in another order, is reduced in that order, and XLA computes the
        whole update in it. On one device the product itself turns its result."""
        transposed: set[int] = set()
        for node in self.nodes:
            if self.is_transpose(node) and node.region != UPDATE:
                transposed.update(node.results)
                continue
            passes = node.region == UPDATE or self.is_view(node)
            passes = passes or node.name == "convert_element_type"
            if passes and any(v in transposed for v in node.operands):
                transposed.update(node.results)
        return {v for v in transposed if v in self.in_place and len(self.values[v].shape) > 2}

    def is_transpose(self, node: Node) -> bool:
        return node.name == "transpose" and len(self.values[node.results[0]].shape) > 2

    def finished(self, value: int) -> int:
        """The value itself, or the result of its partial sums, which shares its buffer."""
        return self.finish_of.get(value, value)

    def folded_scatters(self) -> dict[int, int]:
        """Scatter-adds into zeros that a single addition reads, with these additions: XLA computes
        the other addend and scatters into it."""
        readers = self.direct_readers()
        folded: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            if not is_scatter_add(node.name) or not node.operands:
                continue
            filled = self.nodes[self.producer[node.operands[0]]]
            reading = readers.get(self.finished(node.results[0]), [])
            only = self.nodes[reading[0]] if len(reading) == 1 else None
            # Constants are no operands of nodes: a value made of nothing is a filled array.
            is_filled = filled.kind is NodeKind.OP and not filled.operands
            if is_filled and only is not None and only.name in _ADDITIONS:
                folded[index] = reading[0]
        return folded

    def turned_products(self) -> set[int]:
        """Transposes of products of matrices: the product itself turns its result."""
        turned: set[int] = set()
        products = {v for n in self.nodes if n.name == "dot_general" for v in n.results}
        for node in self.nodes:
            turns = node.name == "transpose" and len(self.values[node.results[0]].shape) == 2
            passes = turns or node.kind is NodeKind.FINISH
            if passes and node.operands and node.operands[0] in products:
                products.update(node.results)
                if turns:
                    turned.update(node.results)
        return turned

    def direct_readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in node.operands:
                readers.setdefault(value, []).append(index)
        return readers

    def folded_products(self) -> dict[int, int]:
        """Products that a single addition, or multiplication by a constant, reads, with these: XLA
        lets cuBLAS do it. Of two products that are added, the first waits for the second and is
        added to it."""
        readers = self.direct_readers()
        folded: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            if node.name not in _EPILOGUES or node.kind is not NodeKind.OP:
                continue
            if node.region == UPDATE:  # gradients are reduced before it
                continue
            scales = node.name not in _ADDITIONS
            if scales and sum(not self.is_constant(v) for v in node.operands) != 1:
                continue
            for operand in node.operands:
                product = self.only_read_product(operand, readers)
                if product is None or self.values[operand].shape != self.shape_of(node):
                    continue
                folded[product] = index
                break
        return folded

    def only_read_product(self, value: int, readers: dict[int, list[int]]) -> int | None:
        """The node of the product that a value is or is a view of, if nothing else reads it."""
        index = self.producer[value]
        while len(readers.get(value, ())) == 1:
            node = self.nodes[index]
            if node.name == "dot_general":
                return index
            if not self.is_view(node) or node.name == "optimization_barrier":
                return None
            value = node.operands[0]
            index = self.producer[value]
        return None

    def is_constant(self, value: int) -> bool:
        """A filled array: constants are no operands of nodes."""
        node = self.nodes[self.producer[value]]
        return node.kind is NodeKind.OP and not node.operands

    def shape_of(self, node: Node) -> tuple[int, ...]:
        return self.values[node.results[0]].shape

    # -- which values are in memory

    def find_readers(self) -> None:
        """The readers of every value, including those of its views."""
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            is_view = self.is_view(node)
            for position, value in enumerate(node.operands):
                readers = self.readers.setdefault(value, [])
                if is_view:
                    readers += (r for v in node.results for r in self.readers.get(v, ()))
                else:
                    unfused = self.is_unfused(node) or self.is_added(index, value)
                    is_filled = index in self.filled and position == 0
                    readers.append(_Reader(index, unfused and not is_filled))

    def is_added(self, index: int, value: int) -> bool:
        """Whether a product is added to a value, which cuBLAS reads from memory unless it is a
        vector that all rows share."""
        if index not in self.epilogues or self.is_constant(value):
            return False
        node = self.nodes[self.producer[value]]
        return node.name != "broadcast_in_dim" and not self.is_of_product(index, value)

    def is_of_product(self, index: int, value: int) -> bool:
        """Whether a value is the product that is made in an addition, or a view of it."""
        return self.source(value) in self.nodes[self.epilogues[index]].results

    def is_view(self, node: Node) -> bool:
        if node.kind in (NodeKind.USE, NodeKind.FINISH) or node.name in VIEWS:
            return True
        return node.name == "transpose" and node.results[0] in self.turned

    def is_unfused(self, node: Node) -> bool:
        if node.kind is NodeKind.MERGE:
            return True
        return node.name in UNFUSED and node.name not in _FUSED_SLICES

    def written_values(self) -> set[int]:
        written: set[int] = set()
        sources: dict[int, frozenset[int]] = {}
        work: dict[int, float] = {}  # instructions per element since the sources
        transposed: set[int] = set()  # fused values with a transpose since the sources
        additions = frozenset(self.folded.values())
        for index, node in enumerate(self.nodes):
            made_from: frozenset[int] = frozenset()
            if node.kind is not NodeKind.INPUT:
                made_from = frozenset().union(
                    *(sources.get(v, frozenset((v,))) for v in node.operands)
                )
            instructions = 0.0 if self.is_view(node) else INSTRUCTIONS.get(node.name, 1.0)
            instructions += sum(work.get(v, 0.0) for v in node.operands)
            transposes = self.is_transpose(node) or any(v in transposed for v in node.operands)
            for value in node.results:
                if index in additions or (
                    index not in self.folded
                    and self.is_written(node, value, made_from, instructions)
                ):
                    written.add(value)
                    sources[value] = frozenset((value,))
                    self.made_from[value] = made_from
                    if transposes and not self.is_unfused(node) and node.name not in REDUCTIONS:
                        self.transposed.add(value)
                else:
                    sources[value] = made_from
                    work[value] = instructions
                    if transposes and node.name not in REDUCTIONS:
                        transposed.add(value)
        return written

    def is_written(self, node: Node, value: int, made_from: frozenset[int], work: float) -> bool:
        if node.kind in (NodeKind.INPUT, NodeKind.MERGE):
            return True
        if self.is_view(node):
            return False
        readers = self.readers.get(value, [])
        finished = self.finished(value)
        if finished in self.outputs and finished not in self.in_place:
            return True
        if not readers or all(self.nodes[r.node].kind is NodeKind.INPUT for r in readers):
            return False
        if value in self.zeros and self.type_of(value) in self.scattered_zeros():
            return any(self.zeros.isdisjoint(self.nodes[r.node].results) for r in readers)
        fused = [r for r in readers if not r.unfused]
        if len(fused) < len(readers) or node.name in UNFUSED - _FUSED_SLICES:
            return True
        if node.name in REDUCTIONS:
            return True
        # Recompute it in each reader, or write it once and read it back?
        size = self.values[value].num_bytes
        source_bytes = sum(self.values[v].num_bytes for v in made_from)
        elements = prod(self.values[value].shape)
        recompute = source_bytes + work * elements / INSTRUCTIONS_PER_BYTE
        count = len({r.node for r in fused})
        if INSTRUCTIONS.get(node.name, 1.0) >= _EXPENSIVE and self.crosses(value):
            count = max(count, _CROSSING_READERS)
        return (count - 1) * recompute > (count + 1) * size

    def scattered_zeros(self) -> frozenset[tuple[tuple[int, ...], str]]:
        """Types of the zeros that scatters add to. XLA merges all zeros of one type, and what one
        reader needs in memory is not fused into the others."""
        if self.zero_types is None:
            self.zero_types = frozenset(
                self.type_of(node.operands[0])
                for index, node in enumerate(self.nodes)
                if is_scatter_add(node.name) and index not in self.folded
                for value in node.operands[:1]
                if value in self.zeros
            )
        return self.zero_types

    def type_of(self, value: int) -> tuple[tuple[int, ...], str]:
        return self.values[value].shape, self.values[value].dtype

    def crosses(self, value: int) -> bool:
        """Whether the backward pass reads a forward value, directly or through elementwise ops."""
        frontier, seen = [value], {value}
        region = self.nodes[self.producer[value]].region
        while frontier and len(seen) < _MAX_SEEN:
            for reader in self.readers.get(frontier.pop(), ()):
                node = self.nodes[reader.node]
                if node.region != region:
                    return node.region != UPDATE
                if not reader.unfused and node.name not in REDUCTIONS:
                    frontier += [v for v in node.results if v not in seen]
                    seen.update(node.results)
        return False

    # -- how long they live

    def last_needed(self, written: set[int]) -> tuple[list[int], dict[int, int]]:
        """(per node, until when its operands are needed; per value, until when it is needed)."""
        node_ends = [0] * len(self.nodes)
        ends: dict[int, int] = {}
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            end = self.times[index]
            if not any(v in written for v in node.results) and node.results:
                end = max(end, *(ends.get(v, end) for v in node.results))
            node_ends[index] = end
            for value in node.operands:
                self.extend(ends, value, self.after_loops(value, index, end))
        for index, node in enumerate(self.nodes):
            if node.kind is NodeKind.MERGE:  # a carry reads a later result of its loop's body
                for value in node.operands:
                    if self.producer[value] > index:
                        loop = self.loop_of(index + 1) or (index, index + 1)
                        self.extend(ends, value, loop[1] - 1)
        return node_ends, ends

    def merge_kernels(self, written: set[int]) -> None:
        """An elementwise kernel and the one that reads its result become one kernel, which writes
        both results, where nothing that the second waits for comes between: the first runs with
        the second, so what it reads is in memory beside both results."""
        reading: dict[int, list[int]] = {}
        for value, sources in self.made_from.items():
            for source in sources:
                reading.setdefault(source, []).append(value)
        for value in sorted(written, reverse=True):
            index = self.producer[value]
            if not self.is_elementwise(index) or self.finished(value) in self.in_place:
                continue
            for made in sorted(reading.get(value, ())):
                last = self.producer[made]
                if (
                    self.is_elementwise(last)
                    and self.nodes[last].region == self.nodes[index].region
                    and self.values[made].shape == self.values[value].shape
                    and self.finished(made) not in self.in_place
                    and self.runs_with(last, value, made)
                ):
                    self.times[index] = max(self.times[index], self.times[last])
                    self.merged[value] = made
                    break

    def runs_with(self, index: int, value: int, made: int) -> bool:
        """Whether the kernel that makes `made` of `value` can run with the one that makes `value`:
        it waits for nothing else that needs the value, and nothing needs the value before it."""
        if any(r.unfused and self.times[r.node] < self.times[index] for r in self.readers[value]):
            return False
        others = [v for v in self.made_from[made] if v != value]
        own = self.producer[value]
        return not any(
            self.producer[v] > own and self.waits_for(self.producer[v], own) for v in others
        )

    def is_elementwise(self, index: int) -> bool:
        node = self.nodes[index]
        if node.kind is not NodeKind.OP or self.is_view(node) or index in self.epilogues:
            return False
        return (
            not self.is_unfused(node) and node.name not in REDUCTIONS and node.name not in UNFUSED
        )

    def recomputed_lives(self, node_ends: list[int], ends: dict[int, int]) -> list[Life]:
        """Lives, in the backward pass, of forward values that are recomputed there: each pass
        writes a transposed elementwise value in the order that its products want, and only its
        sources survive in between."""
        lives: list[Life] = []
        for value in self.transposed:
            region = self.nodes[self.producer[value]].region
            readers = [r.node for r in self.readers.get(value, ())]
            same_pass = [i for i in readers if self.nodes[i].region == region]
            other_pass = [i for i in readers if self.nodes[i].region != region]
            if not same_pass or not other_pass or self.finished(value) in self.outputs:
                continue
            start = min(self.times[i] for i in other_pass)
            lives.append(Life(self.finished(value), start, max(node_ends[i] for i in other_pass)))
            ends[value] = max(node_ends[i] for i in same_pass)
            for source in self.made_from[value]:
                self.extend(ends, source, start)
        return lives

    def reuse_buffers(self, ends: dict[int, int]) -> None:
        """An elementwise result takes over the buffer of an operand of equal size if it is the last
        to read it, unless that is a product, or its kernel also sums up that operand
        (`is_summed_with`). What changes part of an array takes over that array, and a product that
        is added to an array takes over this one."""
        for value, sources in self.made_from.items():
            made_from: Collection[int] = sources
            node = self.nodes[self.producer[value]]
            if node.kind is not NodeKind.OP or node.name in REDUCTIONS:
                continue
            changes = changes_operand(node.name)
            if node.name in UNFUSED and not changes:
                continue
            index = self.producer[value]
            time = self.times[index]
            if changes and node.operands:
                made_from = (self.source(node.operands[0]),)
            elif index in self.epilogues:
                made_from = [
                    self.source(v) for v in node.operands if not self.is_of_product(index, v)
                ]
            if value in self.merged:
                continue  # what it reads, the kernel's other result is made of too
            shared = {
                s for v, made in self.merged.items() if made == value for s in self.made_from[v]
            }
            for source in made_from:
                if source in shared:
                    continue
                maker = self.nodes[self.producer[source]]
                same_size = self.values[source].num_bytes == self.values[value].num_bytes
                if maker.is_heavy and not (
                    changes or node.region == UPDATE or index in self.epilogues
                ):
                    continue  # kernels of the update run one after another, and free what they read
                if maker.kind is not NodeKind.INPUT and same_size and ends.get(source) == time:
                    if changes or not (
                        self.is_summed_with(value, source) or self.is_normalized(value, source)
                    ):
                        ends[source] = time - 1
                    break

    def source(self, value: int) -> int:
        """The value that a view is a view of."""
        node = self.nodes[self.producer[value]]
        while self.is_view(node) and node.operands:
            value = node.operands[0]
            node = self.nodes[self.producer[value]]
        return value

    def is_summed_with(self, value: int, source: int) -> bool:
        """Whether the same kernel also sums up a source of an elementwise value: the reduction and
        the value do not wait for each other. Then threads would read what others overwrite, and
        each needs its own buffer (the logits, their gradient and the pick of the target's logit).
        A value that is itself summed up shares a kernel with that sum instead."""
        if any(self.nodes[index].name in REDUCTIONS for index in self.fused_readers(value)):
            return False
        made = self.producer[value]
        return any(
            self.nodes[index].name in REDUCTIONS and not self.waits_for(made, index)
            for index in self.fused_readers(source)
        )

    def is_normalized(self, value: int, source: int) -> bool:
        """Whether a value is made of a source and of sums over the source's rows, as a softmax and
        its gradient are. XLA makes one Triton kernel of it if a row is short enough, and such a
        kernel writes to a buffer of its own."""
        shape = self.values[source].shape
        if not shape or shape[-1] > _MAX_TILE_ROW:
            return False
        made = self.producer[value]
        return any(
            self.sums_last(self.nodes[index]) and self.waits_for(made, index)
            for index in self.fused_readers(source)
        )

    def sums_last(self, node: Node) -> bool:
        """A reduction over the last dimension."""
        if node.name not in REDUCTIONS or not node.rule.operands:
            return False
        kept = {f for dims in node.rule.results for factors in dims for f in factors}
        last = node.rule.operands[0][-1:]
        return any(factors and kept.isdisjoint(factors) for factors in last)

    def fused_readers(self, value: int) -> Iterator[int]:
        """Nodes that read a value, directly or through a few elementwise ones."""
        frontier, seen = [value], {value}
        while frontier and len(seen) < _MAX_SEEN:
            for reader in self.readers.get(frontier.pop(), ()):
                node = self.nodes[reader.node]
                if reader.unfused:
                    continue
                yield reader.node
                if node.name not in REDUCTIONS:
                    frontier += [v for v in node.results if v not in seen]
                    seen.update(node.results)

    def waits_for(self, node: int, earlier: int) -> bool:
        """Whether a node depends on another."""
        frontier, seen = [earlier], {earlier}
        while frontier:
            for value in self.nodes[frontier.pop()].results:
                for reader in self.readers.get(value, ()):
                    if reader.node == node:
                        return True
                    if reader.node < node and reader.node not in seen:
                        seen.add(reader.node)
                        frontier.append(reader.node)
        return False

    def transposed_kernels(self, ends: dict[int, int]) -> list[Life]:
        """Copies of convolution kernels: XLA transposes a kernel that is an input into the order
        that its library wants, and keeps the copy for the backward pass. A cast writes its kernel
        in that order anyway."""
        copies: dict[int, Life] = {}
        for index, node in enumerate(self.nodes):
            if node.name != "conv_general_dilated" or node.region == UPDATE:
                continue
            if len(node.operands) < 2:  # an operand is a constant
                continue
            kernel = node.operands[1]
            source = self.nodes[self.producer[kernel]]
            while self.is_view(source):
                source = self.nodes[self.producer[source.operands[0]]]
            if source.kind is NodeKind.INPUT and kernel not in copies:
                start = self.times[index]
                copies[kernel] = Life(kernel, start, max(ends[kernel], start))
        return list(copies.values())

    def dilated_inputs(self) -> Iterator[Life]:
        """Inputs of transposed convolutions: XLA writes them with zeros between their rows. It
        knows the gradient of a strided convolution by its reversed kernel, and the library
        dilates that itself."""
        for index, node in enumerate(self.nodes):
            if node.work is None or node.work.kind != "input-gradient":
                continue
            if self.nodes[self.producer[self.source(node.operands[1])]].name == "rev":
                continue
            shapes = [self.values[v].shape for v in (*node.operands, *node.results)]
            images, positions, out_channels, *_ = (
                prod(shapes[which][dim] for which, dim in dims) for dims in node.work.sizes
            )
            made = prod(shapes[2]) // max(1, images * out_channels)
            count, time = round(made / max(1, positions)), self.times[index]
            yield Life(node.operands[0], time, time, max(1, count))

    def extend(self, ends: dict[int, int], value: int, end: int) -> None:
        ends[value] = max(ends.get(value, -1), end)

    def after_loops(self, value: int, reader: int, end: int) -> int:
        """When a value was last read: a loop reads values from outside in every trip."""
        producer = self.producer[value]
        if self.nodes[reader].kind is NodeKind.MERGE:  # a carry's first value: taken over
            return end
        for start, stop in self.loops:
            if producer < start <= reader < stop:
                return max(end, stop - 1)
        return end

    def loop_of(self, index: int) -> tuple[int, int] | None:
        """The innermost loop around a node."""
        around = [loop for loop in self.loops if loop[0] <= index < loop[1]]
        return around[-1] if around else None

    def fold_products(self) -> None:
        """From now on, what cuBLAS does with a product is the product's result."""
        self.turned = self.turned_products()
        products = self.folded_products()
        self.folded.update(products)
        self.epilogues = {index: product for product, index in products.items()}
        self.readers.clear()
        self.made_from.clear()
        self.transposed.clear()

    def read_from_memory(self, written: set[int]) -> frozenset[int]:
        """Written values and their views, as kernels are priced: epilogues of products have one of
        their own."""
        in_memory = set(written)
        for node in self.nodes:
            if self.is_view(node) and in_memory.issuperset(node.operands):
                in_memory.update(node.results)
        return frozenset(in_memory)

    def lives(self) -> Liveness:
        self.find_readers()
        in_memory = self.read_from_memory(self.written_values())
        self.fold_products()
        self.find_readers()
        written = self.written_values()
        self.merge_kernels(written)
        node_ends, ends = self.last_needed(written)
        lives = self.recomputed_lives(node_ends, ends) + self.transposed_kernels(ends)
        lives += self.dilated_inputs()
        self.reuse_buffers(ends)
        last = len(self.nodes)
        for index, node in enumerate(self.nodes):
            for value in node.results:
                if node.kind is NodeKind.INPUT:
                    lives.append(Life(value, 0, last))
                    continue
                if value not in written or self.finished(value) in self.in_place:
                    continue
                start = self.times[index]
                end = ends.get(value, start)
                if node.name == "scan_stack":
                    loop = self.loop_of(index)
                    start = loop[0] if loop else start
                elif node.kind is NodeKind.MERGE:
                    loop = self.loop_of(index + 1)
                    end = max(end, loop[1] - 1 if loop else end)
                finished = self.finished(value)
                if finished in self.outputs:
                    end = last
                if end >= start:
                    lives.append(Life(finished, start, end))
        return Liveness(tuple(lives), tuple(self.times), tuple(node_ends), in_memory)


def changes_operand(name: str) -> bool:
    """Whether an op returns its first operand with a part of it changed, in place if it may."""
    return name.startswith("scatter") or name == "dynamic_update_slice"

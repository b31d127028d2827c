"""How long values are in memory: from the nodes of a graph to its `Liveness`, before sharding.

`fusion` says which values are written. Time is the position of a node in the graph, except where
XLA is known to run it elsewhere (`run_order`, `early_backward`). The model follows how XLA compiles
for GPUs:

- *Fusion.* A value that readers recompute needs its sources until its last reader runs, which is
  why few activations survive until the backward pass; so do the sources of one that products read
  with zeros added (`Fusion.padded`). An elementwise kernel and the one that reads its result become
  one (`merge_kernels`), as do those that read the same zeros (`merge_siblings`), and an activation
  that is computed again and its gradient (`merge_recomputed`).
- *Donation.* Updated state takes over the buffer of the old state; an elementwise result that of an
  operand it is the last to read, and a scatter or an update of a slice that of the array it changes
  (`reuse_buffers`). A kernel that also sums what it writes takes over nothing.
- *Products.* cuBLAS and cuDNN return a result together with a workspace, and XLA lets no kernel
  take over a part of such a pair.
- *Orders of dimensions.* What a kernel reads in another order than a product made it in is written
  again (`reordering`).
- *Convolutions.* Kernels stay in the order that the library wants (`transposed_kernels`); inputs of
  transposed convolutions are written with zeros between their rows (`dilated_inputs`); those in
  three dimensions have copies in a workspace (`workspaces`).
- *Ragged products* read copies of their rows for every group (`ragged_copies`).

A value that a loop reads lives until the loop's end; a stack that it writes, from the loop's start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.graph import Life, Liveness, Node, NodeKind, Value
from autopar.tracer.costs import MAX_TILE_ROW, REDUCTIONS, UNFUSED
from autopar.tracer.dataflow import Dataflow, Type
from autopar.tracer.early_backward import early_backward
from autopar.tracer.folding import (
    folded_products,
    folded_scatters,
    turned_products,
    without_single_products,
)
from autopar.tracer.fusion import Fusion
from autopar.tracer.ragged_copies import ragged_copies
from autopar.tracer.regions import BACKWARD, FORWARD, UPDATE
from autopar.tracer.reordering import Reordering, num_orders
from autopar.tracer.row_sums import summed_along_rows
from autopar.tracer.run_order import run_times


@dataclass(frozen=True, eq=False)
class LifeBasis:
    """What lives of values follow from, whether or not the step is a stage.

    fusion:   of the nodes, in the order that XLA runs them.
    place:    of each node, its place in that order.
    loops:    the half-open range of nodes of each loop, in that order.
    made_of:  values whose kernels write them in several orders.
    summed:   values written in the order of a sum over them.
    overlaps: there are collectives to hide under compute.
    priced:   values that prices take as written.
    trips:    finds, of layers that a stage runs as a loop, the nodes of the backward pass, each
              with the last node of its trip.
    """

    fusion: Fusion
    place: Sequence[int]
    loops: Sequence[tuple[int, int]]
    made_of: Set[int]
    summed: Set[int]
    overlaps: bool
    priced: frozenset[int]
    trips: Callable[[], Mapping[int, int]]


def basis_of_lives(
    nodes: Sequence[Node],
    values: Sequence[Value],
    outputs: Collection[int | None],
    in_place: Collection[int | None],
    loops: Sequence[tuple[int, int]],
    overlaps: bool = True,
    zeros: Collection[int] = (),
    instructions_per_byte: float = INSTRUCTIONS_PER_BYTE,
    trips: Callable[[], Mapping[int, int]] = dict,
) -> LifeBasis:
    """`in_place`: outputs that take over the buffer of an input; `loops`: the half-open range of
    nodes of each loop, outer loops first; `overlaps`: there are collectives to hide under compute
    (`late_gradients`), as on every mesh of more than one device; `zeros`: values known to be zero
    everywhere; `instructions_per_byte`: of the device; `trips`: see `LifeBasis`."""
    order = None if overlaps else early_backward(nodes, loops)
    place = list(range(len(nodes)))  # of each node, in the order that XLA runs them
    if order is not None:
        for number, index in enumerate(order):
            place[index] = number
        nodes = [nodes[index] for index in order]
        loops = [(place[start], place[stop - 1] + 1) for start, stop in loops]
    flow = Dataflow(nodes, values, zeros)
    returned = frozenset(o for o in outputs if o is not None)
    kept = frozenset(o for o in in_place if o is not None)
    if overlaps:
        kept -= transposed_state(flow, kept)
    scatters = folded_scatters(flow)
    # Kernels are priced with the epilogues of products and updates of scatters as their own.
    rate = instructions_per_byte
    priced = Fusion(flow, scatters, {}, returned, kept, rate=rate, fuses_updates=False)
    flow = without_single_products(flow)
    flow = flow.with_turned(turned_products(flow))
    reordering = Reordering(flow)
    products, summed = folded_products(flow), summed_along_rows(flow)
    copied = reordering.copied | summed
    fusion = Fusion(flow, scatters, products, returned, kept, copied, rate=rate, is_split=overlaps)
    in_memory = priced.read_from_memory()
    return LifeBasis(
        fusion, place, tuple(loops), reordering.made_of, summed, overlaps, in_memory, trips
    )


def find_lives(basis: LifeBasis, is_stage: bool = False, known: Liveness | None = None) -> Liveness:
    """XLA plans the body of a loop for overlap if something in it is asynchronous: the copy of a
    slice, or what a layout makes the loop over micro-batches send. Where nothing is but that, the
    lives without it are in `Liveness.unhidden`. `is_stage`: each trip of that loop is a program of
    its own, which copies no slice; `known`: of the same step, as a stage or not."""
    if not basis.overlaps:
        return replace(_lives(basis, ()) if known is None else known, runs_alone=is_stage)
    copying = {loop for loop in basis.loops if basis.fusion.copies_slices(*loop)}
    sending = {loop for loop in basis.loops if _is_over_micro_batches(basis, loop)}
    was_stage = known is not None and known.runs_alone
    trips = basis.trips() if is_stage or was_stage else {}
    if known is None or (trips and is_stage != was_stage):
        known = _lives(basis, copying | sending, trips if is_stage else {})
    if is_stage:
        unhidden = replace(_lives(basis, ()), runs_alone=True)
        return replace(known, unhidden=unhidden, runs_alone=True)
    unhidden = None if sending <= copying else _lives(basis, copying)
    return replace(known, unhidden=unhidden, runs_alone=False)


def _is_over_micro_batches(basis: LifeBasis, loop: tuple[int, int]) -> bool:
    """Whether a loop goes through both passes."""
    return {FORWARD, BACKWARD} <= {node.region for node in basis.fusion.flow.nodes[slice(*loop)]}


def _lives(
    basis: LifeBasis,
    planned: Collection[tuple[int, int]],
    trips: Mapping[int, int] = MappingProxyType({}),
) -> Liveness:
    """`planned`: loops whose bodies XLA plans for overlap; `trips`: of layers in a loop."""
    fusion, flow, loops, place = basis.fusion.copy(), basis.fusion.flow, basis.loops, basis.place
    planned = [loop for loop in loops if loop in planned]
    times = run_times(flow.nodes, flow.zeros, basis.overlaps, flow.recomputed, planned, trips)
    sweep = _Sweep(fusion, times, loops, basis.made_of, basis.summed, basis.overlaps)
    lives, node_ends = sweep.lives()
    times, node_ends = [sweep.times[i] for i in place], [node_ends[i] for i in place]
    return Liveness(tuple(lives), tuple(times), tuple(node_ends), basis.priced)


def transposed_state(flow: Dataflow, in_place: Collection[int]) -> frozenset[int]:
    """State that is not updated in place on several devices: its gradient comes from a batched
    product with its dimensions in another order, is reduced in that order, and XLA computes the
    whole update in it. On one device the product itself turns its result."""
    transposed: set[int] = set()
    for node in flow.nodes:
        if flow.is_transpose(node) and node.region != UPDATE:
            transposed.update(node.results)
            continue
        passes = node.region == UPDATE or flow.is_view(node)
        passes = passes or node.name == "convert_element_type"
        if passes and any(v in transposed for v in node.operands):
            transposed.update(node.results)
    return frozenset(v for v in transposed if v in in_place and len(flow.values[v].shape) > 2)


class _Sweep:
    def __init__(
        self,
        fusion: Fusion,
        times: list[int],
        loops: Sequence[tuple[int, int]],
        reordered: Set[int],
        summed: Set[int],
        overlaps: bool,
    ) -> None:
        self.fusion, self.flow = fusion, fusion.flow
        self.reordered, self.summed, self.overlaps = reordered, summed, overlaps
        self.nodes, self.values = self.flow.nodes, self.flow.values
        self.producer, self.readers = self.flow.producer, fusion.readers
        self.times, self.loops = times, loops
        self.first_zeros: dict[int, int] = {}  # zeros -> those of this type that are made first
        self.merged: dict[int, int] = {}  # elementwise value -> one that the same kernel writes

    def lives(self) -> tuple[list[Life], list[int]]:
        """(all lives; per node, until when its operands are needed)."""
        flow, fusion = self.flow, self.fusion
        self.merge_recomputed()
        self.merge_kernels()
        self.merge_siblings()
        node_ends, ends = self.last_needed()
        for other, first in self.first_zeros.items():
            _extend(ends, first, ends.get(other, -1))
        lives = self.recomputed_lives(node_ends, ends) + self.transposed_kernels(ends)
        lives += self.dilated_inputs()
        lives += self.workspaces()
        lives += self.ragged_copies(ends)
        lives += self.pooled_zeros()
        lives += self.in_order_of_sums(node_ends, ends)
        self.reuse_buffers(ends)
        last = len(self.nodes)
        for index, node in enumerate(self.nodes):
            for value in node.results:
                finished = flow.finished(value)
                if node.kind is NodeKind.INPUT:
                    lives.append(Life(value, 0, last))
                    continue
                if value not in fusion.written or finished in fusion.in_place:
                    continue
                if value in self.first_zeros:
                    continue
                start = self.times[index]
                end = ends.get(value, start)
                if node.name == "scan_stack":
                    loop = self.loop_of(index)
                    start = loop[0] if loop else start
                elif node.kind is NodeKind.MERGE:
                    loop = self.loop_of(index + 1)
                    end = max(end, loop[1] - 1 if loop else end)
                if finished in fusion.outputs:
                    end = last
                if end >= start:
                    lives += self.in_orders(value, start, end, node.region)
        return lives, node_ends

    def in_orders(self, value: int, start: int, end: int, region: str) -> Iterator[Life]:
        """A value in all orders that products of this pass want. One device writes them with one
        kernel; on several, where products run late, it is copied for the first of these."""
        count, finished = self.num_orders(value, (region,)), self.flow.finished(value)
        if count == 1 or not self.overlaps:
            yield Life(finished, start, end, count)
            return
        yield Life(finished, start, end)
        readers = {r.node for r in self.readers[value]}
        copied = min(self.times[i] for i in readers if is_product(self.nodes[i]))
        yield Life(finished, min(copied, end), end, count - 1)

    def num_orders(self, value: int, regions: Collection[str] | None = None) -> int:
        """How often a value is written, for products of these passes."""
        if value not in self.reordered:
            return 1
        readers = {r.node for r in self.readers.get(value, ())}
        wanted = [i for i in readers if regions is None or self.nodes[i].region in regions]
        return num_orders(self.flow, value, wanted, self.swapped)

    @cached_property
    def swapped(self) -> frozenset[int]:
        """Products of matrices that turn their results: XLA swaps their operands for that. On
        several devices the result is reduced before it is turned."""
        if self.overlaps:
            return frozenset()
        makers = (n.operands[0] for n in self.nodes if not self.flow.turned.isdisjoint(n.results))
        return frozenset(self.producer[self._unfinished(value)] for value in makers)

    def _unfinished(self, value: int) -> int:
        node = self.flow.maker(value)
        return node.operands[0] if node.kind is NodeKind.FINISH else value

    def last_needed(self) -> tuple[list[int], dict[int, int]]:
        """(per node, until when its operands are needed; per value, until when it is needed)."""
        written, padded = self.fusion.written, self.fusion.padded
        node_ends = [0] * len(self.nodes)
        ends: dict[int, int] = {}
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            end = self.times[index]
            if written.isdisjoint(node.results):
                for value in node.results:
                    end = max(end, ends.get(value, end))
            elif not padded.isdisjoint(node.results) and self.fusion.is_elementwise(index):
                readers = (r for value in node.results for r in self.readers.get(value, ()))
                end = max([end, *(node_ends[r.node] for r in readers if not r.unfused)])
            node_ends[index] = end
            for value in node.operands:
                needed = self.after_loops(value, index, end) if self.loops else end
                if needed > ends.get(value, -1):
                    ends[value] = needed
        for index, node in enumerate(self.nodes):
            if node.kind is NodeKind.MERGE:  # a carry reads a later result of its loop's body
                for value in node.operands:
                    if self.producer[value] > index:
                        loop = self.loop_of(index + 1) or (index, index + 1)
                        _extend(ends, value, loop[1] - 1)
        return node_ends, ends

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

    # -- kernels with several results

    def merge_kernels(self) -> None:
        """An elementwise kernel and the one that reads its result become one kernel, which writes
        both results, where nothing that the second waits for comes between: the first runs with
        the second, so what it reads is in memory beside both results. A result that no other kernel
        reads stays inside."""
        fusion, flow = self.fusion, self.flow
        reading: dict[int, list[int]] = {}
        for value, sources in fusion.made_from.items():
            for source in sources:
                reading.setdefault(source, []).append(value)
        for value in sorted(fusion.written, reverse=True):
            index = self.producer[value]
            if not fusion.is_elementwise(index) or flow.finished(value) in fusion.in_place:
                continue
            if index in fusion.scattered_into:  # the scatter comes between
                continue
            for made in sorted(reading.get(value, ())):
                last = self.producer[made]
                if (
                    fusion.is_elementwise(last)
                    and self.nodes[last].region == self.nodes[index].region
                    and self.values[made].shape == self.values[value].shape
                    and flow.finished(made) not in fusion.in_place
                    and self.runs_with(last, value, made)
                ):
                    self.times[index] = max(self.times[index], self.times[last])
                    if set(reading[value]) == {made} and self.is_inner(value):
                        for source in fusion.absorb(value, made):
                            reading[source] = [made if v == value else v for v in reading[source]]
                    else:
                        self.merged[value] = made
                    break

    def merge_recomputed(self) -> None:
        """An elementwise kernel of a layer that is computed again runs with the last one that reads
        the same arrays, if its result is needed only later: as an activation is made by the kernel
        of its gradient. Not a softmax of short rows, which is a kernel of another kind."""
        fusion, flow = self.fusion, self.flow
        kernels = {
            value: sources
            for value, sources in fusion.made_from.items()
            if fusion.is_elementwise(self.producer[value])
        }
        reading: dict[int, list[int]] = {}
        for value, sources in kernels.items():
            for source in sources:
                reading.setdefault(source, []).append(value)
        for value, sources in kernels.items():
            index = self.producer[value]
            rows = [v for v in sources if self.values[v].shape == self.values[value].shape]
            if index not in flow.recomputed or any(self.is_normalized(value, v) for v in rows):
                continue
            others = [
                self.times[self.producer[made]]
                for source in sources
                for made in reading[source]
                if self.values[made].shape == self.values[value].shape
                and self.times[self.producer[made]] < self.times[index]
            ]
            if others:
                self.run_by(index, max(others))

    def run_by(self, index: int, time: int) -> None:
        """A kernel, from the node that writes its result back to what it reads, runs by a time."""
        frontier = [index]
        while frontier:
            last = frontier.pop()
            if self.times[last] > max(time, last):
                self.times[last] = max(time, last)
                makers = [self.producer[v] for v in self.nodes[last].operands]
                frontier += [
                    i for i in makers if self.fusion.written.isdisjoint(self.nodes[i].results)
                ]

    def is_inner(self, value: int) -> bool:
        """Whether nothing but elementwise kernels and sums reads a value. Zeros are written for
        other readers' sake."""
        if value in self.flow.zeros or self.flow.finished(value) in self.fusion.outputs:
            return False
        return not self.is_read_unfused(value)

    def merge_siblings(self) -> None:
        """Zeros that kernels read are there once, from the first of these to the last. Kernels of
        the update that read the same zeros become one kernel, which runs with the last of them:
        what any of them reads is in memory until then. (In the passes, such kernels may wait for
        each other.)"""
        fusion = self.fusion
        kernels: dict[Type, dict[int, set[int]]] = {}  # type -> its zeros -> who reads them
        for zero in sorted(fusion.written & self.flow.zeros):
            ends = fusion.ends_of_kernels(zero)
            if ends:
                kernels.setdefault(self.flow.type_of(zero), {})[zero] = ends
        for readers in kernels.values():
            together = {index for ends in readers.values() for index in ends}
            together = {index for index in together if self.nodes[index].region == UPDATE}
            last = max((self.times[index] for index in together), default=0)
            for index in together:
                self.times[index] = last
            first, *others = readers
            self.first_zeros.update((v, first) for v in others if not self.is_read_unfused(v))

    def is_read_unfused(self, value: int) -> bool:
        return any(reader.unfused for reader in self.readers.get(value, ()))

    def runs_with(self, index: int, value: int, made: int) -> bool:
        """Whether the kernel that makes `made` of `value` can run with the one that makes `value`:
        it waits for nothing else that needs the value, and nothing needs the value before it."""
        if any(r.unfused and self.times[r.node] < self.times[index] for r in self.readers[value]):
            return False
        others = [v for v in self.fusion.made_from[made] if v != value]
        own = self.producer[value]
        return not any(
            self.producer[v] > own and self.fusion.waits_for(self.producer[v], own) for v in others
        )

    # -- buffers that are taken over

    def reuse_buffers(self, ends: dict[int, int]) -> None:
        """An elementwise result takes over the buffer of an operand of equal size if it is the last
        to read it, unless that is a product. What changes part of an array takes over that array,
        and a product that is added to an array takes over this one."""
        fusion, flow = self.fusion, self.flow
        made_with: dict[int, set[int]] = {}  # value -> what others of its kernel are made of
        for value, made in self.merged.items():
            made_with.setdefault(made, set()).update(fusion.made_from[value])
        for value, sources in fusion.made_from.items():
            made_from: Collection[int] = sources
            node = flow.maker(value)
            if node.kind is not NodeKind.OP or node.name in REDUCTIONS:
                continue
            changes = changes_operand(node.name)
            if node.name in UNFUSED and not changes:
                continue
            index = self.producer[value]
            time = self.times[index]
            if changes and node.operands:
                made_from = (flow.source(node.operands[0]),)
            elif index in fusion.epilogues:
                made_from = [
                    flow.source(v) for v in node.operands if not fusion.is_of_product(index, v)
                ]
            if value in self.merged or value in self.summed:
                continue  # the kernel's other result is made of what it reads too, or it transposes
            shared = made_with.get(value, ())
            for source in made_from:
                if source in shared:
                    continue
                maker = flow.maker(source)
                same_size = self.values[source].num_bytes == self.values[value].num_bytes
                is_product = maker.is_heavy or self.producer[source] in fusion.epilogues
                if is_product and not (
                    changes or node.region == UPDATE or index in fusion.epilogues
                ):
                    continue  # kernels of the update run one after another, and free what they read
                if maker.kind is not NodeKind.INPUT and same_size and ends.get(source) == time:
                    if changes or not (
                        self.is_normalized(value, source) or self.is_summed(index, value)
                    ):
                        ends[source] = time - 1
                    break

    def is_summed(self, index: int, value: int) -> bool:
        """Whether the kernel that makes a value also sums it, as that of an activation's gradient
        does for the bias: what it reads, both results are made of, so it takes over nothing."""
        return self.fusion.is_elementwise(index) and any(
            self.nodes[reader.node].name in REDUCTIONS
            and self.nodes[reader.node].region == self.nodes[index].region
            for reader in self.readers.get(value, ())
        )

    def is_normalized(self, value: int, source: int) -> bool:
        """Whether a value is made of a source and of sums over the source's rows, as a softmax and
        its gradient are. XLA makes one Triton kernel of it if a row is short enough, and such a
        kernel writes to a buffer of its own."""
        shape = self.values[source].shape
        if not shape or shape[-1] > MAX_TILE_ROW:
            return False
        behind = self.sums_behind[self.producer[value]]
        return any(
            behind >> self.sums[index] & 1
            for index in self.fusion.fused_readers(source)
            if index in self.sums
        )

    @cached_property
    def sums(self) -> dict[int, int]:
        """Sums over rows, numbered."""
        found = (index for index, node in enumerate(self.nodes) if _sums_last(node))
        return {index: number for number, index in enumerate(found)}

    @cached_property
    def sums_behind(self) -> list[int]:
        """Per node, the sums over rows that it depends on, as bits: a deep model asks too often to
        search each time."""
        behind = [0] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            here = behind[index]
            if index in self.sums:
                here |= 1 << self.sums[index]
            if here:
                for value in node.results:
                    for reader in self.readers.get(value, ()):
                        behind[reader.node] |= here
        return behind

    # -- copies

    def recomputed_lives(self, node_ends: list[int], ends: dict[int, int]) -> list[Life]:
        """Lives, in the backward pass, of forward values that are recomputed there: each pass
        writes a transposed elementwise value in the order that its products want, and only its
        sources survive in between. Products that are repeated over one dimension read it in any
        order. On several devices, a kernel that writes its result in several orders does so for
        both passes at once."""
        flow, fusion = self.flow, self.fusion
        lives: list[Life] = []
        for value in fusion.transposed:
            if self.overlaps and self.num_orders(value) > 1:
                continue
            region = flow.maker(value).region
            readers = [r.node for r in self.readers.get(value, ())]
            if all(num_batched(self.nodes[i]) == 1 for i in readers if is_product(self.nodes[i])):
                continue
            same_pass = [i for i in readers if self.nodes[i].region == region]
            other_pass = [i for i in readers if self.nodes[i].region != region]
            if not same_pass or not other_pass or flow.finished(value) in fusion.outputs:
                continue
            start = min(self.times[i] for i in other_pass)
            lives.append(Life(flow.finished(value), start, max(node_ends[i] for i in other_pass)))
            ends[value] = max(node_ends[i] for i in same_pass)
            for source in fusion.made_from[value]:
                _extend(ends, source, start)
        return lives

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
            is_input = self.flow.maker(self.flow.source(kernel)).kind is NodeKind.INPUT
            if is_input and kernel not in copies:
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
            if self.flow.maker(self.flow.source(node.operands[1])).name == "rev":
                continue
            shapes = [self.values[v].shape for v in (*node.operands, *node.results)]
            images, positions, out_channels, *_ = (
                prod(shapes[which][dim] for which, dim in dims) for dims in node.work.sizes
            )
            made = prod(shapes[2]) // max(1, images * out_channels)
            count, time = round(made / max(1, positions)), self.times[index]
            yield Life(node.operands[0], time, time, max(1, count))

    def in_order_of_sums(self, node_ends: list[int], ends: dict[int, int]) -> list[Life]:
        """What is read in the order of a sum, and in its own by products: kernels write both. On
        one device, no product needs the other for long."""
        fusion, lives = self.fusion, list[Life]()
        for value in self.summed if self.overlaps else ():
            summed = self.times[self.producer[value]]
            for source in fusion.made_from.get(value, ()):
                index = self.producer[source]
                same = self.values[source].shape == self.values[value].shape
                if same and fusion.is_elementwise(index) and self.is_read_unfused(source):
                    lives.append(Life(self.flow.finished(source), self.times[index], summed))
                    others = {r.node for r in self.readers[source] if r.unfused}
                    others |= {r.node for r in self.readers[source] if node_ends[r.node] != summed}
                    ends[source] = max(node_ends[index] for index in others)
        return lives

    def pooled_zeros(self) -> Iterator[Life]:
        """Zeros that the gradient of a max pooling is scattered into. XLA merges them with those
        that a `relu` of that type compares with, so they are in memory from the first one on."""
        flow = self.flow
        first: dict[Type, int] = {}
        for index, node in enumerate(self.nodes):
            if node.name == "max" and len(node.operands) == 1:  # the other is a constant
                first.setdefault(flow.type_of(node.results[0]), self.times[index])
            if node.name == "select_and_scatter_add":
                result, time = node.results[0], self.times[index]
                start = first.get(flow.type_of(result), time)
                if start < time:
                    yield Life(flow.finished(result), start, time - 1)

    def workspaces(self) -> Iterator[Life]:
        """Copies that cuDNN makes of what a convolution in three dimensions reads and writes: its
        kernels want channels last, where XLA has them first."""
        for index, node in enumerate(self.nodes):
            if node.name == "conv_general_dilated" and len(self.flow.shape_of(node)) > 4:
                for value in (*node.operands, self.flow.finished(node.results[0])):
                    yield Life(value, self.times[index], self.times[index])

    def ragged_copies(self, ends: dict[int, int]) -> list[Life]:
        """Copies that ragged products read, for every group of rows; what nothing else reads ends
        with the first of them."""
        lives, copied = ragged_copies(
            self.nodes,
            self.values,
            self.times,
            self.flow.source,
            self.may_be_made,
        )
        for value, (readers, first) in copied.items():
            if {r.node for r in self.readers.get(value, ())} <= readers and value in ends:
                ends[value] = min(ends[value], first)
        return lives

    def may_be_made(self, value: int) -> int:
        """When an elementwise value can be made at the earliest: its sources are there."""
        time, known, todo = 0, {value}, [value]
        while todo:
            index = self.producer[todo.pop()]
            node = self.nodes[index]
            is_fused = self.fusion.is_elementwise(index) or self.flow.is_view(node)
            if is_fused and node.work is None:
                todo += (more := [v for v in node.operands if v not in known])
                known.update(more)
            else:
                time = max(time, self.times[index])
        return time


def is_product(node: Node) -> bool:
    return node.name == "dot_general" and len(node.operands) == 2


def num_batched(node: Node) -> int:
    """Over how many dimensions a product is repeated."""
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    one, other = ({f for factors in dims for f in factors} for dims in node.rule.operands)
    return len(one & other & kept)


def changes_operand(name: str) -> bool:
    """Whether an op returns its first operand with a part of it changed, in place if it may."""
    return name.startswith("scatter") or name == "dynamic_update_slice"


def _extend(ends: dict[int, int], value: int, end: int) -> None:
    ends[value] = max(ends.get(value, -1), end)


def _sums_last(node: Node) -> bool:
    """A reduction over the last dimension."""
    if node.name not in REDUCTIONS or not node.rule.operands:
        return False
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    last = node.rule.operands[0][-1:]
    return any(factors and kept.isdisjoint(factors) for factors in last)

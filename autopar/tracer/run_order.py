"""When XLA runs each node: from the nodes of a graph to their times, before sharding.

Most nodes run at their position in the graph. The exceptions:

- *The update* is interleaved with the backward pass: it runs as soon as its operands exist.
- *Gradients of parameters* come late where there are collectives to hide (`_late_gradients`), at
  the latest where a barrier waits for them, in front of the next layer that is recomputed, or at
  the end of a loop's body that adds them up, or of their own layer where a stage runs equal layers
  as a loop (`rolled_layers`). Those that a loop over layers stacks do not: each trip
  hides their collectives under its own compute.
- *Other products* of the backward pass come late there too, if what reads them waits for later ones
  (`_late_branches`), unless they free what a recomputed layer made early (`_made_early`).
- *Recomputed values* are made when they are first needed there: the softmax of a layer's last
  attention after the gradient of its scores, since only gradients of parameters and of its values
  read it.
- *Copies* of inputs, and zeros, are made when they are first needed; zeros that a loop reads,
  before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from autopar.ir.graph import Node, NodeKind
from autopar.tracer.costs import REDUCTIONS
from autopar.tracer.op_sizes import RAGGED_PRODUCT
from autopar.tracer.regions import BACKWARD, UPDATE
from autopar.tracer.sums import ADDITIONS


def run_times(
    nodes: Sequence[Node],
    zeros: Collection[int],
    overlaps: bool,
    recomputed: Collection[int] = (),
    loops: Sequence[tuple[int, int]] = (),
    trips: Mapping[int, int] = MappingProxyType({}),
) -> list[int]:
    """`zeros`: values known to be zero; `overlaps`: XLA hides collectives under compute;
    `recomputed`: nodes that compute a layer again; `loops`: those whose bodies are planned for
    overlap too, outer loops first; `trips`: nodes of the backward pass -> the last node of their
    trip, of layers that will run as a loop."""
    producer = {v: i for i, node in enumerate(nodes) for v in node.results}
    late = _late_gradients(nodes, producer, loops, trips) if overlaps else {}
    made_early = _made_early(nodes, late, recomputed) if overlaps else frozenset()
    late |= _late_branches(nodes, late, made_early) if overlaps else {}
    last_of = _last_of_barriers(nodes) if late else {}
    times: list[int] = []
    for index, node in enumerate(nodes):
        time = late.get(index, last_of.get(index, index))
        if node.region == UPDATE and node.kind in (NodeKind.OP, NodeKind.FINISH):
            time = 0
            for value in node.operands:
                i = producer[value]
                if i < index and nodes[i].kind is not NodeKind.INPUT:
                    time = max(time, times[i])
        elif late and node.kind is not NodeKind.MERGE:
            # What reads a late product waits for it.
            for value in node.operands:
                i = producer[value]
                if i < index and times[i] > time:
                    time = times[i]
        times.append(time)
    zeros = frozenset(zeros)
    when_needed = [
        node.kind is NodeKind.USE
        or (not zeros.isdisjoint(node.results) and _comes_when_needed(node))
        for node in nodes
    ]
    first_read: dict[int, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        if overlaps and index in recomputed:
            read = min((first_read[v] for v in nodes[index].results if v in first_read), default=0)
            times[index] = max(times[index], read - 1)
        time = times[index]
        if when_needed[index]:
            time = first_read.get(nodes[index].results[0], time)
        for value in nodes[index].operands:
            if first_read.get(value, time) >= time:
                first_read[value] = time
    carries = list(accumulate(node.kind is NodeKind.MERGE for node in nodes))
    for index, node in enumerate(nodes):
        if when_needed[index]:
            time = first_read.get(node.results[0], index)
            enters_loop = carries[min(time, len(nodes) - 1)] > carries[index]
            if node.kind is NodeKind.USE or node.region == UPDATE or not enters_loop:
                times[index] = time
    return times


def _comes_when_needed(zeros: Node) -> bool:
    """Of a node that makes zeros."""
    return zeros.region == UPDATE or (zeros.kind is NodeKind.OP and not zeros.operands)


def _late_gradients(
    nodes: Sequence[Node],
    producer: dict[int, int],
    loops: Sequence[tuple[int, int]],
    trips: Mapping[int, int],
) -> dict[int, int]:
    """Products, scatters and sums that nothing but the update waits for, and their reductions, with
    the times at which they run. XLA hides collectives under compute and plans backwards from the
    end, where all of these are ready (`_beside_later`). Their partial sums wait for the end, where
    their reductions are merged. In a loop's body, nothing but the next trip waits for what they are
    added to, and the end is that of the body; so too for layers that will run as a loop, each of
    which is a trip."""
    late = _latest_times(nodes, producer, loops)
    late = {i: min(time, trips.get(i, time)) for i, time in late.items()}
    for index in _lone_products(nodes, late):
        del late[index]
    end = _end_of_passes(nodes)
    finish_of = {n.operands[0]: i for i, n in enumerate(nodes) if n.kind is NodeKind.FINISH}
    due: dict[int, list[int]] = {}
    for index in sorted(late):
        due.setdefault(late[index], []).append(index)
    for number, index in enumerate(due.get(end, ())):
        late[index] = min(end + number, len(nodes) - 1)
        for value in nodes[index].results:
            if value in finish_of:
                late[finish_of[value]] = late[index]
    for time in {end, *(stop - 1 for _, stop in loops), *trips.values()}:
        late |= _beside_later(due.get(time, ()))
    last_of = _last_of_barriers(nodes)
    for index, time in late.items():
        if time in last_of:
            late[index] = min(time, last_of[time] - 1)
    return late


def _last_of_barriers(nodes: Sequence[Node]) -> dict[int, int]:
    """Node of a barrier → its last node. A barrier has a node for each of its values, and lets none
    of them pass before all are there: what they are made of is gone by then."""
    last: dict[int, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        if nodes[index].name == "optimization_barrier":
            last[index] = last.get(index + 1, index)
    return last


def _lone_products(nodes: Sequence[Node], late: dict[int, int]) -> list[int]:
    """Products that a barrier waits for, and for no other. XLA merges the reductions of several; a
    single one it begins early, to hide it under the rest of the layer. (The gradient of a
    convolution's kernel comes after that of its input all the same.)"""
    waited_for: dict[int, list[int]] = {}  # the first node of a barrier -> products
    barrier = [node.name == "optimization_barrier" for node in nodes]
    for index, time in late.items():
        if time < len(nodes) and barrier[time] and nodes[index].is_heavy:
            while time and barrier[time - 1]:
                time -= 1
            waited_for.setdefault(time, []).append(index)
    alone = [products[0] for products in waited_for.values() if len(products) == 1]
    return [index for index in alone if nodes[index].name == "dot_general"]


def _beside_later(late: Sequence[int]) -> dict[int, int]:
    """When the first half of these runs: beside those of the second half, two at a time. Planned
    backwards, they take turns with what the backward pass waits for until there are none left,
    which is so halfway through it. So the operands of half of them are kept at once."""
    beside = {index: (len(late) + number + 1) // 2 for number, index in enumerate(late)}
    return {index: late[other] for index, other in beside.items() if other < len(late)}


def _made_early(
    nodes: Sequence[Node], late: Collection[int], recomputed: Collection[int]
) -> frozenset[int]:
    """What products that compute a layer again read, if more than late gradients needs them: it is
    in memory early, as the softmax of an attention is that a later part of the layer reads."""
    needed: set[int] = set()  # values that not only late gradients read
    read: set[int] = set()
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if index in late or (index in recomputed and needed.isdisjoint(node.results)):
            continue
        needed.update(node.operands)
        if index in recomputed and node.is_heavy:
            read.update(node.operands)
    return frozenset(read)


def _late_branches(
    nodes: Sequence[Node], late: Collection[int], made_early: frozenset[int]
) -> dict[int, int]:
    """Products of the backward pass that run after later ones, since what reads them waits for
    these anyway: XLA plans backwards, and runs everything as late as it may. Not those of values
    `made_early`, which they free."""
    reached: dict[int, int] = {}  # value -> the first product or sum that waits for it
    times: dict[int, int] = {}
    products: list[int] = []  # those after the node, each negated, so in order
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        reader: int | None = None
        for value in node.results:
            other = reached.get(value)
            if other is not None and (reader is None or other < reader):
                reader = other
        if node.is_heavy and node.region == BACKWARD and index not in late:
            before = len(products) if reader is None else bisect_right(products, -reader)
            frees = not made_early.isdisjoint(node.operands)
            if before < len(products) and not frees:
                times[index] = -products[before]
            products.append(-index)
        if node.is_heavy or node.kind is NodeKind.MERGE or node.name in REDUCTIONS:
            reader = index
        if reader is not None:
            for value in node.operands:
                if reached.get(value, reader) >= reader:
                    reached[value] = reader
    return times


def _latest_times(
    nodes: Sequence[Node], producer: dict[int, int], loops: Sequence[tuple[int, int]]
) -> dict[int, int]:
    """The products, scatters and sums of the backward pass that something waits for only at the end
    of the step, of a loop's body or of a recomputed layer, and that time."""
    carried = {
        value: node.results[0]
        for index, node in enumerate(nodes)
        if node.kind is NodeKind.MERGE
        for value in node.operands
        if producer[value] > index
    }
    end = _end_of_passes(nodes)
    end_of = {i: stop - 1 for start, stop in loops for i in range(start, stop)}
    needed: dict[int, int | None] = {}  # value -> when; None if the passes wait for it
    late: dict[int, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        after = [needed[v] for v in node.results if v in needed]
        need: int | None = None
        if node.region == UPDATE:
            need = end
        elif node.name == "scan_stack":
            need = None
        elif carry := [carried[v] for v in node.results if v in carried]:
            adds_up = _adds_to(nodes, producer, node, carry[0])
            need = end_of.get(index, index) if adds_up else index
        elif after and None not in after:
            need = min(time for time in after if time is not None)
            if node.name == "optimization_barrier":  # a recomputed layer waits for it
                need = index
        is_sum = node.name in REDUCTIONS and _reduces(node)
        is_product = node.is_heavy or node.name == RAGGED_PRODUCT or is_scatter_add(node.name)
        comes_late = is_product or (is_sum and node.region == BACKWARD)
        if need is not None and need > index and comes_late:
            late[index] = need
        if is_product or is_sum or node.kind is NodeKind.MERGE:
            need = None
        for value in node.operands:
            before = needed.get(value, need)
            needed[value] = None if need is None or before is None else min(before, need)
    return late


def _adds_to(nodes: Sequence[Node], producer: dict[int, int], node: Node, carry: int) -> bool:
    """Whether a node makes the next value of a carry by adding to it."""
    while node.kind is NodeKind.FINISH:
        node = nodes[producer[node.operands[0]]]
    return node.name in ADDITIONS and carry in node.operands


def _reduces(node: Node) -> bool:
    """Not over dimensions of size 1, as in the gradient of a broadcast."""
    kept = {f for dims in node.rule.results for factors in dims for f in factors}
    read = {f for dims in node.rule.operands for factors in dims for f in factors}
    return bool(read - kept)


def _end_of_passes(nodes: Sequence[Node]) -> int:
    """The first time after the forward and the backward pass."""
    return max((i + 1 for i, node in enumerate(nodes) if node.region != UPDATE), default=0)


def is_scatter_add(name: str) -> bool:
    return name in ("scatter-add", "scatter_add")

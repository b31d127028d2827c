"""Parallel blocks: from a `ShardingProblem` to the `Blocks` of its graph.

A walk through the program. Products, convolutions, gathers and the like are *entries*: each begins
a block. Any other node *follows* a block that it reads from if, whatever strategy the entry takes,
the node has one that reads all it reads from the block in the layouts in which the block makes
them. Where these are partial, the FINISH node behind sums them up and is taken to leave them whole.
Of several blocks it follows the one it reads most bytes from, then the latest. What follows none is
an entry itself. Strategies of the entry that do not reach a node (64 parts of 32 heads) are no
strategies of the block; a node that would take too many of them away begins a block of its own.

Two kinds of nodes wait for their first reader and join its block, if they can give whatever layout
it wants: those that depend on arguments and constants alone (parameters and their casts, masks),
and those whose operands leave open how their results lie (a broadcast).

Blocks are an idea of CFP (Hu et al., 2025); this construction of them, from strategies, is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.blocks import Block, Blocks, BlockStrategy, Occurrence, Segment
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.spec import PARTIAL, WHOLE, Layout
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.strategies import Strategy

_ENTRIES = (
    "gather",
    "scatter",
    "sort",
    "top_k",
    "cumsum",
    "cumprod",
    "fft",
    "dot_product_attention",
)
_MIN_REPEATS_OF_ONE = 4  # of a single block; two equal products side by side are no layers

_LEAST_SHARE = 0.6  # of the entry's strategies that a block must keep

_Map = tuple[int | None, ...]  # entry's strategy -> strategy of a node, if there is one
_Read = tuple[Layout | None, ...]
_Layouts = int  # number of a tuple: entry's strategy -> layout of a value
_Given = tuple[str, int, _Layouts]  # "operand" or "result", which, its layouts


def find_blocks(problem: ShardingProblem) -> Blocks:
    walk = _Walk(problem)
    walk.run()
    return _gathered(problem, walk)


def is_entry(node: Node) -> bool:
    """Whether a node begins a block by what it is."""
    if node.kind is not NodeKind.OP:
        return False
    return node.is_heavy or node.rule.local or node.name.startswith(_ENTRIES)


@dataclass
class _Group:
    """A block as it grows: for each of its nodes, the strategy that goes with the entry's."""

    entry: int
    alive: set[int]  # strategies of the entry that reach all nodes
    least: float  # so many must be left
    maps: dict[int, _Map] = field(default_factory=dict)


class _Walk:
    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.graph: Graph = problem.graph
        self.groups: list[_Group] = []
        self.made: dict[int, tuple[int, _Layouts]] = {}  # value -> group, its layouts
        self.waiting: set[int] = set()
        self.read = {value for node in self.graph.nodes for value in node.operands}
        self.tuples: list[_Read] = []
        self.numbers: dict[_Read, int] = {}
        self.known: dict[tuple, tuple[_Map, tuple[_Layouts, ...]]] = {}
        self.open: dict[tuple, bool] = {}
        self.tables: dict[tuple, dict[_Read, int]] = {}

    def run(self) -> None:
        for index, node in enumerate(self.graph.nodes):
            if is_entry(node):
                self.enter(index)
            elif not any(value in self.made for value in node.operands) or self.is_open(index):
                self.waiting.add(index)
            else:
                self.place(index)
        for index in sorted(self.waiting):
            if index in self.waiting:
                self.place(index)

    def place(self, index: int) -> None:
        """Into a block that it reads from, or one of its own; but what nothing reads, or leaves
        nothing to decide, goes to the block before."""
        node, strategies = self.graph.nodes[index], self.strategies(index)
        if any(self.follow(index, group) for group in self.candidates(node)):
            return
        unread = not node.operands and not any(v in self.read for v in node.results)
        if not self.groups or not (unread or len(strategies) == 1):
            self.enter(index)
            return
        before = [at for at, group in enumerate(self.groups) if group.entry < index]
        group = before[-1] if before else 0
        most = max(range(len(strategies)), key=lambda j: strategies[j].parallelism)
        own = (most,) * len(self.groups[group].maps[self.groups[group].entry])
        self.join(index, group, own, self.results(index, own))

    def is_open(self, index: int) -> bool:
        """Whether the layouts of what it reads from blocks leave several for the results."""
        node, strategies = self.graph.nodes[index], self.strategies(index)
        if node.kind is not NodeKind.OP:
            return False
        places = tuple(p for p, value in enumerate(node.operands) if value in self.made)
        key = (id(strategies), places)
        if key not in self.open:
            ways = {(tuple(s.operands[p] for p in places), s.results) for s in strategies}
            self.open[key] = len({read for read, _ in ways}) < len(ways)
        return self.open[key]

    def strategies(self, index: int) -> Sequence[Strategy]:
        return self.problem.strategies[self.problem.classes[index]]

    def candidates(self, node: Node) -> list[int]:
        """Groups that a node reads from, those it should follow first."""
        size: dict[int, int] = {}
        for value in node.operands:
            if value in self.made:
                group = self.made[value][0]
                size[group] = max(size.get(group, 0), self.graph.values[value].num_bytes)
        is_forward = node.region == "forward"

        def key(group: int) -> tuple:
            entry = self.graph.nodes[self.groups[group].entry]
            return (entry.region == "forward") == is_forward, size[group], group

        return sorted(size, key=key, reverse=True)

    # -- nodes join

    def enter(self, index: int) -> None:
        own = tuple(range(len(self.strategies(index))))
        self.groups.append(_Group(index, set(own), _LEAST_SHARE * len(own)))
        self.join(index, len(self.groups) - 1, own, self.results(index, own))

    def follow(self, index: int, group: int) -> bool:
        given = [("operand", p, number) for p, number in self.reads(index, group)]
        own, results = self.matched(index, given)
        alive = {i for i in self.groups[group].alive if own[i] is not None}
        if len(alive) < self.groups[group].least:
            return False
        self.groups[group].alive = alive
        self.join(index, group, own, results)
        return True

    def lead(self, value: int, group: int, wanted: _Layouts) -> None:
        """A node that waits joins the block of a reader, if it can give whatever that wants."""
        index, result = self.graph.producer[value]
        reads = [("operand", p, number) for p, number in self.reads(index, group)]
        own, results = self.matched(index, [("result", result, wanted), *reads])
        if all(own[i] is not None for i in self.groups[group].alive):
            self.join(index, group, own, results)

    def reads(self, index: int, group: int) -> list[tuple[int, _Layouts]]:
        """(operand, its layouts) for what a node reads from a block."""
        return [
            (position, own[1])
            for position, value in enumerate(self.graph.nodes[index].operands)
            if (own := self.made.get(value)) is not None and own[0] == group
        ]

    def matched(self, index: int, given: Sequence[_Given]) -> tuple[_Map, tuple[_Layouts, ...]]:
        """Strategies of a node, one for each of the entry's where there is one, that have its
        operands and results in the given layouts; and the layouts of all results then."""
        node, strategies = self.graph.nodes[index], self.strategies(index)
        key = (id(strategies), node.kind, *given)
        if key not in self.known:
            table = self.table(index, tuple((what, place) for what, place, _ in given))
            own: list[int | None] = []
            for layouts in zip(*(self.tuples[number] for *_, number in given), strict=True):
                found = table.get(layouts)
                if found is None and node.kind is NodeKind.FINISH:
                    found = table.get(tuple(map(_summed, layouts)))
                own.append(found)
            self.known[key] = (tuple(own), self.results(index, own))
        return self.known[key]

    def results(self, index: int, own: Sequence[int | None]) -> tuple[_Layouts, ...]:
        strategies = self.strategies(index)
        return tuple(
            self.number(tuple(None if j is None else strategies[j].results[r] for j in own))
            for r in range(len(self.graph.nodes[index].results))
        )

    def join(self, index: int, group: int, own: _Map, results: Sequence[_Layouts]) -> None:
        node, strategies = self.graph.nodes[index], self.strategies(index)
        self.groups[group].maps[index] = own
        self.waiting.discard(index)
        for value, number in zip(node.results, results, strict=True):
            self.made[value] = (group, number)
        for position, value in enumerate(node.operands):
            if self.graph.producer[value][0] in self.waiting:
                wanted = (None if j is None else strategies[j].operands[position] for j in own)
                self.lead(value, group, self.number(tuple(wanted)))

    # -- tables

    def table(self, index: int, places: tuple[tuple[str, int], ...]) -> dict[_Read, int]:
        """Layouts of some operands and results -> the strategy with them, of several the one that
        divides most work."""
        strategies = self.strategies(index)
        key = (id(strategies), places)
        if key not in self.tables:
            table = self.tables[key] = {}
            for j, strategy in enumerate(strategies):
                layouts = tuple(
                    (strategy.operands if what == "operand" else strategy.results)[place]
                    for what, place in places
                )
                known = table.get(layouts)
                if known is None or strategies[known].parallelism < strategy.parallelism:
                    table[layouts] = j
        return self.tables[key]

    def number(self, layouts: _Read) -> _Layouts:
        found = self.numbers.setdefault(layouts, len(self.tuples))
        if found == len(self.tuples):
            self.tuples.append(layouts)
        return found


def _summed(layout: Layout | None) -> Layout | None:
    return (
        None if layout is None else tuple(WHOLE if entry == PARTIAL else entry for entry in layout)
    )


# -- from groups to blocks


def _gathered(problem: ShardingProblem, walk: _Walk) -> Blocks:
    graph, classes = problem.graph, problem.classes
    numbers: dict[tuple, int] = {}
    kinds = [numbers.setdefault(_kind(node), len(numbers)) for node in graph.nodes]
    known: dict[tuple, int] = {}
    wirings: dict[tuple, int] = {}
    blocks: list[Block] = []
    counts: list[int] = []
    sequence: list[Occurrence] = []
    for group in sorted(walk.groups, key=lambda g: g.entry):
        nodes = _in_order(graph, group, kinds)
        alike = wirings.setdefault(_wiring(graph, nodes, kinds), len(wirings))
        key = (alike, tuple(classes[n] for n in nodes))
        if key not in known:
            known[key] = len(blocks)
            counts.append(0)
            blocks.append(_block(problem, group, nodes, alike, len(blocks)))
        counts[known[key]] += 1
        sequence.append(Occurrence(known[key], group.entry, nodes))
    return Blocks(
        problem.mesh.shape,
        tuple(replace(b, count=n) for b, n in zip(blocks, counts, strict=True)),
        tuple(sequence),
        _segments([blocks[own.block].alike for own in sequence], sequence),
        len(graph.nodes),
    )


def _kind(node: Node) -> tuple:
    return (node.kind, node.name, node.signature, node.rule, node.weight, node.region)


def _in_order(graph: Graph, group: _Group, kinds: Sequence[int]) -> tuple[int, ...]:
    """The entry, then the rest such that nodes of equal blocks correspond, in whatever order the
    program has them (state is sorted by name, layer_10 before layer_2): by colours, which sweeps
    along the data and against it give."""
    own = sorted(group.maps)
    colours = {n: hash((kinds[n], n == group.entry)) for n in own}
    made_from = {n: [graph.producer[v] for v in graph.nodes[n].operands] for n in own}
    readers: dict[int, list[tuple[int, int]]] = {n: [] for n in own}
    for n in own:
        for position, (maker, _) in enumerate(made_from[n]):
            if maker in readers:
                readers[maker].append((n, position))

    def along_the_data() -> None:
        for n in own:
            before = ((colours.get(m, -1), r) for m, r in made_from[n])
            colours[n] = hash((colours[n], *before))

    along_the_data()
    for n in reversed(own):
        colours[n] = hash((colours[n], *sorted((colours[m], p) for m, p in readers[n])))
    along_the_data()
    place = {n: i for i, n in enumerate(group.maps)}
    own.sort(key=lambda n: (n != group.entry, colours[n], place[n]))
    return tuple(own)


def _wiring(graph: Graph, nodes: tuple[int, ...], kinds: Sequence[int]) -> tuple:
    """What its nodes are and how they read from each other."""
    place = {n: i for i, n in enumerate(nodes)}
    return tuple(
        (
            kinds[n],
            *(
                (place.get(maker, -1), result)
                for maker, result in (graph.producer[v] for v in graph.nodes[n].operands)
            ),
        )
        for n in nodes
    )


def _block(
    problem: ShardingProblem, group: _Group, nodes: tuple[int, ...], alike: int, number: int
) -> Block:
    node = problem.graph.nodes[group.entry]
    strategies = []
    for index in sorted(group.alive):
        own = tuple(j for n in nodes if (j := group.maps[n][index]) is not None)
        strategies.append(BlockStrategy(index, "", own))
    return Block(
        name=f"block {number}",
        entry=group.entry,
        owner=problem.classes[group.entry],
        nodes=nodes,
        count=1,
        alike=alike,
        operator=node.name,
        module=node.module,
        region=node.region,
        strategies=tuple(strategies),
    )


# -- segments


def _segments(alike: Sequence[int], sequence: Sequence[Occurrence]) -> tuple[Segment, ...]:
    found: list[tuple[int, int, int]] = []  # start, period, repeats
    _split(np.array(alike, dtype=np.int64), 0, found)
    return tuple(
        Segment(
            f"segment {number}",
            tuple(own.block for own in sequence[start : start + period]),
            tuple(start + k * period for k in range(repeats)),
        )
        for number, (start, period, repeats) in enumerate(found)
    )


def _split(alike: np.ndarray, offset: int, found: list[tuple[int, int, int]]) -> None:
    """The longest stretch that repeats, what is before it and what is after it."""
    if not len(alike):
        return
    best: tuple[int, int, int] | None = None  # covered, −period, start
    for period in range(1, len(alike) // 2 + 1):
        start, length = _longest(alike, period)
        repeats = length // period
        if repeats < (_MIN_REPEATS_OF_ONE if period == 1 else 2):
            continue
        key = (repeats * period, -period, -start)
        if best is None or key > best:
            best = key
    if best is None:
        found.append((offset, len(alike), 1))
        return
    covered, period, start = best[0], -best[1], -best[2]
    _split(alike[:start], offset, found)
    found.append((offset + start, period, covered // period))
    _split(alike[start + covered :], offset + start + covered, found)


def _longest(alike: np.ndarray, period: int) -> tuple[int, int]:
    """(start, length) of the longest stretch with a period."""
    same = np.concatenate(([0], (alike[:-period] == alike[period:]).astype(np.int8), [0]))
    edges = np.diff(same)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best]) + period

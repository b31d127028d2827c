"""Parallel blocks: from a `ShardingProblem` to the `Blocks` of its graph.

The walk follows the program. Products, convolutions, gathers and the like are *entries*: each
begins a block. Any other node *follows* a block if, for every strategy of the entry, the node has
one that reads the block's values in the layouts in which the block makes them. If these are
partial, the FINISH node behind them is taken to leave them whole. Of several blocks a node follows
the one it reads most bytes from, then the latest. A node that follows none is an entry itself.
Strategies of the entry that some node cannot follow (64 shards of 32 heads) are no strategies of
the block; a node that would rule out too many of them begins a new block.

Two kinds of nodes wait for their first reader and join its block, if they can give every layout
that it wants: nodes that depend on arguments and constants alone (parameters and their casts,
masks), and nodes whose operands do not determine the layouts of their results (a broadcast).

Blocks are an idea of CFP (Hu et al., 2025); this construction of them, from strategies, is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.blocks import Block, Blocks, BlockStrategy, Occurrence, Segment
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.spec import PARTIAL, WHOLE, Layout
from autopar.rewrite.repeats import longest_repeat
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
_MIN_REPEATS_OF_ONE = 4  # of a single block: two equal products in a row are no layers
_MIN_SHARE = 0.6  # of the entry's strategies that a block must keep

_Map = tuple[int | None, ...]  # entry's strategy -> strategy of a node, if there is one
_Read = tuple[Layout | None, ...]
_Layouts = int  # number of a tuple: entry's strategy -> layout of a value
_Given = tuple[str, int, _Layouts]  # "operand" or "result", which, its layouts


def find_blocks(problem: ShardingProblem) -> Blocks:
    walk = _Walk(problem)
    walk.run()
    return _gathered(problem, walk)


def is_entry(node: Node) -> bool:
    """Whether a node always begins a block."""
    if node.kind is not NodeKind.OP:
        return False
    return node.is_heavy or node.rule.local or node.name.startswith(_ENTRIES)


@dataclass
class _Group:
    """A growing block: for each of its nodes, the strategy that follows each of the entry's."""

    entry: int
    alive: set[int]  # strategies of the entry that all nodes can follow
    min_alive: float
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
        """Put a node into a block that it reads from, or into a new one; an unread node, or one
        with a single strategy, goes to the block before."""
        node, strategies = self.graph.nodes[index], self.strategies(index)
        if any(self.follow(index, group) for group in self.candidates(node)):
            return
        unread = not node.operands and not any(v in self.read for v in node.results)
        if not self.groups or not (unread or len(strategies) == 1):
            self.enter(index)
            return
        before = [at for at, group in enumerate(self.groups) if group.entry < index]
        group = before[-1] if before else 0
        most_parallel = max(range(len(strategies)), key=lambda j: strategies[j].parallelism)
        followed = (most_parallel,) * len(self.groups[group].maps[self.groups[group].entry])
        self.join(index, group, followed, self.results(index, followed))

    def is_open(self, index: int) -> bool:
        """Whether the layouts of the operands from blocks allow several for the results."""
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
        """The groups that a node reads from, in order of preference."""
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
        all_strategies = tuple(range(len(self.strategies(index))))
        self.groups.append(_Group(index, set(all_strategies), _MIN_SHARE * len(all_strategies)))
        self.join(index, len(self.groups) - 1, all_strategies, self.results(index, all_strategies))

    def follow(self, index: int, group: int) -> bool:
        given = [("operand", p, number) for p, number in self.reads(index, group)]
        followed, results = self.matched(index, given)
        alive = {i for i in self.groups[group].alive if followed[i] is not None}
        if len(alive) < self.groups[group].min_alive:
            return False
        self.groups[group].alive = alive
        self.join(index, group, followed, results)
        return True

    def lead(self, value: int, group: int, wanted: _Layouts) -> None:
        """A waiting node joins the block of a reader, if it can give every layout that it wants."""
        index, result = self.graph.producer[value]
        reads = [("operand", p, number) for p, number in self.reads(index, group)]
        followed, results = self.matched(index, [("result", result, wanted), *reads])
        if all(followed[i] is not None for i in self.groups[group].alive):
            self.join(index, group, followed, results)

    def reads(self, index: int, group: int) -> list[tuple[int, _Layouts]]:
        """(position, layouts) of each operand that a node reads from a block."""
        return [
            (position, made[1])
            for position, value in enumerate(self.graph.nodes[index].operands)
            if (made := self.made.get(value)) is not None and made[0] == group
        ]

    def matched(self, index: int, given: Sequence[_Given]) -> tuple[_Map, tuple[_Layouts, ...]]:
        """For each strategy of the entry, the node's strategy with these layouts of operands and
        results, if there is one; and the layouts of all its results."""
        node, strategies = self.graph.nodes[index], self.strategies(index)
        key = (id(strategies), node.kind, *given)
        if key not in self.known:
            table = self.table(index, tuple((what, place) for what, place, _ in given))
            followed: list[int | None] = []
            for layouts in zip(*(self.tuples[number] for *_, number in given), strict=True):
                strategy = table.get(layouts)
                if strategy is None and node.kind is NodeKind.FINISH:
                    strategy = table.get(tuple(map(_summed, layouts)))
                followed.append(strategy)
            self.known[key] = (tuple(followed), self.results(index, followed))
        return self.known[key]

    def results(self, index: int, followed: Sequence[int | None]) -> tuple[_Layouts, ...]:
        strategies = self.strategies(index)
        return tuple(
            self.number(tuple(None if j is None else strategies[j].results[r] for j in followed))
            for r in range(len(self.graph.nodes[index].results))
        )

    def join(self, index: int, group: int, followed: _Map, results: Sequence[_Layouts]) -> None:
        node, strategies = self.graph.nodes[index], self.strategies(index)
        self.groups[group].maps[index] = followed
        self.waiting.discard(index)
        for value, number in zip(node.results, results, strict=True):
            self.made[value] = (group, number)
        for position, value in enumerate(node.operands):
            if self.graph.producer[value][0] in self.waiting:
                wanted = (None if j is None else strategies[j].operands[position] for j in followed)
                self.lead(value, group, self.number(tuple(wanted)))

    # -- tables

    def table(self, index: int, places: tuple[tuple[str, int], ...]) -> dict[_Read, int]:
        """{layouts of some operands and results: the most parallel strategy with them}."""
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
        number = self.numbers.setdefault(layouts, len(self.tuples))
        if number == len(self.tuples):
            self.tuples.append(layouts)
        return number


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
        kind = wirings.setdefault(_wiring(graph, nodes, kinds), len(wirings))
        key = (kind, tuple(classes[n] for n in nodes))
        if key not in known:
            known[key] = len(blocks)
            counts.append(0)
            blocks.append(_block(problem, group, nodes, kind, len(blocks)))
        counts[known[key]] += 1
        sequence.append(Occurrence(known[key], group.entry, nodes))
    return Blocks(
        problem.mesh.shape,
        tuple(replace(b, count=n) for b, n in zip(blocks, counts, strict=True)),
        tuple(sequence),
        _segments([blocks[occurrence.block].alike for occurrence in sequence], sequence),
        len(graph.nodes),
    )


def _kind(node: Node) -> tuple:
    times = node.weight, node.chance
    return (node.kind, node.name, node.signature, node.rule, times, node.region)


def _in_order(graph: Graph, group: _Group, kinds: Sequence[int]) -> tuple[int, ...]:
    """The entry, then the other nodes in an order in which nodes of equal blocks correspond,
    whatever their order in the program (state is sorted by name, layer_10 before layer_2): by
    colours from sweeps along the data and against it."""
    nodes = sorted(group.maps)
    colours = {n: hash((kinds[n], n == group.entry)) for n in nodes}
    made_from = {n: [graph.producer[v] for v in graph.nodes[n].operands] for n in nodes}
    readers: dict[int, list[tuple[int, int]]] = {n: [] for n in nodes}
    for n in nodes:
        for position, (maker, _) in enumerate(made_from[n]):
            if maker in readers:
                readers[maker].append((n, position))

    def along_the_data() -> None:
        for n in nodes:
            before = ((colours.get(m, -1), r) for m, r in made_from[n])
            colours[n] = hash((colours[n], *before))

    along_the_data()
    for n in reversed(nodes):
        colours[n] = hash((colours[n], *sorted((colours[m], p) for m, p in readers[n])))
    along_the_data()
    place = {n: i for i, n in enumerate(group.maps)}
    nodes.sort(key=lambda n: (n != group.entry, colours[n], place[n]))
    return tuple(nodes)


def _wiring(graph: Graph, nodes: tuple[int, ...], kinds: Sequence[int]) -> tuple:
    """The kinds of a block's nodes and how they read from each other."""
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
    problem: ShardingProblem, group: _Group, nodes: tuple[int, ...], kind: int, number: int
) -> Block:
    node = problem.graph.nodes[group.entry]
    strategies = []
    for index in sorted(group.alive):
        of_nodes = tuple(j for n in nodes if (j := group.maps[n][index]) is not None)
        strategies.append(BlockStrategy(index, "", of_nodes))
    return Block(
        name=f"block {number}",
        entry=group.entry,
        owner=problem.classes[group.entry],
        nodes=nodes,
        count=1,
        alike=kind,
        operator=node.name,
        module=node.module,
        region=node.region,
        strategies=tuple(strategies),
    )


# -- segments


def _segments(kinds: Sequence[int], sequence: Sequence[Occurrence]) -> tuple[Segment, ...]:
    stretches: list[tuple[int, int, int]] = []  # start, period, repeats
    _split(np.array(kinds, dtype=np.int64), 0, stretches)
    return tuple(
        Segment(
            f"segment {number}",
            tuple(occurrence.block for occurrence in sequence[start : start + period]),
            tuple(start + k * period for k in range(repeats)),
        )
        for number, (start, period, repeats) in enumerate(stretches)
    )


def _split(kinds: np.ndarray, offset: int, stretches: list[tuple[int, int, int]]) -> None:
    """Adds the longest stretch that repeats, and those before and after it."""
    if not len(kinds):
        return
    best: tuple[int, int, int] | None = None  # covered, −period, start
    for period in range(1, len(kinds) // 2 + 1):
        start, length = longest_repeat(kinds, period)
        repeats = length // period
        if repeats < (_MIN_REPEATS_OF_ONE if period == 1 else 2):
            continue
        key = (repeats * period, -period, -start)
        if best is None or key > best:
            best = key
    if best is None:
        stretches.append((offset, len(kinds), 1))
        return
    covered, period, start = best[0], -best[1], -best[2]
    _split(kinds[:start], offset, stretches)
    stretches.append((offset + start, period, covered // period))
    _split(kinds[start + covered :], offset + start + covered, stretches)

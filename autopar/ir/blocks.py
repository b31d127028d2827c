"""Parallel blocks and segments of a step, as `sharding.blocks` finds them.

A *block* is an entry operator (a product, a convolution, a gather, …) and the operators that follow
it: for every strategy of the entry, each of the others has one that needs no resharding inside the
block. The only communication inside a block reduces partial sums. So a block is one decision, that
of its entry, and the step is a sequence of blocks.

A *segment* is a run of blocks; equal runs in a row, such as layers, are occurrences of one segment.

Nodes are positions in `Graph.nodes`, classes those of the folded graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.late_methods import late_method


@dataclass(frozen=True)
class BlockStrategy:
    """The strategies of a block's operators for one strategy of its entry.

    index:    of the entry's strategy, among those of its class.
    words:    `x: data, y: tensor, column`; empty until someone fills it in.
    nodes:    for every node of the block's first occurrence, the strategy of its class.
    """

    index: int
    words: str
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """One decision: its occurrences have equal operators in equal places, of equal classes.

    alike:         a number shared by blocks that are equal except for their classes (equal
                   layers that are not folded).
    entry:         node of the entry operator, in the first occurrence.
    owner:         class of the entry.
    nodes:         of the first occurrence, the entry first; those of other occurrences correspond
                   to them one by one.
    count:         how often the block occurs in the step.
    operator:      primitive of the entry.
    module, region, source: of the entry; `source` is the user's line, if known.
    strategies:    those of the entry that all its nodes can follow.
    chosen:        the entry's strategy in the plan, as an index among those of its class; None
                   before there is a plan.
    words, spec:   of the chosen strategy: `x: data, y: tensor, column`, and the spec of the
                   entry's result.
    num_deviating: nodes of the first occurrence that do not follow the entry in the plan: there
                   resharding inside the block, or a reduce-scatter, pays.
    compute_s, communication_s, communication_bytes: of all occurrences in one step, on each
                   device, as the plan has it.
    """

    name: str
    entry: int
    owner: int
    nodes: tuple[int, ...]
    count: int
    alike: int
    operator: str
    module: str
    region: str
    strategies: tuple[BlockStrategy, ...]
    source: str = ""
    chosen: int | None = None
    words: str = ""
    spec: str = ""
    num_deviating: int = 0
    compute_s: float = 0.0
    communication_s: float = 0.0
    communication_bytes: float = 0.0

    @property
    def num_strategies(self) -> int:
        return len(self.strategies)

    @property
    def cost_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True)
class Occurrence:
    """A block at its place in the step. `block`: its position in `Blocks.blocks`."""

    block: int
    entry: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """blocks:  of the first occurrence, as positions in `Blocks.blocks`, in order. Other
             occurrences have equal blocks, or the same where layers are folded.
    starts:  positions in `Blocks.sequence` at which the occurrences begin.
    """

    name: str
    blocks: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Blocks:
    """mesh_shape: the mesh for which strategies were listed.
    sequence:   every block of the step, by the place of its entry.
    segments:   cover the sequence: every occurrence of a block is in one occurrence of a segment.
    num_nodes:  of the graph.
    """

    mesh_shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    sequence: tuple[Occurrence, ...]
    segments: tuple[Segment, ...]
    num_nodes: int

    def text(self) -> str:
        """Segments, their blocks, what was chosen and what it costs, as tables."""
        return late_method("blocks_text")(self)

    def __str__(self) -> str:
        return self.text()

    @cached_property
    def block_of_node(self) -> dict[int, int]:
        """Node -> position of its block in the sequence."""
        return {n: at for at, occurrence in enumerate(self.sequence) for n in occurrence.nodes}

    def occurrences(self, segment: Segment) -> Iterator[tuple[Occurrence, ...]]:
        for start in segment.starts:
            yield self.sequence[start : start + len(segment.blocks)]

    def nodes_of(self, segment: Segment, occurrence: int = 0) -> tuple[int, ...]:
        """All nodes of one occurrence of a segment, in program order."""
        start = segment.starts[occurrence]
        occurrences = self.sequence[start : start + len(segment.blocks)]
        return tuple(sorted(n for one in occurrences for n in one.nodes))


def check_blocks(blocks: Blocks) -> None:
    """Every node is in one block, every block in one segment."""
    nodes = sorted(n for occurrence in blocks.sequence for n in occurrence.nodes)
    assert nodes == list(range(blocks.num_nodes)), "nodes in no block, or in two"
    covered = []
    for segment in blocks.segments:
        for start in segment.starts:
            stop = start + len(segment.blocks)
            covered += range(start, stop)
            kinds = [
                blocks.blocks[occurrence.block].alike for occurrence in blocks.sequence[start:stop]
            ]
            assert kinds == [blocks.blocks[b].alike for b in segment.blocks], (segment, kinds)
    assert sorted(covered) == list(range(len(blocks.sequence))), "blocks in no segment, or in two"
    for at, block in enumerate(blocks.blocks):
        assert block.entry in block.nodes, block
        occurrences = [one for one in blocks.sequence if one.block == at]
        assert len(occurrences) == block.count and occurrences[0].nodes == block.nodes, block
        assert all(len(s.nodes) == len(block.nodes) for s in block.strategies), block

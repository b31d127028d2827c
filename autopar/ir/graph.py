"""The graph that the solver shards: values, nodes and their einsum-like rules.

A node is one equation of the traced program (or a small structural step beside one, see
`NodeKind`). Its `Rule` gives a *factor* to every dimension of every operand and result, in
Shardy's sense: dimensions that share a factor are split together. A mesh axis is put on a factor,
never on a dimension, so a legal assignment needs no communication inside the node except the sum
over split reduction factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from autopar.ir.failures import Failure


class NodeKind(Enum):
    INPUT = "input"  # an argument of the step, or a constant it captured
    OP = "op"  # an equation
    USE = "use"  # a second layout of a value, for all its readers; an output in its requested spec
    FINISH = "finish"  # where the partial sums of the node before are reduced
    MERGE = "merge"  # a loop carry, or the join of branches: all operands and the result agree


OUTPUT = "output"  # the name of USE nodes at outputs


HEAVY = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Halo:
    """A dimension of an operand that is read by windows: a shard needs `rows` before and after its
    own, which neighbours send."""

    operand: int
    dim: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """Factors of every dimension, major first.

    operands, results: value -> dimension -> factors. A dimension of size 1 has none.
    sizes:             factor -> size.
    reduction:         factors that no result has: splitting one leaves partial sums.
    fixed:             factors that may not be split (replication or a permutation needed).
    linear:            partial sums may flow through (the op is a plain sum of its operands).
    local:             XLA cannot split it: each device applies it to its own shards.
    halos:             dimensions that are read by windows; splitting one costs a shift of rows.
    only_with:         (factor, factors that all other axes must then be on; −1 for none): XLA
                       computes other combinations wrongly.
    """

    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    linear: bool = False
    local: bool = False
    halos: tuple[Halo, ...] = ()
    only_with: tuple[tuple[int, frozenset[int]], ...] = ()


@dataclass(frozen=True)
class Value:
    """A tensor of the program.

    deferred: it is off the critical path, as gradients are on their way to the optimizer and
              parameters on their way to their first use: its collectives share latency.
    order:    of an unfinished gradient that is transposed before its state is updated: the
              positions that the state's dimensions have here.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    path: str | None = None
    deferred: bool = False
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class OpSize:
    """The sizes that determine the time of a product, a convolution or an attention kernel. Each
    is a product of dimensions, as (operand or result, dimension); results count after operands.

    product:                                  batch, m, n, k
    forward, input-gradient, kernel-gradient: of a convolution: images, positions of the result,
                                              in and out channels, positions of the window
    attention, attention-gradient:            heads of all sequences, queries, keys, head size

    `has_holes`: between the elements of a convolution's window. `is_exact`: 32-bit numbers that are
    not rounded to fewer bits, as tensor cores do. `apart`: of a transposed convolution's kernel
    gradient, the zeros that XLA leaves out: as many places of the image for each it reads.
    """

    kind: str
    sizes: tuple[tuple[tuple[int, int], ...], ...]
    is_causal: bool = False
    has_holes: bool = False
    is_exact: bool = False
    apart: int = 0


@dataclass(frozen=True)
class Traffic:
    """A node's share of the memory-bound kernels that XLA compiles, unsharded.

    num_bytes:    moved, per operand, then per result.
    stream:       the kind of access, of `profile.STREAMS`.
    num_kernels:  kernels that begin with this node.
    exposed:      arithmetic beyond what the kernel's traffic hides, as bytes that take as long.
    """

    num_bytes: tuple[float, ...]
    stream: str = "elementwise"
    num_kernels: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Node:
    kind: NodeKind
    name: str
    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    weight: float = 1.0  # how often it runs in a step, on average
    flops: float = 0.0
    touched_bytes: tuple[float, ...] = ()  # per operand, then per result; 0 where fused away
    module: str = ""
    region: str = "forward"
    equation: int | None = None
    batch_factor: int | None = None  # the factor that carries the batch dimension
    signature: int = -1  # equal signatures have equal rules, costs and strategies
    work: OpSize | None = None  # of a product, convolution or attention kernel
    part_bytes: float | None = None  # of its first operand that it reads or writes; None for all
    passes: float = 1.0  # over its arrays, of a Fourier transform
    traffic: Traffic | None = None  # None where nothing is moved
    host_bytes: float = 0.0  # fetched from host memory in a step, and stored there again
    chance: float = 1.0  # that the branches it is in are taken

    @property
    def is_heavy(self) -> bool:
        """Matrix products and convolutions, which must not be computed redundantly."""
        return self.name in HEAVY

    @property
    def trips(self) -> float:
        """How often it runs in a step if the branches it is in are always taken."""
        return self.weight if self.chance == 1.0 else round(self.weight / self.chance, 6)

    def having(self, **changes: object) -> Node:
        """The node with some fields changed, as by `dataclasses.replace`, in a fifth of its time:
        every node of a graph is completed so."""
        made = object.__new__(Node)
        made.__dict__.update(self.__dict__, **changes)
        return made


@dataclass(frozen=True)
class Life:
    """A value in memory from `start` to `end`, both included; `count` copies, one for each
    micro-batch that keeps it. XLA may be known to keep more or less than these."""

    value: int
    start: int
    end: int
    count: float = 1


@dataclass(frozen=True)
class Liveness:
    """Values in memory over time. A node runs at `times[node]`; a resharded copy of its operand
    lives from then until `node_ends[node]`. `in_memory`: values that are written to memory, and
    views of them; all others are fused into their readers. `unhidden`: what is true instead if the
    backward pass of a micro-batch sends nothing, so that nothing runs late to hide it.
    `runs_alone`: each micro-batch is run by programs of its own, as in a stage. `again`: nodes that
    the backward one of these runs once more: (node, its time there, the end of copies for it)."""

    lives: tuple[Life, ...] = ()
    times: tuple[int, ...] = ()
    node_ends: tuple[int, ...] = ()
    in_memory: frozenset[int] = frozenset()
    unhidden: Liveness | None = None
    runs_alone: bool = False
    again: tuple[tuple[int, int, int], ...] = ()

    def copy_spans(self) -> Iterator[tuple[int, int, int, bool]]:
        """(node, start, end, whether it runs again) of the copies that are made for a node."""
        for node, (start, end) in enumerate(zip(self.times, self.node_ends, strict=True)):
            yield node, start, end, False
        yield from ((*one, True) for one in self.again)

    @property
    def least(self) -> Liveness:
        """What is true of every plan at least, whether or not it sends anything."""
        return self.unhidden or self

    def having(self, change: Callable[[Liveness], Liveness]) -> Liveness:
        """With a change to this and to what is true if nothing has to be hidden."""
        return replace(change(self), unhidden=self.unhidden and change(self.unhidden))

    def with_nodes_at_end(self, count: int) -> Liveness:
        """With `count` more nodes, which run after all others."""
        last = (len(self.times),) * count
        return self.having(
            lambda one: replace(one, times=one.times + last, node_ends=one.node_ends + last)
        )

    def scaled(self, factor: float, apart_from: Collection[int]) -> Liveness:
        """With `factor` times the bytes of all values but some."""

        def scale(one: Liveness) -> Liveness:
            lives = (
                life if life.value in apart_from else replace(life, count=life.count * factor)
                for life in one.lives
            )
            return replace(one, lives=tuple(lives))

        return self.having(scale)


@dataclass(frozen=True)
class Unruled:
    """An equation that is not split, or not as its rule allows, and why.

    flops:   of all `count` of them, whole.
    failure: why autopar has no rule though it should have one.
    """

    name: str
    source: str
    why: str
    count: int
    flops: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True)
class LoopTrips:
    """How often a while loop at a line of the user's runs its body, "known", "expected" by the
    user, "at most" by its condition, or "unknown"."""

    source: str
    trips: int
    kind: str


@dataclass(frozen=True)
class Graph:
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]  # values, in the order of the program's inputs
    outputs: tuple[int | None, ...]  # values; None where the program returns a literal
    state: tuple[tuple[int, int], ...]  # (input index, output index) that must share a spec
    batch: tuple[int, ...]  # input indices of batch arguments
    unruled: tuple[Unruled, ...] = ()
    liveness: Liveness = field(default_factory=Liveness)
    producer: dict[int, tuple[int, int]] = field(default_factory=dict)  # value -> node, result
    unfinished: frozenset[int] = frozenset()  # values whose partial sums a loop adds up
    while_loops: tuple[LoopTrips, ...] = ()


def check_graph(graph: Graph) -> None:
    """Every value is produced once, before use, and rules match shapes."""
    checked: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()
    for index, node in enumerate(graph.nodes):
        rule, values = node.rule, (*node.operands, *node.results)
        assert len(rule.operands) == len(node.operands), (index, node)
        assert len(rule.results) == len(node.results), (index, node)
        shapes = tuple([graph.values[value].shape for value in values])
        if (id(rule), shapes) not in checked:  # many nodes share few rules
            checked.add((id(rule), shapes))
            _check_rule(node, shapes)
        for value in node.results:
            assert graph.producer[value][0] == index, (index, value)
        for value in node.operands:
            assert value in graph.producer, (node.name, value)


def _check_rule(node: Node, shapes: tuple[tuple[int, ...], ...]) -> None:
    rule = node.rule
    for dims, shape in zip((*rule.operands, *rule.results), shapes, strict=True):
        assert len(dims) == len(shape), (node.name, dims, shape)
        for factors, size in zip(dims, shape, strict=True):
            split = prod(rule.sizes[f] for f in factors if f not in rule.fixed)
            assert split <= max(size, 1) or rule.fixed, (node.name, dims, shape)

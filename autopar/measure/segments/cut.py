"""A step cut into segments: from a `TracedStep` and its `Graph` to a `CutStep` of `SegmentPart`s.

A *part* is one occurrence of a segment: the forward, backward and update equations of one layer as
a program of their own, with the nodes that they have in the step's graph. Parts that are the same
program with the same graph are occurrences of one segment, which is compiled and timed once.

A part reads values of other parts through *ports*: inputs of its program that may have any layout.
So a part is sharded like a step, and a choice for its nodes is valid in the whole graph, which has
the same nodes. State never crosses: an argument belongs to the part that computes its update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar import _jax
from autopar.ir.graph import Graph, Liveness, Node, NodeKind
from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.measure.segments.place import place_equations
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.rules import identity_rule

PORT = "port"


@dataclass(frozen=True)
class PortSource:
    """The source of a port's value: a result of another part's node, numbered in the whole
    graph."""

    part: int
    node: int
    result: int


@dataclass(frozen=True)
class SegmentPort:
    """An input of a part that another part computes. `node`: in the part's graph."""

    value: int
    node: int
    sources: tuple[PortSource, ...]


@dataclass(frozen=True, eq=False)
class SegmentPart:
    """`nodes`: the number of every node in the whole graph, −1 for ports. `sent`: values of the
    program that other parts read. `key`: equal for parts of the same segment."""

    name: str
    program: Program
    graph: Graph
    nodes: tuple[int, ...]
    ports: tuple[SegmentPort, ...]
    sent: tuple[int, ...]
    key: str


@dataclass(frozen=True, eq=False)
class CutStep:
    """`segments`: the parts of each unique segment; the first represents all."""

    parts: tuple[SegmentPart, ...]
    segments: tuple[tuple[int, ...], ...]

    def segment_of(self, part: int) -> int:
        return next(n for n, parts in enumerate(self.segments) if part in parts)


def cut_step(traced: TracedStep, graph: Graph) -> CutStep:
    names, placed = place_equations(traced)
    cutter = _SegmentCutter(traced, graph, placed)
    used = sorted({*placed, *cutter.segment})
    number_of = {segment: number for number, segment in enumerate(used)}
    parts = [cutter.part(segment, names[segment], number_of) for segment in used]
    segments: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        segments.setdefault(part.key, []).append(number)
    return CutStep(tuple(parts), tuple(map(tuple, segments.values())))


class _SegmentCutter:
    def __init__(self, traced: TracedStep, graph: Graph, placed: list[int]) -> None:
        self.graph, self.placed = graph, placed
        self.program = traced.program
        self.first: list[int] = []  # by position in the program, its number with bodies counted
        position_of: list[int] = []  # the other way
        inside: dict[int, int] = {}  # values in loops' bodies, and results -> position
        self.outside: dict[int, int] = {}  # a loop's carry -> the result that it becomes
        for position, equation in enumerate(self.program.equations):
            self.first.append(len(position_of))
            position_of += [position] * equation.num_equations()
            inside.update(dict.fromkeys(_inner_values(equation), position))
            self.outside.update(_carried(equation))
        self.position = [
            position_of[node.equation]
            if node.equation is not None
            else next((inside[r] for r in node.results if r in inside), None)
            for node in graph.nodes
        ]
        self.read_in: dict[int, set[int]] = {}  # program value -> segments that read it
        for equation, segment in zip(self.program.equations, placed, strict=True):
            for value in equation.inputs:
                self.read_in.setdefault(value, set()).add(segment)
        self.segment = self.place_nodes()

    def place_nodes(self) -> list[int]:
        """The segment of every node: that of its equation; of an argument, where the result that
        replaces it is made or else where it is first read; of a use, where what it uses is."""
        graph = self.graph
        readers: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for value in node.operands:
                readers.setdefault(graph.producer[value][0], []).append(index)
        segment = [None if at is None else self.placed[at] for at in self.position]
        becomes = {
            graph.producer[graph.inputs[i]][0]: graph.producer[value][0]
            for i, o in graph.state
            if (value := graph.outputs[o]) is not None
        }

        def first_read(index: int) -> int:
            segments = []
            for reader in readers.get(index, ()):
                placed = segment[reader]
                segments.append(first_read(reader) if placed is None else placed)
            return min(segments, default=0)

        for index, node in enumerate(graph.nodes):
            if segment[index] is not None:
                continue
            after = becomes.get(index)
            known = None if after is None else segment[after]
            if node.operands and node.kind is NodeKind.USE:
                known = segment[graph.producer[node.operands[0]][0]]
            segment[index] = first_read(index) if known is None else known
        return [0 if s is None else s for s in segment]

    def part(self, segment: int, name: str, number_of: Mapping[int, int]) -> SegmentPart:
        graph, program = self.graph, self.program
        members = {i: None for i, s in enumerate(self.segment) if s == segment}
        positions = [at for at, s in enumerate(self.placed) if s == segment]
        equations = tuple(program.equations[at] for at in positions)
        captured = tuple((v, a) for v, a in program.captured if graph.producer[v][0] in members)
        made = {*(r for e in equations for r in e.results), *(v for v, _ in captured)}
        mine = [v for v in program.inputs if graph.producer[v][0] in members]
        inputs = dict.fromkeys(v for e in equations for v in e.inputs if v not in made)
        inputs.update(dict.fromkeys(mine))
        sources = self.sources(members, [v for v in inputs if v not in set(mine)], number_of)
        order = [graph.producer[v][0] if v not in sources else -1 for v in inputs]
        order += [i for i in members if i not in set(order)]
        nodes = self.nodes(list(inputs), order, members, positions)
        producer = {r: (n, k) for n, node in enumerate(nodes) for k, r in enumerate(node.results)}
        outputs, graph_outputs, state = self.outputs(segment, members, list(inputs))
        sent = [v for v in made if self.read_in.get(v, set()) - {segment}]
        sent = sorted(v for v in sent if v not in dict(captured))
        outputs += [v for v in sent if v not in outputs]
        inward = {result: carry for carry, result in self.outside.items()}
        graph_outputs += [v if v in producer else inward[v] for v in outputs[len(graph_outputs) :]]
        cut = Program(tuple(inputs), tuple(outputs), equations, program.avals, captured)
        own_graph = Graph(
            values=graph.values,
            nodes=nodes,
            inputs=tuple(inputs),
            outputs=tuple(graph_outputs),
            state=tuple(state),
            batch=(),
            liveness=Liveness(),
            producer=producer,
            unfinished=graph.unfinished,
        )
        ports = tuple(SegmentPort(v, producer[v][0], sources[v]) for v in sources)
        key = _key(cut, own_graph, [port.node for port in ports])
        return SegmentPart(name, cut, own_graph, tuple(order), ports, tuple(sent), key)

    def sources(
        self, members: Mapping[int, None], ports: Collection[int], number_of: Mapping[int, int]
    ) -> dict[int, tuple[PortSource, ...]]:
        """Of every port the nodes elsewhere whose results are read through it."""
        graph = self.graph
        read_through: dict[int, dict[int, None]] = {v: {} for v in ports}
        for index in members:
            for value in graph.nodes[index].operands:
                if graph.producer[value][0] not in members:
                    read_through[self.program_value(value)][value] = None
        inward = {result: carry for carry, result in self.outside.items()}
        for value, known in read_through.items():
            if not known:  # read by nothing that is sharded
                known[value if value in graph.producer else inward[value]] = None
        return {
            value: tuple(
                PortSource(number_of[self.segment[node]], node, result)
                for node, result in (graph.producer[g] for g in known)
            )
            for value, known in read_through.items()
        }

    def program_value(self, value: int) -> int:
        """The value of the program that a value of the graph stands for."""
        node = self.graph.nodes[self.graph.producer[value][0]]
        if node.kind is NodeKind.USE and value not in self.outside:
            return self.program_value(node.operands[0])
        return self.outside.get(value, value)

    def nodes(
        self,
        inputs: Sequence[int],
        order: Sequence[int],
        members: Mapping[int, None],
        positions: Sequence[int],
    ) -> tuple[Node, ...]:
        graph = self.graph
        start, first = 0, {}
        for at in positions:
            first[at] = start
            start += self.program.equations[at].num_equations()
        nodes = []
        for place, index in enumerate(order):
            if index < 0:
                value = inputs[place]
                rule = identity_rule(graph.values[value].shape, 0)
                nodes.append(Node(NodeKind.INPUT, PORT, rule, (), (value,)))
                continue
            node = graph.nodes[index]
            operands = tuple(
                v if graph.producer[v][0] in members else self.program_value(v)
                for v in node.operands
            )
            number, at = node.equation, self.position[index]
            if number is not None and at is not None:
                number = first[at] + number - self.first[at]
            nodes.append(replace(node, operands=operands, equation=number))
        return tuple(nodes)

    def outputs(
        self, segment: int, members: Mapping[int, None], inputs: list[int]
    ) -> tuple[list[int], list[int | None], list[tuple[int, int]]]:
        """(the step's results that are made here, as the program and as the graph number them;
        pairs of state)."""
        graph, program = self.graph, self.program
        input_of = {o: i for i, o in graph.state}
        outputs: list[int] = []
        graph_outputs: list[int | None] = []
        state = []
        for o, (out, value) in enumerate(zip(program.outputs, graph.outputs, strict=True)):
            if not isinstance(out, int) or value is None or graph.producer[value][0] not in members:
                continue
            if o in input_of:
                state.append((inputs.index(program.inputs[input_of[o]]), len(outputs)))
            outputs.append(out)
            graph_outputs.append(value)
        return outputs, graph_outputs, state


def _inner_values(equation: Equation) -> Iterator[int]:
    """Results of an equation, and all values of its bodies."""
    yield from equation.results
    for body in equation.bodies:
        yield from body.inputs
        yield from (value for value, _ in body.captured)
        for inner in body.equations:
            yield from _inner_values(inner)


def _carried(equation: Equation) -> Iterator[tuple[int, int]]:
    """(a loop's carry, the loop's result that it is in the end)."""
    if equation.name == "scan":
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        carries = equation.bodies[0].inputs[num_consts : num_consts + num_carry]
        yield from zip(carries, equation.results, strict=False)
    elif equation.name == "while":
        yield from zip(
            equation.bodies[1].inputs[equation.params["body_nconsts"] :],
            equation.results,
            strict=True,
        )


def _key(program: Program, graph: Graph, ports: Sequence[int]) -> str:
    """Equal for equal programs with equal graphs, whatever the numbers and names are."""
    digest = hashlib.sha256(program_fingerprint(program).encode())
    for node in graph.nodes:
        operands = [graph.producer[v] for v in node.operands]
        times = node.weight, node.chance
        signature = (node.kind.value, node.name, node.rule, operands, times, node.region)
        digest.update(repr((signature, node.equation, node.flops)).encode())
    outputs = [None if v is None else graph.producer[v] for v in graph.outputs]
    digest.update(repr((graph.state, outputs, list(ports))).encode())
    return digest.hexdigest()

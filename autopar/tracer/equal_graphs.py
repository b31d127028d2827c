"""Graphs of steps that differ in names and numbers of values alone: each is built once.

The stages in the middle of a deep model are equal, and those of one pipeline return in the next.
Such a graph is read off a known one: `Graph`, two `TracedStep`s → `Graph`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.graph import Graph, Life, Liveness, Node
from autopar.ir.program import Constant, Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.build import build_graph, type_values
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.regions import equation_regions, module_name, region_by_name
from autopar.tracer.sums import is_zero

_MOST = 8  # graphs


class EqualGraphs:
    """The last few graphs, by all that they depend on but names and numbers."""

    def __init__(self) -> None:
        # With the number of the program's values: its list of them may grow later.
        self._built: dict[Hashable, tuple[TracedStep, int, Graph]] = {}

    def of(
        self,
        step: TracedStep,
        *,
        overlaps: bool = True,
        instructions_per_byte: float = INSTRUCTIONS_PER_BYTE,
    ) -> Graph:
        """The step's graph, as `build_graph` makes it."""
        key = _key(step), overlaps, instructions_per_byte
        known = self._built.pop(key, None)
        graph = None if known is None else _renumbered(*known, step)
        if known is None or graph is None:
            rate = instructions_per_byte
            graph = build_graph(step, overlaps=overlaps, instructions_per_byte=rate)
            known = step, len(step.program.avals), graph
        self._built[key] = known
        while len(self._built) > _MOST:
            del self._built[next(iter(self._built))]
        return graph


def _key(step: TracedStep) -> Hashable:
    """What a graph depends on: the program, which constants are zero, where its equations run, and
    what its arguments are."""
    program = step.program
    zeros, regions = [], equation_regions(program)
    for equation in program.all_equations():
        zeros += [is_zero(o, ()) for o in equation.operands if isinstance(o, Constant)]
        regions.append(region_by_name(equation.scope) or "")
    fingerprint = program_fingerprint(program)
    step_key = step.state, step.batch, step.donated, step.is_stage, step.backward
    return fingerprint, *step_key, tuple(zeros), tuple(regions)


def _renumbered(step: TracedStep, first: int, graph: Graph, other: TracedStep) -> Graph | None:
    """The graph of an equal step, by that of this one, whose own values begin at `first`; None if
    names of modules are not one to one."""
    number = numbers_in(step.program, other.program)
    first_other = len(other.program.avals)
    for extra in range(len(graph.values) - first):
        number[first + extra] = first_other + extra
    names = _module_names(step.program, other.program)
    if names is None:
        return None
    values = type_values(other.program)
    values += [values[0]] * (len(graph.values) - first)
    for old, new in number.items():
        values[new] = graph.values[old]
    for value, path in zip(other.program.inputs, other.call.paths, strict=False):
        values[value] = replace(values[value], path=path)
    nodes = tuple([_renamed(node, number, names) for node in graph.nodes])

    def renumbered(one: Liveness) -> Liveness:
        lives = [Life(number[x.value], x.start, x.end, x.count) for x in one.lives]
        in_memory = frozenset(number[v] for v in one.in_memory)
        return replace(one, lives=tuple(lives), in_memory=in_memory)

    return replace(
        graph,
        values=tuple(values),
        nodes=nodes,
        inputs=tuple(number[v] for v in graph.inputs),
        outputs=tuple(None if v is None else number[v] for v in graph.outputs),
        liveness=graph.liveness.having(renumbered),
        producer={number[v]: place for v, place in graph.producer.items()},
        unfinished=frozenset(number[v] for v in graph.unfinished),
    )


def _renamed(node: Node, number: dict[int, int], names: dict[str, str]) -> Node:
    return node.having(
        operands=tuple([number[v] for v in node.operands]),
        results=tuple([number[v] for v in node.results]),
        module=names.get(node.module, node.module),
    )


def numbers_in(program: Program, other: Program) -> dict[int, int]:
    """Value -> the value of an equal program in its place."""
    return dict(zip(_values(program), _values(other), strict=True))


def _values(program: Program) -> Iterator[int]:
    yield from program.inputs
    yield from (value for value, _ in program.captured)
    for equation in program.equations:
        for body in equation.bodies:
            yield from _values(body)
        yield from equation.results


def _module_names(program: Program, other: Program) -> dict[str, str] | None:
    """Module -> the module of the other program in its place; None if it has several."""
    names: dict[str, str] = {}
    scopes: dict[str, str] = {}
    pairs = zip(program.all_equations(), other.all_equations(), strict=True)
    for one, another in pairs:
        if scopes.get(one.scope) == another.scope:
            continue
        scopes[one.scope] = another.scope
        name = module_name(another.scope)
        if names.setdefault(module_name(one.scope), name) != name:
            return None
    return names

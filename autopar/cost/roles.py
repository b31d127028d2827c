"""Roles of values and dimensions in a graph: from `Graph` to `Roles`.

A dimension keeps its identity from value to value as long as rules give it one factor, so all
dimensions of a graph fall into classes (a union-find). The role of a class shows where it meets a
parameter or the batch:

    batch     the first dimension of a batch input
    expert    a dimension that a product's parameter and activation both keep
    feature   a dimension that a product sums over with a parameter, or gets from one
    sequence  any other

A *parameter* is an input outside the batch that ops outside the update read and that has gradients
or is used by a product (running averages are none). Its *readers* are the forward ops behind its
casts, slices and transposes; its *gradients* are the values between the product that makes them and
its update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar import _jax
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.tracer.regions import UPDATE

BATCH, EXPERTS, FEATURE, OTHER = "batch", "expert", "feature", "sequence"
INNER, OUTER = "in", "out"  # features of a parameter that a product sums over, or makes

# Ops that only carry a value to its use, or a gradient to the update.
_CARRYING = {
    "broadcast_in_dim", "convert_element_type", "transpose", "reshape", "squeeze", "expand_dims",
    "copy", "copy_p", "stop_gradient", "optimization_barrier", "scan_slice", "scan_stack",
    "slice", "concatenate", _jax.CONSTRAIN,
}  # fmt: skip
_CUTTING = {"scan_slice", "scan_stack", "slice", "concatenate"}  # those that change its size
_ADDING = {"add", "add_any"}
_FLOATS = ("float", "bfloat", "complex")

Dims = tuple[int | None, ...]  # per dimension of a value, the dimension of its parameter
ParameterDims = tuple[int, Dims]  # (parameter, dimensions) of a value made from it


@dataclass(frozen=True)
class Reader:
    """A node that reads a parameter, the operand's position, and the parameter's dimensions."""

    node: int
    operand: int
    dims: Dims


@dataclass(frozen=True, eq=False)
class Roles:
    """Values by their numbers, nodes by their positions.

    parameters:  inputs that are parameters.
    readers:     parameter -> the forward ops that use it, products first.
    made_of:     value -> (parameter, dimensions): the parameter itself, its USE nodes and casts.
    gradient_of: value -> (parameter, dimensions).
    update_of:   node of the update -> the parameter whose new value it helps to make.
    moments:     parameter -> state of its size that its update reads beside it.
    classes:     parameter -> dimension -> `INNER`, `OUTER` or `EXPERTS`, by its main reader.
    """

    parameters: frozenset[int]
    readers: dict[int, list[Reader]]
    made_of: dict[int, ParameterDims]
    gradient_of: dict[int, ParameterDims]
    update_of: dict[int, int]
    moments: dict[int, tuple[int, ...]]
    classes: dict[int, dict[int, str]]
    factors: dict[int, dict[int, int]] = field(repr=False)  # class of nodes -> factor -> dimension
    kinds: _Kinds = field(repr=False)
    node_class: Sequence[int] = field(repr=False)  # node -> its class

    def text(self, graph: Graph, value: int) -> str:
        """The user's name for a value: the path of an input, or its relation to a parameter; else
        its array type."""
        info = graph.values[value]
        if info.path is not None:
            return info.path
        if origin := self.made_of.get(value):
            whole = graph.values[origin[0]]
            return f"{whole.path} as {info.dtype}" if whole.dtype != info.dtype else f"{whole.path}"
        if origin := self.gradient_of.get(value):
            return f"gradient of {graph.values[origin[0]].path}"
        return f"{info.dtype}[{','.join(map(str, info.shape))}]"

    def kind(self, node: int, factor: int) -> str:
        """The role of the dimensions with this factor."""
        return self.kinds.of(self.factors[self.node_class[node]].get(factor))


def find_roles(
    graph: Graph, recomputed: Collection[int] = (), node_class: Sequence[int] | None = None
) -> Roles:
    """`recomputed`: equations that are computed a second time, in the backward pass. `node_class`:
    a class for every node, equal ones for nodes that are the same part of equal layers."""
    node_class = range(len(graph.nodes)) if node_class is None else node_class
    forward = [_is_forward(node, recomputed) for node in graph.nodes]
    made_of = _made_of_parameters(graph)
    readers = _readers(graph, made_of, forward)
    has_gradients = any(node.region == "backward" for node in graph.nodes)
    gradient_of: dict[int, ParameterDims] = {}
    update_of: dict[int, int] = {}
    moments = {}
    for i, o in graph.state:
        value, new = graph.inputs[i], graph.outputs[o]
        if value not in readers or new is None:
            continue
        gradients: dict[int, ParameterDims] = {}
        updates: dict[int, int] = {}
        value_moments = _walk_update(graph, value, new, updates, gradients)
        if not gradients and has_gradients and not _is_used(graph, readers[value][0]):
            del readers[value]  # running averages of the forward pass
            continue
        gradient_of |= gradients
        update_of |= updates
        moments[value] = value_moments
    parameters = frozenset(readers)
    made_of = {v: origin for v, origin in made_of.items() if origin[0] in parameters}
    kinds = _Kinds()
    factors = _classes_of_dimensions(graph, kinds, node_class)
    for index, node in enumerate(graph.nodes):
        if forward[index] and node.is_heavy:
            _mark_product(node, factors[node_class[index]], made_of, kinds)
    classes = {p: _parameter_classes(graph, ranked[0]) for p, ranked in readers.items()}
    return Roles(
        parameters=parameters,
        readers=readers,
        made_of=made_of,
        gradient_of=gradient_of,
        update_of=update_of,
        moments=moments,
        classes=classes,
        factors=factors,
        kinds=kinds,
        node_class=node_class,
    )


def _is_used(graph: Graph, reader: Reader) -> bool:
    node = graph.nodes[reader.node]
    return node.is_heavy or node.name == "gather"


def _is_forward(node: Node, recomputed: Collection[int]) -> bool:
    return node.kind is NodeKind.OP and (node.region == "forward" or node.equation in recomputed)


# -- parameters and gradients


def _made_of_parameters(graph: Graph) -> dict[int, ParameterDims]:
    batch = {graph.inputs[i] for i in graph.batch}
    made: dict[int, ParameterDims] = {}
    for value in graph.inputs:
        info = graph.values[value]
        if value not in batch and info.shape and info.dtype.startswith(_FLOATS):
            made[value] = (value, tuple(range(len(info.shape))))
    for node in graph.nodes:
        carries = node.kind is NodeKind.USE or (
            node.kind is NodeKind.OP and node.name in _CARRYING and node.region != UPDATE
        )
        if carries and len(node.operands) == 1 and (origin := made.get(node.operands[0])):
            dims = _carried(node.rule.operands[0], origin[1], node.rule.results[0])
            made[node.results[0]] = (origin[0], dims)
    return made


def _carried(source: Iterable[tuple[int, ...]], dims: Dims, target: Iterable) -> Dims:
    """The parameter's dimensions on the other side of a node, by the factors they share."""
    by_factor = {f: dim for factors, dim in zip(source, dims, strict=True) for f in factors}
    return tuple(next((by_factor.get(f) for f in factors), None) for factors in target)


def _readers(
    graph: Graph, made_of: dict[int, ParameterDims], forward: list[bool]
) -> dict[int, list[Reader]]:
    readers: dict[int, list[tuple[tuple, Reader]]] = {}
    others: dict[int, list[tuple[tuple, Reader]]] = {}
    for index, node in enumerate(graph.nodes):
        if node.kind is not NodeKind.OP or node.region == UPDATE or node.results[0] in made_of:
            continue
        for position, value in enumerate(node.operands):
            origin = made_of.get(value)
            if origin is not None:
                rank = (not node.is_heavy, node.name != "gather", index)
                into = readers if forward[index] and node.region == "forward" else others
                reader = (rank, Reader(index, position, origin[1]))
                into.setdefault(origin[0], []).append(reader)
    for value, ranked in others.items():
        readers.setdefault(value, ranked)
    return {p: [r for _, r in sorted(ranked, key=_rank)] for p, ranked in readers.items()}


def _rank(entry: tuple[tuple, Reader]) -> tuple:
    return entry[0]


def _walk_update(
    graph: Graph,
    parameter: int,
    new: int,
    update_of: dict[int, int],
    gradient_of: dict[int, ParameterDims],
) -> tuple[int, ...]:
    """Walks back from a parameter's new value, filling `update_of` and `gradient_of`; returns its
    moments."""
    info = graph.values[parameter]
    same = tuple(range(len(info.shape)))
    pending: list[tuple[int, Dims, bool]] = [(new, same, False)]
    seen = {parameter}
    moments = []
    while pending:
        value, dims, is_gradient = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        index, position = graph.producer[value]
        node = graph.nodes[index]
        if node.kind is NodeKind.INPUT:
            if value != parameter and not is_gradient and graph.values[value].path is not None:
                moments.append(value)
            continue
        updates = node.kind is NodeKind.OP and node.region == UPDATE
        if node.kind in (NodeKind.OP, NodeKind.FINISH) and node.region == "forward":
            continue
        if updates and not is_gradient:
            update_of.setdefault(index, parameter)
        else:
            is_gradient = True
            gradient_of.setdefault(value, (parameter, dims))
            light = node.name in _CARRYING or node.name in _ADDING
            if node.kind is NodeKind.OP and not light:
                continue
        cuts, size = node.name in _CUTTING, prod(graph.values[value].shape)
        for operand, factors in zip(node.operands, node.rule.operands, strict=True):
            if cuts or prod(graph.values[operand].shape) == size:
                operand_dims = _carried(node.rule.results[position], dims, factors)
                pending.append((operand, operand_dims, is_gradient))
    return tuple(moments)


def _parameter_classes(graph: Graph, reader: Reader) -> dict[int, str]:
    """{dimension of a parameter: its role in the op that uses it}."""
    node = graph.nodes[reader.node]
    rule = node.rule
    made = {f for dims in rule.results for factors in dims for f in factors}
    others = {
        f
        for position, dims in enumerate(rule.operands)
        if position != reader.operand
        for factors in dims
        for f in factors
    }
    classes = {}
    for dim, factors in zip(reader.dims, rule.operands[reader.operand], strict=True):
        for f in factors:
            if dim is None:
                continue
            if f not in made:
                classes[dim] = INNER
            elif f not in others or not node.is_heavy:
                classes[dim] = OUTER
            else:
                classes[dim] = EXPERTS
    return classes


# -- dimensions


class _Kinds:
    """Classes of dimensions and their roles."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.whole: list[int | None] = []  # the class whose minor part it is
        self.marks: list[str] = []

    def new(self, whole: int | None = None, mark: str = "") -> int:
        self.parent.append(len(self.parent))
        self.whole.append(whole)
        self.marks.append(mark)
        return len(self.parent) - 1

    def find(self, one: int) -> int:
        parent = self.parent
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    def join(self, one: int, two: int) -> None:
        one, two = self.find(one), self.find(two)
        if one != two:
            self.parent[two] = one
            self.marks[one] = _stronger(self.marks[one], self.marks[two])
            if self.whole[one] is None:
                self.whole[one] = self.whole[two]

    def mark(self, one: int, mark: str) -> None:
        one = self.find(one)
        self.marks[one] = _stronger(self.marks[one], mark)

    def of(self, one: int | None) -> str:
        seen = set()
        minor = False
        while one is not None:
            one = self.find(one)
            if self.marks[one] or one in seen:
                break
            seen.add(one)
            one, minor = self.whole[one], True
        mark = self.marks[one] if one is not None else ""
        if minor and mark == BATCH:  # tokens of a flattened batch
            return OTHER
        return mark or OTHER


_STRENGTH = ("", OTHER, FEATURE, EXPERTS, BATCH)


def _stronger(one: str, two: str) -> str:
    return max(one, two, key=_STRENGTH.index)


def _classes_of_dimensions(
    graph: Graph, kinds: _Kinds, node_class: Sequence[int]
) -> dict[int, dict[int, int]]:
    """{class of nodes: {factor: class of dimensions}}. The first node of a class suffices: its
    operands were made before it, or by a node of equal class."""
    batch = {graph.inputs[i] for i in graph.batch}
    # Values that a stage gets from others are stacks over micro-batches, with rows second.
    stacks = {n.operands[0] for n in graph.nodes if n.name == "scan_slice"}
    dims_of: dict[tuple[int, int], list[int | None]] = {}  # class of nodes, result -> dimensions
    factors_of: dict[int, dict[int, int]] = {}
    producer = graph.producer
    for index, node in enumerate(graph.nodes):
        if node_class[index] in factors_of:
            continue
        factors: dict[int, int] = {}
        for value, dims in zip(node.operands, node.rule.operands, strict=True):
            maker, position = producer[value]
            value_dims = dims_of.get((node_class[maker], position))
            if value_dims is None:  # carried around a loop
                continue
            for one, parts in zip(value_dims, dims, strict=True):
                if one is None:
                    continue
                for f, is_minor in _parts(parts):
                    if f not in factors:
                        factors[f] = kinds.new(one) if is_minor else one
                    elif not is_minor and factors[f] != one:
                        kinds.join(factors[f], one)
        for position, dims in enumerate(node.rule.results):
            made: list[int | None] = []
            for parts in dims:
                if parts and parts[0] not in factors:
                    factors[parts[0]] = kinds.new()
                made.append(factors[parts[0]] if parts else None)
            value = node.results[position]
            if node.kind is NodeKind.INPUT and value in batch:
                rows = made[1 if value in stacks else 0 :][:1]
                if rows and rows[0] is not None:
                    kinds.mark(rows[0], BATCH)
            dims_of[node_class[index], position] = made
        factors_of[node_class[index]] = factors
    return factors_of


def _parts(factors: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
    """Factors of a dimension, and whether each is a minor part of it."""
    for position, factor in enumerate(factors):
        yield factor, position > 0


def _mark_product(
    node: Node, factors: dict[int, int], made_of: dict[int, ParameterDims], kinds: _Kinds
) -> None:
    is_parameter = [value in made_of for value in node.operands]
    if len(is_parameter) != 2 or is_parameter[0] == is_parameter[1]:
        return
    rule, position = node.rule, is_parameter.index(True)
    parameter, activation = (
        {f for parts in dims for f in parts}
        for dims in (rule.operands[position], rule.operands[1 - position])
    )
    made = {f for parts in rule.results[0] for f in parts}
    for f in parameter:
        if f in factors:
            kinds.mark(factors[f], EXPERTS if f in activation and f in made else FEATURE)

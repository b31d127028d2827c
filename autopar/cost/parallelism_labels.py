"""Parallelism labels of operators and parameters: from `Roles` and layouts to `Parallelism`.

The label of a mesh axis on a factor of an operator depends on the role of the factor's dimensions:

    batch                                                     data
    features of a parameter that a product makes / sums over  tensor, column / tensor, row
    experts                                                   expert
    other dimensions                                          sequence

The backward pass and the update of a parameter take the labels of its forward use, so that a layer
is column parallel in all its passes. An axis is ZeRO if it splits a stored parameter, or its
moments, but not the parameter's use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.cost.roles import BATCH, EXPERTS, FEATURE, INNER, OUTER, ParameterDims, Reader, Roles
from autopar.ir.details import (
    ADDENDS,
    COLUMN,
    DATA,
    EXPERT,
    REPLICATED,
    ROW,
    SEQUENCE,
    TENSOR,
    ZERO,
    Parallelism,
)
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import WHOLE, Layout, NodeLayouts

Factors = tuple[int, ...]  # of a node: the factor on each mesh axis, −1 none, −2 partial sums

_BY_CLASS = {INNER: ROW, OUTER: COLUMN, EXPERTS: EXPERT}
_BY_KIND = {BATCH: DATA, EXPERTS: EXPERT, FEATURE: TENSOR}
_SPLITS = {
    DATA: "the batch",
    COLUMN: "the output features",
    ROW: "the input features",
    EXPERT: "the experts",
    SEQUENCE: "another dimension of the activations",
    TENSOR: "the features",
}


@dataclass(eq=False)
class ParallelismLabels:
    """`factors`, `layouts`: of every node. `recomputed`: backward equations that repeat forward
    ones."""

    graph: Graph
    mesh: LogicalMesh
    layouts: Sequence[NodeLayouts]
    factors: Sequence[Factors]
    roles: Roles
    recomputed: Collection[int] = ()
    _of_parameter: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _of_class: dict[int, str] = field(default_factory=dict)

    def of_node(self, index: int) -> str:
        """`x: data, y: tensor, column`, or nothing on one device. Equal nodes of equal layers have
        equal labels."""
        node_class = self.roles.node_class[index]
        if node_class not in self._of_class:
            self._of_class[node_class] = self._text(index)
        return self._of_class[node_class]

    def _text(self, index: int) -> str:
        return ", ".join(
            f"{name}: {self.word(index, axis)}"
            for axis, (name, size) in enumerate(
                zip(self.mesh.axis_names, self.mesh.shape, strict=True)
            )
            if size > 1
        )

    def of_strategy(self, index: int, factors: Factors) -> str:
        """The label that a node would have with other factors, by its op alone."""
        return ", ".join(
            f"{name}: {self._op_label(index, axis, factors[axis])}"
            for axis, (name, size) in enumerate(
                zip(self.mesh.axis_names, self.mesh.shape, strict=True)
            )
            if size > 1
        )

    def word(self, index: int, axis: int) -> str:
        roles, node = self.roles, self.graph.nodes[index]
        owner = roles.update_of.get(index)
        if owner is None and not node.is_heavy:
            origin = roles.made_of.get(node.results[0]) or roles.gradient_of.get(node.results[0])
            owner = origin[0] if origin else None
        word = self._op_label(index, axis, self.factors[index][axis])
        if owner is None or word in (DATA, REPLICATED, ADDENDS):
            return word
        return self._stored_label(owner, axis)

    def _op_label(self, index: int, axis: int, factor: int) -> str:
        """The label by the op alone, for a factor on an axis."""
        node = self.graph.nodes[index]
        if factor == -1 or self.mesh.shape[axis] == 1:
            return REPLICATED
        if factor < 0:
            return ADDENDS
        kind = self.roles.kind(index, factor)
        if kind == BATCH or factor == node.batch_factor:
            return DATA
        label = None
        if node.is_heavy or node.name == "gather":
            label = self._product_label(node, factor)
        return label or _BY_KIND.get(kind, SEQUENCE)

    def _product_label(self, node: Node, factor: int) -> str | None:
        """The label by the parameter that a product reads, or whose gradient it makes."""
        roles, rule = self.roles, node.rule
        for position, value in enumerate(node.operands):
            origin = roles.made_of.get(value)
            if origin is None or not any(factor in parts for parts in rule.operands[position]):
                continue
            if node.region == "forward" or node.equation in self.recomputed:
                return _forward_label(node, position, factor)
            return self._class_label(origin, rule.operands[position], factor)
        origin = roles.gradient_of.get(node.results[0])
        return None if origin is None else self._class_label(origin, rule.results[0], factor)

    def _class_label(
        self, origin: ParameterDims, dims: Sequence[tuple[int, ...]], factor: int
    ) -> str | None:
        parameter, of_parameter = origin
        for dim, parts in zip(of_parameter, dims, strict=True):
            if factor in parts and dim is not None:
                return _BY_CLASS.get(self.roles.classes[parameter].get(dim, ""))
        return None

    # -- parameters

    def of_parameter(self, parameter: int) -> tuple[str, ...]:
        """A label for every axis of the mesh."""
        if parameter not in self._of_parameter:
            axes = range(len(self.mesh.shape))
            self._of_parameter[parameter] = tuple(self._parameter_label(parameter, a) for a in axes)
        return self._of_parameter[parameter]

    def _parameter_label(self, parameter: int, axis: int) -> str:
        if self.mesh.shape[axis] == 1:
            return REPLICATED
        reader = self.roles.readers[parameter][0]
        word = self._used_label(reader, axis)
        if not self._is_zero(parameter, axis):
            return word
        return ZERO if word == REPLICATED else f"{word} + {ZERO}"

    def _used_label(self, reader: Reader, axis: int) -> str:
        """The reader's label for an axis; a bias or scale is split like its features."""
        word = self._op_label(reader.node, axis, self.factors[reader.node][axis])
        whole = self.layouts[reader.node][0][reader.operand][axis] < 0
        return word if whole or word != TENSOR else COLUMN

    def _is_zero(self, parameter: int, axis: int) -> bool:
        reader = self.roles.readers[parameter][0]
        if self.layouts[reader.node][0][reader.operand][axis] != WHOLE:
            return False
        stored = (parameter, *self.roles.moments.get(parameter, ()))
        return any(self._stored_layout(value)[axis] >= 0 for value in stored)

    def _stored_layout(self, value: int) -> Layout:
        node, position = self.graph.producer[value]
        return self.layouts[node][1][position]

    def _stored_label(self, parameter: int, axis: int) -> str:
        """The label of an op on the stored parameter, for an axis that splits it."""
        word = self.of_parameter(parameter)[axis]
        return word if word in (COLUMN, ROW, EXPERT) else ZERO

    def parallelism(self) -> tuple[Parallelism, ...]:
        """The labels of all parameters, in the order of the inputs."""
        parameters = []
        for value in self.graph.inputs:
            path = self.graph.values[value].path
            if value not in self.roles.parameters or path is None:
                continue
            labels = self.of_parameter(value)
            node = self.graph.nodes[self.roles.readers[value][0].node]
            by_axis = tuple(zip(self.mesh.axis_names, labels, strict=True))
            reason, layers = self._reason(value, node), self._other_layers(value)
            parameters.append(Parallelism(path, node.module, by_axis, reason, layers or None))
        return tuple(parameters)

    def _other_layers(self, parameter: int) -> tuple[str, ...]:
        """Of a stack whose rows are used one by one: the modules that use its other rows."""
        nodes, (first, *others) = self.graph.nodes, self.roles.readers[parameter]
        if 0 in first.dims:
            return ()
        main = nodes[first.node]
        modules = dict.fromkeys(
            nodes[reader.node].module
            for reader in others
            if 0 not in reader.dims and nodes[reader.node].name == main.name
        )
        modules.pop(main.module, None)
        return tuple(modules)

    def _reason(self, parameter: int, node: Node) -> str:
        """`dot_general of Block_0/Dense_0: x splits the batch, y splits the output features`."""
        used: dict[str, list[str]] = {}
        stored: dict[str, list[str]] = {}
        for axis, word in enumerate(self.of_parameter(parameter)):
            name = self.mesh.axis_names[axis]
            if word.endswith(ZERO):
                what = "it is" if self._stored_layout(parameter)[axis] >= 0 else "its moments are"
                stored.setdefault(what, []).append(name)
            base = word.removesuffix(f" + {ZERO}")
            if base in _SPLITS:
                used.setdefault(_SPLITS[base], []).append(name)
        parts = [f"{_axes(names, 'splits', 'split')} {what}" for what, names in used.items()]
        text = f"{op_name(node)}: {', '.join(parts) or 'used whole on every device'}"
        zero = (f"{what} kept split along {' and '.join(names)}" for what, names in stored.items())
        return "; ".join((text, *zero))


def _axes(names: list[str], one: str, many: str) -> str:
    return f"{' and '.join(names)} {one if len(names) == 1 else many}"


def _forward_label(node: Node, position: int, factor: int) -> str | None:
    rule = node.rule
    if not any(factor in parts for dims in rule.results for parts in dims):
        return ROW
    others = (dims for p, dims in enumerate(rule.operands) if p != position)
    shared = any(factor in parts for dims in others for parts in dims)
    return EXPERT if shared and node.is_heavy else COLUMN


def op_name(node: Node) -> str:
    return f"{node.name} of {node.module}" if node.module else node.name

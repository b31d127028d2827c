"""Constraints on arrays: from paths, patterns and specs to the layouts that each may have.

    TracedStep, specs, options       → LayoutConstraints, by path        (`constrain_layouts`)
    LayoutConstraints, LogicalMesh   → value → layouts that it may have  (`allowed_layouts`)

Arrays are inputs and outputs, by path, and values that `autopar.constrain` named. State enters and
leaves in one layout, so a constraint on one holds for the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, MeshError, SpecError
from autopar.ir.graph import OUTPUT, Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import WHOLE, Layout, all_layouts, from_partition_spec
from autopar.ir.traced_step import TracedStep
from autopar.methods import ShardingOptions
from autopar.tracer.rules import identity_rule

Specs = Sequence[PartitionSpec | None]


@dataclass(frozen=True)
class LayoutRequest:
    """Constraints on one array. `source`: where the user gave the spec; `vmapped`: dimensions that
    `vmap` added to a named value, of which the user's spec says nothing."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec | None = None
    source: str = ""
    forbidden_axes: tuple[str, ...] = ()
    vmapped: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.spec is None and not self.forbidden_axes

    def with_spec(self, spec: PartitionSpec, source: str) -> LayoutRequest:
        if self.spec is None or _plain(self.spec) == _plain(spec):
            return replace(self, spec=spec, source=source)
        raise SpecError(
            f"{self.path}: {self.source} asks for {self.spec}, {source} for {spec}. Ask for one "
            "spec per array: narrow one of the two."
        )


@dataclass(frozen=True)
class LayoutConstraints:
    inputs: tuple[LayoutRequest, ...]
    outputs: tuple[LayoutRequest, ...]
    named: tuple[tuple[int, LayoutRequest], ...]  # (value, its constraints)


def constrain_layouts(
    traced: TracedStep,
    in_specs: Specs | None = None,
    out_specs: Specs | None = None,
    options: ShardingOptions | None = None,
) -> LayoutConstraints:
    """Specs given array by array, and those that options give by pattern."""
    options = options or ShardingOptions()
    inputs = _requests(traced.call.paths, traced.avals, in_specs, "in_specs")
    outputs = _requests(traced.out_paths, traced.out_avals, out_specs, "out_specs")
    named = [
        (
            n.value,
            LayoutRequest(n.name, tuple(traced.program.avals[n.value].shape), vmapped=n.vmapped),
        )
        for n in traced.program.named_values()
    ]
    if options.batch_axis is not None:
        inputs = _split_batch(traced, inputs, options.batch_axis)
    everything = [*inputs, *outputs, *(request for _, request in named)]
    for pattern, spec in options.pins.items():
        for i in _matching(everything, "pins", pattern):
            everything[i] = everything[i].with_spec(spec, f"pins[{pattern!r}]")
    for pattern, axes in options.forbid_axes.items():
        for i in _matching(everything, "forbid_axes", pattern):
            request = everything[i]
            everything[i] = replace(request, forbidden_axes=(*request.forbidden_axes, *axes))
    first, second = len(inputs), len(inputs) + len(outputs)
    values = [value for value, _ in named]
    return LayoutConstraints(
        tuple(everything[:first]),
        tuple(everything[first:second]),
        tuple(zip(values, everything[second:], strict=True)),
    )


def overridden(constraints: LayoutConstraints, by: LayoutConstraints) -> LayoutConstraints:
    """The first constraints, with the second's specs in place of theirs."""

    def one(base: LayoutRequest, other: LayoutRequest) -> LayoutRequest:
        return base if other.spec is None else replace(base, spec=other.spec, source=other.source)

    return LayoutConstraints(
        tuple(map(one, constraints.inputs, by.inputs)),
        tuple(map(one, constraints.outputs, by.outputs)),
        tuple(
            (v, one(base, other))
            for (v, base), (_, other) in zip(constraints.named, by.named, strict=True)
        ),
    )


def unconstrained(request: LayoutRequest) -> LayoutRequest:
    return LayoutRequest(request.path, request.shape)


def _requests(
    paths: Sequence[str], avals: Sequence, specs: Specs | None, source: str
) -> list[LayoutRequest]:
    specs = specs if specs is not None else (None,) * len(paths)
    return [
        LayoutRequest(path, tuple(aval.shape), spec, source if spec is not None else "")
        for path, aval, spec in zip(paths, avals, specs, strict=True)
    ]


def _split_batch(
    traced: TracedStep, inputs: list[LayoutRequest], axes: str | Sequence[str]
) -> list[LayoutRequest]:
    batch = [i for i in traced.batch if inputs[i].shape]
    if not batch:
        raise ArgumentError(
            f"ShardingOptions(batch_axis={axes!r}): {traced.name} was called without a batch "
            "argument (batch_argnums names none). Pass the batch as argument 1 or set "
            "batch_argnums."
        )
    spec = PartitionSpec(axes if isinstance(axes, str) else tuple(axes))
    split = {i: inputs[i].with_spec(spec, f"batch_axis={axes!r}") for i in batch}
    return [split.get(i, request) for i, request in enumerate(inputs)]


def matching_paths(paths: Sequence[str], pattern: str) -> list[int]:
    """Positions of the paths that a pattern of `ShardingOptions` stands for."""
    parts = (re.escape(part) for part in re.split(r"([*?])", pattern))
    text = "".join({"\\*": ".*", "\\?": "."}.get(part, part) for part in parts)
    matches = re.compile(text, re.DOTALL).fullmatch
    return [i for i, path in enumerate(paths) if matches(path)]


def _matching(requests: Sequence[LayoutRequest], option: str, pattern: str) -> list[int]:
    matches = matching_paths([request.path for request in requests], pattern)
    if matches:
        return matches
    paths = list(dict.fromkeys(request.path for request in requests))
    near = get_close_matches(pattern, paths, n=5, cutoff=0.3) or paths[:5]
    raise SpecError(
        f"ShardingOptions({option}=…): the pattern {pattern!r} matches no input, output or named "
        f"value. Near it are: {', '.join(near)}. In patterns '*' stands for any text and '?' for "
        "any one character."
    )


def _plain(spec: PartitionSpec) -> tuple:
    """Equal for specs that mean the same."""
    entries = []
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        entries.append(names if names not in ((None,), ()) else None)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


# -- before a mesh is chosen


def without_moved_state(traced: TracedStep, constraints: LayoutConstraints) -> TracedStep:
    """The step without state that the user wants out in another layout than in: the next step
    cannot take it as it is, nor reuse its buffer."""

    def moves(i: int, o: int) -> bool:
        given, wanted = constraints.inputs[i].spec, constraints.outputs[o].spec
        return given is not None and wanted is not None and _plain(given) != _plain(wanted)

    moved = {(i, o) for i, o in traced.state if moves(i, o)}
    if not moved:
        return traced
    state = tuple(pair for pair in traced.state if pair not in moved)
    inputs = {i for i, _ in moved}
    return replace(traced, state=state, donated=tuple(i for i in traced.donated if i not in inputs))


def with_output_nodes(
    graph: Graph, constraints: LayoutConstraints, also: Collection[int] = ()
) -> Graph:
    """The graph with a node of its own for every constrained output, and for those of `also`. Such
    a node can have any layout, which the op that makes the value may not be able to give."""
    values, nodes = list(graph.values), list(graph.nodes)
    outputs, producer = list(graph.outputs), dict(graph.producer)
    state = {o for _, o in graph.state}
    for index, request in enumerate(constraints.outputs):
        value = outputs[index]
        is_free = request.is_empty and index not in also
        if is_free or index in state or value is None or not request.shape:
            continue
        made = len(values)
        values.append(replace(graph.values[value], path=request.path))
        producer[made] = (len(nodes), 0)
        touched = (0.0, float(graph.values[value].num_bytes))
        rule = identity_rule(request.shape)
        nodes.append(Node(NodeKind.USE, OUTPUT, rule, (value,), (made,), touched_bytes=touched))
        outputs[index] = made
    if len(nodes) == len(graph.nodes):
        return graph
    return replace(
        graph,
        values=tuple(values),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        producer=producer,
        liveness=graph.liveness.with_nodes_at_end(len(nodes) - len(graph.nodes)),
    )


# -- on a mesh


def allowed_layouts(
    graph: Graph,
    traced: TracedStep,
    mesh: LogicalMesh,
    constraints: LayoutConstraints,
    options: ShardingOptions,
) -> dict[int, frozenset[Layout]]:
    """Constrained value -> layouts that its producer may give it."""
    allowed: dict[int, frozenset[Layout]] = {}

    def restrict(value: int | None, request: LayoutRequest) -> None:
        if value is None or request.is_empty:
            return
        layouts = _layouts_of(request, mesh)
        both = allowed.get(value, layouts) & layouts
        if not both:
            raise SpecError(
                f"{request.path}: its constraints leave no layout on the mesh {_sizes(mesh)}; "
                "state enters and leaves in one layout. Drop one of them."
            )
        allowed[value] = both

    enters = {o: graph.inputs[i] for i, o in graph.state}
    for value, request in zip(graph.inputs, constraints.inputs, strict=True):
        restrict(value, request)
    for index, request in enumerate(constraints.outputs):
        restrict(enters.get(index, graph.outputs[index]), request)
    for value, request in constraints.named:
        restrict(value, request)
    if not options.allow_replicated_parameters:
        _split_parameters(graph, traced, mesh, constraints, allowed)
    return allowed


def _sizes(mesh: LogicalMesh) -> Mapping[str, int]:
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))


def _layouts_of(request: LayoutRequest, mesh: LogicalMesh) -> frozenset[Layout]:
    for axis in request.forbidden_axes:
        if axis not in mesh.axis_names:
            raise MeshError(
                f"ShardingOptions(forbid_axes=…): {request.path} may not be split over the mesh "
                f"axis {axis!r}; the mesh has {mesh.axis_names}. Use one of those."
            )
    own_dims = [d for d in range(len(request.shape)) if d not in request.vmapped]
    wanted: Layout | None = None
    if request.spec is not None:
        shape = [request.shape[d] for d in own_dims]
        path = f"{request.path} ({request.source})"
        wanted = from_partition_spec(request.spec, shape, mesh.axis_names, mesh.shape, path)
    layouts = []
    for layout in all_layouts(request.shape, mesh.shape):
        splitting = [n for n, e in zip(mesh.axis_names, layout, strict=True) if e >= 0]
        if any(axis in request.forbidden_axes for axis in splitting):
            continue
        if wanted is None or all(
            entry == own_dims[want] if want >= 0 else entry == WHOLE or entry in request.vmapped
            for entry, want in zip(layout, wanted, strict=True)
        ):
            layouts.append(layout)
    if not layouts:
        raise SpecError(
            f"{request.path}: {request.source} asks for {request.spec}, but forbid_axes forbids "
            f"to split it over {request.forbidden_axes}. Drop one of the two."
        )
    return frozenset(layouts)


def _split_parameters(
    graph: Graph,
    traced: TracedStep,
    mesh: LogicalMesh,
    constraints: LayoutConstraints,
    allowed: dict[int, frozenset[Layout]],
) -> None:
    """State arrays of two or more dimensions are split somehow, unless the user pinned them or
    nothing divides them."""
    for i, o in graph.state:
        shape, dtype = tuple(traced.avals[i].shape), traced.avals[i].dtype
        if len(shape) < 2 or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if constraints.inputs[i].spec is not None or constraints.outputs[o].spec is not None:
            continue
        value = graph.inputs[i]
        layouts = allowed.get(value) or frozenset(all_layouts(shape, mesh.shape))
        split = frozenset(layout for layout in layouts if any(e >= 0 for e in layout))
        if split:
            allowed[value] = split

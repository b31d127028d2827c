"""What a parallel method asks for: the meshes it may use, and constraints on the solver.

    DataParallel     the batch split over every axis, everything else whole
    ManualParallel   inputs and outputs pinned to the user's specs
    ShardParallel    nothing: the solver is free

Constraints are pins (a value has one layout) and a filter on the strategies of each node; the
solver knows no methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_flatten_with_path

from autopar.errors import ArgumentError, MeshError, SpecError, shortened
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import WHOLE, Layout, from_partition_spec
from autopar.methods import DataParallel, ManualParallel, ShardParallel
from autopar.sharding.problem import StrategyFilter
from autopar.sharding.strategies import Strategy
from autopar.trace.flatten import TracedStep


def candidate_meshes(cluster: ClusterSpec, method: Any) -> list[LogicalMesh]:
    """The meshes a method may use on a cluster."""
    devices = cluster.num_devices
    if isinstance(method, LogicalMesh):
        return [method]
    if isinstance(method, DataParallel):
        return [mesh_of_cluster(cluster, (devices,))]
    if isinstance(method, ManualParallel):
        mesh = mesh_of_cluster(cluster, tuple(method.mesh_shape))
        return [replace(mesh, axis_names=tuple(method.axis_names))]
    if not isinstance(method, ShardParallel):
        raise ArgumentError(
            f"method={method!r}: needs ShardParallel, DataParallel, ManualParallel or a "
            "ParallelPlan."
        )
    if isinstance(method.mesh_shape, LogicalMesh):
        if method.mesh_shape.num_devices > devices:
            raise MeshError(
                f"ShardParallel(mesh_shape={method.mesh_shape.shape}) needs "
                f"{method.mesh_shape.num_devices} devices; there are {devices}. Choose a smaller "
                "mesh or use more devices."
            )
        return [method.mesh_shape]
    if method.mesh_shape != "auto":
        return [mesh_of_cluster(cluster, tuple(method.mesh_shape))]  # type: ignore[arg-type]
    # (2, 4) and (4, 2) differ even on equal links: where both axes split a dimension, only the
    # later one can be gathered by itself.
    shapes = [(devices,)]
    shapes += [(n, devices // n) for n in range(2, devices // 2 + 1) if devices % n == 0]
    return [mesh_of_cluster(cluster, shape) for shape in shapes]


def divisible_meshes(graph: Graph, meshes: list[LogicalMesh], method: Any) -> list[LogicalMesh]:
    """Meshes of which every axis divides something; an error if none is left."""
    sizes = {n for value in graph.values for n in value.shape}
    useful = [m for m in meshes if all(a == 1 or any(n % a == 0 for n in sizes) for a in m.shape)]
    if useful:
        return useful
    mesh = meshes[0]
    axis = next(i for i, a in enumerate(mesh.shape) if a > 1 and not any(n % a == 0 for n in sizes))
    raise MeshError(
        f"mesh_shape={mesh.shape}: the axis {mesh.axis_names[axis]!r} of size {mesh.shape[axis]} "
        "divides no dimension of any array in the program, so nothing could be sharded over it. "
        "Use a mesh whose axes divide the batch or the model's dimensions, or pad them."
    )


def solver_constraints(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: Any
) -> tuple[Mapping[int, Layout], StrategyFilter | None]:
    """(pins, strategy filter) of a method."""
    if isinstance(method, DataParallel):
        return _data_parallel(graph, traced, mesh)
    if isinstance(method, ManualParallel):
        return _manual_pins(graph, traced, mesh, method), None
    return {}, None


def _data_parallel(graph: Graph, traced: TracedStep, mesh: LogicalMesh):
    """Batch inputs split along their first dimension, everything else whole."""
    if not graph.batch:
        raise ArgumentError(
            f"DataParallel: {traced.name} was called without a batch argument "
            "(batch_argnums names none). Pass the batch as argument 1 or set batch_argnums."
        )
    pins: dict[int, Layout] = {}
    for index, value in enumerate(graph.inputs):
        shape = graph.values[value].shape
        if index not in graph.batch or not shape:
            pins[value] = (WHOLE,) * len(mesh.shape)
            continue
        if shape[0] % mesh.num_devices:
            raise MeshError(
                f"{traced.call.paths[index]}: its batch dimension of {shape[0]} is not divisible "
                f"by the {mesh.num_devices} devices of DataParallel. Use a batch size that is a "
                f"multiple of {mesh.num_devices}, or fewer devices."
            )
        pins[value] = tuple(0 if size > 1 else WHOLE for size in mesh.shape)

    def keep(node: Node, strategies: tuple[Strategy, ...]) -> list[int]:
        every = list(range(len(strategies)))
        whole = [i for i in every if not any(f >= 0 for f in strategies[i].factors)]
        if node.batch_factor is not None:
            wanted = tuple(node.batch_factor if n > 1 else -1 for n in mesh.shape)
            split = [i for i in every if strategies[i].factors == wanted]
            return split or whole or every
        generated = node.kind is NodeKind.OP and all(
            not graph.values[v].shape for v in node.operands
        )
        return every if generated else whole or every

    return pins, keep


def _manual_pins(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> dict[int, Layout]:
    pins: dict[int, Layout] = {}
    given, wanted = _manual_layouts(traced, mesh, method)
    for value, layout in zip(graph.inputs, given, strict=True):
        if layout is not None:
            pins[value] = layout
    for value, layout, path in zip(graph.outputs, wanted, traced.out_paths, strict=True):
        if value is not None and layout is not None and pins.setdefault(value, layout) != layout:
            raise SpecError(
                f"{path}: the function returns an array that in_specs or out_specs lay out in "
                "another way elsewhere. Ask for one spec in all places, or None in all but one."
            )
    return pins


def _manual_layouts(
    traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> tuple[list[Layout | None], list[Layout | None]]:
    """What is asked for each input and each output; None where nothing is."""

    def layouts(argument: str, specs: Any, tree: Any, paths: Any, avals: Any) -> list:
        found = _broadcast_specs(argument, specs, tree, len(paths))
        return [
            None
            if spec is None
            else from_partition_spec(spec, aval.shape, mesh.axis_names, mesh.shape, path)
            for spec, aval, path in zip(found, avals, paths, strict=True)
        ]

    call, places = traced.call, list(range(len(traced.avals)))
    args, kwargs = call.rebuild(places)
    arguments = (args, kwargs) if kwargs else args
    result = traced.rebuild_output(list(range(len(traced.out_avals))))
    return (
        layouts("in_specs", method.in_specs, arguments, call.paths, traced.avals),
        layouts("out_specs", method.out_specs, result, traced.out_paths, traced.out_avals),
    )


def without_moved_state(
    traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> TracedStep:
    """State that the user wants out in another layout than in is no state: the next step cannot
    take it as it is, nor can its buffer be used again."""
    given, wanted = _manual_layouts(traced, mesh, method)
    moved = {(i, o) for i, o in traced.state if given[i] and wanted[o] and given[i] != wanted[o]}
    state = tuple(pair for pair in traced.state if pair not in moved)
    inputs = {i for i, _ in moved}
    return replace(traced, state=state, donated=tuple(i for i in traced.donated if i not in inputs))


def _broadcast_specs(
    argument: str, specs: Any, target: Any, num_leaves: int
) -> list[PartitionSpec | None]:
    """One spec per array leaf, from a pytree of specs that is a prefix of the target: the
    arguments or the result, with the number of each array leaf in its place."""
    found: list[PartitionSpec | None] = [None] * num_leaves

    def walk(spec: Any, tree: Any, path: str) -> None:
        if spec is None or isinstance(spec, PartitionSpec):
            for leaf in tree_flatten(tree)[0]:
                if isinstance(leaf, int):
                    found[leaf] = spec
            return
        own, own_def = tree_flatten_with_path(spec, is_leaf=lambda x: x is not spec)
        is_leaf = len(own) == 1 and own[0][1] is spec
        if is_leaf or isinstance(tree, int):
            raise SpecError(
                f"ManualParallel({argument}=…): {path} is {shortened(spec)}, of type "
                f"{type(spec).__name__}. Give a jax.sharding.PartitionSpec for an array or for "
                "all arrays of a subtree, or None to leave it open."
            )
        try:
            children = own_def.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            what = "arguments" if argument == "in_specs" else "result"
            raise SpecError(
                f"ManualParallel({argument}=…): {path} does not match the {what} of the function: "
                f"{error} Give a pytree like the {what}, or a prefix of it."
            ) from error
        for (key, child_spec), child in zip(own, children, strict=True):
            walk(child_spec, child, path + jax.tree_util.keystr(key))

    walk(specs, target, argument)
    return found

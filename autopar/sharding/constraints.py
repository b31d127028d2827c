"""What a parallel method demands: the meshes it may use, and constraints on the solver.

    DataParallel, Zero2Parallel, Zero3Parallel   see `sharding.zero`
    ManualParallel   inputs and outputs have the user's specs
    ShardParallel    its options' pins and the like (see `layout_constraints`); else it is free

Constraints are the layouts that values may have and a filter on the strategies of each node; the
solver knows no methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_flatten_with_path

from autopar.errors import ArgumentError, MeshError, SpecError, shortened
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.traced_step import TracedStep
from autopar.methods import (
    DataParallel,
    ManualParallel,
    OneMeshMethod,
    PlacedParallel,
    ShardingOptions,
    ShardParallel,
    options_of,
)
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    allowed_layouts,
    constrain_layouts,
)
from autopar.sharding.problem import Allowed, StrategyFilter
from autopar.sharding.strategies import Strategy
from autopar.sharding.zero import data_parallel_constraints

# -- meshes


def candidate_meshes(cluster: ClusterSpec, method: OneMeshMethod) -> list[LogicalMesh]:
    """The meshes a method may use on a cluster."""
    forbidden = forbidden_collectives(options_of(method))
    meshes = _meshes(cluster, method)
    return [replace(mesh, forbidden=mesh.forbidden | forbidden) for mesh in meshes]


def forbidden_collectives(options: ShardingOptions) -> frozenset[str]:
    allowed = {
        "reduce-scatter": options.allow_reduce_scatter,
        "all-to-all": options.allow_all_to_all,
    }
    return frozenset(name for name, is_allowed in allowed.items() if not is_allowed)


def _meshes(cluster: ClusterSpec, method: OneMeshMethod) -> list[LogicalMesh]:
    devices = cluster.num_devices
    if isinstance(method, LogicalMesh):
        return [method]
    if isinstance(method, PlacedParallel):
        return [method.mesh]
    if isinstance(method, DataParallel):
        return [mesh_of_cluster(cluster, (devices,))]
    if isinstance(method, ManualParallel):
        mesh = mesh_of_cluster(cluster, tuple(method.mesh_shape))
        return [replace(mesh, axis_names=tuple(method.axis_names))]
    if not isinstance(method, ShardParallel):
        raise ArgumentError(
            f"method={method!r}: needs ShardParallel, DataParallel, Zero2Parallel, Zero3Parallel, "
            "ManualParallel or a ParallelPlan."
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
    return [mesh_of_cluster(cluster, shape) for shape in _shapes(devices)]


def _shapes(num_devices: int) -> list[tuple[int, ...]]:
    """Every mesh of so many devices. (2, 4) and (4, 2) differ even on equal links: where both axes
    split a dimension, only the later one can be gathered by itself."""
    grids = [(n, num_devices // n) for n in range(2, num_devices // 2 + 1) if num_devices % n == 0]
    return [(num_devices,), *grids]


def divisible_meshes(
    graph: Graph, meshes: list[LogicalMesh], method: OneMeshMethod, cluster: ClusterSpec
) -> list[LogicalMesh]:
    """Meshes of which every axis divides something. If none is left and the mesh is ours to
    choose, those of fewer devices, as many as possible; else an error. Data parallelism cuts the
    batch only, and checks it (`zero.py`)."""
    if isinstance(method, DataParallel):
        return meshes
    sizes = {n for value in graph.values for n in value.shape}

    def divides(shape: Sequence[int]) -> bool:
        return all(a == 1 or any(n % a == 0 for n in sizes) for a in shape)

    useful = [mesh for mesh in meshes if divides(mesh.shape)]
    if useful:
        return useful
    if getattr(method, "mesh_shape", None) == "auto":
        for count in range(cluster.num_devices - 1, 0, -1):
            shapes = [shape for shape in _shapes(count) if divides(shape)]
            if shapes:
                fewer = [mesh_of_cluster(cluster, shape) for shape in shapes]
                return [replace(mesh, forbidden=meshes[0].forbidden) for mesh in fewer]
    mesh = meshes[0]
    axis = next(i for i, a in enumerate(mesh.shape) if not divides((a,)))
    raise MeshError(
        f"mesh_shape={mesh.shape}: the axis {mesh.axis_names[axis]!r} of size {mesh.shape[axis]} "
        "divides no dimension of any array in the program, so nothing could be sharded over it. "
        "Use a mesh whose axes divide the batch or the model's dimensions, or pad them."
    )


# -- constraints


def method_constraints(traced: TracedStep, method: OneMeshMethod) -> LayoutConstraints:
    """What a method asks of inputs, outputs and named values."""
    if isinstance(method, PlacedParallel):
        return constrain_layouts(traced, method.in_specs, method.out_specs)
    if isinstance(method, ManualParallel):
        return constrain_layouts(traced, *_manual_specs(traced, method))
    return constrain_layouts(traced, options=options_of(method))


def solver_constraints(
    graph: Graph,
    traced: TracedStep,
    mesh: LogicalMesh,
    method: OneMeshMethod,
    constraints: LayoutConstraints,
) -> tuple[Allowed, StrategyFilter | None]:
    """(layouts that values may have, strategy filter) of a method."""
    requested = allowed_layouts(graph, traced, mesh, constraints, options_of(method))
    if isinstance(method, DataParallel):
        allowed, keep = data_parallel_constraints(graph, traced, mesh, method)
        return {**allowed, **requested}, keep
    batch_axis = options_of(method).batch_axis
    return requested, None if batch_axis is None else _rows_along(batch_axis, mesh)


def _rows_along(axes: Sequence[str], mesh: LogicalMesh) -> StrategyFilter:
    """No other axis splits the rows of the batch, in any node: not those of activations either,
    though the split would cost nothing."""
    others = tuple(a for a, name in enumerate(mesh.axis_names) if name not in axes)
    return partial(_rows_not_along, others)


def _rows_not_along(axes: Sequence[int], node: Node, strategies: tuple[Strategy, ...]) -> list[int]:
    every = list(range(len(strategies)))
    if node.batch_factor is None:
        return every
    kept = [i for i in every if all(strategies[i].factors[a] != node.batch_factor for a in axes)]
    return kept or every


def _manual_specs(
    traced: TracedStep, method: ManualParallel
) -> tuple[list[PartitionSpec | None], list[PartitionSpec | None]]:
    """The user's spec for each input and each output; None where the user leaves it open."""
    call, places = traced.call, list(range(len(traced.avals)))
    args, kwargs = call.rebuild(places)
    arguments = (args, kwargs) if kwargs else args
    result = traced.rebuild_output(list(range(len(traced.out_avals))))
    return (
        _broadcast_specs("in_specs", method.in_specs, arguments, len(call.paths)),
        _broadcast_specs("out_specs", method.out_specs, result, len(traced.out_paths)),
    )


def _broadcast_specs(
    argument: str, specs: Any, target: Any, num_leaves: int
) -> list[PartitionSpec | None]:
    """One spec per array leaf, from a pytree of specs that is a prefix of the target: the
    arguments or the result, with the number of each array leaf in its place."""
    leaf_specs: list[PartitionSpec | None] = [None] * num_leaves

    def walk(spec: Any, tree: Any, path: str) -> None:
        if spec is None or isinstance(spec, PartitionSpec):
            for leaf in tree_flatten(tree)[0]:
                if isinstance(leaf, int):
                    leaf_specs[leaf] = spec
            return
        child_specs, spec_def = tree_flatten_with_path(spec, is_leaf=lambda x: x is not spec)
        is_leaf = len(child_specs) == 1 and child_specs[0][1] is spec
        if is_leaf or isinstance(tree, int):
            raise SpecError(
                f"ManualParallel({argument}=…): {path} is {shortened(spec)}, of type "
                f"{type(spec).__name__}. Give a jax.sharding.PartitionSpec for an array or for "
                "all arrays of a subtree, or None to leave it open."
            )
        try:
            children = spec_def.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            what = "arguments" if argument == "in_specs" else "result"
            raise SpecError(
                f"ManualParallel({argument}=…): {path} does not match the {what} of the function: "
                f"{error} Give a pytree like the {what}, or a prefix of it."
            ) from error
        for (key, child_spec), child in zip(child_specs, children, strict=True):
            walk(child_spec, child, path + jax.tree_util.keystr(key))

    walk(specs, target, argument)
    return leaf_specs

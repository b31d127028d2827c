"""Data parallelism and ZeRO as constraints on the solver: a `Graph` and a mesh → allowed layouts.

DataParallel    the batch is split over every axis, everything else is whole
Zero2Parallel   so, but state that is no parameter is split, and the update is free
Zero3Parallel   so, but all state is split; what a scan slices of it is sliced as it is split, so
                that each trip gathers its own layer and the stack is never whole
"""

from __future__ import annotations

from autopar.errors import ArgumentError, MeshError
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import WHOLE, Layout, all_layouts
from autopar.ir.traced_step import TracedStep
from autopar.methods import DataParallel, Zero2Parallel, Zero3Parallel
from autopar.sharding.problem import Allowed, StrategyFilter
from autopar.sharding.strategies import Strategy
from autopar.tracer.regions import UPDATE


def data_parallel_constraints(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: DataParallel
) -> tuple[Allowed, StrategyFilter]:
    """Batch inputs and all that has their first dimension split along it, everything else whole;
    for ZeRO, state split along any dimension and free what has no batch dimension."""
    name = type(method).__name__
    if not graph.batch:
        raise ArgumentError(
            f"{name}: {traced.name} was called without a batch argument "
            "(batch_argnums names none). Pass the batch as argument 1 or set batch_argnums."
        )
    whole = (WHOLE,) * len(mesh.shape)
    to_split = _state_to_split(graph, method)
    slices = _slices_of_state(graph, to_split) if isinstance(method, Zero3Parallel) else set()
    allowed: dict[int, frozenset[Layout]] = {}
    for index, value in enumerate(graph.inputs):
        shape = graph.values[value].shape
        if value in to_split:
            split = [x for x in all_layouts(shape, mesh.shape) if x != whole]
            allowed[value] = frozenset(split or [whole])
            continue
        if index not in graph.batch or not shape:
            allowed[value] = frozenset((whole,))
            continue
        if not shape[0] or shape[0] % mesh.num_devices:
            cannot = "is not divisible by" if shape[0] else "has no rows for"
            raise MeshError(
                f"{traced.call.paths[index]}: its batch dimension of {shape[0]} {cannot} the "
                f"{mesh.num_devices} devices of {name}. Use a batch size that is a "
                f"multiple of {mesh.num_devices}, or fewer devices."
            )
        num_micro_batches = traced.num_micro_batches
        if shape[0] // num_micro_batches % mesh.num_devices:
            raise MeshError(
                f"{traced.call.paths[index]}: each of num_micro_batches={num_micro_batches} has "
                f"{shape[0] // num_micro_batches} of its {shape[0]} rows, which is not divisible "
                f"by the {mesh.num_devices} devices of {name}. Use a batch size that is a "
                f"multiple of {num_micro_batches * mesh.num_devices}, fewer micro-batches or fewer "
                "devices."
            )
        allowed[value] = frozenset((tuple(0 if size > 1 else WHOLE for size in mesh.shape),))

    def keep(node: Node, strategies: tuple[Strategy, ...]) -> list[int]:
        every = list(range(len(strategies)))
        whole = [i for i in every if not any(f >= 0 for f in strategies[i].factors)]
        if node.batch_factor is not None:
            wanted = tuple(node.batch_factor if n > 1 else -1 for n in mesh.shape)
            split = [i for i in every if strategies[i].factors == wanted]
            return split or whole or every
        if slices.intersection(node.results):
            return [i for i in every if _splits(strategies[i], mesh)] or every
        generated = node.kind is NodeKind.OP and all(
            not graph.values[v].shape for v in node.operands
        )
        return every if generated or to_split else whole or every

    return allowed, keep


def _splits(strategy: Strategy, mesh: LogicalMesh) -> bool:
    """Whether it splits along every axis of the mesh."""
    return all(f >= 0 for f, size in zip(strategy.factors, mesh.shape, strict=True) if size > 1)


def _slices_of_state(graph: Graph, state: set[int]) -> set[int]:
    """What scans slice of state, or of what is computed from state alone before the scan, such as
    parameters in another type."""
    known, slices = set(state), set[int]()
    for node in graph.nodes:
        arrays = [v for v in node.operands if graph.values[v].shape]
        if node.batch_factor is not None or not arrays or not known.issuperset(arrays):
            continue
        if node.kind in (NodeKind.OP, NodeKind.USE):
            known.update(node.results)
        if node.name == "scan_slice":
            slices.update(node.results)
    return slices


def _state_to_split(graph: Graph, method: DataParallel) -> set[int]:
    """Inputs that ZeRO splits: all state, or, in its second stage, what the passes do not read."""
    state = {graph.inputs[i] for i, _ in graph.state if graph.values[graph.inputs[i]].shape}
    if isinstance(method, Zero3Parallel):
        return state
    if not isinstance(method, Zero2Parallel):
        return set()
    origin = {value: value for value in state}
    parameters: set[int] = set()
    for node in graph.nodes:
        for value in node.operands:
            if value not in origin:
                continue
            if node.kind is NodeKind.USE:
                origin[node.results[0]] = origin[value]
            elif node.region != UPDATE:
                parameters.add(origin[value])
    return state - parameters

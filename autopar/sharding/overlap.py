"""Collectives under compute: from a graph and a mesh to the room that each of them has.

XLA starts a collective once its operand is there and waits for it where its result is read. Weights
can be gathered from the beginning of a step, each until its first use; gradients can be summed from
where they are made until the end. All others are waited for at once: those on activations, on state
that is gathered after its update, and in loops. The room of a gather is the compute before its use
for which the links are not yet busy with gathers that come first, if every weight is gathered over
all devices, as ZeRO-3 does; that of a sum is the same, seen from the end. Of a collective that
takes s seconds, min(s, room) is hidden. So what a step hides is a function of pairs of strategies,
as its costs are, and the solver stays exact. A plan that moves less than ZeRO-3 has more room than
that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.collectives import all_gather_s
from autopar.cost.compute import compute_s
from autopar.cost.reshard import deferred_alpha_share
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.reduce import FORBIDDEN
from autopar.tracer.regions import UPDATE

# A collective takes bandwidth and a launch even where it is hidden.
_HIDDEN_SHARE = 0.9
# The share of compute under which XLA's schedules for H100s hide collectives that are ready.
_COMPUTE_SHARE = 0.8
_LAUNCH_S = 2e-6  # of a kernel; collectives go on meanwhile


@dataclass(frozen=True)
class Hideable:
    """A collective on an operand that may run under compute.

    what:   the argument that is gathered on its way to its use, or the gradient: the same for all
            places where that may happen.
    before: the node that waits for a gather; None for a sum.
    after:  the node after which a sum begins; None for a gather.
    """

    node: int
    position: int
    what: int
    num_bytes: float
    before: int | None = None
    after: int | None = None


def hides_collectives(mesh: LogicalMesh) -> bool:
    """Whether XLA runs collectives under compute. Between hosts it starts them too late: it takes
    them for shorter than they are."""
    in_a_host = mesh.num_on_host == 0 or mesh.num_devices <= mesh.num_on_host
    return mesh.device is not None and mesh.device.hides_collectives and in_a_host


def rooms(graph: Graph, mesh: LogicalMesh, found: Sequence[Hideable]) -> list[float]:
    """Seconds under which each collective can hide."""
    kernels_s = _kernels_s(graph, mesh)
    done = np.cumsum(kernels_s)
    before, after = done - kernels_s, done[-1] - done
    gathers = {(one.before, one.what): one for one in found if one.before is not None}
    sums = {(one.after, one.what): one for one in found if one.after is not None}
    room: dict[tuple[int | None, int], float] = {}
    for ordered, computed in (
        (sorted(gathers), before),
        (sorted(sums, reverse=True), after),
    ):
        room |= _in_turn(ordered, computed, {**gathers, **sums}, mesh)
    return [room[one.after if one.before is None else one.before, one.what] for one in found]


def _in_turn(
    ordered: Sequence[tuple[int, int]],
    computed: np.ndarray,
    found: Mapping[tuple[int, int], Hideable],
    mesh: LogicalMesh,
) -> dict[tuple[int, int], float]:
    """The room of each of these collectives, which run one after another. `computed`: seconds until
    each node is reached, where nothing waits."""
    axes = tuple(range(len(mesh.shape)))
    room: dict[tuple[int, int], float] = {}
    links_s = waits_s = 0.0
    moved: set[int] = set()
    for key in ordered:
        reached_s = float(computed[key[0]])
        room[key] = max(0.0, reached_s + waits_s - links_s)
        if found[key].what not in moved:  # what is needed again is still there
            moved.add(found[key].what)
            share = deferred_alpha_share(mesh, found[key].num_bytes)
            links_s += all_gather_s(mesh, axes, found[key].num_bytes, share)
            waits_s = max(waits_s, links_s - reached_s)
    return room


def hidden(matrix: np.ndarray, room_s: Sequence[float]) -> np.ndarray | None:
    """What equal collectives with these rooms hide together; None if nothing. `matrix`: seconds of
    one of them, by strategies."""
    seconds = np.where(matrix < FORBIDDEN, matrix, 0.0)
    most = float(seconds.max(initial=0.0))
    if not most or not any(room_s):
        return None
    total = sum(room >= most for room in room_s) * seconds
    for room in room_s:
        if 0 < room < most:
            total = total + np.minimum(seconds, room)
    return _HIDDEN_SHARE * total


def _kernels_s(graph: Graph, mesh: LogicalMesh) -> np.ndarray:
    """Of every node, divided evenly over the devices. XLA waits before a loop begins."""
    assert mesh.device is not None
    seconds = np.zeros(len(graph.nodes))
    for index, node in enumerate(graph.nodes):
        if node.kind is not NodeKind.OP or node.trips != 1:
            continue
        dtype = graph.values[node.operands[0] if node.operands else node.results[0]].dtype
        whole_s = compute_s(mesh.device, node.flops, float(sum(node.touched_bytes)), dtype)
        num_kernels = 0.0 if node.traffic is None else node.traffic.num_kernels
        seconds[index] = whole_s / mesh.num_devices + num_kernels * _LAUNCH_S
    return _COMPUTE_SHARE * seconds


# -- which collectives


def hideable(graph: Graph) -> Iterator[Hideable]:
    argument = _from_state(graph)
    first_use = _first_uses(graph, argument)
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            producer = graph.producer[value][0]
            made, info = graph.nodes[producer], graph.values[value]
            if not info.deferred or made.region == UPDATE or max(node.trips, made.trips) > 1:
                continue
            if value in argument and node.region == UPDATE:
                continue
            size = float(info.num_bytes)
            if value not in argument:
                yield Hideable(index, position, producer, size, after=producer)
            elif (used := _use_of(node, index, argument, first_use)) is not None:
                yield Hideable(index, position, argument[value], size, before=used)


def _from_state(graph: Graph) -> dict[int, int]:
    """Value made from state alone, a parameter on its way to its use -> the argument it is made
    from."""
    batch = {graph.inputs[i] for i in graph.batch}
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT:
            found.update((v, v) for v in node.results if v not in batch)
        elif node.operands and all(v in found for v in node.operands):
            found.update(dict.fromkeys(node.results, found[node.operands[0]]))
    return found


def _first_uses(graph: Graph, from_state: Collection[int]) -> dict[int, int]:
    """Value made from state -> the first node that reads it together with something else."""
    first: dict[int, int] = {}
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        used = _use_of(node, index, from_state, first)
        for value in node.operands:
            if value in from_state and used is not None:
                first[value] = min(used, first.get(value, used))
    return first


def _use_of(
    node: Node, index: int, from_state: Collection[int], first: Mapping[int, int]
) -> int | None:
    if not all(value in from_state for value in node.results):
        return index
    return min((first[value] for value in node.results if value in first), default=None)

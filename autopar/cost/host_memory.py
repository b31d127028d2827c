"""State in host memory, as the memory model and the solver see it: from a `Graph` to a `Graph`.

Before the update, state in host memory takes nothing on the device. During the update three groups
of it are there: the one that is updated, what it becomes, and the next one. Fetching a group while
another is stored takes its bytes over one direction of the link to the host; the solver prices that
where the state enters the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Life
from autopar.ir.host_memory import HostMemory
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, num_shards
from autopar.ir.traced_step import TracedStep
from autopar.tracer.costs import aval_bytes

GROUPS_ON_DEVICE = 3


def with_host_memory(graph: Graph, step: TracedStep) -> Graph:
    """The graph of a step with its state in host memory, if it has any there."""
    cut = step.host
    if cut is None:
        return graph
    hosted = {graph.inputs[i] for i in cut.inputs}
    share = min(GROUPS_ON_DEVICE * cut.group_bytes / cut.num_bytes, GROUPS_ON_DEVICE)
    # Equations are numbered with those of bodies, which come after their loops.
    first = sum(equation.num_equations() for equation in step.program.equations[: cut.num_early])
    times = graph.liveness.times
    late = [times[n] for n, node in enumerate(graph.nodes) if (node.equation or 0) >= first > 0]
    start, end = min(late, default=0), max(times, default=0)
    new = dict(step.state)
    gone = hosted | {graph.outputs[new[i]] for i in cut.inputs}
    lives = [life for life in graph.liveness.lives if life.value not in gone]
    lives += (Life(value, start, end, share) for value in sorted(hosted))
    nodes = tuple(
        replace(node, host_bytes=float(graph.values[node.results[0]].num_bytes))
        if node.results and node.results[0] in hosted
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, liveness=replace(graph.liveness, lives=tuple(lives)))


def host_memory(
    step: TracedStep, mesh: LogicalMesh, in_layouts: Sequence[Layout]
) -> HostMemory | None:
    """What a plan of the step keeps in host memory, with these layouts of its inputs."""
    cut = step.host
    if cut is None:
        return None
    new = dict(step.state)
    held = sum(
        aval_bytes(step.avals[i]) / num_shards(in_layouts[i], mesh.shape) for i in cut.inputs
    )
    bandwidth = None if mesh.device is None else mesh.device.bytes_per_s_to_host
    return HostMemory(
        inputs=cut.inputs,
        outputs=tuple(new[i] for i in cut.inputs),
        num_groups=len(cut.groups),
        num_bytes=held,
        transfer_s=0.0 if bandwidth is None else held / bandwidth,
    )

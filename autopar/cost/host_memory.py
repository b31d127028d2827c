"""State in host memory, as the memory model and the solver see it: from a `Graph` to a `Graph`.

Before the update, state in host memory takes nothing on the device. During the update three groups
of it are there: the one that is updated, what it becomes, and the next one. Fetching a group while
another is stored takes its bytes over one direction of the link to the host; the solver prices that
where the state enters the step. Parameters are fetched twice; their casts, made at the start, are
on the device until the update begins, since no program frees what another one has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    num_casts, num_early = cut.early
    first = sum(equation.num_equations() for equation in step.program.equations[:num_early])
    times = graph.liveness.times
    late = [n for n, node in enumerate(graph.nodes) if (node.equation or 0) >= first > 0]
    # Some of them XLA would run earlier in one program. Counting from then on makes up for results
    # of the main program that take over no buffer.
    start, end = min((times[n] for n in late), default=0), max(times, default=0)
    update = min(late, default=1)
    new = dict(step.state)
    gone = hosted | {graph.outputs[new[i]] for i in cut.inputs}
    casts = {
        value
        for node in graph.nodes
        if node.equation is not None and node.equation < num_casts
        for value in node.results
    }
    lives = [life for life in graph.liveness.lives if life.value not in gone | casts]
    lives += (Life(value, start, end, share) for value in sorted(hosted))
    lives += (Life(value, 0, update - 1) for value in sorted(casts))
    fetched = Counter([*cut.inputs, *cut.parameters])
    times_fetched = {graph.inputs[i]: count for i, count in fetched.items()}
    nodes = tuple(
        replace(node, host_bytes=_fetched_bytes(graph, node.results[0], times_fetched))
        if node.results and node.results[0] in hosted
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, liveness=replace(graph.liveness, lives=tuple(lives)))


def _fetched_bytes(graph: Graph, value: int, times: Mapping[int, int]) -> float:
    return float(times[value] * graph.values[value].num_bytes)


def host_memory(
    step: TracedStep, mesh: LogicalMesh, in_layouts: Sequence[Layout]
) -> HostMemory | None:
    """What a plan of the step keeps in host memory, with these layouts of its inputs."""
    cut = step.host
    if cut is None:
        return None
    new = dict(step.state)
    held, cast = (
        sum(aval_bytes(step.avals[i]) / num_shards(in_layouts[i], mesh.shape) for i in inputs)
        for inputs in (cut.inputs, cut.parameters)
    )
    bandwidth = None if mesh.device is None else mesh.device.bytes_per_s_to_host
    return HostMemory(
        inputs=cut.inputs,
        outputs=tuple(new[i] for i in cut.inputs),
        num_groups=len(cut.groups),
        num_bytes=held,
        transfer_s=0.0 if bandwidth is None else (held + cast) / bandwidth,
        parameters=cut.parameters,
    )

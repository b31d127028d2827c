"""The first pass: from a step to its segments, their spaces and leading combinations.

    PreparedStep, meshes → Analysis

A `PreparedStep` is what all passes start from. It is made anew in each process, from the same
function, and `check_same` says if it is not the one that a file was made for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autopar.cost.report import cost_report
from autopar.errors import ProfileError
from autopar.ir.graph import Graph, check_graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.measure.segments.combine import TOP, segment_space
from autopar.measure.segments.cut import CutStep, cut_step
from autopar.measure.segments.files import Analysis, MeshSpace, SegmentSpace
from autopar.methods import ShardParallel
from autopar.progress import Progress
from autopar.sharding.constraints import candidate_meshes, divisible_meshes
from autopar.sharding.memory_budget import memory_budget
from autopar.sharding.origin import Origin, constraints_with_pins
from autopar.sharding.planning_log import paused_garbage_collector
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.fingerprint import program_fingerprint


@dataclass(frozen=True, eq=False)
class PreparedStep:
    traced: TracedStep
    cluster: ClusterSpec
    method: ShardParallel

    @cached_property
    def graph(self) -> Graph:
        with paused_garbage_collector():
            graph = build_graph(self.traced)
            check_graph(graph)
        return graph

    @cached_property
    def cut(self) -> CutStep:
        return cut_step(self.traced, self.graph)

    @cached_property
    def fingerprint(self) -> str:
        return program_fingerprint(self.traced.program)

    def meshes(self) -> list[LogicalMesh]:
        """The method's meshes that divide some array."""
        meshes = candidate_meshes(self.cluster, self.method)
        if meshes[0].num_devices == 1:
            return meshes
        return divisible_meshes(self.graph, meshes, self.method, self.cluster)

    def mesh(self, shape: tuple[int, ...]) -> LogicalMesh:
        mesh = next((m for m in self.meshes() if m.shape == shape), None)
        if mesh is None:
            raise ProfileError(
                f"analysis.json: these devices cannot form its mesh {shape}. Give --mesh, or run "
                "the analysis pass again."
            )
        return mesh

    def origin(self, mesh: LogicalMesh) -> Origin:
        return Origin(
            traced=self.traced,
            mesh=mesh,
            cluster=self.cluster,
            method=self.method,
            constraints=constraints_with_pins(self.traced, self.method, {}),
            choice=None,
            refetch=False,
            budget=memory_budget(mesh, self.method),
            pins={},
            built=self.graph,
        )

    def check_same(self, step: str, program: str, file: str) -> None:
        if program != self.fingerprint:
            raise ProfileError(
                f"{file}: made for another program ({step}, {program[:12]}); this one is "
                f"{self.traced.name}, {self.fingerprint[:12]}. Use the same options, or another "
                "--folder."
            )


def analyse(
    step: PreparedStep,
    *,
    top: int = TOP,
    tell: Callable[[MeshSpace], Any] = lambda mesh: None,
) -> Analysis:
    started = time.perf_counter()
    cut = step.cut
    spaces = []
    for mesh in step.meshes():
        spaces.append(_on_mesh(step, mesh, top))
        tell(spaces[-1])
    return Analysis(
        step=step.traced.name,
        program=step.fingerprint,
        jax_version=jax.__version__,
        device=step.cluster.spec.name,
        parts=tuple(part.name for part in cut.parts),
        meshes=tuple(spaces),
        seconds=time.perf_counter() - started,
    )


def _on_mesh(step: PreparedStep, mesh: LogicalMesh, top: int) -> MeshSpace:
    cut = step.cut
    with paused_garbage_collector():
        best = solve_graph(step.graph, mesh)
    report = cost_report(step.graph, mesh, best.layouts)
    spaces: list[SegmentSpace] = []
    with Progress(f"segments on {mesh.shape}", len(cut.segments)) as progress:
        for numbers in cut.segments:
            given = list(dict.fromkeys(_chosen(cut, n, best, mesh) for n in numbers))
            with paused_garbage_collector():
                spaces.append(segment_space(cut.parts, numbers, mesh, top, given[:2]))
            progress.step()
    return MeshSpace(mesh.shape, report.compute_s + report.communication_s, tuple(spaces))


def _chosen(
    cut: CutStep, number: int, sharding: GraphSharding, mesh: LogicalMesh
) -> tuple[tuple[int, ...], ...]:
    """The factors of one part in a sharding of the whole step; ports have the layouts of their
    sources."""
    part = cut.parts[number]
    source_of = {port.node: port.sources[0] for port in part.ports}
    factors = []
    for node, whole in enumerate(part.nodes):
        if whole >= 0:
            factors.append(sharding.strategies[whole].factors)
            continue
        source = source_of[node]
        layout = sharding.layouts[source.node][1][source.result]
        factors.append(_factors_of_layout(part.graph, node, layout))
    return tuple(factors)


def _factors_of_layout(graph: Graph, node: int, layout: tuple[int, ...]) -> tuple[int, ...]:
    """The factors that give a port a layout; partial sums arrive complete."""
    (dims,) = graph.nodes[node].rule.results
    return tuple(dims[entry][0] if entry >= 0 else -1 for entry in layout)

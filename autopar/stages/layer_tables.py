"""Costs of every layer on every submesh: from a graph and a cluster to `LayerTable`s.

The whole step is sharded on each submesh in each logical mesh shape, and what it costs is split
over layers (`cost.layer_costs`). A stage is a range of layers, and its cost the range's sum: tens
of solves price all stages that a search may think of. They share the graph, its classes and how
groups add up in layers, so that one more mesh costs one small integer programme.

A stage holds several micro-batches at once and must fit, so the cheapest sharding is not enough.
For each mesh it is solved again with a price per byte of memory,

    minimise   cost(x) + λ · (held(x) + k · in_flight(x)),     λ = share · cost(x₀) / bytes(x₀),

where x₀ is the cheapest: at a share of 0.3, halving memory is worth 15 % of the step. k is what the
middle stage of a pipeline of such submeshes keeps in flight. Every table has a twin in which layers
are recomputed. Dominated tables of a submesh are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, log2, prod

from autopar.cost.layer_costs import LayerTerms
from autopar.cost.node_layers import NodeLayers, place_nodes
from autopar.errors import AutoparError, MeshError, SolverError, SpecError
from autopar.ir.failures import Failure, planning_failed
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, last_axis, mesh_of_cluster
from autopar.ir.stages import LayerTable, Submesh
from autopar.ir.traced_step import TracedStep
from autopar.progress import Progress
from autopar.rewrite.attach_layers import LoopLayers
from autopar.rewrite.stage_slices import StageSlice, equation_layers, slice_step
from autopar.sharding.deadline import Deadline
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.planning_processes import SharedJobs
from autopar.sharding.problem import (
    Allowed,
    StrategyFilter,
)
from autopar.sharding.solve import GraphSharding
from autopar.stages.table_bench import MadeTables, Pricer, TableBench, TableJob

Constraints = Callable[[LogicalMesh], tuple[Allowed, StrategyFilter | None]]

_FEW_STAGES = 8  # that a pipeline has which is soon solved
TABLES_SHARE = 0.5  # of the time left, for all tables
_LEAST_SHARE = 0.2
_REST = 1.5  # what follows the tables, in terms of what came before
PRICES = (0.3, 10.0)  # shares of the step that all memory is worth


def stage_tables(
    graph: Graph,
    places: NodeLayers,
    cluster: ClusterSpec,
    submeshes: Sequence[Submesh],
    num_micro_batches: int,
    *,
    shapes: Mapping[Submesh, Sequence[tuple[int, ...]]] | None = None,
    constraints: Constraints | None = None,
    forbidden: frozenset[str] = frozenset(),
    prices: Sequence[float] = PRICES,
    remat: Sequence[bool] = (False, True),
    fold: bool = True,
    solver: str = "highs",
    time_limit_s: float = 5.0,
    bench: TableBench | None = None,
    log: PlanningLog | None = None,
    late: list[Submesh] | None = None,
) -> list[LayerTable]:
    """Tables of these submeshes. A mesh on which the constraints cannot be met, or autopar fails,
    is left out, as long as another remains.

    shapes:       logical meshes of a submesh; all sensible ones by default.
    constraints:  mesh -> what the solver may choose there.
    forbidden:    collectives that may not be used.
    time_limit_s: of one solve.
    bench:        made of the same graph and options before.
    log:          takes the failures, and has the deadline.
    late:         takes the submeshes for which there was no time; one is made at least.
    """
    log = log or PlanningLog()
    bench = bench or TableBench(
        graph, places, num_micro_batches, fold_graph(graph, fold=fold), solver
    )
    shapes_of = {s: (shapes or {}).get(s) or mesh_shapes(s) for s in submeshes}

    def job(submesh: Submesh, shape: tuple[int, ...], limit_s: float) -> TableJob:
        mesh = _mesh(cluster, submesh, shape, forbidden)
        asked = constraints(mesh) if constraints else ({}, None)
        kept, known = _in_flight(num_micro_batches, submesh, cluster), bench.known.get
        return TableJob(
            submesh, mesh, *asked, prices, kept, remat, limit_s, known((submesh, shape))
        )

    near_even = sorted(submeshes, key=lambda s: _from_even(s, cluster, places))
    with Progress("meshes", sum(map(len, shapes_of.values()))) as progress:
        work = _TableWork(bench, near_even, shapes_of, job, time_limit_s, log, progress, late)
        work.run()
    if not work.made and (work.failures or work.refused):
        raise _no_tables(work.failures, work.refused)
    return [t for s in submeshes for t in _of_submesh(work.made.get(s, {}), shapes_of[s])]


class _TableWork:
    """The meshes of all submeshes, solved here and by the planning processes there are. What is
    made does not depend on who makes it, nor on when, unless time is short."""

    def __init__(
        self,
        bench: TableBench,
        submeshes: Sequence[Submesh],
        shapes_of: Mapping[Submesh, Sequence[tuple[int, ...]]],
        job: Callable[[Submesh, tuple[int, ...], float], TableJob],
        time_limit_s: float,
        log: PlanningLog,
        progress: Progress,
        late: list[Submesh] | None,
    ) -> None:
        self.bench, self.log, self.progress, self.late = bench, log, progress, late
        self.submeshes, self.shapes_of = submeshes, shapes_of
        self.job, self.time_limit_s = job, time_limit_s
        self.deadline, self.took_s = log.deadline.part(_tables_share(log.deadline)), 0.0
        self.order = [(s, shape) for s in submeshes for shape in shapes_of[s]]
        self.made: dict[Submesh, dict[tuple[int, ...], list[LayerTable]]] = {}
        self.device_s: dict[int, float] = {}  # position in `order` -> of that mesh
        self.under_way: set[tuple[Submesh, tuple[int, ...]]] = set()
        self.refused: list[AutoparError] = []
        self.failures: list[Failure] = []

    def run(self) -> None:
        work = SharedJobs(
            self.jobs(),
            self.admits_again,
            self.done,
            self.failed,
            hurry=lambda: not self.deadline.allows(),
        )
        work.run(self.log.processes, self.bench, "make")
        if self.device_s and not self.bench.device_s:
            self.bench.device_s = self.device_s[min(self.device_s)]

    def jobs(self) -> Iterator[TableJob]:
        for submesh, shape in _promising_first(self.submeshes, self.shapes_of, self.bench):
            if not self.has_time_for(submesh, shape):
                continue
            limit_s = self.deadline.seconds(self.time_limit_s, share=0.3, least_s=1.0)
            try:
                job = self.job(submesh, shape, limit_s)
            except Exception as error:
                self.fail(submesh, shape, error)
                continue
            self.under_way.add((submesh, shape))
            yield job

    def has_time_for(self, submesh: Submesh, shape: tuple[int, ...]) -> bool:
        if not self.made or self.deadline.allows(self.took_s):
            return True
        has_some = {*self.made, *(submesh for submesh, _ in self.under_way)}
        _leave_out(submesh, shape, has_some, self.late, self.deadline)
        return False

    def admits_again(self, job: TableJob) -> bool:
        """Whether there is still time for a job that another process did not do."""
        self.under_way.discard((job.submesh, job.mesh.shape))
        return self.has_time_for(job.submesh, job.mesh.shape)

    def done(self, job: TableJob, made: MadeTables, took_s: float) -> None:
        submesh, shape = job.submesh, job.mesh.shape
        self.bench.take(job, made)
        self.made.setdefault(submesh, {})[shape] = made.tables
        self.device_s[self.order.index((submesh, shape))] = made.device_s
        self.under_way.discard((submesh, shape))
        self.took_s = took_s
        self.progress.step()

    def failed(self, job: TableJob, error: Exception) -> None:
        self.fail(job.submesh, job.mesh.shape, error)

    def fail(self, submesh: Submesh, shape: tuple[int, ...], error: Exception) -> None:
        if isinstance(error, (MeshError, SolverError, SpecError)):
            self.refused.append(error)
        else:
            self.failures += self.log.contain(f"mesh {shape} of a {submesh} submesh", error)
        self.under_way.discard((submesh, shape))
        self.progress.step()


def _of_submesh(
    made: Mapping[tuple[int, ...], Sequence[LayerTable]], shapes: Sequence[tuple[int, ...]]
) -> list[LayerTable]:
    """The tables worth keeping, in the order of the shapes, in whatever order they were made."""
    return undominated([table for shape in shapes for table in made.get(shape, ())])


def _promising_first(
    submeshes: Sequence[Submesh],
    shapes_of: Mapping[Submesh, Sequence[tuple[int, ...]]],
    bench: TableBench,
) -> Iterator[tuple[Submesh, tuple[int, ...]]]:
    """Every mesh of every submesh: all of the first one, then, of each of the others, the one whose
    last axis did best so far, then the second best of each and so on. If time is short, each
    submesh has a good mesh at least."""
    if not submeshes:
        return
    first, *others = submeshes
    ratio = bench.cost_by_last_axis()  # empty at first
    for shape in sorted(shapes_of[first], key=lambda shape: ratio.get(last_axis(shape), inf)):
        yield first, shape
    left = {submesh: list(shapes_of[submesh]) for submesh in others}
    while any(left.values()):
        for submesh, shapes in left.items():
            if shapes:
                ratio = bench.cost_by_last_axis()
                best = min(shapes, key=lambda shape: ratio.get(last_axis(shape), inf))
                shapes.remove(best)
                yield submesh, best


def _tables_share(deadline: Deadline) -> float:
    """The share of the time left that all tables may take. What follows takes once to twice as long
    as it took to trace the step and read its graph: searches, a loop over another number of
    micro-batches, and the stages of one pipeline."""
    left = deadline.left_s
    if left in (0.0, inf):
        return TABLES_SHARE
    return max(_LEAST_SHARE, min(TABLES_SHARE, 1 - _REST * deadline.elapsed_s / left))


def _in_flight(num_micro_batches: int, submesh: Submesh, cluster: ClusterSpec) -> float:
    """What the middle stage of a pipeline of such submeshes keeps in flight."""
    stages = min(num_micro_batches, max(1, cluster.num_devices // prod(submesh)))
    return (stages + 1) / 2


def _mesh(
    cluster: ClusterSpec, submesh: Submesh, shape: tuple[int, ...], forbidden: frozenset[str]
) -> LogicalMesh:
    mesh = mesh_of_cluster(submesh_cluster(cluster, submesh), shape)
    return replace(mesh, forbidden=forbidden)


def _leave_out(
    submesh: Submesh,
    shape: tuple[int, ...],
    made: Collection[Submesh],
    late: list[Submesh] | None,
    deadline: Deadline,
) -> None:
    deadline.cut(f"stages on {submesh[0]}×{submesh[1]} devices as {shape}")
    if late is not None and submesh not in late and submesh not in made:
        late.append(submesh)


def _from_even(submesh: Submesh, cluster: ClusterSpec, places: NodeLayers) -> tuple[float, int]:
    """How far a submesh is from one host, or from an even share of `_FEW_STAGES` where that is
    more; the larger first. If time is short, those come first that most stages have."""
    num_stages = max(1, min(places.num_layers, _FEW_STAGES))
    size = max(cluster.devices_per_host, cluster.num_devices / num_stages)
    return abs(log2(prod(submesh) / size)), -prod(submesh)


def _no_tables(failures: Sequence[Failure], refused: Sequence[AutoparError]) -> AutoparError:
    if failures:
        return planning_failed("the step", failures, "no mesh of any submesh could be priced")
    return refused[0]


def node_places(graph: Graph, step: TracedStep, layers: LoopLayers) -> NodeLayers:
    """The layer and phase of every node of a looped step's graph."""
    assert step.loop is not None
    number = sum(e.num_equations() for e in step.program.equations[: step.loop]) + 1
    (body,) = step.program.equations[step.loop].bodies
    is_backward: dict[int, bool] = {}
    for equation, backward in zip(body.equations, layers.is_backward, strict=True):
        count = equation.num_equations()
        is_backward.update(dict.fromkeys(range(number, number + count), backward))
        number += count
    layer_of_equation = equation_layers(step, layers)
    places = place_nodes(graph, layer_of_equation, is_backward, len(layers.layers))
    return replace(places, residuals=kept_values(step, layers))


def kept_values(step: TracedStep, layers: LoopLayers) -> dict[int, int]:
    """Forward values that the backward stage program of a stage of all layers is handed -> the
    layer that keeps them: their own if its backward pass needs them, else the first that does."""
    assert step.loop is not None
    (stage,) = slice_step(step, layers, [0] * len(layers.layers)).stages
    (body,) = step.program.equations[step.loop].bodies
    home: dict[int, int] = {}  # forward value -> the layer that makes it
    user: dict[int, int] = {}  # backward value -> likewise
    for equation, layer, backward in zip(
        body.equations, layers.layer_of, layers.is_backward, strict=True
    ):
        (user if backward else home).update(dict.fromkeys(equation.results, layer))
    needs: dict[int, set[int]] = {}  # layers whose backward pass needs a value
    made: set[int] = set()
    for position in reversed(stage.backward):
        equation = stage.body.equations[position]
        made.update(equation.results)
        readers = {user[r] for r in equation.results if r in user}
        if not readers:  # a forward equation that is run again
            readers = set().union(*(needs.get(r, ()) for r in equation.results))
        for operand in equation.operands:
            if isinstance(operand, int):
                needs.setdefault(operand, set()).update(readers)
    kept = {v: readers for v, readers in needs.items() if v in home and v not in made and readers}
    return {v: home[v] if home[v] in readers else min(readers) for v, readers in kept.items()}


def stage_costs(sharding: GraphSharding, stage: StageSlice, submesh: Submesh) -> LayerTable:
    """Costs of a stage under a sharding, as a table of one layer."""
    step = stage.step
    assert step.loop is not None
    graph, problem = sharding.graph, sharding.problem
    forward = set(stage.forward)
    first = sum(e.num_equations() for e in step.program.equations[: step.loop]) + 1
    is_backward: dict[int, bool] = {}
    for position, equation in enumerate(stage.body.equations):
        count = equation.num_equations()
        is_backward.update(dict.fromkeys(range(first, first + count), position not in forward))
        first += count
    total = step.program.num_equations()
    places = place_nodes(graph, [0] * total, is_backward, 1)
    places = replace(places, residuals=dict.fromkeys(stage.residual_values(), 0))
    terms = LayerTerms(graph, places, problem.classes, step.num_micro_batches)
    figures = Pricer(problem, terms).figures(sharding.choice)
    return terms.table(figures, submesh, sharding.mesh)


def mesh_shapes(submesh: Submesh) -> list[tuple[int, ...]]:
    """Logical meshes of a submesh: one axis, or two of which the later fits into a host. (A later
    axis across hosts would put what is gathered most onto the slowest link.)"""
    hosts, per_host = submesh
    count = hosts * per_host
    grids = [
        (count // n, n)
        for n in range(2, count // 2 + 1)
        if count % n == 0 and (hosts == 1 or per_host % n == 0)
    ]
    return [(count,), *grids]


def submesh_cluster(cluster: ClusterSpec, submesh: Submesh) -> ClusterSpec:
    """The submesh as a cluster of its own, with its share of the hosts' network."""
    hosts, per_host = submesh
    share = per_host / cluster.devices_per_host if hosts > 1 else 1.0
    return replace(
        cluster,
        num_hosts=hosts,
        devices_per_host=per_host,
        host_bandwidth=share * cluster.spec.host_bandwidth,
    )


def undominated(tables: Sequence[LayerTable]) -> list[LayerTable]:
    """Tables that no other of the same submesh dominates in every cost of every layer."""
    kept: list[LayerTable] = []
    for table in tables:
        if any(_is_as_good(other, table) for other in kept):
            continue
        kept = [other for other in kept if not _is_as_good(table, other)]
        kept.append(table)
    return kept


def _is_as_good(one: LayerTable, other: LayerTable) -> bool:
    names = ("latency_s", "once_s", "held_bytes", "in_flight_bytes", "working_bytes")
    return all(bool((getattr(one, x) <= getattr(other, x) * (1 + 1e-9)).all()) for x in names)

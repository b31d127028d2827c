"""The tables of a looped step: from a `LoopedStep` to `LayerTable`s of the submeshes asked for.

What all submeshes share, the graph, its folding and its terms, is worked out once (`TableMaker`).
Tables that save memory come later than others, where a search asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.ir.graph import Graph, check_graph
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import LayerTable, Submesh
from autopar.ir.traced_step import TracedStep
from autopar.ir.xla_options import hides_latency
from autopar.methods import ShardingOptions, ShardParallel
from autopar.sharding.constraints import (
    forbidden_collectives,
    method_constraints,
    solver_constraints,
)
from autopar.sharding.layout_constraints import LayoutConstraints
from autopar.sharding.memory_budget import corrected
from autopar.sharding.memory_limits import memory_by_rows
from autopar.sharding.planning_log import PlanningLog, paused_garbage_collector
from autopar.stages.expected_work import BENCH, GRAPH
from autopar.stages.layer_tables import PRICES, node_places, stage_tables
from autopar.stages.looped import LoopedStep
from autopar.stages.table_bench import TableBench


@dataclass(frozen=True)
class TableMaker:
    """Makes the tables of a looped step: what all submeshes share is worked out once."""

    step: TracedStep
    has_backward: bool
    options: ShardingOptions
    cluster: ClusterSpec
    log: PlanningLog
    graph: Graph
    constraints: LayoutConstraints
    bench: TableBench
    late: list[Submesh] = field(default_factory=list)  # for which there was no time
    priced: set[Submesh] = field(default_factory=set)  # whose tables that save memory are made

    def tables(
        self, submeshes: Sequence[Submesh], prices: Sequence[float] = PRICES
    ) -> list[LayerTable]:
        step, method = self.step, ShardParallel(options=self.options)
        remat = {"none": (False,), "all": (True,)}.get(self.options.remat, (False, True))
        with self.log.timed("tables"), paused_garbage_collector():
            made = stage_tables(
                self.graph,
                self.bench.places,
                self.cluster,
                submeshes,
                step.num_micro_batches,
                constraints=lambda mesh: solver_constraints(
                    self.graph, step, mesh, method, self.constraints
                ),
                forbidden=forbidden_collectives(self.options),
                prices=prices,
                remat=remat if self.has_backward else (False,),
                bench=self.bench,
                log=self.log,
                late=self.late,
            )
        self.log.ideal_s = self.bench.device_s / self.cluster.num_devices
        return made

    def more(
        self, submeshes: Sequence[Submesh], prices: Sequence[float] = PRICES
    ) -> list[LayerTable]:
        """The same beside tables at hand: none, if no mesh of these submeshes can be had."""
        try:
            return self.tables(submeshes, prices)
        except AutoparError:
            return []

    def with_prices(
        self, tables: Sequence[LayerTable], submeshes: Collection[Submesh]
    ) -> list[LayerTable]:
        """The tables, with those that save memory on these submeshes."""
        self.priced.update(submeshes)
        priced = self.more(sorted(submeshes))
        made = {(table.submesh, table.mesh_shape) for table in priced}
        return [t for t in tables if (t.submesh, t.mesh_shape) not in made] + priced


def table_maker(
    looped: LoopedStep,
    step: TracedStep,
    options: ShardingOptions,
    cluster: ClusterSpec,
    log: PlanningLog,
) -> TableMaker:
    """`step`: the looped step, with or without its stacks split over layers."""
    graph = loop_graph(step, options, cluster, log)
    constraints = method_constraints(step, ShardParallel(options=options))
    with log.measured(BENCH), paused_garbage_collector():
        with log.timed("graph"):
            places = node_places(graph, step, looped.attached)
        with log.timed("tables"):
            folded = log.folds.of(graph, fold=options.fold_layers)
            bench = TableBench(graph, places, step.num_micro_batches, folded, options.solver)
    return TableMaker(step, looped.has_backward, options, cluster, log, graph, constraints, bench)


def loop_graph(
    step: TracedStep, options: ShardingOptions, cluster: ClusterSpec, log: PlanningLog
) -> Graph:
    """The graph of a step as a loop over micro-batches. The log keeps what it tells of the memory
    that other numbers take."""
    with log.timed("graph"), log.measured(GRAPH), paused_garbage_collector():
        graph = log.graphs.of(
            step,
            overlaps=hides_latency(options.xla_options),
            instructions_per_byte=cluster.instructions_per_byte,
            in_stages=True,
        )
        check_graph(graph)
        if log.memory is None:
            number = step.num_micro_batches
            log.memory = memory_by_rows(
                corrected(graph, step, ShardParallel(options=options)), number, cluster.num_devices
            )
    return graph

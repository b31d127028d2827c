"""What a pipeline is planned for: `PipelineTask`, with the cuts and graphs of its candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autopar.ir.graph import Graph
from autopar.ir.layering import Layering
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import StageChoice
from autopar.ir.xla_options import hides_latency
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import in_flight_bound
from autopar.methods import PipeshardParallel
from autopar.rewrite.split_stacks import Rows, Stacks
from autopar.rewrite.stage_slices import SlicedStep, StageSlice
from autopar.sharding.origin import Pins
from autopar.sharding.planning_log import PlanningLog, paused_garbage_collector
from autopar.stages.looped import (
    LoopedStep,
    StageSpec,
    slice_into,
    with_even_stacks,
)
from autopar.stages.stage_plans import KnownStages, SolvedStage
from autopar.tracer.equal_graphs import EqualGraphs


@dataclass(frozen=True)
class ExistingPlacement:
    """Where a step that follows another finds its arguments.

    devices, stage_mesh: of every stage.
    layering: how the layers were found, for the plan.
    owners:   input, by position -> the stage that holds it.
    specs:    input, by position, and its rows (None for all) -> its spec there.
    """

    devices: tuple[tuple[int, ...], ...]
    stage_mesh: tuple[int, ...]
    layering: Layering
    owners: Mapping[int, int] = field(default_factory=dict)
    specs: Mapping[tuple[int, Rows | None], PartitionSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class StageMisfit:
    """A stage that did not fit with so many micro-batches in flight, although it recomputed its
    layers where that frees memory, and the smallest peak that was found of it."""

    spec: StageSpec
    in_flight: int
    peak_bytes: float

    def rules_out(self, spec: StageSpec, in_flight: int) -> bool:
        """Whether a stage cannot fit either: it has these layers on the same mesh, or more."""
        (first, end), (own_first, own_end) = self.spec.layers, spec.layers
        is_same = (self.spec.submesh, self.spec.mesh_shape) == (spec.submesh, spec.mesh_shape)
        return is_same and own_first <= first and end <= own_end and self.in_flight <= in_flight


@dataclass(frozen=True)
class PipelineTask:
    """What a pipeline is planned for, whatever its stages are.

    placement: where arguments are already, for a step that follows another.
    pins:      specs that come before what the method asks for.
    stack_parts: the stacks over layers that are split over stages; None to split all that can be.
    reuse:     stages, by number, that need not be solved again.
    known:     what is known of stages that were solved, for equal ones.
    misfits:   stages that did not fit, in the order in which they were tried.
    may_recompute: a stage that does not fit may recompute its layers, if the options say so.
    to_the_end: if no pipeline is found in time, search on.
    leaves:    whether a pipeline that promises so many seconds is not worth the time to solve it.
    then_s:    the seconds to leave for plans on one mesh that may beat a pipeline which takes so
               many; 0 if none may.
    on_one_mesh: a plan on one mesh in place of a pipeline of one stage, by its number of
               micro-batches and the seconds that it promises; None if all stages are to be solved.
    cuts, graphs: the stages that were cut last, and their graphs.
    equal_graphs: those of all stages, for equal ones.
    """

    method: PipeshardParallel
    cluster: ClusterSpec
    log: PlanningLog
    placement: ExistingPlacement | None = None
    pins: Pins = field(default_factory=dict)
    stack_parts: Stacks | None = None
    reuse: Mapping[int, SolvedStage] = field(default_factory=dict)
    known: KnownStages = field(default_factory=KnownStages)
    may_recompute: bool = True
    to_the_end: bool = True
    leaves: Callable[[float], bool] = lambda _: False
    then_s: Callable[[float], float] = lambda _: 0.0
    on_one_mesh: Callable[[int, float], PlannedStep | None] | None = None
    misfits: list[StageMisfit] = field(default_factory=list)
    cuts: dict[tuple, tuple[LoopedStep, SlicedStep]] = field(default_factory=dict)
    graphs: dict[int, tuple[StageSlice, Graph]] = field(default_factory=dict)
    equal_graphs: EqualGraphs = field(default_factory=EqualGraphs)

    @property
    def owners(self) -> Mapping[int, int] | None:
        return None if self.placement is None else self.placement.owners

    def is_one_program(self, stages: Sequence[StageChoice]) -> bool:
        """Whether a plan on one mesh may take the place of these stages."""
        is_asked = self.on_one_mesh is not None and not self.log.num_alternatives
        return is_asked and len(stages) == 1

    def cannot_fit(self, specs: Sequence[StageSpec], num_micro_batches: int) -> bool:
        """Whether one of these stages has what did not fit before."""
        if not self.misfits or self.method.schedule == "interleaved_1f1b":
            return False
        schedule, count = self.method.schedule, len(specs)
        return any(
            misfit.rules_out(spec, in_flight_bound(schedule, count, num_micro_batches, k))
            for k, spec in enumerate(specs)
            for misfit in self.misfits
        )

    @property
    def splits_stacks(self) -> bool:
        """Whether stacks over layers are split over stages as is best."""
        return self.stack_parts is None

    def alike(self, looped: LoopedStep, specs: list[StageSpec]) -> list[StageSpec]:
        """Stages like these over which stacks over layers are one array each, if there are any.
        Where stages share devices, there are none."""
        is_shared = self.method.schedule == "interleaved_1f1b"
        if is_shared or not self.splits_stacks or not looped.stack_rows:
            return specs
        return with_even_stacks(looped, specs) or specs

    def sliced(self, looped: LoopedStep, specs: Sequence[StageSpec]) -> SlicedStep:
        """The step cut into these stages; the last cut is kept."""
        key = (id(looped), *((spec.layers, spec.remat) for spec in specs))
        if key not in self.cuts:
            self.cuts.clear()
            self.graphs.clear()
            with self.log.timed("slice"):
                sliced = slice_into(looped, specs, self.owners, self.stack_parts)
                self.cuts[key] = looped, sliced
        return self.cuts[key][1]

    def graph_of(self, cut: StageSlice) -> Graph:
        """The graph of a stage of the last cut."""
        if id(cut) not in self.graphs:
            with self.log.timed("graph"), paused_garbage_collector():
                graph = self.equal_graphs.of(
                    cut.step,
                    overlaps=hides_latency(self.method.options.xla_options),
                    instructions_per_byte=self.cluster.instructions_per_byte,
                )
                self.graphs[id(cut)] = cut, graph
        return self.graphs[id(cut)][1]


@dataclass(frozen=True, eq=False)
class PipelineOrigin:
    """What solves a pipeline's stages again (see `Origin`). `solved`: the stages' solutions, if
    known; `pins`: those of `with_pins`."""

    looped: LoopedStep
    method: PipeshardParallel
    cluster: ClusterSpec
    placement: ExistingPlacement | None
    solved: tuple[SolvedStage, ...]
    pins: Pins

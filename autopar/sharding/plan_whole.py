"""The whole step on one mesh, recomputed and cut into micro-batches: `StepSource` → `PlannedStep`.

rewrite   StepSource, layers, micro-batches → TracedStep   (rewrite.remat, rewrite.accumulate)
plan      TracedStep → PlannedStep                         (sharding.plan_mesh)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autopar.errors import MemoryBudgetError, MeshError, PlanError, SolverError, SpecError
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import DataParallel, OneMeshMethod, ShardParallel, Zero3Parallel, options_of
from autopar.rewrite.host_cut import hostable_inputs, hostable_parameters, with_host_state
from autopar.rewrite.layers import Layer, layers_by_name, worth_recomputing
from autopar.rewrite.step_source import StepSource
from autopar.rewrite.unroll_scans import recomputes
from autopar.sharding.constraints import candidate_meshes
from autopar.sharding.memory_budget import RESERVE_SHARE, memory_budget, state_floor
from autopar.sharding.plan_mesh import ShardingTask, bind_mesh_plan, peak_floor, plan_mesh
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.remat_choice import choose_remat
from autopar.sharding.tried import (
    MICRO_BATCHES,
    PIPELINES,
    RECOMPUTATION,
    having_tried_one_mesh,
)

_WORTH_UNROLLING = 0.95  # of the step with its scans, by which unrolled layers are worth compiling
_ALL_MESHES = 0.5  # of the time left, in which a written-out step may be planned on all meshes


@dataclass(frozen=True)
class WholeStep:
    """A step to plan on one mesh.

    mesh:    None for the best of those that the method may use.
    in_full: explain a step that does not fit; else the error comes soon, with bytes only.
    cutoff:  seconds of a plan at hand: among plans that take as long, any will do.
    host:    state that lies in host memory, by input index.
    is_noted: whether every plan of it counts in the log, taken or not.
    """

    source: StepSource
    cluster: ClusterSpec
    method: OneMeshMethod
    log: PlanningLog
    mesh: LogicalMesh | None = None
    in_full: bool = True
    cutoff: float = inf
    host: tuple[int, ...] = ()
    is_noted: bool = True

    @property
    def num_micro_batches(self) -> int:
        return getattr(self.method, "num_micro_batches", 1)

    def layers(self) -> tuple[Layer, ...]:
        """Those that can be recomputed; none, if autopar fails to find them and need not."""
        with self.log.timed("remat"):
            try:
                return recomputable_layers(self.source)
            except Exception as error:
                if options_of(self.method).remat == "all":
                    raise
                self.log.contain("recomputation", error)
                return ()

    def plan(
        self,
        layers: Sequence[Layer],
        mesh_shape: tuple[int, ...] | None = None,
        *,
        in_full: bool = True,
        every_order: bool = False,
    ) -> PlannedStep:
        """The plan with these layers recomputed (see `RematProblem`)."""
        step = self._recomputing(layers)
        planned = self._planned(step, mesh_shape, in_full=in_full, every_order=every_order)
        return self.log.note(planned) if self.is_noted else planned

    def _planned(
        self,
        step: TracedStep,
        mesh_shape: tuple[int, ...] | None,
        *,
        in_full: bool,
        every_order: bool,
    ) -> PlannedStep:
        mesh = self.mesh
        if mesh is None and mesh_shape is not None:
            meshes = candidate_meshes(self.cluster, self.method)
            mesh = next((m for m in meshes if m.shape == mesh_shape), None)
        task = ShardingTask(
            step,
            self.cluster,
            self.method,
            mesh,
            in_full=in_full,
            every_order=in_full or every_order or not step.remat,
            cutoff=self.cutoff,
            overlaps=options_of(self.method).overlap,
        )
        return plan_mesh(task, self.log)

    def peak_floor(self, budget: float = 0.0, unrecomputed: float | None = None) -> float:
        """A lower bound on the peak of every plan, whichever layers it recomputes; or a bound on
        that of some plans, if it is within the budget. A program with recomputation is made only if
        what it frees at most could be enough. `unrecomputed`: a bound on the peak of plans that
        recompute nothing, where one is known without their graph."""
        plain = self._recomputing(())
        floor = self._peak_floor(plain) if unrecomputed is None else unrecomputed
        layers = self.layers() if self.may_recompute else ()
        if floor <= budget or not layers:
            return floor
        freed = sum(max(0, layer.freed_bytes) for layer in layers)
        least = floor - freed / self.num_micro_batches / self.cluster.num_devices
        if least > budget:
            return least
        return min(floor, self._peak_floor(self._recomputing(layers)))

    def _peak_floor(self, step: TracedStep) -> float:
        return peak_floor(ShardingTask(step, self.cluster, self.method, self.mesh), self.log)

    @cached_property
    def hopeless(self) -> str | None:
        """Why no plan can fit, if the state alone tells; None if one may."""
        meshes = [self.mesh] if self.mesh else candidate_meshes(self.cluster, self.method)
        budget, num_devices = memory_budget(meshes[0], self.method), meshes[0].num_devices
        floor = state_floor(on_host(self.source.whole, self.host), num_devices)
        if budget is None or floor <= budget:
            return None
        evenly = f", divided evenly over all {num_devices}" if num_devices > 1 else ""
        return f"the state alone takes {format_bytes(floor)} per device{evenly}"

    @property
    def may_recompute(self) -> bool:
        remat = options_of(self.method).remat
        return remat == "all" or (remat == "auto" and isinstance(self.method, ShardParallel))

    def _recomputing(self, layers: Sequence[Layer]) -> TracedStep:
        number = self.num_micro_batches
        if number > 1:
            with self.log.timed("trace"):
                self.source.micro_batch(number)
        with self.log.timed("remat"):
            return on_host(self.source.with_recomputation(layers, number), self.host)


def on_host(step: TracedStep, inputs: Sequence[int]) -> TracedStep:
    """The step with this state in host memory, as far as the rewritten step can have it there."""
    hosted = set(inputs) and set(inputs) & {*hostable_inputs(step), *hostable_parameters(step)}
    return with_host_state(step, sorted(hosted)) if hosted else step


def plan_whole(whole: WholeStep) -> PlannedStep:
    with whole.log.limited(options_of(whole.method)):
        started_s = whole.log.deadline.elapsed_s
        planned = _plan_whole(whole)
        took_s = whole.log.deadline.elapsed_s - started_s
        return whole.log.stopped(_written_out(whole, planned, took_s) or planned)


def _written_out(whole: WholeStep, planned: PlannedStep, took_s: float) -> PlannedStep | None:
    """The plan with scans over layers written out, and what such layers recompute chosen anew, if
    that fits and is clearly faster; where scans stack residuals, of our choice or of the user's
    `jax.checkpoint`. On CPUs XLA would merge recomputed layers with their copies, and under ZeRO-3
    each trip gathers its layer and frees it: there scans stay. If memory is the reason, the log
    says so. `took_s`: to make the plan at hand."""
    step, plan, log = planned.traced, planned.plan, whole.log
    if plan.num_devices > 1 and not _shards_alike(whole.method):
        return None
    is_recomputed = bool(step.remat) or recomputes(whole.source.whole.program)
    is_ours = step.is_thinned or is_recomputed
    if is_recomputed and whole.cluster.spec.name == "cpu":
        return None
    if whole.host or not (is_ours and plan.is_timed and log.deadline.allows(took_s)):
        return None
    try:
        with log.timed("remat"):
            source = whole.source.written_out
        form = None if source is None else _form_written_out(whole, source, plan, took_s)
        if form is None:
            return None
        other = _plan_whole(form)
    except MemoryBudgetError:
        log.cramped.add(whole.num_micro_batches)
        return None
    except (MeshError, SolverError, SpecError):
        return None
    except Exception as error:
        log.contain("layers written out", error)
        return None
    memory = whole.cluster.spec.memory_bytes * (1 - RESERVE_SHARE)
    fits = other.plan.estimated_peak_bytes <= memory
    is_faster = other.plan.estimated_step_s < _WORTH_UNROLLING * plan.estimated_step_s
    if fits and is_faster:
        return log.note(other)
    if other.plan.remat or other.plan.solver.unbounded or not fits:
        log.cramped.add(whole.num_micro_batches)
    return None


def _form_written_out(
    whole: WholeStep, source: StepSource, plan: ParallelPlan, took_s: float
) -> WholeStep | None:
    """The written-out step on all meshes, since what scans stack decides on theirs; if time is
    short on the scan's mesh, and None if it is too short for that. Written out, a step takes longer
    to plan by its equations."""
    sizes = [one.whole.program.num_equations() for one in (source, whole.source)]
    all_s = took_s * sizes[0] / sizes[1]
    mesh, deadline = whole.mesh, whole.log.deadline
    if mesh is None and not deadline.allows(all_s, _ALL_MESHES):
        meshes = candidate_meshes(whole.cluster, whole.method)
        mesh = next((m for m in meshes if m.shape == plan.mesh_shape), None)
        all_s /= len(meshes)
    if not deadline.allows(all_s):
        return None
    return replace(whole, source=source, mesh=mesh, in_full=False, is_noted=False)


def _shards_alike(method: OneMeshMethod) -> bool:
    """Whether the method treats layers in a stack as it treats layers of their own."""
    is_zero3 = isinstance(method, Zero3Parallel)
    return isinstance(method, ShardParallel | DataParallel) and not is_zero3


def _plan_whole(whole: WholeStep) -> PlannedStep:
    if whole.in_full and whole.hopeless is not None:
        return plan_smallest(whole)
    try:
        if options_of(whole.method).remat == "auto" and isinstance(whole.method, ShardParallel):
            return choose_remat(
                whole,
                whole.cluster.spec,
                whole.cluster.num_devices,
                whole.log,
                name=whole.source.whole.name,
                in_full=whole.in_full,
            )
        return whole.plan(_recomputed(whole), in_full=whole.in_full)
    except MemoryBudgetError as error:
        raise _explained(whole, error) if whole.in_full else error from error.__cause__


def plan_smallest(whole: WholeStep) -> PlannedStep:
    """The plan that takes the least memory; its error explains why even that does not fit. Where
    the state alone is too large, one mesh will do, and nothing is recomputed."""
    try:
        if whole.hopeless is not None:
            return _plan_on_one_mesh(whole)
        return whole.plan(_recomputed(whole))
    except MemoryBudgetError as error:
        raise _explained(whole, error) from error.__cause__


def _plan_on_one_mesh(whole: WholeStep) -> PlannedStep:
    """On the flattest of its meshes, unless what is asked of arrays cannot be met there."""
    meshes = [whole.mesh] if whole.mesh else candidate_meshes(whole.cluster, whole.method)
    try:
        return whole.plan((), min((mesh.shape for mesh in meshes), key=len))
    except (MeshError, SolverError, SpecError):
        return whole.plan(())


def _recomputed(whole: WholeStep) -> tuple[Layer, ...]:
    """The layers that a plan recomputes if it lacks memory."""
    return whole.layers() if whole.may_recompute else ()


def _explained(whole: WholeStep, error: MemoryBudgetError) -> MemoryBudgetError:
    if whole.hopeless is not None:
        ways = (MICRO_BATCHES, RECOMPUTATION, PIPELINES)
        reasons = {way: f"not tried: {whole.hopeless}" for way in ways}
        return error.having_tried(reasons, useless=(MICRO_BATCHES, "rematerialisation"))
    num_layers = len(_recomputed(whole))
    return having_tried_one_mesh(error, whole.source, whole.method, num_layers, whole.log)


def bind_whole(
    plan: ParallelPlan, source: StepSource, cluster: ClusterSpec, log: PlanningLog
) -> PlannedStep:
    """A plan on one mesh that was made elsewhere, for this step. If the program lacks a layer that
    the plan recomputes, it is not the plan's, and binding says so."""
    with log.timed("trace"):
        source = (source.written_out if plan.unrolled else None) or source
        layers = source.layers if plan.remat else ()
        step = source.with_recomputation(layers_by_name(layers, plan.remat), plan.num_micro_batches)
        if plan.host is not None and plan.host.num_groups:
            inputs = plan.host.inputs
            if not set(inputs) <= {*hostable_inputs(step), *hostable_parameters(step)}:
                raise PlanError(
                    f"the plan for {plan.name} keeps state in host memory that {step.name} needs "
                    "on the device. Plan again."
                )
            step = on_host(step, inputs)
    return bind_mesh_plan(plan, step, cluster)


def recomputable_layers(source: StepSource) -> tuple[Layer, ...]:
    return worth_recomputing(source.layers)

"""The default method's task, and what came of every way to plan it: `AutoTask`, `Outcomes`.

Ways to plan a step return None where they lead to no plan, and leave in `Outcomes` why. What a step
takes at least, in bytes and seconds, tells which ways are worth a try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

from autopar.cost.collectives import all_gather_s
from autopar.cost.measured import min_work_s
from autopar.errors import AutoparError, MemoryBudgetError, PlanningError
from autopar.ir.failures import Failure, first_line
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.text import format_bytes
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AutoParallel, PipeshardParallel, ShardParallel
from autopar.rewrite.layers import Layer, find_layers
from autopar.rewrite.step_source import StepSource
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.sharding.plan_whole import WholeStep, plan_whole
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.tried import PIPELINES, cut_refusal
from autopar.stages.expected_work import on_one_mesh_s
from autopar.stages.looped import batch_rows
from autopar.stages.plan_pipeline import plan_pipeline
from autopar.tracer.costs import aval_bytes, program_flops

# Of what a backward pass reads, the part that must be in memory (see `rewrite.residuals`).
_HELD_SHARE = 1 / 3
_CAST = "convert_element_type"
# A plan on one mesh is worth solving if tables put it no further behind a pipeline than this, and
# takes the place of a pipeline of one stage if it is no further behind.
WORTH_SOLVING = 1.05


@dataclass(frozen=True)
class AutoTask:
    """A step to plan in whatever way is fastest. `host`: state in host memory, by input index."""

    source: StepSource
    method: AutoParallel
    cluster: ClusterSpec
    log: PlanningLog
    host: tuple[int, ...] = ()

    @property
    def number_is_free(self) -> bool:
        return self.method.num_micro_batches == "auto"

    @property
    def budget_bytes(self) -> float:
        given = self.method.options.memory_budget_bytes
        if given is not None:
            return float(given)
        return self.cluster.spec.memory_bytes * (1 - RESERVE_SHARE)

    def whole(
        self,
        num_micro_batches: int | None = None,
        *,
        in_full: bool = False,
        cutoff: float = inf,
    ) -> WholeStep:
        """The step on one mesh, with the method's number of micro-batches by default."""
        number = num_micro_batches
        if number is None:
            number = 1 if self.number_is_free else int(self.method.num_micro_batches)
        method = ShardParallel(num_micro_batches=number, options=self.method.options)
        return WholeStep(
            self.source,
            self.cluster,
            method,
            self.log,
            in_full=in_full,
            cutoff=cutoff,
            host=self.host,
        )

    @cached_property
    def layers(self) -> Sequence[Layer] | None:
        """The step's layers; None if autopar fails to find them."""
        step = self.source.whole
        try:
            return find_layers(step.program, batch=step.batch)
        except Exception as error:
            self.log.contain("recomputation", error)
            return None

    @cached_property
    def state_bytes(self) -> int:
        step = self.source.whole
        return sum(aval_bytes(step.avals[i]) for i, _ in step.state)

    @cached_property
    def flops(self) -> float:
        """Of the whole batch."""
        return program_flops(self.source.whole.program)

    def as_pipeline(
        self,
        leaves: Callable[[float], bool] = lambda _: False,
        on_one_mesh: Callable[[int, float], PlannedStep | None] | None = None,
    ) -> PlannedStep:
        """`leaves` and `on_one_mesh` as in `PipelineTask`. Time is left for one mesh as long as it
        promises to beat the pipeline at hand."""

        def then_s(step_s: float) -> float:
            return on_one_mesh_s(self.log) if 0 < self.promised_on_one_mesh_s < step_s else 0.0

        method = PipeshardParallel(self.method.num_micro_batches, options=self.method.options)
        return plan_pipeline(
            self.source,
            method,
            self.cluster,
            self.log,
            to_the_end=False,
            leaves=leaves,
            then_s=then_s,
            on_one_mesh=on_one_mesh,
        )

    @property
    def promised_on_one_mesh_s(self) -> float:
        """About what the step takes on one mesh with the fewest micro-batches that may fit; 0 if
        that is unknown."""
        fewest = next((n for n in self.numbers if may_fit(self, n)), None)
        if not self.number_is_free or fewest is None or not self.log.ideal_s:
            return 0.0
        return one_mesh_s(self, fewest, self.log.ideal_s)

    def leaves(self, step_s: float) -> bool:
        """Whether a pipeline that promises so many seconds is left unsolved, as time is short: a
        plan at hand takes no longer; or there is none, time for this pipeline or a plan on one
        mesh, and one mesh promises more."""
        if not self.number_is_free or not self.log.deadline.is_short:
            return False
        if self.log.best is not None and self.log.has_plan:
            return step_s >= self.log.best.step_s
        return 0 < self.promised_on_one_mesh_s < step_s

    @property
    def numbers(self) -> list[int]:
        """Numbers of micro-batches that divide the batch, the whole batch first."""
        rows = batch_rows(self.source.whole)
        return [2**k for k in range(rows.bit_length()) if rows % 2**k == 0]


@dataclass
class Outcomes:
    """What came of every way to plan a step.

    misfit:   the first error for want of memory.
    least_cut: of the numbers of micro-batches that do not fit, the one that probably takes the
              least memory; None if none can be.
    failures: of autopar's own.
    tried:    micro-batches and pipelines -> what came of them, or why they were not tried.
    useless:  remedies that were tried in vain.
    is_left:  a pipeline was found by tables, and left unsolved.
    found:    a number of micro-batches -> the plan on one mesh that was made before pipelines, or
              in place of a pipeline of one stage; None if none fits.
    """

    task: AutoTask
    misfit: MemoryBudgetError | None = None
    least_cut: int | None = None
    failures: list[Failure] = field(default_factory=list)
    tried: dict[str, str] = field(default_factory=dict)
    useless: set[str] = field(default_factory=set)
    is_left: bool = False
    found: dict[int, PlannedStep | None] = field(default_factory=dict)

    def on_one_mesh(
        self, num_micro_batches: int | None = None, cutoff: float = inf
    ) -> PlannedStep | None:
        """The best plan on one mesh; if none takes less than the cutoff, any or none."""
        try:
            return plan_whole(self.task.whole(num_micro_batches, cutoff=cutoff))
        except MemoryBudgetError as error:
            self.misfit = self.misfit or error
        except Exception as error:
            self.failures += self.task.log.contain("a plan on one mesh", error)
        return None

    def as_pipeline(self, *, may_leave: bool = True) -> PlannedStep | None:
        """The best pipeline. The user asked for none, so no error of it is the user's."""

        def leaves(step_s: float) -> bool:
            self.is_left = may_leave and self.task.leaves(step_s)
            return self.is_left

        def on_one_mesh(number: int, step_s: float) -> PlannedStep | None:
            if number not in self.found:
                self.found[number] = self.on_one_mesh(number, WORTH_SOLVING * step_s)
            planned = self.found[number]
            if planned is None or planned.plan.estimated_step_s > WORTH_SOLVING * step_s:
                return None
            return planned

        try:
            return self.task.as_pipeline(leaves, on_one_mesh)
        except MemoryBudgetError as error:
            self.misfit = self.misfit or error
            self.tried[PIPELINES] = f"tried: {error.problem.splitlines()[0]}"
        except Exception as error:
            refusal = cut_refusal(error)
            if refusal is None and isinstance(error, AutoparError):
                is_failure = isinstance(error, PlanningError)
                refusal = None if is_failure else first_line(error)
            if refusal is not None:
                self.tried[PIPELINES] = f"tried: {refusal}"
            else:
                self.failures += self.task.log.contain("pipelines", error)
                self.tried[PIPELINES] = f"tried: autopar failed, {self.failures[-1].exception}"
        return None


@dataclass
class MicroBatchTries:
    """Plans on one mesh with more and more micro-batches. `found`: a number -> why it has none;
    `needs`: those that are possible but too large; `peaks`: a number -> the least that a plan took.
    """

    task: AutoTask
    found: dict[int, str] = field(default_factory=dict)
    needs: set[int] = field(default_factory=set)
    peaks: dict[int, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def plan(self, number: int) -> PlannedStep | None:
        try:
            return plan_whole(self.task.whole(number))
        except MemoryBudgetError as error:
            self._note_need(number, error.peak_bytes)
            self.peaks[number] = error.peak_bytes
        except Exception as error:
            self._note_refusal(number, error)
        return None

    def may_fit_after(self, tried: int, number: int) -> bool:
        """Whether more micro-batches may fit, by what fewer took: all but the state gets less."""
        if tried not in self.peaks:
            return True
        state = self.task.state_bytes / self.task.cluster.num_devices
        rest = max(0.0, self.peaks[tried] - state) * tried / number
        return state + rest <= self.task.budget_bytes

    def finest(self, numbers: Sequence[int]) -> int | None:
        """Of these numbers, the most micro-batches that the step can have; None if even they are
        too large. That is soon known, and fewer need more."""
        for number in reversed(numbers):
            is_too_large = self.is_too_large(number)
            if is_too_large is not None:
                return None if is_too_large else number
        return None

    def is_known_too_large(self, number: int) -> bool:
        """Whether so many need more than there is, by what another number takes."""
        floor = least_bytes(self.task, number)
        if floor > self.task.budget_bytes:
            self._note_need(number, floor)
        return floor > self.task.budget_bytes

    def is_too_large(self, number: int) -> bool | None:
        """Whether so many need more than there is, in any layout; None if they are refused."""
        memory, budget = self.task.log.memory, self.task.budget_bytes
        known = None if memory is None else memory.floor(number)
        if known is not None and known <= budget:
            return False
        try:
            floor = self.task.whole(number).peak_floor(budget, None if self.task.host else known)
        except Exception as error:
            self._note_refusal(number, error)
            return None
        if floor > self.task.budget_bytes:
            self._note_need(number, floor)
        return floor > self.task.budget_bytes

    def likely_smallest(self, numbers: Sequence[int]) -> int | None:
        """Of these numbers, the one that probably takes the least: the most micro-batches that have
        a row for every device, as far as they are not known to be refused."""
        rows, devices = batch_rows(self.task.source.whole), self.task.cluster.num_devices
        possible = [n for n in numbers if n in self.needs or n not in self.found]
        return max((n for n in possible if rows >= n * devices), default=None)

    def _note_need(self, number: int, peak_bytes: float) -> None:
        self.needs.add(number)
        self.found[number] = f"{number} of them need {format_bytes(peak_bytes)} per device or more"

    def _note_refusal(self, number: int, error: Exception) -> None:
        refusal = cut_refusal(error)
        if refusal is None:
            failures = self.task.log.contain(f"{number} micro-batches on one mesh", error)
            self.failures += [failure for failure in failures if failure not in self.failures]
            refusal = f"autopar failed, {failures[0].exception}"
        self.found[number] = f"{number} are not possible: {refusal}"


# -- what a step takes


def bytes_without_recomputation(
    task: AutoTask, layers: Sequence[Layer], num_micro_batches: int = 1
) -> float:
    """What a device holds of state and of what the backward pass reads, divided evenly."""
    held = sum(max(layer.kept_bytes, layer.residual_bytes * _HELD_SHARE) for layer in layers)
    return (task.state_bytes + held / num_micro_batches) / task.cluster.num_devices


def least_bytes(task: AutoTask, num_micro_batches: int) -> float:
    """A lower bound on what every plan on one mesh takes that has so many micro-batches, by the
    graph of another number, less all that recomputation can free; 0 if there is none."""
    memory, layers = task.log.memory, task.layers
    if memory is None or layers is None or task.host:
        return 0.0
    freed = 0.0
    if task.method.options.remat != "none":
        freed = sum(max(0, layer.residual_bytes - layer.kept_bytes) for layer in layers)
    return memory.floor(num_micro_batches) - freed / num_micro_batches / task.cluster.num_devices


def may_fit(task: AutoTask, num_micro_batches: int = 1) -> bool:
    """Whether so many micro-batches may fit on all devices: state, what every layer keeps if all
    are recomputed, and the largest layer, divided evenly."""
    if least_bytes(task, num_micro_batches) > task.budget_bytes:
        return False
    if (layers := task.layers) is None:
        return True
    held = sum(layer.kept_bytes for layer in layers)
    largest = max((layer.residual_bytes / layer.trips for layer in layers), default=0)
    held += largest * _HELD_SHARE
    each = (task.state_bytes + held / num_micro_batches) / task.cluster.num_devices
    return each <= task.budget_bytes


def recomputed_s(task: AutoTask, num_micro_batches: int, work_s: float) -> float:
    """About the least that a step takes on one mesh which recomputes what does not fit else: the
    work of all operators, and that of the layers once more."""
    if (layers := task.layers) is None:
        return 0.0
    excess = bytes_without_recomputation(task, layers, num_micro_batches) - task.budget_bytes
    flops = 0.0
    for layer in layers:
        if excess <= 0:
            break
        freed = max(0.0, layer.residual_bytes * _HELD_SHARE - layer.kept_bytes)
        excess -= freed / num_micro_batches / task.cluster.num_devices
        flops += layer.flops if freed else 0.0
    return work_s * (1 + flops / max(1.0, task.flops))


def one_mesh_s(task: AutoTask, num_micro_batches: int, work_s: float) -> float:
    """About what a step takes on one mesh that splits parameters over all devices: each micro-batch
    gathers them in both passes and sums their gradients; layers that do not fit are recomputed.
    `work_s`: the work of all operators. 0 if layers are not known."""
    if task.layers is None:
        return 0.0
    mesh = mesh_of_cluster(task.cluster, (task.cluster.num_devices,))
    gather_s = all_gather_s(mesh, (0,), _parameter_bytes(task, task.layers))
    return recomputed_s(task, num_micro_batches, work_s) + 3 * num_micro_batches * gather_s


def most_gained(task: AutoTask) -> float:
    """By how much, relative to the work of all operators, a pipeline may beat one mesh at most,
    about: what one mesh with the fewest micro-batches that may fit moves and recomputes is all that
    a pipeline can save."""
    number = next((n for n in task.numbers if may_fit(task, n)), None)
    if number is None or task.layers is None:
        return inf
    work_s = max(min_work_s(task.cluster, task.flops / task.cluster.num_devices), 1e-30)
    return one_mesh_s(task, number, work_s) / work_s - 1


def _parameter_bytes(task: AutoTask, layers: Sequence[Layer]) -> int:
    """Of the state that the layers' forward pass reads, at 16 bits an element, like the work."""
    step = task.source.whole
    program = step.program
    state = {program.inputs[i]: prod(step.avals[i].shape) for i, _ in step.state}
    cast = {e.results[0]: e.inputs[0] for e in program.equations if e.name == _CAST and e.inputs}
    forward = {number for layer in layers for number in layer.equations}
    read = {value for number in forward for value in program.equations[number].inputs}
    read = {cast.get(value, value) for value in read}
    return 2 * sum(size for value, size in state.items() if value in read)

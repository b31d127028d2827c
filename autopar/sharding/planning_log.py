"""What planning did, beside the plan: seconds per pass, other plans it made, its stage search."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf

from autopar.errors import PlanningError
from autopar.ir.failures import Failure, is_contained
from autopar.ir.stages import SearchReport, Submesh
from autopar.lower.planned_step import PlannedStep
from autopar.methods import ShardingOptions
from autopar.progress import Best, Progress, logged, showing
from autopar.sharding.deadline import Deadline, interrupts_end
from autopar.sharding.known_folds import KnownFolds
from autopar.sharding.memory_limits import MemoryByRows
from autopar.sharding.planning_processes import PlanningProcesses
from autopar.tracer.known_graphs import KnownGraphs

# What a pass is called on the terminal, where its name does not say it.
_SHOWN = {
    "trace": "tracing",
    "remat": "recomputation",
    "graph": "reading the program",
    "shard": "solving",
    "assign": "layouts",
    "tables": "tables of layers on submeshes",
    "search": "searching stages",
    "slice": "cutting stages",
}


@dataclass
class PlanningLog:
    """One per planned step; the passes write to it.

    seconds:         pass -> seconds, in the order of the passes.
    num_alternatives: how many plans, chosen or not, the caller wants to see in `alternatives`.
    alternatives:    plans of the whole step that were made on the way.
    search:          what the last stage search considered.
    skipped:         numbers of micro-batches that a stage search could not have, and why.
    failures:        failures of autopar's own that ruled out candidates.
    deadline:        the seconds that the plan may take, from the log's creation on.
    best:            the best plan so far, for the terminal.
    work_s:          no plan of the whole step takes less (`ShardingProblem.work_s`); 0 if unknown.
    ideal_s:         the same by tables of layers, about; 0 if unknown.
    prices:          submesh -> the price per byte at which a stage fitted there last.
    graphs:          of the steps that were looked at last.
    folds:           of the graphs that were looked at last.
    memory:          what the step takes in micro-batches, by their number; None if unknown.
    axis_costs:      size of a mesh's last axis, 1 for meshes of one axis -> what the step costs on
                     submeshes of such a shape, relative to the best; empty if unknown.
    cramped:         numbers of micro-batches at which scans stay since their layers, written out,
                     lack memory.
    took_s:          kind of work -> the longest that it took: about what it takes again.
    processes:       that share the work, while there is a limit; None outside of it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_alternatives: int = 0
    alternatives: list[PlannedStep] = field(default_factory=list)
    search: SearchReport | None = None
    skipped: dict[int, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    deadline: Deadline = field(default_factory=Deadline)
    best: Best | None = None
    work_s: float = 0.0
    ideal_s: float = 0.0
    prices: dict[Submesh, float] = field(default_factory=dict)
    graphs: KnownGraphs = field(default_factory=KnownGraphs)
    folds: KnownFolds = field(default_factory=KnownFolds)
    memory: MemoryByRows | None = None
    axis_costs: dict[int, float] = field(default_factory=dict)
    cramped: set[int] = field(default_factory=set)
    took_s: dict[str, float] = field(default_factory=dict)
    processes: PlanningProcesses | None = None

    @contextmanager
    def limited(self, options: ShardingOptions) -> Iterator[None]:
        """Plans within the time that the options give. Of plans within plans, the outermost
        counts."""
        if self.is_begun:
            yield
            return
        limit = options.planning_time_s
        self.deadline.limit_s = inf if limit is None else float(limit)
        self.best = Best(lambda: self.deadline.left_s)
        keeps_best = options.keep_best_on_interrupt
        with (
            interrupts_end(self.deadline) if keeps_best else nullcontext(),
            showing(self.best),
            PlanningProcesses() as self.processes,
        ):
            yield

    @property
    def is_begun(self) -> bool:
        """Whether a way to plan the step was tried, or is."""
        return self.best is not None

    @property
    def has_plan(self) -> bool:
        """Whether some plan of the step was made."""
        return self.best is not None and self.best.step_s < inf

    @contextmanager
    def sharing(self, share: float) -> Iterator[None]:
        """Work that may take a share of the time left."""
        with self._until(self.deadline.part(share)):
            yield

    @contextmanager
    def reserving(self, seconds: float) -> Iterator[None]:
        """Work after which so many seconds should be left."""
        with self._until(self.deadline.before(seconds)):
            yield

    @contextmanager
    def _until(self, part: Deadline) -> Iterator[None]:
        whole = self.deadline
        self.deadline = part
        try:
            yield
        finally:
            self.deadline = whole

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Work of a kind that may come again, and then takes about as long."""
        started = time.monotonic()
        yield
        self.took_s[kind] = max(time.monotonic() - started, self.took_s.get(kind, 0.0))

    def stopped(self, planned: PlannedStep) -> PlannedStep:
        """The plan with what was left out for want of time."""
        text, plan = self.deadline.text(), planned.plan
        if text is None:
            return planned
        return replace(planned, plan=replace(plan, solver=replace(plan.solver, stopped=text)))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a pass, log it and show it on a terminal."""
        started = time.perf_counter()
        with Progress(_SHOWN.get(name, name)), logged(name), paused_garbage_collector():
            yield
        spent = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def note(self, planned: PlannedStep) -> PlannedStep:
        """Keep a plan as an alternative if the caller wants any, and show it if it is the best so
        far; returns it."""
        if self.best is not None:
            self.best.take(planned.plan.estimated_step_s, planned.plan.solver.gap)
        if self.num_alternatives:
            self.alternatives.append(planned)
        return planned

    def contain(self, what: str, error: Exception) -> list[Failure]:
        """Keep a failure of autopar's own in one candidate, so that a search can go on; returns it.
        Raises what is not ours to hide: errors that speak to the user, and the user's own."""
        if not is_contained(error):
            raise error
        if isinstance(error, PlanningError):  # a search inside failed as a whole
            failures = list(error.failures)
        else:
            failures = [Failure.of(what, error)]
        self.failures += [failure for failure in failures if failure not in self.failures]
        return failures


@contextmanager
def paused_garbage_collector() -> Iterator[None]:
    """Passes make many small objects and no cycles; collecting amid them only costs time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

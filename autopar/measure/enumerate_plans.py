"""Timed plans of one step: predicted next to measured times, for ways to shard it.

    function, arguments, devices → TimedPlan, TimedPlan, …      (`enumerate_plans`, `timed_plans`)

Plans on every mesh of the devices (`candidates.covering_on_mesh`) are compiled and timed with
synthetic inputs. Communication is measured separately, as the sum of the program's collectives,
each timed alone on the same devices (`measure.time_collectives`). Computation is the rest of the
step, at least 0: an underestimate where communication overlaps it, or where collectives take longer
alone.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autopar.compiler import plan_step
from autopar.errors import ArgumentError, MeshError, SolverError, SpecError
from autopar.executables import make_executable
from autopar.ir.graph import HEAVY
from autopar.ir.identity import plan_digest
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import Timing
from autopar.ir.text import name_pattern, name_skeleton
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import covering_on_mesh, on_mesh
from autopar.measure.time_collectives import CollectiveTimes
from autopar.measure.time_step import StepTiming, time_executable
from autopar.methods import ShardParallel
from autopar.progress import Progress
from autopar.session import cluster_of_devices
from autopar.sharding.constraints import candidate_meshes
from autopar.sharding.origin import Origin
from autopar.tracer.trace import StepOptions


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """`communication_s`: the plan's collectives, each timed alone; None if it did not run.
    `strategies`: (operator, parallelism) in words."""

    planned: PlannedStep
    timing: StepTiming
    communication_s: float | None
    strategies: tuple[tuple[str, str], ...]

    @property
    def plan(self) -> ParallelPlan:
        return self.planned.plan

    @property
    def step_s(self) -> float | None:
        return None if self.timing.step is None else self.timing.step.seconds

    @property
    def computation_s(self) -> float | None:
        """The rest of the step."""
        if self.step_s is None or self.communication_s is None:
            return None
        return max(0.0, self.step_s - self.communication_s)

    @property
    def predicted_communication_s(self) -> float:
        return sum(module.communication_s for module in self.plan.modules)

    @property
    def predicted_computation_s(self) -> float:
        return sum(module.compute_s for module in self.plan.modules)

    def as_row(self) -> dict[str, Any]:
        """All values, for JSON."""
        step = self.timing.step
        return {
            "mesh": list(self.plan.mesh_shape),
            "strategies": dict(self.strategies),
            "sent_bytes": self.plan.communication_bytes,
            "predicted": {
                "communication_s": self.predicted_communication_s,
                "computation_s": self.predicted_computation_s,
                "step_s": self.plan.estimated_step_s,
                "peak_bytes": self.plan.estimated_peak_bytes,
            },
            "measured": {
                "communication_s": self.communication_s,
                "computation_s": self.computation_s,
                "step_s": self.step_s,
                "spread": None if step is None else step.spread,
                "num_samples": None if step is None else step.num_samples,
                "peak_bytes": self.timing.memory_bytes,
                "compile_s": self.timing.compile_s,
                "failure": self.timing.failure,
            },
        }


def enumerate_plans(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[Any],
    limit: int = 32,
    *,
    mesh_shapes: Sequence[tuple[int, ...]] | None = None,
    cluster: ClusterSpec | None = None,
    options: StepOptions | None = None,
    limit_s: float = 1.0,
    rounds: int = 1,
) -> list[TimedPlan]:
    """At most `limit` plans of a step, timed; the fastest first, failures last.

    mesh_shapes: to consider; None for all factorizations of the number of devices.
    cluster:     for predictions; None for that of the devices.
    limit_s:     for timing one plan in each round, beyond a few calls.
    rounds:      how often all plans are timed in turn, so that a temporary disturbance affects
                 all of them.
    """
    plans = covering_plans(
        fn, args, devices, limit, mesh_shapes=mesh_shapes, cluster=cluster, options=options
    )
    results = list(timed_plans(plans, devices, limit_s=limit_s, rounds=rounds))
    return sorted(results, key=lambda result: (result.step_s is None, result.step_s or 0.0))


def covering_plans(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[Any],
    limit: int,
    *,
    mesh_shapes: Sequence[tuple[int, ...]] | None = None,
    cluster: ClusterSpec | None = None,
    options: StepOptions | None = None,
    method: ShardParallel | None = None,
) -> list[PlannedStep]:
    """At most `limit` plans that cover the decisions on all meshes, the best predicted first."""
    cluster = cluster or cluster_of_devices(devices)
    method = method or ShardParallel()
    if len(devices) < 2:
        raise ArgumentError(
            f"enumerate_plans(devices=…): needs at least two devices, got {len(devices)}. Virtual "
            "CPU devices are enough."
        )
    shapes = [tuple(shape) for shape in mesh_shapes or ()]
    for shape in shapes:
        if prod(shape) > len(devices):
            raise MeshError(
                f"enumerate_plans(mesh_shapes={shapes}): {shape} needs {prod(shape)} devices, got "
                f"{len(devices)}. Choose a smaller mesh or use more devices."
            )
    first = plan_step(
        fn,
        args,
        {},
        cluster=cluster,
        method=method if not shapes else replace(method, mesh_shape=shapes[0]),
        options=options,
    )
    origin = first.plan.origin
    if not isinstance(origin, Origin):
        raise ArgumentError(
            f"enumerate_plans: no dimension of {first.plan.name}'s arrays can be split, so it runs "
            "on one device. Use a larger batch or model."
        )
    meshes = [mesh_of_cluster(cluster, shape) for shape in shapes]
    meshes = meshes or candidate_meshes(cluster, method)
    candidates: list[PlannedStep] = []
    # Meshes share some plans, so ask each for more.
    share = limit if len(meshes) == 1 else -(-3 * limit // (2 * len(meshes)))
    with Progress("solving meshes", len(meshes)) as progress:
        for mesh in meshes:
            try:
                candidates += covering_on_mesh(on_mesh(origin, mesh), share)
            except (MeshError, SolverError, SpecError):
                if shapes:
                    raise
            progress.step()
    different = {plan_digest(planned.plan): planned for planned in reversed(candidates)}
    plans = sorted(different.values(), key=lambda planned: planned.plan.estimated_step_s)
    step = max(1.0, (len(plans) - 1) / max(1, limit - 1))  # of too many, keep some at every cost
    places = dict.fromkeys(round(k * step) for k in range(min(limit, len(plans))))
    return [plans[k] for k in places]


def timed_plans(
    plans: Sequence[PlannedStep],
    devices: Sequence[Any],
    *,
    limit_s: float = 1.0,
    rounds: int = 1,
    collectives: CollectiveTimes | None = None,
    tell: Callable[[PlannedStep, StepTiming], None] = lambda planned, timing: None,
) -> Iterator[TimedPlan]:
    """Each plan with its timing, as soon as it is known; with several rounds, after the last.
    `tell` is called when a plan was timed for the first time."""
    times = collectives or CollectiveTimes(devices, min(limit_s, 0.5))
    if rounds == 1:
        for planned in plans:
            executable = make_executable(planned, devices)
            timing = _once(planned, executable, limit_s)
            tell(planned, timing)
            yield _timed(planned, executable, [timing], times)
        return
    executables = [make_executable(planned, devices) for planned in plans]
    timings: list[list[StepTiming]] = [[] for _ in plans]
    for _ in range(rounds):
        for planned, executable, plan_timings in zip(plans, executables, timings, strict=True):
            if not plan_timings or plan_timings[-1].step is not None:
                plan_timings.append(_once(planned, executable, limit_s))
                if len(plan_timings) == 1:
                    tell(planned, plan_timings[0])
    for planned, executable, plan_timings in zip(plans, executables, timings, strict=True):
        yield _timed(planned, executable, plan_timings, times)


def _once(planned: PlannedStep, executable: Any, limit_s: float) -> StepTiming:
    return time_executable(executable, state=planned.traced.state, limit_s=limit_s)


def _timed(
    planned: PlannedStep, executable: Any, timings: Sequence[StepTiming], times: CollectiveTimes
) -> TimedPlan:
    timing = _together(timings)
    communication_s = None
    if timing.step is not None:
        communication_s = times.of_program(executable.collectives())
    return TimedPlan(planned, timing, communication_s, strategies_in_words(planned.plan))


def _together(timings: Sequence[StepTiming]) -> StepTiming:
    """All rounds as one timing: the median of the medians, and the largest spread within or
    between rounds."""
    last = timings[-1]
    steps = [timing.step for timing in timings if timing.step is not None]
    if last.step is None or len(steps) == 1:
        return replace(last, compile_s=timings[0].compile_s)
    middle = statistics.median(step.seconds for step in steps)
    apart = max(abs(step.seconds - middle) for step in steps) / middle
    spread = max(apart, *(step.spread for step in steps))
    step = Timing(middle, round(spread, 4), sum(step.num_samples for step in steps))
    return replace(last, step=step, compile_s=timings[0].compile_s)


def strategies_in_words(plan: ParallelPlan) -> tuple[tuple[str, str], ...]:
    """(operator, use of each axis) of the heavy operators of the forward pass; equal layers with
    the same strategy are one."""
    if plan.details is None:
        return ()
    rows = [row for row in plan.details.ops.rows() if row.flops > 0 and row.name in HEAVY]
    rows = [row for row in rows if row.region == "forward"] or rows
    counts: Counter[str] = Counter()
    groups: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in rows:
        # The n-th product of a module is an operator of its own, in every layer.
        key = (name_skeleton(row.module), counts[row.module])
        counts[row.module] += 1
        groups.setdefault(key, {}).setdefault(row.words, []).append(row.module)
    strategies = []
    for (_, place), ways in groups.items():
        for words, modules in ways.items():
            name = name_pattern(modules) or "product"
            strategies.append((f"{name} #{place + 1}" if counts[modules[0]] > 1 else name, words))
    return tuple(strategies)

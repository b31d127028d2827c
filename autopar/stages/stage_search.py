"""The stage search: from tables of layers' costs to the best pipeline.

Stages i = 1 … S are ranges of layers, in order, each on a submesh of z_i devices under one variant
(`ir/stages.py`). With n micro-batches and c_i the cost of a stage per micro-batch (`ranges.py`),

    minimise    Σ c_i + (n − 1) · max c_i                                               (1)
    so that     Σ z_i = devices of the cluster                                          (2)
                peak of stage i ≤ memory, with f(S − i + 1) micro-batches in flight     (3)

(1) is within 6 % of the simulator for gpipe and 1f1b on random stages, and up to a fifth too high
for 1f1b_eager, which hides transfers, and zero_bubble, which fills waiting time. In (3), f is the
schedule's bound, which depends only on the number of stages from this one to the last
(`schedules.in_flight_bound`; interleaved_1f1b has one stage per mesh here, and then is 1f1b).

As in Alpa, a bound t on the slowest stage makes (1) a sum, whose least value G(t) a dynamic
programme finds (`stage_dp.py`): first the quick one that knows little of (3). If its stages fit
where they stand, they are the optimum of t; if not, the full one is run, without states that the
quick one shows to be no better than what is known.

Bounds t are costs of stages. G falls with t, so no bound between a and b is better than
G(b) + (n − 1) · a. The interval with the lowest such value is halved next, and the search ends when
none is below the best plan: the result is optimal, or with `gap` > 0 within that ratio of it.
Bounds that differ by less than `SAME` are one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.ir.stages import LayerTable, PipelineChoice, SearchReport, StageChoice, Submesh
from autopar.ir.text import format_bytes
from autopar.lower.schedules import in_flight_bound
from autopar.sharding.deadline import Deadline
from autopar.stages.ranges import Ranges, Setting, stage_cost_s, step_s
from autopar.stages.stage_dp import SAME, StageDP, StageRange
from autopar.stages.submeshes import can_tile, candidate_submeshes

MAX_UNPLACED = 100  # plans that cannot be laid out, after which a search gives up
ALTERNATIVES = 1.25  # plans of other numbers of stages may have a stage that much slower


def search_stages(
    tables: Sequence[LayerTable],
    setting: Setting,
    *,
    num_stages: int | None = None,
    top: int = 5,
    gap: float = 0.0,
    cutoff_s: float = inf,
    submeshes: Collection[Submesh] | None = None,
    deadline: Deadline | None = None,
) -> tuple[PipelineChoice | None, SearchReport]:
    """The best pipeline under the tables, and what was considered; None if none fits.

    num_stages: how many stages there must be; None for any number.
    top:        how many different plans the report keeps: the best of those that were met, among
                them some of other numbers of stages.
    gap:        the plan may take this much longer than the best one, as a ratio.
    cutoff_s:   only plans whose step takes less are of interest.
    submeshes:  those that stages may have; None for all that there are tables of.
    deadline:   after which the best plan so far will do.
    """
    started = time.perf_counter()
    ranges = Ranges(tables, setting)
    if submeshes is not None:
        ranges = ranges.only(np.array([table.submesh in submeshes for table in tables]))
    priced = time.perf_counter()
    num_devices = setting.cluster.num_devices
    notes: list[str] = []
    deadline = deadline or Deadline()
    searches = _searches(ranges, num_devices, num_stages, gap, cutoff_s, deadline)
    if not any(search.plans for search in searches) and cutoff_s == inf:
        used = searches[-1].most_devices()
        if used:
            notes.append(f"No pipeline can use all {num_devices} devices; {used} of them are used.")
            searches = _searches(ranges, used, num_stages, gap, cutoff_s, deadline)
        else:
            notes.append(_why_none(ranges, num_stages))
    if any(search.num_unplaced for search in searches):
        notes.append(
            "Plans were skipped whose submeshes add up to the cluster but cannot be laid out. "
            "The plan is at least as good as the best one of tiling submeshes."
        )
    if top > 1 and deadline.allows():
        for search in searches:
            search.add_alternatives()
    plans = {key: plan for search in searches for key, plan in search.plans.items()}
    best = sorted(plans.values(), key=lambda plan: plan.step_s)[: max(1, top)]
    num_tried = sum(search.num_tried for search in searches)
    num_candidates = int(ranges.allowed.sum()) * ranges.num_layers * (ranges.num_layers + 1) // 2
    report = SearchReport(
        num_layers=ranges.num_layers,
        num_candidates=num_candidates,
        num_pruned=num_candidates - searches[-1].num_usable(num_tried),
        num_bounds=num_tried,
        seconds={"ranges": priced - started, "search": time.perf_counter() - priced},
        best=tuple(best),
        intra_only_s=_intra_only_s(ranges),
        notes=tuple(notes),
    )
    return (best[0] if best else None), report


def most_in_flight(setting: Setting, num_stages_left: int) -> int:
    """f: micro-batches in flight on a stage with so many stages from it to the last, itself
    included."""
    return in_flight_bound(setting.schedule, num_stages_left, setting.num_micro_batches, 0)


def as_plan(stages: Sequence[StageChoice], setting: Setting) -> PipelineChoice:
    return PipelineChoice(tuple(stages), setting.num_micro_batches, step_s(stages, setting))


def _searches(
    ranges: Ranges,
    num_devices: int,
    num_stages: int | None,
    gap: float,
    cutoff_s: float,
    deadline: Deadline,
) -> list[_StageSearch]:
    """One search; if there are submeshes that need not tile, one without them before it, so that
    there is a plan to fall back on."""
    tiling = set(candidate_submeshes(ranges.setting.cluster))
    is_tiling = np.array([table.submesh in tiling for table in ranges.tables])
    all_tile = is_tiling[ranges.allowed].all()
    searches: list[_StageSearch] = []
    for part in [ranges] if all_tile else [ranges.only(is_tiling), ranges]:
        # (1) is at least n times its slowest stage.
        most_s = ALTERNATIVES * cutoff_s / ranges.setting.num_micro_batches
        search = _StageSearch(part.below(most_s), num_devices, num_stages, gap, cutoff_s)
        search.deadline = deadline
        search.run()
        cutoff_s = search.best_s
        searches.append(search)
    return searches


class _Optimum(NamedTuple):
    """Of one bound t: the least Σ c, and the plan that has it."""

    sum_s: float
    plan: PipelineChoice


class _StageSearch:
    """All bounds t, and the plans found so far."""

    def __init__(
        self, ranges: Ranges, num_devices: int, num_stages: int | None, gap: float, cutoff_s: float
    ) -> None:
        self.ranges, self.setting = ranges, ranges.setting
        self.num_devices, self.num_stages, self.gap = num_devices, num_stages, gap
        most_stages = num_stages or min(ranges.num_layers, num_devices)
        counts = range(1, most_stages + 1)
        in_flight = [0, *(most_in_flight(self.setting, s) for s in counts)]
        self.sums = StageDP(ranges, in_flight, num_devices)
        self.best_s = cutoff_s
        self.deadline = Deadline()
        self.plans: dict[tuple, PipelineChoice] = {}
        self.num_tried = self.num_unplaced = 0
        self.usable = np.isfinite(ranges.cost_s) & ranges.fits(self.sums.fewest_in_flight)
        self.bounds = _distinct(ranges.cost_s[self.usable])

    def run(self) -> None:
        bounds, weight = self.bounds, self.setting.num_micro_batches - 1
        heap: list[tuple[float, int, int, float]] = []

        def add(first: int, last: int, floor_s: float) -> None:
            if first <= last:
                heappush(heap, (floor_s + weight * bounds[first], first, last, floor_s))

        def try_bound(first: int, bound: int) -> None:
            optimum = self._at(bounds[bound], weight * bounds[first])
            if optimum is not None:  # bounds down to its slowest stage give the same
                add(first, self._bound_of(optimum.plan, bound) - 1, optimum.sum_s)

        if len(bounds):
            self._start(add)
        while heap and self.num_unplaced < MAX_UNPLACED:
            least_s, first, last, floor_s = heappop(heap)
            if least_s >= self.best_s * (1 - max(self.gap, SAME)):
                return
            if self.plans and not self.deadline.allows():
                self.deadline.cut("bounds on the slowest stage")
                return
            middle = (first + last) // 2 if weight else last
            add(middle + 1, last, floor_s)
            try_bound(first, middle)

    def _start(self, add: Callable[[int, int, float], None]) -> None:
        """All bounds as one interval, above the least sum that the quick programme gives; if that
        is the sum of a plan, only those below its slowest stage."""
        last = len(self.bounds) - 1
        floor_s, optimum, _ = self._quick(inf)
        if optimum is not None:
            last = self._bound_of(optimum.plan, last) - 1
        if floor_s < inf:
            add(0, last, floor_s)

    def num_usable(self, num_tried: int) -> int:
        """Candidates that fit, less the bounds that need not be tried."""
        return int(self.usable.sum()) - max(0, len(self.bounds) - num_tried)

    def most_devices(self) -> int:
        """The most devices that any plan can use; 0 if there is none."""
        suffixes = self.sums.suffixes(inf)
        if self.num_stages is not None:
            suffixes = suffixes[self.num_stages : self.num_stages + 1]
        used = [d for least in suffixes for d in np.flatnonzero(np.isfinite(least[0]))]
        return int(max(used, default=0)) * self.sums.unit

    def add_alternatives(self) -> None:
        """Meet a plan of every number of stages that can be nearly as good as the best one."""
        if self.num_stages is not None or not self.plans:
            return
        best = min(self.plans.values(), key=lambda plan: plan.step_s)
        bound_s = max(_costs(best, self.setting)) * ALTERNATIVES
        limit_s = sum(_costs(best, self.setting)) * ALTERNATIVES
        suffixes = self.sums.suffixes(bound_s, limit_s, self.sums.prefixes(bound_s))
        for count in range(1, len(suffixes)):
            if suffixes[count][0, self.sums.num_units] < inf:
                self._plan(self.sums.stages_of_suffixes(suffixes, count, bound_s))

    def _at(self, bound_s: float, rest_s: float) -> _Optimum | None:
        """The optimum of a bound; None if, with at least `rest_s` for the other micro-batches, it
        is no better than what is known."""
        floor_s, optimum, prefixes = self._quick(bound_s, rest_s)
        limit_s = self.best_s - rest_s
        if optimum is not None or floor_s >= limit_s:
            return optimum
        suffixes = self.sums.suffixes(bound_s, limit_s, prefixes)
        counts = range(1, len(suffixes)) if self.num_stages is None else (self.num_stages,)
        candidates = [(suffixes[s][0, self.sums.num_units], s) for s in counts if s < len(suffixes)]
        least_s, count = min(candidates, default=(inf, 0))
        if least_s >= limit_s:
            return None
        plan = self._plan(self.sums.stages_of_suffixes(suffixes, count, bound_s))
        assert plan is not None, "a stage that fits by the search does not fit"
        return _Optimum(least_s, plan)

    def _quick(
        self, bound_s: float, rest_s: float = 0.0
    ) -> tuple[float, _Optimum | None, np.ndarray]:
        """What the quick programme says of a bound: a floor of the least sum, the optimum if its
        stages fit where they stand, and its table."""
        self.num_tried += 1
        prefixes = self.sums.prefixes(bound_s)
        floor_s = prefixes[-1, self.sums.num_units]
        if self.num_stages is None and floor_s < self.best_s - rest_s:
            plan = self._plan(self.sums.stages_of_prefixes(prefixes, bound_s))
            if plan is not None and sum(_costs(plan, self.setting)) <= floor_s * (1 + SAME):
                return floor_s, _Optimum(floor_s, plan), prefixes
        return floor_s, None, prefixes

    def _plan(self, ranges: Sequence[StageRange]) -> PipelineChoice | None:
        """The ranges under the best variants that fit where they stand; kept if they can be laid
        out."""
        stages: list[StageChoice] = []
        for i, (first, end, m) in enumerate(ranges):
            stage = self.ranges.choose(first, end, m, self.sums.in_flight[len(ranges) - i])
            if stage is None:
                return None
            stages.append(stage)
        plan = as_plan(stages, self.setting)
        whole = self.num_devices == self.setting.cluster.num_devices
        if not can_tile([stage.submesh for stage in stages], self.setting.cluster, whole=whole):
            self.num_unplaced += 1
        elif self.plans or plan.step_s < self.best_s:
            self.best_s = min(self.best_s, plan.step_s)
            self.plans.setdefault(tuple((s.layers, s.table) for s in stages), plan)
        return plan

    def _bound_of(self, plan: PipelineChoice, highest: int) -> int:
        """The number of the bound that a plan's slowest stage has."""
        slowest_s = max(_costs(plan, self.setting)) * (1 - SAME / 2)
        return min(highest, int(np.searchsorted(self.bounds, slowest_s)))


def _costs(plan: PipelineChoice, setting: Setting) -> list[float]:
    return [stage_cost_s(stage, setting) for stage in plan.stages]


def _distinct(values: np.ndarray) -> np.ndarray:
    """In rising order; of values that are the same but for rounding, the largest."""
    values = np.unique(values)
    apart = values[1:] > values[:-1] * (1 + SAME)
    return np.append(values[:-1][apart], values[-1:])


def _intra_only_s(ranges: Ranges) -> float | None:
    """The step on one mesh of all devices, accumulating gradients; None if none fits."""
    cluster = ranges.setting.cluster
    whole = (cluster.num_hosts, cluster.devices_per_host)
    if whole not in ranges.submeshes:
        return None
    in_flight = most_in_flight(ranges.setting, 1)
    stage = ranges.choose(0, ranges.num_layers, ranges.submeshes.index(whole), in_flight)
    return None if stage is None else step_s([stage], ranges.setting)


def _why_none(ranges: Ranges, num_stages: int | None) -> str:
    if num_stages is not None and num_stages > ranges.num_layers:
        return f"{num_stages} stages need as many layers; there are {ranges.num_layers}."
    if not ranges.allowed.any():
        return "There are no tables of the submeshes that stages may have."
    in_flight = most_in_flight(ranges.setting, 1)
    for layer in range(ranges.num_layers):
        missing = ranges.missing_bytes(layer, layer + 1, in_flight)
        if missing > 0:
            return (
                f"Layer {layer} alone fits on no submesh: with {in_flight} micro-batches in flight "
                f"it needs at least {format_bytes(missing)} more on each device."
            )
    with_count = "" if num_stages is None else f" of {num_stages} stages"
    return (
        f"Every layer fits on some submesh by itself, but no pipeline{with_count} fits as a whole."
    )

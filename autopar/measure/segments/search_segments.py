"""The third pass: the best combination for every part of the step, by measured times.

    PreparedStep, Analysis, SegmentProfile → FoundCombination … → ParallelPlan

Choose a combination x_p for every part p: minimise

    Σ_p t[segment of p, x_p]  +  Σ_crossings r(made by x_p, wanted by x_q)

where t is the time of the segment and r that of the resharding, both less a dispatch
(`_CostTable`). Parts form a chain, except for values read far away (tied embeddings): min-plus
elimination of one part after another solves it, and the sharding solver what remains. Both are
exact (`sharding.reduce`, `sharding.ilp`). Equal layers may differ. Combinations that ran out of
memory are excluded. The result is a sharding of every node of the step's graph, with its memory; if
it does not fit, bytes are priced until it does (`_fitting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from autopar.cost.reshard import reshard_table
from autopar.errors import MemoryBudgetError, ProfileError, SolverError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, num_shards
from autopar.ir.text import format_bytes, format_seconds
from autopar.lower.planned_step import PlannedStep
from autopar.measure.segments.analyse import PreparedStep
from autopar.measure.segments.boundaries import SegmentBoundary, crossings
from autopar.measure.segments.cut import CutStep
from autopar.measure.segments.files import Analysis, MeshSpace, ReshardTime, SegmentProfile
from autopar.measure.segments.profile import ONE_ARRAY, segment_layouts
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.kbest import Solution as Ranked
from autopar.sharding.kbest import k_best, sharding_of
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.plan_mesh import ShardingTask, plan_mesh, planned_as
from autopar.sharding.problem import FoldedGraph, problem_on_mesh
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem
from autopar.sharding.solve import GraphSharding

_SMALLEST_S = 1e-9  # a lower bound of every time
_PRICES = 16  # tries to meet a budget


@dataclass(frozen=True)
class FoundCombination:
    """A combination per part on one mesh, by index within its segment.

    step_s:     of the whole step: segments, reshardings between them, and one dispatch.
    reshard_s:  the reshardings in it.
    symbolic_s: predicted by the cost model.
    """

    mesh: tuple[int, ...]
    choice: tuple[int, ...]
    step_s: float
    reshard_s: float
    symbolic_s: float = 0.0
    peak_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class SearchResult:
    """planned:    the best.
    others:     the best on other meshes, and the best in which all occurrences of a segment take
                one combination; cheapest first.
    candidates: plans of the best, of some others, and of the cost model.
    """

    best: FoundCombination
    planned: PlannedStep
    others: tuple[FoundCombination, ...]
    num_choices: float
    candidates: tuple[PlannedStep, ...] = ()


def search(
    step: PreparedStep,
    analysis: Analysis,
    profile: SegmentProfile,
    *,
    runners_up: int = 5,
    num_candidates: int = 0,
) -> SearchResult:
    tables = [_CostTable(step, space, profile) for space in analysis.meshes]
    best_of_meshes: list[tuple[FoundCombination, GraphSharding, _CostTable]] = []
    misses: list[MemoryBudgetError] = []
    for table in tables:
        try:
            best_of_meshes.append((*_fitting(step, table), table))
        except MemoryBudgetError as error:
            misses.append(error)
    if not best_of_meshes:
        raise min(misses, key=lambda error: error.peak_bytes)
    best_of_meshes.sort(key=lambda entry: entry[0].step_s)
    best, sharding, table = best_of_meshes[0]
    uniform = [combination for t in tables for combination in t.uniform(runners_up + 1)]
    known = {(best.mesh, best.choice)}
    others = []
    rest = [*(c for c, _, _ in best_of_meshes[1:]), *uniform]
    for combination in sorted(rest, key=lambda c: c.step_s):
        if (combination.mesh, combination.choice) not in known:
            known.add((combination.mesh, combination.choice))
            others.append(combination)
    planned = _planned(step, best, sharding, table.mesh)
    candidates = []
    if num_candidates:
        by_shape = {t.mesh.shape: t for t in tables}
        candidates = [planned]
        for combination in others[: num_candidates - 1]:
            mesh_table = by_shape[combination.mesh]
            candidates.append(
                _planned(
                    step,
                    *_completed(step, mesh_table, dict(enumerate(combination.choice))),
                    mesh_table.mesh,
                )
            )
        method = replace(step.method, mesh_shape=table.mesh.shape)
        candidates.append(plan_mesh(ShardingTask(step.traced, step.cluster, method)))
    num_choices = sum(float(np.prod([float(len(c)) for c in t.costs.values()])) for t in tables)
    return SearchResult(best, planned, tuple(others[:runners_up]), num_choices, tuple(candidates))


class _CostTable:
    """The measured costs on one mesh."""

    def __init__(self, step: PreparedStep, space: MeshSpace, profile: SegmentProfile) -> None:
        self.step, self.space = step, space
        self.cut: CutStep = step.cut
        self.mesh = step.mesh(space.shape)
        self.layouts = [segment_layouts(step, self.mesh, segment) for segment in space.segments]
        self.segment_of = {p: n for n, segment in enumerate(space.segments) for p in segment.parts}
        shape = self.mesh.shape
        dispatch = {s.segment: s.time.seconds for s in profile.dispatches if s.mesh == shape}
        self.call_s = max(dispatch.values(), default=0.0)
        one_array_s = dispatch.get(ONE_ARRAY, 0.0)
        self.moved = {
            (s.shape, s.dtype, s.source, s.target): max(
                s.time.seconds - one_array_s, _modelled_s(self.mesh, s)
            )
            for s in profile.reshards
            if s.mesh == shape
        }
        taken = {(s.segment, s.combination): s for s in profile.combinations if s.mesh == shape}
        self.times: list[np.ndarray] = []
        self.bytes: list[np.ndarray] = []
        for segment in space.segments:
            samples = [taken.get((segment.key, c.digest)) for c in segment.combinations]
            missing = sum(sample is None for sample in samples)
            if missing:
                raise ProfileError(
                    f"profile.json: {missing} of {len(samples)} combinations of {segment.name} on "
                    f"{shape} were not timed. Complete the profile pass."
                )
            known = [sample for sample in samples if sample is not None]
            self.times.append(
                np.array(
                    [
                        FORBIDDEN
                        if s.time is None
                        else max(s.time.seconds - dispatch.get(segment.key, 0.0), _SMALLEST_S)
                        for s in known
                    ]
                )
            )
            self.bytes.append(np.array([s.memory_bytes for s in known]))
        self.costs = {p: self.times[n] for p, n in sorted(self.segment_of.items())}
        self.crossings = list(crossings(self.cut, space, self.layouts))

    def problem(self, prices: Mapping[int, float] | None = None) -> PairwiseProblem:
        """`prices`: time in the step's program -> price of a byte held at that time."""
        costs = dict(self.costs)
        for at, price in (prices or {}).items():
            for part, held in self.held(at).items():
                costs[part] = costs[part] + price * held
        problem = PairwiseProblem(costs)
        for crossing in self.crossings:
            problem.add_edge(crossing.source, crossing.target, self.matrix(crossing))
        return problem

    def held(self, at: int) -> dict[int, np.ndarray]:
        """The bytes in memory at a time, per part and combination."""
        graph = self.step.graph
        place = {
            whole: (p, n) for p, x in enumerate(self.cut.parts) for n, whole in enumerate(x.nodes)
        }
        held = {p: np.zeros(len(costs)) for p, costs in self.costs.items()}
        for life in graph.liveness.lives:
            if not life.start <= at <= life.end:
                continue
            node, result = graph.producer[life.value]
            part, local = place[node]
            size = graph.values[life.value].num_bytes * life.count
            for number, layouts in enumerate(self.layouts[self.segment_of[part]]):
                held[part][number] += size / num_shards(layouts[local][1][result], self.mesh.shape)
        return held

    def matrix(self, crossing: SegmentBoundary) -> np.ndarray:
        return np.array(
            [
                [self.reshard_s(crossing, made, wanted) for wanted in crossing.wanted]
                for made in crossing.made
            ]
        )

    def reshard_s(self, crossing: SegmentBoundary, made: Layout, wanted: Layout) -> float:
        if made == wanted:
            return 0.0
        key = (crossing.shape, crossing.dtype, made, wanted)
        if key not in self.moved:
            raise ProfileError(
                f"profile.json: {crossing.dtype}{list(crossing.shape)} from {made} to {wanted} was "
                "not timed. Complete the profile pass."
            )
        return self.moved[key]

    def combination_of(self, choice: Mapping[int, int]) -> FoundCombination:
        inside = sum(float(self.costs[p][c]) for p, c in choice.items())
        between = sum(
            self.reshard_s(c, c.made[choice[c.source]], c.wanted[choice[c.target]])
            for c in self.crossings
        )
        return FoundCombination(
            self.mesh.shape,
            tuple(choice[p] for p in sorted(choice)),
            inside + between + self.call_s,
            between,
        )

    def uniform(self, num: int) -> Iterator[FoundCombination]:
        """The best choices in which all occurrences of a segment take one combination."""
        costs = {n: self.times[n] * len(s.parts) for n, s in enumerate(self.space.segments)}
        problem = PairwiseProblem(costs)
        for crossing in self.crossings:
            ends = self.segment_of[crossing.source], self.segment_of[crossing.target]
            problem.add_edge(*ends, self.matrix(crossing))
        labels = {n: list(range(len(row))) for n, row in costs.items()}
        ranked: list[Ranked] = k_best(problem, labels, num)
        for solution in ranked:
            yield self.combination_of({p: solution.choice[n] for p, n in self.segment_of.items()})


def _modelled_s(mesh: LogicalMesh, move: ReshardTime) -> float:
    """The cost model's time of a resharding: a lower bound, since a measurement as short as a
    dispatch is lost in noise."""
    num_bytes = float(prod(move.shape) * np.dtype(move.dtype).itemsize)
    table = reshard_table(mesh, move.shape, num_bytes, False)
    return table.cost(move.source, move.target)


def solve(problem: PairwiseProblem) -> dict[int, int]:
    """The cheapest choice, exactly."""
    reduction = reduce_problem(problem.copy())
    return reduction.restore(solve_ilp(reduction.problem).choice)


def _fitting(step: PreparedStep, table: _CostTable) -> tuple[FoundCombination, GraphSharding]:
    """The best choice within the memory budget: the optimum, or the best found at some price of
    the bytes held at the peaks."""
    budget = step.origin(table.mesh).budget
    try:
        combination, sharding = _completed(step, table, solve(table.problem()))
    except SolverError as error:
        raise MemoryBudgetError(
            f"{step.traced.name}: a segment ran out of memory in every combination on the mesh "
            f"{table.mesh.shape}. Use a smaller batch, more devices or a larger --top.",
            float(max(sizes.max() for sizes in table.bytes)),
            budget or 0.0,
        ) from error
    if budget is None or combination.peak_bytes <= budget:
        return combination, sharding
    best: tuple[FoundCombination, GraphSharding] | None = None
    smallest, times = combination.peak_bytes, [sharding.memory.peak_time]
    low, high, price = 0.0, None, combination.step_s / combination.peak_bytes
    for _ in range(_PRICES):
        prices = dict.fromkeys(times, price / len(times))
        tried = _completed(step, table, solve(table.problem(prices)))
        peak, at = tried[0].peak_bytes, tried[1].memory.peak_time
        smallest = min(smallest, peak)
        if peak <= budget:
            high = price
            if best is None or tried[0].step_s < best[0].step_s:
                best = tried
        elif at not in times:
            times.append(at)
        else:
            low = price
        price = price * 4 if high is None else (low + high) / 2
    if best is None:
        raise MemoryBudgetError(
            f"{step.traced.name}: the smallest of the timed combinations on the mesh "
            f"{table.mesh.shape} needs {format_bytes(smallest)} per device; the budget is "
            f"{format_bytes(budget)}. Use a larger --top, a smaller batch or more devices.",
            smallest,
            budget,
        )
    return best


def _completed(
    step: PreparedStep, table: _CostTable, choice: Mapping[int, int]
) -> tuple[FoundCombination, GraphSharding]:
    """The choice with the cost model's prediction, and its sharding of the whole graph."""
    graph = step.graph
    factors: list[tuple[int, ...]] = [()] * len(graph.nodes)
    for number, part in enumerate(step.cut.parts):
        segment = table.space.segments[table.segment_of[number]]
        segment_factors = segment.combinations[choice[number]].factors
        for node, whole in enumerate(part.nodes):
            if whole >= 0:
                factors[whole] = segment_factors[node]
    classes = _split_classes(fold_graph(graph).classes, factors)
    problem = problem_on_mesh(FoldedGraph(graph, classes), table.mesh, {})
    chosen = {
        owner: next(
            i
            for i, strategy in enumerate(problem.strategies[owner])
            if strategy.factors == factors[node]
        )
        for owner, node in problem.representative.items()
    }
    objective = problem.pairwise.objective(chosen)
    sharding = sharding_of(problem, Ranked(chosen, objective, {}))
    combination = replace(
        table.combination_of(choice), symbolic_s=objective, peak_bytes=sharding.memory.peak_bytes
    )
    return combination, sharding


def _split_classes(classes: Sequence[int], factors: Sequence[tuple[int, ...]]) -> list[int]:
    """Classes split so that members have the same factors."""
    numbers: dict[tuple, int] = {}
    pairs = zip(classes, factors, strict=True)
    return [numbers.setdefault(pair, len(numbers)) for pair in pairs]


def _planned(
    step: PreparedStep, best: FoundCombination, sharding: GraphSharding, mesh: LogicalMesh
) -> PlannedStep:
    planned = planned_as(step.origin(mesh), sharding)
    plan = planned.plan
    layouts = {t.path: t.layout for t in (*plan.inputs, *plan.named)}
    symbolic = format_seconds(plan.estimated_step_s)
    note = (
        f"the step of {format_seconds(best.step_s)} was found from measured times of "
        f"{len(step.cut.segments)} segments on this mesh; the cost model says {symbolic}, and "
        "times of modules and operators are its own"
    )
    plan = replace(
        plan,
        estimated_step_s=best.step_s,
        stages=(replace(plan.stages[0], cost=best.step_s),),
        solver=replace(plan.solver, objective=best.step_s, lower_bound=best.step_s, gap=0.0),
        warnings=(*plan.warnings, note),
        origin=replace(plan.origin, choice=None, layouts=layouts),
    )
    return replace(planned, plan=plan)

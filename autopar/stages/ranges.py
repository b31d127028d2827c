"""Costs of every range of layers under every variant: from `LayerTable`s to `Ranges`.

Arrays are indexed [variant, first layer, end]; ranges are half-open, and entries that are no range
cost infinitely much. A stage of the range [k, e) under a variant costs

    c = latency + transfer + launch · stage programs + once / n        seconds per micro-batch,

with n micro-batches. A stage runs two stage programs for each, forward and backward; a third for
the gradients of weights if the schedule separates them; or forward alone. Its peak is

    held + in flight · f + the largest working set of a layer  bytes per device,

with f micro-batches in flight there.

*transfer* is what the stage waits for: the activations that enter at cut k and the gradients that
come back at cut e. All bytes of a cut cross once, over as many links as the stage's submesh has
devices (its neighbour is assumed to be as large), between hosts if the cluster has several. So it
depends only on the stage itself, and the search over stages stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

import numpy as np

from autopar.cost.pipeline_links import boundary_s
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import LayerTable, StageChoice, Submesh

MemoryBudget = float | Callable[[Submesh], float]


@dataclass(frozen=True, eq=False)
class Setting:
    """What decides the cost of a stage besides the tables.

    boundary_bytes: bytes of a micro-batch that cross each cut between layers forward; a backward
                    pass sends as many back.
    memory_budget:  bytes that a device may hold, for all submeshes or by submesh.
    launch_s:       time to start one stage program.
    """

    cluster: ClusterSpec
    boundary_bytes: np.ndarray
    num_micro_batches: int
    schedule: str = "1f1b"
    memory_budget: MemoryBudget = inf
    launch_s: float = 0.0
    has_backward: bool = True

    @property
    def launches_s(self) -> float:
        """The time to start all stage programs of a stage for one micro-batch."""
        if not self.has_backward:
            return self.launch_s
        return self.launch_s * (3 if self.schedule == "zero_bubble" else 2)

    def budget_bytes(self, submesh: Submesh) -> float:
        budget = self.memory_budget
        return budget(submesh) if callable(budget) else budget


class _Candidates(NamedTuple):
    """Ranges under variants, the cheapest last. `place`: in a flat array of the shape [submesh,
    first layer, end]."""

    shape: tuple[int, ...]
    place: np.ndarray
    cost_s: np.ndarray
    fixed_bytes: np.ndarray
    in_flight_bytes: np.ndarray
    budget_bytes: np.ndarray


class Ranges:
    """Costs and peaks of all ranges of layers under the tables."""

    def __init__(self, tables: Sequence[LayerTable], setting: Setting) -> None:
        self.tables = tuple(tables)
        self.setting = setting
        self.num_layers = len(tables[0].latency_s)
        assert all(len(table.latency_s) == self.num_layers for table in tables)
        assert len(setting.boundary_bytes) == self.num_layers - 1
        self.submeshes = tuple(sorted({t.submesh for t in tables}, key=lambda s: (prod(s), s)))
        self.sizes = tuple(map(prod, self.submeshes))
        self.submesh_of = np.array([self.submeshes.index(t.submesh) for t in tables])
        self._transfer_s = np.stack([self._transfers(submesh) for submesh in self.submeshes])
        self.latency_s = _sums([t.latency_s for t in tables])
        self.once_s = _sums([t.once_s for t in tables])
        self._fixed_bytes = _sums([t.held_bytes for t in tables])
        self._fixed_bytes += _largest([t.working_bytes for t in tables])
        self._in_flight_bytes = _sums([t.in_flight_bytes for t in tables])
        self.allowed = np.ones(len(tables), bool)
        self.most_s = inf

    def only(self, allowed: np.ndarray) -> Ranges:
        """The same ranges with the allowed variants only."""
        restricted = self._copy()
        restricted.allowed = self.allowed & allowed
        return restricted

    def below(self, most_s: float) -> Ranges:
        """The same ranges without those that cost more."""
        restricted = self._copy()
        restricted.most_s = min(self.most_s, most_s)
        return restricted

    def _copy(self) -> Ranges:
        copied = copy(self)
        for derived in ("cost_s", "_candidates"):
            copied.__dict__.pop(derived, None)
        return copied

    @cached_property
    def cost_s(self) -> np.ndarray:
        """The cost c of every range under every variant, whether it fits or not; infinite where
        that is more than is of interest."""
        setting = self.setting
        cost = self.latency_s + self.once_s / setting.num_micro_batches + setting.launches_s
        cost += self._transfer_s[self.submesh_of]
        first, end = np.indices(cost.shape[1:])
        is_candidate = (first < end) & self.allowed[:, None, None] & (cost <= self.most_s)
        return np.where(is_candidate, cost, inf)

    @cached_property
    def _budget_bytes(self) -> np.ndarray:
        return np.array([self.setting.budget_bytes(t.submesh) for t in self.tables])

    def fits(self, in_flight: int) -> np.ndarray:
        """Whether each range fits under each variant with so many micro-batches in flight."""
        peak = self._fixed_bytes + in_flight * self._in_flight_bytes
        return peak <= self._budget_bytes[:, None, None]

    @cached_property
    def _candidates(self) -> _Candidates:
        """Of all ranges and variants, those that may fit. Searches ask for `best_s` at many numbers
        of micro-batches in flight, and most do not fit at any."""
        may_fit = np.isfinite(self.cost_s) & self.fits(0)
        table, first, end = np.nonzero(may_fit)
        order = np.argsort(-self.cost_s[may_fit], kind="stable")
        table, first, end = table[order], first[order], end[order]
        shape = (len(self.sizes), *may_fit.shape[1:])
        return _Candidates(
            shape,
            np.ravel_multi_index((self.submesh_of[table], first, end), shape),
            self.cost_s[table, first, end],
            self._fixed_bytes[table, first, end],
            self._in_flight_bytes[table, first, end],
            self._budget_bytes[table],
        )

    def best_s(self, in_flight: int) -> np.ndarray:
        """[submesh, first layer, end]: the cost under the best variant that fits."""
        found = self._candidates
        fits = found.fixed_bytes + in_flight * found.in_flight_bytes <= found.budget_bytes
        best = np.full(found.shape, inf)
        best.ravel()[found.place[fits]] = found.cost_s[fits]  # of one place, the last counts
        return best

    def choose(self, first: int, end: int, submesh: int, in_flight: int) -> StageChoice | None:
        """The best variant that fits, as a stage; None if none does."""
        cost, chosen = inf, -1
        for table in map(int, np.flatnonzero(self.submesh_of == submesh)):
            table_cost = float(self.cost_s[table, first, end])
            peak = self.peak_bytes(table, first, end, in_flight)
            if table_cost < cost and peak <= self._budget_bytes[table]:
                cost, chosen = table_cost, table
        return None if chosen < 0 else self.stage(chosen, first, end, in_flight)

    def peak_bytes(self, table: int, first: int, end: int, in_flight: int) -> float:
        at = (table, first, end)
        return float(self._fixed_bytes[at] + in_flight * self._in_flight_bytes[at])

    def missing_bytes(self, first: int, end: int, in_flight: int) -> float:
        """The bytes by which a range exceeds the budget, under the variant with the smallest
        excess."""
        tables = range(len(self.tables))
        peaks = np.array([self.peak_bytes(table, first, end, in_flight) for table in tables])
        return float((peaks - self._budget_bytes)[self.allowed].min())

    def stage(self, table: int, first: int, end: int, in_flight: int) -> StageChoice:
        at, variant = (table, first, end), self.tables[table]
        return StageChoice(
            layers=(first, end),
            submesh=variant.submesh,
            mesh_shape=variant.mesh_shape,
            remat=variant.remat,
            table=table,
            latency_s=float(self.latency_s[at]),
            once_s=float(self.once_s[at]),
            peak_bytes=self.peak_bytes(*at, in_flight),
            transfer_s=float(self._transfer_s[self.submesh_of[table], first, end]),
        )

    def _transfers(self, submesh: Submesh) -> np.ndarray:
        cluster, size = self.setting.cluster, prod(submesh)
        one_host = cluster.num_hosts == 1
        crossing = [0.0, *map(float, self.setting.boundary_bytes), 0.0]
        cuts = np.array([boundary_s(b, size, size, one_host, cluster) for b in crossing])
        return cuts[:-1, None] + (cuts if self.setting.has_backward else 0 * cuts)


def stage_cost_s(stage: StageChoice, setting: Setting) -> float:
    """The cost c of a chosen stage."""
    once = stage.once_s / setting.num_micro_batches
    return stage.latency_s + once + setting.launches_s + stage.transfer_s


def step_s(stages: Sequence[StageChoice], setting: Setting) -> float:
    """The time of a step: all stages once, and the slowest again for every further micro-batch."""
    costs = [stage_cost_s(stage, setting) for stage in stages]
    return sum(costs) + (setting.num_micro_batches - 1) * max(costs)


def _sums(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[row, first, end]: sums over ranges. Each first entry starts a new sum, so that equal layers
    have equal sums."""
    return _accumulated(np.add, rows)


def _largest(rows: Sequence[np.ndarray]) -> np.ndarray:
    return _accumulated(np.maximum, rows)


def _accumulated(combine: np.ufunc, rows: Sequence[np.ndarray]) -> np.ndarray:
    """[row, first, end]: the entries of a range combined from its first on; 0 where none is."""
    entries = np.asarray(rows, dtype=float)
    num_entries = entries.shape[1]
    found = np.zeros((len(entries), num_entries, num_entries + 1))
    for first in range(num_entries):
        combine.accumulate(entries[:, first:], axis=1, out=found[:, first, first + 1 :])
    return found

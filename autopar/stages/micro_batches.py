"""The number of micro-batches: from `LayerTable`s made at one number to a `MicroBatchChoice`.

More micro-batches fill a pipeline better and need less memory, but each has to start its stage
programs and has smaller products. Here the costs of a micro-batch are proportional to its rows,
except for a constant time to start a stage program and a minimum time to read weights and sums of
gradients. So one set of tables ranks all numbers roughly; the compiler then traces the step with
the number chosen and searches again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.cost.pipeline_links import boundary_s
from autopar.ir.stages import LayerTable, PipelineChoice, Submesh
from autopar.sharding.deadline import Deadline
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages

MAX_CANDIDATES = 64
GAP = 1e-3  # enough for a ranking


class MicroBatchChoice(NamedTuple):
    """The best number, its pipeline by the scaled tables, and the step time of every number
    compared; infinite for infeasible ones and for those proven worse."""

    num_micro_batches: int
    choice: PipelineChoice
    steps_s: dict[int, float]


def candidate_micro_batches(batch_size: int, *, min_rows: int = 1) -> tuple[int, ...]:
    """Numbers of micro-batches with equally many rows, at least `min_rows` each. Of more than
    `MAX_CANDIDATES`, those with the smallest odd factors."""
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    divisors = [n for n in divisors if batch_size // n >= min_rows] or [1]
    return tuple(sorted(sorted(divisors, key=lambda n: (n // (n & -n), n))[:MAX_CANDIDATES]))


def choose_micro_batches(
    tables: Sequence[LayerTable],
    setting: Setting,
    candidates: Sequence[int],
    *,
    num_stages: int | None = None,
    submeshes: Collection[Submesh] | None = None,
    cutoff_s: float = inf,
    deadline: Deadline | None = None,
) -> MicroBatchChoice | None:
    """The best of the candidates, the smallest of equally good ones; None if no pipeline fits with
    any of them, or takes less than `cutoff_s`. `setting` has the number that the tables were made
    at. When the deadline is over, the best so far will do; the nearest numbers come first."""
    deadline = deadline or Deadline()
    best: PipelineChoice | None = None
    steps_s: dict[int, float] = {}
    for number in sorted(candidates, key=lambda n: (abs(n - setting.num_micro_batches), n)):
        if steps_s and not deadline.allows():
            deadline.cut("other numbers of micro-batches")
            break
        below_s = cutoff_s if best is None else min(cutoff_s, best.step_s * (1 + GAP))
        choice, _ = search_stages(
            scaled_tables(tables, setting, number),
            scaled_setting(setting, number),
            num_stages=num_stages,
            top=1,
            gap=GAP,
            cutoff_s=below_s,
            submeshes=submeshes,
            deadline=deadline,
        )
        steps_s[number] = inf if choice is None else choice.step_s
        if choice is not None and (best is None or _is_better(choice, best)):
            best = choice
    if best is None:
        return None
    return MicroBatchChoice(best.num_micro_batches, best, dict(sorted(steps_s.items())))


def least_step_s(best: PipelineChoice | None, setting: Setting, number: int) -> float:
    """What every pipeline with this number of micro-batches takes at least by scaled tables, if it
    is below the setting's, with which `best` is the best, or nothing fits.

    Let the setting's number be N and c the cost of a stage. With n < N a stage computes and sends
    as much in a step, and waits longer for the others: n · c' ≥ N · c − (N − n) · a and c' ≥ c,
    where a is what a micro-batch costs whatever its rows are. So the step takes no less than with
    N, but for (N − n) · a. And it takes no less memory: n of n are N of N, and s of n are more."""
    if best is None:
        return inf
    cluster = setting.cluster
    transfer_s = boundary_s(1.0, 1, 1, cluster.num_hosts == 1, cluster)
    each_s = setting.launches_s + (2 if setting.has_backward else 1) * transfer_s
    return best.step_s - (setting.num_micro_batches - number) * each_s


def scaled_tables(tables: Sequence[LayerTable], setting: Setting, number: int) -> list[LayerTable]:
    """Tables for another number of micro-batches than the setting's."""
    scale = setting.num_micro_batches / number
    return [_scaled(table, scale, setting.cluster.spec.memory_bandwidth) for table in tables]


def scaled_setting(setting: Setting, number: int) -> Setting:
    scale = setting.num_micro_batches / number
    return replace(setting, num_micro_batches=number, boundary_bytes=setting.boundary_bytes * scale)


def _is_better(choice: PipelineChoice, best: PipelineChoice) -> bool:
    if choice.num_micro_batches < best.num_micro_batches:
        return choice.step_s <= best.step_s * (1 + GAP)
    return choice.step_s < best.step_s * (1 - GAP)


def _scaled(table: LayerTable, scale: float, memory_bandwidth: float) -> LayerTable:
    """A table for micro-batches `scale` times as large. Weights, read in both passes, and sums of
    gradients, read and written, are a quarter of the held bytes each; so all held bytes move
    once."""
    min_s = table.held_bytes / memory_bandwidth if scale < 1 else 0.0
    return replace(
        table,
        latency_s=np.maximum(table.latency_s * scale, np.minimum(table.latency_s, min_s)),
        forward_s=table.forward_s * scale,
        in_flight_bytes=table.in_flight_bytes * scale,
        working_bytes=table.working_bytes * scale,
    )

"""The number of micro-batches: which one the stage search should be done for.

From tables made at one number of micro-batches to a number and its pipeline. More micro-batches
fill a pipeline better and need less memory; each costs the start of its stage programs, and has
smaller products. Here the figures of a micro-batch are taken to be in proportion to its rows, but
for the time to start a stage program and that to read weights and sums of gradients, which no
micro-batch goes below. So one set of tables ranks all numbers, roughly: the compiler traces the
step anew for the number found and searches again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.ir.stages import LayerTable, PipelineChoice, Submesh
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages

MOST_CANDIDATES = 64
GAP = 1e-3  # a ranking needs no better


class MicroBatchChoice(NamedTuple):
    """The best number, its pipeline as the scaled tables have it, and the time of a step for every
    number that was compared; infinite for those that fit not or were seen to be worse."""

    num_micro_batches: int
    choice: PipelineChoice
    steps_s: dict[int, float]


def candidate_micro_batches(batch_size: int, *, least_rows: int = 1) -> tuple[int, ...]:
    """Numbers of micro-batches with equally many rows, at least so many each. If there are more
    than 64, those with the smallest odd factors are kept."""
    found = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    found = [n for n in found if batch_size // n >= least_rows] or [1]
    kept = sorted(found, key=lambda n: (n // (n & -n), n))[:MOST_CANDIDATES]
    return tuple(sorted(kept))


def choose_micro_batches(
    tables: Sequence[LayerTable],
    setting: Setting,
    candidates: Sequence[int],
    *,
    num_stages: int | None = None,
    submeshes: Collection[Submesh] | None = None,
) -> MicroBatchChoice | None:
    """The best of the candidates; `setting` has the number that the tables were made at. None if no
    pipeline fits with any of them. Of numbers that are equally good, the smallest."""
    best: PipelineChoice | None = None
    steps_s: dict[int, float] = {}
    for number in sorted(candidates, key=lambda n: (abs(n - setting.num_micro_batches), n)):
        scale = setting.num_micro_batches / number
        cutoff_s = inf if best is None else best.step_s * (1 + GAP)
        choice, _ = search_stages(
            [_scaled(table, scale, setting.cluster.spec.memory_bandwidth) for table in tables],
            replace(
                setting,
                num_micro_batches=number,
                boundary_bytes=setting.boundary_bytes * scale,
            ),
            num_stages=num_stages,
            top=1,
            gap=GAP,
            cutoff_s=cutoff_s,
            submeshes=submeshes,
        )
        steps_s[number] = inf if choice is None else choice.step_s
        if choice is not None and (best is None or _is_better(choice, best)):
            best = choice
    if best is None:
        return None
    return MicroBatchChoice(best.num_micro_batches, best, dict(sorted(steps_s.items())))


def _is_better(choice: PipelineChoice, best: PipelineChoice) -> bool:
    if choice.num_micro_batches < best.num_micro_batches:
        return choice.step_s <= best.step_s * (1 + GAP)
    return choice.step_s < best.step_s * (1 - GAP)


def _scaled(table: LayerTable, scale: float, memory_bandwidth: float) -> LayerTable:
    """A table for micro-batches `scale` times as large. Of what is held, a quarter each is weights,
    read in both passes, and sums of gradients, read and written; so all of it moves once."""
    least_s = table.held_bytes / memory_bandwidth if scale < 1 else 0.0
    return replace(
        table,
        latency_s=np.maximum(table.latency_s * scale, np.minimum(table.latency_s, least_s)),
        forward_s=table.forward_s * scale,
        in_flight_bytes=table.in_flight_bytes * scale,
        working_bytes=table.working_bytes * scale,
    )

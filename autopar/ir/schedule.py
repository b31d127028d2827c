"""Schedules as data: which mesh runs which phase of which stage and micro-batch, clock by clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.pipeline import Phase

SCHEDULES = ("gpipe", "1f1b", "1f1b_eager", "interleaved_1f1b", "zero_bubble", "inference")


class Task(NamedTuple):
    phase: Phase
    stage: int
    micro_batch: int | None  # None for the update


@dataclass(frozen=True)
class Schedule:
    """A table of clocks × meshes; None where a mesh waits. A task depends only on earlier clocks.
    The last clocks are updates, as many as a mesh has stages, except in inference. `eager`: a stage
    receives data as soon as it is sent, ahead of its use, so that transfers overlap with the work
    on other micro-batches."""

    name: str
    num_micro_batches: int
    stage_mesh: tuple[int, ...]
    clocks: tuple[tuple[Task | None, ...], ...]
    eager: bool = False

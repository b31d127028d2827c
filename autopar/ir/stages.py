"""What the stage search reads and gives: layers' figures per submesh, and the stages chosen.

A *variant* is one way to run layers: on a submesh, arranged as a logical mesh, sharded at some
price of memory, with or without recomputation. Its figures are per layer, and those of a range of
layers are their sums (of `working_bytes`, the largest), so that every range on every submesh is
priced by a few tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Submesh = tuple[int, int]  # hosts, devices per host


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Figures of every layer under one variant; arrays are indexed by layer, bytes are per device.

    latency_s:       forward and backward pass of one micro-batch.
    forward_s:       the forward pass' share of it.
    once_s:          what is done once per step: update, reduction of gradients.
    held_bytes:      held all the time: parameters, optimizer state, sums of gradients.
    in_flight_bytes: kept of each micro-batch between its forward and backward pass.
    working_bytes:   held besides while the layer itself is run.
    """

    submesh: Submesh
    mesh_shape: tuple[int, ...]
    latency_s: np.ndarray
    forward_s: np.ndarray
    once_s: np.ndarray
    held_bytes: np.ndarray
    in_flight_bytes: np.ndarray
    working_bytes: np.ndarray
    remat: bool = False
    price_per_byte: float = 0.0


@dataclass(frozen=True)
class StageChoice:
    """A stage as the search chose it. Layers are a half-open range; `table` is the variant's
    number among the tables."""

    layers: tuple[int, int]
    submesh: Submesh
    mesh_shape: tuple[int, ...]
    remat: bool
    table: int
    latency_s: float
    once_s: float
    peak_bytes: float
    transfer_s: float  # what it waits for to come from the stages before and after, per micro-batch


@dataclass(frozen=True)
class PipelineChoice:
    stages: tuple[StageChoice, ...]
    num_micro_batches: int
    step_s: float


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was compiled, and run if there were devices, to be ranked
    (`ShardingOptions(rerank=…)`).

    what:         the plan in a few words.
    measured_s:   of a step with made-up inputs; None if it did not run.
    memory_bytes: XLA's figure of the peak on one device; 0 if not known.
    failure:      why it did not run, or does not fit.
    is_known:     it was timed earlier, and not again.
    compiled_s:   if it was only compiled: predicted, with the communication that XLA made of it.
    """

    what: str
    predicted_s: float
    measured_s: float | None
    spread: float
    predicted_bytes: float
    memory_bytes: float
    failure: str = ""
    is_known: bool = False
    is_chosen: bool = False
    compiled_s: float | None = None


@dataclass(frozen=True)
class SearchReport:
    """What a stage search considered: `plan.search`."""

    num_layers: int
    num_candidates: int  # (range of layers, variant) pairs that were priced
    num_pruned: int  # of them or of bounds on the slowest stage, those never looked at
    num_bounds: int  # values of the slowest stage's time that were tried
    seconds: dict[str, float] = field(default_factory=dict)
    best: tuple[PipelineChoice, ...] = ()  # the best few by the tables, the best first
    checked: tuple[tuple[float, float], ...] = ()  # step by tables and as solved, of those solved
    intra_only_s: float | None = None  # predicted step time without a pipeline; None if none fits
    notes: tuple[str, ...] = ()
    tried: tuple[TriedPlan, ...] = ()  # those that were run, the best predicted first

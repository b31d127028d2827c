"""Input and output of the stage search: costs of layers per submesh, and the chosen stages.

A *variant* is one way to run layers: on a submesh, arranged as a logical mesh, sharded at some
price of memory, with or without recomputation. Its costs are per layer; those of a range of layers
are their sums (of `working_bytes`, the maximum), so that a few tables price every range on every
submesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Submesh = tuple[int, int]  # hosts, devices per host


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Costs of every layer under one variant; arrays are indexed by layer, bytes are per device.

    latency_s:       forward and backward pass of one micro-batch.
    forward_s:       the forward pass' share of it.
    once_s:          work done once per step: update, reduction of gradients.
    held_bytes:      held all the time: parameters, optimizer state, sums of gradients.
    in_flight_bytes: kept per micro-batch between its forward and backward pass.
    working_bytes:   held additionally while the layer runs.
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
    transfer_s: float  # waiting for transfers from neighbouring stages, per micro-batch


@dataclass(frozen=True)
class PipelineChoice:
    stages: tuple[StageChoice, ...]
    num_micro_batches: int
    step_s: float


@dataclass(frozen=True)
class TriedPlan:
    """A plan that reranking (`ShardingOptions(rerank=…)`) compiled, and ran if there were devices.

    what:         a summary of the plan.
    measured_s:   of a step with made-up inputs; None if it did not run.
    memory_bytes: XLA's peak on one device; 0 if unknown.
    failure:      why it did not run, or does not fit.
    is_known:     its time comes from the database.
    compiled_s:   of a plan that was only compiled: its step as the compiled program shows it.
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
    """The candidates and results of a stage search: `plan.search`."""

    num_layers: int
    num_candidates: int  # (range of layers, variant) pairs that were priced
    num_pruned: int  # pairs, and bounds on the slowest stage, that were skipped
    num_bounds: int  # bounds on the slowest stage's time that were tried
    seconds: dict[str, float] = field(default_factory=dict)
    best: tuple[PipelineChoice, ...] = ()  # the best few by the tables, the best first
    checked: tuple[tuple[float, float], ...] = ()  # of those solved: step by tables, and as solved
    intra_only_s: float | None = None  # predicted step without a pipeline; None if none fits
    notes: tuple[str, ...] = ()
    tried: tuple[TriedPlan, ...] = ()  # by reranking, the best predicted first

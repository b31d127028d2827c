"""How far XLA merges collectives: from the moves of a plan to options of XLA's compiler.

XLA merges collectives of one kind that wait for nothing of each other until the merged result has
30 MiB. The result of a reduce-scatter is one device's shard, so on n devices it merges n times as
much: mostly all gradients of a step, which are then summed at its end, where no compute is left to
hide it. The first weights are waited for until as many others are gathered with them.

Moved in chunks of c bytes, all but the last chunk of the gradients can run under the backward pass,
and all but the first of the weights under the forward pass. Of G bytes, at a latency α per chunk
and β per byte, what is exposed is

    β · c + α · G / c        at most, the least at c = √(α · G / β).

All-reduces keep XLA's size: their results are whole gradients, and the last 30 MiB of a backward
pass are soon summed.

XLA knows one size for each kind of collective, so the axes over which most bytes are moved decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import log2, prod, sqrt

from autopar.cost.collectives import all_gather_s, reduce_scatter_s
from autopar.cost.report import Move
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh

OPTION = {
    "all-gather": "xla_gpu_all_gather_combine_threshold_bytes",
    "reduce-scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
}
_COST: dict[str, Callable[..., float]] = {
    "all-gather": all_gather_s,
    "reduce-scatter": reduce_scatter_s,
}
_SMALLEST, _LARGEST = 2**20, 2**25  # bytes of a chunk; XLA's own have 30 MiB

Collectives = dict[tuple[str, tuple[int, ...]], list[float]]  # (kind, axes) -> bytes of each


def merge_options(graph: Graph, mesh: LogicalMesh, moved: Iterable[Move]) -> dict[str, int]:
    """The sizes up to which XLA should merge the step's collectives of weights and gradients. None
    are given where XLA's own will do: on CPUs, for what fits one chunk, and where most are moved in
    loops, beside which nothing is hidden."""
    if mesh.device is None or not mesh.device.hides_collectives or mesh.num_devices == 1:
        return {}
    found: Collectives = defaultdict(list)
    in_loops_s = outside_s = 0.0
    for move in moved:
        if not graph.values[move.value].deferred or move.to_state:
            continue
        if move.weight != 1:
            in_loops_s += move.weight * move.seconds
            continue
        outside_s += move.seconds
        for timed in move.steps:
            kind, axes, sent_bytes = timed.step.kind, timed.step.axes, timed.step.sent_bytes
            if kind in OPTION:
                ranks = _ranks(mesh, axes)
                found[kind, axes].append(sent_bytes * ranks / (ranks - 1))
    return {} if in_loops_s > outside_s else _options(mesh, found)


def _options(mesh: LogicalMesh, found: Collectives) -> dict[str, int]:
    options = {}
    for kind, option in OPTION.items():
        groups = [(sum(sizes), axes) for (of, axes), sizes in found.items() if of == kind]
        groups = [(total, axes) for total, axes in groups if len(found[kind, axes]) > 1]
        if not groups:
            continue
        total, axes = max(groups)
        chunk = _chunk_bytes(mesh, kind, axes, total)
        if total <= chunk:
            continue
        if kind == "reduce-scatter":
            options[option] = chunk // _ranks(mesh, axes)
        elif chunk < _LARGEST:
            options[option] = chunk
    return options


def _chunk_bytes(mesh: LogicalMesh, kind: str, axes: tuple[int, ...], total: float) -> int:
    """The best size, to a power of two."""
    alpha_s = _COST[kind](mesh, axes, 1.0)
    whole_s = _COST[kind](mesh, axes, total)
    per_byte_s = max(whole_s - alpha_s, 1e-15) / total
    best = sqrt(alpha_s * total / per_byte_s)
    return int(2 ** round(log2(min(max(best, _SMALLEST), _LARGEST))))


def _ranks(mesh: LogicalMesh, axes: tuple[int, ...]) -> int:
    return prod(mesh.shape[a] for a in axes)

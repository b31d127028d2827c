"""Costs of collectives: from a mesh, its axes and bytes to seconds, by the ring formulas.

For n ranks and `num_bytes` = B, the bytes that the tensor would have on one device if the axes of
the collective did not split it:

    all-reduce          α + β · 2(n − 1)/n · B
    all-gather          α + β · (n − 1)/n · B
    reduce-scatter      α + β · (n − 1)/n · B
    all-to-all          α + β · (n − 1)/n² · B

so a reduce-scatter and an all-gather cost an all-reduce and one α. All rings through several hosts
share the network of a host; in an all-to-all and in a shift every device sends by itself, and its
bytes to other hosts use only its own share of the network. `alpha_share` scales α for collectives
that XLA merges with others of their kind. If the mesh's profile has samples of such groups, they
give the cost instead (`measured`), and α is the time of the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from autopar.cost.measured import measured_costs
from autopar.ir.mesh import LogicalMesh


def _seconds(
    mesh: LogicalMesh,
    axes: tuple[int, ...],
    kind: str,
    num_bytes: float,
    share: float,
    volume: Callable[[int], float],
    away: Callable[[int, int], float] | None = None,
) -> float:
    """`volume(n)`: the share of the bytes that each of n ranks sends. `away(n, k)`: the share that
    a device sends to other hosts by itself, with k of the n ranks on each host."""
    ranks = prod(mesh.shape[a] for a in axes)
    if ranks == 1:
        return 0.0
    if mesh.profile is not None and mesh.profile.collectives:
        place = mesh.placement(axes)
        known = measured_costs(mesh.profile).collective_s(kind, *place, num_bytes, share)
        if known is not None:
            return known
    alpha, beta = mesh.link(axes)
    seconds = share * alpha + beta * volume(ranks) * num_bytes
    if away is None or not mesh.away_beta:
        return seconds
    on_host = mesh.placement(axes)[2]
    return max(seconds, share * alpha + mesh.away_beta * away(ranks, on_host) * num_bytes)


def all_reduce_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    return _seconds(mesh, axes, "all-reduce", num_bytes, alpha_share, lambda n: 2 * (n - 1) / n)


def all_gather_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    return _seconds(mesh, axes, "all-gather", num_bytes, alpha_share, lambda n: (n - 1) / n)


def reduce_scatter_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    return _seconds(mesh, axes, "reduce-scatter", num_bytes, alpha_share, lambda n: (n - 1) / n)


def all_to_all_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    kind, volume = "all-to-all", lambda n: (n - 1) / n**2
    return _seconds(mesh, axes, kind, num_bytes, alpha_share, volume, lambda n, k: (n - k) / n**2)


def shift_s(mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float) -> float:
    """Every device sends `num_bytes` to its neighbour along the axes."""
    kind = "collective-permute"
    return _seconds(mesh, axes, kind, num_bytes, 1.0, lambda _: 1.0, lambda n, k: float(k < n))

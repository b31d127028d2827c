"""What a collective costs: the ring formulas, per mesh axis.

For `num_bytes` = B, the bytes of the tensor as it would be on one device if the axes of the
collective did not split it, and n ranks:

    all-reduce          α + β · 2(n − 1)/n · B
    all-gather          α + β · (n − 1)/n · B
    reduce-scatter      α + β · (n − 1)/n · B
    all-to-all          α + β · (n − 1)/n² · B

so a reduce-scatter and an all-gather cost an all-reduce and one α. In a ring through several hosts
the network of a host is shared by all rings; in an all-to-all and in a shift every device sends for
itself, and what leaves the host has a device's own part of the network alone. `alpha_share` scales
α for collectives that XLA merges with others of their kind. On a mesh with a profile that has
samples of such groups, they tell what it costs (`measured`), and α is what the least bytes take.
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
    a device sends to other hosts by itself, if k of the n ranks are on one."""
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
    """So many bytes from every device to its neighbour along the axes."""
    kind = "collective-permute"
    return _seconds(mesh, axes, kind, num_bytes, 1.0, lambda _: 1.0, lambda n, k: float(k < n))

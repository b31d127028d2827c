"""What a collective costs: the ring formulas, per mesh axis.

For `num_bytes` = B, the bytes of the tensor as it would be on one device if the axes of the
collective did not split it, and n ranks:

    all-reduce          α + β · 2(n − 1)/n · B
    all-gather          α + β · (n − 1)/n · B
    reduce-scatter      α + β · (n − 1)/n · B
    all-to-all          α + β · (n − 1)/n² · B

so a reduce-scatter and an all-gather cost an all-reduce and one α. `alpha_share` scales α for
collectives that XLA merges with others of their kind.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from autopar.ir.mesh import LogicalMesh

Collective = Callable[..., float]


def _ring(mesh: LogicalMesh, axes: tuple[int, ...], share: float, volume: float) -> float:
    alpha, beta = mesh.link(axes)
    return share * alpha + beta * volume


def _ranks(mesh: LogicalMesh, axes: tuple[int, ...]) -> int:
    return prod(mesh.shape[a] for a in axes)


def all_reduce_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    n = _ranks(mesh, axes)
    return 0.0 if n == 1 else _ring(mesh, axes, alpha_share, 2 * (n - 1) / n * num_bytes)


def all_gather_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    n = _ranks(mesh, axes)
    return 0.0 if n == 1 else _ring(mesh, axes, alpha_share, (n - 1) / n * num_bytes)


reduce_scatter_s = all_gather_s


def all_to_all_s(
    mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: float, alpha_share: float = 1.0
) -> float:
    n = _ranks(mesh, axes)
    return 0.0 if n == 1 else _ring(mesh, axes, alpha_share, (n - 1) / n**2 * num_bytes)

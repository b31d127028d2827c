"""Submeshes for stages: from a `ClusterSpec` to candidate shapes, and from shapes to devices.

Shapes are (hosts, devices per host) in a cluster of N hosts × M devices; devices are numbered host
by host.

The *tiling* shapes are 1×m for the powers of two m that divide M, 1×M, and k×M for the k that are
powers of two below N or divide N, so that 50 hosts can be 2 × 25 or 5 × 10. Any of them whose sizes
add up to the cluster can be placed (Alpa's theorem 1, here for any M): submeshes of whole hosts
take any free hosts; of the others, each size divides the next larger one and M, so that, placed
largest first, the free devices of a host are always a multiple of the size placed next. No submesh
of part of a host straddles two hosts. If N has very many divisors, those with the fewest equal
stages are kept (`MAX_SIZES`).

With *all* shapes, a×b where a divides N and b divides M, a stage may also have b devices on each of
a hosts, and sizes that add up need not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from autopar.errors import ArgumentError, MeshError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.stages import Submesh

Devices = tuple[int, ...]

MAX_SIZES = 16  # numbers of whole hosts to try besides powers of two


def candidate_submeshes(cluster: ClusterSpec, shapes: str = "tiling") -> tuple[Submesh, ...]:
    """The shapes that a stage may have, smallest first; `shapes` is "tiling" or "all"."""
    num_hosts, per_host = cluster.num_hosts, cluster.devices_per_host
    if shapes == "all":
        candidates = {(a, b) for a in _divisors(num_hosts) for b in _divisors(per_host)}
    elif shapes == "tiling":
        within = {(1, m) for m in _powers_of_two(per_host) if per_host % m == 0}
        even = sorted(_divisors(num_hosts))[-MAX_SIZES:]
        across = {(k, per_host) for k in (*_powers_of_two(num_hosts), *even)}
        candidates = {*within, *across, (1, per_host), (num_hosts, per_host)}
    else:
        raise ArgumentError(f"submeshes={shapes!r}: needs 'tiling' or 'all'.")
    return tuple(sorted(candidates, key=lambda submesh: (prod(submesh), submesh)))


def uniform_submesh(num_stages: int, cluster: ClusterSpec) -> Submesh:
    """The submesh of each of `num_stages` equal stages."""
    size, rest = divmod(cluster.num_devices, num_stages)
    per_host = cluster.devices_per_host
    if not rest and size and per_host % size == 0:
        return (1, size)
    if not rest and size and size % per_host == 0:
        return (size // per_host, per_host)
    fitting = [n for n in _divisors(cluster.num_devices) if _is_even(n, cluster)]
    raise MeshError(
        f"UniformStages(num_stages={num_stages}): {_text(cluster)} cannot be divided into "
        f"{num_stages} equal parts that are whole hosts or within one host. Choose a number of "
        f"stages among {fitting}, or give submeshes with autopar.ManualStages(…)."
    )


def place_submeshes(
    submeshes: Sequence[Submesh], cluster: ClusterSpec, *, whole: bool = True
) -> tuple[Devices, ...]:
    """The positions of each stage's devices, host-major: no device has two stages and, with
    `whole`, none is left over. Stages are placed in pipeline order if that fits, so that
    neighbouring stages are close; otherwise large submeshes first."""
    used = sum(map(prod, submeshes))
    if used > cluster.num_devices or (whole and used < cluster.num_devices):
        verb = "need" if used > cluster.num_devices else "are only"
        raise MeshError(
            f"submeshes {_shapes_text(submeshes)} {verb} {used} devices and do not tile "
            f"{_text(cluster)}: {abs(cluster.num_devices - used)} are "
            f"{'missing' if used > cluster.num_devices else 'left over'}. "
            "Choose submeshes whose sizes add up to the cluster."
        )
    in_order = range(len(submeshes))
    largest_first = sorted(in_order, key=lambda i: (-prod(submeshes[i]), -submeshes[i][1]))
    widest_first = sorted(in_order, key=lambda i: (-submeshes[i][1], -submeshes[i][0]))
    for order in (in_order, widest_first, largest_first):
        placed, missed, free = _place_in(order, submeshes, cluster)
        if missed is None:
            return tuple(placed[stage] for stage in in_order)
    raise MeshError(
        f"submeshes {_shapes_text(submeshes)} do not tile {_text(cluster)}: with the larger ones "
        f"placed, no {submeshes[missed][0]} × {submeshes[missed][1]} is left for stage {missed} "
        f"(free devices per host: {free}). Choose submeshes of whole hosts, or whose devices per "
        f"host divide each other and {cluster.devices_per_host}."
    )


def can_tile(submeshes: Sequence[Submesh], cluster: ClusterSpec, *, whole: bool = True) -> bool:
    """Whether `place_submeshes` can place all of them."""
    try:
        place_submeshes(submeshes, cluster, whole=whole)
    except MeshError:
        return False
    return True


def _place_in(
    order: Iterable[int], submeshes: Sequence[Submesh], cluster: ClusterSpec
) -> tuple[dict[int, Devices], int | None, list[int]]:
    """Places each stage on the first hosts with enough free devices: (devices of each stage, the
    first stage that did not fit, free devices per host)."""
    per_host = cluster.devices_per_host
    taken = [0] * cluster.num_hosts
    placed: dict[int, Devices] = {}
    for stage in order:
        num_hosts, width = submeshes[stage]
        roomy = [host for host, used in enumerate(taken) if used + width <= per_host]
        if len(roomy) < num_hosts:
            return placed, stage, [per_host - used for used in taken]
        devices: list[int] = []
        for host in roomy[:num_hosts]:
            start = host * per_host + taken[host]
            devices += range(start, start + width)
            taken[host] += width
        placed[stage] = tuple(devices)
    return placed, None, [per_host - used for used in taken]


def _is_even(num_stages: int, cluster: ClusterSpec) -> bool:
    size = cluster.num_devices // num_stages
    return cluster.devices_per_host % size == 0 or size % cluster.devices_per_host == 0


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _shapes_text(submeshes: Sequence[Submesh]) -> str:
    return ", ".join(f"{hosts}×{devices}" for hosts, devices in submeshes)


def _text(cluster: ClusterSpec) -> str:
    return f"the cluster of {cluster.num_hosts} × {cluster.devices_per_host} devices"

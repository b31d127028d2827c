"""Hand-written layouts of a mixture of experts: tokens go to their experts' devices and back."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from .handwritten import ALL, HandWritten, Rule, largest_dim, replicated
from .transformers import expert_einsums


def expert_parallel(num_devices: int, *, zero: bool, split_moments: bool = False) -> HandWritten:
    """Experts split over all devices, tokens exchanged by all-to-all; the rest data parallel, with
    ZeRO-3, with only the optimizer's moments split (ZeRO-2), or neither."""
    split = _experts_and(largest_dim(ALL, num_devices))
    whole = _experts_and(replicated)
    tokens = P(ALL, None, None)
    experts = P(ALL, None, None, None)
    name = "expert parallel" + (" + ZeRO-3" if zero else " + ZeRO-2" if split_moments else "")
    return HandWritten(
        name,
        (num_devices, 1),
        split if zero else whole,
        P(ALL),
        {"*": tokens},
        expert_einsums(P(None, ALL), experts, experts, tokens),
        moment=split if split_moments else None,
    )


def _experts_and(rest: Rule) -> Rule:
    """Experts' kernels split over all devices, everything else by the rule `rest`."""

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if "'experts'" in path and len(shape) == 3:
            return P(ALL, None, None)
        return rest(path, shape)

    return parameter


def experts_in_hosts(data: int, experts: int) -> HandWritten:
    """For more devices than experts: experts split over "y" and, as in ZeRO-3, inside over "x"; the
    rest ZeRO-3 over all devices. Tokens are exchanged only along "y"."""
    name = f"expert parallel {data}×{experts} + ZeRO-3"
    return _experts_along("y", "x", (data, experts), name)


def experts_across_hosts(num_hosts: int, per_host: int) -> HandWritten:
    """Experts split over hosts and, as in ZeRO-3, inside over the devices of a host, where links
    are fast; the rest ZeRO-3 over all devices. Every token crosses the network to its expert once
    and back."""
    name = f"experts across {num_hosts} hosts + ZeRO-3 inside"
    return _experts_along("x", "y", (num_hosts, per_host), name)


def _experts_along(
    experts: str, inside: str, mesh_shape: tuple[int, int], name: str
) -> HandWritten:
    """Experts split over one axis, each expert's kernels over the other."""
    rest = largest_dim(ALL, mesh_shape[0] * mesh_shape[1])

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if "'experts'" in path and len(shape) == 3:
            return P(experts, None, inside) if "'up'" in path else P(experts, inside, None)
        return rest(path, shape)

    tokens = P(ALL, None, None)
    by_expert = P(experts, inside, None, None)
    einsums = expert_einsums(P(None, ALL), by_expert, by_expert, tokens)
    return HandWritten(name, mesh_shape, parameter, P(ALL), {"*": tokens}, einsums)

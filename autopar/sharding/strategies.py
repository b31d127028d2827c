"""The strategies of a node: from a `Rule` and a mesh to every way to put mesh axes on factors.

Each axis of the mesh goes to one factor of the node's rule or to none. A factor can be split if it
is not fixed and the axis divides its size; a minor factor of a dimension only if earlier axes split
its major factors completely. Splitting a reduction factor leaves the result partial along that
axis; a linear node may also take partial operands to a partial result. The result is a set of
(operand layouts, result layouts) without duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autopar.ir.graph import Rule
from autopar.ir.spec import PARTIAL, WHOLE, Layout, NodeLayouts

_UNUSED = -1
_PARTIAL_FACTOR = -2


@dataclass(frozen=True)
class Strategy:
    """`factors[a]`: the factor on mesh axis a (−1 none, −2 partial through a linear op);
    `parallelism`: the number of devices that divide the node's work."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    factors: tuple[int, ...]
    parallelism: int


@lru_cache(maxsize=65536)
def enumerate_strategies(rule: Rule, mesh_shape: tuple[int, ...]) -> tuple[Strategy, ...]:
    choices: list[list[int]] = []
    for size in mesh_shape:
        if size == 1:
            choices.append([_UNUSED])
            continue
        axis_choices = [_UNUSED]
        axis_choices += (
            f for f, n in enumerate(rule.sizes) if f not in rule.fixed and n % size == 0
        )
        if rule.linear:
            axis_choices.append(_PARTIAL_FACTOR)
        choices.append(axis_choices)
    by_layouts: dict[NodeLayouts, Strategy] = {}
    for factors in product(*choices):
        strategy = _apply(rule, mesh_shape, factors)
        if strategy is None:
            continue
        key = strategy.operands, strategy.results
        if key not in by_layouts or by_layouts[key].parallelism < strategy.parallelism:
            by_layouts[key] = strategy
    return tuple(by_layouts.values())


def _apply(rule: Rule, mesh_shape: tuple[int, ...], factors: tuple[int, ...]) -> Strategy | None:
    parts: dict[int, int] = {}
    parallelism = 1
    for factor, size in zip(factors, mesh_shape, strict=True):
        if factor >= 0:
            parts[factor] = parts.get(factor, 1) * size
            parallelism *= size
    if any(rule.sizes[f] % n for f, n in parts.items()):
        return None
    used = {f for f, size in zip(factors, mesh_shape, strict=True) if size > 1}
    if any(f in used and not used <= {f, *allowed} for f, allowed in rule.only_with):
        return None
    operands = [_layout(rule, dims, factors, parts, is_result=False) for dims in rule.operands]
    results = [_layout(rule, dims, factors, parts, is_result=True) for dims in rule.results]
    if None in operands or None in results:
        return None
    return Strategy(tuple(operands), tuple(results), factors, parallelism)  # type: ignore[arg-type]


def _layout(
    rule: Rule,
    dims: tuple[tuple[int, ...], ...],
    factors: tuple[int, ...],
    parts: dict[int, int],
    *,
    is_result: bool,
) -> Layout | None:
    layout = []
    for axis, factor in enumerate(factors):
        if factor == _PARTIAL_FACTOR:
            layout.append(PARTIAL)
            continue
        entry = PARTIAL if is_result and factor in rule.reduction else WHOLE
        for dim, dim_factors in enumerate(dims):
            if factor < 0 or factor not in dim_factors:
                continue
            for major in dim_factors[: dim_factors.index(factor)]:
                complete = parts.get(major, 1) == rule.sizes[major]
                earlier = all(a < axis for a, f in enumerate(factors) if f == major)
                if not (complete and earlier):
                    return None
            entry = dim
        layout.append(entry)
    return tuple(layout)

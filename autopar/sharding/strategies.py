"""The strategies of a node: every way to put mesh axes on its factors.

Each axis of the mesh goes to one factor of the node's rule or to none. A factor can be split if
its size divides evenly and it is not fixed; a factor that is the minor part of a dimension only
when the major parts are split completely, by earlier axes. Splitting a reduction factor leaves
the result partial along that axis; a linear node may also take partial operands to a partial
result. What remains is a set of (operand layouts, result layouts) without duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autopar.ir.graph import Rule
from autopar.ir.spec import PARTIAL, WHOLE, Layout

_UNUSED = -1
_PARTIAL_FACTOR = -2


@dataclass(frozen=True)
class Strategy:
    """`factors[a]` is the factor on mesh axis a (−1 none, −2 partial through a linear op);
    `parallelism` over how many devices the node's work is divided."""

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
        own = [_UNUSED]
        own += [f for f, n in enumerate(rule.sizes) if f not in rule.fixed and n % size == 0]
        if rule.linear:
            own.append(_PARTIAL_FACTOR)
        choices.append(own)
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for factors in product(*choices):
        strategy = _apply(rule, mesh_shape, factors)
        if strategy is None:
            continue
        key = strategy.operands, strategy.results
        if key not in found or found[key].parallelism < strategy.parallelism:
            found[key] = strategy
    return tuple(found.values())


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
        for dim, own in enumerate(dims):
            if factor < 0 or factor not in own:
                continue
            for major in own[: own.index(factor)]:
                complete = parts.get(major, 1) == rule.sizes[major]
                earlier = all(a < axis for a, f in enumerate(factors) if f == major)
                if not (complete and earlier):
                    return None
            entry = dim
        layout.append(entry)
    return tuple(layout)

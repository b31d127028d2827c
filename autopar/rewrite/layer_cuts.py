"""Where to cut a forward pass into layers: from the costs in `LayerSpan`s to groups of equations.

Cuts are in the gaps between products, each at the position in its gap where the fewest bytes cross.
Natural layers end where a repeated block ends: repeated by its numbered module name, or by its
products. Without such blocks, or for a given number of layers, a dynamic programme chooses the gaps
that balance flops at few bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np

from autopar.errors import ArgumentError
from autopar.rewrite.repeats import longest_repeat

_NUMBER = re.compile(r"\d+")
# Factor on the bytes crossing a cut where the user's modules change: such cuts are preferred.
_MODULE_CHANGE_FACTOR = 0.9
# Weight of a cut with average bytes, relative to the square of an average layer's work.
_BYTES_WEIGHT = 0.25
# Bytes, or numbers of products covered, count as equal if their ratio is at least this.
_ABOUT_EQUAL = 0.9


@dataclass(frozen=True)
class LayerSpan:
    """A run of forward equations. Positions below index `indices`.

    crossing_bytes: per position, bytes made up to it and read after it.
    heavy:          positions of products; equal products have equal `signatures`.
    scans:          positions of loops among them.
    only_readers:   per position, the first later one that is the only reader of a value made
                    up to it.
    """

    indices: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    flops: tuple[float, ...]
    modules: tuple[str, ...]
    heavy: tuple[int, ...]
    signatures: tuple[int, ...]
    scans: frozenset[int]
    only_readers: tuple[int, ...]


def choose_cuts(segments: Sequence[LayerSpan], num_layers: int | None) -> list[tuple[int, ...]]:
    """The equations of each layer; a segment has at least one layer."""
    if not segments:
        return []
    if num_layers is None:
        cuts = [_natural_cuts(segment) for segment in segments]
    else:
        cuts = [
            _balanced_cuts(segment, count)
            for segment, count in zip(segments, _shares(segments, num_layers), strict=True)
        ]
    groups = []
    for segment, segment_cuts in zip(segments, cuts, strict=True):
        bounds = [0, *(cut + 1 for cut in segment_cuts), len(segment.indices)]
        groups += [segment.indices[a:b] for a, b in pairwise(bounds)]
    return groups


def _shares(segments: Sequence[LayerSpan], num_layers: int) -> list[int]:
    """The number of layers of each segment: one, and the rest by most flops per layer."""
    total = sum(len(segment.indices) for segment in segments)
    if not len(segments) <= num_layers <= total:
        raise ArgumentError(
            f"{num_layers} layers: the forward pass of this step can be cut into {len(segments)} "
            f"to {total}. Ask for a number between them."
        )
    flops = [sum(segment.flops) for segment in segments]
    counts = [1] * len(segments)
    for _ in range(num_layers - len(segments)):
        free = [i for i, s in enumerate(segments) if counts[i] < len(s.indices)]
        counts[max(free, key=lambda i: flops[i] / counts[i])] += 1
    return counts


# -- gaps


def _gap_cut(segment: LayerSpan, first: int, last: int) -> int:
    """The best cut in `first … last`: few bytes cross, preferably where modules change; among
    equals, the first that separates no value from its only reader in between."""

    def price(cut: int) -> tuple[float, bool, int]:
        here, after = segment.modules[cut], segment.modules[cut + 1]
        change = not (f"{here}/".startswith(f"{after}/") or f"{after}/".startswith(f"{here}/"))
        share = _MODULE_CHANGE_FACTOR if change else 1.0
        return segment.crossing_bytes[cut] * share, segment.only_readers[cut] <= last, cut

    return min(range(first, last + 1), key=price)


def _gaps(segment: LayerSpan) -> list[int]:
    """One cut between any two neighbouring products; directly before and after a loop, which is a
    layer by itself."""
    gaps = []
    for before, after in pairwise(segment.heavy):
        if before in segment.scans:
            gaps.append(before)
        elif after in segment.scans:
            gaps.append(after - 1)
        else:
            gaps.append(_gap_cut(segment, before, after - 1))
    return gaps


# -- natural layers


def _natural_cuts(segment: LayerSpan) -> list[int]:
    labels = _labels_by_name(segment) or _labels_by_period(segment)
    alone = [p for p in segment.scans if labels is None or _is_alone(segment, labels, p)]
    if labels is None and not alone:
        narrow = _narrow(segment, _gaps(segment))
        count = min(round(2 * sqrt(len(segment.heavy))), len(narrow) + 1)
        return _balance(segment, narrow, count)
    cuts: set[int] = set()
    if labels is not None:
        for k, (before, after) in enumerate(pairwise(segment.heavy)):
            if labels[k] != labels[k + 1]:
                cuts.add(_gap_cut(segment, before, after - 1))
    for position in alone:
        # The gaps beside the loop have no other cut.
        k = segment.heavy.index(position)
        before = segment.heavy[k - 1] if k else -1
        after = segment.heavy[k + 1] if k + 1 < len(segment.heavy) else len(segment.indices)
        cuts -= set(range(before, after))
        cuts |= {c for c in (position - 1, position) if 0 <= c < len(segment.indices) - 1}
    return sorted(cuts)


def _is_alone(segment: LayerSpan, labels: Sequence[object], position: int) -> bool:
    """Whether a loop shares its block with no other product."""
    block = labels[segment.heavy.index(position)]
    return block is None or sum(label == block for label in labels) == 1


def _labels_by_name(segment: LayerSpan) -> list[str | None] | None:
    """Per product, the numbered module it belongs to (`GPT/layer_3`), if such modules repeat."""
    paths = [segment.modules[p].split("/") for p in segment.heavy]
    for depth in range(max(map(len, paths), default=0)):
        blocks: dict[str, set[str]] = {}
        labels: list[str | None] = []
        for path in paths:
            label = None
            if depth < len(path) and _NUMBER.search(path[depth]):
                label = "/".join(path[: depth + 1])
                blocks.setdefault(_NUMBER.sub("*", label), set()).add(label)
            labels.append(label)
        repeated = {s for s, names in blocks.items() if len(names) > 1}
        labels = [x if x is not None and _NUMBER.sub("*", x) in repeated else None for x in labels]
        if 2 * sum(label is not None for label in labels) >= len(labels) > 0:
            return labels
    return None


def _labels_by_period(segment: LayerSpan) -> list[int | None] | None:
    """Per product, its repeat in a periodic stretch. Of the periods that cover about the most
    products, it is the shortest whose cuts have about the fewest bytes crossing: a block may have a
    period inside, but more bytes cross there."""
    keys = np.array(segment.signatures)
    stretches = []  # period, first product, products covered
    for period in range(1, len(keys) // 2 + 1):
        start, length = longest_repeat(keys, period)
        repeats = length // period
        if repeats >= 2 and 2 * repeats * period >= len(keys):
            stretches.append((period, start, repeats * period))
    max_covered = max((covered for _, _, covered in stretches), default=0)
    crossing = [segment.crossing_bytes[gap] for gap in _gaps(segment)]
    candidates = [
        (_best_phase(crossing, *stretch), stretch)
        for stretch in stretches
        if stretch[2] >= _ABOUT_EQUAL * max_covered
    ]
    if not candidates:
        return None
    min_mean = min(mean for (mean, _), _ in candidates)
    (_, phase), (period, start, covered) = next(
        x for x in candidates if x[0][0] * _ABOUT_EQUAL <= min_mean
    )
    labels: list[int | None] = [None] * len(keys)
    for k in range((covered - phase) // period * period):
        labels[start + phase + k] = k // period
    return labels


def _best_phase(
    crossing: Sequence[int], period: int, start: int, covered: int
) -> tuple[float, int]:
    """(average bytes crossing a cut, products from the stretch's start to its first block). Blocks
    begin at the stretch's start unless clearly fewer bytes cross elsewhere."""

    def mean(phase: int) -> float:
        # The cut in front of product n is in gap n - 1.
        cuts = [c for c in range(start + phase, start + covered, period) if c > start]
        return sum(crossing[c - 1] for c in cuts) / len(cuts)

    phase = min(range(period), key=lambda p: (mean(p) * (1.0 if p else 0.99), p))
    return mean(phase), phase


# -- balanced layers


def _balanced_cuts(segment: LayerSpan, count: int) -> list[int]:
    """`count - 1` cuts that balance flops at few bytes; natural ones if there are enough."""
    candidates = _gaps(segment)
    if len(candidates) < count - 1:
        return _balance(segment, list(range(len(segment.indices) - 1)), count)
    labels = _labels_by_name(segment) or _labels_by_period(segment)
    if labels is not None:
        natural = [g for k, g in enumerate(candidates) if labels[k] != labels[k + 1]]
        if len(natural) >= count - 1:
            return _balance(segment, natural, count)
    nearby = _narrow_nearby(segment, candidates, count)
    return _balance(segment, nearby if len(nearby) >= count - 1 else candidates, count)


def _narrow_nearby(segment: LayerSpan, candidates: Sequence[int], count: int) -> list[int]:
    """The cuts with at most twice the bytes of the best cut within half a layer: activations of a
    convolutional network get smaller with depth."""
    reach = -(-len(candidates) // (2 * count))
    crossing = [segment.crossing_bytes[c] for c in candidates]
    return [
        c
        for k, c in enumerate(candidates)
        if crossing[k] <= 2 * min(crossing[max(k - reach, 0) : k + reach + 1])
    ]


def _narrow(segment: LayerSpan, candidates: Sequence[int]) -> list[int]:
    """The cuts with at most twice the bytes of the best one."""
    limit = 2 * min((segment.crossing_bytes[c] for c in candidates), default=0)
    return [c for c in candidates if segment.crossing_bytes[c] <= limit]


def _balance(segment: LayerSpan, candidates: list[int], count: int) -> list[int]:
    """Minimizes Σ (flops / even share)² over layers + w · Σ (bytes / mean bytes) over cuts."""
    if count <= 1:
        return []
    before = np.concatenate(([0.0], np.cumsum(segment.flops)))
    share = max(before[-1] / count, 1e-9)
    work = np.array([0.0, *(before[c + 1] for c in candidates), before[-1]]) / share
    crossing = np.array([segment.crossing_bytes[c] for c in candidates], dtype=float)
    price = _BYTES_WEIGHT * crossing / max(crossing.mean(), 1.0)
    num = len(candidates)
    # cost[j]: the minimum with the current number of cuts, the last of them candidate j.
    cost = work[1 : num + 1] ** 2 + price
    choices = []
    for _ in range(count - 2):
        extended = cost[:, None] + (work[None, 1 : num + 1] - work[1 : num + 1, None]) ** 2
        extended[np.tril_indices(num)] = np.inf
        choices.append(extended.argmin(axis=0))
        cost = extended.min(axis=0) + price
    last = int((cost + (work[-1] - work[1 : num + 1]) ** 2).argmin())
    chosen = [last]
    for choice in reversed(choices):
        chosen.append(int(choice[chosen[-1]]))
    return [candidates[c] for c in reversed(chosen)]

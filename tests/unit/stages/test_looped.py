"""Stages as they are wanted: even ranges of layers, judged by all there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.stages.looped import even_ranges


@pytest.mark.parametrize("seed", range(20))
def test_even_ranges_have_the_least_largest_sum(seed):
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 9, size=rng.integers(2, 8)).astype(float)
    count = int(rng.integers(1, len(work) + 1))

    def largest(ranges):
        return max(work[a:b].sum() for a, b in ranges)

    found = even_ranges(list(work), count)
    ends = [0, *(b for _, b in found)]
    assert found == list(pairwise(ends)) and ends[-1] == len(work) and len(found) == count
    assert all(a < b for a, b in found)
    cuts = combinations(range(1, len(work)), count - 1)
    best = min(largest(list(pairwise((0, *c, len(work))))) for c in cuts)
    assert largest(found) == best

"""Ranks by hand, and what correlation must be by its definition."""

from math import isnan

import pytest

from autopar.measure.ranking import rank_correlation, ranks


def test_equal_values_share_their_ranks():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


def test_order_alone_counts():
    assert rank_correlation([1, 2, 3], [10, 20, 21]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # 1 − 6 Σd² / n(n² − 1), without ties
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert isnan(rank_correlation([1, 1], [1, 2]))

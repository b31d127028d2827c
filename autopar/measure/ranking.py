"""Whether two figures put plans in the same order: values → ranks, and their correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    from scipy.stats import rankdata  # slow to import

    return rankdata(values).tolist()


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 for the same order, −1 for the opposite order, NaN where all values of one
    sequence are equal."""
    from scipy.stats import spearmanr  # slow to import

    if min(len(set(first)), len(set(second))) < 2:
        return float("nan")
    result: Any = spearmanr(first, second)
    return float(result.statistic)

"""The arithmetic of layer tables. Whole tables: `tests/unit/stages/test_layer_tables.py`."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.layer_costs import Bytes, peak_by_layer, spread_shared


def test_what_is_shared_is_spread_by_what_layers_have() -> None:
    assert spread_shared(np.array([4.0, 1.0, 3.0])) == pytest.approx([2.0, 6.0])
    assert spread_shared(np.array([4.0, 0.0, 0.0])) == pytest.approx([2.0, 2.0])


def test_peak_of_each_layer() -> None:
    """Times are inclusive: what ends at 3 makes room for what starts at 4."""
    layer = np.array([0, 0, 1, 0])
    start, end = np.array([0, 2, 2, 4]), np.array([3, 3, 9, 5])
    size = np.array([1.0, 2.0, 10.0, 2.5])
    assert peak_by_layer(layer, start, end, size, 3) == pytest.approx([3.0, 10.0, 0.0])


def test_bytes_by_layer_have_those_of_none_in_front() -> None:
    zeros = np.zeros(3, dtype=int)
    found = Bytes(
        np.array([0, 1, 1]), np.array([-1, 0, 1]), np.array([8.0, 8.0, 4.0]), zeros, zeros
    )
    assert found.by_layer(np.array([1.0, 0.5]), 2) == pytest.approx([8.0, 4.0, 2.0])

"""Predicted memory of stages whose layers run as loops, against XLA's."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_depth import measure


@pytest.mark.slow
@pytest.mark.parametrize("layers_of_a_stage", [10, 40])
def test_predicted_memory_is_that_of_xla(layers_of_a_stage: int) -> None:
    row = measure(2 * layers_of_a_stage)
    for predicted, xla in zip(row["predicted_bytes"], row["xla_bytes"], strict=True):
        assert predicted == pytest.approx(xla, rel=0.1)

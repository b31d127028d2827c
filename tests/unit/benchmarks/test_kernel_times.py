"""Bytes of kernels that ran, from the HLO beside their times."""

from __future__ import annotations

import pytest

from benchmarks.kernel_times import measured
from tests.unit.runtime.test_hlo_texts import TEXTS


@pytest.mark.parametrize("stem", [stem for stem in TEXTS if stem.endswith("gpu")])
def test_bytes_of_products_and_convolutions(stem: str) -> None:
    """Operands and results, without the work space of libraries."""
    kernels = {"custom-call.5": [2, 30.0, ["nvjet"]], "not there": [1, 1.0, []]}
    products = measured({"kernels": kernels}, TEXTS[stem]["products by cuBLAS"])
    own = products["product", "forward "]
    assert (own.count, own.num_bytes) == (2, 4 * (2 * 32 * 128 + 32 * 32))
    assert own.seconds == pytest.approx(30e-6)
    assert products["elementwise", "forward "].num_bytes == 0
    kernels = {"cudnn-conv.1": [1, 5.0, ["cudnn"]]}
    found = measured({"kernels": kernels}, TEXTS[stem]["convolutions by cuDNN"])
    images, kernel, result = 2 * 16 * 16 * 32, 3 * 3 * 32 * 64, 2 * 16 * 16 * 64
    assert found["convolution", "forward "].num_bytes == 2 * (images + kernel + result)

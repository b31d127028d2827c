"""The least time of convolutions: waves of tiles, blocks of channels, traffic."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.convolution_tiles import least_convolution_s, transposed_kernel_s

KINDS = ("forward", "input-gradient", "kernel-gradient")
RATE, BYTE_S = 1e14, 1e-13
WAVE = 132 * 128  # rows of a wave of the tallest tiles


def least(kind: str, rows: float, into: float, out: float, window: float) -> float:
    at = np.asarray([rows, into, out, window], dtype=float)
    return float(least_convolution_s(kind, 2, RATE, BYTE_S)(at))


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_convolution_takes_its_multiply_adds(kind: str) -> None:
    work = 64.0 * WAVE * 512 * 512 * 9
    assert least(kind, 64 * WAVE, 512, 512, 9) == pytest.approx(work / RATE, rel=0.1)


def test_few_channels_cost_as_much_as_a_block() -> None:
    assert least("forward", WAVE, 3, 1024, 9) == pytest.approx(
        least("forward", WAVE, 32, 1024, 9), rel=0.05
    )
    assert least("forward", WAVE, 128, 1, 9) == pytest.approx(
        least("forward", WAVE, 128, 64, 9), rel=0.05
    )
    assert least("input-gradient", WAVE, 1024, 3, 9) == pytest.approx(
        least("input-gradient", WAVE, 1024, 32, 9), rel=0.05
    )


def test_a_last_wave_takes_as_long_as_a_full_one() -> None:
    full = least("forward", WAVE, 512, 128, 9)
    assert least("forward", WAVE + 1, 512, 128, 9) > 1.3 * full
    assert least("forward", 2 * WAVE, 512, 128, 9) == pytest.approx(2 * full)


def test_only_gradients_of_kernels_split_their_contraction() -> None:
    few = least("forward", 128, 4096, 128, 9)  # two tiles at most
    assert few > 30 * 128 * 4096 * 128 * 9 / RATE
    split = least("kernel-gradient", 1e6, 128, 128, 1)
    assert split < 2 * 1e6 * 128 * 128 / RATE


@pytest.mark.parametrize("kind", KINDS)
def test_moving_its_arrays_takes_at_least_its_bytes(kind: str) -> None:
    moved = 2 * (1e7 * (64 + 64) + 64 * 64)
    assert least(kind, 1e7, 64, 64, 1) >= moved * BYTE_S


@pytest.mark.parametrize("kind", KINDS)
def test_more_is_never_cheaper(kind: str) -> None:
    for place in range(4):
        sizes = [5000.0, 24.0, 48.0, 9.0]
        times = []
        for factor in (1, 2, 3, 5, 8, 13):
            here = list(sizes)
            here[place] *= factor
            times.append(least(kind, *here))
        assert times == sorted(times)


def test_a_transposed_kernel_s_gradient_runs_the_whole_contraction_in_few_tiles() -> None:
    def of(depth: float, into: int, out: int, item: int = 4) -> float:
        return transposed_kernel_s(depth, into, out, 16, item, 1e14)

    # 3 × 16 by 32 is one tile, 16 × 64 by 128 are eight: side by side.
    assert of(1e6, 32, 3) == of(1e6, 128, 64) == pytest.approx(of(2e6, 32, 3) / 2, rel=1e-3)
    assert of(1e6, 1024, 512) == pytest.approx(4 * of(1e6, 32, 3)), "512 tiles in four waves"
    assert of(1e6, 32, 3, item=2) < of(1e6, 32, 3)
    at_peak = 1e6 * 128 * 128 * 132 / 1e14
    assert 2 * at_peak < of(1e6, 32, 3) < 3 * at_peak

"""The least time of a convolution: from its sizes, as samples have them, to seconds.

A convolution is a product in tiles, one on every multiprocessor, in waves: a last wave takes as
long as a full one. Channels are read in blocks for every place of the window, so few of them cost
as much as a block. Only gradients of kernels split their contraction among multiprocessors. Samples
reach shares of this time that vary half as much as shares of a plain roofline.

The gradient of a transposed convolution's kernel is another convolution, whose window is as large
as the image and whose result is as large as a kernel: few tiles, each of which runs the whole
contraction.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

_MULTIPROCESSORS = 132
_TILES = ((128, 128, 1.0), (128, 64, 0.7), (64, 64, 0.5))  # height, width, share of the rate
_BLOCK_BYTES = 64  # of channels, along a contraction
_KERNEL_BLOCK_BYTES = 32  # of channels, of a kernel's gradient
_EXTRA_DEPTH = 256  # prologue and epilogue of a tile, as elements of the contraction
_LEAST_DEPTH = 1024  # of a tile whose contraction is split
# Of the peak of large products, by bytes of a number, in a tile whose window is the image; as
# `autopar.measure.judge_tiles` has them.
_WIDE_WINDOW = {2: 0.71, 4: 0.46}
_SMOOTH = 4.0  # the larger, the more the slower of products and traffic decides alone


def least_convolution_s(
    kind: str, item: int, rate: float, byte_s: float
) -> Callable[[np.ndarray], np.ndarray]:
    """A function of sizes in the last dimension: rows (images times positions of a result), input
    and output channels, elements of a window. `rate`: multiply-adds per second; `byte_s`: seconds
    of a byte."""

    def blocks(channels: np.ndarray, num_bytes: int) -> np.ndarray:
        block = max(num_bytes // item, 1)
        return np.ceil(channels / block) * block

    def least(at: np.ndarray) -> np.ndarray:
        rows, into, out, window = np.moveaxis(at, -1, 0)
        is_split = kind == "kernel-gradient"
        if is_split:
            sides = window * blocks(into, _KERNEL_BLOCK_BYTES), out, rows
        elif kind == "input-gradient":
            sides = rows, into, window * blocks(out, _BLOCK_BYTES)
        else:
            sides = rows, out, window * blocks(into, _BLOCK_BYTES)
        products_s = np.min([_tiled_s(*sides, tile, is_split) for tile in _TILES], axis=0) / rate
        moved_s = (rows * (into + out) + into * out * window) * item * byte_s
        return (products_s**_SMOOTH + moved_s**_SMOOTH) ** (1 / _SMOOTH)

    return least


def transposed_kernel_s(
    depth: float, into: float, out: float, window: float, item: int, rate: float
) -> float:
    """Of such a gradient; `depth`: images times places of the image; `rate`: the device's peak, in
    multiply-adds per second."""
    height, width, _ = _TILES[0]
    waves = ceil(ceil(out * window / height) * ceil(into / width) / _MULTIPROCESSORS)
    area = height * width * _MULTIPROCESSORS
    return waves * (depth + _EXTRA_DEPTH) * area / (_WIDE_WINDOW[2 if item <= 2 else 4] * rate)


def _tiled_s(
    rows: np.ndarray,
    columns: np.ndarray,
    depth: np.ndarray,
    tile: tuple[int, int, float],
    is_split: bool,
) -> np.ndarray:
    """Seconds times the rate."""
    height, width, share = tile
    waves = np.ceil(rows / height) * np.ceil(columns / width) / _MULTIPROCESSORS
    if is_split:
        deep = np.maximum(waves * depth, np.minimum(depth, _LEAST_DEPTH)) + share * _EXTRA_DEPTH
    else:
        deep = np.ceil(waves) * (depth + share * _EXTRA_DEPTH)
    return deep * height * width * _MULTIPROCESSORS / share

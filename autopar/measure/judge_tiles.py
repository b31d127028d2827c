"""Matrix products and convolutions in tiles: from their sizes to seconds on tensor cores.

A product runs in tiles, one on every multiprocessor, in waves. A tile has a prologue and an
epilogue, so a short contraction is slow. A convolution is the product that it stands for:

    forward          positions of the result  ×  output channels  over  window × input channels
    input gradient   positions of the input   ×  input channels   over  window × output channels;
                     of a stride's window, each position meets a part, or none
    filter gradient  window × input channels  ×  output channels  over  positions of the result

Channels are read in blocks for every place of the window, so few of them cost as much as a block,
and tiles are at least 64 wide. Only filter gradients split their contraction among
multiprocessors. The filter's gradient of a transposed convolution is one whose window is as large
as the image (`wide_window_s`): the few tiles of its result, all of them wide, each run the whole
contraction. The constants of convolutions are from samples of single ones on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

MULTIPROCESSORS = 132
PRODUCTS = 0.71  # of the peak rate, for a tile that is full
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_DEPTH = 1024  # of a tile whose contraction is split among multiprocessors
WIDE_TILES = ((128, 128, 1.0), (128, 64, 0.7), (64, 128, 0.7), (64, 64, 0.5))
CONVOLUTION_TILES = (*WIDE_TILES, (128, 16, 0.15))
TILES = (*WIDE_TILES, (16, 128, 0.25), (16, 16, 0.2))  # height, width, share of the rate

BLOCK_BYTES = 64  # of channels, along a contraction
FILTER_BLOCK_BYTES = 32  # of channels, of a filter's gradient
CONVOLUTION_DEPTH = 256  # prologue and epilogue, as elements of the contraction
STRIDED_INPUT = 0.7  # of the rate, for gradients of a strided input, whose parts lie apart
WITH_HOLES = {2: 1.0, 4: 0.65}  # of the rate, by bytes: a window as large as the image, with holes
WIDE_VOLUME = 0.33  # of the rate, for such a window in three dimensions
FILTER_GRADIENT = {2: 0.7, 4: 0.55}  # by bytes: both operands lie across the contraction


def tiled_s(
    batch: float,
    rows: float,
    columns: float,
    depth: float,
    rate: float,
    extra: float,
    tiles: Sequence[tuple[int, int, float]] = TILES,
    splits: Sequence[int] = SPLITS,
) -> float:
    """A product of rows × depth by depth × columns on a device with this peak rate, in the best of
    `tiles`. Where tiles do not fill all waves, the contraction is split. `extra`: depth that a tile
    costs more; small tiles share a multiprocessor and hide part of it."""
    times = []
    for height, width, share in tiles:
        count = batch * ceil(rows / height) * ceil(columns / width)
        deep = min(
            ceil(count * parts / MULTIPROCESSORS) * (depth / parts + share * extra)
            for parts in splits
            if parts == 1 or depth >= parts * LEAST_DEPTH
        )
        area = 2 * height * width * MULTIPROCESSORS
        times.append(deep * area / (PRODUCTS * share * rate))
    return min(times)


def convolution_s(
    kind: str,
    groups: int,
    positions: float,
    inputs: float,
    features: float,
    window: Sequence[int],
    strides: Sequence[int],
    item: int,
    rate: float,
) -> float:
    """`kind`: "Forward", "BackwardInput" or "BackwardFilter"; `positions`: of the forward result in
    all images; channels are those of a group; `item`: bytes of a number."""
    places, splits = float(prod(window)), (1,)
    if kind == "BackwardFilter":
        sides = places * _blocks(inputs, item, FILTER_BLOCK_BYTES), features, positions
        rate *= FILTER_GRADIENT[2 if item <= 2 else 4]
        splits = SPLITS
    elif kind == "BackwardInput":
        met = float(prod(min(size, by) for size, by in zip(window, strides, strict=True)))
        sides = positions * met, inputs, places / met * _blocks(features, item, BLOCK_BYTES)
        rate *= STRIDED_INPUT if prod(strides) > 1 else 1.0
    else:
        sides = positions, features, places * _blocks(inputs, item, BLOCK_BYTES)
    return tiled_s(groups, *sides, rate, CONVOLUTION_DEPTH, CONVOLUTION_TILES, splits)


def wide_window_s(
    positions: float,
    inputs: float,
    features: float,
    window: Sequence[int],
    item: int,
    rate: float,
) -> float:
    """A forward convolution whose window has holes and is as large as the image, or that is so in
    three dimensions, where places of the window and not channels are contiguous."""
    depth = prod(window) * (inputs if len(window) > 2 else _blocks(inputs, item, BLOCK_BYTES))
    rate *= WIDE_VOLUME if len(window) > 2 else WITH_HOLES[2 if item <= 2 else 4]
    return tiled_s(1, positions, features, depth, rate, CONVOLUTION_DEPTH, WIDE_TILES[:1], (1,))


def _blocks(channels: float, item: int, num_bytes: int) -> float:
    """Channels as they are read, in blocks of this size."""
    block = max(num_bytes // item, 1)
    return ceil(channels / block) * block

"""The samples to take: from `Abilities` of the devices to `PlannedSample`s, most useful first.

No model decides the sizes. They are a coarse geometric grid, for interpolation in logarithms, and
between its points sizes that fill the space evenly (Halton's sequence): odd ones, batches, few and
many channels. A sample has a *round*: 0 is what `--quick` takes, later rounds fill the gaps. Every
round has all kinds, so a run that is stopped early has a coarse picture of everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from itertools import product as pairs_of
from typing import Any

from autopar.ir.profile import (
    COLLECTIVES,
    CONVOLUTIONS,
    STREAMS,
    AttentionTime,
    CollectiveTime,
    ConvolutionTime,
    CrossingSample,
    ProductTime,
    StreamTime,
    Timing,
)
from autopar.measure.profile.links import placements

GROUPS = ("products", "convolutions", "streams", "attentions", "collectives", "crossings")
UNTIMED = Timing(0.0, 0.0, 0)
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class PlannedSample:
    """A sample to take; its times are UNTIMED."""

    round: int
    group: str
    sample: Any


@dataclass(frozen=True)
class Abilities:
    """The properties of devices that decide which samples make sense."""

    platform: str
    num_devices: int
    devices_per_host: int
    has_fp8: bool = False
    has_cudnn: bool = False
    are_ranks: bool = False  # one process each


def planned_samples(able: Abilities, quick: bool = False) -> list[PlannedSample]:
    """All samples in order, each once."""
    of_platform = _on_gpu if able.platform == "gpu" else _on_cpu
    by_sample: dict[Any, PlannedSample] = {}
    for planned in (*_rank_links(able), *of_platform(able), *_links(able)):
        if not quick or planned.round == 0:
            by_sample.setdefault(planned.sample, planned)
    return sorted(by_sample.values(), key=lambda planned: planned.round)


def _product(round: int, dtype: str, batch: int, m: int, n: int, k: int) -> PlannedSample:
    return PlannedSample(round, "products", ProductTime(dtype, batch, m, n, k, UNTIMED))


def _grid(round: int, dtype: str, sizes: tuple[int, ...], most: float) -> Iterator[PlannedSample]:
    """All m ≥ n and k of the sizes; transposing exchanges m and n."""
    for m, n, k in pairs_of(sizes, sizes, sizes):
        if m >= n and 2.0 * m * n * k <= most:
            yield _product(round, dtype, 1, m, n, k)


def _convolutions(
    round: int, dtype: str, shapes: tuple[tuple[int, ...], ...]
) -> Iterator[PlannedSample]:
    for (images, size, into, out, window, stride), kind in pairs_of(shapes, CONVOLUTIONS):
        sample = ConvolutionTime(dtype, kind, images, size, into, out, window, stride, UNTIMED)
        yield PlannedSample(round, "convolutions", sample)


def _streams(
    round: int, sizes: tuple[int, ...], dtype: str = "float32", kinds: tuple[str, ...] = STREAMS
) -> Iterator[PlannedSample]:
    for size, kind in pairs_of(sizes, kinds):
        yield PlannedSample(round, "streams", StreamTime(kind, dtype, float(size), UNTIMED))


def _attentions(
    round: int, kind: str, dtype: str, shapes: tuple[tuple[int, int, int, int, bool], ...]
) -> Iterator[PlannedSample]:
    for batch, length, heads, dim, causal in shapes:
        sample = AttentionTime(kind, dtype, batch, length, heads, dim, causal, UNTIMED, UNTIMED)
        yield PlannedSample(round, "attentions", sample)


def _spread(*ranges: tuple[float, float]) -> Iterator[tuple[float, ...]]:
    """Points without end that fill a box evenly in logarithms: Halton's sequence."""
    bases = (2, 3, 5, 7, 11, 13)[: len(ranges)]
    for index in count(1):
        places = (_reversed_digits(index, base) for base in bases)
        yield tuple(
            low * (high / low) ** place for place, (low, high) in zip(places, ranges, strict=True)
        )


def _reversed_digits(index: int, base: int) -> float:
    """The digits of a number behind the point, the last one first."""
    value, share = 0.0, 1.0
    while index:
        share /= base
        index, digit = divmod(index, base)
        value += share * digit
    return value


def _multiple(size: float, of: int) -> int:
    return max(of, round(size / of) * of)


_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIN_FLOPS, _MAX_FLOPS, _MAX_NUMBERS = 2e9, 4e12, 1e9


def _spread_products(
    round: int, dtype: str, number: int, row_bytes: int = 16, skipped: int = 0
) -> Iterator[PlannedSample]:
    """Products that fill the space, half of them in batches. Rows of 16 bytes' multiples are the
    rule; with fewer `row_bytes`, rows of the second operand, of the first, or of both are only
    multiples of that."""
    fine, whole = max(row_bytes // _ITEM[dtype], 1), 16 // _ITEM[dtype]

    def samples() -> Iterator[PlannedSample]:
        single = _spread((1, 1), (16, 32768), (16, 32768), (16, 32768))
        batched = _spread((4, 4096), (16, 4096), (16, 4096), (16, 4096))
        for index, (batch, *sizes) in enumerate(
            chain.from_iterable(zip(single, batched, strict=False))
        ):
            batch = int(batch)
            m, n, k = (_multiple(size, 64 if size > 512 else whole) for size in sizes)
            if row_bytes < 16:
                n += fine * (index % 3 != 1)
                k += fine * (index % 3 != 0)
            numbers = batch * (m * n + n * k + m * k)
            if _MIN_FLOPS <= 2.0 * batch * m * n * k <= _MAX_FLOPS and numbers <= _MAX_NUMBERS:
                yield _product(round, dtype, batch, m, n, k)

    return islice(samples(), skipped, skipped + number)


_WINDOWS = ((3, 1), (1, 1), (3, 2), (5, 1), (4, 4), (7, 2), (2, 2), (3, 1), (16, 16))


def _spread_convolutions(
    round: int, dtype: str, number: int, skipped: int = 0
) -> Iterator[PlannedSample]:
    """Convolutions that fill the space of images, their size, and channels from one to thousands;
    windows and strides in turn. Each has its two gradients."""

    def shapes() -> Iterator[tuple[int, ...]]:
        points = _spread((4, 256), (8, 256), (1, 2048), (1, 2048))
        for index, (images, size, into, out) in enumerate(points):
            window, stride = _WINDOWS[index % len(_WINDOWS)]
            images, size = int(images), _multiple(size, max(stride, 2))
            into, out = (int(c) if c < 16 else _multiple(c, 8) for c in (into, out))
            results = images * (size // stride) ** 2
            flops = 2.0 * results * window**2 * into * out
            numbers = images * size**2 * into + results * out
            enough = size >= window and min(into, out) <= 512
            if enough and _MIN_FLOPS <= flops <= _MAX_FLOPS / 4 and numbers <= _MAX_NUMBERS / 2:
                yield images, size, into, out, window, stride

    return _convolutions(round, dtype, tuple(islice(shapes(), skipped, skipped + number)))


def _on_gpu(able: Abilities) -> Iterator[PlannedSample]:
    half, single, few = "bfloat16", "float32", "float8_e4m3fn"
    for size in (512, 1024, 2048, 4096, 8192):
        yield _product(0, half, 1, size, size, size)
    yield from _spread_products(0, half, 8)
    yield from _spread_products(0, half, 3, row_bytes=2)
    for size in (1024, 4096):
        yield _product(0, single, 1, size, size, size)
    yield from _streams(0, (256 * KIB, 16 * MIB, 512 * MIB))
    yield from _spread_convolutions(0, single, 2)
    if able.has_cudnn:
        shapes = ((16, 1024, 16, 128, True), (4, 2048, 32, 128, True))
        yield from _attentions(0, "cudnn", half, shapes)

    yield from _spread_products(1, half, 24, skipped=8)
    yield from _spread_products(1, half, 9, row_bytes=2, skipped=3)
    yield from _spread_products(1, half, 12, row_bytes=4)
    yield from _spread_products(1, single, 12)
    yield from _spread_products(1, single, 9, row_bytes=4)
    yield from _streams(1, (16 * KIB, 2 * MIB, 64 * MIB))
    kinds = ("elementwise", "reduce-last", "scatter")
    yield from _streams(1, (2 * MIB, 64 * MIB, 512 * MIB), half, kinds)
    yield from _spread_convolutions(1, single, 8, skipped=2)
    yield from _spread_convolutions(1, half, 10)
    if able.has_cudnn:
        shapes = ((8, 1024, 16, 64, True), (16, 512, 16, 64, False), (4, 1024, 16, 128, True))
        yield from _attentions(1, "cudnn", half, shapes)

    yield from _grid(2, half, (256, 1024, 4096, 16384), 1e13)
    yield from _spread_convolutions(2, single, 8, skipped=10)
    yield from _spread_convolutions(2, half, 8, skipped=10)
    yield from _grid(2, single, (512, 2048, 8192), 3e12)
    if able.has_cudnn:
        shapes = ((32, 512, 16, 64, False), (2, 8192, 16, 128, True), (32, 1024, 16, 128, True))
        yield from _attentions(2, "cudnn", half, shapes)
    yield from _streams(2, (1024 * MIB,))
    for size in (1024, 4096, 8192):
        yield _product(2, "float16", 1, size, size, size)
        if able.has_fp8:
            yield _product(2, few, 1, size, size, size)

    yield from _spread_products(3, half, 24, skipped=32)
    yield from _spread_products(3, single, 12, skipped=12)
    shapes = ((8, 1024, 16, 64, True), (16, 512, 16, 64, True), (4, 2048, 16, 64, True))
    yield from _attentions(3, "xla", half, shapes)


_CPU_CONVOLUTIONS = ((2, 16, 16, 32, 3, 1), (2, 32, 3, 16, 7, 2))
_MORE_CPU_CONVOLUTIONS = (
    (2, 8, 32, 64, 3, 1),
    (4, 16, 16, 64, 1, 1),
    (2, 16, 32, 32, 3, 2),
    (4, 8, 64, 128, 1, 1),
)


def _on_cpu(able: Abilities) -> Iterator[PlannedSample]:
    single, half = "float32", "bfloat16"
    for m, n, k in (
        (64, 64, 64),
        (256, 256, 256),
        (512, 512, 512),
        (512, 64, 256),
        (512, 1024, 128),
        (1024, 128, 512),
        (16, 256, 256),
        (256, 256, 16),
    ):
        yield _product(0, single, 1, m, n, k)
    yield _product(0, half, 1, 256, 256, 256)
    yield _product(0, single, 16, 128, 128, 32)
    yield _product(0, single, 16, 128, 32, 128)
    yield from _streams(0, (64 * KIB, 4 * MIB))
    yield from _convolutions(0, single, _CPU_CONVOLUTIONS[:1])
    yield from _attentions(0, "xla", single, ((2, 128, 4, 32, True),))

    yield from _grid(1, single, (16, 64, 256, 1024), 2.0**30)
    yield from _streams(1, (16 * KIB, 512 * KIB, 32 * MIB))
    yield from _convolutions(1, single, _CPU_CONVOLUTIONS[1:])
    for batch, length, dim in ((64, 64, 32), (8, 256, 64), (32, 32, 16)):
        yield _product(1, single, batch, length, length, dim)
        yield _product(1, single, batch, length, dim, length)

    yield from _grid(2, single, (32, 128, 512), 2.0**30)
    yield from _convolutions(2, single, _MORE_CPU_CONVOLUTIONS)
    yield from _streams(2, (64 * KIB, 4 * MIB), half, ("elementwise", "reduce-last"))
    yield from _attentions(2, "xla", single, ((2, 64, 4, 16, True), (1, 256, 4, 32, False)))
    for dtype, size in pairs_of((half, "float16"), (64, 256, 512)):
        yield _product(2, dtype, 1, size, size, size)
    yield from _streams(2, (128 * MIB,), single, ("copy", "elementwise", "reduce-last"))


def _links(able: Abilities) -> Iterator[PlannedSample]:
    if able.num_devices < 2:
        return
    top = 256 * MIB if able.platform == "gpu" else 4 * MIB
    places = tuple(placements(able.num_devices, able.devices_per_host))
    extremes = {places[0], *(place for place in places if place[0] == able.num_devices)}
    for place in places:
        first = 0 if place in extremes and not able.are_ranks else 1
        yield from _collectives(first, place, (64 * KIB, top // 4))
        yield from _collectives(max(1, first), place, (KIB, top))
        yield from _collectives(2, place, (8 * KIB, MIB))
    half = able.num_devices // 2
    same = able.devices_per_host >= able.num_devices
    for round, size in ((0, 64 * KIB), (0, top // 4), (1, KIB), (1, MIB), (2, top)):
        for pairs in sorted({1, half}):
            sample = CrossingSample(same, pairs, float(size), UNTIMED)
            yield PlannedSample(round, "crossings", sample)


def _rank_links(able: Abilities) -> Iterator[PlannedSample]:
    """Ranks are measured for their links, so those come first, on every placement. Permutations are
    rarer in plans, and depend less on the number of ranks."""
    if not able.are_ranks or able.num_devices < 2:
        return
    is_gpu = able.platform == "gpu"
    sizes = (4 * KIB, 256 * KIB, 8 * MIB, 256 * MIB) if is_gpu else (4 * KIB, 256 * KIB, 4 * MIB)
    places = tuple(placements(able.num_devices, able.devices_per_host))
    for place in reversed(places):
        is_extreme = place in (places[0], places[-1])
        kinds = COLLECTIVES if is_extreme else COLLECTIVES[:-1]
        yield from _collectives(0, place, sizes, kinds)


def _collectives(
    round: int,
    place: tuple[int, int, int],
    sizes: tuple[int, ...],
    kinds: tuple[str, ...] = COLLECTIVES,
) -> Iterator[PlannedSample]:
    for size, kind in pairs_of(sizes, kinds):
        yield PlannedSample(
            round, "collectives", CollectiveTime(kind, *place, float(size), UNTIMED)
        )

"""Times from measurements: from a `MachineProfile` to seconds for work of any size.

A function returns None if the profile has no suitable sample; the caller then falls back to the
symbolic model. `curves` interpolates samples.

Products. Rows that are no multiples of 16 bytes take slower kernels: samples of such sizes say how
much slower than one with whole rows would be, but for its beginning.

Collectives. Samples of one kind, number of ranks and placement (the stride between ranks, the ranks
per host) make a curve over bytes. A number of ranks that was not measured takes the curve of the
nearest one, with bytes scaled by the ring law. Times obey these laws, as rings do, since they are
clipped to what the laws allow:

    all-gather, reduce-scatter ≤ all-reduce ≤ reduce-scatter + all-gather + α
    all-to-all ≤ all-gather
    more bytes, and (but for all-to-all) more ranks, never cost less
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from math import gcd, log, prod
from typing import Any

import numpy as np

from autopar.cost.compute import compute_s
from autopar.cost.convolution_tiles import least_convolution_s
from autopar.cost.curves import Curve, RateTable, Slowdown
from autopar.ir.mesh import ClusterSpec
from autopar.ir.profile import ConvolutionTime, MachineProfile, ProductTime

OfSizes = Callable[[np.ndarray], np.ndarray]  # of sizes in the last dimension

_CACHED = 65536
_NEARLY = 1.02  # the smallest sample
_BEGINNING = 0.9  # share of the smallest product that starts and ends its kernel
WHOLE_ROWS = 16  # bytes that kernels load at once
# The time from one small GPU kernel of a step to the next.
USUAL_KERNEL_S = 2e-6
LOOP_KERNEL_S = 1.1e-6  # in a loop's trip, which XLA makes a CUDA graph
# By how much a step of large products of 32-bit numbers on a GPU takes longer than their samples:
# it runs for longer, at a lower clock. By 15 steps on an H200; 16-bit ones take what samples do.
SUSTAINED_32BIT = 0.08
# Types whose samples a type without its own can use, best first.
_LIKE = {
    "bfloat16": ("float16",),
    "float16": ("bfloat16",),
    "float64": (),
}
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class MeasuredCosts:
    def __init__(self, profile: MachineProfile) -> None:
        self.profile = profile
        streams: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for s in profile.streams:
            streams[s.kind, s.dtype].append((s.num_bytes, s.time.seconds))
        self._streams = {key: Curve(samples) for key, samples in streams.items()}
        # Transposing everything exchanges m and n.
        products = [
            (p.dtype, row_bytes((p.k, p.n), p.dtype), sizes, p.time.seconds)
            for p in profile.products
            for sizes in {(p.batch, p.m, p.n, p.k), (p.batch, p.n, p.m, p.k)}
        ]
        self._products = _Lazy(
            (
                (dtype, sizes, took_s)
                for dtype, rows, sizes, took_s in products
                if rows == WHOLE_ROWS
            ),
            (1, 1, 1, 1),
            (2, 1, 1, 1),
            self._least_product,
            _product_traits,
        )
        self._slow_samples: dict[tuple[str, int], list[tuple[tuple[int, ...], float]]]
        self._slow_samples = defaultdict(list)
        for dtype, rows, sizes, took_s in products:
            if rows < WHOLE_ROWS:
                self._slow_samples[dtype, rows].append((sizes, took_s))
        self._convolutions = _Lazy(
            (
                ((c.dtype, c.kind), _convolution_sizes(c), c.time.seconds)
                for c in profile.convolutions
            ),
            (1, 1, 1, 1),
            (2, 1, 1, 1),
            self._least_convolution,
            _convolution_traits,
        )
        self._attentions = _Lazy(
            (
                ((a.dtype, backward, a.causal), (a.batch * a.heads, a.length, a.head_dim), took_s)
                for a in profile.attentions
                if a.implementation == "cudnn"
                for backward, took_s in ((False, a.forward.seconds), (True, a.backward.seconds))
            ),
            (1, 2, 1),
        )
        self._collectives = _Collectives(profile)
        crossings: dict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
        for c in profile.crossings:
            crossings[c.same_host, c.num_pairs].append((c.num_bytes, c.time.seconds))
        self._transfers = {key: Curve(samples) for key, samples in crossings.items()}
        # Caches per object, so that an unused profile can be freed.
        self.product_s = lru_cache(_CACHED)(self._product_s)
        self.slow_rows = lru_cache(_CACHED)(self._slow_rows)
        self.convolution_s = lru_cache(_CACHED)(self._convolution_s)
        self.attention_s = lru_cache(_CACHED)(self._attention_s)
        self.stream = lru_cache(_CACHED)(self._stream)

    def _least_product(self, dtype: str, rate: float) -> OfSizes:
        """Multiply-adds at the highest rate, or every matrix moved once."""
        byte_s = _SIZES.get(dtype, 1) * self._byte_s

        def least(at: np.ndarray) -> np.ndarray:
            batch, m, n, k = np.moveaxis(at, -1, 0)
            return np.maximum(batch * m * n * k / rate, batch * (m * k + k * n + m * n) * byte_s)

        return least

    def _least_convolution(self, key: tuple[str, str], rate: float) -> OfSizes:
        dtype, kind = key
        return least_convolution_s(kind, _SIZES.get(dtype, 1), rate, self._byte_s)

    @property
    def _byte_s(self) -> float:
        """Of a byte in large arrays."""
        return min((c.seconds[-1] / c.sizes[-1] for c in self._streams.values()), default=0.0)

    @property
    def launch_s(self) -> float:
        return 0.0 if self.profile.launch_s is None else self.profile.launch_s.seconds

    @property
    def dispatch_s(self) -> float | None:
        return None if self.profile.dispatch_s is None else self.profile.dispatch_s.seconds

    @cached_property
    def best_rate(self) -> float | None:
        """The highest rate measured, in flops per second."""
        samples = (*self.profile.products, *self.profile.convolutions)
        return max((s.flops / s.time.seconds for s in samples), default=None)

    def _product_s(
        self, dtype: str, batch: int, m: int, n: int, k: int, rows: int = WHOLE_ROWS
    ) -> float | None:
        """`rows`: bytes that divide the rows of all three matrices; see `row_bytes`."""
        for sample_dtype in (dtype, *_LIKE.get(dtype, ())):
            if (table := self._products.get(sample_dtype)) is not None:
                slow = self.slow_rows(sample_dtype, rows)
                factor = 1.0 if slow is None else slow(batch, m, n, k)
                seconds = self._whole_rows_s(sample_dtype, table, batch, m, n, k)
                seconds += (factor - 1) * (seconds - self._unslowed_s)
                if sample_dtype == "float32" and self.profile.platform != "cpu":
                    seconds += SUSTAINED_32BIT * 2 * batch * m * n * k / self.best_32bit_rate
                return seconds
        return None

    def _whole_rows_s(self, dtype: str, table: RateTable, *sizes: float) -> float:
        """A product by the table of its type. On a GPU, one that the table prices as its smallest
        sample begins and ends as the smallest of any type, and the rest is its share of that
        sample's work."""
        seconds, flops = table(*sizes), 2.0 * prod(sizes)
        smallest = None if self.profile.platform == "cpu" else self._smallest_products.get(dtype)
        if smallest is None or flops >= smallest.flops:
            return seconds
        if seconds > _NEARLY * smallest.time.seconds:
            return seconds
        begin_s = self.least_product_s
        return begin_s + (smallest.time.seconds - begin_s) * flops / smallest.flops

    @cached_property
    def _smallest_products(self) -> dict[str, ProductTime]:
        """By type, of those with whole rows."""
        longest_first = sorted(self.profile.products, key=lambda p: -p.time.seconds)
        return {p.dtype: p for p in longest_first if row_bytes((p.k, p.n), p.dtype) == WHOLE_ROWS}

    @cached_property
    def least_product_s(self) -> float:
        """The time of the smallest product: to start a kernel, fill its pipeline, and end."""
        return min(p.time.seconds for p in self._smallest_products.values())

    def _slow_rows(self, dtype: str, rows: int) -> Slowdown | None:
        samples, table = self._slow_samples.get((dtype, rows)), self._products.get(dtype)
        if not samples or table is None:
            return None
        plain = partial(self._whole_rows_s, dtype, table)
        return Slowdown(samples, plain, self._unslowed_s)

    @cached_property
    def _unslowed_s(self) -> float:
        """Of a product, what is as long with any rows."""
        return 0.0 if self.profile.platform == "cpu" else _BEGINNING * self.least_product_s

    def _convolution_s(
        self,
        dtype: str,
        kind: str,
        images: float,
        positions: float,
        in_channels: float,
        out_channels: float,
        window: float,
    ) -> float | None:
        """`positions`: of an image's result; `window`: elements of a window."""
        for sample_dtype in (dtype, *_LIKE.get(dtype, ())):
            if (table := self._convolutions.get((sample_dtype, kind))) is not None:
                return table(images * positions, in_channels, out_channels, window)
        return None

    def _attention_s(
        self,
        dtype: str,
        backward: bool,
        causal: bool,
        heads: float,
        length: float,
        head_dim: float,
    ) -> float | None:
        """The time of one kernel; `heads` counts those of all sequences."""
        for sample_dtype in (dtype, *_LIKE.get(dtype, ())):
            for is_causal in (causal, not causal):
                if (table := self._attentions.get((sample_dtype, backward, is_causal))) is not None:
                    work = {(False, True): 0.5, (True, False): 2.0}.get((is_causal, causal), 1.0)
                    return work * table(heads, length, head_dim)
        return None

    def _stream(self, kind: str, dtype: str) -> Curve | None:
        """The curve of a kind of memory-bound work; if it was not measured, that of the type with
        the nearest element size, or of elementwise work."""
        size = _SIZES.get(dtype, 4)
        for measured_kind in (kind, "elementwise", "copy"):
            types = [d for k, d in self._streams if k == measured_kind]
            if dtype in types:
                return self._streams[measured_kind, dtype]
            if types:
                nearest = min(types, key=lambda d: abs(_SIZES.get(d, 4) - size))
                return self._streams[measured_kind, nearest]
        return None

    def kernels_s(
        self, kind: str, dtype: str, num_kernels: float, num_bytes: float, *, in_loop: bool = False
    ) -> float | None:
        """The time of kernels that move `num_bytes` together. On GPUs the values that a step reads
        were written too long ago to be cached: the rate is that of the largest sample. And a kernel
        there waits for the one before it to end, which samples of the same work again and again
        hide."""
        curve = self.stream(kind, dtype)
        if curve is None:
            return None
        if self.profile.platform == "cpu":
            min_s = num_kernels * min(curve.floor_s, self.min_kernel_s)
            return min_s + max(0.0, curve(num_bytes) - curve.floor_s)
        usual_s = LOOP_KERNEL_S if in_loop else USUAL_KERNEL_S
        min_s = num_kernels * max(self.min_kernel_s, usual_s)
        return min_s + num_bytes * curve.seconds[-1] / curve.sizes[-1]

    @cached_property
    def best_32bit_rate(self) -> float:
        """The highest of 32-bit products, in flops per second."""
        samples = (s for s in self.profile.products if s.dtype == "float32")
        return max(s.flops / s.time.seconds for s in samples)

    @cached_property
    def min_kernel_s(self) -> float:
        """The time of the smallest kernel of any kind, from small streams or else a typical one."""
        usual_s = 0.0 if self.profile.platform == "cpu" else USUAL_KERNEL_S
        min_s = min(curve.start_s for curve in self._streams.values())
        return max(self.launch_s, min_s or usual_s)

    def stream_s(self, kind: str, num_bytes: float, dtype: str = "float32") -> float | None:
        curve = self.stream(kind, dtype)
        return None if curve is None else curve(num_bytes)

    def collective_s(
        self,
        kind: str,
        ranks: int,
        stride: int,
        ranks_per_host: int,
        num_bytes: float,
        alpha_share: float = 1.0,
    ) -> float | None:
        """`num_bytes`: of the tensor on one device if nothing were split. CPU devices of a host
        share its cores: while one waits, the others compute, which is counted there. So their
        collectives cost the bytes they move, and a launch."""
        waits = self.profile.platform != "cpu" or ranks_per_host < ranks
        if waits or ranks == 1:
            return self._collectives(kind, ranks, stride, ranks_per_host, num_bytes, alpha_share)
        moved_s = self._collectives(kind, ranks, stride, ranks_per_host, num_bytes, 0.0)
        return None if moved_s is None else moved_s + self.launch_s

    def transfer_s(self, same_host: bool, num_pairs: int, num_bytes: float) -> float | None:
        """The time to send `num_bytes` from each of `num_pairs` devices to one of another mesh."""
        pairs = [n for on_host, n in self._transfers if on_host == same_host]
        if not pairs:
            return None
        nearest = min(pairs, key=lambda n: abs(log(n / max(num_pairs, 1))))
        return self._transfers[same_host, nearest](num_bytes)


def min_work_s(cluster: ClusterSpec, flops: float) -> float:
    """A lower bound on the time of so many flops on one device of the cluster."""
    symbolic_s = compute_s(cluster.spec, flops, 0.0, "bfloat16")
    best = None if cluster.measured is None else measured_costs(cluster.measured).best_rate
    return symbolic_s if best is None else flops / best


@lru_cache(maxsize=16)
def measured_costs(profile: MachineProfile) -> MeasuredCosts:
    return MeasuredCosts(profile)


class _Lazy:
    """Samples by key, turned into a `RateTable` on first use. `least_of`: from a key and the
    samples' highest rate to the least time of any sizes."""

    def __init__(
        self,
        samples: Iterable[tuple[Any, tuple[float, ...], float]],
        powers: tuple[int, ...],
        steps: tuple[int, ...] | None = None,
        least_of: Callable[[Any, float], OfSizes] | None = None,
        traits: OfSizes | None = None,
    ) -> None:
        self.samples: dict[Any, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        for key, sizes, seconds in samples:
            self.samples[key].append((sizes, seconds))
        self.powers, self.steps = powers, steps
        self.least_of, self.traits = least_of, traits
        self.tables: dict[Any, RateTable] = {}

    def get(self, key: Any) -> RateTable | None:
        if key not in self.tables and key in self.samples:
            samples, least = self.samples[key], None
            if self.least_of is not None:
                rate = max(
                    prod(size**power for size, power in zip(sizes, self.powers, strict=True)) / s
                    for sizes, s in samples
                )
                least = self.least_of(key, rate)
            self.tables[key] = RateTable(samples, self.powers, self.steps, least, self.traits)
        return self.tables.get(key)


def _product_traits(sizes: np.ndarray) -> np.ndarray:
    """Products are as fast as their results are large, their sides long and their sums deep."""
    batch, m, n, k = np.moveaxis(sizes, -1, 0)
    return np.stack([batch * m * n, np.minimum(m, n), np.maximum(m, n) ** 0.5, k], axis=-1)


def _convolution_traits(sizes: np.ndarray) -> np.ndarray:
    """Likewise; few channels are slow on either side."""
    rows, into, out, window = np.moveaxis(sizes, -1, 0)
    return np.stack([(rows * out) ** 0.5, np.minimum(into, out), into * window], axis=-1)


def row_bytes(lengths: Iterable[int], dtype: str) -> int:
    """The bytes that rows of these lengths are multiples of: 16 for whole ones, 4, or 2."""
    common = gcd(WHOLE_ROWS, *(length * _SIZES.get(dtype, 4) for length in lengths))
    return WHOLE_ROWS if common == WHOLE_ROWS else 4 if common >= 4 else 2


def _convolution_sizes(c: ConvolutionTime) -> tuple[float, ...]:
    positions = (-(-c.size // c.stride)) ** 2
    return c.images * positions, c.in_channels, c.out_channels, c.window**2


# -- collectives

_VOLUME: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n**2,
    "collective-permute": lambda n: 1.0,
}


class _Collectives:
    def __init__(self, profile: MachineProfile) -> None:
        samples: dict[tuple[str, bool], dict[tuple[int, int, int], list]] = defaultdict(
            lambda: defaultdict(list)
        )
        for c in profile.collectives:
            if c.ranks > 1:
                place = c.ranks, c.stride, c.ranks_per_host
                at_place = samples[c.kind, c.ranks_per_host < c.ranks][place]
                at_place.append((c.num_bytes, c.time.seconds))
        self.curves = {
            family: {place: Curve(at_place) for place, at_place in places.items()}
            for family, places in samples.items()
        }
        self.cached_family = lru_cache(_CACHED)(self.family)
        self.cached = lru_cache(_CACHED)(self.lawful)

    def __call__(
        self, kind: str, ranks: int, stride: int, per_host: int, num_bytes: float, share: float
    ) -> float | None:
        if ranks == 1:
            return 0.0
        place = (ranks, stride, per_host)
        seconds = self.cached(kind, place, float(num_bytes))
        if seconds is None or share == 1.0:
            return seconds
        alpha = self.cached(kind, place, 0.0)
        return seconds - (1 - share) * (alpha or 0.0)

    def lawful(self, kind: str, place: tuple[int, int, int], num_bytes: float) -> float | None:
        """The measured time, clipped to what the laws allow."""
        seconds = self.known(kind, place, num_bytes)
        if seconds is None or kind == "collective-permute":
            return seconds
        reduce_s = self.known("all-reduce", place, num_bytes) or seconds
        if kind in ("all-gather", "reduce-scatter"):
            return min(seconds, reduce_s)
        gather_s = min(self.known("all-gather", place, num_bytes) or seconds, reduce_s)
        if kind == "all-to-all":
            return min(seconds, gather_s)
        scatter_s = min(self.known("reduce-scatter", place, num_bytes) or seconds, reduce_s)
        gather_alpha = self.known("all-gather", place, 0.0) or 0.0
        reduce_alpha = self.known("all-reduce", place, 0.0) or 0.0
        return min(seconds, gather_s + scatter_s + min(gather_alpha, reduce_alpha))

    def known(self, kind: str, place: tuple[int, int, int], num_bytes: float) -> float | None:
        seconds = self.raw(kind, place, num_bytes)
        return self.by_another(kind, place, num_bytes) if seconds is None else seconds

    def by_another(self, kind: str, place: tuple[int, int, int], num_bytes: float) -> float | None:
        """The time of a kind that was not measured, by the ring law from one that was."""
        volume = _VOLUME[kind](place[0])
        for other in ("all-gather", "reduce-scatter", "all-reduce"):
            if other != kind:
                scale = volume / _VOLUME[other](place[0])
                seconds = self.raw(other, place, num_bytes * scale)
                if seconds is not None:
                    return seconds
        return None

    def raw(self, kind: str, place: tuple[int, int, int], num_bytes: float) -> float | None:
        """The time by samples of the kind itself: monotone in the number of ranks."""
        members = self.cached_family(kind, *place)
        if not members:
            return None
        ranks, volume = place[0], _VOLUME[kind]
        grows = kind not in ("all-to-all", "collective-permute")
        below = [(n, curve) for n, curve in members if n <= ranks]
        above = [(n, curve) for n, curve in members if n > ranks]
        nearest, curve = below[-1] if below else above[0]
        seconds = curve(num_bytes * volume(ranks) / volume(nearest))
        if grows:
            seconds = max([seconds, *(fewer(num_bytes) for _, fewer in below)])
            if above:
                max_s = max(other(num_bytes) for _, other in (*below, above[0]))
                seconds = min(seconds, max_s)
        return seconds

    def family(
        self, kind: str, ranks: int, stride: int, per_host: int
    ) -> tuple[tuple[int, Curve], ...]:
        """For each measured number of ranks, in ascending order, the curve of the placement nearest
        to this one."""
        places = self.curves.get((kind, per_host < ranks), {})
        nearest: dict[int, tuple[float, Curve]] = {}
        for (n, sample_stride, sample_per_host), curve in places.items():
            distance = abs(log(sample_stride / stride))
            if per_host < ranks:
                distance += 4 * abs(log(sample_per_host / per_host))
            if n not in nearest or distance < nearest[n][0]:
                nearest[n] = distance, curve
        return tuple((n, nearest[n][1]) for n in sorted(nearest))

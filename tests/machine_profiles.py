"""Machine profiles by formula: what a machine with given figures would have measured."""

from __future__ import annotations

from itertools import product

from autopar.ir.profile import (
    COLLECTIVES,
    CONVOLUTIONS,
    STREAMS,
    AttentionTime,
    CollectiveTime,
    ConvolutionTime,
    CrossingSample,
    MachineProfile,
    ProductTime,
    StreamTime,
    Timing,
)

LAUNCH_S = 3e-6
RATE = 600e12
BANDWIDTH = 4e12
LINK = 300e9
PASSES = (1e-9, 3e-9)  # seconds per square position of attention, forward and backward
VOLUME = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n**2,
    "collective-permute": lambda n: 1.0,
}


def product_s(batch: int, m: int, n: int, k: int) -> float:
    return LAUNCH_S + 2.0 * batch * m * n * k / RATE


def stream_s(num_bytes: float) -> float:
    return LAUNCH_S + num_bytes / BANDWIDTH


def collective_s(kind: str, ranks: int, num_bytes: float, alpha_s: float = 5e-6) -> float:
    return alpha_s + VOLUME[kind](ranks) * num_bytes / LINK


def machine_profile(
    kind: str = "NVIDIA H200",
    platform: str = "gpu",
    *,
    num_devices: int = 8,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    without: tuple[str, ...] = (),
    versions: dict[str, str] | None = None,
    memory_bytes: float | None = 100e9,
) -> MachineProfile:
    """`without`: parts that were not measured."""
    sizes = [64, 256, 1024, 4096, 16384]
    products = [
        ProductTime(dtype, batch, m, n, k, Timing(product_s(batch, m, n, k)))
        for dtype in dtypes
        for batch, m, n, k in (*product((1,), sizes, sizes, sizes), (64, 1024, 1024, 64))
    ]
    convolutions = [
        ConvolutionTime(dtype, kind, 32, size, c, c, 3, 1, Timing(LAUNCH_S + work(size, c) / RATE))
        for dtype, kind, size, c in product(dtypes, CONVOLUTIONS, (14, 56), (64, 256))
    ]
    streams = [
        StreamTime(kind, dtype, float(size), Timing(stream_s(size)))
        for kind, dtype, size in product(STREAMS, dtypes, [4**n for n in range(6, 16)])
    ]
    attentions = [
        AttentionTime(
            "cudnn", "bfloat16", 8, length, 16, 64, True, *(Timing(s * length**2) for s in PASSES)
        )
        for length in (512, 2048)
    ]
    ranks = [n for n in (2, 4, 8, 16) if n <= num_devices]
    collectives = [
        CollectiveTime(kind, n, stride, n, float(size), Timing(collective_s(kind, n, size)))
        for kind, n, stride, size in product(
            COLLECTIVES, ranks, (1, 2, 4), [4**n for n in range(5, 14)]
        )
        if n * stride <= num_devices
    ]
    crossings = [
        CrossingSample(True, 1, float(size), Timing(1e-5 + size / 100e9))
        for size in [4**n for n in range(5, 14)]
    ]
    parts = {
        "products": tuple(products),
        "convolutions": tuple(convolutions),
        "streams": tuple(streams),
        "attentions": tuple(attentions),
        "collectives": tuple(collectives),
        "crossings": tuple(crossings),
    }
    return MachineProfile(
        platform,
        kind,
        1,
        num_devices,
        {"jax": "0.0.1"} if versions is None else versions,
        date="2026-01-01",
        launch_s=Timing(LAUNCH_S),
        dispatch_s=Timing(1e-4),
        usable_memory_bytes=memory_bytes,
        name="formula.json",
        **{name: own for name, own in parts.items() if name not in without},
    )


def work(size: int, channels: int) -> float:
    return 2.0 * 32 * size**2 * 9 * channels**2

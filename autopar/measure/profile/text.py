"""Machine profiles as text: from a `MachineProfile` or a sample to lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from autopar.ir.profile import MachineProfile, Timing
from autopar.ir.text import format_bytes, table


def times_of(sample: Any) -> list[Timing]:
    values = [getattr(sample, part.name) for part in fields(sample)]
    return [value for value in values if isinstance(value, Timing)]


def describe(sample: Any) -> str:
    """A sample without its times, in a few words."""
    name = type(sample).__name__
    match name:
        case "ProductTime":
            batch = f"{sample.batch} × " if sample.batch > 1 else ""
            return f"{sample.dtype} product {batch}{sample.m} × {sample.k} × {sample.n}"
        case "ConvolutionTime":
            return (
                f"{sample.dtype} convolution ({sample.kind}) of {sample.images} × {sample.size}² × "
                f"{sample.in_channels} to {sample.out_channels}, window {sample.window}, stride "
                f"{sample.stride}"
            )
        case "StreamTime":
            return f"{sample.dtype} {sample.kind} of {format_bytes(sample.num_bytes)}"
        case "AttentionTime":
            return (
                f"{sample.dtype} attention ({sample.implementation}) of {sample.batch} × "
                f"{sample.heads} heads × {sample.length} × {sample.head_dim}"
            )
        case "CollectiveTime":
            return (
                f"{sample.kind} of {format_bytes(sample.num_bytes)} over {sample.ranks} ranks "
                f"{sample.stride} apart"
            )
        case _:
            return f"transfer of {sample.num_pairs} × {format_bytes(sample.num_bytes)}"


def rate_of(sample: Any) -> tuple[float, str]:
    """The rate of a sample, in FLOP/s or bytes per second."""
    seconds = times_of(sample)[0].seconds
    flops = getattr(sample, "flops", None)
    if flops is not None:
        return flops / seconds, "FLOP/s"
    if hasattr(sample, "num_bytes"):
        return sample.num_bytes / seconds, "B/s"
    flops = 4.0 * sample.batch * sample.heads * sample.length**2 * sample.head_dim
    return flops * (0.5 if sample.causal else 1.0) / seconds, "FLOP/s"


def range_line(group: str, samples: Sequence[Any]) -> str:
    """`products   16 samples   0.8 … 720 TFLOP/s   9.1 µs … 22 ms`."""
    rates = [rate_of(sample) for sample in samples]
    times = [time.seconds for sample in samples for time in times_of(sample)]
    low, high = min(rates)[0], max(rates)[0]
    unit, scale = _unit(high)
    rate = f"{low / scale:.3g} … {high / scale:.3g} {unit}{rates[0][1]}"
    count = f"{len(samples)} sample{'s' if len(samples) != 1 else ''}"
    return f"{group:13}{count:>12}   {rate:26} {_seconds(min(times))} … {_seconds(max(times))}"


def show_profile(profile: MachineProfile) -> str:
    """Where a profile was measured, the best rate of every kind, and its notes."""
    versions = ", ".join(f"{name} {number}" for name, number in profile.versions.items())
    head = (
        f"{profile.name or 'profile'}: {profile.num_hosts} × {profile.devices_per_host} "
        f"{profile.summary.device_text} ({profile.platform}), {versions}"
    )
    when = f"measured {profile.date} in {profile.seconds:.0f} s, digest {profile.digest}"
    lines = [head, when]
    if profile.launch_s is not None:
        lines.append(f"kernel launch: {_seconds(profile.launch_s.seconds)}")
    if profile.dispatch_s is not None:
        lines.append(f"program dispatch: {_seconds(profile.dispatch_s.seconds)}")
    if profile.usable_memory_bytes is not None:
        lines.append(f"usable memory per device: {format_bytes(profile.usable_memory_bytes)}")
    for group, by in (
        ("products", ("dtype",)),
        ("convolutions", ("dtype", "kind")),
        ("streams", ("dtype", "kind")),
        ("attentions", ("implementation", "dtype")),
        ("collectives", ("kind", "ranks", "stride")),
        ("crossings", ("num_pairs",)),
    ):
        lines += _section(group, getattr(profile, group), by)
    if profile.notes:
        lines += ["", "notes", *(f"  {note}" for note in profile.notes)]
    return "\n".join(lines)


def _section(group: str, samples: Sequence[Any], by: tuple[str, ...]) -> list[str]:
    if not samples:
        return ["", f"{group}: none"]
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for sample in samples:
        kinds.setdefault(tuple(getattr(sample, name) for name in by), []).append(sample)
    rows = []
    for kind, of_kind in kinds.items():
        best = max(of_kind, key=rate_of)
        rate, unit = rate_of(best)
        prefix, scale = _unit(rate)
        times = [time.seconds for sample in of_kind for time in times_of(sample)]
        noisy = sum(any(time.is_noisy for time in times_of(sample)) for sample in of_kind)
        rows.append(
            (
                *map(str, kind),
                str(len(of_kind)),
                f"up to {rate / scale:.3g} {prefix}{unit}",
                f"{_seconds(min(times))} … {_seconds(max(times))}",
                f"{noisy} noisy" if noisy else "",
            )
        )
    header = (*(name.replace("_", " ") for name in by), "samples", "rate", "time", "")
    return ["", group, *table(header, rows)]


def _unit(value: float) -> tuple[str, float]:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return prefix, scale
    return "k", 1e3


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

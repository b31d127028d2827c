"""Measurements of a machine, as data: file of `autopar profile` ↔ `MachineProfile`.

A `MachineProfile` names its hardware and versions and holds samples: the shape of some work and the
seconds it took, with the spread of the repetitions. `autopar.cost.measured` interpolates between
samples.

The file is JSON and is checked when it is read: `ProfileError` says what is wrong with one that is
cut short, of another format or has impossible values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import NoReturn

from autopar.errors import ArgumentError, ProfileError, near_names
from autopar.ir.codec import decode, encode
from autopar.ir.files import write_whole

FORMAT = 1
_KIND = "autopar machine profile"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Kinds of memory access: in order, in order with arithmetic on a few operands, sums along the last
# and the first dimension, a transposition, indexed rows.
STREAMS = ("copy", "elementwise", "reduce-last", "reduce-first", "transpose", "gather", "scatter")
CONVOLUTIONS = ("forward", "input-gradient", "kernel-gradient")
NOISY = 0.10  # a spread above this is flagged


@dataclass(frozen=True)
class Timing:
    """The median of repeated measurements, with their relative spread: the middle half of them
    lies within `spread` of the median. `num_samples` is how many there were."""

    seconds: float
    spread: float = 0.0
    num_samples: int = 1

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISY


@dataclass(frozen=True)
class ProductTime:
    """A batched matrix product: `batch` times m × k by k × n, in `dtype`."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    time: Timing

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class ConvolutionTime:
    """A 2-D convolution of images (NHWC), or one of its gradients; sizes are the forward one's."""

    dtype: str
    kind: str  # of CONVOLUTIONS
    images: int
    size: int  # height and width of the input
    in_channels: int
    out_channels: int
    window: int
    stride: int
    time: Timing

    @property
    def flops(self) -> float:
        out = -(-self.size // self.stride)
        return 2.0 * self.images * out**2 * self.window**2 * self.in_channels * self.out_channels


@dataclass(frozen=True)
class StreamTime:
    """Memory-bound work: `num_bytes` are read and written."""

    kind: str  # of STREAMS
    dtype: str
    num_bytes: float
    time: Timing


@dataclass(frozen=True)
class AttentionTime:
    """Attention of `heads` heads with `length` queries and keys, as cuDNN's kernel or as XLA
    compiles it; `backward` is the gradient alone."""

    implementation: str  # "xla" or "cudnn"
    dtype: str
    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool
    forward: Timing
    backward: Timing


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of groups of `ranks` devices `stride` apart, all groups at once. `num_bytes`: of
    the tensor on one device before the group splits it."""

    kind: str  # of COLLECTIVES
    ranks: int
    stride: int
    ranks_per_host: int
    num_bytes: float
    time: Timing


@dataclass(frozen=True)
class CrossingSample:
    """`num_bytes` from each device of one mesh to one of another, at once."""

    same_host: bool
    num_pairs: int
    num_bytes: float
    time: Timing


PARTS = ("products", "convolutions", "streams", "attentions", "collectives", "crossings")


@dataclass(frozen=True)
class GpuShare:
    """A device that is one of `num_ranks` equal shares of a GPU. They run side by side by CUDA's
    MPS, or without it take turns."""

    num_ranks: int
    mps: bool = True

    def __str__(self) -> str:
        return f"1/{self.num_ranks} share ({'MPS' if self.mps else 'taking turns'})"


@dataclass(frozen=True)
class ProfileSummary:
    """The profile that priced a plan, as plan files store it. `parts`: the kinds of work that it
    has samples of; the device's preset priced the others."""

    name: str
    digest: str
    platform: str
    device_kind: str
    versions: dict[str, str]
    parts: tuple[str, ...]
    date: str = ""
    usable_memory_bytes: float | None = None
    gpu_share: GpuShare | None = field(default=None, metadata={"omit_none": True})

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def device_text(self) -> str:
        """`NVIDIA H200`, or `NVIDIA H200, 1/8 share (MPS)`."""
        return (
            self.device_kind if self.gpu_share is None else f"{self.device_kind}, {self.gpu_share}"
        )

    @property
    def text(self) -> str:
        """`h200.json (8d3f…): NVIDIA H200, jax 0.11.2`."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        date = f", measured on {self.date}" if self.date else ""
        return f"{self.name or 'a profile'} ({self.digest}): {self.device_text}, {versions}{date}"

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(part for part in PARTS if part not in self.parts)


@dataclass(frozen=True)
class MachineProfile:
    """All samples of one machine.

    platform, device_kind:       JAX's ("gpu", "NVIDIA H200").
    num_hosts, devices_per_host: of the machine.
    versions:                    jax, jaxlib, and of a GPU its driver, CUDA and cuDNN.
    gpu_share:                   which part of a GPU a device is; None: all of it.
    launch_s:                    of one more kernel inside a program.
    dispatch_s:                  of one more program.
    usable_memory_bytes:         of one device, for a program.
    seconds, date:               how long measuring took, and when it was done.
    products, convolutions, streams, attentions, collectives, crossings: the samples of each part.
    notes:                       samples that were skipped or noisy.
    name:                        the file's, without its folder.
    """

    platform: str
    device_kind: str
    num_hosts: int
    devices_per_host: int
    versions: dict[str, str]
    date: str = ""
    seconds: float = 0.0
    launch_s: Timing | None = None
    dispatch_s: Timing | None = None
    usable_memory_bytes: float | None = None
    products: tuple[ProductTime, ...] = ()
    convolutions: tuple[ConvolutionTime, ...] = ()
    streams: tuple[StreamTime, ...] = ()
    attentions: tuple[AttentionTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    crossings: tuple[CrossingSample, ...] = ()
    notes: tuple[str, ...] = ()
    gpu_share: GpuShare | None = field(default=None, metadata={"omit_none": True})
    name: str = field(default="", compare=False, metadata={"key": None})

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(_text(self).encode()).hexdigest()[:16]

    @cached_property
    def summary(self) -> ProfileSummary:
        return ProfileSummary(
            self.name,
            self.digest,
            self.platform,
            self.device_kind,
            self.versions,
            tuple(part for part in PARTS if getattr(self, part)),
            self.date,
            self.usable_memory_bytes,
            self.gpu_share,
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | Path) -> None:
        """Written whole or not at all."""
        try:
            write_whole(path, _text(self, indent=1) + "\n")
        except OSError as error:
            raise ProfileError(f"{path}: the profile cannot be written: {error}") from error


SHIPPED = Path(__file__).parent / "profiles"
# The table of each GPU that one comes for, by its preset. CPUs differ too much to share one.
SHIPPED_FOR = {"h200-sxm": "h200"}


def find_profile(given: object) -> MachineProfile:
    """A profile by the path of its file, or by the name of one that comes with autopar."""
    if isinstance(given, MachineProfile):
        return given
    if not isinstance(given, (str, Path)) or not str(given):
        raise ArgumentError(
            f"profile={given!r}: needs the path of a file that `autopar profile` wrote, the name "
            "of a table that comes with autopar, or an autopar.MachineProfile."
        )
    if given in shipped_profiles():
        return load_profile(given)
    if isinstance(given, str) and given.isidentifier() and not Path(given).exists():
        names = shipped_profiles()
        raise ProfileError(
            f"profile={given!r}: there is no such table{near_names(given, names)}. There are "
            f"{', '.join(names) or 'none'}; a path names a file, such as ./{given}.json."
        )
    return load_profile(given)


def restored_profile(summary: ProfileSummary) -> MachineProfile | ProfileSummary:
    """The profile of a plan file's summary, if it comes with autopar and is unchanged."""
    name = summary.name.removesuffix(".json")
    if name in shipped_profiles() and (shipped := find_profile(name)).digest == summary.digest:
        return shipped
    return summary


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


@lru_cache(maxsize=16)
def _read(path: Path, changed: float) -> MachineProfile:
    """One object per file while it is unchanged, so that caches of its curves stay valid."""
    del changed
    return parse_profile(path.read_text(encoding="utf-8"), path.name)


def load_profile(path: str | Path) -> MachineProfile:
    """The profile in the file at `path` that `autopar profile` wrote, or the one of this name that
    comes with autopar (such as "h200"); `ProfileError` if it is missing, cut short, of another
    format, or has figures that cannot be."""
    if path in shipped_profiles():
        path = SHIPPED / f"{path}.json"
    path = Path(path)
    try:
        return _read(path.absolute(), path.stat().st_mtime)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"profile={str(path)!r}: cannot be read ({error}). Measure this machine with "
            f"`autopar profile --output {path.name}`."
        ) from error


def parse_profile(text: str, name: str) -> MachineProfile:
    """A profile from the text of its file."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"profile {name}: is no JSON ({error}); it may be cut short. Measure again with "
            "`autopar profile`."
        ) from error
    if not isinstance(body, dict) or body.pop("kind", None) != _KIND:
        raise ProfileError(f"profile {name}: is no machine profile of `autopar profile`.")
    if (given := body.pop("format", None)) != FORMAT:
        raise ProfileError(
            f"profile {name}: has format {given!r}; this autopar reads {FORMAT}. Measure again "
            "with `autopar profile`."
        )
    try:
        profile = replace(decode(MachineProfile, body), name=name)
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"profile {name}: {error}. Measure again with `autopar profile`."
        ) from error
    check_profile(profile)
    return profile


def check_profile(profile: MachineProfile) -> None:
    """Raises `ProfileError` for impossible values."""

    def refuse(what: str) -> NoReturn:
        raise ProfileError(f"profile {profile.name}: {what}. Measure again with `autopar profile`.")

    def check(where: str, timing: Timing) -> None:
        if not (0 < timing.seconds < inf and 0 <= timing.spread < inf and timing.num_samples > 0):
            refuse(f"{where}: {timing} cannot have been measured")

    for name, kinds in (
        ("convolutions", CONVOLUTIONS),
        ("streams", STREAMS),
        ("collectives", COLLECTIVES),
    ):
        for index, sample in enumerate(getattr(profile, name)):
            if sample.kind not in kinds:
                refuse(f"{name}[{index}].kind: {sample.kind!r} is none of {kinds}")
    for name in PARTS:
        for index, sample in enumerate(getattr(profile, name)):
            for part in fields(sample):
                value, where = getattr(sample, part.name), f"{name}[{index}].{part.name}"
                if isinstance(value, Timing):
                    check(where, value)
                elif isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                    refuse(f"{where}: {value} is not more than 0")
    if profile.gpu_share is not None and profile.gpu_share.num_ranks < 1:
        refuse(f"gpu_share.num_ranks: {profile.gpu_share.num_ranks} is not 1 or more")
    for name in ("num_hosts", "devices_per_host"):
        if getattr(profile, name) < 1:
            refuse(f"{name}: {getattr(profile, name)} is not 1 or more")
    for name in ("launch_s", "dispatch_s"):
        if (timing := getattr(profile, name)) is not None:
            check(name, timing)
    if profile.usable_memory_bytes is not None and not 0 < profile.usable_memory_bytes < inf:
        refuse(f"usable_memory_bytes: {profile.usable_memory_bytes} cannot be")


def _text(profile: MachineProfile, indent: int | None = None) -> str:
    head = {"kind": _KIND, "format": FORMAT}
    return json.dumps({**head, **encode(profile)}, indent=indent)

"""The data between segment passes, and its JSON files, which are checked when read.

    analysis.json   `Analysis`: segments, their spaces and leading combinations, per mesh
    profile.json    `SegmentProfile`: what each combination and each resharding took
    plan.json       a `ParallelPlan`, written by the search

A combination is a strategy for every node of a segment, given by the factor of the node's rule on
each mesh axis, so it stays valid when the step is traced again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from autopar.errors import ProfileError
from autopar.ir.codec import decode, encode
from autopar.ir.files import write_whole
from autopar.ir.profile import Timing
from autopar.ir.spec import Layout

FORMAT = 1
_KINDS = {"analysis": "autopar segment analysis", "profile": "autopar segment profile"}


@dataclass(frozen=True)
class Combination:
    """`factors`: per node, the factor on each mesh axis (see `Strategy`). `symbolic_s`: predicted
    for one occurrence, including `communication_s`. `words`: how its products are split; `why`:
    why it was kept."""

    factors: tuple[tuple[int, ...], ...]
    symbolic_s: float
    communication_s: float
    boundary: str
    words: str
    why: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.factors).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SegmentSpace:
    """A unique segment on one mesh. `parts`: its occurrences, by number and in the order of the
    step. `entries`: operators at which its blocks begin, with how many strategies each has;
    `num_strategies` is the product of these. `key`: of its program and graph."""

    name: str
    key: str
    parts: tuple[int, ...]
    num_equations: int
    num_nodes: int
    num_blocks: int
    entries: tuple[tuple[str, int], ...]
    num_strategies: float
    combinations: tuple[Combination, ...]


@dataclass(frozen=True)
class MeshSpace:
    """`symbolic_s`: the predicted step of the cost model's plan on this mesh."""

    shape: tuple[int, ...]
    symbolic_s: float
    segments: tuple[SegmentSpace, ...]


@dataclass(frozen=True)
class Analysis:
    """`program`: the step's fingerprint; `parts`: the names of all occurrences in order."""

    step: str
    program: str
    jax_version: str
    device: str
    parts: tuple[str, ...]
    meshes: tuple[MeshSpace, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class CombinationTime:
    """The timing of a combination. `time` is None if it ran out of memory, as `failure` says.
    `memory_bytes`: the peak per device according to XLA."""

    segment: str  # its key
    mesh: tuple[int, ...]
    combination: str  # its digest
    time: Timing | None
    memory_bytes: float
    compile_s: float
    failure: str = ""


@dataclass(frozen=True)
class ReshardTime:
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout
    time: Timing


@dataclass(frozen=True)
class DispatchTime:
    """The time of a program that takes a segment's arguments and does nothing; with an empty key,
    one array."""

    segment: str
    mesh: tuple[int, ...]
    time: Timing


@dataclass(frozen=True)
class SegmentProfile:
    """All times, of one program on one kind of device."""

    program: str
    device_kind: str
    versions: dict[str, str]
    combinations: tuple[CombinationTime, ...] = ()
    reshards: tuple[ReshardTime, ...] = ()
    dispatches: tuple[DispatchTime, ...] = ()
    seconds: float = 0.0

    def with_sample(self, sample: CombinationTime | ReshardTime | DispatchTime) -> SegmentProfile:
        """With another sample, which replaces an earlier one of the same combination."""
        match sample:
            case CombinationTime():
                same = (sample.segment, sample.mesh, sample.combination)
                kept = [s for s in self.combinations if (s.segment, s.mesh, s.combination) != same]
                return replace(self, combinations=(*kept, sample))
            case ReshardTime():
                return replace(self, reshards=(*self.reshards, sample))
            case DispatchTime():
                return replace(self, dispatches=(*self.dispatches, sample))

    @property
    def timings(self) -> list[Timing]:
        times = [s.time for s in self.combinations if s.time is not None]
        return [*times, *(s.time for s in self.reshards), *(s.time for s in self.dispatches)]


def save(document: Analysis | SegmentProfile, path: Path) -> None:
    """Written whole or not at all."""
    kind = _KINDS["analysis" if isinstance(document, Analysis) else "profile"]
    text = json.dumps({"kind": kind, "format": FORMAT, **encode(document)}, separators=(",", ":"))
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error}") from error


def load_analysis(path: Path) -> Analysis:
    analysis: Analysis = _load(path, "analysis", Analysis)
    axes_fit = all(
        len(factors) == len(mesh.shape)
        for mesh in analysis.meshes
        for segment in mesh.segments
        for combination in segment.combinations
        for factors in combination.factors
    )
    if not axes_fit:
        raise _unusable(path, "a combination has another number of axes than its mesh", "analysis")
    return analysis


def load_segment_profile(path: Path) -> SegmentProfile:
    profile: SegmentProfile = _load(path, "profile", SegmentProfile)
    for timing in profile.timings:
        if not (0 < timing.seconds < inf and 0 <= timing.spread < inf and timing.num_samples > 0):
            raise _unusable(path, f"{timing} cannot have been measured", "profile")
    return profile


def _load(path: Path, name: str, kind: Any) -> Any:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"{path}: cannot read the file ({error}). Run the {name} pass first: "
            f"autopar profile --model … --passes {name} --folder {path.parent}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"not JSON ({error}); it may be truncated", name) from error
    if not isinstance(body, dict) or body.pop("kind", None) != _KINDS[name]:
        raise _unusable(path, f"not an {_KINDS[name]}", name)
    if (given := body.pop("format", None)) != FORMAT:
        raise _unusable(path, f"has format {given!r}; this autopar reads {FORMAT}", name)
    try:
        return decode(kind, body)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, str(error), name) from error


def _unusable(path: Path, why: str, name: str) -> ProfileError:
    return ProfileError(f"{path}: {why}. Remove the file and run the {name} pass again.")

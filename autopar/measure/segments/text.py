"""The results of the segment passes as text: from `Analysis`, `SegmentProfile`, `SearchResult`."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.inspect.lines import mesh_text
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, format_seconds, table
from autopar.measure.segments.files import (
    Analysis,
    CombinationTime,
    DispatchTime,
    MeshSpace,
    ReshardTime,
    SegmentProfile,
    SegmentSpace,
)
from autopar.measure.segments.search_segments import FoundCombination, SearchResult

_ENTRIES = 12  # operators to list


def analysis_text(analysis: Analysis) -> str:
    """Segments with their blocks, strategies and kept combinations."""
    lines = []
    for space in analysis.meshes:
        lines += _mesh_lines(analysis, space)
    lines.append(f"analysed in {format_seconds(analysis.seconds)}")
    return "\n".join(lines)


def _mesh_lines(analysis: Analysis, space: MeshSpace) -> Iterator[str]:
    num = len(analysis.parts)
    yield (
        f"{analysis.step} on {mesh_text(space.shape)}: {num} segments, {len(space.segments)} "
        f"of them unique; the cost model's plan takes {format_seconds(space.symbolic_s)}"
    )
    rows = [
        (
            letter,
            segment.name,
            f"{len(segment.parts)}×",
            str(segment.num_equations),
            str(segment.num_blocks),
            _count(segment.num_strategies),
            str(len(segment.combinations)),
        )
        for letter, segment in _lettered(space)
    ]
    header = ("", "segment", "occurs", "equations", "blocks", "strategies", "kept")
    yield from table(header, rows)
    for letter, segment in _lettered(space):
        yield ""
        yield from _segment_lines(letter, segment)
    yield ""


def _segment_lines(letter: str, segment: SegmentSpace) -> Iterator[str]:
    yield f"{letter}  {segment.name}: block entries"
    for name, count in segment.entries[:_ENTRIES]:
        yield f"     {name}: {count} strategies"
    if len(segment.entries) > _ENTRIES:
        yield f"     and {len(segment.entries) - _ENTRIES} more"
    pruned = segment.num_strategies - len(segment.combinations)
    yield (
        f"   {_count(segment.num_strategies)} combinations, of which the cost model pruned "
        f"{_count(max(pruned, 0.0))}; kept:"
    )
    yield from (
        f"   {line}"
        for line in table(
            ("", "predicted", "communication", "boundary", "forward products", "reason"),
            [
                (
                    f"{letter}{number}",
                    format_seconds(c.symbolic_s),
                    format_seconds(c.communication_s),
                    c.boundary,
                    _short(c.words),
                    c.why,
                )
                for number, c in enumerate(segment.combinations, 1)
            ],
        )
    )


def sample_text(what: str, sample: CombinationTime | ReshardTime | DispatchTime) -> str:
    """One line."""
    if sample.time is None:
        assert isinstance(sample, CombinationTime)
        return f"  {what}: does not fit ({sample.failure})"
    text = f"  {what}: {format_seconds(sample.time.seconds)}"
    if sample.time.is_noisy:
        text += f" ± {sample.time.spread:.0%} (noisy; is the machine busy?)"
    if isinstance(sample, CombinationTime):
        text += f", {format_bytes(sample.memory_bytes)}, compiled in {sample.compile_s:.1f} s"
    return text


def profile_text(analysis: Analysis, profile: SegmentProfile) -> str:
    """Measured and predicted times by segment, and a summary."""
    lines: list[str] = []
    for space in analysis.meshes:
        taken = {
            (s.segment, s.combination): s for s in profile.combinations if s.mesh == space.shape
        }
        for letter, segment in _lettered(space):
            lines.append(
                f"{letter}  {segment.name} ({len(segment.parts)}×) on {_shape(space.shape)}"
            )
            rows = []
            for number, c in enumerate(segment.combinations, 1):
                sample = taken.get((segment.key, c.digest))
                rows.append(
                    (
                        f"{letter}{number}",
                        _measured(sample),
                        format_seconds(c.symbolic_s),
                        "-" if sample is None else format_bytes(sample.memory_bytes),
                        c.boundary,
                        _short(c.words),
                    )
                )
            header = ("", "measured", "predicted", "memory", "boundary", "forward products")
            lines += [f"   {line}" for line in table(header, rows)]
            lines.append("")
    timings = profile.timings
    noisy = sum(t.is_noisy for t in timings)
    lines.append(
        f"{len(profile.combinations)} combinations and {len(profile.reshards)} reshardings timed "
        f"in {format_seconds(profile.seconds)}, including "
        f"{format_seconds(sum(s.compile_s for s in profile.combinations))} of compiling in this "
        f"process; {noisy} of {len(timings)} samples are noisy"
    )
    return "\n".join(lines)


def search_text(analysis: Analysis, result: SearchResult) -> str:
    best = result.best
    space = next(mesh for mesh in analysis.meshes if mesh.shape == best.mesh)
    lines = [
        f"best of {_count(result.num_choices)} plans by measured times: "
        f"{format_seconds(best.step_s)} per step on {mesh_text(best.mesh)}",
        f"  {_chosen(space, best)}",
        f"  including {format_seconds(best.reshard_s)} of resharding between segments; "
        f"{format_bytes(best.peak_bytes)} per device",
        f"  the cost model predicts {format_seconds(best.symbolic_s)} for this plan and "
        f"{format_seconds(space.symbolic_s)} for its own best",
    ]
    if result.others:
        lines.append("runners-up:")
        for other in result.others:
            mesh = next(s for s in analysis.meshes if s.shape == other.mesh)
            lines.append(
                f"  {format_seconds(other.step_s)} ({other.step_s / best.step_s:.2f}×) on "
                f"{mesh_text(other.mesh)}: {_chosen(mesh, other)}"
            )
    return "\n".join(lines)


def checked_text(plan: ParallelPlan) -> str:
    """The times of whole steps, which check the search."""
    assert plan.search is not None
    lines = ["timed as whole steps:"]
    for trial in plan.search.tried:
        took = "does not fit" if trial.measured_s is None else format_seconds(trial.measured_s)
        kept = " (kept)" if trial.is_chosen else ""
        lines.append(f"  {took}, predicted {format_seconds(trial.predicted_s)}: {trial.what}{kept}")
    return "\n".join(lines)


def _chosen(space: MeshSpace, combination: FoundCombination) -> str:
    """`A1, 4 × B2, C1`: combinations in the order of the step."""
    names = {}
    for letter, segment in _lettered(space):
        for part in segment.parts:
            names[part] = f"{letter}{combination.choice[part] + 1}"
    runs: list[list] = []
    for part in sorted(names):
        if runs and runs[-1][0] == names[part]:
            runs[-1][1] += 1
        else:
            runs.append([names[part], 1])
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in runs)


def _lettered(space: MeshSpace) -> Iterator[tuple[str, SegmentSpace]]:
    for number, segment in enumerate(space.segments):
        yield chr(ord("A") + number) if number < 26 else f"S{number}.", segment


def _measured(sample: CombinationTime | None) -> str:
    if sample is None:
        return "not timed"
    if sample.time is None:
        return "does not fit"
    noisy = f" ± {sample.time.spread:.0%}" if sample.time.is_noisy else ""
    return format_seconds(sample.time.seconds) + noisy


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number:.1e}"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _short(words: str, most: int = 72) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"

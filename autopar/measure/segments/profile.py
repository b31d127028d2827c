"""The second pass: every combination of every unique segment compiled and timed on real devices.

    PreparedStep, Analysis, devices → SegmentProfile

`compile_ahead` may compile programs in other processes, into a cache; then they are timed one after
another. The fastest combinations of a segment are timed again in turns, so that a temporary load
does not decide between them. Reshardings between segments are timed once per (shape, type, source,
target). `keep` receives samples as they come, so an interrupted run can continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import jax

from autopar.errors import ProfileError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.profile import Timing
from autopar.ir.spec import NodeLayouts
from autopar.measure.segments.analyse import PreparedStep
from autopar.measure.segments.boundaries import Reshard, reshards
from autopar.measure.segments.combine import layouts_of, part_problem
from autopar.measure.segments.files import (
    Analysis,
    CombinationTime,
    DispatchTime,
    MeshSpace,
    ReshardTime,
    SegmentProfile,
    SegmentSpace,
)
from autopar.measure.segments.run import (
    Runnable,
    empty_program,
    jax_mesh,
    reshard_program,
    segment_program,
)
from autopar.measure.time_step import StepTiming, time_executable
from autopar.progress import Progress

LIMIT_S = 2.0  # for repeating one program
NEAR = 1.3  # combinations within this factor of the best are timed again
MAX_LEADING = 6
ROUNDS = 3
RESHARD_ROUNDS = 2
ONE_ARRAY = ""  # instead of a segment's key: a program with one array
Sample = CombinationTime | ReshardTime | DispatchTime


@dataclass(frozen=True)
class TimingTask:
    """A program to compile, by its indices in the analysis."""

    mesh: int
    segment: int
    combination: int


def new_profile(step: PreparedStep, devices: Sequence[Any]) -> SegmentProfile:
    versions = {"jax": jax.__version__, "jaxlib": version("jaxlib")}
    return SegmentProfile(step.fingerprint, devices[0].device_kind, versions)


def check_profile_fits(
    profile: SegmentProfile, step: PreparedStep, devices: Sequence[Any], file: str
) -> None:
    """Raise if a profile is of another program, device or version."""
    step.check_same("", profile.program, file)
    here = new_profile(step, devices)
    differing = [
        f"{name} was {old} and is now {new}"
        for name, old, new in (
            ("device", profile.device_kind, here.device_kind),
            *((n, profile.versions.get(n, "unknown"), v) for n, v in here.versions.items()),
        )
        if old != new
    ]
    if differing:
        raise ProfileError(
            f"{file}: {'; '.join(differing)}. Remove the file and run the profile pass again, or "
            "give another --folder."
        )


def segment_layouts(
    step: PreparedStep, mesh: LogicalMesh, space: SegmentSpace
) -> list[tuple[NodeLayouts, ...]]:
    """The layouts of every node, per combination."""
    part = step.cut.parts[space.parts[0]]
    problem = part_problem(part, mesh)
    layouts = [layouts_of(problem, c.factors) for c in space.combinations]
    if part.key != space.key or None in layouts:
        raise ProfileError(
            f"analysis.json: the segment {space.name} has changed; another version of autopar may "
            "have written the file. Run the analysis pass again."
        )
    return [nodes for nodes in layouts if nodes is not None]


def profile_segments(
    step: PreparedStep,
    analysis: Analysis,
    devices: Sequence[Any],
    *,
    known: SegmentProfile | None = None,
    keep: Callable[[SegmentProfile], Any] = lambda profile: None,
    tell: Callable[[str, Sample], Any] = lambda what, sample: None,
    compile_ahead: Callable[[list[TimingTask]], Any] | None = None,
    limit_s: float = LIMIT_S,
) -> SegmentProfile:
    """`known`: samples of an earlier run; `tell` is called with each new one."""
    started = time.perf_counter()
    profile = known or new_profile(step, devices)
    before_s = profile.seconds
    have = {(s.segment, s.mesh, s.combination) for s in profile.combinations}
    tasks = [
        TimingTask(m, s, c)
        for m, mesh in enumerate(analysis.meshes)
        for s, segment in enumerate(mesh.segments)
        for c, combination in enumerate(segment.combinations)
        if (segment.key, mesh.shape, combination.digest) not in have
    ]
    if compile_ahead is not None and tasks:
        compile_ahead(tasks)
    with Progress("timing segments", max(1, len(tasks))) as progress:
        for space in analysis.meshes:
            for what, sample in _Timer(step, space, devices, profile, limit_s).samples():
                profile = replace(
                    profile.with_sample(sample), seconds=before_s + time.perf_counter() - started
                )
                keep(profile)
                tell(what, sample)
                if isinstance(sample, CombinationTime) and "again" not in what:
                    progress.step()
    return profile


class _Timer:
    """Times what the profile lacks for one mesh."""

    def __init__(
        self,
        step: PreparedStep,
        space: MeshSpace,
        devices: Sequence[Any],
        profile: SegmentProfile,
        limit_s: float,
    ) -> None:
        self.step, self.space, self.limit_s = step, space, limit_s
        self.mesh = step.mesh(space.shape)
        self.on = jax_mesh(self.mesh, devices)
        shape = self.mesh.shape
        self.known = {
            (s.segment, s.combination): s for s in profile.combinations if s.mesh == shape
        }
        self.calls = {s.segment for s in profile.dispatches if s.mesh == shape}
        self.moved = {
            Reshard(s.shape, s.dtype, s.source, s.target)
            for s in profile.reshards
            if s.mesh == shape
        }

    def samples(self) -> Iterator[tuple[str, Sample]]:
        every = []
        for segment in self.space.segments:
            layouts = segment_layouts(self.step, self.mesh, segment)
            every.append(layouts)
            if any((segment.key, c.digest) not in self.known for c in segment.combinations):
                yield from self.of_segment(segment, layouts)
        yield from self.of_reshards(reshards(self.step.cut, self.space, every))

    def of_segment(
        self, segment: SegmentSpace, layouts: Sequence[Sequence[NodeLayouts]]
    ) -> Iterator[tuple[str, Sample]]:
        part = self.step.cut.parts[segment.parts[0]]
        state, shape = part.graph.state, self.mesh.shape
        programs = [segment_program(part, self.mesh, nodes, self.on) for nodes in layouts]
        if segment.key not in self.calls:
            handed = [(i, n) for n, (i, _) in enumerate(state)]
            timing = _timed(empty_program(programs[0], state), handed, self.limit_s)
            if timing.step is not None:
                call = DispatchTime(segment.key, shape, timing.step)
                yield f"dispatch of {segment.name}", call
        first: dict[int, CombinationTime] = {}
        for number, combination in enumerate(segment.combinations):
            if (segment.key, combination.digest) in self.known:
                first[number] = self.known[segment.key, combination.digest]
                continue
            timing = _timed(programs[number], state, self.limit_s)
            first[number] = CombinationTime(
                segment.key,
                shape,
                combination.digest,
                timing.step,
                timing.memory_bytes,
                timing.compile_s,
                timing.failure,
            )
            yield f"{segment.name}, {number + 1} of {len(segment.combinations)}", first[number]
        for number, sample in self.in_turns(first, programs, state):
            yield f"{segment.name}, {number + 1} again", sample

    def in_turns(
        self,
        first: Mapping[int, CombinationTime],
        programs: Sequence[Runnable],
        state: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[int, CombinationTime]]:
        """Time the leading combinations again in turns. The fastest round counts, since
        disturbances only make it longer."""
        taken = {n: s.time for n, s in first.items() if s.time is not None}
        if len(taken) < 2:
            return
        best_s = min(time.seconds for time in taken.values())
        near = [n for n in taken if taken[n].seconds <= NEAR * best_s or taken[n].is_noisy]
        leading = sorted(near, key=lambda n: taken[n].seconds)[:MAX_LEADING]
        if len(leading) < 2:
            return
        for _ in range(ROUNDS):
            for number in leading:
                timing = time_executable(programs[number], state=state, limit_s=self.limit_s / 2)
                if timing.step is not None and timing.step.seconds < taken[number].seconds:
                    taken[number] = timing.step
        for number in leading:
            yield number, replace(first[number], time=taken[number])

    def of_reshards(self, moves: Sequence[Reshard]) -> Iterator[tuple[str, Sample]]:
        mesh, shape, limit_s = self.mesh, self.mesh.shape, self.limit_s / 2
        if moves and ONE_ARRAY not in self.calls:
            move = moves[0]
            program = reshard_program(
                mesh, move.shape, move.dtype, move.source, move.source, self.on
            )
            timing = _timed(empty_program(program, ()), (), limit_s)
            if timing.step is not None:
                yield "dispatch with one array", DispatchTime(ONE_ARRAY, shape, timing.step)
        best_times: dict[Reshard, Timing] = {}
        left = [move for move in moves if move not in self.moved]
        programs = {
            move: reshard_program(mesh, move.shape, move.dtype, move.source, move.target, self.on)
            for move in left
        }
        for _ in range(RESHARD_ROUNDS):
            for move, program in programs.items():
                timing = _timed(program, (), limit_s)
                if timing.step is None:
                    raise ProfileError(
                        f"{program.name} ran out of memory: {timing.failure}. Use a smaller batch."
                    )
                before = best_times.get(move, timing.step)
                best_times[move] = min(before, timing.step, key=lambda time: time.seconds)
        for move, best in best_times.items():
            sample = ReshardTime(shape, move.shape, move.dtype, move.source, move.target, best)
            yield programs[move].name, sample


def _timed(program: Runnable, state: Sequence[tuple[int, int]], limit_s: float) -> StepTiming:
    """A timing; if it is noisy, the steadier of two."""
    timing = time_executable(program, state=state, limit_s=limit_s)
    if timing.step is None or not timing.step.is_noisy:
        return timing
    again = time_executable(program, state=state, limit_s=limit_s)
    if again.step is None or again.step.spread >= timing.step.spread:
        return timing
    return replace(timing, step=again.step)


def program_of_task(
    step: PreparedStep, analysis: Analysis, task: TimingTask, devices: Sequence[Any]
) -> Runnable:
    """The program that will be timed, for a process that compiles it ahead."""
    space = analysis.meshes[task.mesh]
    mesh = step.mesh(space.shape)
    segment = space.segments[task.segment]
    part = step.cut.parts[segment.parts[0]]
    only = replace(segment, combinations=(segment.combinations[task.combination],))
    (layouts,) = segment_layouts(step, mesh, only)
    return segment_program(part, mesh, layouts, jax_mesh(mesh, devices))

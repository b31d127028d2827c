"""The three passes over a model's segments, each from files to a file in one folder.

    analysis   the step                     → analysis.json
    profile    analysis.json, devices       → profile.json   (and a cache of compiled programs)
    search     analysis.json, profile.json  → plan.json

The passes may run in one process or in several. Each reads the files of earlier passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.mesh import ClusterSpec
from autopar.measure.rerank import fastest
from autopar.measure.segments import text
from autopar.measure.segments.analyse import PreparedStep, analyse
from autopar.measure.segments.combine import TOP
from autopar.measure.segments.files import (
    Analysis,
    SegmentProfile,
    load_analysis,
    load_segment_profile,
    save,
)
from autopar.measure.segments.profile import (
    LIMIT_S,
    TimingTask,
    check_profile_fits,
    profile_segments,
)
from autopar.measure.segments.run import compilation_cache_in
from autopar.measure.segments.search_segments import SearchResult, search
from autopar.methods import ShardParallel
from autopar.progress import Progress
from autopar.tracer.trace import StepOptions, trace

PASSES = ("analysis", "profile", "search")
ANALYSIS, PROFILE, PLAN, CACHE = "analysis.json", "profile.json", "plan.json", "compiled"


def prepare_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: ClusterSpec,
    mesh_shape: tuple[int, ...] | str = "auto",
    options: StepOptions | None = None,
) -> PreparedStep:
    """`mesh_shape`: of the one mesh to analyse, or "auto" for all meshes of the cluster."""
    with Progress("tracing"):
        traced = trace(fn, args, kwargs, options or StepOptions())
    return PreparedStep(traced, cluster, ShardParallel(mesh_shape=mesh_shape))  # type: ignore[arg-type]


def run_passes(
    step: PreparedStep,
    folder: Path,
    devices: Sequence[Any],
    *,
    passes: Sequence[str] = PASSES,
    top: int = TOP,
    limit_s: float = LIMIT_S,
    compile_ahead: Callable[[list[TimingTask]], Any] | None = None,
    check: int = 0,
    say: Callable[[str], Any] = lambda words: None,
) -> SearchResult | None:
    """Run some passes and return the result of the search, if it is one of them.

    compile_ahead: compiles programs before they are timed.
    check:         time this many of the best plans, and the cost model's, as whole steps, and keep
                   the fastest.
    say:           is called with the text of each result.
    """
    unknown = [name for name in passes if name not in PASSES]
    if unknown or not passes:
        raise ArgumentError(
            f"passes={','.join(passes)}: unknown or empty; choose from {', '.join(PASSES)}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if "analysis" in passes:
        analysis = analyse(step, top=top)
        save(analysis, folder / ANALYSIS)
        say(text.analysis_text(analysis))
    else:
        analysis = load_analysis(folder / ANALYSIS)
        step.check_same(analysis.step, analysis.program, str(folder / ANALYSIS))
    if "profile" in passes:
        profile = _profile(step, analysis, folder, devices, limit_s, compile_ahead, say)
        say(text.profile_text(analysis, profile))
    if "search" not in passes:
        return None
    profile = load_segment_profile(folder / PROFILE)
    check_profile_fits(profile, step, devices, str(folder / PROFILE))
    result = search(step, analysis, profile, num_candidates=check)
    say(text.search_text(analysis, result))
    if result.candidates:
        planned = fastest(result.candidates, devices).planned
        say(text.checked_text(planned.plan))
        result = replace(result, planned=planned)
    result.planned.plan.save(folder / PLAN)
    return result


def _profile(
    step: PreparedStep,
    analysis: Analysis,
    folder: Path,
    devices: Sequence[Any],
    limit_s: float,
    compile_ahead: Callable[[list[TimingTask]], Any] | None,
    say: Callable[[str], Any],
) -> SegmentProfile:
    earlier = None
    if (folder / PROFILE).exists():
        earlier = load_segment_profile(folder / PROFILE)
        check_profile_fits(earlier, step, devices, str(folder / PROFILE))
    with compilation_cache_in(folder / CACHE):
        return profile_segments(
            step,
            analysis,
            devices,
            known=earlier,
            keep=lambda profile: save(profile, folder / PROFILE),
            tell=lambda what, sample: say(text.sample_text(what, sample)),
            compile_ahead=compile_ahead,
            limit_s=limit_s,
        )

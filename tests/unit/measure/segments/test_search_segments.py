"""The search against brute force, with times at random."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from autopar.errors import MemoryBudgetError, ProfileError
from autopar.ir.plan import ParallelPlan
from autopar.measure.segments.boundaries import crossings
from autopar.measure.segments.files import Analysis, SegmentProfile
from autopar.measure.segments.profile import segment_layouts
from autopar.measure.segments.search_segments import search
from autopar.measure.segments.text import search_text
from tests.unit.measure.segments.steps import analysed, prepared, random_profile


def brute_force(step, analysis: Analysis, profile: SegmentProfile) -> float:
    """The cheapest of all choices, without the call."""
    (space,) = analysis.meshes
    mesh = step.mesh(space.shape)
    layouts = [segment_layouts(step, mesh, own) for own in space.segments]
    segment_of = {p: n for n, own in enumerate(space.segments) for p in own.parts}
    calls = {s.segment: s.time.seconds for s in profile.dispatches}
    taken = {
        (s.segment, s.combination): inf if s.time is None else s.time.seconds - calls[s.segment]
        for s in profile.combinations
    }
    moved = {(s.shape, s.source, s.target): s.time.seconds - calls[""] for s in profile.reshards}
    crossing = list(crossings(step.cut, space, layouts))
    parts = sorted(segment_of)
    best = inf
    for choice in product(*(range(len(layouts[segment_of[p]])) for p in parts)):
        total = 0.0
        for part, own in zip(parts, choice, strict=True):
            segment = space.segments[segment_of[part]]
            total += taken[segment.key, segment.combinations[own].digest]
        for c in crossing:
            made, wanted = c.made[choice[c.source]], c.wanted[choice[c.target]]
            if made != wanted:
                total += moved[c.shape, made, wanted]
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_search_is_exact(seed):
    step = prepared("mlp-tiny")
    analysis = analysed(step)
    profile = random_profile(step, analysis, seed)
    if seed % 2:  # out of memory is a result, and such a combination is not to be had
        keys = [s.segment for s in profile.combinations]
        several = [s for s in profile.combinations if keys.count(s.segment) > 1]
        first = min(several, key=lambda s: s.time.seconds if s.time else inf)
        profile = profile.with_sample(replace(first, time=None, failure="RESOURCE_EXHAUSTED"))
    result = search(step, analysis, profile)
    call_s = max(s.time.seconds for s in profile.dispatches)
    assert result.best.step_s - call_s == pytest.approx(brute_force(step, analysis, profile))
    assert all(one.step_s >= result.best.step_s - 1e-12 for one in result.others)
    assert result.planned.plan.estimated_step_s == result.best.step_s


def test_plan_says_where_its_time_is_from(tmp_path):
    step = prepared("mlp-tiny")
    analysis = analysed(step)
    result = search(step, analysis, random_profile(step, analysis, 0))
    plan = result.planned.plan
    plan.save(tmp_path / "plan.json")
    again = ParallelPlan.load(tmp_path / "plan.json")
    assert any("segments on this mesh" in note for note in again.warnings)
    assert again.solver.gap == 0.0
    assert "by measured times" in search_text(analysis, result)
    assert plan.explain(detail="full")


def test_what_was_not_timed_is_named():
    step = prepared("mlp-tiny")
    analysis = analysed(step)
    profile = random_profile(step, analysis, 0)
    with pytest.raises(ProfileError, match=r"1 of \d combinations of .* were not timed"):
        search(step, analysis, replace(profile, combinations=profile.combinations[1:]))
    with pytest.raises(ProfileError, match="was not timed"):
        search(step, analysis, replace(profile, reshards=()))


def test_nothing_fits():
    step = prepared("mlp-tiny")
    analysis = analysed(step)
    profile = random_profile(step, analysis, 0)
    lost = [replace(s, time=None, failure="RESOURCE_EXHAUSTED") for s in profile.combinations]
    with pytest.raises(MemoryBudgetError, match="ran out of memory"):
        search(step, analysis, replace(profile, combinations=tuple(lost)))


@pytest.mark.ci
def test_budget_is_kept():
    """A budget below what the best needs: something dearer is found that keeps to it."""
    free = prepared("mlp-tiny")
    analysis = analysed(free)
    profile = random_profile(free, analysis, 1)  # its best is not the smallest
    best = search(free, analysis, profile).best
    with pytest.raises(MemoryBudgetError) as error:
        search(prepared("mlp-tiny", memory=1e3), analysis, profile)
    smallest = error.value.peak_bytes
    assert smallest < best.peak_bytes
    budget = (smallest + best.peak_bytes) / 2
    bound = prepared("mlp-tiny", memory=budget / 0.9)
    found = search(bound, analysis, profile).best
    assert found.peak_bytes <= budget
    assert found.step_s > best.step_s

"""Segments on real devices: timed once, resumed, and out of memory as a result."""

import jax
import numpy as np
import pytest

import autopar
from autopar.measure.segments import profile as timing
from autopar.measure.segments.files import CombinationTime
from autopar.measure.segments.passes import run_passes
from autopar.measure.segments.profile import profile_segments
from autopar.measure.segments.search_segments import search
from autopar.measure.segments.text import profile_text, sample_text
from autopar.measure.time_step import StepTiming
from examples.models import build
from tests.unit.measure.segments.steps import analysed, prepared, random_profile

LIMIT_S = 0.01


@pytest.fixture(scope="module")
def step():
    return prepared("mlp-tiny", num_layers=3)


@pytest.fixture(scope="module")
def folder(step, tmp_path_factory):
    """All passes, run once; what they said is in said.txt."""
    path = tmp_path_factory.mktemp("segments")
    said: list[str] = []
    run_passes(step, path, jax.devices(), top=2, limit_s=LIMIT_S, say=said.append)
    (path / "said.txt").write_text("\n".join(said))
    return path


def test_passes_leave_their_files(folder):
    said = (folder / "said.txt").read_text()
    assert {"analysis.json", "profile.json", "plan.json"} <= {p.name for p in folder.iterdir()}
    assert any((folder / "compiled").iterdir())  # what other processes may use
    assert "by measured times" in said
    assert "reshardings timed" in said


def test_a_second_run_times_nothing(step, folder, monkeypatch):
    def never(*_, **__):
        raise AssertionError("timed again")

    monkeypatch.setattr(timing, "time_executable", never)
    again = run_passes(step, folder, jax.devices(), passes=("profile", "search"), limit_s=LIMIT_S)
    assert again is not None
    loaded = autopar.ParallelPlan.load(folder / "plan.json")
    assert loaded.estimated_step_s == again.best.step_s


@pytest.mark.ci
def test_out_of_memory_is_a_result(step, monkeypatch):
    analysis = analysed(step, 2)
    real = timing.time_executable
    calls = []

    def first_fails(program, **how):
        calls.append(program.name)
        if program.name.startswith("layer") and len(calls) < 4:
            return StepTiming(None, 0.1, 0.0, "RESOURCE_EXHAUSTED: out of memory")
        return real(program, **{**how, "limit_s": 0.0})

    monkeypatch.setattr(timing, "time_executable", first_fails)
    lines = []
    profile = profile_segments(
        step, analysis, jax.devices(), tell=lambda *a: lines.append(sample_text(*a))
    )
    lost = [s for s in profile.combinations if s.time is None]
    assert lost and all("RESOURCE_EXHAUSTED" in s.failure for s in lost)
    assert any("does not fit" in line for line in lines)
    assert "does not fit" in profile_text(analysis, profile)


def test_samples_replace_earlier_ones(step):
    profile = random_profile(step, analysed(step, 2), 0)
    one = profile.combinations[0]
    newer = CombinationTime(one.segment, one.mesh, one.combination, None, 0.0, 0.0, "no")
    after = profile.with_sample(newer)
    assert len(after.combinations) == len(profile.combinations)
    assert newer in after.combinations


@pytest.mark.ci
@pytest.mark.parametrize("seed", [0, 1])
def test_the_plan_computes_what_jit_does(step, seed):
    """Whatever the times were: combinations at random, layers that differ."""
    analysis = analysed(step, 4)
    plan = search(step, analysis, random_profile(step, analysis, seed)).planned.plan
    example = build("mlp-tiny", batch_size=16, num_layers=3)
    state, batch = example.create_state(), example.make_batch()
    expected_state, expected = jax.jit(example.train_step)(state, batch)
    parallel = autopar.parallelize(example.train_step, method=plan)
    found_state, found = parallel(example.create_state(), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

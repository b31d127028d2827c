"""Files are read as they were written, and refused with a reason when they cannot be right."""

import json

import jax
import pytest

from autopar.errors import ProfileError
from autopar.measure.segments.files import load_analysis, load_segment_profile, save
from autopar.measure.segments.profile import check_profile_fits
from tests.unit.measure.segments.steps import analysed, prepared, random_profile


@pytest.fixture(scope="module")
def step():
    return prepared("mlp-tiny")


def test_round_trip(step, tmp_path):
    analysis = analysed(step)
    profile = random_profile(step, analysis, 0)
    save(analysis, tmp_path / "analysis.json")
    save(profile, tmp_path / "profile.json")
    assert load_analysis(tmp_path / "analysis.json") == analysis
    assert load_segment_profile(tmp_path / "profile.json") == profile
    assert not list(tmp_path.glob("*.part"))


def test_files_that_cannot_be_used(step, tmp_path):
    path = tmp_path / "analysis.json"
    with pytest.raises(ProfileError, match="Run the analysis pass first"):
        load_analysis(path)
    save(analysed(step), path)
    body = json.loads(path.read_text())
    path.write_text(path.read_text()[:200])
    with pytest.raises(ProfileError, match="truncated"):
        load_analysis(path)
    path.write_text(json.dumps({**body, "format": 99}))
    with pytest.raises(ProfileError, match="has format 99"):
        load_analysis(path)
    path.write_text(json.dumps({**body, "kind": "a recipe"}))
    with pytest.raises(ProfileError, match="not an autopar segment analysis"):
        load_analysis(path)
    path.write_text(json.dumps({**body, "meshes": 3}))
    with pytest.raises(ProfileError, match="meshes"):
        load_analysis(path)
    body["meshes"][0]["segments"][0]["combinations"][0]["factors"][0] = [0, 1]
    path.write_text(json.dumps(body))
    with pytest.raises(ProfileError, match="number of axes"):
        load_analysis(path)


def test_times_that_cannot_be(step, tmp_path):
    path = tmp_path / "profile.json"
    save(random_profile(step, analysed(step), 0), path)
    body = json.loads(path.read_text())
    body["combinations"][0]["time"]["seconds"] = -1.0
    path.write_text(json.dumps(body))
    with pytest.raises(ProfileError, match="cannot have been measured"):
        load_segment_profile(path)


def test_times_of_other_machines_are_refused(step):
    from dataclasses import replace

    profile = random_profile(step, analysed(step), 0)
    check_profile_fits(profile, step, jax.devices(), "profile.json")
    other = replace(profile, device_kind="NVIDIA H200")
    with pytest.raises(ProfileError, match="device was NVIDIA H200 and is now"):
        check_profile_fits(other, step, jax.devices(), "profile.json")
    older = replace(profile, versions={**profile.versions, "jax": "0.1"})
    with pytest.raises(ProfileError, match=r"jax was 0\.1"):
        check_profile_fits(older, step, jax.devices(), "profile.json")

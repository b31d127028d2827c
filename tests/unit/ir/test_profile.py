"""Profiles are read back as they were written, and refused when they cannot be right."""

import json

import pytest

from autopar.errors import ProfileError
from autopar.ir.profile import (
    CollectiveTime,
    MachineProfile,
    ProductTime,
    Timing,
    load_profile,
)

PROFILE = MachineProfile(
    platform="cpu",
    device_kind="cpu",
    num_hosts=1,
    devices_per_host=8,
    versions={"jax": "0.10.2"},
    launch_s=Timing(1e-6, 0.01, 5),
    products=(ProductTime("float32", 1, 64, 64, 64, Timing(1e-5)),),
    collectives=(CollectiveTime("all-reduce", 8, 1, 8, 1e6, Timing(1e-3)),),
)


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    PROFILE.save(tmp_path / "own.json")
    read = load_profile(tmp_path / "own.json")
    assert read == PROFILE and hash(read) == hash(PROFILE) and read.name == "own.json"
    assert [p.name for p in tmp_path.iterdir()] == ["own.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: "[]", "no machine profile"),
        (lambda text: text.replace('"format": 1', '"format": 99'), "format 99"),
        (lambda text: text.replace('"all-reduce"', '"all-reduct"'), r"collectives\[0\].kind"),
        (lambda text: text.replace('"seconds": 1e-05', '"seconds": -1'), r"products\[0\].time"),
        (lambda text: text.replace('"m": 64', '"m": 0'), r"products\[0\].m: 0 is not more than 0"),
        (lambda text: text.replace('"num_hosts": 1', '"num_hosts": 0'), "num_hosts"),
        (lambda text: text.replace('"device_kind": "cpu",', ""), "without device_kind"),
    ],
)
def test_a_profile_that_cannot_be_right_is_refused(tmp_path, change, says):
    PROFILE.save(tmp_path / "own.json")
    text = (tmp_path / "own.json").read_text()
    assert change(text) != text
    (tmp_path / "own.json").write_text(change(text))
    with pytest.raises(ProfileError, match=says):
        load_profile(tmp_path / "own.json")


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ProfileError, match=r"autopar profile --output none\.json"):
        load_profile(tmp_path / "none.json")


def test_the_digest_tells_profiles_apart(tmp_path):
    PROFILE.save(tmp_path / "own.json")
    body = json.loads((tmp_path / "own.json").read_text())
    body["products"][0]["time"]["seconds"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(body))
    assert load_profile(tmp_path / "other.json").digest != PROFILE.digest

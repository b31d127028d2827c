"""A run over samples: kept as they come, continued, taken again, stopped. Devices are stand-ins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.errors import ArgumentError, ProfileError
from autopar.ir.profile import ProductTime, StreamTime, Timing, load_profile
from autopar.measure.profile.hardware import Hardware, first_difference
from autopar.measure.profile.profile_machine import PARTS, ProfileRun
from autopar.measure.profile.samples import UNTIMED, Abilities, PlannedSample, planned_samples
from autopar.measure.profile.text import show_profile
from autopar.measure.profile.unfinished import part_path

HERE = Hardware("gpu", "NVIDIA H200", 1, 1, {"jax": "0.11.2", "cuda": "13000"})
PLANNED = [
    *(
        PlannedSample(0, "products", ProductTime("bfloat16", 1, m, m, m, UNTIMED))
        for m in (64, 128, 256)
    ),
    PlannedSample(0, "streams", StreamTime("copy", "float32", 2.0**20, UNTIMED)),
    PlannedSample(1, "products", ProductTime("bfloat16", 1, 512, 512, 512, UNTIMED)),
]


class Devices:
    """A sample takes 1 ms; `noisy` ones have a wide spread so many times; `failing` ones raise."""

    def __init__(self, noisy=None, failing=None, stop_after=None):
        self.noisy, self.failing = dict(noisy or {}), failing or {}
        self.stop_after, self.taken = stop_after, []

    def launch(self):
        return Timing(2e-6, 0.01, 5)

    def dispatch(self):
        return Timing(2e-5, 0.01, 5)

    def memory(self):
        return 1e11

    def disturbed_by(self):
        return []

    def take(self, planned, num_samples=None):
        if self.stop_after is not None and len(self.taken) == self.stop_after:
            raise KeyboardInterrupt
        self.taken.append(planned.sample)
        size = getattr(planned.sample, "m", None)
        if size in self.failing:
            raise RuntimeError(self.failing[size])
        left = self.noisy.get(size, 0)
        self.noisy[size] = left - 1
        return replace(planned.sample, time=Timing(1e-3, 0.3 if left > 0 else 0.01, 5))


def run(machine, output=None, **options):
    said = []
    own = {"only": PARTS, "time_limit_s": None, "restart": False, "hardware": HERE} | options
    profile = ProfileRun(
        machine=machine, planned=PLANNED, output=output, report=said.append, **own
    ).finish()
    return profile, "\n".join(said)


def test_a_profile_is_written_whole_and_can_be_read(tmp_path):
    output = tmp_path / "h200.json"
    profile, said = run(Devices(), output)
    assert load_profile(output) == profile and not part_path(output).exists()
    assert [p.m for p in profile.products] == [64, 128, 256, 512]
    assert profile.launch_s == Timing(2e-6, 0.01, 5) and profile.usable_memory_bytes == 1e11
    assert profile.notes == () and profile.date.startswith("20")
    assert "268 … 268 GFLOP/s" in said and "1 ms … 1 ms" in said
    text = show_profile(profile)
    assert "NVIDIA H200" in text and "up to 268 GFLOP/s" in text


def test_an_interrupted_run_is_continued(tmp_path):
    output = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        run(Devices(stop_after=2), output)
    assert not output.exists() and len(part_path(output).read_text().splitlines()) == 6
    with part_path(output).open("a") as file:
        file.write('{"round": 0, "gro')  # killed while it wrote
    devices = Devices()
    profile, said = run(devices, output)
    assert "continuing with 2 samples" in said
    assert [sample.time for sample in devices.taken] == [UNTIMED] * 3
    assert len(profile.products) == 4 and len(profile.streams) == 1
    assert not part_path(output).exists()


def test_an_unfinished_run_of_other_hardware_is_refused(tmp_path):
    output = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        run(Devices(stop_after=2), output)
    other = replace(HERE, versions={**HERE.versions, "cuda": "12090"})
    with pytest.raises(ProfileError, match=r"'cuda'.*'12090' here and '13000' there.*--restart"):
        run(Devices(), output, hardware=other)
    with pytest.raises(ProfileError, match="device_kind is 'NVIDIA H100' here"):
        run(Devices(), output, hardware=replace(HERE, device_kind="NVIDIA H100"))
    devices = Devices()
    run(devices, output, hardware=other, restart=True)
    assert len(devices.taken) == len(PLANNED)


@pytest.mark.parametrize("line", ['{"kind": "something"}\n', "no JSON\n", "[]\n"])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, line):
    output = tmp_path / "p.json"
    part_path(output).write_text(line)
    with pytest.raises(ProfileError, match=r"line 1: not a line of an unfinished profile.*restart"):
        run(Devices(), output)


def test_noisy_samples_are_taken_again_and_flagged_if_they_stay_so():
    devices = Devices(noisy={128: 1, 256: 99})
    profile, said = run(devices)
    assert [s.m for s in devices.taken if isinstance(s, ProductTime)][4:] == [128, 256]
    assert [p.time.is_noisy for p in profile.products] == [False, False, True, False]
    (note,) = profile.notes
    assert "the devices were busy" in note and "256 × 256 × 256" in note and "128" not in note
    assert note in said and "1 noisy" in show_profile(profile)


def test_what_does_not_fit_is_skipped_and_noted(tmp_path):
    output = tmp_path / "p.json"
    failing = {128: "RESOURCE_EXHAUSTED: Out of memory", 256: "no such kernel\nand more"}
    profile, _ = run(Devices(failing=failing), output)
    assert [p.m for p in profile.products] == [64, 512]
    assert "128 × 128 × 128: out of memory" in profile.notes[0]
    assert profile.notes[1].endswith("RuntimeError: no such kernel")


def test_a_time_limit_ends_with_what_there_is(tmp_path):
    output = tmp_path / "p.json"
    profile, _ = run(Devices(), output, time_limit_s=1e-9)
    assert profile.products == () and profile.launch_s is not None
    assert "5 of 5 samples missing" in profile.notes[0]
    assert load_profile(output) == profile and part_path(output).exists()
    profile, _ = run(Devices(), output)
    assert len(profile.products) == 4 and profile.notes == ()


def test_parts_that_are_not_asked_for_are_kept(tmp_path):
    output = tmp_path / "p.json"
    whole, _ = run(Devices(noisy={64: 9}), output)
    devices = Devices()
    profile, _ = run(devices, output, only=("streams",))
    assert len(devices.taken) == 1
    assert profile.products == whole.products and profile.launch_s == whole.launch_s
    with pytest.raises(ProfileError, match="num_hosts is 2 here and 1 there"):
        run(devices, output, only=("streams",), hardware=replace(HERE, num_hosts=2))


def test_differences_are_named():
    assert first_difference(HERE, HERE) is None
    assert first_difference(HERE, replace(HERE, versions={"jax": "0.11.2"})) == (
        "versions['cuda'] is '13000' here and None there"
    )


@pytest.mark.parametrize(
    "able",
    [
        Abilities("cpu", 8, 8),
        Abilities("cpu", 1, 1),
        Abilities("gpu", 1, 1, has_fp8=True, has_cudnn=True),
        Abilities("gpu", 16, 8),
    ],
)
def test_the_samples_of_a_machine(able):
    planned = planned_samples(able)
    quick = planned_samples(able, quick=True)
    assert len({p.sample for p in planned}) == len(planned) > 2 * len(quick)
    assert quick == planned[: len(quick)]
    assert {p.group for p in planned} - {p.group for p in quick} <= {"attentions"}
    has = {getattr(p.sample, "dtype", "") for p in planned}
    assert ("float8_e4m3fn" in has) == able.has_fp8
    assert {p.group for p in planned} >= {"products", "convolutions", "streams"}
    assert any(p.group == "collectives" for p in planned) == (able.num_devices > 1)
    hosts = {p.sample.ranks_per_host for p in planned if p.group == "collectives"}
    assert all(ranks <= able.devices_per_host for ranks in hosts)


@pytest.mark.ci
def test_a_real_machine_from_the_command_line(tmp_path, capsys):
    output = tmp_path / "here.json"
    typed = ["profile", "--quick", "--only", "overheads,memory,crossings", "-o", str(output)]
    assert main(typed) == 0
    out = capsys.readouterr().out
    assert f"written: {output}" in out and "crossings" in out
    profile = load_profile(output)
    assert profile.devices_per_host == 8 and profile.platform == "cpu"
    assert profile.launch_s is not None and profile.dispatch_s is not None
    assert profile.launch_s.seconds > 0 and profile.dispatch_s.seconds > 0
    assert profile.usable_memory_bytes is not None and profile.usable_memory_bytes > 1e6
    small, large = sorted(
        (c for c in profile.crossings if c.num_pairs == 4), key=lambda c: c.num_bytes
    )
    assert small.num_bytes < large.num_bytes
    assert json.loads(output.read_text())["kind"] == "autopar machine profile"
    assert main(["profile", "--show", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "crossings" in shown and "products: none" in shown
    assert main(["profile", "--show", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--only", "product"], "did you mean|products"),
        (["--devices", "9"], "requested 9 devices, found 8"),
        (["--hosts", "2"], "--cluster ray"),
        (["--output", "no/such/folder/p.json"], "no/such/folder does not exist"),
        (["--enumerate"], "needs --model"),
        (["--show", "p.json", "--quick"], "--quick: belongs to a measurement"),
        (["--model", "m.py:f", "--restart"], "--restart"),
    ],
)
def test_wrong_options(capsys, typed, said):
    assert main(["profile", *typed]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|"))


@pytest.mark.ci
def test_an_interrupt_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.measure.profile.local.LocalMachine.take", interrupted)
    output = tmp_path / "p.json"
    assert main(["profile", "--only", "crossings", "-o", str(output)]) == 130
    assert "same command continues" in capsys.readouterr().err
    assert part_path(output).exists() and not output.exists()


def test_arguments_of_the_function():
    with pytest.raises(ArgumentError, match="devices"):
        autopar.profile_machine(devices=[])
    with pytest.raises(ArgumentError, match=r"time_limit_s=-1: needs seconds"):
        autopar.profile_machine(time_limit_s=-1)
    with pytest.raises(ArgumentError, match="only='nothing'"):
        autopar.profile_machine(only=["nothing"])
    assert not list(Path().glob("*.part"))

"""Ranks measure together: they agree on all decisions, and if one fails or dies, none hangs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli import main
from autopar.errors import ProfileError
from autopar.ir.devices import DEVICES
from autopar.ir.mesh import cluster_of_profile
from autopar.ir.profile import CollectiveTime, GpuShare, MachineProfile, Timing, load_profile
from autopar.measure.profile.hardware import Hardware, first_difference, profile_of
from autopar.measure.profile.samples import Abilities, planned_samples
from autopar.measure.profile.text import show_profile
from autopar.measure.profile.unfinished import part_path
from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks
from autopar.runtime.timing import time_calls
from autopar.session import check_profile_here

EIGHTH = Hardware(
    "gpu", "NVIDIA H200", 1, 8, {"jax": "0.11.2", "nccl": "2.30.7"}, GpuShare(8, mps=True)
)


def shared_profile() -> MachineProfile:
    sample = CollectiveTime("all-reduce", 8, 1, 8, 2.0**20, Timing(3e-4, 0.01, 5))
    return replace(
        profile_of(EIGHTH), collectives=(sample,), usable_memory_bytes=15e9, name="eighth.json"
    )


class Exchange:
    """What `RankGroup.slowest` is, for threads."""

    def __init__(self, count):
        self.barrier, self.told = threading.Barrier(count), []

    def slowest(self, seconds):
        self.told.append(seconds)
        self.barrier.wait(30)
        most = max(self.told)
        if self.barrier.wait(30) == 0:
            self.told.clear()
        self.barrier.wait(30)
        return most


def test_ranks_of_different_speed_call_equally_often():
    """One rank's calls vary, and the other's are short and even."""
    exchange, seen = Exchange(2), {}

    def rank(which):
        calls = []

        def call():
            calls.append(None)
            time.sleep(0.02 if which and len(calls) % 3 == 0 else 0.001)

        timing = time_calls(call, limit_s=0.2, max_samples=12, slowest=exchange.slowest)
        seen[which] = (len(calls), timing)

    threads = [threading.Thread(target=rank, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen[0] == seen[1]


def run_program(name: str, count: int) -> list:
    path = Path(__file__).with_name(name)
    folder = Path(__file__).parents[4]
    with CpuRanks(count) as ranks:
        return run_ranks(
            [sys.executable, str(path)],
            ranks,
            limit_s=120,
            env={"PYTHONPATH": str(folder)},
            folder=folder,
        )


@pytest.mark.slow
def test_an_error_in_one_rank_is_raised_in_all_and_silence_has_a_limit():
    results = run_program("rank_program.py", 3)
    seen = []
    for result in results:
        lines = [line for line in result.output.splitlines() if line.startswith("SEEN ")]
        assert lines, result.output
        seen.append(json.loads(lines[0].removeprefix("SEEN ")))
    for found in seen:
        assert found["gathered"] == [["of", 0], ["of", 1], ["of", 2]]
        assert found["slowest"] == 2 / 8 and found["first"] == {"next": "that"}
        for late in (False, True):
            assert found[f"failure {late}"] == "rank 1: ValueError: no memory"
        assert found["together"] == 2.0
    assert "rank 2 did not answer within 1 s" in seen[0]["silence"]
    assert "rank 0 did not answer" in seen[1]["silence"] and "silence" not in seen[2]


@pytest.mark.ci
def test_two_ranks_from_the_command_line(tmp_path, capsys):
    output = tmp_path / "two.json"
    parts = "overheads,memory,collectives,crossings,convolutions"
    typed = ["profile", "--ranks", "2", "--platform", "cpu", "--quick", "--only", parts]
    assert main([*typed, "-o", str(output)]) == 0
    out = capsys.readouterr().out
    assert "starting 2 ranks on the CPU" in out and f"written: {output}" in out
    profile = load_profile(output)
    assert (profile.num_hosts, profile.devices_per_host) == (1, 2) and profile.gpu_share is None
    assert not part_path(output).exists()
    assert {c.kind for c in profile.collectives} == {c.kind for c in planned_collectives(2)}
    assert all((c.ranks, c.stride, c.ranks_per_host) == (2, 1, 2) for c in profile.collectives)
    assert len(profile.crossings) == 2 and len(profile.convolutions) == 3
    assert any("collective-permutes" in note for note in profile.notes)
    assert profile.launch_s and profile.dispatch_s and profile.usable_memory_bytes

    def step(w, x):
        return jnp.mean((x @ w) ** 2)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = autopar.plan(step, shapes, shapes, cluster=cluster_of_profile(str(output)))
    assert plan.cluster.num_devices == 2
    assert "collectives" in plan.cluster.priced_by.parts


def planned_collectives(count: int) -> list:
    planned = planned_samples(Abilities("cpu", count, count, are_ranks=True), quick=True)
    return [p.sample for p in planned if p.group == "collectives"]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_command(tmp_path):
    output = tmp_path / "killed.json"
    typed = ["profile", "--ranks", "2", "--platform", "cpu", "--only", "collectives"]
    command = subprocess.Popen(
        [sys.executable, "-m", "autopar", *typed, "-o", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[4],
    )
    try:
        part, until_s = part_path(output), time.monotonic() + 120
        while not part.exists() or len(part.read_text().splitlines()) < 3:
            assert command.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
        killed = ranks_of(command.pid)[1]
        os.kill(killed, signal.SIGKILL)
        said, _ = command.communicate(timeout=90)
    finally:
        command.kill()
    assert command.returncode == 2 and "rank 1 was ended by signal 9" in said
    assert "the same command continues" in said
    assert not output.exists() and len(part.read_text().splitlines()) >= 3


def ranks_of(parent: int) -> dict[int, int]:
    """Process numbers of the ranks that a command has started, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [v.partition(b"=")[2] for v in variables if v.startswith(b"RANK=")]
            if int(stat.rpartition(")")[2].split()[1]) == parent and ranks:
                found[int(ranks[0])] = int(entry.name)
    return found


def test_links_of_ranks_come_first_and_on_every_placement():
    able = Abilities("gpu", 8, 8, has_fp8=True, has_cudnn=True, are_ranks=True)
    quick = planned_samples(able, quick=True)
    places = {(p.sample.ranks, p.sample.stride) for p in quick if p.group == "collectives"}
    assert places == {(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)}
    sizes = {p.sample.num_bytes for p in quick if p.group == "collectives"}
    assert min(sizes) == 2.0**12 and max(sizes) == 2.0**28
    groups = [p.group for p in quick]
    assert set(groups[: groups.count("collectives")]) == {"collectives"}
    everything = planned_samples(able)
    assert quick == everything[: len(quick)]
    assert len({p.sample for p in everything}) == len(everything)


def test_a_profile_of_shares_says_so_and_is_read_back(tmp_path):
    profile = shared_profile()
    profile.save(tmp_path / "eighth.json")
    assert load_profile(tmp_path / "eighth.json") == profile
    assert "NVIDIA H200, 1/8 share (MPS)" in profile.summary.text
    assert "nccl 2.30.7" in profile.summary.text
    assert "1/8 share (MPS)" in show_profile(profile)
    assert str(GpuShare(2, mps=False)) == "1/2 share (taking turns)"
    whole = replace(EIGHTH, gpu_share=None)
    assert "gpu_share is GpuShare(num_ranks=8" in (first_difference(EIGHTH, whole) or "")


def test_a_profile_without_shares_is_written_as_before():
    """Plan files know profiles by their digest."""
    assert load_profile("h200").digest == "87237c79bf330d84"


def test_shares_cost_their_share(tmp_path):
    profile, whole = shared_profile(), DEVICES["h200-sxm"]
    cluster = cluster_of_profile(profile)
    assert (cluster.num_hosts, cluster.devices_per_host) == (1, 8)
    assert cluster == autopar.ClusterSpec(1, 8, "h200-sxm", profile=profile)
    assert cluster.spec.flops_16bit == whole.flops_16bit / 8
    assert cluster.spec.memory_bandwidth == whole.memory_bandwidth / 8
    assert cluster.spec.memory_bytes == 15e9
    own = replace(whole, name="mine", flops_16bit=1e12)
    assert autopar.ClusterSpec(1, 8, own, profile=profile).spec.flops_16bit == 1e12
    with pytest.raises(ProfileError, match="h100"):
        autopar.ClusterSpec(1, 8, "h100-sxm", profile=profile)


class H200:
    platform, device_kind = "gpu", "NVIDIA H200"


def test_a_profile_of_shares_is_for_such_shares_only(monkeypatch):
    profile = replace(shared_profile(), versions={})
    with pytest.raises(ProfileError, match=r"gpu_share is '1/8 share \(MPS\)'.*'whole'"):
        check_profile_here(profile, H200())
    monkeypatch.setenv("AUTOPAR_RANKS_PER_GPU", "8")
    with pytest.raises(ProfileError, match="taking turns"):
        check_profile_here(profile, H200())
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    check_profile_here(profile, H200())
    with pytest.raises(ProfileError, match=r"gpu_share is 'whole'.*1/8 share"):
        check_profile_here(replace(profile, gpu_share=None), H200())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--ranks", "2", "--devices", "2"], "takes no --devices"),
        (["--ranks", "2", "--cluster", "ray"], "leave out --cluster ray"),
        (["--no-mps"], "--no-mps: needs --ranks"),
        (["--show", "p.json", "--ranks", "2"], "--ranks: belongs to a measurement"),
        (["--show", "p.json", "--no-mps"], "--no-mps: belongs to a measurement"),
    ],
)
def test_wrong_options(capsys, typed, said):
    assert main(["profile", *typed]) == 2
    assert said in capsys.readouterr().err

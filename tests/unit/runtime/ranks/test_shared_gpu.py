"""Ranks that share a GPU, up to the GPU itself: a stand-in for the driver's two programs, and the
real guard. `tests/gpu` runs the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks import shared_gpu
from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import (
    CpuRanks,
    OwnGpus,
    SharedGpu,
    count_gpus,
    find_nccl,
    gpu_ranks,
)
from tests.unit.runtime.ranks.test_launch import wait_for

DAEMON = """\
#!/bin/sh
# As nvidia-cuda-mps-control: `-d` starts, and reading 'quit' from standard input ends.
folder=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
    [ -n "$MPS_FAILS" ] && { echo "An instance of this daemon is already running"; exit 1; }
    touch "$folder/control"; echo "started $LD_PRELOAD" >> "$MPS_LOG"
else
    read word rest; echo "$word" >> "$MPS_LOG"
fi
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Programs of the driver on PATH: `driver(gpus)` sets what nvidia-smi lists."""

    def install(gpus: int, has_mps: bool = True) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        lines = "\\n".join(["NVIDIA H200"] * gpus)
        write(folder / "nvidia-smi", f"#!/bin/sh\nprintf '{lines}\\n'\n")
        if has_mps:
            write(folder / "nvidia-cuda-mps-control", DAEMON)
        # A host with a GPU has the real daemon beside its shell.
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if has_mps else str(folder))
        monkeypatch.setenv("MPS_LOG", str(tmp_path / "log"))
        return tmp_path / "log"

    monkeypatch.setattr(shared_gpu, "_version_of", lambda library: (2, 30, 7))
    library = tmp_path / "libnccl.so.2"
    library.touch()
    monkeypatch.setenv("AUTOPAR_NCCL", str(library))
    return install


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_connections_that_the_user_sets_are_kept(driver, monkeypatch):
    driver(1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with SharedGpu(3) as ranks:
        assert ranks.environment(2)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_every_rank_has_its_share(driver, monkeypatch):
    driver(1)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of this process
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with SharedGpu(8) as ranks:
        assert ranks.describe() == "8 ranks on one NVIDIA H200, NCCL 2.30.7"
        env = ranks.environment(7)
    assert env["JAX_PLATFORMS"] == "cuda,cpu"
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "18"
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "7"
    assert float(env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(0.9 / 8, abs=1e-4)
    assert env["LD_PRELOAD"].endswith("libnccl.so.2")
    assert env["AUTOPAR_RANKS_PER_GPU"] == "8"


def test_ranks_are_spread_over_the_gpus(driver):
    driver(2)
    with SharedGpu(5) as ranks:
        assert ranks.ranks_per_gpu == 3
        gpus = [ranks.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(5)]
    assert gpus == ["0", "0", "0", "1", "1"]


def test_ranks_have_a_gpu_each_where_there_are_enough(driver):
    driver(4)
    assert count_gpus() == 4
    own = gpu_ranks(4)
    assert isinstance(own, OwnGpus)
    assert [own.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == list("0123")
    assert isinstance(gpu_ranks(8), SharedGpu)
    with pytest.raises(ClusterError, match="5 ranks with a GPU each: this host has 4 GPUs"):
        OwnGpus(5)


def test_the_users_nccl_settings_are_kept(driver, monkeypatch):
    driver(1)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    monkeypatch.setenv("LD_PRELOAD", "")
    assert SharedGpu(2).environment()["NCCL_MAX_CTAS"] == "4"


def test_the_daemon_is_started_without_nccl_and_ended(driver, monkeypatch):
    log = driver(1)
    with SharedGpu(2) as ranks:
        folder = Path(ranks.environment()["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
        assert log.read_text().split() == ["started"]
        ranks.close()
        assert not folder.exists()
    assert log.read_text().split() == ["started", "quit"]


def test_ranks_after_one_that_died_have_another_daemon(driver):
    log = driver(1)
    with SharedGpu(2) as ranks:
        first = ranks.environment()["CUDA_MPS_PIPE_DIRECTORY"]
        run_ranks(["true"], ranks, limit_s=30.0)
        assert ranks.environment()["CUDA_MPS_PIPE_DIRECTORY"] == first
        run_ranks(["false"], ranks, limit_s=30.0)
        assert ranks.environment()["CUDA_MPS_PIPE_DIRECTORY"] != first
        assert not Path(first).exists()
    assert log.read_text().split() == ["started", "quit"] * 2


def test_the_daemon_ends_when_its_owner_is_killed(driver, tmp_path):
    log = driver(1)
    code = (
        "import autopar.runtime.ranks.shared_gpu as s, time\n"
        "s._version_of = lambda library: (2, 30, 7)\n"
        "ranks = s.SharedGpu(2).__enter__()\n"
        "print(ranks.environment()['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[4])
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert folder.is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    wait_for(lambda: not folder.exists())
    assert log.read_text().split() == ["started", "quit"]


def test_a_daemon_that_does_not_start(driver, monkeypatch):
    driver(1)
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(ClusterError, match="did not start: An instance of this daemon"):
        SharedGpu(2).__enter__()


def test_no_daemon(driver):
    driver(1, has_mps=False)
    with pytest.raises(ClusterError, match="--no-mps"):
        SharedGpu(2).__enter__()
    with SharedGpu(2, mps=False) as ranks:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in ranks.environment()
        assert "taking turns" in ranks.describe()


def test_no_gpu(driver):
    driver(0)
    with pytest.raises(ClusterError, match="--platform cpu"):
        gpu_ranks(2)


def test_too_many_ranks(driver):
    driver(1)
    with pytest.raises(ArgumentError, match="num_ranks=49 on 1 GPUs: at most 48"):
        SharedGpu(49)
    with pytest.raises(ArgumentError, match="num_ranks=0"):
        CpuRanks(0)


def test_ranks_on_the_cpu_share_its_cores(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert CpuRanks(4).environment()["PJRT_NPROC"] == "16"
    assert CpuRanks(48).environment()["PJRT_NPROC"] == "1"
    assert CpuRanks(128, devices_per_rank=4).environment()["PJRT_NPROC"] == "1"  # XLA adds some
    monkeypatch.setenv("PJRT_NPROC", "8")
    assert CpuRanks(4).environment()["PJRT_NPROC"] == "8"


def test_a_rank_with_one_core_does_not_split_operations(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("XLA_FLAGS", "--xla_one --xla_force_host_platform_device_count=8")
    assert CpuRanks(2).environment()["XLA_FLAGS"] == "--xla_one"
    flags = CpuRanks(3).environment()["XLA_FLAGS"]
    assert flags == "--xla_one --xla_cpu_multi_thread_eigen=false"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    assert CpuRanks(4).environment()["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=true"


def test_an_old_nccl(driver, monkeypatch):
    driver(1)
    monkeypatch.setattr(shared_gpu, "_version_of", lambda library: (2, 27, 3))
    with pytest.raises(
        ClusterError, match=r"is 2\.27\.3: pip install -U 'nvidia-nccl-cu13>=2\.30'"
    ):
        SharedGpu(2)


def test_a_file_that_is_not_there(monkeypatch):
    with pytest.raises(ClusterError, match=r"nccl: no file '/nowhere/libnccl\.so\.2'"):
        find_nccl("/nowhere/libnccl.so.2")
    monkeypatch.setenv("AUTOPAR_NCCL", "/nowhere/libnccl.so.2")
    with pytest.raises(ClusterError, match="variable AUTOPAR_NCCL"):
        find_nccl()


def test_a_file_that_is_no_nccl(tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_text("text")
    with pytest.raises(ClusterError, match="cannot be loaded as NCCL"):
        find_nccl(library)

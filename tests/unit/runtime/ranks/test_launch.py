"""Ranks are started together, find each other, and end together: real processes on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.errors import ClusterError
from autopar.runtime.ranks.launch import held_port, run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks

LIMIT_S = 60.0
# All devices are waited for: a process that ends while one of them still connects leaves its peer
# connecting. One write per line, so that nothing of XLA's lands inside it.
JOIN = """
import jax
jax.distributed.initialize()
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("x",))
own = np.full(jax.local_device_count(), jax.process_index())
ranks = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("x")), own)
everywhere = NamedSharding(mesh, PartitionSpec())
seen = jax.jit(lambda ranks: ranks, out_shardings=everywhere)(ranks).block_until_ready()
print(f"seen {np.asarray(seen).tolist()}", flush=True)
"""
PIDS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
"""
SLEEP = PIDS + "time.sleep(600)\n"


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def pids_in(folder: Path, num_ranks: int) -> list[int]:
    files = [folder / f"pids-{rank}" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.05)


def test_ranks_find_each_other_without_arguments():
    with CpuRanks(2, devices_per_rank=2) as ranks:
        results = run_ranks(program(JOIN), ranks, limit_s=LIMIT_S)
    for result in results:
        assert not result.failed, result.output
        assert "seen [0, 0, 1, 1]" in result.output


def test_a_rank_that_fails_ends_the_others(tmp_path):
    text = PIDS + "if os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n"
    results = run_ranks(program(text), CpuRanks(3), limit_s=LIMIT_S, folder=tmp_path, grace_s=0.2)
    assert [result.returncode for result in results] == [-signal.SIGTERM, 7, -signal.SIGTERM]
    assert not any(result.timed_out for result in results)
    assert not any(map(is_running, pids_in(tmp_path, 3)))  # nor what they had started


def test_the_others_have_time_to_say_why():
    text = "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(1)\ntime.sleep(0.5)\n"
    results = run_ranks(program(text + "print('peer lost')"), CpuRanks(2), limit_s=LIMIT_S)
    assert [result.returncode for result in results] == [1, 0]
    assert results[1].output == "peer lost"


def test_ranks_end_at_the_time_limit(tmp_path):
    results = run_ranks(program(SLEEP), CpuRanks(2), limit_s=1.5, folder=tmp_path)
    assert all(result.timed_out for result in results)
    assert not any(map(is_running, pids_in(tmp_path, 2)))


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    command = [sys.executable, "-m", "autopar", "launch", "--ranks", "2", "--platform", "cpu", "--"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    launcher = subprocess.Popen([*command, *program(SLEEP)], cwd=tmp_path, env=env)
    pids = pids_in(tmp_path, 2)
    assert all(map(is_running, pids))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_running, pids)))


def test_the_port_is_kept_for_the_coordinator():
    import socket

    with held_port() as port, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        with socket.socket() as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind(("127.0.0.1", port))


def test_a_command_that_does_not_exist():
    with pytest.raises(ClusterError, match="'no-such-program' cannot be started"):
        run_ranks(["no-such-program"], CpuRanks(2), limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("text", "code"),
    [("print('hello')", 0), ("import sys; sys.exit(5)", 5), ("import time; time.sleep(60)", 124)],
)
def test_the_command(text, code, capfd):
    limit_s = "2" if code == 124 else "60"
    argv = ["launch", "--ranks", "2", "--platform", "cpu", "--time-limit", limit_s, "--"]
    assert main([*argv, *program(text)]) == code
    shown = capfd.readouterr()
    assert "2 ranks on the CPU" in shown.err
    if code == 0:
        assert sorted(shown.out.splitlines()) == ["[0] hello", "[1] hello"]
    else:
        assert "rank 1" in shown.err


def test_a_gpu_rank_has_one_device(capsys):
    argv = ["launch", "--ranks", "2", "--platform", "gpu", "--devices-per-rank", "2", "--", "true"]
    assert main(argv) == 2
    assert "a rank has one GPU" in capsys.readouterr().err

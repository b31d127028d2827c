"""Ranks on one host, for real: they find each other, have their shares, leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from autopar.runtime.ranks.guard import mps_processes
from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import Ranks, SharedGpu, gpu_ranks
from tests.gpu.conftest import ON_CPU

pytestmark = pytest.mark.gpu

LIMIT_S = 90.0
JOIN = """
import json, jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("x",))
def sharded(spec): return NamedSharding(mesh, spec)
rows = jax.make_array_from_callback((jax.device_count(), 4), sharded(P("x")),
    lambda at: np.arange(4 * jax.device_count(), dtype=np.float32).reshape(-1, 4)[at])
total = jax.jit(lambda v: v.sum(0), out_shardings=sharded(P()))(rows)
stats = jax.local_devices()[0].memory_stats() or {}
print(json.dumps({"rank": jax.process_index(), "devices": jax.device_count(),
    "total": np.asarray(total).tolist(), "limit": stats.get("bytes_limit")}), flush=True)
"""
KILLED = """
import os, signal, time, jax
jax.distributed.initialize()
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("x",))
rows = jax.make_array_from_callback((jax.device_count(), 2**20), NamedSharding(mesh, P("x")),
    lambda at: np.ones((1, 2**20), np.float32))
add = jax.jit(lambda v: v.sum(0), out_shardings=NamedSharding(mesh, P()))
jax.block_until_ready(add(rows))
if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
jax.block_until_ready(add(rows))
time.sleep(600)
"""


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def memory_of_one_gpu() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return float(said.stdout.split()[0]) * 2**20


def joined(ranks: Ranks) -> list[dict]:
    results = run_ranks(program(JOIN), ranks, limit_s=LIMIT_S)
    for result in results:
        assert not result.failed, result.output
    return [json.loads(result.output[result.output.index('{"rank"') :]) for result in results]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_find_each_other(ranks, num_ranks):
    found = joined(ranks(num_ranks))
    columns = [sum(4 * row + column for row in range(num_ranks)) for column in range(4)]
    assert [one["rank"] for one in found] == list(range(num_ranks))
    assert all(one["devices"] == num_ranks and one["total"] == columns for one in found)
    if not ON_CPU and isinstance(ranks(num_ranks), SharedGpu):
        assert sum(one["limit"] for one in found) < memory_of_one_gpu()


@pytest.mark.skipif(ON_CPU, reason="MPS runs on GPUs")
def test_a_rank_that_dies_inside_nccl_leaves_the_gpu_usable():
    with gpu_ranks(4) as ranks:
        folder = ranks.environment().get("CUDA_MPS_PIPE_DIRECTORY", "")
        results = run_ranks(program(KILLED), ranks, limit_s=LIMIT_S, grace_s=3.0)
        assert results[1].returncode == -9
        assert all(result.failed for result in results)
        assert [one["devices"] for one in joined(ranks)] == [4] * 4
        last = ranks.environment().get("CUDA_MPS_PIPE_DIRECTORY", "")
        if isinstance(ranks, SharedGpu):
            assert mps_processes(last) and not mps_processes(folder)
    assert not mps_processes(last)


@pytest.mark.skipif(ON_CPU, reason="ranks take turns on GPUs only")
def test_ranks_that_take_turns():
    with gpu_ranks(2, mps=False) as ranks:
        assert [one["devices"] for one in joined(ranks)] == [2, 2]

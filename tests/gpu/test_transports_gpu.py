"""Transports between processes on GPUs: NCCL from a device to itself, CUDA IPC and JAX's transfer
server between two processes on one GPU, and NCCL between two meshes of GPUs, 2, 4 and 8 in all.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu/test_transports_gpu.py`. The same
bodies run on CPU devices in `tests/unit/runtime/transports/test_between_processes.py`.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from autopar.runtime.transports.base import Endpoint
from autopar.runtime.transports.choose import available_transports
from tests.unit.runtime.transports import cases
from tests.unit.runtime.transports.peer import use

GPU = jax.default_backend() == "gpu"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")

WORK = 50  # products of 2048 × 2048 matrices: milliseconds in which a tile is not there yet


@contextmanager
def on_one_gpu(count, transport):
    visible = ["0"] * count
    with cases.workers(count, transport, platform="gpu", visible=visible) as peers:
        yield peers


@pytest.fixture(scope="module")
def two():
    with on_one_gpu(2, "jax_transfer") as peers:
        yield peers


@pytest.fixture(
    scope="module",
    params=["jax_transfer", pytest.param("cuda_ipc", marks=needs_cupy)],
)
def shared(request, two):
    use(two, request.param)
    return two


def test_random_tiles_between_two_processes_on_one_gpu(shared):
    for seed in range(6):
        transfers = {seed: cases.random_transfer(seed, (1, 2), 1)}
        cases.carry_out(shared, transfers, seed, sends_first=True)


def test_tiles_that_are_sent_before_they_are_computed(shared):
    cases.carry_out_many(*shared, 100, 1000, 2**20, work=WORK)


def test_nothing_is_left_of_a_thousand_transfers(shared):
    cases.carry_out_many(*shared, 1000, 10_000, 2**16)


@needs_cupy
@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_device_sends_to_itself(transport):
    end = Endpoint(1, 0)
    dtypes = [*cases.DTYPES, "float16", "int32", "uint8"]
    draw = np.random.default_rng(0)
    tiles = tuple(
        cases.Sent(draw.integers(0, 2, shape).astype(jax.numpy.dtype(dtype)), end, (end,))
        for dtype in dtypes
        for shape in cases.SHAPES
    )
    with on_one_gpu(1, transport) as peers:
        (peer,) = peers
        cases.carry_out(peers, {1: tiles, 2: tiles[::-1]}, sends_first=True)
        for first, size, work in ((100, 1000, 0), (300, 2**22, 0), (500, 2**22, WORK)):
            tags = range(first, first + 100)
            right, in_place = peer.ask("with_itself", tags, end, size, work)
            assert right == len(tags)
            print(f"{transport}: {in_place} of {len(tags)} received arrays were used in place")
        arrays, _ = peer.ask("footprint")
        assert arrays < 50


@needs_cupy
def test_every_transport_can_be_used_here():
    assert set(available_transports("gpu")) == {"nccl", "cuda_ipc", "jax_transfer"}


@needs_cupy
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_two_meshes_send_to_each_other_by_nccl(num_gpus):
    """CPU twin: `test_two_meshes_send_to_each_other`."""
    if jax.local_device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs, has {jax.local_device_count()}")
    half = num_gpus // 2
    visible = [",".join(map(str, range(i * half, (i + 1) * half))) for i in range(2)]
    with cases.workers(2, "nccl", platform="gpu", visible=visible) as peers:
        cases.between_meshes(peers, half, 1)
        cases.carry_out_many(*peers, 200, 10_000, 2**20, work=WORK)

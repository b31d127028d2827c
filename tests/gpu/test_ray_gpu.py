"""A Ray cluster with GPUs: one worker per host, each with GPUs of its own."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

import autopar
from tests.remote.cases import check_step, pipeline

pytest.importorskip("ray")

NUM_GPUS = len(jax.devices("gpu")) if jax.default_backend() == "gpu" else 0
RTOL = 2e-3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*this process has GPUs open"),
]


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    autopar.shutdown()


# This process has taken most of the GPU's memory, so workers take only what they need.
ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_a_worker_with_one_gpu() -> None:
    autopar.init(cluster="ray", num_hosts=1, devices_per_host=1, env=ENV)
    executable = check_step("gpt-tiny", autopar.ShardParallel((1,)), RTOL)
    (mesh,) = executable.meshes
    assert [len(place.devices) for place in mesh.places] == [1]
    assert mesh.places[0].platform == "gpu"
    x = mesh.submit("stats")[0].result(30)
    assert np.all(np.array(x["device_bytes"]) > 0)


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, there are {NUM_GPUS}")
def test_two_workers_are_two_stages() -> None:
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=1, env=ENV)
    check_step("gpt-tiny", pipeline(2), RTOL)


@pytest.mark.skipif(NUM_GPUS < 8, reason=f"needs 8 GPUs, there are {NUM_GPUS}")
def test_two_meshes_of_four_gpus() -> None:
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=4, env=ENV)
    check_step("gpt-tiny", pipeline(2), RTOL)

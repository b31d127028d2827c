"""A Ray cluster whose workers are GPUs, or shares of one: one mesh, stages, two meshes of several
workers, each transport between them; and training as a whole.

Every number of workers and every transport is one session, which all of its tests share. With
AUTOPAR_TEST_RANKS=cpu the same tests run on CPU workers. The bodies of the tests of training are
those of `tests/ray/test_training_on_ray.py` and `test_run_training.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import session
from autopar.runtime.ranks.shared_gpu import Ranks
from tests.gpu.conftest import ON_CPU
from tests.ray import training
from tests.ray.conftest import local_ray
from tests.ray.interleavings import call_in_random_order
from tests.ray.training import Near, Steps
from tests.remote.cases import check_step, pipeline

__all__ = ["local_ray"]  # a fixture

pytest.importorskip("ray")

RTOL = 2e-3
NEAR = Near() if ON_CPU else Near(rtol=1e-3, atol=1e-4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore:.*this process has GPUs open"),
]

# (workers, transport). On CPU workers, JAX's transfer server is the only one.
SESSIONS = [
    (2, "nccl"),
    (2, "cuda_ipc"),
    (2, "jax_transfer"),
    (4, "nccl"),
    (4, "cuda_ipc"),
    (8, "nccl"),
]


@pytest.fixture(scope="module", autouse=True)
def _precise() -> Iterator[None]:
    with training.precise():
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def init(
    local_ray: None, ranks: Callable[[int], Ranks], cache: Path
) -> Iterator[Callable[..., None]]:
    """Starts sessions. Workers keep compiled programs for those after them, and do not tune."""

    def start(num_workers: int, transport: str | None = None, **options: Any) -> None:
        if ON_CPU:
            transport = None
        env = ranks(num_workers).environment()
        flags = [os.environ.get("XLA_FLAGS", "")] + ["--xla_gpu_autotune_level=0"] * (not ON_CPU)
        env |= {
            "XLA_FLAGS": " ".join(flags),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        autopar.init(
            cluster="ray",
            num_hosts=num_workers,
            devices_per_host=1,
            env=env,
            transport=transport,
            start_limit_s=240,
            **options,
        )

    yield start
    autopar.shutdown()


@dataclass(frozen=True)
class Running:
    num_workers: int
    transport: str


@pytest.fixture(scope="module", params=SESSIONS, ids=lambda p: f"{p[0]}-{p[1]}")
def running(request: pytest.FixtureRequest, init: Callable[..., None]) -> Running:
    num_workers, transport = request.param
    if ON_CPU and transport != "nccl":
        pytest.skip("a transport of GPUs; CPU workers run the cases of nccl by jax_transfer")
    init(num_workers, transport)
    return Running(num_workers, transport)


def check_one_mesh(num_workers: int) -> None:
    """Collectives of XLA's programs among all workers."""
    shape = (num_workers,) if num_workers < 4 else (2, num_workers // 2)
    executable = check_step("mlp-tiny", autopar.ShardParallel(shape), RTOL)
    (mesh,) = executable.meshes
    assert [len(place.devices) for place in mesh.places] == [1] * num_workers
    assert {place.platform for place in mesh.places} == {"cpu" if ON_CPU else "gpu"}
    if not ON_CPU:
        stats = [reply.result(30) for reply in mesh.submit("stats")]
        assert np.all(np.array([one["device_bytes"] for one in stats]) > 0)


def test_a_worker_with_a_gpu_of_its_own(init: Callable[..., None]) -> None:
    init(1)
    check_one_mesh(1)


def test_one_mesh(running: Running) -> None:
    check_one_mesh(running.num_workers)


def test_stages(running: Running) -> None:
    """With more workers than stages, meshes of several workers send to each other."""
    for num_stages in (2, 4)[: 1 + (running.num_workers >= 4)]:
        executable = check_step("mlp-tiny", pipeline(num_stages), RTOL)
        each = running.num_workers // num_stages
        assert [len(mesh.places) for mesh in executable.meshes] == [each] * num_stages
    remote: Any = session.current().remote
    assert remote._transport == ("jax_transfer" if ON_CPU else running.transport)


# -- training, on eight workers


@pytest.fixture(scope="module")
def eight(init: Callable[..., None]) -> None:
    remote = session.current().remote
    if remote is None or remote.cluster.spec.num_devices != 8:
        init(8)


@pytest.fixture(scope="module")
def steps(eight: None) -> Steps:
    return Steps.on(8)


def test_gpt_as_a_pipeline(eight: None) -> None:
    check_step("gpt-tiny", pipeline(2), RTOL)


def test_state_is_made_on_the_cluster_and_evaluated_there(steps: Steps) -> None:
    training.state_is_made_on_the_cluster_and_evaluated_there(steps, NEAR)


def test_state_goes_from_plan_to_plan(steps: Steps) -> None:
    """To workers of another mesh that share the same GPUs, and back."""
    remote: Any = session.current().remote
    if remote.cluster.platform == "gpu" and remote.cluster._session.ranks_per_gpu == 1:
        pytest.skip("overlapping meshes need shares of GPUs: a whole GPU has one worker at a time")
    training.state_goes_from_plan_to_plan(steps, NEAR)


def test_state_takes_another_layout_on_the_same_mesh(steps: Steps) -> None:
    training.state_takes_another_layout_on_the_same_mesh(NEAR)


def test_data_loader_places_batches_ahead(steps: Steps) -> None:
    training.data_loader_places_batches_ahead(steps.pipelined, NEAR)


def test_checkpoint_goes_from_one_plan_to_another(steps: Steps, tmp_path: Path) -> None:
    training.checkpoint_goes_from_one_plan_to_another(steps, NEAR, tmp_path)


def test_nothing_is_left_behind(steps: Steps) -> None:
    training.nothing_is_left_behind(steps.pipelined, 40)


def test_threads_that_call_steps_on_the_same_workers(eight: None) -> None:
    """Three plans over the same workers and links."""
    options = ({}, {"schedule": "gpipe"}, {"schedule": "1f1b_eager"})
    steps = [
        autopar.parallelize(training.train, method=training.pipeline(2, **chosen))
        for chosen in options
    ]
    steps[0](training.make_state(0), training.batch_of(0, rows=32))  # workers run before threads do
    call_in_random_order(steps, 30, 0, NEAR)


def test_training_continues_on_fewer_workers(init: Callable[..., None], tmp_path: Path) -> None:
    """Last: it starts sessions of its own. A host with eight shares has four for the second one."""
    training.training_continues_on_fewer_workers(init, 8, NEAR, tmp_path)

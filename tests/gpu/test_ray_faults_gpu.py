"""Kills and hangs while workers on GPUs, or on shares of one, wait inside NCCL: in collectives of a
program, and for tiles from another mesh. The driver is told which worker it was; nothing is left
running; and the next session, with communicators of its own, computes what one device does.

A process that dies can take the MPS server of its GPU with it, so every session here has ranks of
its own, `side by side` (MPS) or `in turns`. With AUTOPAR_TEST_RANKS=cpu the same tests run on CPU
workers. CPU twins in `tests/ray`: `test_faults`, `test_lost_while_waiting`, `test_run_training`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, count_gpus, gpu_ranks
from autopar.runtime.ray.cluster import RayCluster
from tests.gpu.conftest import ON_CPU
from tests.ray import faults, training
from tests.ray.conftest import TOY, local_ray
from tests.ray.training import Near

__all__ = ["local_ray"]  # a fixture

pytest.importorskip("ray")

NUM_WORKERS = 4
NEAR = Near() if ON_CPU else Near(rtol=1e-3, atol=1e-4)
LIMITS: dict[str, Any] = {"heartbeat_s": 0.5, "silence_limit_s": 10, "start_limit_s": 240}
HOW_TO_SHARE = ("side by side", "in turns")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not ON_CPU and not count_gpus(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*this process has GPUs open"),
]


@pytest.fixture(scope="module", autouse=True)
def _precise() -> Iterator[None]:
    with training.precise():
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(local_ray: None, cache: Path) -> Iterator[Callable[[int, str], dict[str, str]]]:
    """The variables of workers on ranks that nothing else uses."""
    with ExitStack() as stack:

        def enter(num_workers: int, share: str) -> dict[str, str]:
            made: Ranks = CpuRanks(num_workers)
            if not ON_CPU:
                made = gpu_ranks(num_workers, mps=share == "side by side")
            flags = [os.environ.get("XLA_FLAGS", "")]
            flags += ["--xla_gpu_autotune_level=0"] * (not ON_CPU)
            return stack.enter_context(made).environment() | {
                "XLA_FLAGS": " ".join(flags),
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }

        yield enter
        autopar.shutdown()


@pytest.fixture
def toys(environment: Callable[[int, str], dict[str, str]]) -> Iterator[Callable[..., RayCluster]]:
    """Makes clusters of toy executors, whose collectives are JAX's."""
    with ExitStack() as stack:

        def make(num_workers: int, **options: Any) -> RayCluster:
            env = environment(num_workers, "in turns")
            made = RayCluster(None, num_workers, 1, env=env, executor=TOY, **(LIMITS | options))
            return stack.enter_context(made)

        yield make


@pytest.fixture
def start(environment: Callable[[int, str], dict[str, str]]) -> Callable[[str], None]:
    def start(share: str) -> None:
        env = environment(NUM_WORKERS, share)
        autopar.init(cluster="ray", num_hosts=NUM_WORKERS, devices_per_host=1, env=env, **LIMITS)

    return start


def test_killed_in_a_collective(toys: Callable[..., RayCluster]) -> None:
    faults.check_kill(toys(3), [(0, 1), (2,)], 1)


def test_silent_in_a_collective(toys: Callable[..., RayCluster]) -> None:
    faults.check_stop(toys(2), (0, 1))


def test_hangs_before_a_collective(toys: Callable[..., RayCluster]) -> None:
    faults.check_hang(toys(2, hang_limit_s=3, silence_limit_s=60), (0, 1))


@pytest.mark.parametrize("how", faults.HOW)
@pytest.mark.parametrize("where", faults.WHERE)
@pytest.mark.parametrize("share", HOW_TO_SHARE)
def test_lost_while_others_wait(
    start: Callable[[str], None], share: str, where: str, how: str
) -> None:
    """Each begins with a session that works, after that of the test before has failed."""
    start(share)
    faults.check_lost_while_others_wait(where, how, NEAR)


def test_the_next_session_works(start: Callable[[str], None]) -> None:
    start("side by side")
    for method in faults.WHERE.values():
        faults.check_training(method, NEAR)


def test_training_goes_on(start: Callable[[str], None], tmp_path: Path) -> None:
    """A worker is killed at a random moment; losses are those of a run without, bit for bit."""
    start("in turns")
    step = autopar.parallelize(training.train, method=training.PIPELINE)
    training.killed_workers_change_no_loss(step, tmp_path, 12, 1, with_loader=True)

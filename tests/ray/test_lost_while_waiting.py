"""A worker is lost while others wait for it in a step: the driver is told which one, nothing is
left running, and the next session works. CPU twin of `tests/gpu/test_ray_faults_gpu.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from tests.ray import kills
from tests.ray.faults import HOW, WHERE, check_lost_while_others_wait, check_training
from tests.ray.training import Near

pytestmark = pytest.mark.slow  # Each starts workers; test_faults stands for them.


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cluster(local_ray: None, cache: Path) -> Iterator[None]:
    autopar.init(**kills.options(cache), num_hosts=4, devices_per_host=1, start_limit_s=240)
    yield
    autopar.shutdown()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", WHERE)
def test_lost_while_others_wait(where: str, how: str) -> None:
    check_lost_while_others_wait(where, how, Near())


def test_the_next_session_works() -> None:
    for method in WHERE.values():
        check_training(method, Near())

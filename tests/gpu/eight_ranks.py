"""What tests of several ranks share: a cluster of eight, connected by one transport.

A module has one cluster per transport, of two hosts with four ranks each, whose workers serve all
its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from autopar.runtime.ranks.shared_gpu import Ranks
from tests.remote.cases import running_on
from tests.remote.process_cluster import ProcessCluster

RTOL = 2e-3
UNEQUAL = ((1, 2), (1, 2), (1, 4))
SIX = UNEQUAL * 2  # two stages on each of three meshes


@pytest.fixture(autouse=True, scope="module")
def in_full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def carried_by(transport: str, ranks: Ranks) -> str:
    return transport if ranks.platform == "gpu" else "jax_transfer"


@pytest.fixture(scope="module")
def eight(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Iterator[str]:
    """Eight ranks, connected by a transport."""
    of_eight = ranks(8)
    with running_on(ProcessCluster(2, 4, of_eight), carried_by(request.param, of_eight)):
        yield request.param

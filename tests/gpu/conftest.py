"""Ranks for tests of several GPUs: on as many GPUs, or on shares of one.

    def test_something(ranks):
        with_eight = ranks(8)       # entered; kept for the session

With AUTOPAR_TEST_RANKS=cpu the same tests run on CPU processes, without any GPU: what they do not
need CUDA for can be tried anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from autopar.errors import ClusterError
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, count_gpus, gpu_ranks

ON_CPU = os.environ.get("AUTOPAR_TEST_RANKS") == "cpu"


# Compile time matters more than run time.
_XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    started: dict[int, Ranks] = {}
    if not ON_CPU and not count_gpus():
        pytest.skip("needs a GPU, or AUTOPAR_TEST_RANKS=cpu")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if not ON_CPU:
            given = os.environ.get("XLA_FLAGS", "")
            patch.setenv("XLA_FLAGS", f"{given} {_XLA_FLAGS}".strip())

        def ranks_of(num_ranks: int) -> Ranks:
            if num_ranks not in started:
                try:
                    made = CpuRanks(num_ranks) if ON_CPU else gpu_ranks(num_ranks)
                except ClusterError as error:
                    pytest.fail(str(error))
                started[num_ranks] = stack.enter_context(made)
            return started[num_ranks]

        yield ranks_of

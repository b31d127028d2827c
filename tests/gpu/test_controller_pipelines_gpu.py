"""Pipelines of 4 and 2 ranks that a launcher started, each with one device: every rank runs its
stage and sends by the transports that its devices have.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu`, or with AUTOPAR_TEST_RANKS=cpu on
any host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import Ranks
from tests.gpu.conftest import ON_CPU
from tests.gpu.test_multi_controller_gpu import LIMIT_S, PROGRAM, ROOT, RTOL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]

# Number of ranks -> model, stages, schedule.
PIPELINES = {
    4: ["mlp 2 1f1b", "gpt-tiny-scan 2 gpipe", "gpt-tiny-scan 2 zero_bubble"],
    2: ["mlp 2 1f1b_eager", "gpt-tiny-scan 2 1f1b"],
}
CASES = [(count, name) for count, names in PIPELINES.items() for name in names]


@pytest.fixture(scope="module")
def outcomes_of(
    ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many ranks found, by pipeline; they run once."""
    found: dict[int, list[dict[str, Any]]] = {}

    def of(count: int) -> list[dict[str, Any]]:
        if count not in found:
            folder = tmp_path_factory.mktemp(f"pipelines_{count}")
            checks = [f"pipeline {name}" for name in PIPELINES[count]]
            command = [sys.executable, str(PROGRAM), str(folder), *checks]
            env = {"PYTHONPATH": str(ROOT)}
            results = run_ranks(command, ranks(count), limit_s=LIMIT_S, env=env)
            for result in results:
                assert not result.failed, f"rank {result.rank}:\n{result.output[-4000:]}"
            files = [folder / f"rank_{rank}.jsonl" for rank in range(count)]
            lines = [map(json.loads, file.read_text().splitlines()) for file in files]
            found[count] = [{one["check"]: one for one in own} for own in lines]
        return found[count]

    return of


@pytest.mark.parametrize(("count", "name"), CASES)
def test_a_pipeline_of_ranks_trains_as_one_device(outcomes_of, count, name):
    found = [own[f"pipeline {name}"] for own in outcomes_of(count)]
    assert all("losses" in own for own in found), found
    np.testing.assert_allclose(found[0]["losses"], found[0]["wanted"], rtol=RTOL)
    assert found[0]["losses"][-1] != found[0]["losses"][-2]
    num_stages = int(name.split()[1])
    per_stage = count // num_stages
    for own in found:
        assert own["losses"] == found[0]["losses"] and own["plan"] == found[0]["plan"]
        devices = own["stage_devices"]
        assert [len(numbers) for numbers in devices] == [per_stage] * num_stages
        assert sorted(d for numbers in devices for d in numbers) == list(range(count))
        assert bool(own["splits"]) == ("scan" in name)


@pytest.mark.parametrize(("count", "name"), CASES)
def test_a_checkpoint_of_a_pipeline_is_read_into_its_stages(outcomes_of, count, name):
    for own in (one[f"pipeline {name}"] for one in outcomes_of(count)):
        losses = own["losses"][len(own["losses"]) // 2 :]
        np.testing.assert_allclose(own["restored"], losses, rtol=1e-6 if ON_CPU else RTOL)

"""Pipelines on eight ranks: on GPUs of their own where the host has enough, else on shares of one.

Nothing is skipped: a rank is a process with one device either way (`ranks` of `conftest.py`), and
NCCL between them is the real one. CPU twins of single cases are in `tests/remote`; all bodies run
on CPU processes with AUTOPAR_TEST_RANKS=cpu, where each transport is JAX's.

Every transport has one cluster of eight ranks, on two hosts of four, whose workers serve all its
cases. The full product of transports, schedules, stages and models would take hours, so `CASES` is
a covering set: every transport with every schedule, every schedule with at least two divisions of
the ranks into meshes (4+4, 2+2+2+2, and the unequal 2+2+4), and every tiny model at least once.
Losses of three steps must equal those of `jax.jit`: products are computed in full precision on
both sides.
"""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.ir.schedule import SCHEDULES
from autopar.runtime.transports.choose import NAMES
from examples.models import MODELS
from tests.gpu.eight_ranks import RTOL, SIX, UNEQUAL, eight, in_full_precision
from tests.remote.cases import check_inference, check_step, pipeline

__all__ = ["eight", "in_full_precision"]  # fixtures
pytestmark = pytest.mark.gpu

# (transport, schedule, stages, model)
CASES: list[tuple[str, str, Any, str]] = [
    ("nccl", "gpipe", 2, "bert-tiny"),
    ("nccl", "1f1b", 4, "gpt-tiny"),
    ("nccl", "1f1b_eager", UNEQUAL, "llama-tiny"),
    ("nccl", "interleaved_1f1b", SIX, "mlp-tiny"),
    ("nccl", "zero_bubble", 2, "moe-tiny"),
    ("nccl", "inference", 2, "mlp-tiny"),
    ("cuda_ipc", "gpipe", 4, "mlp-tiny"),
    ("cuda_ipc", "1f1b", UNEQUAL, "gpt-tiny-scan"),
    ("cuda_ipc", "1f1b_eager", 2, "bert-layers-tiny"),
    ("cuda_ipc", "interleaved_1f1b", 4, "mlp-tiny"),
    ("cuda_ipc", "zero_bubble", UNEQUAL, "mlp-tiny"),
    ("cuda_ipc", "inference", UNEQUAL, "mlp-tiny"),
    ("jax_transfer", "gpipe", UNEQUAL, "wresnet-tiny"),
    ("jax_transfer", "1f1b", 2, "llama-tiny-scan"),
    ("jax_transfer", "1f1b_eager", 2, "vit-tiny"),
    ("jax_transfer", "interleaved_1f1b", 4, "mlp-tiny"),
    ("jax_transfer", "zero_bubble", 2, "dlrm-tiny"),
    ("jax_transfer", "inference", 4, "mlp-tiny"),
]


def method_of(schedule: str, stages: Any, name: str) -> autopar.PipeshardParallel:
    # BatchNorm's statistics are those of a micro-batch.
    return pipeline(stages, schedule, 1 if name.startswith("wresnet") else 4)


def test_the_cases_cover_what_they_must() -> None:
    pairs = {(transport, schedule) for transport, schedule, _, _ in CASES}
    assert pairs == {(transport, schedule) for transport in NAMES for schedule in SCHEDULES}
    for schedule in SCHEDULES:
        assert len({case[2] for case in CASES if case[1] == schedule}) >= 2
    assert {name for *_, name in CASES} == {name for name in MODELS if "-tiny" in name}


@pytest.mark.parametrize(
    ("eight", "schedule", "stages", "name"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}-{case[3]}".replace(" ", ""))
        for case in CASES
    ],
    indirect=["eight"],
)
def test_a_pipeline_equals_jit(eight: str, schedule: str, stages: Any, name: str) -> None:
    method = method_of(schedule, stages, name)
    if schedule == "inference":
        check_inference(method, RTOL)
        return
    executable = check_step(name, method, RTOL)
    sizes = [len(mesh.devices) for mesh in executable.meshes]
    assert sum(sizes) == 8
    if stages == UNEQUAL:
        assert sizes == [2, 2, 4]

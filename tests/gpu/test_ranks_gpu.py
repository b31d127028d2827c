"""What only several GPUs show: eight ranks, each a process with a GPU or a share of one, run the
same program, and NCCL carries what they exchange.

`rank_programs.py` is what a rank runs. One launch does many checks; each test here reads one of
them. Dry-run on CPU processes with AUTOPAR_TEST_RANKS=cpu.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ranks.launch import RankResult, run_ranks
from autopar.runtime.ranks.shared_gpu import Ranks
from tests.gpu.rank_programs import FAILING_RANK, MEMORY_METHODS, NUM_STEPS, ORDERS, SMALL_TYPES

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rank_programs.py")
NUM_RANKS = 8
ON_CPU = os.environ.get("AUTOPAR_TEST_RANKS") == "cpu"
LIMIT_S = 1500.0 if ON_CPU else 280.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(2 * LIMIT_S + 60.0)]  # two launches at most
FAILURE_LIMIT_S = 400.0 if ON_CPU else 150.0
ENDS_WITHIN_S = 60.0  # of a rank's failure; alone, JAX would take 300 s

MEMORY = f"memory:{','.join(MEMORY_METHODS)}"
ATTENTIONS = ["attention:8", "attention:2x4"]
TYPES = [f"small_types:{name}" for name in SMALL_TYPES]
ORDER = [f"order:{name}" for name in ORDERS]
LOSSES = [
    f"losses:{method} {dtype} {NUM_STEPS}"
    for method, dtype in (
        ("data", "float32"),
        ("zero3", "float32"),
        ("2x4", "float32"),
        ("2x4", "bfloat16"),
    )
]
# Memory comes first: a device's peak does not go down.
CHECKS = [MEMORY, *ATTENTIONS, *TYPES, *ORDER, *LOSSES]
IN_COMMAND_BUFFERS = [f"losses:zero3 float32 {NUM_STEPS}", f"losses:2x4 float32 {NUM_STEPS}"]
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"

# Error of a loss against the first one, and how much of it each step adds. (Late losses are small,
# and in bfloat16 they scatter by percents of themselves.)
ERRORS = {"float32": (2e-5, 2e-6), "bfloat16": (1e-2, 2e-4)}
# Measured peak over the plan's. XLA's buffers are 0.96 to 1.15 of it; NCCL's are not XLA's.
PEAK_TOLERANCE = 1.3
# The state's share of a rank, at least and at most. On (2, 4), the layers are split over y.
SHARES = {"data": (1.0, 1.0), "zero3": (0.125, 0.13), "2x4": (0.125, 0.3)}
SMALL_BYTES = 2**20  # a loss, a step's number, a batch of tokens

Outcomes = list[dict[str, list[dict[str, Any]]]]


def launch(
    ranks: Ranks,
    folder: Path,
    checks: Sequence[str],
    *,
    flags: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    grace_s: float = 15.0,
) -> tuple[list[RankResult], Outcomes]:
    """Runs the checks in every rank: how each ended, and its outcomes by check."""
    env = {"PYTHONPATH": str(ROOT)}
    if not ON_CPU:
        # Kernels are not tuned: that takes long, and ranks must agree bit for bit between launches.
        given = os.environ.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = " ".join([given, "--xla_gpu_autotune_level=0", *flags]).strip()
    command = [sys.executable, str(SCRIPT), str(folder), *checks]
    results = run_ranks(command, ranks, limit_s=limit_s, env=env, folder=folder, grace_s=grace_s)
    return results, [read(folder / f"rank_{rank}.jsonl") for rank in range(ranks.num_ranks)]


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        outcome = json.loads(line)
        found.setdefault(outcome["check"], []).append(outcome)
    return found


def ends(results: Sequence[RankResult]) -> str:
    """The ends of what failed ranks printed."""
    said = [
        f"rank {one.rank}: exit code {one.returncode}{', timed out' * one.timed_out}\n"
        f"{one.output[-3000:]}"
        for one in results
        if one.failed
    ]
    return "\n\n".join(said[:3])


class Launched:
    """The outcomes of a launch. A check that did not come about fails its tests alone."""

    def __init__(self, results: Sequence[RankResult], outcomes: Outcomes) -> None:
        self.results, self.outcomes = results, outcomes

    def of(self, check: str) -> list[list[dict[str, Any]]]:
        """By rank, the outcomes of a check."""
        missing = [rank for rank, own in enumerate(self.outcomes) if check not in own]
        assert not missing, f"{check}: no outcome of ranks {missing}\n{ends(self.results)}"
        return [own[check] for own in self.outcomes]


def launched(
    ranks: Callable[[int], Ranks],
    factory: pytest.TempPathFactory,
    checks: Sequence[str],
    **options: Any,
) -> Launched:
    return Launched(*launch(ranks(NUM_RANKS), factory.mktemp("ranks"), checks, **options))


@pytest.fixture(scope="module")
def eight(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launched(ranks, tmp_path_factory, CHECKS)


@pytest.fixture(scope="module")
def in_command_buffers(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    flags = [
        f"--xla_gpu_enable_command_buffer={COMMANDS}",
        "--xla_gpu_graph_min_graph_size=1",
    ]
    return launched(ranks, tmp_path_factory, IN_COMMAND_BUFFERS, flags=flags)


@pytest.fixture(scope="module")
def out_of_memory(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launched(
        ranks,
        tmp_path_factory,
        ["out_of_memory"],
        limit_s=FAILURE_LIMIT_S,
        grace_s=ENDS_WITHIN_S,
    )


def test_every_rank_ends_well(eight: Launched) -> None:
    assert not any(one.failed for one in eight.results), ends(eight.results)


# -- attention and small types


def assert_losses(found: Sequence[Sequence[Mapping[str, Any]]], rtol: Any) -> None:
    """Those of one device, the same in every rank, and not constant."""
    wanted = found[0][0]["wanted"]
    assert all(own[0]["losses"] == found[0][0]["losses"] for own in found)
    np.testing.assert_allclose(found[0][0]["losses"], wanted, rtol=rtol)
    assert np.isfinite(wanted).all() and wanted[0] != wanted[-1]


@pytest.mark.parametrize("check", ATTENTIONS)
def test_fused_attention_is_split_by_batch_and_heads(eight: Launched, check: str) -> None:
    found = eight.of(check)
    assert_losses(found, 2e-2)
    if not ON_CPU:
        for (own,) in found:
            share = own["elements"] // NUM_RANKS
            assert own["kernels"] == [share, share], "forward and backward, an eighth of each"


@pytest.mark.parametrize("check", TYPES)
def test_collectives_of_small_types(eight: Launched, check: str) -> None:
    found = eight.of(check)
    assert_losses(found, 2e-2)
    dtypes = {dtype for _, dtype in found[0][0]["collectives"]}
    print(check, found[0][0]["collectives"])
    if not ON_CPU:  # where XLA makes larger types of them
        assert dtypes & ({"bf16"} if "bf16" in check else {"f8e4m3fn", "u8", "s8"})


# -- memory


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_state_is_donated_and_takes_its_share(eight: Launched, method: str) -> None:
    for own in eight.of(MEMORY):
        (found,) = (one for one in own if one["method"] == method)
        assert found["were_deleted"] == [True] * 3
        least, most = SHARES[method]
        whole = found["whole_state_bytes"]
        assert least * whole <= found["state_bytes"] <= most * whole + SMALL_BYTES
        assert 0 <= found["live_bytes"] - found["state_bytes"] <= SMALL_BYTES
        if not ON_CPU:
            in_use = found["after"]["bytes_in_use"]
            assert found["live_bytes"] <= in_use <= found["live_bytes"] * 1.05 + 64 * SMALL_BYTES


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_the_peak_is_near_the_plan(eight: Launched, method: str) -> None:
    """The device's peak is that of all steps so far, so it is compared with the largest plan."""
    for rank, own in enumerate(eight.of(MEMORY)):
        position = [one["method"] for one in own].index(method)
        found, until_now = own[position], own[: position + 1]
        planned = max(one["plan_peak_bytes"] for one in until_now)
        assert found["xla_peak_bytes"] >= found["state_bytes"]
        if ON_CPU:
            continue
        peak = found["after"]["peak_bytes_in_use"]
        figures = {
            "state": found["state_bytes"],
            "plan": found["plan_peak_bytes"],
            "XLA": found["xla_peak_bytes"],
            "peak": peak,
        }
        texts = [f"{name} {size / 2**30:.3f} GiB" for name, size in figures.items()]
        print(
            f"{method}, rank {rank}: {', '.join(texts)}, state {found['state_bytes'] / 2**30:.3f}"
        )
        assert found["state_bytes"] <= peak <= PEAK_TOLERANCE * planned


# -- orders of devices


@pytest.mark.parametrize("check", ORDER)
def test_any_order_of_devices(eight: Launched, check: str) -> None:
    """Every shard lies where the mesh says, and has exactly its part of the result."""
    order = ORDERS[check.partition(":")[2]]
    found = eight.of(check)
    for rank, own in enumerate(found):
        assert [tuple(one["shape"]) for one in own] == [(2, 4), (4, 2)]
        for one in own:
            rows, columns = one["shape"]
            assert one["loss"] == one["wanted_loss"]
            assert one["devices"] == order(sorted(one["devices"])) == found[0][0]["devices"]
            assert one["shards"] and all(right for _, right in one["shards"]), rank
            assert one["sizes"] == {
                "a": [16 // rows, 8 // columns],
                "b": [8 // columns, 16 // rows],
            }
    owners = [{device for device, _ in own[0]["shards"]} for own in found]
    assert len(set().union(*owners)) == sum(map(len, owners)) == NUM_RANKS


# -- many steps


def allowed_error(check: str, num_steps: int) -> np.ndarray:
    first, per_step = ERRORS[check.split()[1]]
    return first + per_step * np.arange(num_steps)


@pytest.mark.parametrize("check", LOSSES)
def test_losses_of_many_steps_do_not_drift(eight: Launched, check: str) -> None:
    found = eight.of(check)
    got, wanted = found[0][0]["losses"], np.array(found[0][0]["wanted"])
    signed = (np.array(got) - wanted) / wanted[0]
    error, allowed = np.abs(signed), allowed_error(check, len(wanted))
    print(check, f"largest error {error.max():.1e} at step {error.argmax()}, last {error[-1]:.1e}")
    assert all(own[0]["losses"] == got for own in found)
    assert np.all(error <= allowed)
    assert abs(signed[-len(wanted) // 4 :].mean()) <= allowed[-1] / 2
    assert found[0][0]["collectives"] > 0
    if not ON_CPU:
        assert len(wanted) == NUM_STEPS and wanted[-1] < 0.8 * wanted[0]


@pytest.mark.parametrize("check", IN_COMMAND_BUFFERS)
def test_command_buffers_with_collectives(
    eight: Launched, in_command_buffers: Launched, check: str
) -> None:
    plain, found = eight.of(check), in_command_buffers.of(check)
    assert not any(one.failed for one in in_command_buffers.results)
    for one, other in zip(plain, found, strict=True):
        losses, wanted = np.array(other[0]["losses"]), np.array(one[0]["losses"])
        assert np.all(np.abs(losses - wanted) <= allowed_error(check, len(wanted)) * wanted[0])


# -- out of memory


def test_one_rank_runs_out_of_memory(out_of_memory: Launched) -> None:
    """That rank raises JAX's error with what to do about it; all end, none at the time limit."""
    (own,) = out_of_memory.of("out_of_memory")[FAILING_RANK]
    assert np.isfinite(own["loss"])
    outcomes = out_of_memory.outcomes
    assert "raised" in outcomes[FAILING_RANK], ends(out_of_memory.results)
    (raised,) = outcomes[FAILING_RANK]["raised"]
    assert "RESOURCE_EXHAUSTED" in raised["message"], raised
    assert not any(one.timed_out for one in out_of_memory.results)
    assert all(one.returncode > 0 for one in out_of_memory.results), ends(out_of_memory.results)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_every_rank_says_which_one_ran_out_of_memory(out_of_memory: Launched, rank: int) -> None:
    output = out_of_memory.results[rank].output
    assert "RESOURCE_EXHAUSTED" in output, output[-3000:]
    assert f"process {FAILING_RANK}" in output or rank == FAILING_RANK, output[-3000:]
    assert "memory_budget_bytes" in output, output[-3000:]

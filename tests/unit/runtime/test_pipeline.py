"""Pipelines on the devices of this process, against `jax.jit` of the whole step."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import ArgumentError
from autopar.ir.pipeline import Phase
from autopar.lower.tiles import plan_transfers
from autopar.runtime.arguments import SignatureChanged
from autopar.runtime.pipeline import PipelineExecutable
from tests.unit.runtime import hand_pipeline as hand
from tests.unit.runtime.hand_pipeline import arguments, make_executable

STATE = slice(0, 4)  # of the arguments, and of the results
WHOLE_STEP = jax.jit(hand.step)


@pytest.fixture(scope="module")
def executable() -> PipelineExecutable:
    return make_executable()


def run_steps(executable: PipelineExecutable, num_steps: int = 3) -> list[Any]:
    leaves = arguments()
    results: list[Any] = []
    for _ in range(num_steps):
        results = executable(leaves)
        leaves = [*results[STATE], *leaves[4:]]
    return results


def whole_steps(num_steps: int = 3) -> list[Any]:
    leaves = arguments()
    results: list[Any] = []
    for _ in range(num_steps):
        results = WHOLE_STEP(*leaves)
        leaves = [*results[STATE], *leaves[4:]]
    return results


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)


# -- results

MESHES = {
    "one device each": ((1, 1), (1, 1)),
    "2 and 4": ((1, 2), (2, 2)),
    "4 and 2": ((2, 2), (2, 1)),
    "4 and 4": ((4, 1), (1, 4)),
}


@pytest.mark.representatives("4 and 2")
@pytest.mark.parametrize("shapes", MESHES.values(), ids=MESHES.keys())
def test_three_steps_are_those_of_the_whole(shapes: Any) -> None:
    assert_equal(run_steps(make_executable(shapes)), whole_steps())


@pytest.mark.representatives("1f1b_eager")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b_eager"])
def test_schedules(schedule: str) -> None:
    assert_equal(run_steps(make_executable(schedule=schedule)), whole_steps())


@pytest.mark.representatives("2")
@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_numbers_of_micro_batches(num_micro_batches: int) -> None:
    executable = make_executable(((1, 2), (1, 2)), num_micro_batches)
    assert_equal(run_steps(executable), whole_steps())


@pytest.mark.ci
def test_stages_that_share_a_mesh() -> None:
    executable = make_executable(((2, 2),), stage_mesh=(0, 0))
    assert_equal(run_steps(executable), whole_steps())


@pytest.mark.ci
def test_transfers_by_tiles(monkeypatch) -> None:
    """H and DH lie otherwise on the one stage than on the other."""
    meshes = (2, 2), (1, 4)
    plans = plan_transfers(make_executable(meshes).pipeline, hand.make_buffers(meshes))
    assert [plans[number].shape for number in range(4)] == [(4, 16), (4, 16), (), ()]
    executable = make_executable(meshes, tile_plans=plans)
    leaves = executable.place(arguments())
    places: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, to: (places.extend(to), put(x, to))[1])
    results = executable(leaves)
    assert set(places) == set(jax.devices()), "tiles to devices, and no whole arrays"
    assert_equal(results, whole_steps(1))


# -- arguments


@pytest.mark.ci
def test_results_stay_placed_and_nothing_moves_between_steps(
    executable: PipelineExecutable,
) -> None:
    results = executable(arguments())
    for result, sharding in zip(results, executable.output_shardings, strict=True):
        assert result.sharding == sharding
    batch = jax.device_put(arguments()[4:], executable.input_shardings[4:])
    with jax.transfer_guard_host_to_device("disallow"):
        executable([*results[STATE], *batch])
    assert all(result.is_deleted() for result in results[STATE]), "they were used, not copies"


def test_state_is_donated_and_the_batch_is_not(executable: PipelineExecutable) -> None:
    leaves = executable.place(arguments())
    results = executable(leaves)
    assert all(leaf.is_deleted() for leaf in leaves[STATE])
    assert not any(leaf.is_deleted() for leaf in (*leaves[4:], *results))


@pytest.mark.ci
def test_donation_can_be_refused() -> None:
    executable = make_executable(donated=frozenset())
    leaves = executable.place(arguments())
    first, second = executable(leaves), executable(leaves)
    assert not any(leaf.is_deleted() for leaf in leaves)
    assert_equal(first, second)


def test_arrays_that_lie_elsewhere_are_moved(executable: PipelineExecutable) -> None:
    want = whole_steps(1)
    mesh = executable.meshes[1]
    for place in (jax.devices()[7], NamedSharding(mesh, P()), executable.input_shardings[2]):
        leaves = jax.device_put(arguments(), place)
        assert_equal(executable(leaves), want)
        assert not any(leaf.is_deleted() for leaf in leaves[4:])
    assert_equal(executable([jnp.asarray(leaf) for leaf in arguments()]), want)


def test_one_array_in_two_places_of_the_state(executable: PipelineExecutable) -> None:
    """XLA would end the process if one buffer were donated twice."""
    w0, _, *rest = arguments()
    placed = jax.device_put(w0, executable.input_shardings[0])
    results = executable([placed, placed, *rest])
    assert_equal(results, WHOLE_STEP(w0, w0, *rest))


def test_double_precision_from_numpy_is_what_jax_makes_of_it(
    executable: PipelineExecutable,
) -> None:
    leaves = arguments()
    leaves[4] = leaves[4].astype(np.float64)
    assert_equal(executable(leaves), whole_steps(1))


OTHER = {
    "shape": (hand.X, np.zeros((2 * hand.ROWS, hand.WIDTH), np.float32)),
    "dtype": (hand.X, np.zeros((hand.ROWS, hand.WIDTH), np.int32)),
    "weak type": (hand.COUNT, 0),
}


@pytest.mark.parametrize(("position", "leaf"), OTHER.values(), ids=OTHER.keys())
def test_other_types_change_the_signature(
    executable: PipelineExecutable, position: int, leaf: Any
) -> None:
    leaves = executable.place(arguments())
    changed = list(leaves)
    changed[position] = leaf
    with pytest.raises(SignatureChanged):
        executable(changed)
    with pytest.raises(SignatureChanged):
        executable(leaves[:-1])
    assert not any(leaf.is_deleted() for leaf in leaves), "nothing has run"


def test_deleted_arrays(executable: PipelineExecutable) -> None:
    leaves = executable.place(arguments())
    executable(leaves)
    fresh = executable.place(arguments())
    said = r"Array has been deleted: argument 3 of step, .* donate_argnums=\(\)"
    with pytest.raises(ArgumentError, match=said) as caught:
        executable([*fresh[:3], leaves[3], *fresh[4:]])
    assert isinstance(caught.value, RuntimeError), "as JAX has it"
    assert not any(leaf.is_deleted() for leaf in fresh), "nothing has run"


def test_inside_another_program(executable: PipelineExecutable) -> None:
    assert_equal(jax.jit(lambda *leaves: executable(leaves))(*arguments()), whole_steps(1))


# -- many steps


@pytest.mark.ci
def test_many_steps_leak_nothing(executable: PipelineExecutable) -> None:
    leaves = executable.place(arguments())
    counts = []
    for number in range(200):
        results = executable(leaves)
        leaves = [*results[STATE], *leaves[4:]]
        del results
        if number % 50 == 9:
            jax.block_until_ready(leaves)
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert len(set(counts)) == 1, counts
    assert int(leaves[hand.COUNT]) == 200


# -- looking into it


@pytest.mark.representatives("donated1-1f1b")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b_eager"])
@pytest.mark.parametrize("donated", [frozenset(), frozenset((hand.W0, hand.COUNT, hand.W1))])
def test_live_bytes_are_as_predicted(schedule: str, donated: frozenset[int]) -> None:
    executable = make_executable(schedule=schedule, donated=donated)
    results, stats = executable.run_tracked(executable.place(arguments()))
    assert stats.peak_live_bytes == executable.live_bytes()
    assert_equal(results, whole_steps(1))


def test_one_forward_one_backward_holds_less_than_gpipe() -> None:
    """Of eight micro-batches stage 0 keeps two at a time, not eight."""
    peaks = {
        schedule: make_executable(num_micro_batches=8, schedule=schedule).live_bytes()
        for schedule in ("gpipe", "1f1b")
    }
    residual = 4 * hand.ROWS // 8 * (hand.HIDDEN // 2)
    assert peaks["gpipe"][0] - peaks["1f1b"][0] == 6 * residual


@pytest.mark.ci
def test_statistics_of_a_step(executable: PipelineExecutable) -> None:
    _, stats = executable.run_tracked(arguments())
    # Two prepare, four forward and backward on each of two stages, two parts of two updates.
    assert stats.num_runs == 2 + 4 * 4 + 4
    assert stats.num_sends == stats.num_transfers == 2 * 4 + 2
    activations = 4 * hand.ROWS * hand.HIDDEN
    assert stats.transfer_bytes == 2 * activations + 2 * 4
    counts = executable.num_instructions()
    assert counts["Run"] == stats.num_runs
    assert counts["Send"] == counts["Recv"] == stats.num_sends
    assert counts["Free"] == stats.num_frees


def test_time_of_stage_programs(executable: PipelineExecutable) -> None:
    timed = executable.time_stage_programs(arguments())
    assert len(timed) == executable.num_instructions()["Run"]
    assert all(seconds > 0 for _, _, seconds in timed)
    forward = [
        m
        for stage_program, m, _ in timed
        if (stage_program.stage, stage_program.phase) == (1, Phase.FORWARD)
    ]
    assert forward == [0, 1, 2, 3]


def test_what_an_executable_tells(executable: PipelineExecutable, tmp_path: Path) -> None:
    text = executable.hlo_text()
    assert set(executable.compiled) == {
        f"stage{stage}_{phase}"
        for stage in (0, 1)
        for phase in ("prepare", "forward", "backward", "update", "update_1")
    }
    for name in executable.compiled:
        assert f"// {name}\n\nHloModule jit_step_{name}" in text
    # The gradient of w1 is summed over the devices that split the rows, for every micro-batch.
    sums = [
        op
        for op in executable.collectives()
        if op.kind == "all-reduce" and op.shapes == ((hand.HIDDEN // 2, hand.OUT),)
    ]
    assert [op.trips for op in sums] == [4]
    assert executable.memory_bytes() == max(executable.mesh_memory_bytes())
    for whole, buffers in zip(executable.mesh_memory_bytes(), executable.live_bytes(), strict=True):
        assert whole >= buffers > 0
    executable.dump_debug_info(tmp_path / "dump")
    figures = json.loads((tmp_path / "dump" / "figures.json").read_text())
    assert figures["memory_bytes"] == executable.memory_bytes()
    lines = (tmp_path / "dump" / "instructions_mesh1.txt").read_text().splitlines()
    assert len(lines) == len(executable.programs.meshes[1].instructions)
    with pytest.raises(ArgumentError, match="is a file"):
        executable.dump_debug_info(tmp_path / "dump" / "plan.txt")

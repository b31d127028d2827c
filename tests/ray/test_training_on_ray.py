"""What users do on a cluster beside calling a step: make the state there, evaluate, hand state from
one plan to another, load data, save and restore, look at arrays."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import ArgumentError, CompileError, session
from tests.equivalence.pipelines import assert_equal
from tests.ray import training
from tests.ray.training import (
    WIDTH,
    Near,
    Steps,
    batch_of,
    fetched,
    make_state,
    train,
)

pytestmark = pytest.mark.ci  # test_two_hosts stands for training on Ray

NUM_DEVICES = 8
ONE_MESH = autopar.ShardParallel((2, 4))


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=2)
    yield
    autopar.shutdown()


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps.on(NUM_DEVICES)


@pytest.fixture(scope="module")
def pipelined(steps: Steps) -> Any:
    return steps.pipelined


@pytest.fixture(scope="module")
def on_one_mesh(steps: Steps) -> Any:
    return steps.on_one_mesh


@pytest.fixture(scope="module")
def wanted() -> list[tuple[Any, Any]]:
    return training.wanted()


def test_state_made_on_the_cluster_and_evaluated_there(steps: Steps) -> None:
    training.state_is_made_on_the_cluster_and_evaluated_there(steps, Near())


def test_state_goes_from_plan_to_plan(steps: Steps) -> None:
    training.state_goes_from_plan_to_plan(steps, Near())


def test_state_in_another_layout_on_the_same_mesh() -> None:
    training.state_takes_another_layout_on_the_same_mesh(Near())


def test_programs_of_steps_that_are_gone_are_forgotten(on_one_mesh: Any) -> None:
    on_one_mesh(make_state(0), batch_of(0))
    (mesh,) = on_one_mesh.last_executable.meshes

    def tasks() -> set[int]:
        return {n for reply in mesh.submit("stats") for n in reply.result(30)["tasks"]}

    other = autopar.parallelize(lambda x, batch: x + batch.sum(), method=ONE_MESH)
    other(jnp.zeros(()), np.ones((8, 2), np.float32))
    number = other.last_executable.number
    assert number in tasks()
    del other
    gc.collect()
    on_one_mesh(make_state(0), batch_of(0))
    assert number not in tasks()


def test_a_mesh_that_was_closed_is_started_by_its_step(steps: Steps) -> None:
    """As when another step needed its GPUs. Moves between meshes are loaded on new workers too."""

    def run() -> tuple[Any, Any]:
        state, results = steps.pipelined(make_state(0), batch_of(0))
        _, later = steps.on_one_mesh(state, batch_of(1))  # moves the state
        return fetched(results), fetched(later)

    want = run()
    remote: Any = session.current().remote
    closed = steps.pipelined.last_executable.meshes[0]
    assert any(closed.devices in key for key in remote.moves)
    remote.cluster.close_group(closed.group)
    assert_equal(run(), want)
    meshes = steps.pipelined.last_executable.meshes
    assert closed not in meshes and not any(mesh.group.closed for mesh in meshes)


def test_arrays_tell_what_they_are(pipelined: Any) -> None:
    state, results = pipelined(make_state(0), batch_of(0))
    loss, weight = results["loss"], state["params"][0]["w"]
    assert (weight.shape, weight.dtype, weight.ndim, weight.size) == ((8, 8), jnp.float32, 2, 64)
    assert weight.nbytes == 256 and len(weight) == 8
    assert "float32[8, 8]" in repr(weight) and "devices 0-3" in repr(weight)
    assert float(loss) == loss.item() == np.asarray(loss)
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert jax.block_until_ready(state) is state
    assert state["key"].fetch().dtype == state["key"].dtype
    assert int(state["step"]) == 1
    for use in (
        lambda: weight + 1,
        lambda: 2 * weight,
        lambda: weight @ weight,
        lambda: -weight,
        lambda: weight[0],
        lambda: list(weight),
    ):
        with pytest.raises(ArgumentError, match=r"np\.asarray"):
            use()
    with pytest.raises(TypeError, match="DistributedArray"):
        jnp.sum(weight)
    np.testing.assert_array_equal(jnp.asarray(weight), weight.fetch())
    with pytest.raises(ArgumentError, match="random keys are not numbers") as caught:
        np.asarray(state["key"])
    assert isinstance(caught.value, TypeError), "as JAX has it"
    again, _ = pipelined(state, batch_of(1))
    assert weight.is_deleted() and "deleted" in repr(weight)
    with pytest.raises(ArgumentError, match="is deleted"):
        np.asarray(weight)
    with pytest.raises(ArgumentError, match=r"state\['key'\]"):
        pipelined(state, batch_of(1))
    del again


def test_one_array_for_two_arguments(wanted: Any) -> None:
    """The average of the parameters starts as the parameters themselves."""

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((batch["x"] @ p - batch["y"]) ** 2))(state["p"])
        new = state["p"] - 0.1 * grads
        return {"p": new, "mean": 0.9 * state["mean"] + 0.1 * new}

    p = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    parallel = autopar.parallelize(step, method=ONE_MESH)
    placed = parallel({"p": p, "mean": p}, batch_of(0))["p"]
    want = jax.jit(step)({"p": np.asarray(placed), "mean": np.asarray(placed)}, batch_of(1))
    got = parallel({"p": placed, "mean": placed}, batch_of(1))
    assert_equal(fetched(got), want)


@pytest.mark.parametrize("num_steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_behind(pipelined: Any, num_steps: int) -> None:
    training.nothing_is_left_behind(pipelined, num_steps)


def test_data_loader_places_batches_ahead(pipelined: Any) -> None:
    training.data_loader_places_batches_ahead(pipelined, Near())


def test_checkpoint_from_one_plan_to_another(steps: Steps, tmp_path: Path) -> None:
    training.checkpoint_goes_from_one_plan_to_another(steps, Near(), tmp_path)


def test_local_checkpoint_is_restored_on_the_cluster(
    pipelined: Any, wanted: Any, tmp_path: Path
) -> None:
    autopar.save_checkpoint(tmp_path, wanted[0][0], 1)
    pipelined.plan(jax.eval_shape(lambda: make_state(0)), batch_of(0))
    state = autopar.restore_checkpoint(tmp_path, pipelined)
    _, results = pipelined(state, batch_of(1))
    assert_equal(fetched(results), wanted[1][1])


def test_other_shapes_are_planned_for(on_one_mesh: Any) -> None:
    state, _ = on_one_mesh(make_state(0), batch_of(0))
    first = on_one_mesh.last_executable
    state, results = on_one_mesh(state, batch_of(1, rows=32))
    assert on_one_mesh.last_executable is not first
    assert np.isfinite(float(results["loss"]))


def test_steps_are_sent_ahead_within_bounds(on_one_mesh: Any) -> None:
    state: Any = make_state(0)
    for index in range(8):
        state, _ = on_one_mesh(state, batch_of(index))
        assert len(on_one_mesh.last_executable._ahead) <= 2
    on_one_mesh.last_executable.wait()


def test_inside_of_another_program(on_one_mesh: Any) -> None:
    _, results = jax.jit(on_one_mesh)(make_state(0), batch_of(0))
    assert isinstance(results["loss"], jax.Array)


def test_callbacks_cannot_cross_processes() -> None:
    def step(state: Any, batch: Any) -> Any:
        new = state + jnp.mean(batch)
        jax.debug.print("{}", new)
        return new

    with pytest.raises(CompileError, match="calls back into Python"):
        autopar.parallelize(step, method=ONE_MESH)(jnp.zeros(()), np.ones((8, 2), np.float32))


def test_what_the_executable_tells(pipelined: Any, tmp_path: Path) -> None:
    pipelined(make_state(0), batch_of(0))
    executable = pipelined.last_executable
    assert len(executable.mesh_memory_bytes()) == 2
    assert executable.memory_bytes() >= max(executable.live_bytes()) > 0
    assert "HloModule" in executable.hlo_text()
    executable.dump_debug_info(tmp_path)
    assert (tmp_path / "plan.json").exists()
    assert "Not made" not in (tmp_path / "README.txt").read_text()
    for name in executable.hlo_texts():
        assert "sharding" in (tmp_path / f"{name}.annotated.mlir").read_text()
        assert "HloModule" in (tmp_path / f"{name}.optimized.hlo.txt").read_text()
    assert json.loads((tmp_path / "transfers.json").read_text())[0]["from"].startswith("mesh")
    assert executable.num_instructions()["Run"] >= 2 * 2 * 4


def test_collectives_are_those_of_the_workers_programs() -> None:
    parallel = autopar.parallelize(train, method=autopar.DataParallel())
    parallel(make_state(0), batch_of(0))
    kinds = {op.kind for op in parallel.last_executable.collectives()}
    assert kinds & {"all-reduce", "reduce-scatter"}, kinds


def test_default_method_plans_for_the_cluster() -> None:
    parallel = autopar.parallelize(train)
    spec = session.current().cluster()
    assert (spec.num_hosts, spec.devices_per_host) == (4, 2)
    _, results = parallel(make_state(0), batch_of(0))
    want = jax.jit(train)(make_state(0), batch_of(0))[1]
    assert_equal(fetched(results), want)

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
import optax
import pytest

import autopar
from autopar import ArgumentError, CompileError, DistributedArray, session
from tests.equivalence.pipelines import assert_equal
from tests.ray.test_pipelines_on_ray import fetched

pytestmark = pytest.mark.ci  # test_two_hosts stands for training on Ray

WIDTH, ROWS, LAYERS = 8, 16, 4


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=2)
    yield
    autopar.shutdown()


optimizer = optax.adam(1e-2)


def make_state(seed: Any) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5} for k in keys]
    return {
        "params": params,
        "opt": optimizer.init(params),
        "key": jax.random.key(seed),
        "step": jnp.zeros((), jnp.int32),
    }


def forward(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return x


def train(state: Any, batch: Any) -> tuple[Any, Any]:
    key, dropout = jax.random.split(state["key"])

    def loss_of(params: Any) -> jax.Array:
        x = batch["x"] * jax.random.bernoulli(dropout, 0.9, batch["x"].shape)
        return jnp.mean((forward(params, x) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    new = {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}
    return new, {"loss": loss, "norm": optax.tree.norm(grads)}


def evaluate(state: Any, batch: Any) -> jax.Array:
    return jnp.mean((forward(state["params"], batch["x"]) - batch["y"]) ** 2)


def batch_of(index: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    return {name: rng.normal(size=(rows, WIDTH)).astype(np.float32) for name in ("x", "y")}


def pipeline(num_stages: int, **options: Any) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(4, stages=autopar.UniformStages(num_stages), **options)


PIPELINE = pipeline(2)
ONE_MESH = autopar.ShardParallel((2, 4))


@pytest.fixture(scope="module")
def pipelined() -> Any:
    return autopar.parallelize(train, method=PIPELINE)


@pytest.fixture(scope="module")
def on_one_mesh() -> Any:
    return autopar.parallelize(train, method=ONE_MESH)


@pytest.fixture(scope="module")
def wanted() -> list[tuple[Any, Any]]:
    """(state, results) after each of some steps on one device."""
    serial, state, found = jax.jit(train), make_state(0), []
    for index in range(6):
        state, results = serial(state, batch_of(index))
        found.append((state, results))
    return found


def test_state_made_on_the_cluster_and_evaluated_there(pipelined: Any, wanted: Any) -> None:
    method = autopar.CreateStateParallel(pipelined, batch_of(0))
    state = autopar.parallelize(make_state, method=method)(0)
    leaves = jax.tree.leaves(state)
    assert all(isinstance(x, DistributedArray) for x in leaves)
    assert {x.mesh.devices for x in leaves} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert_equal(fetched(state), make_state(0))
    test = autopar.parallelize(evaluate, method=autopar.FollowParallel(pipelined))
    loss = test(state, batch_of(9))
    np.testing.assert_allclose(loss, evaluate(make_state(0), batch_of(9)), rtol=1e-5)
    for index in range(2):
        state, results = pipelined(state, batch_of(index))
    assert_equal(fetched(results), wanted[1][1])
    assert_equal(fetched(state), wanted[1][0])


def test_state_goes_from_plan_to_plan(pipelined: Any, on_one_mesh: Any, wanted: Any) -> None:
    """From two meshes to one of all devices, and back; nothing stays where it was."""
    state: Any = make_state(0)
    for index, step in enumerate([pipelined, on_one_mesh, on_one_mesh, pipelined]):
        state, results = step(state, batch_of(index))
        assert_equal(fetched(results), wanted[index][1], f"step {index}")
    assert_equal(fetched(state), wanted[3][0])
    held = jax.tree.leaves((state, results))
    for executable in (pipelined.last_executable, on_one_mesh.last_executable):
        for mesh in executable.meshes:
            own = sum(leaf.copies[0].mesh is mesh for leaf in held)
            for reply in mesh.submit("free", mesh.take_released()):
                reply.result(30)
            counts = [reply.result(30)["num_arrays"] for reply in mesh.submit("stats")]
            assert counts == [own] * len(mesh.places)
            assert mesh.group.num_arrays == own


def test_state_in_another_layout_on_the_same_mesh(wanted: Any) -> None:
    """The old layout's buffers do not stay behind."""
    steps = [
        autopar.parallelize(train, method=method)
        for method in (autopar.DataParallel(), autopar.Zero3Parallel())
    ]
    state: Any = make_state(0)
    for index, step in enumerate([steps[0], steps[1], steps[0]]):
        state, results = step(state, batch_of(index))
        assert_equal(fetched(results), wanted[index][1], f"step {index}")
    (mesh,) = steps[0].last_executable.meshes
    assert mesh is steps[1].last_executable.meshes[0]
    own = len(jax.tree.leaves((state, results)))
    for reply in mesh.submit("free", mesh.take_released()):
        reply.result(30)
    assert {r.result(30)["num_arrays"] for r in mesh.submit("stats")} == {own}


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


def held_arrays(executable: Any) -> list[int]:
    return [
        reply.result(30)["num_arrays"]
        for mesh in executable.meshes
        for reply in mesh.submit("stats")
    ]


@pytest.mark.parametrize("num_steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_behind(pipelined: Any, num_steps: int) -> None:
    state, results = pipelined(make_state(0), batch_of(0))
    executable = pipelined.last_executable
    losses = []

    def counts() -> list[int]:
        gc.collect()
        for mesh in executable.meshes:
            for reply in mesh.submit("free", mesh.take_released()):
                reply.result(30)
        return held_arrays(executable)

    del results
    before = counts()
    live = [mesh.group.num_arrays for mesh in executable.meshes]
    for index in range(num_steps):
        state, results = pipelined(state, batch_of(index % 5))
        if index % 10 == 0:
            losses.append(results["loss"])
    values = [float(loss) for loss in losses]
    assert np.isfinite(values).all()
    del results, losses
    after = counts()
    assert after == before
    assert [mesh.group.num_arrays for mesh in executable.meshes] == live


def test_data_loader_places_batches_ahead(pipelined: Any, wanted: Any) -> None:
    state: Any = make_state(0)
    with autopar.data_loader((batch_of(i) for i in range(6)), pipelined) as batches:
        for index, batch in enumerate(batches):
            state, results = pipelined(state, batch)
            assert_equal(fetched(results), wanted[index][1], f"step {index}")
    assert index == 5
    assert pipelined.last_executable.last_call.uploaded_bytes == 0


def test_checkpoint_from_one_plan_to_another(
    pipelined: Any, on_one_mesh: Any, wanted: Any, tmp_path: Path
) -> None:
    state: Any = make_state(0)
    for index in range(2):
        state, _ = pipelined(state, batch_of(index))
    saving = autopar.save_checkpoint(tmp_path, state, 2, asynchronous=True)
    state, _ = pipelined(state, batch_of(2))  # uses up what is being saved
    saving.wait()
    plain = autopar.restore_checkpoint(tmp_path, jax.eval_shape(lambda: make_state(0)))
    assert_equal(plain, wanted[1][0])
    for step in (on_one_mesh, pipelined):
        step.plan(jax.eval_shape(lambda: make_state(0)), batch_of(0))
        restored = autopar.restore_checkpoint(tmp_path, step)
        assert all(isinstance(x, DistributedArray) for x in jax.tree.leaves(restored))
        restored, results = step(restored, batch_of(2))
        assert_equal(fetched(results), wanted[2][1])
        assert_equal(fetched(restored), wanted[2][0])
    assert pipelined.last_executable.last_call.uploaded_bytes == 2 * ROWS * WIDTH * 4


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

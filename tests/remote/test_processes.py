"""Steps on worker processes: the CPU twins of `tests/gpu/test_many_gpus.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.remote.executable import RemoteExecutable
from tests.remote.cases import (
    check_plan_to_plan,
    check_room_is_made,
    check_step,
    pipeline,
    running_on,
)
from tests.remote.process_cluster import ProcessCluster


@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("1f1b_eager", marks=pytest.mark.slow)])
def test_two_processes_are_two_stages(schedule: str) -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        executable = check_step("mlp-tiny", pipeline(2, schedule))
        assert [len(mesh.places) for mesh in executable.meshes] == [1, 1]


@pytest.mark.slow
def test_four_processes_are_two_meshes() -> None:
    with running_on(ProcessCluster(4, 1), "jax_transfer"):
        executable = check_step("gpt-tiny", pipeline(2))
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]


@pytest.mark.slow
def test_four_processes_of_two_devices() -> None:
    with running_on(ProcessCluster(4, 2), "jax_transfer"):
        check_step("gpt-tiny", pipeline(4))
        check_step("gpt-tiny", autopar.ShardParallel((2, 4)))


@pytest.mark.slow
def test_a_host_of_two_devices_as_two_processes() -> None:
    """As where ranks share a GPU."""
    with running_on(ProcessCluster(2, 2, devices_per_process=1), "jax_transfer"):
        executable = check_step("mlp-tiny", pipeline(2))
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]
        assert {place.host for place in executable.meshes[1].places} == {1}


@pytest.mark.slow
def test_two_processes_are_one_mesh() -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        executable = check_step("gpt-tiny", autopar.ShardParallel((2,)))
        assert [len(mesh.places) for mesh in executable.meshes] == [2]


@pytest.mark.slow
def test_state_goes_from_plan_to_plan() -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        check_plan_to_plan("mlp-tiny", pipeline(2), autopar.ShardParallel((2,)))


@pytest.mark.ci
def test_a_mesh_that_nobody_uses_makes_room() -> None:
    cluster = ProcessCluster(2, 1)
    cluster.ends_idle_groups = True  # as on GPUs
    with running_on(cluster, "jax_transfer") as remote:
        check_room_is_made(remote)


@pytest.mark.ci
def test_what_workers_compile_is_counted_and_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of `sharding/refit.py`, with bytes that workers count."""
    count = RemoteExecutable.mesh_memory_bytes
    counted: list[float] = []

    def too_much_at_first(executable: RemoteExecutable) -> tuple[float, ...]:
        found = count(executable)
        counted.append(max(found) if counted else 1.25 * budget)
        return (counted[-1],) * len(found)

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            return jnp.mean(jnp.square(jnp.tanh(x @ weights[0]) @ weights[1]))

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights, x = [jnp.ones((8, 64)) / 8, jnp.ones((64, 8)) / 8], jnp.ones((512, 8))
    expected = jax.jit(step)(weights, x)
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        free = autopar.parallelize(step, donate_argnums=())
        free(weights, x)
        assert free.last_executable is not None
        predicted = free.plan(weights, x).estimated_peak_bytes
        budget = 1.2 * max(free.last_executable.memory_bytes(), predicted)
        options = autopar.ShardingOptions(memory_budget_bytes=budget)
        method = autopar.AutoParallel(options=options)
        monkeypatch.setattr(RemoteExecutable, "mesh_memory_bytes", too_much_at_first)
        fitted = autopar.parallelize(step, method=method, donate_argnums=())
        _, value = fitted(weights, x)
        plan = fitted.plan(weights, x)
        assert plan.memory_found is not None and len(plan.memory_found.replanned) == 1
        assert counted[0] > budget >= counted[1]
        np.testing.assert_allclose(np.asarray(value), expected[1], rtol=1e-5)

"""The executable of a step with state in host memory: programs, figures, what can be looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import MeshError, PlanError
from autopar.ir.mesh import ClusterSpec
from autopar.lower.lower_step import AbstractDevices, lower_pipeline
from autopar.runtime.host_memory import HostMemoryExecutable, check_host_memory

WIDTH, LAYERS = 32, 24
TX = optax.adam(1e-3)


def train_step(state: Any, x: jax.Array) -> Any:
    params, opt = state

    def loss_of(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt = TX.update(grads, opt)
    return (optax.apply_updates(params, updates), opt), loss


@pytest.fixture(scope="module")
def ran() -> Any:
    """(the parallelized step, its state after a step, the batch)."""
    params = [jnp.full((WIDTH, WIDTH), 0.1) for _ in range(LAYERS)]
    state, x = (params, TX.init(params)), jnp.ones((2, WIDTH))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    options = autopar.ShardingOptions(memory_budget_bytes=0.95 * held)
    autopar.init(devices=jax.devices()[:1])
    step = autopar.parallelize(train_step, method=autopar.ShardParallel(options=options))
    state, _ = step(state, x)
    yield step, state, x
    autopar.shutdown()


def test_programs_run_once_and_equal_ones_are_compiled_once(ran: Any) -> None:
    executable = ran[0].last_executable
    assert isinstance(executable, HostMemoryExecutable)
    groups = executable.plan.host.num_groups
    assert executable.names == ("step", *(f"update_{k}" for k in range(groups)))
    assert set(executable.num_runs().values()) == {1}
    updates = [executable.compiled[f"update_{k}"] for k in range(groups)]
    assert len({id(program) for program in updates}) < groups
    assert executable.collectives() == ()


def test_memory_is_that_of_the_fullest_program_with_what_it_does_not_touch(ran: Any) -> None:
    executable = ran[0].last_executable
    one = 4 * WIDTH * WIDTH
    first = executable._device_bytes(executable.programs.programs[0])
    assert executable.memory_bytes() >= max(first, 2 * LAYERS * one)  # parameters and gradients
    assert executable.memory_bytes() < (3 * LAYERS + 1) * one  # not with all moments
    assert executable.host_bytes() == executable.plan.host.num_bytes


def test_a_step_is_recorded_program_by_program(ran: Any, tmp_path: Any) -> None:
    step, state, x = ran
    copied = jax.tree.map(lambda a: jax.device_put(np.asarray(a), a.sharding), state)
    with autopar.trace(tmp_path / "trace.json"):
        copied, _ = step(copied, x)
        jax.block_until_ready(copied)
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_everything_can_be_dumped(ran: Any, tmp_path: Any) -> None:
    executable = ran[0].last_executable
    executable.dump_debug_info(tmp_path / "dump")
    names = {file.name for file in (tmp_path / "dump").iterdir()}
    assert {"plan.json", "step.annotated.mlir", "update_0.optimized.hlo.txt"} <= names


def test_a_device_without_such_memory_is_refused() -> None:
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh: Any = SimpleNamespace(devices=np.array([device]))
    with pytest.raises(MeshError, match="only device"):
        check_host_memory("train_step", mesh)


def test_workers_refuse_such_a_plan(ran: Any) -> None:
    with pytest.raises(PlanError, match="keeps state in host memory"):
        lower_pipeline(ran[0].last_planned, AbstractDevices(1, "cpu"))


def test_a_plan_for_absent_devices_says_what_it_keeps_where() -> None:
    params = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 100
    state = (params, jax.eval_shape(TX.init, params))
    x = jax.ShapeDtypeStruct((64, 8192), jnp.float32)
    plan = autopar.plan(train_step, state, x, cluster=ClusterSpec(1, 1, "h100-sxm"))
    assert plan.host is not None
    assert plan.host.transfer_s == pytest.approx(plan.host.num_bytes / 50e9)
    assert plan.estimated_peak_bytes <= plan.memory_budget_bytes
    assert plan.memory_budget_bytes < 3 * 100 * 4 * 8192**2

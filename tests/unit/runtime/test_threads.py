"""Programs on virtual CPU devices wait for each other where they share devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.runtime.threads import must_leave_first, must_run_alone, run_alone


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


def slow_program(mesh: Mesh) -> tuple[Any, Any]:
    """A program with collectives that takes a while, and its argument."""

    def run(x: Any) -> list[Any]:
        return [jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ (y.T @ y)), x), jnp.sum(x)]

    placed = NamedSharding(mesh, P("x"))
    x = jax.device_put(np.full((512, 128), 1e-3, np.float32), placed)
    return jax.jit(run, out_shardings=[placed, NamedSharding(mesh, P())]).lower(x).compile(), x


def test_a_program_starts_when_the_one_before_is_done() -> None:
    first, second = jax.devices()[:4], jax.devices()[4:]
    program, x = slow_program(mesh_of(first))
    is_done: dict[str, bool] = {}

    def told(name: str, before: Any) -> Any:
        def fake(*arguments: Any) -> list[Any]:
            is_done[name] = before.is_ready()
            return list(arguments)

        return fake

    small = jax.device_put(np.float32(0), second[0])
    result = run_alone(program, [x], first)[1]
    run_alone(told("on one of them", result), [small], [first[3], second[0]])
    result = run_alone(program, [x], first)[1]
    run_alone(told("with its result", result), [result], second)
    assert is_done["on one of them"]
    assert is_done["with its result"]


def test_results_that_are_gone_keep_nobody_waiting() -> None:
    devices = jax.devices()[:4]
    program, x = slow_program(mesh_of(devices))
    for result in run_alone(program, [x], devices):
        result.delete()
    results = run_alone(program, [x], devices)
    assert np.isfinite(results[1])


def test_what_other_processes_get_is_ready_before_the_next_program() -> None:
    """A collective between processes may hold all threads, and what leaves could not be cut."""
    first, second = jax.devices()[:2], jax.devices()[2:4]
    program, x = slow_program(mesh_of(second))
    cut = program(x)[1]
    was_ready = []

    def fake(*arguments: Any) -> list[Any]:
        was_ready.append(cut.is_ready())
        return []

    must_leave_first([cut], first)
    run_alone(fake, [], [jax.devices()[4]])
    run_alone(fake, [], first)
    assert was_ready == [False, True]
    must_leave_first([cut], first)
    cut.delete()
    run_alone(lambda: [], [], first)


def test_who_must_wait() -> None:
    assert must_run_alone(mesh_of(jax.devices()[:2]))
    assert not must_run_alone(mesh_of(jax.devices()[:1]))

"""A step with state in host memory as programs: what each reads, writes and uses up.

Meshes of several devices are in tests/equivalence/test_host_memory.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import autopar
from autopar.ir.host_programs import HOST_KIND, HostPrograms
from autopar.lower.host_programs import lower_with_host_memory
from autopar.lower.planned_step import PlannedStep

WIDTH, LAYERS, ROWS = 16, 8, 8
TX = optax.adam(1e-2)


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


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    return (params, TX.init(params)), jax.random.normal(keys[0], (ROWS, WIDTH))


class Lowered(NamedTuple):
    planned: PlannedStep
    programs: HostPrograms

    @property
    def hosted(self) -> set[int]:
        assert self.planned.traced.host is not None
        return set(self.planned.traced.host.inputs)


@cache
def lowered(donate: bool = True) -> Lowered:
    """With the first budget, from that of a free plan downwards, that takes host memory."""
    state, x = arguments()
    given: dict[str, Any] = {} if donate else {"donate_argnums": ()}

    def planned_to(budget: float) -> PlannedStep:
        options = autopar.ShardingOptions(memory_budget_bytes=budget)
        method = autopar.ShardParallel(options=options)
        step = autopar.parallelize(train_step, method=method, **given)
        step.plan(state, x)
        assert step.last_planned is not None
        return step.last_planned

    autopar.init(devices=jax.devices()[:1])
    try:
        planned = planned_to(1e15)
        while planned.plan.host is None:
            planned = planned_to(0.93 * planned.plan.estimated_peak_bytes)
    finally:
        autopar.shutdown()
    mesh = Mesh(
        np.array(jax.devices()[:1]).reshape(planned.plan.mesh_shape),
        planned.plan.axis_names,
    )
    return Lowered(planned, lower_with_host_memory(planned, mesh, "cpu"))


@pytest.fixture(scope="module")
def one() -> Lowered:
    return lowered()


def test_an_update_fetches_the_state_of_its_group_and_stores_what_it_becomes(one: Lowered) -> None:
    step = one.planned.traced
    assert step.host is not None
    groups, programs = step.host.groups, one.programs.programs
    assert len(groups) > 1
    assert [p.name for p in programs] == ["step", *(f"update_{k}" for k in range(len(groups)))]
    assert programs[0].fetches == programs[0].stores == ()
    new_of = dict(step.state)
    for program, group in zip(programs[1:], groups, strict=True):
        assert [host for host, _ in program.fetches] == list(group.inputs)
        assert {slot for _, slot in program.fetches} <= set(program.reads)
        assert {slot for slot, _ in program.stores} <= set(program.writes)
        stored = {one.programs.outputs[new_of[i]] for i in group.inputs}
        assert {host for _, host in program.stores} == stored


def test_programs_read_and_write_the_device_alone(one: Lowered) -> None:
    for program in one.programs.programs:
        assert not any(map(one.programs.is_on_host, (*program.reads, *program.writes)))


def test_state_in_host_memory_stays_there_and_nothing_else_is_put_there(one: Lowered) -> None:
    slots, step = one.programs.slots, one.planned.traced
    stored = {one.programs.outputs[o] for i, o in step.state if i in one.hosted}
    assert one.programs.on_host == one.hosted | stored
    for number, slot in enumerate(slots):
        kind = slot.sharding.memory_kind  # type: ignore[union-attr]
        assert (kind == HOST_KIND) == (number in one.programs.on_host), number
    for given, returned in step.state:
        old, new = slots[given], slots[one.programs.outputs[returned]]
        assert (old.shape, old.dtype) == (new.shape, new.dtype)


@pytest.mark.parametrize("donate", [True, False])
def test_a_slot_is_read_after_it_was_written_and_before_it_is_used_up(donate: bool) -> None:
    found = lowered(donate)
    programs, num_arguments = found.programs, len(found.planned.traced.program.inputs)
    there = set(range(num_arguments))
    for program in programs.programs:
        assert there.issuperset(host for host, _ in program.fetches), program.name
        there |= {slot for _, slot in program.fetches}
        assert there.issuperset(program.reads), program.name
        assert there.isdisjoint(program.writes), program.name
        there |= {*program.writes, *(host for _, host in program.stores)}
        assert there.issuperset(program.used_up)
        assert len(set(program.used_up)) == len(program.used_up)
        there -= set(program.used_up)
    assert there.issuperset(programs.outputs)
    kept = there & set(range(num_arguments))
    donated = set(found.planned.traced.donated)
    assert bool(donated) is donate
    assert kept.issuperset(set(range(num_arguments)) - donated)
    # Nothing else is left on the device: gradients and fetched state are gone.
    assert there == kept | set(programs.outputs)


def test_what_stays_on_the_device_is_returned_first_by_an_update(one: Lowered) -> None:
    """It takes over donated buffers, one after another."""
    for program in one.programs.programs[1:]:
        moved = {slot for slot, _ in program.stores}
        is_stored = [slot in moved for slot in program.writes]
        assert is_stored == sorted(is_stored) and any(is_stored)


def test_the_programs_one_after_the_other_are_the_step(one: Lowered) -> None:
    programs = one.programs
    state, x = arguments()
    expected = jax.jit(train_step)(state, x)
    leaves = jax.tree.leaves((state, x))
    slots: list[Any] = [
        jax.device_put(leaf, slot.sharding)
        for leaf, slot in zip(leaves, programs.slots, strict=False)
    ]
    slots += [None] * (len(programs.slots) - len(slots))
    for program in programs.programs:
        for host, slot in program.fetches:
            slots[slot] = jax.device_put(slots[host], programs.slots[slot].sharding)
        places = [programs.slots[slot].sharding for slot in program.writes]
        results = jax.jit(program.function, out_shardings=places)(
            *(slots[s] for s in program.reads)
        )
        for slot, result in zip(program.writes, results, strict=True):
            assert result.shape == programs.slots[slot].shape
            slots[slot] = result
        for slot, host in program.stores:
            slots[host] = jax.device_put(slots[slot], programs.slots[host].sharding)
        for slot in program.used_up:
            slots[slot] = None
    found = [slots[slot] for slot in programs.outputs]
    for ours, theirs in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)

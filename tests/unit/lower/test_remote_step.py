"""Steps of one phase, on one mesh or with a program per stage, as stage programs for workers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.pipeline import Free, Run
from autopar.lower.lower_step import AbstractDevices, lower_pipeline
from autopar.lower.planned_step import PlannedStep
from autopar.lower.remote_step import lower_for_workers

BATCH = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def init(key: Any) -> list[Any]:
    return [jax.random.normal(k, (16, 16)) for k in jax.random.split(key, 4)]


def train(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
        x = batch
        for w in state:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def planned_train(method: Any) -> tuple[Any, PlannedStep]:
    step = autopar.parallelize(train, method=method)
    return step, step.planned((jax.eval_shape(init, jax.random.key(0)), BATCH), {})


@pytest.fixture(scope="module")
def planned_init() -> PlannedStep:
    """An initialiser beside a pipeline of two stages of four devices each."""
    step, _ = planned_train(autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)))
    create = autopar.parallelize(init, method=autopar.CreateStateParallel(step, BATCH))
    return create.planned((jax.random.key(0),), {})


def test_a_step_on_one_mesh_is_one_program() -> None:
    _, planned = planned_train(autopar.ShardParallel(mesh_shape=(8,)))
    lowered = lower_for_workers(planned, AbstractDevices(8, "cpu"))
    (program,) = lowered.stage_programs
    assert (program.name, lowered.meshes) == ("step", (tuple(range(8)),))
    assert program.donated == tuple(sorted(lowered.donated)) == (0, 1, 2, 3)
    (mesh,) = lowered.programs.meshes
    assert [type(i) for i in mesh.instructions] == [Run, Free]
    assert [bound.position for bound in lowered.arguments] == list(range(5))
    assert [bound.type for bound in lowered.results] == list(program.writes)
    assert lowered.transfers == {}


def test_every_stage_of_an_initialiser_holds_all_arguments(planned_init: PlannedStep) -> None:
    pipeline = lower_pipeline(planned_init, jax.devices()).pipeline
    assert len(planned_init.made) == pipeline.num_stages == 2
    assert [(place.value, place.stage) for place in pipeline.inputs] == [(0, 0), (0, 1)]
    assert list(pipeline.argument_of_input) == [0, 0]


def test_an_initialiser_sends_nothing_between_meshes(planned_init: PlannedStep) -> None:
    lowered = lower_for_workers(planned_init, AbstractDevices(8, "cpu"))
    assert [program.name for program in lowered.stage_programs] == [
        "stage0_results",
        "stage1_results",
    ]
    assert lowered.meshes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [(bound.position, bound.mesh) for bound in lowered.arguments] == [(0, 0), (0, 1)]
    owners = [tensor.stages[0] for tensor in planned_init.plan.outputs]
    assert {bound.position: bound.mesh for bound in lowered.results} == dict(enumerate(owners))
    for mesh in lowered.programs.meshes:
        assert [type(i) for i in mesh.instructions] == [Run]
    # Workers hold the data of the key, which is 2 numbers.
    assert {bound.type.shape for bound in lowered.arguments} == {(2,)}

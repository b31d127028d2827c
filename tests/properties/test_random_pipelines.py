"""Random pipelines on real devices give what their stage programs give one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.pipeline import PER_MICRO_BATCH, Phase, Pipeline, Ref, StageProgram
from autopar.ir.schedule import SCHEDULES
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.runtime.pipeline import PipelineExecutable
from tests.properties.random_pipelines import random_pipeline
from tests.unit.runtime.hand_pipeline import NamedPlan

LENGTH = 4


def stage_program_function(number: int, stage_program: StageProgram) -> Callable[..., list[Any]]:
    """Mixes all that is read into all that is written, in integers that wrap around. What is
    updated in place grows, as sums do, so that the order of micro-batches does not matter."""
    in_place = set(stage_program.reads) & set(stage_program.writes)

    def run(*values: Any) -> list[Any]:
        read = dict(zip(stage_program.reads, values, strict=True))
        mixed = jnp.arange(LENGTH, dtype=jnp.uint32) + np.uint32(number)
        for ref, value in read.items():
            if ref not in in_place:
                mixed = (mixed * np.uint32(2654435761)) ^ jnp.roll(value, 1)
        zero = jnp.zeros(LENGTH, jnp.uint32)
        return [read.get(ref, zero) + mixed * np.uint32(2 * n + 3)
                for n, ref in enumerate(stage_program.writes)]  # fmt: skip

    return run


def arguments(pipeline: Pipeline) -> list[np.ndarray]:
    return [np.arange(LENGTH, dtype=np.uint32) + 100 * n for n in range(len(pipeline.inputs))]


def run_stage_programs(pipeline: Pipeline) -> list[np.ndarray]:
    places = zip(pipeline.inputs, arguments(pipeline), strict=True)
    memory: dict[Ref, Any] = {Ref(place.value, None): value for place, value in places}

    def run(phase: Phase, micro_batch: int | None) -> None:
        for number, stage_program in enumerate(pipeline.stage_programs):
            if stage_program.phase is phase:
                values = [memory[ref.of(micro_batch)] for ref in stage_program.reads]
                results = stage_program_function(number, stage_program)(*values)
                for ref, value in zip(stage_program.writes, results, strict=True):
                    memory[ref.of(micro_batch)] = value

    run(Phase.PREPARE, None)
    for micro_batch in range(pipeline.num_micro_batches):
        for phase in PER_MICRO_BATCH:
            run(phase, micro_batch)
    run(Phase.UPDATE, None)
    return [np.asarray(memory[Ref(place.value, None)]) for place in pipeline.outputs]


def make_executable(pipeline: Pipeline, schedule: str, rng: random.Random) -> PipelineExecutable:
    meshes, rest = [], list(jax.devices())
    for left in range(pipeline.num_meshes, 0, -1):
        size = rng.choice([n for n in (1, 2, 4) if n <= len(rest) - left + 1])
        meshes.append(Mesh(np.array(rest[:size]), ("x",)))
        rest = rest[size:]
    refs = {(p.stage, ref.value) for p in pipeline.stage_programs for ref in (*p.reads, *p.writes)}
    refs |= {(stage, t.ref.value) for t in pipeline.transfers for stage in (t.source, t.target)}
    refs |= {(place.stage, place.value) for place in (*pipeline.inputs, *pipeline.outputs)}
    buffers = {
        (stage, value): jax.ShapeDtypeStruct(
            (LENGTH,),
            jnp.uint32,
            sharding=NamedSharding(meshes[pipeline.stage_mesh[stage]], rng.choice([P(), P("x")])),
        )
        for stage, value in sorted(refs)
    }
    made = make_schedule(
        schedule,
        pipeline.num_stages,
        pipeline.num_micro_batches,
        stage_mesh=pipeline.stage_mesh,
    )
    plan: Any = NamedPlan()
    return PipelineExecutable(
        plan,
        pipeline,
        emit_programs(pipeline, made),
        [
            stage_program_function(number, stage_program)
            for number, stage_program in enumerate(pipeline.stage_programs)
        ],
        meshes,
        buffers,
        [buffers[place.stage, place.value] for place in pipeline.inputs],
        lambda *_: run_stage_programs(pipeline),
    )


@pytest.mark.ci
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(deadline=None, max_examples=2)
@given(st.integers(0, 2**32 - 1))
def test_a_pipeline_gives_what_its_stage_programs_give(schedule: str, seed: int) -> None:
    rng = random.Random(seed)
    num_meshes = rng.randint(1, 3)
    num_stages = num_meshes * (2 if schedule == "interleaved_1f1b" else 1)
    stage_mesh = tuple(stage % num_meshes for stage in range(num_stages))
    phases = 1 if schedule == "inference" else 3 if schedule == "zero_bubble" else 2
    pipeline = random_pipeline(rng, rng.randint(1, 3), stage_mesh, PER_MICRO_BATCH[:phases])
    executable = make_executable(pipeline, schedule, rng)
    expected = run_stage_programs(pipeline)

    leaves = executable.place(arguments(pipeline))
    results, stats = executable.run_tracked(leaves)
    assert stats.peak_live_bytes == executable.live_bytes()
    for leaf in (leaf for n, leaf in enumerate(leaves) if n not in pipeline.donated):
        assert not leaf.is_deleted()
    for outcome in (results, executable(arguments(pipeline))):
        for result, want, sharding in zip(
            outcome, expected, executable.output_shardings, strict=True
        ):
            np.testing.assert_array_equal(np.asarray(result), want)
            assert result.sharding == sharding

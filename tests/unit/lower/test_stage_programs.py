from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from autopar.ir.pipeline import EACH, Phase, StageProgram
from tests.properties.staged_steps import StagedStep, cut_step, run_lists
from tests.unit.rewrite.staged_models import batch, in_layers, looped, parameters, trained_by

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))


def staged_by(schedule: str, num_micro_batches: int = 2, num_stages: int = 3) -> StagedStep:
    step = looped(OPTIMIZER, num_micro_batches=num_micro_batches)
    attached = in_layers(step, 3)
    stage_of = [min(layer, num_stages - 1) for layer in range(3)]
    return cut_step(step, attached.layers, stage_of, schedule)


def stage_programs_of(staged: StagedStep, phase: Phase) -> list[StageProgram]:
    return [p for p in staged.pipeline.stage_programs if p.phase is phase]


def sums(stage_program: StageProgram) -> set[int]:
    """Values that a stage program updates in place."""
    return {ref.value for ref in set(stage_program.reads) & set(stage_program.writes)}


@pytest.mark.ci
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_stage_programs_in_turn_give_what_the_step_gives(num_micro_batches: int) -> None:
    args = ((parameters(), OPTIMIZER.init(parameters())), batch())
    want = jax.tree.leaves(jax.jit(trained_by(OPTIMIZER))(*args))
    staged = staged_by("zero_bubble", num_micro_batches)
    for a, b in zip(run_lists(staged, jax.tree.leaves(args)), want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_phases_of_every_stage() -> None:
    staged = staged_by("1f1b")
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert [p.stage for p in stage_programs_of(staged, phase)] == [0, 1, 2]
    assert stage_programs_of(staged, Phase.WEIGHTS) == []
    parts = [
        [p.part for p in stage_programs_of(staged, Phase.UPDATE) if p.stage == s] for s in range(3)
    ]
    assert all(own == sorted(own) for own in parts)
    assert max(map(len, parts)) > 1  # the norm of all gradients comes between


def test_gradients_are_added_in_place() -> None:
    staged = staged_by("1f1b")
    shapes = staged.stage_programs.programs[0].avals
    for stage_program in stage_programs_of(staged, Phase.BACKWARD):
        own = sorted(shapes[v].shape for v in sums(stage_program))
        weight, bias = [s for s in own if len(s) == 2], [s for s in own if len(s) == 1]
        assert len(weight) == len(bias) == 1
        assert all(
            ref.micro_batch is None
            for ref in stage_program.writes
            if ref.value in sums(stage_program)
        )


def test_weight_gradients_apart() -> None:
    staged = staged_by("zero_bubble")
    avals = staged.stage_programs.programs[0].avals
    for stage_program in stage_programs_of(staged, Phase.BACKWARD):
        assert not any(avals[v].ndim == 2 for v in sums(stage_program))
    weights = stage_programs_of(staged, Phase.WEIGHTS)
    assert [p.stage for p in weights] == [0, 1, 2]
    for stage_program in weights:
        assert any(avals[v].ndim == 2 for v in sums(stage_program))
    # Stage 0 sends nothing back, so all of its backward pass can wait.
    sent = {t.ref for t in staged.pipeline.transfers if t.ref.micro_batch == EACH}
    for stage_program in weights:
        assert sent.isdisjoint(stage_program.writes)


def test_batch_is_cut_where_it_lies() -> None:
    staged = staged_by("1f1b", num_micro_batches=2)
    cut = [
        {ref.micro_batch for ref in p.writes if ref.micro_batch is not None}
        for p in stage_programs_of(staged, Phase.PREPARE)
    ]
    assert cut == [{0, 1}, set(), {0, 1}]  # the middle stage has none of it


@pytest.mark.ci
def test_one_stage_is_a_pipeline_too() -> None:
    staged = staged_by("gpipe", num_stages=1)
    assert staged.pipeline.transfers == ()
    args = ((parameters(), OPTIMIZER.init(parameters())), batch())
    want = jax.tree.leaves(jax.jit(trained_by(OPTIMIZER))(*args))
    for a, b in zip(run_lists(staged, jax.tree.leaves(args)), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

"""Three steps of every model as a pipeline equal three steps of `jax.jit(train_step)`.

Schedules order the same stage programs, so those of one cut are planned and compiled once; what
differs in stage programs is zero_bubble (weights apart) and interleaved_1f1b (stages that share
meshes). Wide-ResNet normalises within micro-batches, so that it has one micro-batch here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import pytest

import autopar
from autopar.api import local_devices
from autopar.executables import make_executable
from autopar.ir.pipeline import EACH
from autopar.ir.schedule import SCHEDULES
from autopar.lower.planned_step import PlannedStep
from autopar.rewrite.attach_layers import boundary_bytes
from autopar.rewrite.layers import find_layers
from autopar.tracer.costs import aval_bytes
from examples.models import build
from tests.equivalence.pipelines import assert_equal, own_buffers
from tests.equivalence.test_models import (
    NUM_STEPS,
    TINY,
    WITHOUT_GRADIENT,
    batch_of,
    reference,
)
from tests.properties.staged_steps import body_of, cut_step, loop_of

UNEQUAL = ((1, 2), (1, 2), (1, 4))
STAGES = ("2", "4", "unequal")
TRAINING = [name for name in SCHEDULES if name != "inference"]
# The rest takes an hour.
IN_DEFAULT_RUN = {("mlp-tiny", "2", schedule) for schedule in TRAINING} | {
    ("mlp-tiny", "unequal", "1f1b"),
    ("mlp-tiny", "4", "1f1b_eager"),
}


def num_micro_batches(name: str) -> int:
    return 1 if name.startswith("wresnet") else 4


def method_of(name: str, stages: str, schedule: str) -> autopar.PipeshardParallel:
    chosen: Any
    if stages == "unequal":
        submeshes = UNEQUAL * 2 if schedule == "interleaved_1f1b" else UNEQUAL
        chosen = autopar.ManualStages([[k] for k in range(len(submeshes))], submeshes)
    else:
        chosen = autopar.UniformStages(int(stages))
    return autopar.PipeshardParallel(num_micro_batches(name), stages=chosen, schedule=schedule)


@functools.lru_cache(maxsize=1)
def planned(name: str, stages: str, schedule: str) -> tuple[PlannedStep, dict[Any, Any]]:
    """(the plan of all schedules with these stage programs, programs that were compiled for it)."""
    example, first, _, _ = reference(name)
    method = method_of(name, stages, schedule)
    step = autopar.parallelize(example.train_step, method=method)
    return step.planned((first, batch_of(example, 0)), {}), {}


def executable_of(name: str, stages: str, schedule: str) -> tuple[PlannedStep, Any]:
    has_own_stage_programs = schedule in ("zero_bubble", "interleaved_1f1b")
    found, compiled = planned(name, stages, schedule if has_own_stage_programs else "1f1b")
    found = replace(found, plan=replace(found.plan, schedule=schedule))
    executable = make_executable(found, local_devices())
    known = compiled.get(executable.programs.donated)
    if known is not None:
        executable._compiled = known
    _ = executable.compiled
    compiled[executable.programs.donated] = executable._compiled
    return found, executable


@pytest.mark.representatives(
    "mlp-tiny-2-gpipe", "mlp-tiny-2-1f1b", "mlp-tiny-2-1f1b_eager", "mlp-tiny-2-zero_bubble"
)
@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [
        pytest.param(*case, marks=() if case in IN_DEFAULT_RUN else pytest.mark.slow)
        for name in TINY
        for stages in STAGES
        for schedule in TRAINING
        for case in [(name, stages, schedule)]
    ],
)
def test_pipeline_equals_jit(name: str, stages: str, schedule: str) -> None:
    example, state, want_results, want_state = reference(name)
    found, executable = executable_of(name, stages, schedule)
    state = own_buffers(state)
    for index in range(NUM_STEPS):
        leaves = jax.tree.leaves((state, batch_of(example, index)))
        state, result = found.traced.rebuild_output(executable(leaves))
        assert_equal(result, want_results[index], f"step {index}:", rtol=1e-5)
    assert_equal(
        state,
        want_state,
        loose={WITHOUT_GRADIENT: example.config.learning_rate},
    )
    if stages == "unequal":
        assert [s.submesh for s in found.plan.stages][:3] == list(UNEQUAL)
    elif schedule != "interleaved_1f1b":
        assert len({d for s in found.plan.stages for d in s.devices}) == 8
    assert len(found.plan.stages) == len(executable.pipeline.stage_mesh)


@pytest.mark.representatives("mlp-tiny-2", "gpt-tiny-4")
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "mlp-tiny",
        "gpt-tiny",
        pytest.param("gpt-tiny-scan", marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama-tiny", "moe-tiny")),
    ],
)
def test_activations_and_cotangents_alone_are_sent(name: str, num_stages: int) -> None:
    """Per micro-batch as many bytes come back as were sent; residuals stay, parameters too."""
    example = build(name)
    args = (example.abstract_state(), example.abstract_batch())
    looped = loop_of(example.train_step, args, 2)
    assert looped.loop is not None
    body = body_of(looped)
    batch = range(len(body.inputs) - len(looped.batch), len(body.inputs))
    layers = find_layers(body, num_stages, batch=batch)
    staged = cut_step(looped, layers, range(num_stages), "1f1b")
    avals = staged.sliced.program.avals
    each = [t for t in staged.pipeline.transfers if t.ref.micro_batch == EACH]
    crossing = boundary_bytes(body, staged.layers)
    for boundary in range(num_stages - 1):
        there = [t for t in each if t.source <= boundary < t.target]
        back = [t for t in each if t.target <= boundary < t.source]
        assert sum(aval_bytes(avals[t.ref.value]) for t in there) == crossing[boundary]
        assert sum(aval_bytes(avals[t.ref.value]) for t in back) == crossing[boundary]
    assert len(each) == 2 * (num_stages - 1)

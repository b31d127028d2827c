"""A case for every number: a random program or train step, and the method that runs it.

`case_of(seed)` depends on nothing but the seed, so a failure is reproduced by its number:

    python -m benchmarks.random_programs --seeds 1234:1235

`check_case` runs the case beside `jax.jit`. Of a hundred cases, 65 are programs on one mesh, 20
programs with a strategy by lot for every node, 10 train steps with several batch arguments (half
of them with micro-batches) and 5 pipelines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import autopar
from tests.properties.random_programs import MESHES, RandomProgram, program_of
from tests.properties.random_steps import RandomStep, step_of
from tests.properties.random_strategies import run_by_any_strategies

# Kinds of cases, and how many of a hundred are of each.
KINDS = {"program": 65, "strategies": 20, "step": 5, "micro-batches": 5, "pipeline": 5}
SCHEDULES = ("gpipe", "1f1b", "1f1b_eager", "zero_bubble")


class WrongResult(AssertionError):
    """The result differs from `jax.jit`'s."""


@dataclass(frozen=True)
class Case:
    """What is run. `method` is a mesh shape and a seed where strategies are drawn by lot; `options`
    are further arguments of `autopar.parallelize`."""

    kind: str  # of KINDS
    program: RandomProgram | RandomStep
    method: Any
    options: tuple[tuple[str, Any], ...] = ()


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    if kind == "program":
        return Case(kind, program_of(rng), autopar.ShardParallel(mesh_of(rng)))
    if kind == "strategies":
        return Case(kind, program_of(rng), (rng.choice(MESHES), rng.randrange(2**16)))
    options = (("donate_argnums", ()),)
    if rng.random() < 0.5:  # otherwise, autopar finds the batch arguments
        options = (*options, ("batch_argnums", (1, 2, 3)))
    if kind == "pipeline":
        num_stages = rng.choice((2, 2, 4))
        method = autopar.PipeshardParallel(
            rng.choice((1, 2, 4)),
            layers=autopar.ManualLayers(),
            stages=autopar.UniformStages(num_stages),
            schedule=rng.choice(SCHEDULES),
        )
        return Case(kind, step_of(rng, num_stages), method, options)
    count = rng.choice((2, 4)) if kind == "micro-batches" else 1
    method = autopar.ShardParallel(mesh_of(rng), num_micro_batches=count)
    return Case(kind, step_of(rng, rng.randint(1, 2)), method, options)


def mesh_of(rng: random.Random) -> autopar.LogicalMesh:
    """A mesh that prices only communication, so that products must be split; α and β make the
    solver favour one axis or the other, many small collectives or few large ones."""
    shape = rng.choice(MESHES)
    alpha = tuple(10.0 ** rng.randint(-6, 0) for _ in shape)
    beta = tuple(10.0 ** rng.randint(-9, -3) for _ in shape)
    return autopar.LogicalMesh(shape, alpha=alpha, beta=beta)


def check_case(case: Case) -> tuple[str, ...]:
    """Runs the case; `WrongResult` if it differs from `jax.jit`. Returns the plan's warnings."""
    args = case.program.inputs()
    want = jax.jit(case.program)(*args)
    if case.kind == "strategies":
        assert isinstance(case.program, RandomProgram)
        mesh_shape, seed = case.method
        got = run_by_any_strategies(case.program, mesh_shape, seed)
        compare(got, want, case.program.tolerance)
        return ()
    step = autopar.parallelize(case.program, method=case.method, **dict(case.options))
    compare(step(*args), want, case.program.tolerance)
    return step.last_executable.plan.warnings


def compare(got: Any, want: Any, tolerance: float) -> None:
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise WrongResult(f"structure {jax.tree.structure(got)}, {jax.tree.structure(want)} wanted")
    paths = jax.tree_util.tree_leaves_with_path(want)
    for ours, (path, theirs) in zip(jax.tree.leaves(got), paths, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            raise WrongResult(
                f"{jax.tree_util.keystr(path)}: {ours.dtype}{list(ours.shape)}, "
                f"{theirs.dtype}{list(theirs.shape)} wanted"
            )
        inexact = jax.numpy.issubdtype(theirs.dtype, jax.numpy.inexact)
        bound = tolerance if inexact else 0.0
        a, b = (np.asarray(x).astype(np.float64) for x in (ours, theirs))
        if not np.allclose(a, b, rtol=bound, atol=bound, equal_nan=True):
            worst = np.nanmax(np.abs(a - b)) if a.size else 0.0
            raise WrongResult(f"{jax.tree_util.keystr(path)} differs by up to {worst:.2g}")


def smaller(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with every operation left out that the failure does not need."""
    program = case.program
    if isinstance(program, RandomStep):
        return case
    index = 0
    while index < len(program.steps):
        steps = program.steps[:index] + program.steps[index + 1 :]
        shorter = RandomProgram(program.shapes, program.int_shapes, steps, program.gradient)
        candidate = Case(case.kind, shorter, case.method, case.options)
        if fails(candidate):
            program, case = shorter, candidate
        else:
            index += 1
    return case

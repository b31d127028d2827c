"""Plans of known models, compared with those in `tests/golden`.

A refactor leaves them as they are; a change of behaviour shows in the diff of the files. To accept
one, run this test with `AUTOPAR_UPDATE_GOLDEN=1` and say in the commit message why they changed.

The objective is compared always. Specs are compared only under the releases of JAX and HiGHS that
the file was written with: another JAX may trace other equations, and another HiGHS choose another
one among plans that cost the same.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir.plan import ParallelPlan, Tensor
from examples.models import build

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
MODELS = ["mlp-tiny", "gpt-tiny", "moe-tiny"]
MESH = autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))


def golden_of(name: str) -> dict[str, Any]:
    example = build(name)
    state, batch = example.abstract_state(), example.abstract_batch()
    solution = autopar.solve_sharding(example.train_step, state, batch, mesh=MESH)
    assert solution.gap == 0
    assert solution.output_specs[0] == solution.input_specs[0]  # so state is stored once
    plan = solution.plan
    return {
        "model": name,
        "mesh": f"{MESH.shape} alpha={MESH.alpha} beta={MESH.beta}",
        "made_with": {package: version(package) for package in ("jax", "highspy")},
        "objective": f"{solution.objective:.6g}",
        "inputs": specs(plan, plan.inputs),
        "outputs": specs(plan, tuple(t for t in plan.outputs if t.role != "state")),
    }


def specs(plan: ParallelPlan, tensors: tuple[Tensor, ...]) -> dict[str, str]:
    return {t.path: f"{t.dtype}{list(t.shape)} {plan.spec_of(t)}" for t in tensors}


@pytest.mark.parametrize("name", MODELS)
def test_plan_is_as_it_was(name: str) -> None:
    path = GOLDEN_DIR / f"{name}.json"
    found = golden_of(name)
    if os.environ.get("AUTOPAR_UPDATE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    stored = json.loads(path.read_text())
    compared = ["model", "mesh", "objective"]
    if found["made_with"] == stored["made_with"]:
        compared += ["inputs", "outputs"]
    hint = "if this is meant, run again with AUTOPAR_UPDATE_GOLDEN=1 and explain the diff"
    for key in compared:
        assert found[key] == stored[key], hint


def test_every_file_is_of_a_model_that_is_tested() -> None:
    assert {path.stem for path in GOLDEN_DIR.glob("*.json")} == set(MODELS)

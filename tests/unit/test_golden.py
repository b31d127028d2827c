"""Plans of known models, compared with those in `tests/golden`.

A refactor leaves them as they are; a change of behaviour shows in the diff of the files. To accept
one, run this test with `AUTOPAR_UPDATE_GOLDEN=1` and say in the commit message why they changed.

Model, mesh, objective and every array's spec are compared under every release of JAX and HiGHS.
Several plans may cost the same, and another HiGHS may return another of them: where the releases
are not those of the file (`made_with`), other specs pass if the stored ones, pinned, cost exactly
as much. Under the file's own releases nothing but the stored specs passes.
"""

from __future__ import annotations

import ast
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.ir.plan import ParallelPlan, Tensor
from examples.models import build

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
MODELS = ["mlp-tiny", "gpt-tiny", "moe-tiny"]
MESH = autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))
COMPARED = ("model", "mesh", "objective", "inputs", "outputs")
UPDATE = "if this is meant, run again with AUTOPAR_UPDATE_GOLDEN=1 and explain the diff"


def solve(name: str, pins: dict[str, PartitionSpec] | None = None) -> autopar.ShardingSolution:
    example = build(name)
    state, batch = example.abstract_state(), example.abstract_batch()
    # Searched to the end, however slow the machine is.
    options = autopar.ShardingOptions(
        pins=pins or {}, planning_time_s=None, solver_time_limit_s=600
    )
    return autopar.solve_sharding(example.train_step, state, batch, mesh=MESH, options=options)


def objective_of(solution: autopar.ShardingSolution) -> str:
    assert solution.gap == 0
    return f"{solution.objective:.6g}"


def golden_of(name: str) -> dict[str, Any]:
    solution = solve(name)
    assert solution.output_specs[0] == solution.input_specs[0]  # so state is stored once
    plan = solution.plan
    return {
        "model": name,
        "mesh": f"{MESH.shape} alpha={MESH.alpha} beta={MESH.beta}",
        "made_with": {package: version(package) for package in ("jax", "highspy")},
        "objective": objective_of(solution),
        "inputs": specs(plan, plan.inputs),
        "outputs": specs(plan, tuple(t for t in plan.outputs if t.role != "state")),
    }


def specs(plan: ParallelPlan, tensors: tuple[Tensor, ...]) -> dict[str, str]:
    return {t.path: f"{t.dtype}{list(t.shape)} P{tuple(plan.spec_of(t))}" for t in tensors}


def stored_golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN_DIR / f"{name}.json").read_text())


def without_specs(arrays: dict[str, str]) -> dict[str, str]:
    return {path: text.split(" P")[0] for path, text in arrays.items()}


def pins_of(golden: dict[str, Any]) -> dict[str, PartitionSpec]:
    """The inputs' specs, as the files write them: `float32[32, 8] P('x', None)`."""
    specs = {path: text.split(" P")[1] for path, text in golden["inputs"].items()}
    return {path: PartitionSpec(*ast.literal_eval(spec)) for path, spec in specs.items()}


def differences(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """What of a plan is not as stored, one line each; none if it is, or if the stored specs are
    another optimum under other releases than the file's."""
    lines = []
    for key in COMPARED:
        got, want = found[key], stored[key]
        if isinstance(want, dict):
            paths = sorted(got.keys() | want.keys())
            changed = [path for path in paths if got.get(path) != want.get(path)]
            lines += [f"{path}: {got.get(path)}, stored {want.get(path)}" for path in changed]
        elif got != want:
            lines.append(f"{key}: {got}, stored {want}")
    same_problem = all(
        without_specs(found[key]) == without_specs(stored[key]) for key in ("inputs", "outputs")
    ) and all(found[key] == stored[key] for key in ("model", "mesh", "objective"))
    if not lines or not same_problem or found["made_with"] == stored["made_with"]:
        return lines
    pinned = objective_of(solve(stored["model"], pins_of(stored)))
    if pinned == stored["objective"]:
        return []
    return [*lines, f"the stored specs, pinned, cost {pinned} instead of {stored['objective']}"]


@pytest.mark.parametrize("name", MODELS)
def test_plan_is_as_it_was(name: str) -> None:
    found = golden_of(name)
    if os.environ.get("AUTOPAR_UPDATE_GOLDEN"):
        (GOLDEN_DIR / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    assert not differences(found, stored_golden(name)), UPDATE


def changed(golden: dict[str, Any], jax: str, specs: dict[str, str]) -> dict[str, Any]:
    """As if another release of JAX had given these specs."""
    inputs = {path: specs.get(path, text) for path, text in golden["inputs"].items()}
    return {**golden, "made_with": {**golden["made_with"], "jax": jax}, "inputs": inputs}


def test_other_specs_pass_only_where_they_cost_the_same_under_other_releases() -> None:
    stored = stored_golden("mlp-tiny")
    path, same_jax = "state.params[0]['bias']", stored["made_with"]["jax"]
    other_specs = {path: "float32[32] P('y',)"}
    assert differences(changed(stored, same_jax, {}), stored) == []
    assert len(differences(changed(stored, same_jax, other_specs), stored)) == 1
    # Another optimum: those of the file cost as much as they did.
    assert differences(changed(stored, "another", other_specs), stored) == []
    # No optimum: the file's specs, one parameter whole, cost more.
    whole = changed(stored, same_jax, {path: "float32[32] P()"})
    lines = differences(changed(stored, "another", {}), whole)
    assert len(lines) == 2 and "pinned" in lines[1]
    # Another array is never another optimum.
    assert differences(changed(stored, "another", {path: "float32[64] P('y',)"}), stored)


def test_every_file_is_of_a_model_that_is_tested() -> None:
    assert {path.stem for path in GOLDEN_DIR.glob("*.json")} == set(MODELS)

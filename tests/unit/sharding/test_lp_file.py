"""The `.lp` file, read by HiGHS and solved, against the solver."""

from __future__ import annotations

from pathlib import Path

import highspy
import pytest

from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.sharding import lp_file
from autopar.sharding.lp_file import problem_text
from autopar.sharding.solve import fit_into_memory, solve_graph
from tests.properties.test_solver_against_brute_force import stack_graph

MESHES = {
    "communication": LogicalMesh((2, 2), alpha=(1.0, 3.0), beta=(0.5, 0.25)),
    "timed": mesh_of_cluster(ClusterSpec(1, 4, "v100"), (4,)),
}


def optimum(text: str, folder: Path) -> float:
    path = folder / "problem.lp"
    path.write_text(text)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("reduced", [False, True])
def test_the_same_optimum(mesh: LogicalMesh, reduced: bool, tmp_path: Path, monkeypatch) -> None:
    if reduced:
        monkeypatch.setattr(lp_file, "MOST_ENTRIES", 0)
    solved = solve_graph(stack_graph(2, 8, 16, 32), mesh)
    unit = 1e6 if mesh.device is not None else 1.0
    text = problem_text(solved.problem, solved.choice)
    assert ("reduced, since" in text) == reduced
    assert optimum(text, tmp_path) == pytest.approx(unit * solved.objective, rel=1e-6)


def test_what_is_forbidden_is_fixed(tmp_path: Path) -> None:
    """A mesh without reduce-scatters forbids pairs of layouts, or makes them dear."""
    mesh = LogicalMesh((2, 2), forbidden=frozenset({"reduce-scatter", "all-to-all"}))
    solved = solve_graph(stack_graph(2, 8, 16, 32), mesh)
    found = optimum(problem_text(solved.problem, solved.choice), tmp_path)
    assert found == pytest.approx(solved.objective, rel=1e-6)


@pytest.mark.ci
def test_memory_is_bounded(tmp_path: Path) -> None:
    mesh = MESHES["timed"]
    free = solve_graph(stack_graph(1, 32, 32, 64), mesh)
    budget = 0.8 * free.memory.peak_bytes
    fitted = fit_into_memory(free, budget)
    assert fitted.objective > free.objective
    text = problem_text(fitted.problem, fitted.choice, budget)
    assert text.count(" memory_") >= 1
    found = optimum(text, tmp_path)
    # Rows at some times bound the cost from below; the plan keeps to all of them.
    assert 1e6 * free.objective * (1 - 1e-6) <= found <= 1e6 * fitted.objective * (1 + 1e-4)

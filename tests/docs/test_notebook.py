"""The notebook runs from its first cell to its last, and is stored without results."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import autopar

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_hour.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(code: str, scope: dict[str, Any]) -> Any:
    """Run a cell; its value is that of a last line that is an expression, as in Jupyter."""
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), scope)
        return None
    tree.body.pop()
    exec(compile(tree, "cell", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), scope)


@pytest.mark.ci
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    values = [run_cell(code, scope) for code in code_cells()]
    autopar.shutdown()
    shown = [value for value in values if value is not None]
    assert shown and all("<table>" in value._repr_html_() for value in shown)
    assert (tmp_path / "plan.html").exists()
    said = capsys.readouterr().out
    assert "verdict: " in said and said.count("on one device") == 3


def test_it_is_stored_without_results():
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None

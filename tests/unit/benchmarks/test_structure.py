"""The structure of a toy package, and of golden plans that changed."""

from __future__ import annotations

import json

import pytest

from benchmarks.structure import (
    ROOT,
    circles,
    golden_changes,
    import_graph,
    long_functions,
    longest_chain,
    read_commit,
    read_folder,
    repeated_classes,
    report,
    room_graph,
    room_lines,
)

TOY = {
    "autopar/__init__.py": "",
    "autopar/errors.py": "class WrongInput(Exception):\n    pass\n",
    "autopar/ir/__init__.py": "",
    "autopar/ir/plan.py": "from ..errors import WrongInput\n",
    "autopar/ir/mesh.py": "from autopar.ir import plan\n",
    "autopar/api.py": "def f():\n    import jax\n    from autopar.ir.mesh import Mesh\n",
    "autopar/cli/__init__.py": 'import_module("autopar.api")\n',
}


def test_imports_of_files_and_rooms() -> None:
    graph = import_graph(TOY)
    assert graph["autopar.ir.plan"] == {"autopar.errors"}
    assert graph["autopar.ir.mesh"] == {"autopar.ir.plan"}
    assert graph["autopar.api"] == {"autopar.ir.mesh"}
    assert graph["autopar.cli"] == {"autopar.api"}
    assert room_graph(graph) == {
        "__init__": set(),
        "errors": set(),
        "ir": {"errors"},
        "api": {"ir"},
        "cli": {"api"},
    }
    assert longest_chain(room_graph(graph)) == ["cli", "api", "ir", "errors"]
    assert len(longest_chain(graph)) == 5


def test_a_circle_has_no_longest_chain() -> None:
    graph = import_graph({**TOY, "autopar/errors.py": "import autopar.api\n"})
    names = ["autopar.api", "autopar.errors", "autopar.ir.mesh", "autopar.ir.plan"]
    assert circles(graph) == [names]
    assert longest_chain(graph) == []
    assert circles(import_graph(TOY)) == []


def test_sizes() -> None:
    sources = {**TOY, "autopar/ir/graph.py": "class WrongInput:\n    def f(self):\n" + "\n" * 7}
    sources["autopar/ir/graph.py"] += "        return 1\n"
    assert room_lines(sources)["ir"] == 12
    assert room_lines(sources)["cli"] == 1
    assert long_functions(sources, limit=8) == {"autopar/ir/graph.py:f": 9}
    assert long_functions(sources, limit=9) == {}
    assert repeated_classes(sources) == {"WrongInput": ["autopar/errors.py", "autopar/ir/graph.py"]}


def golden(objective: str, **specs: str) -> str:
    return json.dumps({"objective": objective, "inputs": specs})


def test_golden_plans_that_changed() -> None:
    before = {"tests/golden/a.json": golden("3", w="P()", b="P()"), "tests/golden/b.json": "{}"}
    after = {"tests/golden/a.json": golden("2", w="P('x')", b="P()"), "tests/golden/b.json": "{}"}
    assert golden_changes(before, before) == {}
    assert golden_changes(before, after) == {
        "tests/golden/a.json": ["objective: 3 → 2", "inputs w: P() → P('x')"]
    }
    assert golden_changes({}, {"tests/golden/b.json": golden("1")}) == {
        "tests/golden/b.json": ["objective: absent → 1"]
    }


def test_a_parameter_and_its_moments_share_a_line() -> None:
    paths = ["params['w']", "opt_state[0].mu['w']", "opt_state[0].nu['w']", "params['b']"]
    before, after = (
        {"tests/golden/a.json": golden("3", **dict.fromkeys(paths, spec))}
        for spec in ("P()", "P('x')")
    )
    assert golden_changes(before, after)["tests/golden/a.json"] == [
        "inputs params['w'] and 2 more: P() → P('x')",
        "inputs params['b']: P() → P('x')",
    ]


def test_the_report_has_what_changed() -> None:
    after = {**TOY, "autopar/ir/spec.py": "import autopar._jax\n", "autopar/_jax.py": ""}
    text = report(TOY, after)
    assert "+_jax" in text and "unchanged" in text
    assert "ir                      2 →      3  +1" in text
    assert "-_jax" in report(after, {**TOY, "autopar/_jax.py": ""})


def test_a_commit_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match=r"'no-such-commit'.*--base"):
        read_commit("no-such-commit", "autopar")


def test_the_repository_is_read() -> None:
    sources = read_folder(ROOT, "autopar/ir", "tests/golden")
    assert "autopar/ir/plan.py" in sources and "tests/golden/gpt-tiny.json" in sources

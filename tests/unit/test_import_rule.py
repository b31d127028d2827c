"""Keeps the rooms apart: who in autopar may import whom, and who may touch JAX's internals.

A room is a file or folder of `autopar/`. It imports only from rooms before it in `ORDER`, and
`runtime` from none of the planner's. Every import counts, wherever it stands: inside a function,
under `TYPE_CHECKING`, relative, or by a literal `import_module`. No files import each other.
(`ir/late_methods.py` alone imports by a name: `plan.explain()` is a method of data.)
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.structure import circles, import_graph, imported_names, parse, read_folder

PACKAGE_DIR = Path(__file__).parents[2] / "autopar"

ORDER = (
    *("errors", "_requirements", "_jax", "progress"),
    *("ir", "methods", "tracer", "rewrite", "cost", "lower", "sharding", "stages"),
    *("plan_cache", "compiler"),
    *("runtime", "session", "inspect", "executables", "multi_controller", "measure"),
    *("api", "training", "__init__", "cli", "__main__"),
)
PLANNER = ORDER[ORDER.index("tracer") : ORDER.index("runtime")]

JAX_INTERNALS = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")


def find_violations(package_dir: Path) -> list[str]:
    """Every breach of the rules below package_dir, as `path:line: what is wrong`."""
    found = []
    for path in sorted(package_dir.rglob("*.py")):
        where = path.relative_to(package_dir.parent)
        module = where.with_suffix("").parts
        room = module[1]
        if room not in ORDER:
            found.append(f"{where}:1: {room!r} is not in ORDER")
            continue
        forbidden = {*ORDER[ORDER.index(room) + 1 :], *(PLANNER if room == "runtime" else ())}
        tree = parse(path.read_text(encoding="utf-8"))
        imported = sorted(set(imported_names(tree, package=module[:-1])))
        for line, name in imported:
            if (target := _room(name)) in forbidden:
                found.append(f"{where}:{line}: {room!r} may not import {target!r}")
        if room != "_jax":
            names = {*imported, *_dotted_names(tree)}
            found += [
                f"{where}:{line}: {internal} belongs in _jax.py only"
                for line, internal in sorted({(line, _jax_internal(name)) for line, name in names})
                if internal
            ]
    return found


def _dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain such as `jax.extend.core`."""
    for node in ast.walk(tree):
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield node.lineno, ".".join((inner.id, *reversed(parts)))


def _room(name: str) -> str | None:
    """The room of autopar that a dotted name belongs to; None for anything else."""
    package, *rest = name.split(".")
    if package != "autopar":
        return None
    return rest[0] if rest and rest[0] in ORDER else "__init__"


def _jax_internal(name: str) -> str:
    """Which of the JAX internals a dotted name lies in; empty for none."""
    return next((i for i in JAX_INTERNALS if f"{name}.".startswith(f"{i}.")), "")


def test_package_keeps_the_import_rule():
    assert any(PACKAGE_DIR.rglob("*.py")), f"no modules found under {PACKAGE_DIR}"
    violations = find_violations(PACKAGE_DIR)
    assert not violations, "\n".join(violations)


def test_the_architecture_page_has_the_order():
    page = (PACKAGE_DIR.parent / "docs" / "architecture.md").read_text()
    told = page.split("A room imports only from rooms before it:")[1].split("```")[1]
    assert told.split() == ["text", *(room for room in ORDER if not room.startswith("__"))]


def test_no_files_import_each_other():
    assert circles(import_graph(read_folder(PACKAGE_DIR.parent, "autopar"))) == []


BREACHES = {
    "upwards": ("ir/plan.py", "from autopar.sharding import solve_sharding"),
    "compiler to runtime": ("compiler.py", "from autopar import runtime"),
    "stages to inspect": ("stages/auto.py", "from autopar.inspect.explain import explain_plan"),
    "runtime to cost": ("runtime/local.py", "from ..cost.compute import seconds"),
    "runtime to compiler": ("runtime/local.py", "from autopar.compiler import plan_step"),
    "relative, from a subpackage": ("ir/__init__.py", "from .. import tracer"),
    "relative, from the root": ("methods.py", "from .api import plan"),
    "inside a function": ("cost/report.py", "def f():\n    import autopar.sharding"),
    "for types only": ("ir/plan.py", "if TYPE_CHECKING:\n    import autopar.api"),
    "by literal": ("ir/plan.py", 'import_module("autopar.inspect")'),
    "the package itself": ("api.py", "import autopar"),
    "a room nobody planned": ("utils.py", "import jax"),
    "JAX's internals": ("tracer/flatten.py", "from jax._src import core"),
    "JAX's internals, by attribute": ("lower/annotate.py", "jax.extend.core.Jaxpr"),
}


@pytest.mark.parametrize("where, source", BREACHES.values(), ids=BREACHES)
def test_breaches_are_found(tmp_path, where, source):
    file = tmp_path / "autopar" / where
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (violation,) = find_violations(tmp_path / "autopar")
    assert violation.startswith(f"autopar/{where}:{len(source.splitlines())}: ")


ALLOWED = {
    "downwards": ("sharding/solve.py", "from autopar.ir.graph import Graph"),
    "in its own room": ("tracer/flatten.py", "from autopar.tracer.flat_call import flatten_call"),
    "relative, in its own room": ("runtime/ray/worker.py", "from ..remote import place"),
    "JAX in public": ("api.py", "import jax.numpy"),
    "internals in _jax": ("_jax.py", "from jax._src import core"),
}


@pytest.mark.parametrize("where, source", ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_not_a_breach(tmp_path, where, source):
    file = tmp_path / "autopar" / where
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert find_violations(tmp_path / "autopar") == []

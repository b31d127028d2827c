"""Keeps the layers apart: who in autopar may import whom, and who may touch JAX's internals.

    api ─▶ compiler ─▶ tracer, stages, sharding, lower ─▶ cost, ir ;  api ─▶ runtime ─▶ ir

A component is a top-level module or subpackage of autopar. Every import counts, wherever it stands:
inside a function, under `TYPE_CHECKING`, relative, or by a literal `import_module`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE_DIR = Path(__file__).parents[2] / "autopar"

EVERYONE = {"errors", "_requirements", "_jax"}
BELOW_PASSES = {"cost", "ir"}
PASSES = {"tracer", "stages", "sharding", "lower"}
BESIDE_COMPILER = {
    "memory_budget",
    "remat_choice",
    "constraints",
    "steering",
    "following",
    "assemble",
    "stage_tables",
    "stage_plans",
    "intra",
    "looped",
    "inter",
    "prediction",
    "auto",
    "pipeline_following",
    "origin",
    "alternatives",
    "block_views",
    "pinning",
}
BELOW_API = {"compiler", "runtime", "inspect", "methods", *BELOW_PASSES}

# component -> the other components it may import. One that is missing here may not exist.
ALLOWED_IMPORTS = {
    "errors": set(),
    "_requirements": {"errors"},
    "_jax": {"errors", "_requirements"},
    "ir": EVERYONE,
    "cost": {"ir", *EVERYONE},
    "objects": EVERYONE,
    "tracer": {"objects", *BELOW_PASSES, *EVERYONE},
    "stages": {*BELOW_PASSES, *EVERYONE},
    "sharding": {*BELOW_PASSES, *EVERYONE},
    "lower": {*BELOW_PASSES, *EVERYONE},
    "inspect": {*BELOW_PASSES, *EVERYONE},
    "runtime": {"checkpoints", "ir", *EVERYONE},
    "checkpoints": {"ir", "objects", *EVERYONE},
    "methods": {"ir", "errors"},
    "following": {"methods", "objects", "tracer", "ir", *EVERYONE},
    "steering": {"methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "constraints": {"steering", "methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "assemble": {"methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "origin": {
        "constraints",
        "steering",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "alternatives": {"origin", "steering", *PASSES, *BELOW_PASSES, *EVERYONE},
    "block_views": {"alternatives", "origin", *PASSES, *BELOW_PASSES, *EVERYONE},
    "pinning": {
        "alternatives",
        "origin",
        "inter",
        "intra",
        "steering",
        *BELOW_PASSES,
        *EVERYONE,
    },
    "intra": {
        "origin",
        "assemble",
        "constraints",
        "steering",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "stage_plans": {
        "origin",
        "intra",
        "stage_tables",
        "assemble",
        "constraints",
        "steering",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "looped": {"methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "prediction": {*PASSES, *BELOW_PASSES, *EVERYONE},
    "stage_choice": {
        "looped",
        "stage_tables",
        "intra",
        "constraints",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "inter": {
        "origin",
        "looped",
        "stage_choice",
        "prediction",
        "stage_plans",
        "stage_tables",
        "intra",
        "assemble",
        "constraints",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "pipeline_following": {
        "origin",
        "looped",
        "inter",
        "intra",
        "assemble",
        "stage_tables",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "auto": {
        "looped",
        "inter",
        "intra",
        "memory_budget",
        "methods",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "remat_choice": {*PASSES, *BELOW_PASSES, *EVERYONE},
    "stage_tables": {*PASSES, *BELOW_PASSES, *EVERYONE},
    "memory_budget": {"methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "compiler": {*BESIDE_COMPILER, "methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "worker_step": {"compiler", "intra", "lower", *BELOW_PASSES, *EVERYONE},
    "agreement": EVERYONE,
    "multi_controller": {
        "agreement",
        "compiler",
        "following",
        "assemble",
        "methods",
        "tracer",
        *BELOW_PASSES,
        *EVERYONE,
    },
    "views": {*BESIDE_COMPILER, "inspect", "methods", *PASSES, *BELOW_PASSES, *EVERYONE},
    "dumping": {*BESIDE_COMPILER, "inspect", "runtime", *PASSES, *BELOW_PASSES, *EVERYONE},
    "session": {"runtime", "lower", "ir", *EVERYONE},
    "api": {
        "dumping",
        "reranking",
        "session",
        "multi_controller",
        "objects",
        "worker_step",
        *BELOW_API,
        *EVERYONE,
    },
    "tracing": {"prediction", "inspect", "runtime", "ir", *EVERYONE},
    "loading": {"api", *BELOW_API, *EVERYONE},
    "restoring": {"api", "objects", "session", "checkpoints", *BELOW_API, *EVERYONE},
    "batch_source": {"loading", "session", *BELOW_API, *EVERYONE},
    "training": {
        "api",
        "batch_source",
        "checkpoints",
        "restoring",
        "session",
        *BELOW_API,
        *EVERYONE,
    },
    "proof": {"runtime", "ir", *EVERYONE},
    "measuring": {"runtime", "ir", *EVERYONE},
    "candidates": {
        "compiler",
        "constraints",
        "intra",
        "memory_budget",
        "methods",
        "origin",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "database": {"measuring", "ir", *EVERYONE},
    "reranking": {
        "assemble",
        "candidates",
        "compiler",
        "database",
        "intra",
        "measuring",
        "methods",
        "tracer",
        *BELOW_PASSES,
        *EVERYONE,
    },
    "enumeration": {
        "api",
        "candidates",
        "constraints",
        "intra",
        "measuring",
        "origin",
        "session",
        *BELOW_API,
        *EVERYONE,
    },
    "segments": {
        "assemble",
        "compiler",
        "constraints",
        "intra",
        "measuring",
        "memory_budget",
        "methods",
        "origin",
        "reranking",
        "runtime",
        *PASSES,
        *BELOW_PASSES,
        *EVERYONE,
    },
    "profiling": {"session", "api", "measuring", "methods", "runtime", "ir", *EVERYONE},
    "verifying": {"api", "worker_step", "memory_budget", "proof", *BELOW_API, *EVERYONE},
    "proved_plans": {
        "candidates",
        "compiler",
        "methods",
        "proof",
        "reranking",
        "verifying",
        *BELOW_PASSES,
        *EVERYONE,
    },
    "__init__": {
        "proved_plans",
        "views",
        "profiling",
        "proof",
        "verifying",
        "api",
        "checkpoints",
        "loading",
        "restoring",
        "session",
        "tracing",
        "training",
        *BELOW_API,
        *EVERYONE,
    },
    "demo": {"__init__", "errors"},  # a user's program
    "cli": {
        "__init__",
        "api",
        "database",
        "demo",
        "enumeration",
        "intra",
        "measuring",
        "profiling",
        "segments",
        "session",
        "verifying",
        *PASSES,
        *BELOW_API,
        *EVERYONE,
    },
    "__main__": {"cli"},
}

JAX_INTERNALS = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
JAX_INTERNALS_ALLOWED_IN = "_jax"


def find_violations(package_dir: Path) -> list[str]:
    """Every breach of the two rules below package_dir, as `path:line: what is wrong`."""
    found = []
    for path in sorted(package_dir.rglob("*.py")):
        where = path.relative_to(package_dir.parent)
        module = where.with_suffix("").parts
        component = module[1]
        if component not in ALLOWED_IMPORTS:
            found.append(f"{where}:1: component {component!r} is not in ALLOWED_IMPORTS")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, name in sorted(set(_imported_names(tree, package=module[:-1]))):
            target = _component(name)
            if target not in {None, component, *ALLOWED_IMPORTS[component]}:
                found.append(f"{where}:{line}: {component!r} may not import {target!r}")
        if component != JAX_INTERNALS_ALLOWED_IN:
            names = {*_imported_names(tree, package=module[:-1]), *_dotted_names(tree)}
            found += [
                f"{where}:{line}: {internal} belongs in _jax.py only"
                for line, internal in sorted({(line, _jax_internal(name)) for line, name in names})
                if internal
            ]
    return found


def _imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all that a module of the given package imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name
            case ast.ImportFrom():
                parents = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join((*parents, *([node.module] if node.module else [])))
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            case ast.Call(
                func=ast.Name(id=call) | ast.Attribute(attr=call),
                args=[ast.Constant(value=str(name)), *_],
            ) if call in {"import_module", "__import__"}:
                yield node.lineno, name


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


def _component(name: str) -> str | None:
    """The component of autopar that a dotted name belongs to; None for anything else."""
    package, *rest = name.split(".")
    if package != "autopar":
        return None
    return rest[0] if rest and rest[0] in ALLOWED_IMPORTS else "__init__"


def _jax_internal(name: str) -> str:
    """Which of the JAX internals a dotted name lies in; empty for none."""
    return next((i for i in JAX_INTERNALS if f"{name}.".startswith(f"{i}.")), "")


def test_package_keeps_the_import_rule():
    assert any(PACKAGE_DIR.rglob("*.py")), f"no modules found under {PACKAGE_DIR}"
    violations = find_violations(PACKAGE_DIR)
    assert not violations, "\n".join(violations)


def test_table_names_only_its_own_components():
    assert set().union(*ALLOWED_IMPORTS.values()) <= set(ALLOWED_IMPORTS)


def test_table_has_no_cycle():
    settled: set[str] = set()
    while layer := {
        name
        for name, targets in ALLOWED_IMPORTS.items()
        if name not in settled and targets <= settled
    }:
        settled |= layer
    assert settled == set(ALLOWED_IMPORTS)


BREACHES = {
    "upwards": ("ir/plan.py", "from autopar.sharding import solve_sharding"),
    "sideways": ("tracer/flatten.py", "import autopar.lower.emit"),
    "compiler to runtime": ("compiler.py", "from autopar import runtime"),
    "inspect to passes": ("inspect/explain.py", "from autopar.stages.search import search_stages"),
    "runtime to cost": ("runtime/local.py", "from ..cost.compute import seconds"),
    "relative, from a subpackage": ("cost/__init__.py", "from .. import tracer"),
    "relative, from the root": ("methods.py", "from ._jax import flatten"),
    "the root package": ("sharding/ilp.py", "import autopar"),
    "a name of the root package": ("sharding/ilp.py", "from autopar import ParallelPlan"),
    "anything into errors": ("errors.py", "from autopar.ir.plan import ParallelPlan"),
    "inside a function": ("ir/plan.py", "def f():\n    from autopar.inspect import explain"),
    "under TYPE_CHECKING": ("cost/compute.py", "if TYPE_CHECKING:\n    import autopar.api"),
    "by import_module": ("ir/plan.py", "importlib.import_module('autopar.inspect')"),
    "unknown component": ("utils.py", ""),
    "jax._src": ("tracer/flatten.py", "from jax._src import core"),
    "jax._src by attribute": ("api.py", "import jax\nx = jax._src.core.Jaxpr"),
    "jax.extend": ("ir/graph.py", "import jax.extend.core"),
    "jax.extend from jax": ("ir/graph.py", "from jax import extend"),
    "jax.experimental": ("runtime/local.py", "def f():\n    from jax.experimental import transfer"),
    "jax.interpreters": ("lower/emit.py", "from jax.interpreters import mlir"),
    "jaxlib": ("cli.py", "import jaxlib"),
}


@pytest.mark.parametrize(("path", "source"), BREACHES.values(), ids=BREACHES.keys())
def test_a_breach_is_found(tmp_path: Path, path: str, source: str):
    violations = find_violations(_package(tmp_path, path, source))
    assert len(violations) == 1
    assert violations[0].startswith(f"autopar/{path}:{max(1, len(source.splitlines()))}: ")


ALLOWED = {
    "downwards": ("compiler.py", "from autopar.sharding import solve_sharding"),
    "its own subpackage": ("sharding/ilp.py", "from .rules import rule_of\nfrom . import folding"),
    "relative": ("lower/emit.py", "from ..ir import program\nfrom .._jax import flatten"),
    "re-exports": ("__init__.py", "from autopar.api import parallelize"),
    "the command line": ("cli.py", "import autopar\nfrom autopar.stages import search"),
    "internals in _jax": ("_jax.py", "import jaxlib\nfrom jax._src.lib.mlir import passmanager"),
    "public jax": ("lower/emit.py", "import jax\nx = jax.lax.with_sharding_constraint"),
    "look-alikes": ("ir/mesh.py", "import autoparallel\nimport jaxlibrary\nx = jax.extended"),
    "prose": ("ir/mesh.py", '"""What jaxlib and jax._src do; import autopar."""'),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, source: str):
    assert find_violations(_package(tmp_path, path, source)) == []


def _package(parent: Path, path: str, source: str) -> Path:
    package_dir = parent / "autopar"
    (package_dir / path).parent.mkdir(parents=True)
    (package_dir / path).write_text(source, encoding="utf-8")
    return package_dir

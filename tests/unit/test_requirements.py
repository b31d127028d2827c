"""What autopar needs of JAX and of other packages: said alike everywhere, and told when missing."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar import _jax, _requirements
from autopar._requirements import INTERNALS, JAX_BOUNDS, REQUIRED
from autopar.errors import AutoparError, DependencyError
from autopar.tracer.trace_step import trace_step
from benchmarks.structure import parse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autopar"
PATHS = [path for paths in INTERNALS.values() for path in paths]
PRIVATE = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters")


# -- said alike


def test_pyproject_has_the_tested_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == list(REQUIRED.values())
    extras = project["optional-dependencies"]
    oldest, below = JAX_BOUNDS.split(",")
    for name, cuda in (
        ("cuda12", "cuda12"),
        ("verify-cuda12", "cuda12"),
        ("cuda13", "cuda13"),
        ("verify", "cuda13"),
    ):
        (line,) = [line for line in extras[name] if line.startswith("jax")]
        # JAX 0.11 has no plugin for CUDA 12 any more.
        assert line == f"jax[{cuda}]{oldest},{'<0.11' if cuda == 'cuda12' else below}"
    others = [line for lines in extras.values() for line in lines if re.match(r"jax\b[^-]", line)]
    assert len(others) == 4
    for name in ("ray", "test"):
        assert f"ray>={_requirements.OLDEST_RAY}" in extras[name]


@pytest.mark.parametrize("page", ["versioning.md", "limits.md", "start.md"])
def test_the_documentation_has_the_tested_range(page: str) -> None:
    assert f"JAX {_requirements.TESTED_RANGE}" in (ROOT / "docs" / page).read_text()


def test_the_jax_that_runs_this_is_tested() -> None:
    assert _requirements.is_tested(jax.__version__), "set NEWEST_JAX once all tests pass"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.10.2.dev20260101", True),
        ("0.11.0", True),
        ("0.12", True),
        ("0.12.0.1", True),
        ("0.12.99", True),
        ("0.13.0rc1", False),
        ("0.13.0", False),
        ("1.0", False),
        ("0.9.9", False),
    ],
)
def test_which_versions_are_tested(version: str, tested: bool) -> None:
    assert _requirements.is_tested(version) is tested


# -- every internal that is used is in the table, and the other way round


def used_internals() -> set[str]:
    """What `_jax.py` takes from JAX's internals, as dotted paths."""
    tree = parse((PACKAGE / "_jax.py").read_text())
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE)
        for alias in node.names
    }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in aliases:
            found.add(".".join((aliases[node.id], *names)))
    return found


def attributes_of_autopar() -> set[str]:
    trees = (parse(file.read_text()) for file in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def is_part(path: str, of: str) -> bool:
    """`jax._src.core` is a part of the path `jax._src.core.Literal`."""
    return f"{of}.".startswith(f"{path}.")


def test_everything_that_is_used_is_in_the_table() -> None:
    known = [path.partition("(")[0] for path in PATHS]
    used = used_internals()
    assert len(used) > 30
    assert not [u for u in used if not any(is_part(u, k) or is_part(k, u) for k in known)]


def test_everything_in_the_table_is_used() -> None:
    used, attributes = used_internals(), attributes_of_autopar()
    for path in (path.partition("(")[0] for path in PATHS):
        is_used = any(is_part(path, u) for u in used)
        assert is_used or path.rpartition(".")[2] in attributes, path
    assert len(PATHS) == len(set(PATHS))


def test_everything_in_the_table_is_here() -> None:
    assert not [state for state in _requirements.internal_states() if state.fault]


# -- what is missing is told


class Without:
    """An object that has all that another has, but for one attribute."""

    def __init__(self, thing: Any, name: str) -> None:
        self._thing, self._name = thing, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(f"no attribute {name!r}")
        return getattr(self._thing, name)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing that was found before is remembered, nor afterwards that it was not."""
    _requirements.require.cache_clear()
    yield
    _requirements.require.cache_clear()


@pytest.mark.parametrize(("use", "path"), [(use, p) for use in INTERNALS for p in INTERNALS[use]])
def test_each_internal_that_is_missing_is_named(
    use: str, path: str, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    name, _, argument = path.rstrip(")").partition("(")
    if argument:
        monkeypatch.setattr(name, lambda **other: None)
    else:
        look_up, parent = _requirements._look_up, name.rpartition(".")[0]

        def without(wanted: str) -> Any:
            if wanted != name:
                return look_up(wanted)
            return getattr(
                Without(look_up(parent), name.rpartition(".")[2]), name.rpartition(".")[2]
            )

        monkeypatch.setattr(_requirements, "_look_up", without)
    with pytest.raises(DependencyError) as caught:
        _requirements.require(use)
    said = str(caught.value)
    assert f"JAX {jax.__version__} has no {path}, which autopar needs for {use}" in said
    assert f"JAX {_requirements.TESTED_RANGE}: pip install 'jax==" in said
    faults = [state for state in _requirements.internal_states() if state.fault]
    assert [(state.path, state.use) for state in faults] == [(path, use)]


def test_a_version_that_is_not_tested_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    said = str(_requirements.lacking("jax._src.core.Jaxpr.eqns"))
    assert "JAX 0.13.0 has no jax._src.core.Jaxpr.eqns" in said
    assert "pip install 'jax>=0.10.2,<0.13'" in said


def test_a_parameter_that_is_missing_is_named() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]

    program = trace_step(step, (jax.ShapeDtypeStruct((4,), jnp.float32),)).program
    (scan,) = [e for e in program.equations if e.name == "scan"]
    assert scan.params["length"] == 3
    copied = pickle.loads(pickle.dumps(_jax.Parameters("scan", {"length": 3})))
    for params in (scan.params, copied):
        with pytest.raises(
            DependencyError, match="has no parameter 'lenght' of the primitive 'scan'"
        ):
            params["lenght"]


def test_a_pass_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(1.0).compiler_ir("stablehlo")
    monkeypatch.setattr(_jax, "_RULE_PASS", "sdy-no-such-pass")
    with pytest.raises(DependencyError, match="has no MLIR pass sdy-no-such-pass"):
        _jax.populate_sharding_rules(lowered)


# -- in processes of their own, as a user meets it

STEP = """
import jax, jax.numpy as jnp

def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
    return params - 0.1 * grads, loss

def make_step():
    shape = jax.ShapeDtypeStruct
    return step, (shape((8, 8), "float32"), shape((16, 8), "float32"))
"""


def run(
    folder: Path, *arguments: str, setup: str = "", code: str = ""
) -> subprocess.CompletedProcess[str]:
    """A Python with a module `sitecustomize` of ours, which every process under it imports."""
    (folder / "sitecustomize.py").write_text(setup)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "PYTHONWARNINGS": "",
    }
    command = [sys.executable, *(("-c", code) if code else ("-m", "autopar", *arguments))]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def plan(folder: Path, setup: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(STEP)
    return run(
        folder, "plan", "train.py:make_step", "--cluster", "1x4:h100-sxm", "--quiet", setup=setup
    )


def test_a_command_without_an_internal_tells_so_without_a_traceback(tmp_path: Path) -> None:
    done = plan(tmp_path, "import jax\nfrom jax._src import core\ndel core.jaxprs_in_params\n")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"autopar: JAX {jax.__version__} has no jax._src.core.jaxprs_in_params")
    assert "Traceback" not in done.stderr and not done.stdout


def test_a_step_without_an_internal_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    code = STEP + (
        "from jax._src.lax import lax as internal\n"
        "del internal._convert_element_type\n"
        "import autopar\n"
        "try: autopar.parallelize(step)\n"
        "except autopar.DependencyError as error: print(error)\n"
    )
    # JAX itself needs the function only when it traces.
    done = run(tmp_path, code=code)
    assert "has no jax._src.lax.lax._convert_element_type(weak_type)" in done.stdout, done.stderr


VERSION = "import jax, jax.version\njax.__version__ = jax.version.__version__ = {!r}\n"


@pytest.mark.representatives("0.13.1-newer")
@pytest.mark.parametrize(("version", "age"), [("0.9.1", "older"), ("0.13.1", "newer")])
def test_the_first_use_on_an_untested_jax_warns_once(
    tmp_path: Path, version: str, age: str
) -> None:
    code = STEP + (
        "import sys, autopar\n"
        "print('before', 'autopar._jax' in sys.modules, file=sys.stderr)\n"
        "shape = jax.ShapeDtypeStruct\n"
        "for mesh in ((2,), (4,)):\n"
        "    autopar.plan(*(make_step()[0], *make_step()[1]), method=autopar.ShardParallel(mesh),\n"
        "        cluster=autopar.ClusterSpec(1, 4, 'h100-sxm'))\n"
    )
    done = run(tmp_path, setup=VERSION.format(version), code=code)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("before False")
    assert not before
    assert after.count("UntestedJaxWarning") == 1
    assert f"JAX {version} is {age} than what autopar is tested with (JAX 0.10.2 to 0.12)" in after
    assert "pip install 'jax>=0.10.2,<0.13'" in after


@pytest.mark.ci
def test_the_warning_can_be_switched_off(tmp_path: Path) -> None:
    code = (
        "import warnings, autopar\n"
        "warnings.filterwarnings('error')\n"
        "try: autopar.parallelize\n"
        "except autopar.UntestedJaxWarning as error: print(error)\n"
        "warnings.filterwarnings('ignore', category=autopar.UntestedJaxWarning)\n"
        "autopar.parallelize\n"
    )
    done = run(tmp_path, setup=VERSION.format("0.13.0"), code=code)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith("JAX 0.13.0 is newer")


@pytest.mark.representatives("highspy-parallelize", "jax-parallelize")
@pytest.mark.parametrize(
    ("package", "name"), [*((package, "parallelize") for package in REQUIRED), ("pulp", "compiler")]
)
def test_a_package_that_is_missing_is_named(tmp_path: Path, package: str, name: str) -> None:
    blocked = f"import sys\nsys.modules[{package!r}] = None\n"
    code = (
        "import autopar\n"
        f"try: autopar.{name}\n"
        "except autopar.DependencyError as error: print(error)\n"
    )
    said = run(tmp_path, setup=blocked, code=code).stdout
    done = plan(tmp_path, blocked)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for text in (said, done.stderr):
        assert f"{package}, which autopar needs, cannot be imported" in text
        assert f"pip install '{REQUIRED[package]}'" in text


def test_a_plan_from_a_file_is_shown_without_a_solver(tmp_path: Path) -> None:
    plan_file = ROOT / "tests/unit/ir/recorded/pipeline_plan.json"
    code = (
        "import autopar\n"
        f"plan = autopar.ParallelPlan.load({str(plan_file)!r})\n"
        "plan.report('page.html')\n"
        "print(plan.explain(detail='full'), plan.strategies(), plan.timeline().num_meshes)\n"
        "try: plan.explain(plan.inputs[0].path)\n"
        "except autopar.DependencyError as error: print(error)\n"
    )
    said = run(tmp_path, setup="import sys\nsys.modules['highspy'] = None\n", code=code).stdout
    assert "predicted step:" in said
    assert "highspy, which autopar needs, cannot be imported" in said


def test_what_the_user_lacks_is_not_taken_for_ours() -> None:
    _requirements.raise_if_missing(ModuleNotFoundError("No module named 'mine'", name="mine"))
    _requirements.raise_if_missing(ImportError("of no name"))
    with pytest.raises(AutoparError, match="highspy"):
        _requirements.raise_if_missing(ImportError("libstdc++", name="highspy._core"))

"""Files, modules and commands that pages, docstrings, comments and results name exist.

This checks the documentation's pages, the docstrings and comments of autopar, benchmarks and
examples, and the commands in `benchmarks/results`. CHANGELOG.md is history and left out.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir.plan import ParallelPlan
from tests.docs.blocks import ROOT, pages

PACKAGE = ROOT / "autopar"
SOURCES = [
    path
    for folder in ("autopar", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))

# Paths from the root, such as autopar/cli/units.py, tests/golden/*.json or examples/llm_serving,
# optionally with a function: `examples/gpt.py:make_step`. A name in capitals stands for any.
_PATH = re.compile(
    r"(?<![\w./:~<-])((?:autopar|benchmarks|examples|tests|docs)/[\w./*-]*[\w*])(?::(\w+))?"
)
_MODULE = re.compile(r"python3? -m ((?:autopar|benchmarks|examples)[\w.]*)")
_SHORT_PATH = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py|results/\w+\.json)`")
_CLASS = re.compile(r"`(_?[A-Z]\w+)`")
_OF_A_PLAN = re.compile(r"`plan\.(\w+)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_REFERENCE = re.compile(r"(?<![\w.])([a-z_]+)\.([a-z_]+)(?=[\w.]*[`,)])")
# What a docstring may say that looks like a module: a user's `step.plan`, an address, public names.
MODULE_NAMES = {path.stem for path in PACKAGE.rglob("*.py")}
PUBLIC_NAMES = {("autopar", name) for name in autopar.__all__}
NO_MODULES = {("step", "plan"), ("ui", "perfetto"), *PUBLIC_NAMES}


def missing_paths(text: str) -> list[str]:
    return [
        path + (f":{function}" if function else "")
        for path, function in _PATH.findall(text)
        if not stands_for_any(path)
        and not (is_there(path) and (_is_line(function) or function in defined_in(ROOT / path)))
    ]


def _is_line(function: str) -> bool:
    """Whether a name after a path is none, or a number as of a line."""
    return not function or function.isdecimal()


def missing_modules(text: str) -> list[str]:
    found = [name for name in _MODULE.findall(text) if not stands_for_any(name)]
    return [name for name in found if not files_of(name)]


def stands_for_any(name: str) -> bool:
    return re.split(r"[./]", name)[-1].isupper()


@cache
def is_there(path: str) -> bool:
    return any(ROOT.glob(path))


def files_of(module: str) -> list[Path]:
    """The files of a module, or of a package that can be run."""
    base = ROOT.joinpath(*module.split("."))
    if base.with_suffix(".py").is_file():
        return [base.with_suffix(".py")]
    return sorted(base.glob("*.py")) if (base / "__main__.py").is_file() else []


@cache
def defined_in(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def commands_in(value: Any) -> Iterator[str]:
    """Every "command" in a results file, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("command"), str):
            yield value["command"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from commands_in(one)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert not missing_paths(text)
    assert not missing_modules(text)
    known = [*SOURCES, *RESULTS, *(ROOT / "docs").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    ends = tuple("/" + name for name in set(_SHORT_PATH.findall(text)))
    assert not [end for end in ends if not any(path.as_posix().endswith(end) for path in known)]


@cache
def identifiers() -> set[str]:
    """Every name that the code of autopar defines, imports or uses."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.Name(id=name) | ast.alias(name=name):
                    found.add(name)
                case ast.Attribute(attr=name):
                    found.add(name)
    return found


@pytest.mark.parametrize("page", ["architecture", "glossary", "tour"])
def test_classes_that_the_design_pages_name_are_there(page: str) -> None:
    names = set(_CLASS.findall((ROOT / "docs" / f"{page}.md").read_text()))
    missing = sorted(names - identifiers())
    assert names
    assert not missing


def test_features_of_the_tour_are_in_files_of_their_name() -> None:
    """A path of the row has the feature's name, or the first word of it."""
    tour = (ROOT / "docs" / "tour.md").read_text()
    rows = re.findall(r"^\| ([\w -]+) \| (.+) \|$", tour.split("## Where a feature is")[1], re.M)[
        1:
    ]
    assert len(rows) == 20
    for feature, places in rows:
        paths = " ".join(re.findall(r"`(autopar/[\w./]+)`", places))
        words = re.sub(r"[ -]", "_", feature.lower()), feature.lower().split()[0]
        assert any(word in paths for word in words), feature


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pages_say_of_plans_is_there(page: Path) -> None:
    known = {*dir(ParallelPlan), *(field.name for field in dataclasses.fields(ParallelPlan))}
    named = set(_OF_A_PLAN.findall(page.read_text())) - {"json", "html", "txt"}
    assert not named - known


@pytest.mark.ci
def test_what_docstrings_and_comments_name_is_there() -> None:
    missing = []
    for path in SOURCES:
        source = path.read_text()
        for text in (*docstrings(source), *comments(source)):
            found = [*missing_paths(text), *missing_modules(text)]
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in found]
    assert not missing


def is_module(first: str, second: str) -> bool:
    folder = ROOT if first in ("autopar", "benchmarks", "examples") else PACKAGE
    base = folder / first / second
    return base.with_suffix(".py").is_file() or base.is_dir()


def missing_references(text: str, expressions: set[tuple[str, str]]) -> list[str]:
    """References such as `rewrite.layers` that end in a module's name must be modules, unless they
    are expressions of the code."""
    return [
        f"{first}.{second}"
        for first, second in _REFERENCE.findall(text)
        if second in MODULE_NAMES
        and not is_module(first, second)
        and (first, second) not in expressions | NO_MODULES
    ]


def expressions_in(source: str) -> Iterator[tuple[str, str]]:
    """("plan", "stages") of `self.plan.stages`, and so on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.value).rpartition(".")[2], node.attr


@pytest.mark.ci
def test_modules_that_docstrings_refer_to_are_there() -> None:
    sources = {path: path.read_text() for path in SOURCES if PACKAGE in path.parents}
    expressions = {pair for source in sources.values() for pair in expressions_in(source)}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, source in sources.items()
        for text in docstrings(source)
        for name in missing_references(text, expressions)
    ]
    assert not missing


def test_commands_of_results_can_be_run() -> None:
    """Modules, files, functions and options of a command exist."""
    found = [(path, one) for path in RESULTS for one in commands_in(json.loads(path.read_text()))]
    assert len(found) > 10
    for path, command in found:
        output = f"benchmarks/results/{path.name}"
        assert not set(missing_paths(command)) - {output}, f"{path.name}: {command}"
        assert not missing_modules(command), f"{path.name}: {command}"
        own = [file for name in _MODULE.findall(command) for file in files_of(name)]
        shared = ROOT / "benchmarks" / "script.py"  # has the option --json
        own = [*own, shared] if own else sorted((PACKAGE / "cli").glob("*.py"))
        sources = "\n".join(file.read_text() for file in own)
        unknown = [flag for flag in _FLAG.findall(command) if f'"{flag}"' not in sources]
        assert not unknown, f"{path.name}: {command}"


def test_what_is_gone_is_found() -> None:
    assert missing_paths("see `examples/train_llama.py:make_step`, examples/gpt.py:make_step") == [
        "examples/train_llama.py:make_step"
    ]
    assert missing_paths("(examples/gpt.py:gone, tests/golden/*.json)") == ["examples/gpt.py:gone"]
    assert missing_paths("python examples/PATH, a/docs/x.md, docs/why.md.") == []
    said = (
        "`python -m benchmarks.gone --json`, python -m benchmarks.kills, python -m benchmarks.NAME"
    )
    assert missing_modules(said) == ["benchmarks.gone"]
    assert missing_references("(gone.layers, attach) `plan.stages`", {("plan", "stages")}) == [
        "gone.layers"
    ]
    assert not missing_references("(rewrite.layers, attach), `autopar.tracer`", set())
    assert list(commands_in({"rows": [{"command": "a"}], "command": "b"})) == ["b", "a"]

"""What every file of the package keeps to; `python -m benchmarks.structure` shows the rest.

A module says in one line what it holds, or from what type to what type it goes. A class name names
one class. Few files stand beside the rooms' folders.
"""

import ast
from pathlib import Path

from benchmarks.structure import ROOT, read_folder, repeated_classes

LIMIT = 100
MOST_FILES_AT_THE_ROOT = 12


def first_line_fault(source: str) -> str:
    """What is wrong with the first line of a module's docstring; empty if nothing is."""
    docstring = ast.get_docstring(ast.parse(source))
    if docstring is None:
        return "no docstring"
    first = docstring.splitlines()[0]
    if not first.endswith("."):
        return f"the first line does not end with a period: {first}"
    length = len(f'"""{first}')
    return f"the first line has {length} columns, more than {LIMIT}" if length > LIMIT else ""


def test_a_class_name_names_one_class():
    assert repeated_classes(read_folder(ROOT, "autopar")) == {}


def test_few_files_stand_at_the_root():
    assert 0 < len(list((ROOT / "autopar").glob("*.py"))) <= MOST_FILES_AT_THE_ROOT


def test_every_module_says_what_it_is():
    sources = read_folder(ROOT, "autopar")
    assert "autopar/compiler.py" in sources
    faults = {
        path: fault
        for path, text in sources.items()
        if Path(path).suffix == ".py" and (fault := first_line_fault(text))
    }
    assert not faults, "\n".join(f"{path}: {fault}" for path, fault in faults.items())


def test_faults_are_found():
    assert first_line_fault('"""From a `Graph` to a plan.\n\nMore.\n"""') == ""
    assert first_line_fault("import jax") == "no docstring"
    assert "period" in first_line_fault('"""From a `Graph` to\na plan.\n"""')
    assert "101 columns" in first_line_fault(f'"""{"x" * 97}."""')
    assert first_line_fault(f'"""{"x" * 96}."""') == ""

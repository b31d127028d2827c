"""What every file of the package keeps to; `python -m benchmarks.structure` shows the rest.

A module says in one line what it holds, or from what type to what type it goes. A class name names
one class. No function is long. Few files stand beside the rooms' folders, and imports between
rooms form a short chain.
"""

import ast
from pathlib import Path

from benchmarks.structure import (
    ROOT,
    import_graph,
    long_functions,
    longest_chain,
    parse,
    read_folder,
    repeated_classes,
    room_graph,
)

LIMIT = 100
MOST_FILES_AT_THE_ROOT = 12
LONGEST_CHAIN = 14


def first_line_fault(source: str) -> str:
    """What is wrong with the first line of a module's docstring; empty if nothing is."""
    docstring = ast.get_docstring(parse(source))
    if docstring is None:
        return "no docstring"
    first = docstring.splitlines()[0]
    if not first.endswith("."):
        return f"the first line does not end with a period: {first}"
    length = len(f'"""{first}')
    return f"the first line has {length} columns, more than {LIMIT}" if length > LIMIT else ""


def test_a_class_name_names_one_class():
    assert repeated_classes(read_folder(ROOT, "autopar")) == {}


def test_no_function_is_long():
    assert long_functions(read_folder(ROOT, "autopar")) == {}


def test_imports_between_rooms_form_a_short_chain():
    chain = longest_chain(room_graph(import_graph(read_folder(ROOT, "autopar"))))
    assert chain[-1] == "errors" and len(chain) <= LONGEST_CHAIN, " > ".join(chain)


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

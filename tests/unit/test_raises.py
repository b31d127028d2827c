"""Everything autopar raises on purpose is an `AutoparError`, as the README says.

A `raise` of one of Python's own exceptions is an error here unless it is in `ALLOWED`, with the
reason. `AssertionError` is free: it means a bug of autopar's own. So are names that are not
Python's: classes of autopar (internal signals among them), variables and calls of functions.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator
from pathlib import Path

from autopar import errors
from benchmarks.structure import parse

PACKAGE_DIR = Path(__file__).parents[2] / "autopar"

ATTRIBUTE = "Python's protocol of __getattr__"
READER = "the reader of the file or text catches it, and raises an AutoparError that names it"
STORE = "as the operating system's own of a file: whoever saves or reads catches both"
ALLOWED: dict[tuple[str, str], str] = {
    ("__init__.py", "AttributeError"): ATTRIBUTE,
    ("ir/objects/object_tree.py", "AttributeError"): ATTRIBUTE,
    ("ir/objects/object_tree.py", "KeyError"): "Python's protocol of __getitem__",
    ("training/data_loader.py", "StopIteration"): "Python's protocol of __next__",
    ("runtime/ray/worker.py", "AttributeError"): "the driver raises a WorkerError with its text",
    ("runtime/remote/frames.py", "MemoryError"): "as NumPy's, for arrays that are a bit smaller",
    ("runtime/checkpoints/format.py", "ValueError"): READER,
    ("ir/files.py", "OSError"): "as the operating system's own",
    ("runtime/checkpoints/files.py", "OSError"): "as the operating system's own",
    ("runtime/checkpoints/folders.py", "FileExistsError"): "as the operating system's own",
    ("runtime/checkpoints/object_folders.py", "FileExistsError"): STORE,
    ("runtime/checkpoints/objects.py", "FileNotFoundError"): STORE,
    ("runtime/checkpoints/objects.py", "OSError"): STORE,
    ("runtime/checkpoints/objects.py", "TimeoutError"): STORE,
    ("ir/sealed.py", "ValueError"): READER,
    ("inspect/perfetto.py", "ValueError"): READER,
    ("ir/details.py", "ValueError"): READER,
    ("ir/spec.py", "ValueError"): READER,
    ("measure/profile/unfinished.py", "ValueError"): READER,
    ("runtime/hlo_text.py", "ValueError"): READER,
}

BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def builtins_raised(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every `raise` of one of Python's own exceptions but AssertionError."""
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.Raise):
            continue
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Attribute) and ast.unparse(raised.value) == "builtins":
            raised = ast.Name(raised.attr)
        if isinstance(raised, ast.Name) and raised.id in BUILTIN - {"AssertionError"}:
            yield node.lineno, raised.id


def test_what_is_raised_on_purpose_is_an_autopar_error() -> None:
    found = [
        (path.relative_to(PACKAGE_DIR).as_posix(), name, line)
        for path in sorted(PACKAGE_DIR.rglob("*.py"))
        for line, name in builtins_raised(path.read_text())
    ]
    wrong = [f"{file}:{line}: {name}" for file, name, line in found if (file, name) not in ALLOWED]
    assert not wrong, "raise an AutoparError (autopar/errors.py), which users can tell apart"
    gone = ALLOWED.keys() - {(file, name) for file, name, _ in found}
    assert not gone, "strike them from ALLOWED"


def test_every_class_of_errors_is_an_autopar_error() -> None:
    own = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    own = [kind for kind in own if kind.__module__ == errors.__name__]
    assert len(own) > 10
    wrong = [k for k in own if not issubclass(k, (errors.AutoparError, Warning))]
    assert not wrong


def test_raises_are_found() -> None:
    source = "\n".join(
        [
            "def f(x):",
            "    if x: raise ValueError('a') from None",
            "    try: raise OSError",
            "    except OSError as e: raise",
            "    raise builtins.KeyError(x)",
            "    raise AssertionError(x)",
            "    raise PlanError(x)",
            "    raise e",
        ]
    )
    assert sorted(builtins_raised(source)) == [(2, "ValueError"), (3, "OSError"), (5, "KeyError")]

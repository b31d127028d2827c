"""Errors of JAX in the user's words: from an exception to the same with the user's names.

JAX traces a function of ours, `leaves -> results`, and its errors speak of `leaves[3]` and of the
line where that function is defined. They should name the argument, `batch['x']`, and the user's
function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from autopar.errors import CompileError

_RAISED_BY_JAX = (TypeError, ValueError, IndexError, CompileError)
_LEAF = re.compile(r"\bleaves\[(\d+)\]")


def use_users_names(
    error: Exception,
    paths: Sequence[str],
    ours: Callable[..., Any] | None = None,
    users: Callable[..., Any] | None = None,
) -> None:
    """Rewrites the text of an error. `paths`: of the leaves; `ours`: the function that JAX traced
    in place of the user's."""
    if not isinstance(error, _RAISED_BY_JAX) or not error.args:
        return
    if not isinstance(error.args[0], str):
        return

    def path(match: re.Match[str]) -> str:
        index = int(match[1])
        return paths[index] if index < len(paths) else match[0]

    text = _LEAF.sub(path, error.args[0])
    if ours is not None and users is not None:
        text = text.replace(f"at {_place(ours)}", f"at {_place(users)}")
    if text != error.args[0]:
        # JAX says where a shape comes from once for each of its elements.
        lines = [line for line, _ in groupby(text.split("\n"))]
        error.args = ("\n".join(lines), *error.args[1:])


def _place(function: Callable[..., Any]) -> str:
    """`file.py:12` of a function's definition, or its name if it has no code."""
    while not inspect.isfunction(function):
        names = ("func", "__wrapped__", "__func__")  # of partial, of jit, of a method
        inner = next((f for n in names if (f := getattr(function, n, None))), None)
        inner = inner or vars(type(function)).get("__call__")
        if not callable(inner):
            return repr(function)
        function = inner
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"

"""Failures of autopar's own that planning survives: from an exception to a `Failure`.

A search that meets a bug of ours in one candidate goes on with the others. It keeps the exception
as a `Failure`, which the plan's warnings name. When no candidate is left, it raises
`planning_failed`. What the user's function raises is the user's: no search hides it (`is_users`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, PlanningError
from autopar.ir.objects.nnx import run_pure

_PACKAGE = Path(__file__).parents[1]
_MAX_COLUMNS = 300
_MAX_NAMED = 3


@dataclass(frozen=True)
class Failure:
    """One candidate that failed, and the exception.

    what:    the candidate: "mesh (2, 4)".
    error:   the exception's type.
    message: the first line of its text.
    where:   the line of autopar that raised it, or called what did.
    cause:   the exception itself.
    """

    what: str
    error: str
    message: str
    where: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, what: str, error: BaseException) -> Failure:
        return cls(what, type(error).__name__, first_line(error), _where(error), error)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes all but the exception, which may not go."""
        return Failure, (self.what, self.error, self.message, self.where)

    @property
    def exception(self) -> str:
        """Such as `IndexError: tuple index out of range (autopar/….py:104)`."""
        text = f"{self.error}: {self.message}" if self.message else self.error
        return f"{text} ({self.where})" if self.where else text


def first_line(error: BaseException) -> str:
    """Of an exception's text, without a period at its end."""
    line = str(error).strip().split("\n")[0]
    return (line if len(line) <= _MAX_COLUMNS else line[: _MAX_COLUMNS - 1] + "…").rstrip(".")


def is_users(error: BaseException) -> bool:
    """Whether the user's function raised it while it was traced, or something that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code is run_pure.__code__ for frame in frames)


def is_contained(error: BaseException) -> bool:
    """Whether a search goes on after this exception. Errors that speak to the user are theirs to
    see; a search that knows one of them to rule out a candidate says so itself."""
    if isinstance(error, AutoparError):
        return isinstance(error, PlanningError) and not error.concerns_step
    return not is_users(error)


def failure_warnings(failures: Iterable[Failure]) -> tuple[str, ...]:
    """A warning per exception, with the candidates that it met."""
    candidates: dict[str, list[str]] = {}
    for failure in failures:
        named = candidates.setdefault(failure.exception, [])
        if failure.what not in named:
            named.append(failure.what)
    return tuple(
        f"a failure of autopar's own ruled out {_counted(named)}: {exception}. The plan was chosen "
        "from what is left. Please report it"
        for exception, named in candidates.items()
    )


def planning_failed(
    name: str, failures: Sequence[Failure], why: str, *, concerns_step: bool = False
) -> PlanningError:
    """The error of a step that cannot be planned for failures of ours. `why`: what they leave."""
    lines = [
        f"{name}: planning failed, by a fault of autopar's own: {why}.",
        *(f"  {failure.what}: {failure.exception}" for failure in failures[:_MAX_NAMED]),
    ]
    if len(failures) > _MAX_NAMED:
        lines.append(f"  and {len(failures) - _MAX_NAMED} more")
    lines.append("Please report it with the traceback above. Another method or mesh may work.")
    error = PlanningError("\n".join(lines), tuple(failures), concerns_step=concerns_step)
    error.__cause__ = failures[0].cause
    return error


def _counted(named: Sequence[str]) -> str:
    if len(named) == 1:
        return named[0]
    shown = ", ".join(named[:_MAX_NAMED])
    rest = len(named) - _MAX_NAMED
    return f"{len(named)} candidates ({shown}{f' and {rest} more' if rest > 0 else ''})"


def _where(error: BaseException) -> str:
    """The innermost line of autopar in its traceback; the innermost line of all, if there is none;
    empty if it was never raised."""
    places = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    ours = [(path, line) for path, line in places if path.is_relative_to(_PACKAGE)]
    if not places:
        return ""
    path, line = (ours or places)[-1]
    shown = path.relative_to(_PACKAGE.parent) if ours else path
    return f"{shown}:{line}"

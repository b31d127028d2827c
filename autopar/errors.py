"""Errors that a user can act on.

Each message says what failed, what was given, what is needed and what to change. Each kind of
mistake has its class; all are :class:`AutoparError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

# Characters of a message on an argument: with the value, and with what is needed.
_MOST_BEGUN, _MOST_ENDED = 400, 1000


class AutoparError(Exception):
    """Base of everything autopar raises on purpose."""


class ArgumentError(AutoparError, ValueError):
    """An argument of an autopar function has a value that cannot work. The message begins with the
    value; a train state in the wrong place would fill pages, so the middle of a long one is left
    out."""

    def __init__(self, text: str = "") -> None:
        if len(text) > _MOST_BEGUN + _MOST_ENDED:
            text = f"{text[:_MOST_BEGUN]} … {text[-_MOST_ENDED:]}"
        super().__init__(text)


class TraceError(AutoparError, TypeError):
    """The function or its arguments cannot be traced to a program of arrays."""


class MeshError(AutoparError, ValueError):
    """A mesh that the devices cannot form, or that no array of the program can be split over."""


class SpecError(AutoparError, ValueError):
    """A partition spec that does not fit its array."""


class SolverError(AutoparError, RuntimeError):
    """The solver is unknown, failed, or proved that no sharding satisfies the constraints."""


class MemoryBudgetError(AutoparError, RuntimeError):
    """No sharding of the step fits into the memory of the devices, or into the user's budget.

    peak_bytes:   the smallest peak per device that was found.
    budget_bytes: the memory or budget per device.
    tried:        "micro-batches", "recomputation", "pipelines", "XLA's schedule", "host memory"
                  -> what came of it, or why it was not tried.
    remedies:     what would help -> how.
    num_micro_batches: how many of them may be enough; None if none seem to be.
    argument_bytes: of that peak, what state and batch take; 0 if that is not known.
    """

    def __init__(
        self,
        message: str,
        peak_bytes: float = 0.0,
        budget_bytes: float = 0.0,
        *,
        tried: Mapping[str, str] | None = None,
        remedies: Mapping[str, str] | None = None,
        num_micro_batches: int | None = None,
        argument_bytes: float = 0.0,
    ) -> None:
        self.problem = message
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
        self.tried = dict(tried or {})
        self.remedies = dict(remedies or {})
        self.num_micro_batches = num_micro_batches
        self.argument_bytes = argument_bytes
        lines = [message]
        for title, entries in (
            ("What was tried:", self.tried),
            ("What would help:", self.remedies),
        ):
            if entries:
                lines += [title, *(f"  - {what}: {text}" for what, text in entries.items())]
        super().__init__("\n".join(lines))

    def having_tried(
        self, tried: Mapping[str, str], *, useless: Iterable[str] = ()
    ) -> MemoryBudgetError:
        """The same error with more that was tried, and without remedies that are of no use."""
        useless = set(useless)
        error = MemoryBudgetError(
            self.problem,
            self.peak_bytes,
            self.budget_bytes,
            tried={**self.tried, **tried},
            remedies={what: how for what, how in self.remedies.items() if what not in useless},
            num_micro_batches=None if "micro-batches" in useless else self.num_micro_batches,
            argument_bytes=self.argument_bytes,
        )
        error.__cause__ = self.__cause__
        return error


class PlanningError(AutoparError, RuntimeError):
    """autopar itself failed: on every candidate of a search, or for operators with more than a
    tenth of the step's work. `__cause__` is the exception that was met first.

    failures:      what failed and why, an `autopar.ir.failures.Failure` each.
    concerns_step: the step itself cannot be planned, so that other candidates are of no use.
    """

    def __init__(
        self, message: str, failures: tuple[Any, ...] = (), *, concerns_step: bool = False
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.concerns_step = concerns_step


class PlanError(AutoparError, ValueError):
    """A plan that is malformed, altered, or made for another program."""


class ProfileError(AutoparError, RuntimeError):
    """A profile that cannot be read or written, or was measured on other hardware."""


class FactoryError(AutoparError, RuntimeError):
    """A user's file, module or function that `autopar plan` cannot use: it is missing, raises, or
    does not return a step and its arguments."""


class CompileError(AutoparError, RuntimeError):
    """XLA refused the sharded program."""


class ClusterError(AutoparError, RuntimeError):
    """A cluster that cannot be reached, has too few devices, or whose hosts do not match."""


class WorkerError(AutoparError, RuntimeError):
    """A worker process died, hung, ran out of memory or was lost with its node.

    host, mesh, stage, instruction: where it was, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        host: str = "",
        mesh: int | None = None,
        stage: int | None = None,
        instruction: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(message)
        self.host = host
        self.mesh = mesh
        self.stage = stage
        self.instruction = instruction
        self.log_tail = log_tail


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class TraceFileError(AutoparError, RuntimeError):
    """A trace file that cannot be written or read."""


class DataError(AutoparError, RuntimeError):
    """A data source failed, or returned a batch that the step cannot take."""


class DependencyError(AutoparError):
    """A package that autopar needs is missing, or its version lacks something that autopar uses.
    `autopar doctor` checks the whole installation."""


class UntestedJaxWarning(UserWarning):
    """The installed JAX is older or newer than the releases that autopar is tested with. Issued
    once per process, when autopar is first used."""


def shortened(value: object) -> str:
    """A value's repr, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def near_names(given: str, known: Iterable[str]) -> str:
    """ " (did you mean 'a' or 'b'?)" for similar names; empty if there are none."""
    lowered = {name.lower(): name for name in known}
    matches = [name for name in lowered if given and name.startswith(given.lower())]
    matches += get_close_matches(given.lower(), lowered, n=3, cutoff=0.6)
    names = " or ".join(repr(lowered[name]) for name in dict.fromkeys(matches))
    return f" (did you mean {names}?)" if names else ""

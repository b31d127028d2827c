"""How the processes of `jax.distributed` agree: from what each did to one common verdict.

Process 0 collects the reports of all and publishes its verdict, so each process reads one message
however many there are. Messages go through the store of JAX's coordination service. Collectives
would wait forever for a process that does something else; here every wait has a limit.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar import _jax
from autopar.errors import ArgumentError, AutoparError, PlanError, shortened

ARRIVAL_VARIABLE = "AUTOPAR_ARRIVAL_LIMIT_S"
PLANNING_VARIABLE = "AUTOPAR_PLANNING_LIMIT_S"

_SLACK_S = 15.0  # how much longer the others wait for the verdict of process 0
_CHUNK_BYTES = 2**20
_USUAL_REMEDY = (
    "Start every process with the same code, versions and devices, and give each the same global "
    "arrays."
)
_numbers = itertools.count()
_written: list[str] = []  # keys that this process must delete


def arrival_limit_s() -> float:
    """How long processes wait for each other at the start."""
    return _limit_s(ARRIVAL_VARIABLE, 300.0)


def planning_limit_s() -> float:
    """How long they wait for tracing, planning or compiling."""
    return _limit_s(PLANNING_VARIABLE, 3600.0)


def _limit_s(variable: str, default: float) -> float:
    given = os.environ.get(variable, "")
    try:
        limit_s = float(given) if given else default
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise ArgumentError(f"{variable}={given!r}: needs a number of seconds > 0.")
    return limit_s


_Answer = dict[str, Any]  # {"report": what to compare} or {"failed": why}


class Consensus:
    """An agreement of all processes about one step. Every process creates them in the same order,
    so their numbers match."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = next(_numbers)
        self._me = jax.process_index()
        self._count = jax.process_count()

    def agree(
        self,
        phase: str,
        work: Callable[[], Any],
        limit_s: float,
        report: Callable[[Any], dict[str, Any]] = dict,
        remedies: Mapping[str, str] | None = None,
    ) -> Any:
        """Do `work` in every process. Returns its result if all succeed with equal reports.
        `remedies`: what to do if this entry of the reports differs, in place of the usual advice.
        """

        def compared(reports: Mapping[int, Any]) -> tuple[str, None]:
            return _differences(self._name, reports, remedies or {}), None

        return self._together(phase, work, limit_s, report, compared)[0]

    def largest(
        self, phase: str, work: Callable[[], Sequence[float]], limit_s: float
    ) -> tuple[float, ...]:
        """Of the numbers that `work` returns in every process, as many in each, the largest ones,
        place by place."""

        def largest_of(reports: Mapping[int, Any]) -> tuple[str, list[float]]:
            return "", [max(found) for found in zip(*reports.values(), strict=True)]

        return tuple(self._together(phase, work, limit_s, list, largest_of)[1])

    def _together(
        self,
        phase: str,
        work: Callable[[], Any],
        limit_s: float,
        report: Callable[[Any], Any],
        conclude: Callable[[Mapping[int, Any]], tuple[str, Any]],
    ) -> tuple[Any, Any]:
        """The result of `work` in this process, and what process 0 concludes from the reports of
        all: (why they cannot go on, if they cannot; the conclusion)."""
        result = failure = None
        try:
            result = work()
            answer: _Answer = {"report": report(result)}
        except Exception as error:
            failure, answer = error, {"failed": _error_text(error)}
        before = len(_written)
        self._write(phase, str(self._me), answer)
        verdict: Sequence[Any] | None = None
        if self._me == 0:
            verdict = self._judge(phase, answer, limit_s, conclude)
            self._write(phase, "verdict", verdict)
        if failure is not None:
            raise failure
        if self._me != 0:
            verdict = self._read(phase, "verdict", time.monotonic() + limit_s + _SLACK_S)
        if verdict is None:
            raise PlanError(self._silence(0, phase, limit_s))
        problem, conclusion = verdict
        if problem:
            raise PlanError(problem)
        _delete_first(before)
        return result, conclusion

    def from_first(self, phase: str, work: Callable[[], str], limit_s: float) -> str:
        """The result of `work` in process 0, which alone does it."""
        if self._me == 0:
            try:
                text = work()
            except Exception as error:
                self._write(phase, "0", {"failed": _error_text(error)})
                raise
            self._write(phase, "0", {"text": text})
            return text
        answer = self._read(phase, "0", time.monotonic() + limit_s)
        if answer is None:
            raise PlanError(self._silence(0, phase, limit_s))
        if "failed" in answer:
            raise PlanError(f"{self._name}: process 0 could not plan it: {answer['failed']}")
        return answer["text"]

    def _judge(
        self,
        phase: str,
        first: _Answer,
        limit_s: float,
        conclude: Callable[[Mapping[int, Any]], tuple[str, Any]],
    ) -> tuple[str, Any]:
        """(why the processes cannot go on, empty if they can; what follows from their reports).
        `first`: the answer of process 0."""
        if "failed" in first:
            return f"{self._name}: process 0 failed ({phase}): {first['failed']}", None
        deadline = time.monotonic() + limit_s
        answers = {0: first}
        for process in range(1, self._count):
            answer = self._read(phase, str(process), deadline)
            if answer is None:
                return self._silence(process, phase, limit_s), None
            answers[process] = answer
        failed = {p: a["failed"] for p, a in answers.items() if "failed" in a}
        if failed:
            texts = [f"{processes_text(who)}: {text}" for text, who in _grouped(failed).items()]
            why = f"{self._name}: not every process could take part ({phase}). "
            return why + "; ".join(texts), None
        return conclude({p: a["report"] for p, a in answers.items()})

    def _silence(self, process: int, phase: str, limit_s: float) -> str:
        return (
            f"{self._name}: process {process} did not arrive within {limit_s:g} s ({phase}). Every "
            "process must call the same steps in the same order, with arguments of the same "
            f"shapes; if it is only slow, set {ARRIVAL_VARIABLE} or {PLANNING_VARIABLE} to more "
            "seconds."
        )

    def _key(self, phase: str, who: str) -> str:
        return f"autopar/{self._number}/{phase}/{who}"

    def _write(self, phase: str, who: str, message: Any) -> None:
        data = zlib.compress(json.dumps(message).encode())
        starts = range(0, len(data), _CHUNK_BYTES)
        key = self._key(phase, who)
        for number, start in enumerate(starts):
            _jax.store_set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])
        _jax.store_set(key, str(len(starts)).encode())
        _written.extend([key, *(f"{key}/{number}" for number in range(len(starts)))])

    def _read(self, phase: str, who: str, deadline: float) -> Any:
        """A message, or None if it does not come in time."""
        key = self._key(phase, who)
        count = _jax.store_get(key, deadline - time.monotonic())
        if count is None:
            return None
        chunks = [_jax.store_get(f"{key}/{number}", _SLACK_S) for number in range(int(count))]
        there = [chunk for chunk in chunks if chunk is not None]
        return json.loads(zlib.decompress(b"".join(there))) if len(there) == int(count) else None


def _delete_first(count: int) -> None:
    """Delete the oldest keys: when all have answered a message, all have read those before it."""
    for key in _written[:count]:
        _jax.store_delete(key)
    del _written[:count]


def _error_text(error: BaseException) -> str:
    is_ours = isinstance(error, AutoparError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for process, text in texts.items():
        groups.setdefault(text, []).append(process)
    return groups


def processes_text(who: Sequence[int]) -> str:
    """Processes in words; of many, the first eight."""
    if len(who) == 1:
        return f"process {who[0]}"
    shown = ", ".join(map(str, who[:8])) + (", …" if len(who) > 8 else "")
    return f"processes {shown}"


def _differences(
    name: str, reports: Mapping[int, Mapping[str, Any]], remedies: Mapping[str, str]
) -> str:
    first = reports[0]
    differences: dict[int, str] = {}
    remedy = _USUAL_REMEDY
    for process, report in reports.items():
        keys = [k for k in dict.fromkeys([*first, *report]) if report.get(k) != first.get(k)]
        if keys:
            remedy = next((remedies[key] for key in keys if key in remedies), remedy)
            shown = [f"{k} is {_shown(report, k)}, not {_shown(first, k)}" for k in keys[:3]]
            more = [f"{len(keys) - 3} more"] if len(keys) > 3 else []
            differences[process] = "; ".join([*shown, *more])
    if not differences:
        return ""
    texts = [f"{processes_text(who)}: {text}" for text, who in _grouped(differences).items()]
    return f"{name}: processes differ from process 0. " + ". ".join(texts) + f". {remedy}"


def _shown(report: Mapping[str, Any], key: str) -> str:
    return shortened(report[key]) if key in report else "missing"

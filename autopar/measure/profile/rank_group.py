"""Several processes that measure together: what each has found, told to all.

A process of `jax.distributed` is a *rank*. Ranks run the same programs, so whatever decides which
program runs next, and how often, must be equal on all of them. `gather` is the only way to agree:
rank 0 collects the values of all and publishes the list. An error in one rank takes the place of
its value, and every rank raises. Messages go through the store of JAX's coordination service, not
through the devices: it neither disturbs what is measured nor waits forever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from autopar import _jax
from autopar.errors import ProfileError

WAIT_S = 180.0  # for the slowest rank to compile and run a program
_SLACK_S = 15.0  # how much longer the others wait for rank 0

T = TypeVar("T")


class RankFailure(Exception):
    """Some rank failed; raised in all of them, at the same point."""


class RankGroup:
    """All processes of `jax.distributed`. Each calls the same methods in the same order."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.rank, self.num_ranks = jax.process_index(), jax.process_count()
        self._wait_s = wait_s
        self._number = 0

    def gather(self, value: Any, failed: str | None = None) -> list[Any]:
        """The values of all ranks, by rank. They are JSON values. `failed`: why this rank has none;
        every rank then raises `RankFailure`."""
        number, self._number = self._number, self._number + 1
        own = {"value": value} if failed is None else {"failed": failed}
        answers = self._collect(number, own) if self.rank == 0 else self._receive(number, own)
        texts = [f"rank {r}: {a['failed']}" for r, a in enumerate(answers) if "failed" in a]
        if texts:
            raise RankFailure("; ".join(texts))
        return [answer["value"] for answer in answers]

    def slowest(self, seconds: float) -> float:
        return max(self.gather(seconds))

    def from_first(self, value: Any = None) -> Any:
        """The value that rank 0 gives."""
        return self.gather(value)[0]

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, which every rank does. If it fails in one, all raise, whether they
        are in the middle of it or have finished."""
        failed, result = None, None
        try:
            result = work()
        except (RankFailure, ProfileError):
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        self.gather(None, failed)
        return result  # type: ignore[return-value]

    def _collect(self, number: int, own: dict[str, Any]) -> list[dict[str, Any]]:
        answers, ends_s = [own], time.monotonic() + self._wait_s
        for rank in range(1, self.num_ranks):
            answers.append(self._read(_key(number, rank), rank, ends_s - time.monotonic()))
        _jax.store_set(_key(number, "all"), json.dumps(answers).encode())
        for who in (*range(1, self.num_ranks), "all"):  # all have read the last but one
            if number:
                _jax.store_delete(_key(number - 1, who))
        return answers

    def _receive(self, number: int, own: dict[str, Any]) -> list[dict[str, Any]]:
        _jax.store_set(_key(number, self.rank), json.dumps(own).encode())
        return self._read(_key(number, "all"), 0, self._wait_s + _SLACK_S)

    def _read(self, key: str, rank: int, limit_s: float) -> Any:
        message = _jax.store_get(key, max(limit_s, 0.001))
        if message is None:
            raise ProfileError(
                f"profile: rank {rank} did not answer within {self._wait_s:g} s. It may have "
                "failed, or hang in a collective. Earlier samples are kept; the same command "
                "continues."
            )
        return json.loads(message)


def _key(number: int, who: int | str) -> str:
    return f"autopar/profile/{number}/{who}"

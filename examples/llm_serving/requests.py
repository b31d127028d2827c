"""What clients ask of an engine and what they get: sampling settings → a stream of tokens.

Between them lies an `Engine` (`engine.py`): it batches requests of different lengths continuously
and fills the stream of each. `generate` and the HTTP server are clients of the same interface.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from autopar.errors import AutoparError


class ServingError(AutoparError):
    """A request that cannot be served as it stands; nothing was queued."""


class PromptTooLongError(ServingError):
    """A prompt that leaves no room for a token in the cache."""


class QueueFullError(ServingError):
    """As many requests wait as the engine admits; try again later."""


class EngineStoppedError(ServingError):
    """The engine was closed, or failed, while the request waited or ran."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; by the words of transformers' `generate`.

    Attributes:
      max_new_tokens: at most so many; the cache may end it sooner.
      do_sample: draw from the distribution; otherwise its most likely token.
      temperature, top_k, top_p: what logits are divided by, how many tokens and how much
        probability stay in the draw (0 and 1.0 keep all).
      seed: of this request's draws, so that they do not depend on what else is in the batch.
      stop_token_ids: a token of these ends the request; it is the last one given.
    """

    max_new_tokens: int = 16
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of an answer. `finish_reason` is None but for the last: "stop", "length" or
    "cancelled" (then `token_id` is None)."""

    token_id: int | None
    logprob: float | None = None
    finish_reason: str | None = None


class Completion:
    """A request under way: the engine puts tokens in, one client takes them out.

    The client may `cancel` at any time, from any thread; the engine then frees the request's place
    before its next step.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams):
        self.prompt = tuple(prompt)
        self.params = params
        self._tokens: queue.SimpleQueue[Token | Exception] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._listener: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def put(self, token: Token | Exception) -> None:
        """The engine's side: the next token, or what ended the request."""
        self._tokens.put(token)
        if (listener := self._listener) is not None:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every `put` from now on, in the engine's thread: it must be
        quick and must not raise. Tokens put before are not told of: look for them first."""
        self._listener = listener

    def get(self, timeout_s: float) -> Token:
        """The next token; `queue.Empty` after `timeout_s`; raises what ended the request."""
        item = self._tokens.get(timeout=timeout_s)
        if isinstance(item, Exception):
            raise item
        return item

    def tokens(self, timeout_s: float = 600.0) -> Iterator[Token]:
        """All tokens until the last; each may take `timeout_s`."""
        while True:
            token = self.get(timeout_s)
            yield token
            if token.finish_reason is not None:
                return


class Engine(Protocol):
    """What serves completions; thread-safe."""

    max_length: int
    """Tokens of prompt and answer together that the cache of one request holds."""
    vocab_size: int
    model_name: str

    @property
    def failure(self) -> Exception | None:
        """Why nothing is served any more (closed, or what ended the loop); None while it serves."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Queues a request; raises `PromptTooLongError`, `QueueFullError`, `ServingError` (token
        ids or settings out of range) or `EngineStoppedError` at once."""
        ...

    def stats(self) -> dict[str, float]:
        """Requests waiting and running, tokens given and steps run since the start."""
        ...

    def close(self) -> None:
        """Ends all requests with `EngineStoppedError`, frees the cache; may be called twice."""
        ...

"""The interface between clients and an engine: sampling settings → a stream of tokens.

An `Engine` (`engine.py`) batches requests of different lengths continuously and fills the stream of
each. `generate` and the HTTP server are both clients of this interface.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from autopar.errors import AutoparError
from examples.llm_serving.histograms import Histogram


class ServingError(AutoparError):
    """A request that cannot be served; nothing was queued."""


class PromptTooLongError(ServingError):
    """A prompt that leaves no room for a token in the cache."""


class QueueFullError(ServingError):
    """The engine's queue is full; try again later."""


class EngineStoppedError(ServingError):
    """The engine was closed, or failed, while the request waited or ran."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; names as in transformers' `generate`.

    Attributes:
      max_new_tokens: an upper bound; the cache may end the answer sooner.
      do_sample: draw from the distribution; otherwise take its most likely token.
      temperature, top_k, top_p: the divisor of the logits, and how many tokens and how much
        probability stay in the draw (0 and 1.0 keep all).
      seed: of this request's draws, which do not depend on the rest of the batch.
      stop_token_ids: tokens that end the request; the stop token is the last one returned.
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
    """One token of an answer. Only the last has a `finish_reason`: "stop", "length" or
    "cancelled" (then `token_id` is None)."""

    token_id: int | None
    logprob: float | None = None
    finish_reason: str | None = None


class Completion:
    """A submitted request: the engine puts tokens in, one client takes them out.

    The client may `cancel` at any time, from any thread; the engine then frees the request's slot
    before its next step.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams):
        self.prompt = tuple(prompt)
        self.params = params
        self.stops = frozenset(params.stop_token_ids)  # looked up for every token
        self.begun_s = time.monotonic()
        self._tokens: queue.SimpleQueue[Token | Exception] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._listener: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def put(self, token: Token | Exception) -> None:
        """Called by the engine: the next token, or the error that ended the request."""
        self._tokens.put(token)
        if (listener := self._listener) is not None:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every future `put`, in the engine's thread: it must be quick
        and must not raise. It is not called for earlier tokens: take those first."""
        self._listener = listener

    def get(self, timeout_s: float) -> Token:
        """The next token. Raises `queue.Empty` after `timeout_s`, or the error that ended the
        request."""
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
    """Serves completions; thread-safe."""

    max_length: int
    """The number of tokens, prompt and answer together, that one request's cache holds."""
    vocab_size: int
    model_name: str
    histograms: Mapping[str, Histogram]
    """Latencies, by name."""

    @property
    def stuck_s(self) -> float:
        """For how long it has not come to its next step, though there is work."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the engine stopped (closed, or the loop's error); None while it serves."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Queues a request; raises `PromptTooLongError`, `QueueFullError`, `ServingError` (token
        ids or settings out of range) or `EngineStoppedError` at once."""
        ...

    def stats(self) -> dict[str, float]:
        """Requests waiting and running, tokens produced and steps run since the start."""
        ...

    def close(self) -> None:
        """Ends all requests with `EngineStoppedError`, frees the cache; may be called twice."""
        ...

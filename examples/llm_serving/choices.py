"""Running answers: completions of an engine → pieces of text as they come, in an event loop.

An engine fills its completions from its own thread. `Wakeups` notifies the event loop, once per
step and not once per token. `Choice` is one answer: it takes the new tokens, turns them into text
and knows why it ended. `Answers` are the choices of one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from examples.llm_serving.requests import Completion, Engine, SamplingParams, ServingError, Token
from examples.llm_serving.schema import CompletionRequest
from examples.llm_serving.tokens import TextStream, Tokenizer

SEEDS = 2**31


class DeadlineError(ServingError):
    """A request exceeded its time limit."""


class Wakeups:
    """Sets events of an event loop from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._events: deque[asyncio.Event] = deque()
        self._scheduled = False

    def waker(self, event: asyncio.Event) -> Callable[[], None]:
        def wake() -> None:
            self._events.append(event)
            if not self._scheduled:
                self._scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                    self._loop.call_soon_threadsafe(self._deliver)

        return wake

    def _deliver(self) -> None:
        self._scheduled = False  # before the events, so that no concurrent put is missed
        while self._events:
            self._events.popleft().set()


@dataclasses.dataclass
class Piece:
    """The next part of a choice: text, its tokens, and the finish reason if it is the last."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None


class Choice:
    """One answer to one prompt."""

    def __init__(
        self,
        index: int,
        completion: Completion,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
    ):
        self.index = index
        self.completion = completion
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._text = TextStream(tokenizer, completion.prompt, stop) if tokenizer else None

    def take(self) -> Piece | None:
        """Everything since the last call, or None. Raises the error that ended the request."""
        piece = Piece(self.index, "", [], [], None)
        while self.finish_reason is None:
            try:
                token = self.completion.get(0)
            except queue.Empty:
                break
            piece.text += self._add(token, piece)
        piece.finish_reason = self.finish_reason
        return piece if piece.token_ids or piece.finish_reason else None

    def _add(self, token: Token, piece: Piece) -> str:
        text = ""
        if token.token_id is not None:
            self.num_tokens += 1
            piece.token_ids.append(token.token_id)
            piece.logprobs.append(token.logprob)
            ends = token.finish_reason == "stop"  # the stop token itself is not shown
            text = self._text.push(token.token_id) if self._text and not ends else ""
        if self._text and token.finish_reason is not None:
            text += self._text.flush()
        self.finish_reason = token.finish_reason
        if self._text and self._text.stopped:
            self.finish_reason = "stop"
            self.completion.cancel()
        return text


class Answers:
    """The choices of one request: all are queued, or none; `close` frees their slots.

    Args:
      deadline: in the event loop's time; answers that are incomplete then end with
        `DeadlineError`.
    """

    def __init__(self, wakeups: Wakeups, deadline: float):
        self._ended_by: Exception | None = None
        self._timer = asyncio.get_running_loop().call_at(
            deadline, self.end, DeadlineError("The answer was not complete in time.")
        )
        self._event = asyncio.Event()
        self._wake = wakeups.waker(self._event)
        self.choices: list[Choice] = []

    def submit(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        request: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues all choices, or none: raises the engine's error for the first it rejects."""
        seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed
        try:
            for prompt in prompts:
                for _ in range(request.n):
                    index = len(self.choices)
                    params = SamplingParams(
                        max_new_tokens=request.max_tokens,
                        do_sample=request.temperature > 0,
                        temperature=request.temperature or 1.0,
                        top_k=request.top_k,
                        top_p=request.top_p,
                        seed=(seed + index) % SEEDS,
                        stop_token_ids=tuple(stop_token_ids),
                    )
                    completion = engine.submit(prompt, params)
                    completion.listen(self._wake)
                    self.choices.append(Choice(index, completion, tokenizer, request.stop))
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come, until every choice has ended; raises the error
        that ends them early."""
        running = list(self.choices)
        while running:
            self._event.clear()
            for choice in running:
                if (piece := choice.take()) is not None:
                    yield piece
            running = [choice for choice in running if choice.finish_reason is None]
            if running and self._ended_by is not None:
                raise self._ended_by
            if running:
                await self._event.wait()

    def end(self, error: Exception) -> None:
        """Ends all running choices with `error`."""
        self._ended_by = error
        self._event.set()

    def close(self) -> None:
        self._timer.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.completion.cancel()

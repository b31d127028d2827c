"""Answers under way: completions of an engine → stage programs of text as they come, in an event
loop.

An engine fills its completions from a thread of its own. `Wakeups` carries word of it into the
event loop, once per step and not once per token. `Choice` is one answer: it takes what has come,
makes text of it and knows why it ended. `Answers` are the choices of one request.
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
    """A request took longer than it may."""


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
        self._scheduled = False  # before the events, so that none put meanwhile is missed
        while self._events:
            self._events.popleft().set()


@dataclasses.dataclass
class Piece:
    """What became known of one choice: text, its tokens, and whether it is the last."""

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
        """All that has come since; None if nothing has. Raises what ended the request."""
        stage_program = Piece(self.index, "", [], [], None)
        while self.finish_reason is None:
            try:
                token = self.completion.get(0)
            except queue.Empty:
                break
            stage_program.text += self._add(token, stage_program)
        stage_program.finish_reason = self.finish_reason
        return stage_program if stage_program.token_ids or stage_program.finish_reason else None

    def _add(self, token: Token, stage_program: Piece) -> str:
        text = ""
        if token.token_id is not None:
            self.num_tokens += 1
            stage_program.token_ids.append(token.token_id)
            stage_program.logprobs.append(token.logprob)
            ends = token.finish_reason == "stop"  # the token that ends an answer is not shown
            text = self._text.push(token.token_id) if self._text and not ends else ""
        if self._text and token.finish_reason is not None:
            text += self._text.flush()
        self.finish_reason = token.finish_reason
        if self._text and self._text.stopped:
            self.finish_reason = "stop"
            self.completion.cancel()
        return text


class Answers:
    """The choices of one request: all are queued, or none; `close` frees their places.

    Args:
      deadline: in the event loop's time; answers that are not there by then end with
        `DeadlineError`.
    """

    def __init__(self, wakeups: Wakeups, deadline: float):
        self._ended_by: Exception | None = None
        self._timer = asyncio.get_running_loop().call_at(
            deadline, self.end, DeadlineError("The answer was not there in time.")
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
        """Queues all choices, or none: raises what the engine says of the first that it refuses."""
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

    async def stage_programs(self) -> AsyncIterator[Piece]:
        """Stage programs of all choices as they come, until every choice has ended; raises what
        ends them otherwise."""
        running = list(self.choices)
        while running:
            self._event.clear()
            for choice in running:
                if (stage_program := choice.take()) is not None:
                    yield stage_program
            running = [choice for choice in running if choice.finish_reason is None]
            if running and self._ended_by is not None:
                raise self._ended_by
            if running:
                await self._event.wait()

    def end(self, error: Exception) -> None:
        """Ends what runs with `error`."""
        self._ended_by = error
        self._event.set()

    def close(self) -> None:
        self._timer.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.completion.cancel()

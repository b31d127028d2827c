"""Running answers → response objects: one JSON body, or a stream of server-sent events.

A stream's memory is bounded: an event is made only when the previous one is in the connection's
buffer of fixed size. Tokens that come meanwhile share the next event; an answer has at most as many
as the cache holds.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from examples.llm_serving.choices import Answers, Choice, Piece
from examples.llm_serving.schema import CompletionRequest, HttpError
from examples.llm_serving.tokens import Tokenizer

SMALL_BYTES = 1 << 14  # a connection buffers more than that before a writer has to wait


class SlowReaderError(Exception):
    """The client read nothing for too long; its connection was cut."""


class Reply:
    """The response to one request."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        answers: Answers,
        tokenizer: Tokenizer | None,
        model_name: str,
    ):
        self._request, self._prompts = request, prompts
        self._answers, self._tokenizer = answers, tokenizer
        self._with_ids = request.return_token_ids or tokenizer is None
        self._tells_tokens = self._with_ids or request.logprobs is not None
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._length = [0] * request.num_choices  # of the text so far, for text_offset

    async def whole(self) -> web.Response:
        merged = [self._prefix(index) for index in range(self._request.num_choices)]
        async for piece in self._answers.pieces():
            choice = merged[piece.index]
            choice.text += piece.text
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs
            choice.finish_reason = piece.finish_reason
        choices = [self._choice(piece) for piece in merged]
        figures = usage(self._answers.choices, self._prompts)
        return web.json_response({**self._head, "choices": choices, "usage": figures})

    async def stream(
        self, request: web.Request, write_s: float, explain: Callable[[Exception], HttpError]
    ) -> web.StreamResponse:
        """Writes all events; after an error, the error is the last event.

        Raises `SlowReaderError` when a write takes longer than `write_s`, and `ConnectionError`.
        """
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        events = _EventWriter(request, response, write_s)
        try:
            try:
                await self._write_all(events)
            except (TimeoutError, ConnectionError):
                raise
            except Exception as error:  # the status is sent already
                await events.write(_dumps(explain(error).body()))
            async with asyncio.timeout(write_s):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise SlowReaderError from None
        return response

    async def _write_all(self, events: _EventWriter) -> None:
        head = _dumps(self._head)[:-1]  # the same in every event
        if self._request.echo:
            for index in range(self._request.num_choices):
                choice = _dumps(self._choice(self._prefix(index)))
                await events.write(f'{head},"choices":[{choice}]}}')
        async for piece in self._answers.pieces():
            if piece.text or piece.finish_reason or self._tells_tokens:
                await events.write(f'{head},"choices":[{_dumps(self._choice(piece))}]}}')
        if self._request.include_usage:
            figures = _dumps(usage(self._answers.choices, self._prompts))
            await events.write(f'{head},"choices":[],"usage":{figures}}}')
        await events.write("[DONE]")

    def _prefix(self, index: int) -> Piece:
        """The part before the answer: empty, or with `echo` the prompt."""
        if not self._request.echo:
            return Piece(index, "", [], [], None)
        prompt = self._prompts[index // self._request.n]
        given = self._request.prompts[index // self._request.n]
        if isinstance(given, str):
            text = given
        else:
            text = self._tokenizer.decode(prompt) if self._tokenizer else ""
        return Piece(index, text, list(prompt), [None] * len(prompt), None)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "finish_reason": piece.finish_reason,
            "logprobs": None,
        }
        if self._with_ids:
            choice["token_ids"] = piece.token_ids
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece)
        self._length[piece.index] += len(piece.text)
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [
            self._tokenizer.decode([token_id]) if self._tokenizer else f"token_id:{token_id}"
            for token_id in piece.token_ids
        ]
        offset, offsets = self._length[piece.index], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [
            None if value is None else {text: value}
            for text, value in zip(texts, piece.logprobs, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "text_offset": offsets,
            "top_logprobs": top if self._request.logprobs else None,
        }


class _EventWriter:
    """Server-sent events into a connection; `TimeoutError` when the reader makes no room."""

    def __init__(self, request: web.Request, response: web.StreamResponse, write_s: float):
        self._request, self._response, self._write_s = request, response, write_s

    async def write(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if len(event) < SMALL_BYTES and not transport.get_write_buffer_size():
            await self._response.write(event)  # the buffer has room: no timer is needed
            return
        async with asyncio.timeout(self._write_s):
            await self._response.write(event)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def usage(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Tokens of all prompts, each counted once, and of all answers."""
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_answer = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
    }

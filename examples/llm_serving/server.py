"""The HTTP endpoint: an engine and its tokenizer → OpenAI-style completions on a port.

    POST /v1/completions   GET /v1/models   GET /v1/models/{name}
    GET /health, /ready    whether requests should be sent here
    GET /live              whether the engine works: 503 if it failed, or is stuck in a step
    GET /metrics           counts, and histograms of latencies, for Prometheus

With an API key, /v1 needs the header `Authorization: Bearer KEY`.

Every resource a client can use is bounded: bodies, answers per request, connections, the engine's
queue, and the time for a body to arrive, for a reader to read and for a whole request. When a
client disconnects, its slots in the engine are freed before the next step. `Server` lives in one
event loop; `serve` runs it until a signal, `serving` in a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hmac
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from examples.llm_serving.choices import Answers, DeadlineError, Wakeups
from examples.llm_serving.replies import Reply, SlowReaderError
from examples.llm_serving.requests import (
    Engine,
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    ServingError,
)
from examples.llm_serving.schema import CompletionRequest, HttpError, parse_request
from examples.llm_serving.tokens import Tokenizer, TokenizerError

log = logging.getLogger("examples.llm_serving")
# aiohttp's logger prints a traceback for every line that is not HTTP.
connection_log = logging.getLogger("examples.llm_serving.connections")
connection_log.setLevel(logging.CRITICAL)
RETRY_AFTER_S = 1
FRESH_S = 0.05
SEND_BUFFER_BYTES = 1 << 16  # per connection; the system's default grows to megabytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for one client, or for all together.

    Attributes:
      max_body_bytes: of a request; larger ones get a 413.
      max_choices: answers of one request, over its prompts and `n`.
      max_connections: open at once; further ones get a 503 and are closed.
      read_s: for a body to arrive, and for an idle connection to send a request.
      write_s: for a reader to make room; then the connection is cut.
      request_s: from a request's arrival to its last token, waiting included.
      drain_s: for running requests when the server is asked to stop.
      stuck_s: for the engine to come to its next step; afterwards it counts as stuck.
    """

    max_body_bytes: int = 1 << 20
    max_choices: int = 16
    max_connections: int = 512
    read_s: float = 20.0
    write_s: float = 20.0
    request_s: float = 600.0
    drain_s: float = 10.0
    stuck_s: float = 120.0


class Server:
    """Answers HTTP requests with an engine, in the event loop in which it is started."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        limits: Limits | None = None,
        api_key: str | None = None,
    ):
        if api_key is not None and not api_key:
            raise ServingError("The API key is empty. Give a long random text, or None.")
        self._api_key = api_key
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits or Limits()
        self.eos_token_ids = tuple(eos_token_ids)
        # Counters start at zero, so that a monitor sees them before the first request.
        self.counts: Counter[str] = Counter(prompt_tokens=0, completion_tokens=0)
        self.stopping = False
        self._hurried = False
        self._started_at = int(time.time())
        self._answers: set[Answers] = set()
        self._fresh: set[asyncio.BaseProtocol] = set()
        self._encoders = concurrent.futures.ThreadPoolExecutor(2, "tokenizer")

    @property
    def num_active(self) -> int:
        """The number of running completion requests."""
        return len(self._answers)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which the system chooses if `port` is 0."""
        loop = asyncio.get_running_loop()
        self._wakeups = Wakeups(loop)
        app = web.Application(middlewares=[self._guard], client_max_size=self.limits.max_body_bytes)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=self.limits.read_s,
            lingering_time=1.0,
            access_log=None,
            logger=connection_log,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        self._listener = await loop.create_server(
            self._accept, host, port, backlog=128, reuse_address=True
        )
        for listening in self._listener.sockets:  # what is accepted inherits it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Accepts no new requests; running ones get `drain_s`, then they are ended."""
        self.stopping = True
        self._listener.close()
        deadline = time.monotonic() + self.limits.drain_s
        while self._answers and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.02)
        for answers in self._answers:
            answers.end(EngineStoppedError("The server is stopping; the answer was cut short."))
        await self._runner.cleanup()  # cancels running requests, which frees their slots
        await self._listener.wait_closed()
        self._encoders.shutdown(wait=False, cancel_futures=True)

    def hurry(self) -> None:
        """Makes `stop` return at once."""
        self._hurried = True

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        num_open = len(self._fresh.union(server.connections))
        if num_open >= self.limits.max_connections:
            self.counts["connections_refused"] += 1
            return _Refusal()
        protocol = server()
        # Many may be accepted at once, before aiohttp counts the first.
        self._fresh.add(protocol)
        asyncio.get_running_loop().call_later(FRESH_S, self._fresh.discard, protocol)
        return protocol

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turns a handler's exceptions into OpenAI's error objects, and writes the rest of the
        response within its time limit."""
        try:
            self._check_key(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _error_response(_of_aiohttp(error, request, self.limits))
        except Exception as error:
            response = _error_response(self._explain(error))
        self.counts[f"responses_{response.status}"] += 1
        try:
            async with asyncio.timeout(self.limits.write_s):
                await response.prepare(request)
                await response.write_eof()  # a stream has ended already
        except TimeoutError:
            self.counts["slow_readers"] += 1
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        return response

    def _check_key(self, request: web.Request) -> None:
        """Raises if the API key is wrong; how long it takes says nothing about the key."""
        if self._api_key is None or not request.path.startswith("/v1"):
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise HttpError(
                "The API key is missing or wrong; send the header `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )

    def _explain(self, error: Exception) -> HttpError:
        if isinstance(error, HttpError):
            return error
        if isinstance(error, TokenizerError):
            return HttpError(str(error), param="prompt")
        if isinstance(error, PromptTooLongError):
            return HttpError(str(error), param="prompt", code="context_length_exceeded")
        if isinstance(error, QueueFullError):
            kind, code = "rate_limit_error", "queue_full"
            return HttpError(str(error), status=429, kind=kind, code=code)
        if isinstance(error, EngineStoppedError) or self.engine.failure is not None:
            return HttpError(str(error), status=503, kind="server_error", code="engine_stopped")
        if isinstance(error, DeadlineError):
            text = f"The request took longer than {self.limits.request_s:g} s and was ended."
            return HttpError(text, status=504, kind="server_error", code="timeout")
        if isinstance(error, ServingError):
            return HttpError(str(error))
        log.exception("a request failed", exc_info=error)
        text = f"The server failed on this request ({type(error).__name__}); see its log."
        return HttpError(text, status=500, kind="server_error")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "local",
            "max_length": self.engine.max_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.engine.model_name:
            raise HttpError(
                f"Unknown model {json.dumps(name[:80])}; this server has "
                f"{json.dumps(self.engine.model_name)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _ready(self, request: web.Request) -> web.Response:
        reason = self._what_is_wrong()
        if self.stopping and not reason:
            reason = "the server is stopping"
        return _status(reason)

    async def _live(self, request: web.Request) -> web.Response:
        return _status(self._what_is_wrong())

    def _what_is_wrong(self) -> str:
        """With the engine; empty if nothing."""
        failure, stuck_s = self.engine.failure, self.engine.stuck_s
        if failure is not None:
            return str(failure)
        if stuck_s > self.limits.stuck_s:
            return f"the engine has been at one step for {stuck_s:.0f} s"
        return ""

    async def _metrics(self, request: web.Request) -> web.Response:
        server = self._runner.server
        figures = {
            **{f"engine_{name}": value for name, value in self.engine.stats().items()},
            "requests_active": len(self._answers),
            "connections_open": len(server.connections) if server else 0,
            **self.counts,
        }
        lines = [f"llm_serving_{name} {value:.17g}" for name, value in sorted(figures.items())]
        for name, histogram in sorted(self.engine.histograms.items()):
            lines += histogram.lines(f"llm_serving_{name}")
        return web.Response(text="\n".join(lines) + "\n")

    async def _completions(self, http_request: web.Request) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        request = await self._read(http_request)
        self._check_model(request.model)
        prompts = await self._encode(request)
        if self.stopping:
            raise EngineStoppedError("The server is stopping; send the request to another one.")
        eos = () if request.ignore_eos else self.eos_token_ids
        answers = Answers(self._wakeups, started + self.limits.request_s)
        answers.submit(
            self.engine, self.tokenizer, request, prompts, (*eos, *request.stop_token_ids)
        )
        self._answers.add(answers)
        self.counts["prompt_tokens"] += sum(map(len, prompts))
        reply = Reply(request, prompts, answers, self.tokenizer, self.engine.model_name)
        try:
            if not request.stream:
                return await reply.whole()
            return await reply.stream(http_request, self.limits.write_s, self._explain)
        except (SlowReaderError, ConnectionError, asyncio.CancelledError) as error:
            gone = "slow_readers" if isinstance(error, SlowReaderError) else "disconnects"
            self.counts[gone] += 1
            raise asyncio.CancelledError from None  # the client is gone
        finally:
            answers.close()
            self._answers.discard(answers)
            self.counts["completion_tokens"] += sum(c.num_tokens for c in answers.choices)

    async def _read(self, http_request: web.Request) -> CompletionRequest:
        if "Content-Encoding" in http_request.headers:
            raise HttpError("Compressed bodies are not supported; send plain JSON", status=415)
        try:
            async with asyncio.timeout(self.limits.read_s):
                body = await http_request.read()
        except TimeoutError:
            text = f"The body did not arrive within {self.limits.read_s:g} s."
            raise HttpError(text, status=408, code="timeout") from None
        return parse_request(
            body, max_choices=self.limits.max_choices, vocab_size=self.engine.vocab_size
        )

    async def _encode(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """Token ids of all prompts; raises if one is empty or leaves no room for an answer."""
        prompts = []
        for index, prompt in enumerate(request.prompts):
            name = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
            if isinstance(prompt, str):
                prompt = await self._encode_text(prompt, name)
            if not prompt:
                raise HttpError(f"{name} has no tokens; at least one is needed", param=name)
            if len(prompt) >= self.engine.max_length:
                raise HttpError(
                    f"{name} has {len(prompt)} tokens; this server holds {self.engine.max_length} "
                    "of prompt and answer together, so a prompt may have "
                    f"{self.engine.max_length - 1}. Shorten it.",
                    param=name,
                    code="context_length_exceeded",
                )
            prompts.append(prompt)
        if request.stop and self.tokenizer is None:
            raise HttpError(_no_tokenizer("stop strings need", "stop_token_ids"), param="stop")
        return prompts

    async def _encode_text(self, text: str, name: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise HttpError(_no_tokenizer(f"{name} is text, which needs", "token ids"), param=name)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, self.tokenizer.encode, text)


class _Refusal(asyncio.Protocol):
    """Answers a connection above the limit with a 503 and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        text = "This server has reached its connection limit; try again later."
        error = HttpError(text, status=503, kind="server_error", code="too_many_connections")
        body = json.dumps(error.body()).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\n"
            "Connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


def _status(reason: str) -> web.Response:
    if reason:
        return web.json_response({"status": "stopped", "reason": reason}, status=503)
    return web.json_response({"status": "ok"})


def _error_response(error: HttpError) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    return web.json_response(error.body(), status=error.status, headers=headers)


def _of_aiohttp(error: web.HTTPException, request: web.Request, limits: Limits) -> HttpError:
    text = error.text or error.reason
    if error.status == 413:
        text = f"The body exceeds the limit of {limits.max_body_bytes} bytes."
    if error.status == 404:
        text = f"There is nothing at {request.path[:80]}; completions are at /v1/completions."
    if error.status == 405:
        text = f"{request.path[:80]} does not support {request.method[:20]}."
    return HttpError(text, status=error.status)


def _no_tokenizer(what: str, instead: str) -> str:
    return f"{what} a tokenizer, and the model's folder has no tokenizer.json; send {instead}"

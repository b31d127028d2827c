"""A body of `POST /v1/completions` → `CompletionRequest`; errors as OpenAI's JSON objects.

Every field is checked for type and range before anything is queued. Every error names the field
(`param`), what was given and what was needed. Unsupported fields are errors, not ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

from examples.llm_serving.requests import ServingError

MAX_STOPS = 4
# Unsupported fields of the API, with the values that have no effect and are accepted.
NEUTRAL = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
}


class HttpError(ServingError):
    """An error response: status, message, and the field it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A client's request; see docs/serving.md for every field."""

    prompts: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    echo: bool = False
    logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)


def parse_request(body: bytes, *, max_choices: int, vocab_size: int) -> CompletionRequest:
    """Raises `HttpError` for requests that cannot be served."""
    fields = _load_object(body)
    _refuse_unknown(fields)
    read = _Reader({name: value for name, value in fields.items() if value is not None})
    request = CompletionRequest(
        prompts=_prompts(fields, vocab_size),
        model=read.string("model"),
        max_tokens=read.integer("max_tokens", 16, least=1),
        temperature=read.number("temperature", 1.0, least=0.0, most=2.0),
        top_p=read.number("top_p", 1.0, least=0.0, most=1.0),
        top_k=read.integer("top_k", 0, least=0),
        n=read.integer("n", 1, least=1),
        seed=read.integer("seed", None, least=-(2**63), most=2**63 - 1),
        stream=read.boolean("stream"),
        include_usage=_include_usage(fields),
        stop=_stops(fields),
        stop_token_ids=_token_ids(fields.get("stop_token_ids") or (), "stop_token_ids", vocab_size),
        ignore_eos=read.boolean("ignore_eos"),
        echo=read.boolean("echo"),
        logprobs=read.integer("logprobs", None, least=0, most=1),
        return_token_ids=read.boolean("return_token_ids"),
    )
    _check_together(request, read, max_choices)
    return request


def _check_together(request: CompletionRequest, read: _Reader, max_choices: int) -> None:
    if request.top_p == 0.0:
        raise _bad("top_p", 0.0, "a number above 0; for the most likely token set temperature to 0")
    if request.num_choices > max_choices:
        raise HttpError(
            f"prompt and n ask for {request.num_choices} answers; one request may ask for "
            f"{max_choices}. Send several requests.",
            param="n" if request.n > 1 else "prompt",
        )
    best_of = read.integer("best_of", None, least=1)
    if best_of not in (None, request.n):
        raise _bad("best_of", best_of, f"the value of n ({request.n}): answers are not ranked")
    if request.logprobs == 1 and request.temperature > 0:
        raise HttpError(
            "logprobs: 1 needs temperature 0, where the answer has the likeliest tokens; with "
            "sampling use logprobs: 0, the log-probabilities of the answer's tokens",
            param="logprobs",
        )


class _Reader:
    """Fields by name and type."""

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields

    def integer(
        self, name: str, default: Any, *, least: int | None = None, most: int | None = None
    ) -> Any:
        return self._within(name, default, "an integer", (int,), least, most)

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        return float(self._within(name, default, "a number", (int, float), least, most))

    def boolean(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise _bad(name, value, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise _bad(name, value, "a string")
        return value

    def _within(self, name: str, default: Any, kind: str, types: Any, least: Any, most: Any) -> Any:
        value = self._fields.get(name, default)
        if value is None:
            return None
        bounds = f" of at least {least}" if most is None else f" from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, types):
            raise _bad(name, value, kind + bounds)
        if value < least or (most is not None and value > most):
            raise _bad(name, value, kind + bounds)
        return value


def _load_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HttpError(f"The body is not valid JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise HttpError(f"The body must be a JSON object, got {_shown(fields)}")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_unknown(fields: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(CompletionRequest)]
    known = [*known, "prompt", "best_of", "user", "stream_options", *NEUTRAL]
    known = [name for name in known if name not in ("prompts", "include_usage")]
    for name, value in fields.items():
        if name in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise HttpError(
                f"{name} is not supported by this server; leave it out (got {_shown(value)})",
                param=name,
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise HttpError(f"Unknown field {_shown(name)}{hint}", param=_clip(name))


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and not isinstance(value, bool)


def _prompts(fields: dict[str, Any], vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.get("prompt")
    needed = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise _bad("prompt", prompt, needed)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple(
            _token_ids(item, f"prompt[{index}]", vocab_size) for index, item in enumerate(prompt)
        )
    if any(isinstance(item, str | list | dict) or item is None for item in prompt):
        raise _bad("prompt", prompt, needed)
    return (_token_ids(prompt, "prompt", vocab_size),)


def _token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _bad(name, value, "a list of token ids")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise _bad(f"{name}[{index}]", item, f"a token id from 0 to {vocab_size - 1}")
    return tuple(value)


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise _bad("stop", stop, f"a string or a list of up to {MAX_STOPS}, none of them empty")
    if len(stops) > MAX_STOPS:
        raise HttpError(f"stop has {len(stops)} strings; {MAX_STOPS} are allowed", param="stop")
    return tuple(stops)


def _include_usage(fields: dict[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise _bad("stream_options", options, 'an object such as {"include_usage": true}')
    usage = options.get("include_usage", False)
    if not isinstance(usage, bool):
        raise _bad("stream_options.include_usage", usage, "true or false")
    return usage


def _bad(name: str, value: Any, needed: str) -> HttpError:
    return HttpError(f"{name} must be {needed}, got {_shown(value)}", param=name)


def _shown(value: Any) -> str:
    try:
        return _clip(json.dumps(value))
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def _clip(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."

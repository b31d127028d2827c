"""From JSON back to frozen dataclasses, by their annotations: what does not fit is a ValueError.

A field is called in JSON what its metadata's `key` says, or by its name. Knows `bool`, `int`,
`float`, `str`, dataclasses, `X | None`, `tuple[X, ...]`, `tuple[X, Y]` and `dict[str, X]`. A float
may be written as a whole number; infinity, which JSON lacks, as null where the field is a plain
float. A field that is missing takes its default if it has one; one that is not known is an error.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import inf, isnan
from typing import Any, Union, get_args, get_origin, get_type_hints


def json_key(field: Field[Any]) -> str:
    """What a field of a dataclass is called in JSON."""
    return field.metadata.get("key", field.name)


def decode(kind: Any, body: Any) -> Any:
    """A value of the kind (a dataclass, mostly) from what `json.loads` gave."""
    return _decoder(kind)(body)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        return _decoder_of_dataclass(kind)
    if kind is float:
        return _number
    if kind in (bool, int, str):
        return lambda body: _exactly(kind, body)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        own = _decoder(inner)
        return lambda body: None if body is None else own(body)
    if origin is tuple and arguments[1:] == (...,):
        own = _decoder(arguments[0])
        return lambda body: tuple(map(own, _exactly(list, body)))
    if origin is tuple:
        return _decoder_of_entries(arguments)
    if origin is dict:
        own = _decoder(arguments[1])
        return lambda body: {str(k): own(v) for k, v in _exactly(dict, body).items()}
    raise AssertionError(f"no way to read a {kind} from JSON")


def _decoder_of_dataclass(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    names = {json_key(f): f.name for f in fields(kind)}
    decoders = {json_key(f): _decoder(hints[f.name]) for f in fields(kind)}
    optional = {
        json_key(f) for f in fields(kind) if (f.default, f.default_factory) != (MISSING, MISSING)
    }

    def of_body(body: Any) -> Any:
        body = _exactly(dict, body)
        if unknown := body.keys() - decoders.keys():
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        if missing := decoders.keys() - optional - body.keys():
            raise ValueError(f"{kind.__name__} without {', '.join(sorted(missing))}")
        found = {}
        for name, value in body.items():
            try:
                found[names[name]] = decoders[name](value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return kind(**found)

    return of_body


def _decoder_of_entries(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    own = [_decoder(kind) for kind in kinds]

    def of_body(body: Any) -> tuple[Any, ...]:
        if len(_exactly(list, body)) != len(own):
            raise ValueError(f"{len(own)} entries wanted, got {len(body)}")
        return tuple(one(entry) for one, entry in zip(own, body, strict=True))

    return of_body


def _number(body: Any) -> float:
    if body is None:
        return inf
    if isinstance(body, bool) or not isinstance(body, (int, float)) or isnan(body):
        raise ValueError(f"{body!r:.60} is not a number")
    return float(body)


def _exactly(kind: type, body: Any) -> Any:
    if type(body) is not kind:
        raise ValueError(f"{body!r:.60} is not of type {kind.__name__}")
    return body

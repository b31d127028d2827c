"""Frozen dataclasses to JSON values and back, by their annotations: the codec of all our files.

    encode: dataclass → what `json.dumps` takes       decode: what `json.loads` gives → dataclass

Knows `bool`, `int`, `float`, `str`, enums (by value), dataclasses, unions, `tuple[X, ...]`,
`tuple[X, Y]` and `dict[str, X]`. The JSON type of a value selects the member of a union. A float
may be written as a whole number; JSON lacks infinity, so infinite floats are null.

A missing field takes its default; a missing field without one, an unknown field or a value of
another type is a ValueError that names the place, such as `stages[1].mesh`. Field metadata:

    key        the field's name in JSON; None keeps it out of files
    stored     a `Stored`: the field is written as another type
    omit_none  write nothing for None
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import inf, isnan
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
T = TypeVar("T")

_PLAIN = (bool, int, float, str)


class Stored(NamedTuple):
    """How a field is written whose own type is not for files. `kind`: the type in files."""

    kind: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


class _Codec(NamedTuple):
    """`json_types`: the types of JSON values that `decode` takes."""

    encode: Callable[[Any], Json]
    decode: Callable[[Json], Any]
    json_types: tuple[type, ...]


@dataclass(frozen=True)
class _Member:
    name: str
    codec: _Codec
    is_required: bool
    omit_none: bool


class _MalformedError(ValueError):
    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.')}: {problem}" if place else problem)
        self.problem, self.place = problem, place


def _inside(step: str, error: ValueError) -> _MalformedError:
    """The error with one more step, `.field` or `[index]`, in front of its place."""
    if isinstance(error, _MalformedError):
        return _MalformedError(error.problem, step + error.place)
    return _MalformedError(str(error), step)


def encode(value: Any) -> dict[str, Json]:
    """A dataclass as a JSON value."""
    return _codec(type(value)).encode(value)  # type: ignore[return-value]


def decode(kind: type[T], body: Json) -> T:
    """A dataclass of this type from a JSON value; ValueError if they do not match."""
    return _codec(kind).decode(body)


@cache
def _codec(kind: Any) -> _Codec:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_codec(kind)
    if kind is float:
        return _Codec(_write_float, _read_float, (float, int, type(None)))
    if kind in (bool, int, str):
        return _Codec(lambda value: value, lambda body: _expect(kind, body), (kind,))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Codec(lambda member: member.value, kind, (str, int))
    if origin in (Union, types.UnionType):
        return _union_codec(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _sequence_codec(arguments[0])
    if origin is tuple:
        return _entries_codec([_codec(argument) for argument in arguments])
    if origin is dict:
        return _dict_codec(_codec(arguments[1]))
    raise AssertionError(f"no codec for {kind}")


def _dataclass_codec(kind: Any) -> _Codec:
    @cache  # found on first use, since dataclasses may contain themselves
    def members() -> Mapping[str, _Member]:
        return dict(_members(kind))

    def write(value: Any) -> Json:
        body = {}
        for key, member in members().items():
            member_value = getattr(value, member.name)
            if member_value is not None or not member.omit_none:
                body[key] = member.codec.encode(member_value)
        return body

    def read(body: Json) -> Any:
        known, given = members(), _expect(dict, body)
        if unknown := given.keys() - known.keys():
            raise _MalformedError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        if missing := [k for k, m in known.items() if m.is_required and k not in given]:
            raise _MalformedError(f"{kind.__name__} without {', '.join(sorted(missing))}")
        values = {}
        for key, value in given.items():
            try:
                values[known[key].name] = known[key].codec.decode(value)
            except ValueError as error:
                raise _inside(f".{key}", error) from error
        return kind(**values)

    return _Codec(write, read, (dict,))


def _members(kind: Any) -> Iterator[tuple[str, _Member]]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        key = field.metadata.get("key", field.name)
        if key is None:
            continue
        stored: Stored | None = field.metadata.get("stored")
        codec = _codec(hints[field.name]) if stored is None else _stored_codec(stored)
        is_required = field.default is MISSING and field.default_factory is MISSING
        yield key, _Member(field.name, codec, is_required, field.metadata.get("omit_none", False))


def _stored_codec(stored: Stored) -> _Codec:
    inner = _codec(stored.kind)
    return _Codec(
        lambda value: inner.encode(stored.write(value)),
        lambda body: stored.read(inner.decode(body)),
        inner.json_types,
    )


def _union_codec(kinds: tuple[Any, ...]) -> _Codec:
    inner = [(kind, _codec(kind)) for kind in kinds if kind is not type(None)]
    is_optional = len(inner) < len(kinds)

    def write(value: Any) -> Json:
        if value is None:
            return None
        matching = (codec for kind, codec in inner if isinstance(value, get_origin(kind) or kind))
        return next(matching, inner[0][1]).encode(value)

    def read(body: Json) -> Any:
        if body is None and is_optional:
            return None
        matching = (codec for _, codec in inner if type(body) in codec.json_types)
        return next(matching, inner[0][1]).decode(body)

    return _Codec(write, read, tuple({t for _, codec in inner for t in codec.json_types}))


def _sequence_codec(kind: Any) -> _Codec:
    inner, may_share = _codec(kind), is_dataclass(kind)

    def read(body: Json) -> tuple[Any, ...]:
        entries, values = _expect(list, body), []
        if kind in _PLAIN and set(map(type, entries)) <= {kind} and not _has_nan(kind, entries):
            return tuple(entries)
        known: dict[int, Any] = {}  # id -> value: entries that are one object become one value
        try:
            for entry in entries:
                value = known.get(id(entry)) if may_share else None
                if value is None:
                    value = known[id(entry)] = inner.decode(entry)
                values.append(value)
        except ValueError as error:
            raise _inside(f"[{len(values)}]", error) from error
        return tuple(values)

    return _Codec(lambda values: [inner.encode(value) for value in values], read, (list,))


def _has_nan(kind: Any, entries: list[Any]) -> bool:
    return kind is float and any(map(isnan, entries))


def _entries_codec(inner: list[_Codec]) -> _Codec:
    def read(body: Json) -> tuple[Any, ...]:
        entries = _expect(list, body)
        if len(entries) != len(inner):
            raise _MalformedError(f"{len(inner)} entries wanted, got {len(entries)}")
        return tuple(codec.decode(entry) for codec, entry in zip(inner, entries, strict=True))

    def write(values: tuple[Any, ...]) -> Json:
        return [codec.encode(value) for codec, value in zip(inner, values, strict=True)]

    return _Codec(write, read, (list,))


def _dict_codec(inner: _Codec) -> _Codec:
    def read(body: Json) -> dict[str, Any]:
        return {str(key): inner.decode(value) for key, value in _expect(dict, body).items()}

    def write(values: dict[Any, Any]) -> Json:
        return {str(key): inner.encode(value) for key, value in values.items()}

    return _Codec(write, read, (dict,))


def _write_float(value: float) -> Json:
    return None if value == inf else value


def _read_float(body: Json) -> float:
    if body is None:
        return inf
    if isinstance(body, int) and not isinstance(body, bool) and abs(body) <= sys.float_info.max:
        return float(body)
    if not isinstance(body, float) or isnan(body):
        raise _MalformedError(f"{body!r:.60} is not a number")
    return body


def _expect(kind: type[T], body: Json) -> T:
    if type(body) is not kind:
        raise _MalformedError(f"{body!r:.60} is not of type {kind.__name__}")
    return body  # type: ignore[return-value]

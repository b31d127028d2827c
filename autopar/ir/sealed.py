"""The envelope of plan and checkpoint files: frozen data ↔ text with format, version, checksum.

{"format": NAME, "version": N, KEY: the data, "sha256": of the data}
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from autopar.errors import AutoparError
from autopar.ir.codec import Json, decode, encode

T = TypeVar("T")


@dataclass(frozen=True)
class SealedFormat:
    """key:    of the data in the document, and its name in errors.
    error:  the class of what `read` raises; its messages begin with `where`.
    remedy: what the user can do about an unusable file.
    is_quick: for files that only autopar reads. The checksum is that of the data's text as it
            stands in the file, so a reader need not write the data again to see whether it is
            right, and entries that repeat in a list (equal layers have equal ones) stand there
            once.
    """

    name: str
    version: int
    key: str
    error: type[AutoparError]
    remedy: str
    is_quick: bool = False

    def text(self, value: Any) -> str:
        """A dataclass as the text of a file."""
        body = encode(value)
        if not self.is_quick:
            document = {"format": self.name, "version": self.version, self.key: body}
            return _compact({**document, "sha256": digest(body)})
        text = _compact(_packed(body))
        return f"{self._head}{text}{_TAIL}{_sha256(text)}{_END}"

    @property
    def _head(self) -> str:
        head = _compact({"format": self.name, "version": self.version})
        return f"{head[:-1]},{_compact(self.key)}:"

    def read(self, kind: type[T], text: str | bytes, where: str) -> T:
        """The data in the text of a file, if format, checksum and every field are right."""
        try:
            document = json.loads(text, object_hook=_unpacked if self.is_quick else None)
        except (ValueError, RecursionError) as error:
            raise self.error(f"{where}: is damaged: not JSON ({error}). {self.remedy}") from error
        if problem := self._problem(document, text):
            raise self.error(f"{where}: {problem}")
        try:
            return decode(kind, document[self.key])
        except (ValueError, RecursionError) as error:
            raise self.malformed(where, error) from error

    def _problem(self, document: Any, text: str | bytes) -> str:
        """What is wrong with format, version or checksum; empty if nothing."""
        if not isinstance(document, dict) or document.get("format") != self.name:
            return f"not an autopar {self.key}. {self.remedy}"
        version = document.get("version")
        if version != self.version:
            is_newer = isinstance(version, int) and version > self.version
            remedy = "Update autopar to the release that wrote it." if is_newer else self.remedy
            return f"{self.key} format {version!r}, this autopar reads {self.version}. {remedy}"
        if self.key not in document or not self._is_whole(document, text):
            return f"is damaged or altered: the checksum does not match. {self.remedy}"
        return ""

    def _is_whole(self, document: dict[str, Any], text: str | bytes) -> bool:
        """Whether the checksum is right."""
        if not self.is_quick:
            return document.get("sha256") == digest(document[self.key])
        written = text.decode() if isinstance(text, bytes) else text
        size = len(written) - len(_TAIL) - 64 - len(_END)
        body, rest = written[len(self._head) : size], written[size:]
        return written.startswith(self._head) and rest == f"{_TAIL}{_sha256(body)}{_END}"

    def malformed(self, where: str, problem: Exception | str) -> AutoparError:
        """The error for data that cannot be; `problem` names the field."""
        return self.error(f"{where}: malformed {self.key} ({problem}). {self.remedy}")


_TAIL, _END = ',"sha256":"', '"}'


def digest(body: Json) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return _sha256(json.dumps(body, sort_keys=True, separators=(",", ":")))


# -- repeated entries


_DISTINCT, _ORDER = "$distinct", "$order"
_MANY = 64  # entries of a list that is worth packing


def _packed(body: Any) -> Any:
    """Long lists of objects as their distinct entries and the order of these."""
    if isinstance(body, dict):
        return {key: _packed(value) for key, value in body.items()}
    if not isinstance(body, list):
        return body
    if len(body) < _MANY or not isinstance(body[0], dict):
        return [_packed(value) for value in body] if body and _is_nested(body[0]) else body
    numbers: dict[str, int] = {}
    order = [numbers.setdefault(_compact(value), len(numbers)) for value in body]
    first = {number: value for number, value in zip(reversed(order), reversed(body), strict=True)}
    distinct = [_packed(first[number]) for number in range(len(numbers))]
    return {_DISTINCT: distinct, _ORDER: order}


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _unpacked(body: dict[str, Any]) -> Any:
    """The list that was packed; other objects as they are. Equal entries are one object."""
    if _ORDER not in body:
        return body
    distinct, order = body.get(_DISTINCT), body[_ORDER]
    if not isinstance(distinct, list) or not isinstance(order, list):
        raise ValueError("repeated entries that are no lists")
    known = range(len(distinct))
    if not all(type(number) is int and number in known for number in order):
        raise ValueError("repeated entries that are not there")
    return [distinct[number] for number in order]


# -- text


def _compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

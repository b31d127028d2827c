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
    """

    name: str
    version: int
    key: str
    error: type[AutoparError]
    remedy: str

    def text(self, value: Any) -> str:
        """A dataclass as the text of a file."""
        body = encode(value)
        document = {"format": self.name, "version": self.version, self.key: body}
        return json.dumps({**document, "sha256": digest(body)}, separators=(",", ":"))

    def read(self, kind: type[T], text: str | bytes, where: str) -> T:
        """The data in the text of a file, if format, checksum and every field are right."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"{where}: is damaged: not JSON ({error}). {self.remedy}") from error
        if problem := self._problem(document):
            raise self.error(f"{where}: {problem}")
        try:
            return decode(kind, document[self.key])
        except (ValueError, RecursionError) as error:
            raise self.malformed(where, error) from error

    def _problem(self, document: Any) -> str:
        """What is wrong with format, version or checksum; empty if nothing."""
        if not isinstance(document, dict) or document.get("format") != self.name:
            return f"not an autopar {self.key}. {self.remedy}"
        version = document.get("version")
        if version != self.version:
            is_newer = isinstance(version, int) and version > self.version
            remedy = "Update autopar to the release that wrote it." if is_newer else self.remedy
            return f"{self.key} format {version!r}, this autopar reads {self.version}. {remedy}"
        if self.key not in document or document.get("sha256") != digest(document[self.key]):
            return f"is damaged or altered: the checksum does not match. {self.remedy}"
        return ""

    def malformed(self, where: str, problem: Exception | str) -> AutoparError:
        """The error for data that cannot be; `problem` names the field."""
        return self.error(f"{where}: malformed {self.key} ({problem}). {self.remedy}")


def digest(body: Json) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

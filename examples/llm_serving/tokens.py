"""Text → token ids and back, by a folder's `tokenizer.json`; ids one by one → pieces of text.

`TextStream` turns the tokens of an answer into text as they come. It releases a piece only when
later tokens cannot change it: characters whose bytes are spread over several tokens wait until they
are complete, and text that may begin a stop string waits until that is decided.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError

REPLACEMENT = "\ufffd"  # stands for bytes that are not (yet) a complete character
MAX_HELD = 3  # bytes of the longest incomplete UTF-8 character
CONTEXT_TOKENS = 4  # enough for decoders that drop a space at the start of a text
WINDOW_TOKENS = 16


class TokenizerError(AutoparError, ValueError):
    """A tokenizer file that cannot be read, or text that it cannot encode."""


class Tokenizer:
    """The tokenizer of a model folder; it adds special tokens as its file says and never shows
    them."""

    def __init__(self, backend: Any):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> Tokenizer | None:
        """Loads `folder/tokenizer.json`; None if there is no such file."""
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(
                f"Reading {path} needs the package `tokenizers`. Install it with "
                "`pip install 'autopar[serving]'`, or move the file away to serve token ids only."
            ) from error
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises plain Exception
            raise TokenizerError(f"{path} is not a readable tokenizer: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._backend.encode(text).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError(
                "the text has half of a surrogate pair, which is not a character; send whole ones"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


class TextStream:
    """The text of one answer, piece by piece.

    Args:
      prompt: the text before the answer; its end decides whether a leading space is shown.
      stop: stop strings; the text ends before the first one that appears.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(_settled(tokenizer.decode(self._window)))
        self._held = ""  # final, but perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The newly final text; "" after a stop string."""
        if self.stopped:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = _settled(text)
        piece = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        whole = len(settled) == len(text)
        if len(self._window) > (WINDOW_TOKENS if whole else 4 * WINDOW_TOKENS):
            self._window = self._window[-CONTEXT_TOKENS:]
            self._shown = len(_settled(self._tokenizer.decode(self._window)))
        return self._release(piece)

    def flush(self) -> str:
        """The text held back, when no more tokens come."""
        if self.stopped:
            return ""
        piece = self._held + self._tokenizer.decode(self._window)[self._shown :]
        self._held = ""
        return self._cut(piece)

    def _release(self, piece: str) -> str:
        text = self._cut(self._held + piece)
        self._held = ""
        if self._stop and not self.stopped:
            kept = len(text) - _length_of_beginning(text, self._stop)
            text, self._held = text[:kept], text[kept:]
        return text

    def _cut(self, text: str) -> str:
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if not found:
            return text
        self.stopped = True
        return text[: min(found)]


def _settled(text: str) -> str:
    """`text` without trailing replacement characters that may still become one character."""
    held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD)
    return text[: len(text) - held]


def _length_of_beginning(text: str, stops: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that is a prefix of one of `stops`."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0

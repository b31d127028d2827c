"""Text → token ids and back: a folder's `tokenizer.json`; ids one by one → stage programs of text.

`TextStream` turns the tokens of an answer into text as they come. A stage program is given out only
when later tokens cannot change it: characters whose bytes are spread over several tokens wait until
they are whole, and what may be the beginning of a stop string waits until it is not.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)
MAX_HELD = 3  # a character in UTF-8 that is not whole has at most so many bytes
CONTEXT_TOKENS = 4  # enough for decoders that drop a space at the start of a text
WINDOW_TOKENS = 16


class TokenizerError(AutoparError, ValueError):
    """A tokenizer file that cannot be read, or text that it cannot take."""


class Tokenizer:
    """The tokenizer of a model folder; special tokens are added as its file says, never shown."""

    def __init__(self, backend: Any):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> Tokenizer | None:
        """From `folder/tokenizer.json`; None where there is no such file."""
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(
                f"{path} needs the package `tokenizers` to be read. Install it with "
                "`pip install 'autopar[serving]'`, or move the file away to serve token ids only."
            ) from error
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises plain Exception
            raise TokenizerError(f"{path} is no tokenizer that can be read: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._backend.encode(text).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError(
                "the text has half of a surrogate pair, which is no character; send whole ones"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


class TextStream:
    """The text of one answer, piece by piece.

    Args:
      prompt: what the answer follows; its end decides whether a leading space is shown.
      stop: strings of which the first to appear ends the text before itself.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(_settled(tokenizer.decode(self._window)))
        self._held = ""  # settled, but perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; "" once a stop string was met."""
        if self.stopped:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = _settled(text)
        stage_program = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        whole = len(settled) == len(text)
        if len(self._window) > (WINDOW_TOKENS if whole else 4 * WINDOW_TOKENS):
            self._window = self._window[-CONTEXT_TOKENS:]
            self._shown = len(_settled(self._tokenizer.decode(self._window)))
        return self._release(stage_program)

    def flush(self) -> str:
        """All that was held back, for no more tokens come."""
        if self.stopped:
            return ""
        stage_program = self._held + self._tokenizer.decode(self._window)[self._shown :]
        self._held = ""
        return self._cut(stage_program)

    def _release(self, stage_program: str) -> str:
        text = self._cut(self._held + stage_program)
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
    """`text` without the replacement characters at its end that may yet become one character."""
    held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD)
    return text[: len(text) - held]


def _length_of_beginning(text: str, stops: Sequence[str]) -> int:
    """The longest end of `text` that is a beginning of one of `stops`."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0

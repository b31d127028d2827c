"""The page of mistakes: docs/mistakes.md, from the catalogue and the texts that autopar gives."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from tests.mistakes.catalogue import MISTAKES, PRELUDE, Mistake
from tests.mistakes.run import text_of

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
WIDTH = 100
_HEAD = """\
# {count} mistakes, and what autopar says

What users get wrong, and what they then read. Search this page for the text that you got.
`python -m tests.mistakes` makes every mistake and writes this page; tests keep the texts as they
are here.

Python examples begin with:

<!-- not run: every mistake has a test -->
```python
{prelude}```
"""
_ENTRY = re.compile(
    r"^### (.*?)\n\n(?:<!-- .*? -->\n)?```\w+\n(.*?)\n```\n\n```text\n(.*?)\n```", re.S | re.M
)


def page_text(word: str | None = None) -> str:
    """The whole page, or the entries with a word in their titles."""
    parts = [] if word is not None else [_HEAD.format(count=len(MISTAKES), prelude=PRELUDE)]
    for section, mistakes in groupby(MISTAKES, key=lambda mistake: mistake.section):
        entries = [entry(m, text_of(m)) for m in mistakes if word is None or word in m.title]
        if entries:
            parts += [f"## {section}\n", *entries]
    return "\n".join(parts)


def entry(mistake: Mistake, text: str) -> str:
    """One mistake: its code and its text."""
    language = "bash" if mistake.code.startswith("autopar ") else "python"
    lines = [
        part for line in text.split("\n") for part in wrap(line, WIDTH, break_on_hyphens=False)
    ]
    return (
        f"### {mistake.title}\n\n<!-- not run: it has a test -->\n"
        f"```{language}\n{mistake.code}\n```\n\n"
        "```text\n" + "\n".join(lines) + "\n```\n"
    )


def entries_of(page: str) -> dict[tuple[str, str], str]:
    """(title, code) -> text, as a page has them."""
    return {(title, code): text for title, code, text in _ENTRY.findall(page)}

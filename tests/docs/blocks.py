"""Markdown pages → their code blocks, with notes on how to run them.

A comment right before a fence is a note on the block:

    <!-- setup           hidden lines of Python that run first: what a reader would already have
    ... -->
    <!-- file: NAME -->      the block is written to a file of that name, for later blocks
    <!-- raises: NAME -->    the block must raise an error of that class
    <!-- slow: WHY -->       only the slow tests run it
    <!-- not run: WHY -->    never run; the reason is required

All other python and bash blocks of a page run in order, in one folder with `examples` and
`benchmarks` in it; the python blocks share one namespace.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Languages of fences: those that run, and those that are only shown.
RUN = frozenset({"python", "bash"})
SHOWN = frozenset({"text", "toml", "yaml", "json", "html", "diff"})
NOTES = frozenset({"setup", "file", "raises", "slow", "not run"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[^`]*)$")
_NOTE = re.compile(r"^(setup|file|raises|slow|not run)\b:?(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block.

    line:  of its fence in the page, from 1.
    notes: the comments before it, by their first word.
    """

    page: Path
    line: int
    language: str
    code: str
    notes: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All pages whose blocks run."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found += sorted((ROOT / "docs").rglob("*.md"))
    found += sorted((ROOT / "examples").rglob("*.md"))
    return found


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        fence = _FENCE.match(line)
        if fence:
            body, after = _until_closed(page, lines, index, fence)
            language = fence["language"].split(" ")[0].strip()
            blocks.append(Block(page, index + 1, language, "\n".join(body) + "\n", notes))
            notes, index = {}, after
        elif line.startswith("<!--"):
            text, index = _comment(page, lines, index)
            note = _NOTE.match(text)
            if note:
                notes = {**notes, note[1]: note[2].strip("\n").rstrip()}
        else:
            if line.strip():
                notes = {}
            index += 1
    return blocks


def _until_closed(
    page: Path, lines: list[str], start: int, fence: re.Match[str]
) -> tuple[list[str], int]:
    indent = len(fence["indent"])
    for end in range(start + 1, len(lines)):
        if lines[end].strip() == fence["ticks"]:
            return [line[indent:] for line in lines[start + 1 : end]], end + 1
    raise AssertionError(f"{page}:{start + 1}: a fence that is never closed")


def _comment(page: Path, lines: list[str], start: int) -> tuple[str, int]:
    for end in range(start, len(lines)):
        if "-->" in lines[end]:
            text = "\n".join(lines[start : end + 1])
            return text.removeprefix("<!--").rsplit("-->", 1)[0].strip(" "), end + 1
    raise AssertionError(f"{page}:{start + 1}: a comment that is never closed")

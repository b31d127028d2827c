"""Lines of text for a terminal, at most `WIDTH` columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

WIDTH = 100


def paragraph(text: str, indent: str = "  ") -> list[str]:
    """A sentence in lines, all but the first further in."""
    return wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def elided(text: str, width: int) -> str:
    """The end of a path tells more than its beginning."""
    if len(text) <= width:
        return text
    front = max(1, width // 4)
    return f"{text[:front]}…{text[front + 1 - width :]}"


def counted(count: int, thing: str) -> str:
    many = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{many if count != 1 else ''}"


def mesh_text(shape: Sequence[int]) -> str:
    """`a 4×2 mesh`, `an 8×4 mesh`, `a mesh of 8`."""
    if len(shape) == 1:
        return f"a mesh of {shape[0]}"
    article = "an" if str(shape[0]).startswith("8") or shape[0] in (11, 18) else "a"
    return f"{article} {'×'.join(map(str, shape))} mesh"


def number_range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def number_runs(numbers: Sequence[int]) -> str:
    """0–3, 8: runs of numbers by their ends."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(number_range(members[0], members[-1] + 1))
    return ", ".join(runs)

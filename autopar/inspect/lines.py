"""Lines of text for a terminal: at most `WIDTH` columns, tables whose figures line up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

WIDTH = 100


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Columns two spaces apart; those whose numbers are in `right` end at one place. The last
    column goes on in further lines where it is too long, at its commas and spaces."""
    every = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    left = 2 + sum(width + 2 for width in widths[:-1])
    room = max(WIDTH - left, 20)

    def lines_of(row: Sequence[str]) -> list[str]:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        last = row[-1]
        if len(row) - 1 in right:
            last = last.rjust(widths[-1])
        first, *rest = stage_programs(last, room) or [""]
        start = "  " + "".join(cell + "  " for cell in cells)
        return [(start + first).rstrip(), *(" " * left + part for part in rest)]

    rules = ["-" * width for width in (*widths[:-1], min(widths[-1], room))]
    return [line for row in (header, rules, *rows) for line in lines_of(row)]


def stage_programs(text: str, width: int) -> list[str]:
    """A cell in lines; blanks in front of it stay, and long words are cut."""
    if len(text) <= width:
        return [text]
    return wrap(text, width, break_on_hyphens=False)


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


def number_range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def number_runs(numbers: Sequence[int]) -> str:
    """0–3, 8: runs of numbers by their ends."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(number_range(members[0], members[-1] + 1))
    return ", ".join(runs)

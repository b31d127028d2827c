"""Numbers, names and tables as text, formatted the same wherever a user reads them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from textwrap import wrap

_NUMBER = re.compile(r"\d+")
_NUMBER_KEPT = re.compile(r"(\d+)")
_NARROWEST = 20  # of a wrapped column


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs"


def name_skeleton(name: str) -> str:
    """A name with `*` for its numbers; names of equal layers have the same skeleton."""
    return _NUMBER.sub("*", name)


def name_pattern(names: Sequence[str]) -> str:
    """Names of one skeleton as one name, with `*` for the numbers that differ."""
    columns = zip(*(_NUMBER_KEPT.split(name) for name in names), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def layer_names(names: Sequence[str]) -> str:
    """Names of layers; names that differ only in numbers become one name with a count."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name_skeleton(name)].append(name)
    return ", ".join(
        f"{name_pattern(group)} ({len(group)} layers)" if len(group) > 1 else group[0]
        for group in groups.values()
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    width: int | None = None,
) -> list[str]:
    """Lines of a table, columns two spaces apart. The columns numbered in `right` are aligned to
    the right. With a `width`, the last column is wrapped to keep lines within it."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    indent = 2 + sum(column_width + 2 for column_width in widths[:-1])
    room = widths[-1] if width is None else max(width - indent, _NARROWEST)

    def lines_of(row: Sequence[str]) -> list[str]:
        cells = [
            cell.rjust(column_width) if number in right else cell.ljust(column_width)
            for number, (cell, column_width) in enumerate(zip(row, widths, strict=True))
        ]
        first, *rest = wrapped(cells[-1].rstrip(), room) or [""]
        start = "  " + "".join(cell + "  " for cell in cells[:-1])
        return [(start + first).rstrip(), *(" " * indent + line for line in rest)]

    rules = ["-" * column_width for column_width in (*widths[:-1], min(widths[-1], room))]
    return [line for row in (header, rules, *rows) for line in lines_of(row)]


def wrapped(text: str, width: int) -> list[str]:
    """A cell in lines. A short one keeps its leading blanks; long words are broken."""
    return [text] if len(text) <= width else wrap(text, width, break_on_hyphens=False)

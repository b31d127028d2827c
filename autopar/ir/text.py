"""Figures, names and tables as text, alike wherever a user reads them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")
_NUMBER_KEPT = re.compile(r"(\d+)")


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
    """What is left of a name without its numbers; names of equal layers have one skeleton."""
    return _NUMBER.sub("*", name)


def name_pattern(names: Sequence[str]) -> str:
    """Names of one skeleton as one, with `*` for the numbers in which they differ."""
    columns = zip(*(_NUMBER_KEPT.split(name) for name in names), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def layer_names(names: Sequence[str]) -> str:
    """Names of layers, those that differ in numbers alone as one with its count."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name_skeleton(name)].append(name)
    return ", ".join(
        f"{name_pattern(group)} ({len(group)} layers)" if len(group) > 1 else group[0]
        for group in groups.values()
    )


def rows_of(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return ("  " + "  ".join(cells)).rstrip()

    return [line(header), line(tuple("-" * width for width in widths)), *map(line, rows)]

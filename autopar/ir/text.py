"""Numbers, names and tables as text, formatted the same wherever a user reads them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
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


_UNITS = ((1.0, "s", 2), (1e-3, "ms", 2), (1e-6, "µs", 1))


def seconds_like(largest_s: float) -> Callable[[float], str]:
    """Formats seconds of one table in one unit, that of the largest."""
    size, unit, digits = next((u for u in _UNITS if largest_s >= u[0]), _UNITS[-1])
    least = 10.0**-digits

    def text(seconds: float) -> str:
        if 0 < seconds / size < least / 2:
            return f"< {least:g} {unit}"
        return f"{seconds / size:.{digits}f} {unit}"

    return text


def format_rate(flops_per_s: float) -> str:
    """`86 GFLOP/s`, `1.2 PFLOP/s`: three digits and a prefix."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops_per_s >= size or prefix == "M":
            number = flops_per_s / size
            digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
            return f"{digits} {prefix}FLOP/s"
    raise AssertionError


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

"""Tables: alignment, rules, and the wrapped last column."""

from __future__ import annotations

from autopar.ir.text import table


def test_columns_are_as_wide_as_their_content() -> None:
    assert table(("a", "number", "words"), [("x", "1", "y" * 30), ("longer", "20", "")]) == [
        "  a       number  words",
        "  ------  ------  ------------------------------",
        "  x       1       " + "y" * 30,
        "  longer  20",
    ]


def test_a_header_alone() -> None:
    assert table(("a", "bc"), []) == ["  a  bc", "  -  --"]


def test_right_aligned_columns() -> None:
    lines = table(("a", "s", "m"), [("x", "1", "2"), ("y", "100", "20")], right=(1, 2))
    assert lines == ["  a    s   m", "  -  ---  --", "  x    1   2", "  y  100  20"]


def test_the_last_column_is_wrapped_to_the_width() -> None:
    lines = table(("a", "words"), [("x", "word " * 10), ("y", "short")], width=30)
    assert lines[1] == "  -  " + "-" * 25
    assert lines[2:5] == [
        "  x  word word word word word",
        "     word word word word word",
        "  y  short",
    ]

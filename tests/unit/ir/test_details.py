"""Operators as columns and back."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from autopar.ir.codec import decode
from autopar.ir.details import OpRow, OpTable, op_table

PLACE = ("Block_0", "forward", "f32[8,4]", "P('x')")


def rows() -> list[OpRow]:
    return [
        OpRow("dot_general", *PLACE, "x: data", "m.py:3", 2.0, 9.0, 0.1, 0.2, 3.0),
        OpRow("add", *PLACE, "", "m.py:4", 1.0, 0.0, 0.3, 0.0, 0.0),
    ]


def test_rows_come_back() -> None:
    assert list(op_table(rows()).rows()) == rows()
    assert list(op_table([]).rows()) == []


def test_texts_are_kept_once() -> None:
    table = op_table(rows())
    assert len(table) == 2 and len(set(table.strings)) == len(table.strings)


def test_a_text_that_is_not_there() -> None:
    body = {k: list(v) for k, v in asdict(op_table(rows())).items()}
    assert decode(OpTable, body) == op_table(rows())
    with pytest.raises(ValueError, match="a text that is not there"):
        decode(OpTable, {**body, "name": [99, 0]})
    with pytest.raises(ValueError, match="columns of different length"):
        decode(OpTable, {**body, "flops": [1.0]})

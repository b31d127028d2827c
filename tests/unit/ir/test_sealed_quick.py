"""Files that only autopar reads: repeated entries stand there once, and every byte is checked."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from autopar.errors import PlanError
from autopar.ir.sealed import SealedFormat

QUICK = SealedFormat("quick", 1, "body", PlanError, "Remedy.", is_quick=True)


@dataclass(frozen=True)
class Item:
    number: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Body:
    items: tuple[Item, ...]
    seconds: dict[str, float]
    rows: tuple[tuple[Item, ...], ...] = ()


def body(count: int) -> Body:
    items = tuple(Item(i % 3, (0.5, float(i % 3))) for i in range(count))
    return Body(items, {"z": 1.0, "a": 2.0}, (items, items[:2]))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 500])
def test_what_is_written_is_read(count):
    text = QUICK.text(body(count))
    read = QUICK.read(Body, text, "here")
    assert read == body(count)
    assert list(read.seconds) == ["z", "a"]
    json.loads(text)


def test_repeated_entries_are_written_once_and_shared():
    text = QUICK.text(body(3000))
    assert text.count('"number"') == 8  # 3 of items, 3 of the first row, 2 of the second
    items = QUICK.read(Body, text, "here").items
    assert len({id(item) for item in items}) == 3


def test_every_changed_byte_is_found():
    text = QUICK.text(body(70))
    for at in range(0, len(text), 7):
        changed = text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
        with pytest.raises(PlanError, match="here: "):
            QUICK.read(Body, changed, "here")
    with pytest.raises(PlanError, match="checksum"):
        QUICK.read(Body, text.replace(",", ", ", 1), "here")


@pytest.mark.parametrize("order", ["[0, 3]", "[-1]", "[true]", "1", '["a"]'])
def test_repeated_entries_that_are_not_there(order):
    packed = f'{{"$distinct":[{{"number":1}}],"$order":{order}}}'
    with pytest.raises(PlanError, match="repeated entries"):
        QUICK.read(Body, f'{{"format":"quick","version":1,"body":{{"items":{packed}}}}}', "here")

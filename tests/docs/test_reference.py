"""The reference has every public name, and docstrings describe arguments, results and errors."""

from __future__ import annotations

import inspect
import re

import pytest

import autopar
from tests.docs.blocks import ROOT

NAMES = sorted(name for name in autopar.__all__ if callable(getattr(autopar, name)))
# Only autopar creates these: users read their attributes and never call their constructors.
NOT_MADE_BY_USERS = {"CheckpointSave", "DataLoader", "DistributedArray", "Trace"}
# Functions that cannot fail, whatever a user passes.
WITHOUT_ERRORS = {"get_last_dp_result", "mark_layer_boundary", "shutdown"}


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    found = [
        n for page in pages for n in re.findall(r"^::: autopar\.(\w+)$", page.read_text(), re.M)
    ]
    assert sorted(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_name_every_argument_and_error(name: str) -> None:
    thing = getattr(autopar, name)
    text = thing.__doc__ or ""
    assert len(text.split()) >= 5 and not text.startswith(f"{name}("), "no docstring of its own"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    if name not in NOT_MADE_BY_USERS:
        given = set(inspect.signature(thing).parameters) - {"self", "args", "kwargs"}
        assert not {a for a in given if not re.search(rf"\b{a}\b", text)}
    if inspect.isfunction(thing) and name not in WITHOUT_ERRORS:
        assert re.search(r"`\w+Error`", text), "which errors does it raise?"


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isclass(getattr(autopar, n))])
def test_public_methods_have_docstrings(name: str) -> None:
    thing = getattr(autopar, name)
    bare = [
        member
        for member, value in vars(thing).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
        and not value.__doc__
    ]
    assert not bare

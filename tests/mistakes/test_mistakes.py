"""Every mistake of the catalogue gets the text that docs/mistakes.md has for it."""

from __future__ import annotations

import pytest

from tests.mistakes.catalogue import MISTAKES, Mistake
from tests.mistakes.page import PAGE, entries_of, entry
from tests.mistakes.run import text_of

WRITTEN = entries_of(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_the_catalogue_and_nothing_else():
    assert len(MISTAKES) >= 100
    keys = [(mistake.title, mistake.code) for mistake in MISTAKES]
    assert len(set(keys)) == len(keys)
    assert list(WRITTEN) == keys, "run `python -m tests.mistakes`"


@pytest.mark.ci
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.section}: {m.title}")
def test_a_mistake_is_told(mistake: Mistake):
    text = text_of(mistake)
    ((_, said),) = entries_of(entry(mistake, text)).items()
    assert said == WRITTEN[mistake.title, mistake.code], "run `python -m tests.mistakes`"


def test_a_text_names_what_was_given():
    mistake = next(m for m in MISTAKES if m.title == "A name with a typing error")
    text = text_of(mistake)
    assert text.startswith("ArgumentError: ") and "'piepline'" in text and "'pipeline'" in text


def test_silence_is_found():
    with pytest.raises(AssertionError, match="nothing was said"):
        text_of(Mistake("", "no mistake", "autopar.DataParallel()"))

"""The faults that docs/training.md says were measured are in benchmarks/results."""

import pytest

from benchmarks import kills_page

PAGE = kills_page.PAGE.read_text(encoding="utf-8")
FILES = kills_page.files_of(PAGE)
RESULTS = kills_page.read_results(kills_page.RESULTS / name for name in FILES)


def test_the_page_has_the_figures_of_its_files():
    assert FILES
    assert kills_page.with_figures(PAGE, RESULTS) == PAGE, "run python -m benchmarks.kills_page"


@pytest.mark.parametrize("name", FILES)
def test_every_fault_behaved_as_stated(name: str):
    document = RESULTS[name]
    for row in document["rows"]:
        assert row["exact"] and not row["wrong"], row
        assert row["error_s"] <= document["stated_s"][row["what"]], row

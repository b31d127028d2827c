"""The page about scanned and written-out layers is the one that its script made."""

import json

from benchmarks import scan_forms


def test_the_page_is_that_of_the_rows() -> None:
    rows = json.loads(scan_forms.RESULTS.read_text())["rows"]
    assert {row["model"] for row in rows} <= {*scan_forms.AUTOMATIC, *scan_forms.PIPELINES}
    assert scan_forms.PAGE.read_text() == scan_forms.page(rows)

"""The page about scanned Llamas is the one that its script made."""

import json

from benchmarks import scanned_llama


def test_the_page_is_that_of_the_rows() -> None:
    rows = json.loads(scanned_llama.RESULTS.read_text())["rows"]
    assert set(rows) <= set(scanned_llama.names())
    assert scanned_llama.PAGE.read_text() == scanned_llama.page(rows)


def test_stages_with_the_embedding_or_the_head_have_fewer_layers() -> None:
    counts = [len(layers) for layers in scanned_llama.layers_of_stages(126, 16)]
    assert counts == [7, *[8] * 14, 7]
    assert [len(layers) for layers in scanned_llama.layers_of_stages(80, 4)] == [20] * 4

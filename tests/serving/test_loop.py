"""The decode loop by hand, which serving is measured against, gives the engine's tokens."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.serving import Decode, measure_decode
from benchmarks.serving_cases import TINY_MODELS, Sizes
from examples.llm_serving.config import config_from_dict

SIZES = Sizes(prompt=6, new_tokens=32, length=40, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_loop_and_engine_give_the_same_tokens(name):
    decode = Decode(config_from_dict(TINY_MODELS[name]), SIZES, 2, (1, 8))
    try:
        row = measure_decode(decode)
        _, by_call = decode.loop_round("call", SIZES.new_tokens)
        _, by_scan = decode.loop_round("scan", SIZES.new_tokens)
        _, by_engine = decode.engine_round(8, SIZES.new_tokens)
    finally:
        decode.close()
    assert row["same_tokens"] == 1.0
    assert by_call == by_scan == by_engine


@pytest.mark.slow
def test_rows_are_written_and_not_measured_again(tmp_path):
    pytest.importorskip("aiohttp")
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.serving", "--tiny", "--only", "gpt2-tiny"]
    command += ["--json", str(path), "--steps-per-call", "1", "--batches", "1"]
    for expected in (1, 1):
        done = subprocess.run(
            command, env=os.environ, capture_output=True, text=True, timeout=400, check=True
        )
        rows = json.loads(path.read_text())["rows"]
        assert len(rows) == expected
    assert rows[0]["kind"] == "decode" and rows[0]["same_tokens"] == 1.0
    assert "ratio" not in done.stdout, "nothing was left to measure"

"""Served models give the logits and the greedy answers that were recorded of transformers.

`test_transformers.py` compares with transformers itself, and the record too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from examples.llm_serving import decoder
from examples.llm_serving.config import read_config
from examples.llm_serving.model import load
from examples.llm_serving.weights import load_params
from tests.serving.checkpoints import CONFIGS
from tests.serving.recorded import NUM_NEW, PROMPT, ROWS, read_record, write_checkpoint

FIRST = 4  # tokens of the prompt that prefill sees; the others are decoded
# One of each architecture; on two devices, and as a pipeline of two stages.
METHODS: dict[str, Any] = {
    "gpt2": autopar.ShardParallel((2,)),
    "opt": autopar.ShardParallel((2,)),
    "llama3": autopar.PipeshardParallel(1, stages=autopar.UniformStages(2), schedule="inference"),
}


@pytest.fixture
def record(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """(the folder of a model, what was recorded of it)"""
    found = read_record(request.param)
    weights = write_checkpoint(request.param, tmp_path, int(found["seed"]))
    np.testing.assert_allclose(
        weights, found["weights"], rtol=1e-6, err_msg="Other weights: run tests.serving.recorded."
    )
    return tmp_path, found


def check_logits(folder: Path, want: np.ndarray) -> None:
    """Of prefill and of every decode step, in two slots, one of them a token ahead of the other;
    what pads a prompt is not seen."""
    config = read_config(folder)
    types = decoder.param_types(config, np.float32)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_params(folder, config, np.float32, jax.tree.map(lambda _: place, types))
    cache = decoder.make_cache(config, 3, 16, np.float32)
    prefill = jax.jit(lambda *args: decoder.prefill(config, *args))
    decode = jax.jit(lambda *args: decoder.decode(config, *args, attended=8))
    padded = np.array([*PROMPT[:FIRST], 77, 78, 79, 77], np.int32)
    cache, logits = prefill(params, cache, padded, FIRST, 2)
    np.testing.assert_allclose(logits, want[FIRST - 1], rtol=2e-4, atol=2e-4)
    cache, logits = prefill(params, cache, padded, FIRST - 1, 0)
    np.testing.assert_allclose(logits, want[FIRST - 2], rtol=2e-4, atol=2e-4)
    for position in range(FIRST, len(PROMPT)):
        tokens = np.array([PROMPT[position - 1], 9, PROMPT[position]], np.int32)
        cache, logits = decode(params, cache, tokens, np.array([position - 1, 0, position]))
        np.testing.assert_allclose(logits[0], want[position - 1], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(logits[2], want[position], rtol=2e-4, atol=2e-4)


@pytest.mark.representatives("gpt2", "opt", "llama3")
@pytest.mark.parametrize("record", CONFIGS, indirect=True)
def test_logits_are_those_of_transformers(record: Any) -> None:
    folder, found = record
    check_logits(folder, found["logits"])


@pytest.mark.representatives("llama3")
@pytest.mark.parametrize(
    ("record", "method"), METHODS.items(), ids=list(METHODS), indirect=["record"]
)
def test_greedy_answers_are_those_of_transformers(record: Any, method: Any) -> None:
    folder, found = record
    with load(folder, num_slots=2, max_length=16, method=method) as own:
        got = own.generate(ROWS, max_new_tokens=NUM_NEW, eos_token_id=[])
    np.testing.assert_array_equal(got, found["greedy"])

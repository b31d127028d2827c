"""Logits and greedy answers equal those of transformers' PyTorch models, on their own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.llm_serving import decoder
from examples.llm_serving.config import read_config
from examples.llm_serving.model import load
from examples.llm_serving.weights import load_params
from tests.serving.checkpoints import CONFIGS, save_checkpoint, torch_greedy, torch_logits

pytest.importorskip("transformers")
pytest.importorskip("torch")

PROMPT = [5, 17, 3, 80, 42, 8, 61]
FIRST = 4  # tokens of the prompt that prefill sees; the others are decoded


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: Any, tmp_path_factory: Any) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_checkpoint(request.param, folder)


def _params(folder: Path) -> tuple[Any, Any]:
    config = read_config(folder)
    types = decoder.param_types(config, np.float32)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return config, load_params(folder, config, np.float32, jax.tree.map(lambda _: place, types))


def test_logits_of_prefill_and_of_every_decode_step(checkpoint: Any) -> None:
    _, folder, model = checkpoint
    config, params = _params(folder)
    want = torch_logits(model, PROMPT)
    cache = decoder.make_cache(config, 3, 16, np.float32)
    # Two slots, one of them a token ahead of the other; what pads a prompt is not seen.
    prefill = jax.jit(lambda *args: decoder.prefill(config, *args))
    decode = jax.jit(lambda *args: decoder.decode(config, *args))
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


def test_greedy_answers(checkpoint: Any) -> None:
    name, folder, model = checkpoint
    rows = [[5, 17, 3, 80], [42, 8, 61, 7], [1, 2, 3, 4]]
    with load(folder, num_slots=2, max_length=32) as own:
        got = own.generate(rows, max_new_tokens=12, eos_token_id=[])
        want = torch_greedy(model, rows, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
        np.testing.assert_array_equal(got, want)
        # A token that a row gives in the middle of its answer ends it; the others go on.
        stop = int(want[0, 8])
        got = own.generate(rows, max_length=16, eos_token_id=stop, pad_token_id=0)
        want = torch_greedy(model, rows, max_length=16, eos_token_id=stop, pad_token_id=0)
        np.testing.assert_array_equal(got, want)
        if name in ("opt", "llama3"):
            _compare_padded(own, model)


def _compare_padded(own: Any, model: Any) -> None:
    rows = [[5, 17, 3, 80], [0, 0, 61, 7]]
    mask = [[1, 1, 1, 1], [0, 0, 1, 1]]
    options: Any = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    got = own.generate(rows, eos_token_id=[], **options)
    np.testing.assert_array_equal(got, torch_greedy(model, rows, eos_token_id=-1, **options))
    ragged = own.generate([rows[0], rows[1][2:]], max_new_tokens=6, eos_token_id=[])
    assert ragged == [got[0].tolist(), got[1][2:].tolist()]

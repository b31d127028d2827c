"""Logits and greedy answers equal those of transformers' PyTorch models, on their own files."""

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
from tests.serving.checkpoints import CONFIGS, save_checkpoint, torch_greedy, torch_logits
from tests.serving.recorded import LEAST_LEAD, PROMPT, ask_transformers, read_record
from tests.serving.test_recorded import check_logits

pytest.importorskip("transformers")
pytest.importorskip("torch")

PIPELINE = autopar.PipeshardParallel(1, stages=autopar.UniformStages(2), schedule="inference")
# On which devices each model is: a mesh of one axis, of two, and a pipeline of two stages.
METHODS: dict[str, Any] = {
    "gpt2": autopar.ShardParallel((2, 4)),
    "opt": autopar.ShardParallel((8,)),
    "opt_350m": autopar.ShardParallel(),
    "llama": PIPELINE,
    "llama3": PIPELINE,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> Any:
    """Each is made when it is first asked for."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            # Several files with an index, as larger models have them.
            options = {"max_shard_size": "20KB"} if name == "opt" else {}
            made[name] = folder, save_checkpoint(name, folder, **options)
        return made[name]

    return get


def _cases(*by_default: str) -> list[Any]:
    return [
        name if name in by_default else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ]


@pytest.mark.parametrize("name", _cases("gpt2", "opt_350m", "llama3"))
def test_logits_of_prefill_and_of_every_decode_step(name: str, checkpoints: Any) -> None:
    folder, model = checkpoints(name)
    check_logits(folder, torch_logits(model, PROMPT))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_recorded_is_what_transformers_says(name: str, tmp_path: Path) -> None:
    record = read_record(name)
    own = ask_transformers(name, tmp_path, int(record["seed"]))
    assert own["lead"] > LEAST_LEAD
    np.testing.assert_allclose(record["weights"], own["weights"], rtol=1e-6)
    np.testing.assert_allclose(record["logits"], own["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(record["greedy"], own["greedy"])


@pytest.mark.parametrize("name", _cases("gpt2", "opt", "llama3"))
def test_greedy_answers_on_many_devices(name: str, checkpoints: Any) -> None:
    folder, model = checkpoints(name)
    rows = [[5, 17, 3, 80], [42, 8, 61, 7], [1, 2, 3, 4]]
    with load(folder, num_slots=2, max_length=32, method=METHODS[name]) as own:
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


def test_bfloat16_weights_are_read_as_they_are(tmp_path: Path) -> None:
    import torch

    model = save_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    config = read_config(tmp_path)
    assert config.dtype == "bfloat16"
    types = decoder.param_types(config, config.dtype)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_params(tmp_path, config, config.dtype, jax.tree.map(lambda _: place, types))
    want = model.model.layers[1].mlp.down_proj.weight.float().detach().numpy()
    got = params["layers"][1]["down"]
    assert got.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)

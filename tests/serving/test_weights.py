"""Weights go from files to the shards of a plan, and files that do not fit are named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from examples.llm_serving import decoder
from examples.llm_serving.config import ModelError, config_from_dict, read_config
from examples.llm_serving.model import load
from examples.llm_serving.names import find_sources
from examples.llm_serving.steps import Steps
from examples.llm_serving.tensor_files import INDEX
from examples.llm_serving.weights import load_params

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 8,
    "n_positions": 32,
}  # fmt: skip
TYPES = {"float32": "F32", "float16": "F16", "int8": "I8"}
# A tensor-parallel layout as one would write it by hand.
PINS = {
    "params*['qkv']": P("x"),
    "params*['o']": P(None, "x"),
    "params*['up']": P("x"),
    "params*['down']": P(None, "x"),
}


def write_file(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file, by its definition."""
    header, start = {}, 0
    for name, array in arrays.items():
        kind = TYPES[array.dtype.name]
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def stored_arrays(values: dict[str, Any] = GPT2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sources = jax.tree.leaves(find_sources(config_from_dict(values)))
    shapes = {part.name: part.stored_shape for source in sources for part in source.parts}
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


def on_one_device(folder: Path) -> Any:
    config = read_config(folder)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: place, find_sources(config))
    return load_params(folder, config, np.float32, places)


def test_every_device_reads_its_part(folder: Path) -> None:
    arrays = stored_arrays()
    names = list(arrays)
    write_file(folder / "a.safetensors", {n: arrays[n] for n in names[::2]})
    write_file(folder / "b.safetensors", {n: arrays[n] for n in names[1::2]})
    files = {n: ("a" if i % 2 == 0 else "b") + ".safetensors" for i, n in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    options = autopar.ShardingOptions(pins=PINS)
    method = autopar.ShardParallel((8,), options=options)
    steps = Steps(read_config(folder), num_slots=2, length=32, dtype=np.float32, method=method)
    params = load_params(folder, steps.config, np.float32, steps.param_shardings())
    layer = params["layers"][0]
    for name in ("qkv", "o", "up", "down"):
        assert layer[name].sharding.spec == PINS[f"params*['{name}']"], name
    joint = arrays["transformer.h.0.attn.c_attn.weight"]
    heads = [joint[:, 16 * part : 16 * (part + 1)].T.reshape(8, 2, 16) for part in range(3)]
    want = np.stack(heads, axis=1)
    np.testing.assert_array_equal(layer["qkv"], want)
    for shard in layer["qkv"].addressable_shards:
        np.testing.assert_array_equal(shard.data, want[shard.index])
    np.testing.assert_array_equal(layer["down"], arrays["transformer.h.0.mlp.c_proj.weight"].T)
    np.testing.assert_array_equal(params["embedding"], arrays["transformer.wte.weight"])


@pytest.mark.ci
def test_answers_of_a_model_in_parts_are_those_of_the_whole(folder: Path) -> None:
    write_file(folder / "model.safetensors", stored_arrays())
    config, params = read_config(folder), on_one_device(folder)
    empty = decoder.make_cache(config, 1, 32, np.float32)
    forward = jax.jit(
        lambda tokens, length: decoder.prefill(config, params, empty, tokens, length, 0)[1]
    )
    want = [1, 2, 3]
    for _ in range(6):
        padded = np.array(want + [0] * (16 - len(want)), np.int32)
        want.append(int(np.argmax(forward(padded, len(want)))))
    method = autopar.ShardParallel((8,), options=autopar.ShardingOptions(pins=PINS))
    with load(folder, method=method, num_slots=2) as model:
        assert model.generate([want[:3]], max_new_tokens=6).tolist() == [want]


def test_the_host_holds_one_part_at_a_time(tmp_path: Path) -> None:
    values = GPT2 | {"n_embd": 512, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(values))
    arrays = stored_arrays(values)
    write_file(tmp_path / "model.safetensors", arrays)
    config = read_config(tmp_path)
    mesh = jax.make_mesh((8,), ("x",))
    split = jax.sharding.NamedSharding(mesh, P("x"))
    whole = jax.sharding.NamedSharding(mesh, P())
    places = jax.tree.map(lambda s: split if s.shape[0] % 8 == 0 else whole, find_sources(config))
    tracemalloc.start()
    try:
        params = load_params(tmp_path, config, np.float16, places)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = max(array.nbytes for array in arrays.values())
    # On CPU devices the parts that are placed already are the host's memory too.
    placed = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert peak < placed + largest / 8 + 1_000_000
    np.testing.assert_array_equal(
        params["embedding"], arrays["transformer.wte.weight"].astype(np.float16)
    )


def test_names_of_a_model_that_was_saved_without_its_head(folder: Path) -> None:
    arrays = {n.removeprefix("transformer."): a for n, a in stored_arrays().items()}
    arrays["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)  # a mask, not a parameter
    write_file(folder / "model.safetensors", arrays)
    np.testing.assert_array_equal(on_one_device(folder)["embedding"], arrays["wte.weight"])


def _without(arrays: dict[str, np.ndarray]) -> None:
    del arrays["transformer.h.0.mlp.c_fc.bias"]


def _with_more(arrays: dict[str, np.ndarray]) -> None:
    arrays["transformer.h.1.mlp.c_fc.bias"] = np.zeros(64, np.float32)


def _with_another_shape(arrays: dict[str, np.ndarray]) -> None:
    arrays["transformer.wpe.weight"] = np.zeros((33, 16), np.float32)


def _with_another_type(arrays: dict[str, np.ndarray]) -> None:
    arrays["transformer.wte.weight"] = np.zeros((32, 16), np.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without, r"\['up_bias'\] is missing.*h.0.mlp.c_fc.bias of shape \(64,\)"),
        (_with_more, r"h.1.mlp.c_fc.bias in model.safetensors is extra.*1 layers"),
        (_with_another_shape, r"\['positions'\] has another shape.*\(33, 16\).*\(32, 16\)"),
        (_with_another_type, r"\['embedding'\] has another dtype.*I8.*F32"),
    ],
)
def test_arrays_that_do_not_fit(folder: Path, change: Any, words: str) -> None:
    arrays = stored_arrays()
    change(arrays)
    write_file(folder / "model.safetensors", arrays)
    with pytest.raises(ModelError, match=words):
        on_one_device(folder)


def test_damaged_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        on_one_device(folder)
    write_file(path, stored_arrays())
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    damages = {
        "cut off": whole[:-100],
        "a header of": whole[:5],
        "header is not JSON": whole[:8] + b"\xff" * length + whole[8 + length :],
        "header of .* bytes in": (2**62).to_bytes(8, "little") + whole[8:],
        "not a JSON object": (2).to_bytes(8, "little") + b"[]",
        "lacks dtype": (12).to_bytes(8, "little") + b'{"a":[1,2]} ',
    }
    for words, data in damages.items():
        path.write_bytes(data)
        with pytest.raises(ModelError, match=words):
            on_one_device(folder)
    for offsets in ([0, 3], [-4, 0], [4, 0]):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
        text = json.dumps({"a": entry}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
        with pytest.raises(ModelError, match="is damaged: a "):
            on_one_device(folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../model.safetensors", "not a file of this folder"),
        ("/etc/passwd", "not a file of this folder"),
        ("..", "not a file of this folder"),
        (7, "not a file of this folder"),
        ("other.safetensors", "is missing"),
    ],
)
def test_an_index_that_points_elsewhere(folder: Path, file: Any, words: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"transformer.wte.weight": file}}))
    with pytest.raises(ModelError, match=words):
        on_one_device(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match="weight_map"):
        on_one_device(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported.*gpt2, llama, opt"),
        ({"model_type": ["gpt2"]}, "not supported"),
        ({"n_embd": None}, "wrong type"),
        ({"n_embd": 20}, "not a multiple of 8 heads"),
        ({"n_layer": 0}, "num_layers=0"),
        ({"activation_function": "mish"}, "unknown activation 'mish'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "not supported"),
    ],
)
def test_configs_that_cannot_be_served(folder: Path, change: Any, words: str) -> None:
    (folder / "config.json").write_text(json.dumps(GPT2 | change))
    with pytest.raises(ModelError, match=words):
        read_config(folder)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json: is missing"):
        read_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config.json"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    with pytest.raises(ModelError, match="'hidden_size' is missing"):
        read_config(tmp_path)

"""Matrices that share an input are one array: read from the files into shards, equal to separate
products, and taken apart on each device without communication."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from examples.llm_serving import decoder
from examples.llm_serving.config import ModelConfig, ModelError, read_config
from examples.llm_serving.model import load
from examples.llm_serving.names import find_sources
from examples.llm_serving.random_checkpoint import save_random_checkpoint
from examples.llm_serving.tensor_files import find_arrays
from examples.llm_serving.weights import load_params

LENGTH = 16
# Two queries for each of four heads of keys and values; every matrix with a bias.
LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": LENGTH,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
TENSOR_PARALLEL = {
    "qkv": P("x"), "qkv_bias": P("x"), "o": P(None, "x"), "gate_up": P(None, "x"),
    "gate_up_bias": P(None, "x"), "down": P(None, "x"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_checkpoint(path, "llama", **LLAMA)
    return path


def shardings(config: ModelConfig, num_devices: int, specs: dict[str, P]) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("x",))

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
        return NamedSharding(mesh, specs.get(str(getattr(path[-1], "key", "")), P()))

    return jax.tree_util.tree_map_with_path(place, find_sources(config))


def answer_unfused(folder: Path, tokens: list[int]) -> np.ndarray:
    """The logits after all tokens, with a product for each stored matrix and no cache."""
    config = read_config(folder)
    w = {name: jnp.asarray(array.map()) for name, array in find_arrays(folder).items()}
    size, group = config.head_size, config.num_heads // config.num_kv_heads
    angles = np.arange(len(tokens))[:, None] * decoder.rotary_frequencies(config)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def product(x: jax.Array, name: str) -> jax.Array:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: jax.Array, name: str) -> jax.Array:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w[name + ".weight"]

    def rotate(x: jax.Array) -> jax.Array:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][np.array(tokens)]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        y = norm(x, prefix + "input_layernorm")
        q, k, v = (
            product(y, f"{prefix}self_attn.{name}_proj").reshape(len(tokens), -1, size)
            for name in "qkv"
        )
        q, k, v = rotate(q), jnp.repeat(rotate(k), group, 1), jnp.repeat(v, group, 1)
        scores = jnp.einsum("thd,uhd->htu", q, k) / np.sqrt(size)
        scores = jnp.where(np.tri(len(tokens), dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("htu,uhd->thd", jax.nn.softmax(scores), v).reshape(len(tokens), -1)
        x = x + product(mixed, prefix + "self_attn.o_proj")
        y = norm(x, prefix + "post_attention_layernorm")
        up = jax.nn.silu(product(y, prefix + "mlp.gate_proj")) * product(y, prefix + "mlp.up_proj")
        x = x + product(up, prefix + "mlp.down_proj")
    x = norm(x[-1], "model.norm")
    return np.asarray(x @ w["lm_head.weight"].T)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_split_over_heads_it_equals_separate_products(folder: Path, num_devices: int) -> None:
    config = read_config(folder)
    places = shardings(config, num_devices, TENSOR_PARALLEL)
    params = load_params(folder, config, np.float32, places)
    cache = decoder.make_cache(config, 2, LENGTH, np.float32)
    by_heads = NamedSharding(places["embedding"].mesh, P(None, "x"))
    cache = jax.device_put(cache, by_heads)
    prompt, following = [5, 17, 3], 60
    padded = np.array([*prompt, 9, 9], np.int32)
    prefill = jax.jit(lambda *args: decoder.prefill(config, *args))
    cache, logits = prefill(params, cache, padded, len(prompt), 1)
    np.testing.assert_allclose(logits, answer_unfused(folder, prompt), rtol=2e-4, atol=2e-4)
    decode = jax.jit(
        lambda *args: decoder.decode(config, *args),
        out_shardings=(jax.tree.map(lambda _: by_heads, cache), None),
    )
    tokens, positions = np.array([0, following]), np.array([0, len(prompt)])
    compiled = decode.lower(params, cache, tokens, positions).compile()
    collectives = re.findall(
        r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text() or ""
    )
    # Heads and units stay where they are: only the sums after `o` and `down` are communicated.
    assert set(collectives) <= {"all-reduce"}
    assert len(collectives) == (2 * config.num_layers if num_devices > 1 else 0)
    _, logits = decode(params, cache, tokens, positions)
    want = answer_unfused(folder, [*prompt, following])
    np.testing.assert_allclose(logits[1], want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("num_devices", [1, pytest.param(4, marks=pytest.mark.ci)])
def test_a_plan_of_our_own_answers_as_separate_products_do(folder: Path, num_devices: int) -> None:
    want = [5, 17, 3]
    for _ in range(5):
        want.append(int(answer_unfused(folder, want).argmax()))
    with load(folder, method=autopar.ShardParallel((num_devices,)), num_slots=2) as model:
        assert model.generate([want[:3]], max_new_tokens=5, eos_token_id=[]).tolist() == [want]


@pytest.mark.parametrize(
    "specs",
    [
        {"qkv": P(None, "x"), "gate_up": P("x")},  # across the parts: queries; keys and values
        {"qkv": P(None, None, "x"), "qkv_bias": P(None, None, "x"), "gate_up": P(None, None, "x")},
    ],
)
def test_shards_of_any_layout_have_the_files_numbers(folder: Path, specs: dict[str, P]) -> None:
    config = read_config(folder)
    params = load_params(folder, config, np.float32, shardings(config, 2, specs))
    stored = {name: array.map() for name, array in find_arrays(folder).items()}
    prefix = "model.layers.1."

    def heads(name: str, count: int, ending: str) -> np.ndarray:
        array = stored[f"{prefix}self_attn.{name}_proj.{ending}"]
        return array.reshape(4, count, 4, *array.shape[1:])

    for leaf, ending in (("qkv", "weight"), ("qkv_bias", "bias")):
        rows = [heads("q", 2, ending), heads("k", 1, ending), heads("v", 1, ending)]
        want = np.concatenate(rows, axis=1)
        got = params["layers"][1][leaf]
        assert got.sharding.spec == specs.get(leaf, P())
        np.testing.assert_array_equal(got, want)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])
    gate, up = (stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(params["layers"][1]["gate_up"], np.stack([gate, up]))


def test_a_part_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    name = b"model.layers.1.self_attn.k_proj.weight"
    assert whole.count(name) == 1
    other = name.replace(b"k_proj", b"K_proj")
    (tmp_path / "model.safetensors").write_bytes(whole.replace(name, other))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    with pytest.raises(
        ModelError, match=r"\['qkv'\] is missing.*k_proj.weight of shape \(16, 32\)"
    ):
        load(tmp_path)

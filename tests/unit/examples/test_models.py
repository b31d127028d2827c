"""The model zoo: sizes, training, closed-form FLOPs, and equal results of equivalent forms."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.models import (
    MODELS,
    Example,
    build,
    dlrm,
    gpt,
    llama,
    moe,
    transformer,
    vit,
    wide_resnet,
)

TINY = [name for name in MODELS if "-tiny" in name]
PAPER = [name for name in MODELS if "-tiny" not in name]

# Names that do not spell a size.
NAMED_SIZES = {"bert-large": 340e6, "moe-cfp": 7.1e9, "moe-cfp-2heads": 7.1e9}

# Nothing here runs for long, so compiling quickly matters more than the code that comes out.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def published_size(name: str) -> float:
    if name in NAMED_SIZES:
        return NAMED_SIZES[name]
    number, unit = re.fullmatch(r".*-([\d.]+)([mb])", name).groups()
    return float(number) * {"m": 1e6, "b": 1e9}[unit]


def with_scanned_layers(name: str) -> Example:
    """The same parameters in a form that is quicker to trace, where the family has one."""
    if hasattr(MODELS[name].config, "scan_layers"):
        return build(name, scan_layers=True)
    return build(name)


def equations(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Every equation of a jaxpr, with the number of times it runs."""
    for equation in jaxpr.eqns:
        yield equation, 1
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        for param in equation.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from ((eqn, trips * count) for eqn, count in equations(inner))


def count_flops(function: Any, *args: Any) -> int:
    """Counts the products and convolutions that `function` traces to."""
    flops = 0
    for equation, count in equations(jax.make_jaxpr(function)(*args).jaxpr):
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
        elif equation.primitive.name == "conv_general_dilated":
            _, *contracted = equation.params["dimension_numbers"].rhs_spec
            shape = equation.invars[1].aval.shape
        else:
            continue
        out_shape = equation.outvars[0].aval.shape
        flops += 2 * count * math.prod(out_shape) * math.prod(shape[i] for i in contracted)
    return flops


@pytest.mark.representatives("gpt-39b", "llama3-8b", "moe-70b", "bert-large")
@pytest.mark.parametrize("name", PAPER)
def test_num_params_is_what_the_name_says(name: str) -> None:
    # Llama2-7B really has 6.74B parameters; all others are nearer.
    assert with_scanned_layers(name).num_params == pytest.approx(published_size(name), rel=0.04)


@pytest.mark.representatives("llama3-8b", "bert-large")
@pytest.mark.parametrize("name", ["gpt-39b", "bert-large", "llama3-8b", "moe-70b"])
def test_abstract_step_of_large_model(name: str) -> None:
    assert_step_keeps_types(with_scanned_layers(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_abstract_step_of_unrolled_model(name: str) -> None:
    assert_step_keeps_types(MODELS[name])


def assert_step_keeps_types(example: Example) -> None:
    state, batch = example.abstract_state(), example.abstract_batch()
    assert {array.shape[0] for array in batch.values()} == {example.batch_size}
    new_state, loss = jax.eval_shape(example.train_step, state, batch)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert new_state == state
    assert all(param.dtype == jnp.float32 for param in jax.tree.leaves(state.params))


@pytest.mark.representatives(
    "mlp-tiny",
    slow=("gpt-tiny", "gpt-tiny-scan", "llama-tiny", "llama-tiny-scan", "bert-layers-tiny"),
)
@pytest.mark.parametrize("name", TINY)
def test_tiny_model_trains(name: str) -> None:
    example = MODELS[name]
    train_step = jit(example.train_step)
    state, batch = jit(lambda: (example.create_state(), example.make_batch()))()
    losses = []
    for _ in range(8):
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert min(losses[-2:]) < 0.995 * losses[0]
    assert int(state.step) == 8
    # A step's output is as good an input as the initial state: same types, no second compilation.
    assert train_step._cache_size() == 1


@pytest.mark.representatives("gpt-tiny", "mlp-tiny")
@pytest.mark.parametrize("name", TINY)
def test_states_of_one_config_have_one_structure(name: str) -> None:
    states = [build(name).abstract_state() for _ in range(2)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_scanned_and_unrolled_layers_agree(name: str) -> None:
    scanned = build(name, num_layers=4, scan_layers=True)
    unrolled = build(name, num_layers=4)
    batch = scanned.make_batch()
    rng = np.random.default_rng(0)
    values = {
        jax.tree_util.keystr(path): 0.1 * rng.standard_normal(leaf.shape, np.float32)
        for path, leaf in jax.tree.leaves_with_path(scanned.abstract_state().params)
    }

    def value_of(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        layer = r"\['layer_(\d+)'\]|\['layers'\]\[(\d+)\]"  # linen's and nnx's
        path = jax.tree_util.keystr(path)
        if match := re.search(layer, path):
            return values[re.sub(layer, "['layers']", path)][int(match[1] or match[2])]
        return values[path]

    def loss_of(example: Example) -> float:
        abstract = example.abstract_state()
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        state = state.replace(params=jax.tree.map_with_path(value_of, abstract.params))
        return float(jit(lambda state: example.train_step(state, batch)[1])(state))

    assert loss_of(scanned) == pytest.approx(loss_of(unrolled), rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "mlp-tiny",
        "gpt-tiny",
        "gpt-tiny-scan",
        "bert-tiny",
        "llama-tiny",
        "llama-tiny-scan",
        "moe-tiny",
        "vit-tiny",
        "dlrm-tiny",
    ],
)
def test_flops_closed_form(name: str) -> None:
    example = MODELS[name]
    counted = count_flops(example.train_step, example.abstract_state(), example.abstract_batch())
    assert example.flops_per_step() == counted


def test_flops_of_bert_layers_include_the_unused_input_gradient() -> None:
    example = MODELS["bert-layers-tiny"]
    counted = count_flops(example.train_step, example.abstract_state(), example.abstract_batch())
    config = example.config
    tokens = example.batch_size * config.seq_len
    assert example.flops_per_step() - counted == 2 * tokens * 3 * config.hidden_size**2


@pytest.mark.representatives("wresnet-tiny")
@pytest.mark.parametrize("name", ["wresnet-tiny", "wresnet-250m"])
def test_flops_of_convolutions_are_three_times_the_forward_pass(name: str) -> None:
    example = MODELS[name]
    state, images = example.abstract_state(), example.abstract_batch()["images"]

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    forward = functools.partial(wide_resnet.WideResNet(example.config).apply, mutable="batch_stats")
    assert example.flops_per_step() == 3 * count_flops(forward, variables, images)


@pytest.mark.representatives("gpt-tiny")
@pytest.mark.parametrize(
    "name", ["gpt-tiny", "bert-tiny", "llama-tiny", "moe-tiny", "vit-tiny", "dlrm-tiny"]
)
def test_bf16_products(name: str) -> None:
    example = build(name, dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(example.train_step)(example.abstract_state(), example.abstract_batch())
    num_float32 = sum(
        any(operand.aval.dtype != jnp.bfloat16 for operand in equation.invars)
        for equation, _ in equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
    )
    assert num_float32 == (3 if name == "moe-tiny" else 0)  # the router and its gradients


@pytest.mark.representatives("gpt-tiny-2", "gpt-tiny-scan-1")
@pytest.mark.parametrize(
    ("name", "num_remats"),
    [
        ("gpt-tiny", 2),
        ("gpt-tiny-scan", 1),
        ("bert-layers-tiny", 2),
        ("llama-tiny", 2),
        ("llama-tiny-scan", 1),
        ("vit-tiny", 2),
        ("moe-tiny", 1),  # for a pair of layers
    ],
)
def test_remat_wraps_each_layer(name: str, num_remats: int) -> None:
    example = build(name, remat=True)
    jaxpr = jax.make_jaxpr(example.train_step)(example.abstract_state(), example.abstract_batch())
    primitives = [equation.primitive.name for equation, _ in equations(jaxpr.jaxpr)]
    assert primitives.count("remat2") == num_remats


def test_routing_keeps_every_token_when_there_is_room() -> None:
    scores = np.random.default_rng(0).standard_normal((2, 16, 4), np.float32)
    route = jit(functools.partial(moe.route_top2, capacity=32))
    combine, balance_loss = route(jax.nn.softmax(scores))
    assert np.sum(combine, axis=(2, 3)) == pytest.approx(1, rel=1e-5)
    assert (np.sum(combine > 0, axis=(2, 3)) == 2).all()
    assert (np.sum(combine > 0, axis=1) <= 1).all()
    assert float(balance_loss) == pytest.approx(1, abs=0.5)


def test_routing_drops_what_does_not_fit() -> None:
    gates = jnp.tile(jnp.array([0.6, 0.3, 0.1]), (1, 5, 1))
    combine, balance_loss = jit(functools.partial(moe.route_top2, capacity=2))(gates)
    expected = np.zeros((1, 5, 3, 2), np.float32)
    for token in range(2):
        expected[0, token, 0, token] = 2 / 3
        expected[0, token, 1, token] = 1 / 3
    assert np.asarray(combine) == pytest.approx(expected)
    assert float(balance_loss) == pytest.approx(3 * 0.6)


def test_grouped_queries_share_keys() -> None:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 6, 4, 8), np.float32)
    key, value = rng.standard_normal((2, 2, 6, 2, 8), np.float32)
    grouped = jit(functools.partial(transformer.attention, causal=True))(query, key, value)
    repeated = (np.repeat(array, 2, axis=2) for array in (key, value))
    reference = jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))
    expected = reference(query, *repeated)
    assert np.asarray(grouped) == pytest.approx(np.asarray(expected), abs=1e-5)


@pytest.mark.representatives("2-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_attention_of_jax_agrees(causal: bool, num_kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 6, 4, 8), np.float32)
    key, value = rng.standard_normal((2, 2, 6, num_kv_heads, 8), np.float32)

    def outputs(kind: str) -> np.ndarray:
        function = functools.partial(transformer.attention, causal=causal, kind=kind)
        return np.asarray(jit(function)(query, key, value))

    assert outputs("xla") == pytest.approx(outputs("einsum"), abs=1e-5)


@pytest.mark.representatives("llama-tiny")
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "moe-tiny"])
def test_models_use_the_attention_they_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_jax, calls = jax.nn.dot_product_attention, []

    def noted(*args: Any, **how: Any) -> jax.Array:
        calls.append(how)
        return of_jax(*args, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", noted)
    no_dropout = {"dropout": 0.0} if name == "bert-tiny" else {}
    for kind in ("einsum", "xla"):
        example = build(name, attention=kind, **no_dropout)
        jax.eval_shape(example.train_step, example.abstract_state(), example.abstract_batch())
        assert bool(calls) == (kind == "xla")
    causal = name != "bert-tiny"
    assert all(call == {"is_causal": causal, "implementation": "xla"} for call in calls)


@pytest.mark.gpu
def test_fused_attention_agrees() -> None:
    query_key, kv_key = jax.random.split(jax.random.key(0))
    query = jax.random.normal(query_key, (2, 128, 8, 64), jnp.bfloat16)
    key, value = jax.random.normal(kv_key, (2, 2, 128, 4, 64), jnp.bfloat16)
    fused = transformer.attention(query, key, value, causal=True, kind="cudnn")
    expected = transformer.attention(query, key, value, causal=True)
    assert np.asarray(fused, np.float32) == pytest.approx(
        np.asarray(expected, np.float32), abs=0.03
    )


def test_rotary_scores_depend_on_distance() -> None:
    config = llama.LlamaConfig(64, 1, 4, 4, 64, seq_len=8)
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 4, 16), np.float32)
    angles = llama.rotary_angles(config)
    queries, keys = (llama.rotate(jnp.tile(x, (1, 8, 1, 1)), angles) for x in (query, key))
    scores = np.einsum("bqnd,bknd->nqk", queries, keys)
    assert scores[:, 1:, 1:] == pytest.approx(scores[:, :-1, :-1], abs=1e-4)


def test_cross_entropy_is_minus_log_softmax() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((3, 5), np.float32), rng.integers(0, 5, (3,))
    expected = -np.asarray(jax.nn.log_softmax(logits))[np.arange(3), targets]
    assert np.asarray(transformer.cross_entropy(logits, targets)) == pytest.approx(expected)


def test_patches_are_squares_of_the_image() -> None:
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = np.asarray(vit.to_patches(jnp.asarray(images), 2))
    assert patches.shape == (2, 6, 12)
    assert (patches[1, 4] == images[1, 2:4, 2:4].reshape(-1)).all()


def test_every_table_is_looked_up_in_its_own_column() -> None:
    tables = np.random.default_rng(0).standard_normal((3, 5, 2), np.float32)
    rows = np.random.default_rng(1).integers(0, 5, (4, 3))
    found = dlrm.Lookup().apply({}, jnp.asarray(tables), jnp.asarray(rows))
    assert (np.asarray(found) == tables[np.arange(3), rows]).all()


def test_ad_hoc_example() -> None:
    config = gpt.GPTConfig(2560, 4, 32, dtype=jnp.bfloat16)
    example = gpt.example(config, batch_size=64)
    assert example.abstract_batch()["tokens"].shape == (64, 1024)
    assert example.abstract_batch(8)["tokens"].shape == (8, 1024)
    assert example.flops_per_step(128) == 2 * example.flops_per_step()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="unknown model 'gpt-7b'; choose from mlp-tiny, "):
        build("gpt-7b")
    with pytest.raises(ValueError, match="groups of 2048"):
        build("moe-380m", batch_size=1).abstract_batch()
    with pytest.raises(ValueError, match="num_layers is 3"):
        build("moe-tiny", num_layers=3)
    with pytest.raises(ValueError, match="image_size is 18 and patch_size is 4"):
        build("vit-tiny", image_size=18)
    with pytest.raises(ValueError, match=r"set dropout=0\.0"):
        build("gpt-tiny", attention="cudnn", dropout=0.1)
    with pytest.raises(ValueError, match=r"set dropout=0\.0"):
        build("bert-tiny", attention="cudnn")
    with pytest.raises(
        ValueError, match="unknown attention 'flash'; choose from 'einsum', 'xla', 'cudnn'"
    ):
        build("moe-tiny", attention="flash")

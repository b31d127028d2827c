"""Layers are found where few bytes cross: by names, by repetition, by balance, and in scans."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.errors import ArgumentError
from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.accumulate import accumulate, micro_batch_leaves
from autopar.rewrite.attach_layers import loop_batch
from autopar.rewrite.layers import Layer, find_layers, layers_by_name, worth_recomputing
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.tracer.regions import FORWARD, equation_regions
from autopar.tracer.trace_step import trace_step
from examples.models import build
from examples.models.gpt import GPTConfig, example

SHAPE = jax.ShapeDtypeStruct


def trace_model(model: Any) -> TracedStep:
    return trace_step(model.train_step, (model.abstract_state(), model.abstract_batch()))


def gpt(num_layers: int, **options: Any) -> TracedStep:
    config = GPTConfig(16, num_layers, 2, seq_len=8, vocab_size=32, **options)
    return trace_model(example(config, batch_size=2))


def layers_of(traced: TracedStep, num_layers: int | None = None) -> tuple[Layer, ...]:
    layers = find_layers(traced.program, num_layers, batch=traced.batch)
    together = [i for layer in layers for i in layer.equations]
    assert together == sorted(set(together)), "in order, none twice"
    regions = equation_regions(traced.program)
    assert {regions[i] for i in together} == {FORWARD}
    assert len({layer.name for layer in layers}) == len(layers)
    return layers


def mlp(num_layers: int, dtype: Any = jnp.float32, checkpoint: bool = False) -> TracedStep:
    """A stack of blocks in plain JAX: no module has a name."""

    def block(x: Any, w: Any) -> Any:
        up, down = (p.astype(dtype) for p in w)
        return x + jnp.tanh(x @ up) @ down

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = x.astype(dtype)
            for w in params:
                h = (jax.checkpoint(block) if checkpoint else block)(h, w)
            return (h.astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = [(SHAPE((8, 32), jnp.float32), SHAPE((32, 8), jnp.float32))] * num_layers
    return trace_step(step, (params, SHAPE((4, 8), jnp.float32)))


def test_numbered_modules_are_layers() -> None:
    layers = layers_of(gpt(3))
    assert [x.name for x in layers] == [*(f"GPT/layer_{i}" for i in range(3)), "GPT/embed.attend"]
    stream = 2 * 8 * 16 * 4
    assert [len(layer.inputs) for layer in layers[1:3]] == [1, 1]
    assert [layer.kept_bytes for layer in layers[1:3]] == [stream, stream]
    assert layers[1].flops == pytest.approx(layers[2].flops)
    assert layers[1].residual_bytes == layers[2].residual_bytes > 10 * stream


@pytest.mark.parametrize("num_layers", [2, 5])
def test_repeated_blocks_without_names_are_layers(num_layers: int) -> None:
    layers = layers_of(mlp(num_layers))
    assert len(layers) == num_layers
    assert [layer.name for layer in layers] == [f"layer {i}" for i in range(num_layers)]
    # Only the residual stream crosses, not the wide activation inside of a block.
    assert [layer.kept_bytes for layer in layers[1:]] == [4 * 8 * 4] * (num_layers - 1)


def test_a_block_that_repeats_inside_is_still_one_layer() -> None:
    def block(x: Any, w: Any) -> Any:
        h = x
        for _ in range(3):
            h = jnp.tanh(jnp.tanh(h @ w[0]) @ w[1])
        return x + h

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = block(h, w)
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = [(SHAPE((8, 16), jnp.float32), SHAPE((16, 8), jnp.float32))] * 4
    layers = layers_of(trace_step(step, (params, SHAPE((4, 8), jnp.float32))))
    assert len(layers) == 4
    assert [layer.kept_bytes for layer in layers[1:]] == [4 * 8 * 4] * 3


def test_modules_of_nnx_have_no_names_and_yet_layers() -> None:
    layers = layers_of(trace_model(build("llama-tiny")))
    assert len(layers) == 3, "two equal blocks and the head"
    assert layers[0].flops == pytest.approx(layers[1].flops, rel=0.01)


def test_blocks_that_do_not_repeat_are_cut_where_few_bytes_cross() -> None:
    traced = trace_model(build("moe-tiny"))
    layers = layers_of(traced)
    assert 4 <= len(layers) <= 8
    stream = 8 * 32 * 32 * 4
    assert all(layer.kept_bytes <= 2.5 * stream for layer in layers)


def test_convolutional_blocks_are_layers() -> None:
    names = [layer.name for layer in layers_of(trace_model(build("wresnet-tiny")))]
    assert names == [
        "WideResNet/stem",
        "WideResNet/stage_0_block_0",
        "WideResNet/stage_1_block_0",
        "WideResNet/head",
    ]


@pytest.mark.ci
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_a_number_of_layers_can_be_asked_for(num_layers: int) -> None:
    layers = layers_of(gpt(8), num_layers)
    assert len(layers) == num_layers
    mean = sum(layer.flops for layer in layers) / num_layers
    assert max(layer.flops for layer in layers) < 1.5 * mean
    stream = 2 * 8 * 16 * 4
    assert all(layer.kept_bytes <= 2 * stream for layer in layers), "cut between blocks"


def test_more_layers_than_blocks_are_given_up_to_one_per_equation() -> None:
    traced = mlp(2)
    assert len(layers_of(traced, 4)) == 4
    total = sum(len(layer.equations) for layer in layers_of(traced))
    assert len(layers_of(traced, total)) == total
    with pytest.raises(ArgumentError, match=f"{total + 1} layers.*1 to {total}"):
        layers_of(traced, total + 1)


@pytest.mark.ci
def test_a_scan_over_layers_is_a_layer() -> None:
    traced = gpt(3, scan_layers=True)
    layers = layers_of(traced)
    (scan,) = [layer for layer in layers if layer.scan is not None]
    assert (scan.equations, scan.trips) == ((scan.scan,), 3)
    assert scan.name == "GPT/layers"
    stream = 2 * 8 * 16 * 4
    assert scan.kept_bytes == 3 * stream, "the carry that enters each trip"
    assert scan.residual_bytes > 10 * scan.kept_bytes
    assert scan in worth_recomputing(layers)


def test_a_scan_of_checkpointed_layers_keeps_what_it_stacks() -> None:
    """Nothing of it can be recomputed that is not already: all that it stacks stays."""
    width, rows, trips = 8, 4, 5

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            block = jax.checkpoint(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w), None))
            return lax.scan(block, x, weights)[0].mean()

        return jax.tree.map(lambda p, g: p - g, weights, jax.grad(loss)(weights))

    weights = SHAPE((trips, width, width), jnp.float32)
    layers = layers_of(trace_step(step, (weights, SHAPE((rows, width), jnp.float32))))
    (scan,) = [layer for layer in layers if layer.scan is not None]
    assert scan.residual_bytes == 0
    assert scan.kept_bytes == trips * rows * width * 4, "the carry that enters each trip"


def test_layers_of_a_program_are_found_once() -> None:
    traced = mlp(4)
    layers = layers_of(traced)
    assert layers_of(traced) is layers
    assert len(layers_of(traced, 2)) == 2, "another number is another search"
    assert layers_of(mlp(3)) != layers


def test_what_is_made_of_parameters_alone_is_in_no_layer() -> None:
    traced = mlp(3, dtype=jnp.bfloat16)
    equations = traced.program.equations
    parameters = {v for i, v in enumerate(traced.program.inputs) if i not in traced.batch}
    casts = [
        i
        for i, e in enumerate(equations)
        if e.name == "convert_element_type" and e.operands[0] in parameters
    ]
    assert len(casts) == 6
    layers = layers_of(traced)
    assert not set(casts) & {i for layer in layers for i in layer.equations}
    assert [layer.kept_bytes for layer in layers[1:]] == [4 * 8 * 2] * 2


@pytest.mark.ci
def test_layers_that_the_user_recomputes_have_little_left_to_free() -> None:
    plain, own = layers_of(gpt(3)), layers_of(gpt(3, remat=True))
    for before, after in zip(plain[1:3], own[1:3], strict=True):
        assert before.name == after.name
        assert after.residual_bytes < 0.05 * before.residual_bytes


def test_the_last_layer_is_not_worth_recomputing() -> None:
    layers = layers_of(gpt(2))
    assert [layer.is_last for layer in layers] == [False, False, True]
    assert [x.name for x in worth_recomputing(layers)] == ["GPT/layer_0", "GPT/layer_1"]


def test_layers_are_found_again_by_name() -> None:
    layers = layers_of(gpt(3))
    found = layers_by_name(layers, ["GPT/layer_2", "GPT/layer_0", "another"])
    assert [layer.name for layer in found] == ["GPT/layer_0", "GPT/layer_2"]


def test_without_a_backward_pass_nothing_is_kept_for_it() -> None:
    def forward(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    traced = trace_step(forward, ([SHAPE((8, 8), jnp.float32)] * 3, SHAPE((4, 8), jnp.float32)))
    layers = layers_of(traced)
    assert len(layers) == 3
    assert not any(layer.residual_bytes for layer in layers)
    assert worth_recomputing(layers) == ()


def test_data_is_told_from_state_by_the_update_if_nothing_is_said() -> None:
    traced = mlp(4, dtype=jnp.bfloat16)
    assert find_layers(traced.program) == layers_of(traced)


def test_a_program_without_products_is_one_layer() -> None:
    def step(p: Any, x: Any) -> Any:
        return p - jax.grad(lambda p: (jnp.sin(p * x) ** 2).sum())(p)

    traced = trace_step(step, (SHAPE((4,), jnp.float32), SHAPE((4,), jnp.float32)))
    assert len(layers_of(traced)) == 1


def test_two_losses_are_cut_apart() -> None:
    """Of two gradients in one step, no layer reaches from one forward pass into the other."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ p) @ p).sum()

        p = p - jax.grad(loss)(p, x)
        return p - jax.grad(loss)(p, x + 1)

    traced = trace_step(step, (SHAPE((8, 8), jnp.float32), SHAPE((4, 8), jnp.float32)))
    regions = equation_regions(traced.program)
    layers = layers_of(traced)
    for layer in layers:
        inside = regions[layer.equations[0] : layer.equations[-1] + 1]
        assert set(inside) == {FORWARD}
    assert len(layers_of(traced, 2)) == 2


def test_a_loop_inside_a_numbered_block_is_a_part_of_it() -> None:
    def block(x: Any, w: Any) -> Any:
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x @ w, None, length=2)
        return x @ w

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for index, w in enumerate(params):
                with jax.named_scope(f"block_{index}"):
                    h = block(h, w)
            return h.sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    traced = trace_step(step, ([SHAPE((8, 8), jnp.float32)] * 3, SHAPE((4, 8), jnp.float32)))
    layers = layers_of(traced)
    assert [layer.name for layer in layers] == ["block_0", "block_1", "block_2"]
    assert all(layer.scan is None for layer in layers)


def test_layers_are_data() -> None:
    (layer, *_) = layers_of(mlp(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.name = "other"  # type: ignore[misc]


# -- in the loop over micro-batches


@functools.cache
def loop_of(name: str, **options: Any) -> tuple[Program, range]:
    """The body of a model's loop over two micro-batches, and which of its inputs are data."""
    model = build(name, **options)
    return looped(model.train_step, model.abstract_state(), model.abstract_batch())


def looped(step: Any, state: Any, batch: Any) -> tuple[Program, range]:
    full = unroll_scans(trace_step(step, (state, batch)))
    args, _ = full.call.rebuild(micro_batch_leaves(full, 2))
    program = accumulate(full, unroll_scans(trace_step(step, args)), 2).program
    (loop,) = [e for e in program.equations if e.name == "scan"]
    return loop.bodies[0], loop_batch(loop)


def shares(layers: tuple[Layer, ...]) -> list[float]:
    total = sum(layer.flops for layer in layers)
    return [layer.flops / total for layer in layers]


STREAM = 4 * 32 * 32 * 4  # a micro-batch's residual stream in gpt-tiny
MODELS = {
    "gpt-tiny": [f"GPT/layer_{i}" for i in range(2)] + ["GPT/embed.attend"],
    "gpt-tiny-scan": [f"GPT/layers_{i}" for i in range(3)] + ["GPT/embed.attend"],
    "bert-tiny": [f"Bert/layer_{i}" for i in range(2)] + ["Bert"],
    "llama-tiny": ["layer 0", "layer 1", "layer 2"],
    "moe-tiny": ["MoETransformer/layer_0", "MoETransformer/layer_1", "MoETransformer/embed.attend"],
    "wresnet-tiny": [
        "WideResNet/stem",
        "WideResNet/stage_0_block_0",
        "WideResNet/stage_1_block_0",
        "WideResNet/head",
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {"moe-tiny": {"num_layers": 4}}


@pytest.mark.representatives("gpt-tiny")
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_micro_batch_are_those_of_the_step(name: str) -> None:
    body, batch = loop_of(name, **OPTIONS.get(name, {}))
    layers = find_layers(body, batch=batch)
    assert [layer.name for layer in layers] == MODELS[name]
    data = {body.inputs[i] for i in batch}
    reads = [set(layer.inputs) - data for layer in layers]
    assert [len(read) for read in reads] == [0] + [1] * (len(layers) - 1), "one activation each"
    assert data & set(layers[0].inputs) and data & set(layers[-1].inputs), "inputs and targets"


@pytest.mark.representatives("gpt-tiny")
@pytest.mark.parametrize("name", MODELS)
def test_every_forward_equation_that_waits_for_data_is_in_a_layer(name: str) -> None:
    body, batch = loop_of(name, **OPTIONS.get(name, {}))
    regions = equation_regions(body)
    end = regions.index("backward")
    inside = {i for layer in find_layers(body, batch=batch) for i in layer.equations}
    waits = {body.inputs[i] for i in batch}
    for index, equation in enumerate(body.equations[:end]):
        if not waits.isdisjoint(o for o in equation.operands if isinstance(o, int)):
            waits.update(equation.results)
            assert index in inside


@pytest.mark.representatives("gpt-tiny-2")
@pytest.mark.parametrize(
    ("name", "num_layers"), [("gpt-tiny", 2), ("llama-tiny", 2), ("bert-tiny", 2)]
)
def test_a_number_of_layers_balances_micro_batches(name: str, num_layers: int) -> None:
    body, batch = loop_of(name, **OPTIONS.get(name, {}))
    layers = find_layers(body, num_layers, batch=batch)
    assert max(shares(layers)) < 1.25 / num_layers


def test_layers_are_even_where_activations_shrink() -> None:
    """Few bytes cross behind: that is no reason to put all cuts there."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for up, down in params:
                h = jnp.tanh(h @ up) @ down
                h = h.reshape(h.shape[0], -1, 2, h.shape[-1]).max(2)  # half as many positions
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    widths = [16 << i for i in range(6)]  # each block takes as many flops as the one before
    params = [(SHAPE((8, w), jnp.float32), SHAPE((w, 8), jnp.float32)) for w in widths]
    body, batch = looped(step, params, SHAPE((4, 64, 8), jnp.float32))
    layers = find_layers(body, 3, batch=batch)
    assert max(shares(layers)) < 1.3 / 3


def test_an_op_is_not_cut_from_its_only_reader() -> None:
    """As many bytes cross before a tanh as after it: it stays with its product."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w, b in params:
                h = jnp.tanh(h @ w + b)
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = [(SHAPE((8, 8), jnp.float32), SHAPE((8,), jnp.float32))] * 4
    body, batch = looped(step, params, SHAPE((4, 8), jnp.float32))
    made = {r: e.name for e in body.equations for r in e.results}
    for num_layers in (None, 2, 3):
        layers = find_layers(body, num_layers, batch=batch)
        assert [[made[v] for v in x.inputs] for x in layers[1:]] == [["tanh"]] * (len(layers) - 1)


def test_the_residual_stream_is_cut_behind_its_sum_also_where_it_starts() -> None:
    """What is added to the batch itself is not left for the next layer to add."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for up, down in params:
                h = h + jnp.tanh(h @ up) @ down
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = [(SHAPE((8, 32), jnp.float32), SHAPE((32, 8), jnp.float32))] * 3
    body, batch = looped(step, params, SHAPE((4, 8), jnp.float32))
    layers = find_layers(body, batch=batch)
    assert [len(layer.inputs) for layer in layers] == [1, 1, 1]


def test_a_mask_that_all_layers_share_does_not_cross() -> None:
    body, batch = loop_of("gpt-tiny-scan")
    assert [x.kept_bytes for x in find_layers(body, batch=batch)] == [0, *[STREAM] * 3]


def test_more_layers_than_equations_are_refused_in_a_loop_too() -> None:
    body, batch = loop_of("gpt-tiny")
    with pytest.raises(ArgumentError, match=r"5000 layers.*Ask for a number between"):
        find_layers(body, 5000, batch=batch)

"""Derived programs of micro-batches are those that a trace gives, or there are none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import TraceError
from autopar.ir.program import Constant, Operand, Program
from autopar.rewrite.accumulate import micro_batch_leaves
from autopar.rewrite.align import align
from autopar.rewrite.micro_batch_trace import derive_micro_batch
from autopar.tracer.trace_step import trace_step
from examples.models import build
from tests.unit.tracer.test_flatten import evaluate

W = jax.ShapeDtypeStruct((6, 4), jnp.float32)
X = jax.ShapeDtypeStruct((16, 6), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((16, 8, 8, 6), jnp.float32)
FILTERS = jax.ShapeDtypeStruct((3, 3, 6, 4), jnp.float32)
DEPTHWISE = jax.ShapeDtypeStruct((3, 3, 1, 6), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((16, 4), jnp.int32)

JAXPRS = ("jaxpr", "cond_jaxpr", "body_jaxpr", "branches")  # `bodies` count in their place

MODELS = [
    "mlp-tiny", "gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "moe-tiny", "dlrm-tiny",
    "wresnet-tiny", "gpt-tiny-scan",
]  # fmt: skip


def derived_and_traced(fn: Any, *args: Any, num: int = 4) -> tuple[Program | None, Program]:
    """The derived program and, from a trace, the one that the loop over micro-batches has."""
    whole = trace_step(fn, args)
    leaves = micro_batch_leaves(whole, num)
    part_args, kwargs = whole.call.rebuild(leaves)
    traced = trace_step(fn, part_args, kwargs, batch=whole.batch)
    derived = derive_micro_batch(whole, leaves)
    aligned = align(whole.program, traced.program, whole.name)
    if derived is None:
        return None, aligned
    assert (derived.avals, derived.out_avals) == (traced.avals, traced.out_avals)
    return align(whole.program, derived.program, whole.name), aligned


def described(program: Program) -> list[Any]:
    def operand(given: Operand) -> Any:
        return (str(given.value), given.aval) if isinstance(given, Constant) else given

    def result(value: int) -> Any:
        return value, program.avals[value]

    return [
        (
            e.name,
            str({name: given for name, given in e.params.items() if name not in JAXPRS}),
            [*map(operand, e.operands)],
            [*map(result, e.results)],
            e.scope,
            e.source_line,
        )
        for e in program.all_equations()
    ]


def check(fn: Any, *args: Any, num: int = 4) -> None:
    derived, traced = derived_and_traced(fn, *args, num=num)
    assert derived is not None
    assert described(derived) == described(traced)
    assert (derived.inputs, derived.outputs) == (traced.inputs, traced.outputs)


@pytest.mark.representatives("gpt-tiny-4", "gpt-tiny-scan-4", "moe-tiny-2", "wresnet-tiny-4")
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_train_steps_of_the_examples(name: str, num: int) -> None:
    example = build(name)
    check(example.train_step, example.abstract_state(), example.abstract_batch(), num=num)


def convolved(w: Any, x: Any, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def pooled(w: Any, x: Any) -> Any:
    y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(y) * jnp.sum(w)


def dropped(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def scanned(w: Any, x: Any) -> Any:
    """Layers with dropout and a mask that JAX moves out of the loop."""

    def layer(h: Any, part: Any) -> Any:
        mask = jnp.where(jnp.arange(4) < 3, 1.0, 0.0)[None]
        return jnp.tanh(dropped(h) @ part) * mask, jnp.mean(h, 1)

    h, means = jax.lax.scan(layer, x[:, :4], jnp.stack([w[:4], w[:4] ** 2, w[1:5]]))
    return jnp.sum(h**2) + jnp.sum(means)


def newton(w: Any, x: Any) -> Any:
    """A loop that ends when all rows are done."""

    def is_open(carry: Any) -> Any:
        return (jnp.max(jnp.abs(carry[1])) > 1e-3) & (carry[2] < 20)

    def improve(carry: Any) -> Any:
        y, _, count = carry
        new = y - (y**3 + y - x @ w) / (3 * y**2 + 1)
        return new, new - y, count + 1

    start = jnp.zeros((len(x), 4))
    return jax.lax.while_loop(is_open, improve, (start, start + 1, 0))[0]


def repeated(x: Any, scale: Any) -> Any:
    return jax.lax.scan(lambda h, _: (h * scale, None), x, None, length=3)[0]


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(jnp.sum(w) > 0, lambda a: jnp.sin(a @ w), lambda a: (a + 1) @ w, x)


STEPS = {
    "elementwise": lambda w, x: jnp.where(x > 0, jnp.tanh(x), x**3) @ w,
    "a bias": lambda w, x: x @ w + jnp.sum(w, 0),
    "the mean": lambda w, x: jnp.mean((x @ w) ** 2),
    "rows merged and split": lambda w, x: x.reshape(-1, 2).reshape(-1, 2, 3).reshape(-1, 6) @ w,
    "transposed": lambda w, x: w.T @ x.T,
    "softmax": lambda w, x: jnp.sum(jax.nn.log_softmax(x @ w)),
    "features cut and joined": lambda w, x: jnp.concatenate([x[:, :2], x[:, 4:]], 1) @ w[:4],
    "padding": lambda w, x: jnp.pad(x @ w, ((0, 0), (1, 2))),
    "features sorted": lambda w, x: jnp.sort(x @ w, 1) + jnp.cumsum(x @ w, 1)[:, ::-1],
    "the largest feature": lambda w, x: jnp.argmax(x @ w, 1),
    "an embedding": lambda w, tokens: w[tokens],
    "one hot": lambda w, tokens: jax.nn.one_hot(tokens, 6) @ w,
    "labels": lambda w, x: jnp.take_along_axis(x @ w, jnp.argmax(x @ w, 1)[:, None], 1),
    "a slice at some place": lambda w, x: jax.lax.dynamic_slice_in_dim(x @ w, jnp.argmax(w), 2, 1),
    "dropout": lambda w, x: dropped(x) @ w,
    "recomputed": jax.grad(lambda w, x: jnp.sum(jax.checkpoint(jnp.tanh)(x @ w))),
    "gradient": jax.grad(lambda w, x: jnp.mean(jax.nn.relu(x @ w))),
    "a scan over layers": scanned,
    "gradient of a scan": jax.grad(scanned),
    "a loop with a condition": newton,
    "branches": branched,
    "a loop that reads a number": lambda w, x: repeated(x @ w, jnp.float32(3.0)),
    "features split": lambda w, x: sum(jnp.split(x @ w, 2, 1)),
    "features one by one": lambda w, x: sum(column**2 for column in (x @ w).T),
    "features stacked": lambda w, x: jnp.stack([x @ w, x @ w**2], 1),
    "features repeated": lambda w, x: jnp.tile(x @ w, (1, 3)),
    "the largest features": lambda w, x: jax.lax.top_k(x @ w, 2)[0],
    "frequencies": lambda w, x: jnp.abs(jnp.fft.rfft(x @ w)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    batch = TOKENS if name in ("an embedding", "one hot") else X
    check(STEPS[name], W, batch)


def test_gradients_of_embeddings_convolutions_and_pooling() -> None:
    check(jax.grad(lambda w, tokens: jnp.sum(w[tokens] ** 2)), W, TOKENS)
    check(jax.grad(lambda w, x: jnp.sum(convolved(w, x) ** 2), (0, 1)), FILTERS, IMAGES)
    check(jax.grad(lambda w, x: jnp.sum(convolved(w, x, 6) ** 2), (0, 1)), DEPTHWISE, IMAGES)
    check(jax.grad(pooled, 1), FILTERS, IMAGES)


REFUSED = {
    "places in the batch": lambda w, x: x[jnp.arange(len(x))] @ w,
    "a row": lambda w, x: x[0] @ w,
    "rows cut off": lambda w, x: x[1:] @ w,
    "rows reversed": lambda w, x: x[::-1] @ w,
    "rows sorted": lambda w, x: jnp.sort(x, 0) @ w,
    "rows summed up one by one": lambda w, x: jnp.cumsum(x, 0) @ w,
    "the place of a row": lambda w, x: jnp.argmax(x @ w, 0),
    "all rows with all rows": lambda w, x: x @ x.T,
    "rows beside a constant": lambda w, x: jnp.concatenate([x, jnp.ones((16, 6))]) @ w,
    "rows inside of features": lambda w, x: x.T.reshape(-1),
    "rows with an input": lambda w, x: w.reshape(24)[:16, None] * x,
    "a loop over rows": lambda w, x: jax.lax.scan(lambda h, row: (h + row, h), x[0], x)[1] @ w,
    "two ways to cut": lambda w, x: x.reshape(2, 8, 6) @ w,
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_in_which_the_places_of_rows_matter_are_traced(name: str) -> None:
    whole = trace_step(REFUSED[name], (W, X))
    assert derive_micro_batch(whole, micro_batch_leaves(whole, 4)) is None


def test_a_single_row_is_derived_where_its_trace_is_another_program() -> None:
    def picked(w: Any, x: Any) -> Any:
        logits = x @ w
        return jnp.take_along_axis(logits, jnp.argmax(logits, 1)[:, None], 1) ** 2

    whole = trace_step(picked, (W, X))
    leaves = micro_batch_leaves(whole, 16)
    part_args, kwargs = whole.call.rebuild(leaves)
    traced = trace_step(picked, part_args, kwargs, batch=whole.batch)
    with pytest.raises(TraceError, match="depends on the batch size"):
        align(whole.program, traced.program, whole.name)
    derived = derive_micro_batch(whole, leaves)
    assert derived is not None
    w = jax.random.normal(jax.random.key(0), W.shape)
    row = jax.random.normal(jax.random.key(1), (1, 6))
    (made,) = evaluate(derived.program, w, row)
    assert jnp.array_equal(made, picked(w, row))

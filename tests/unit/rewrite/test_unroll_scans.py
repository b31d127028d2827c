"""Which scans are written out, what each trip reads, and what the trips are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.errors import TraceError
from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.layer_boundaries import layers_by_marks
from autopar.rewrite.layers import find_layers
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.tracer.regions import equation_regions, module_name
from autopar.tracer.trace_step import trace_step
from examples.models.gpt import GPTConfig, example

SHAPE = jax.ShapeDtypeStruct
TRIPS = 3
WEIGHTS = SHAPE((TRIPS, 8, 8), jnp.float32)
X = SHAPE((4, 8), jnp.float32)


def traced(forward: Callable[..., Any], params: Any = WEIGHTS, x: Any = X) -> TracedStep:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(forward)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return trace_step(step, (params, x))


def gpt(**options: Any) -> TracedStep:
    config = GPTConfig(16, TRIPS, 2, seq_len=8, vocab_size=32, scan_layers=True, **options)
    model = example(config, batch_size=2)
    return trace_step(model.train_step, (model.abstract_state(), model.abstract_batch()))


def over_layers(w: Any, x: Any, wrap: Callable[..., Any] = lambda f: f) -> Any:
    x, _ = lax.scan(wrap(lambda x, w: (x + jnp.tanh(x @ w), None)), x, w)
    return (x**2).mean()


def scans(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.name == "scan"]


def products(program: Program) -> list[str]:
    return [module_name(e.scope) for e in program.equations if e.name == "dot_general"]


# -- which scans


def over_time(w: Any, xs: Any) -> Any:
    def cell(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x + h @ w[0])
        return h, h

    return lax.scan(cell, jnp.zeros((8,)), xs)[1].sum()


def over_chunks_of_a_vocabulary(w: Any, x: Any) -> Any:
    def chunk(total: Any, w: Any) -> tuple[Any, None]:
        return jnp.logaddexp(total, jax.nn.logsumexp(x @ w, -1)), None

    return lax.scan(chunk, jnp.zeros((4,)), w)[0].sum()


def over_equal_layers(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, _: (jnp.tanh(x @ w[0]), None), x, length=TRIPS)[0].sum()


def over_a_table_of_positions(w: Any, x: Any) -> Any:
    def cell(h: Any, position: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ w[0] + position), None

    return lax.scan(cell, x, w[1])[0].sum()


@pytest.mark.parametrize(
    "forward",
    [over_time, over_chunks_of_a_vocabulary, over_equal_layers, over_a_table_of_positions],
)
def test_other_scans_stay(forward: Callable[..., Any]) -> None:
    step = traced(forward)
    assert scans(step.program)
    assert unroll_scans(step) is step


def test_a_scan_over_micro_batches_stays() -> None:
    def step(w: Any, xs: Any) -> Any:
        def one(total: Any, x: Any) -> tuple[Any, None]:
            return total + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), None

        total, _ = lax.scan(one, jnp.zeros_like(w), xs)
        return w - total

    args = (SHAPE((8, 8), jnp.float32), SHAPE((TRIPS, 4, 8), jnp.float32))
    step = trace_step(step, args)
    assert unroll_scans(step) is step


def test_a_scan_in_the_update_stays() -> None:
    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(over_layers)(w, x)
        # Orthogonal updates, layer by layer.
        _, updates = lax.scan(lambda c, g: (c, g @ g.T @ g), 0.0, grads)
        return w - updates

    after = unroll_scans(trace_step(step, (WEIGHTS, X)))
    (left,) = scans(after.program)
    regions = equation_regions(after.program)
    assert regions[after.program.equations.index(left)] == "update"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_forward_and_backward_scans_are_written_out(wrap: Callable[..., Any]) -> None:
    step = traced(lambda w, x: over_layers(w, x, wrap))
    assert len(scans(step.program)) == 2
    after = unroll_scans(step)
    assert not scans(after.program)
    assert after.program.outputs != step.program.outputs
    types = [after.program.avals[o] for o in after.program.outputs]
    assert [(t.shape, t.dtype) for t in types] == [(t.shape, t.dtype) for t in step.out_avals]


def test_a_forward_pass_alone_is_written_out() -> None:
    after = unroll_scans(trace_step(over_layers, (WEIGHTS, X)))
    assert products(after.program) == ["layer_0", "layer_1", "layer_2"]


# -- what trips read


def test_each_trip_reads_one_slice_and_only_gradients_are_stacked() -> None:
    step = unroll_scans(traced(over_layers))
    program = step.program
    (weights,) = [v for i, v in enumerate(program.inputs) if i not in step.batch]
    slices = [e for e in program.equations if e.name == "slice"]
    assert len(slices) == TRIPS, "the backward pass reads those of the forward pass"
    assert {e.operands for e in slices} == {(weights,)}
    assert [e.params["start_indices"][0] for e in slices] == list(range(TRIPS))
    (stack,) = [e for e in program.equations if e.name == "concatenate"]
    assert program.avals[stack.results[0]].shape == WEIGHTS.shape
    readers = [e.name for e in program.equations if weights in e.operands]
    assert sorted(readers) == ["slice"] * TRIPS + ["sub"], "and the update"


def test_weights_that_the_step_stacks_itself_are_read_one_by_one() -> None:
    weights = [SHAPE((8, 8), jnp.float32)] * TRIPS
    step = unroll_scans(traced(lambda w, x: over_layers(jnp.stack(w), x), weights))
    program = step.program
    names = [e.name for e in program.equations]
    assert not {"stack", "unstack", "concatenate", "slice", "scan"} & set(names)
    state = [v for i, v in enumerate(program.inputs) if i not in step.batch]
    for number, weight in enumerate(state):
        readers = [e for e in program.equations if weight in e.operands]
        assert {module_name(e.scope) for e in readers} == {f"layer_{number}", ""}


def test_what_all_trips_share_is_broadcast_in_each() -> None:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        mask = jnp.arange(4)[:, None] < jnp.arange(8)  # JAX moves it out of the loop
        return x + jnp.where(jnp.broadcast_to(mask, (2, 4, 8)), x @ w, 0.0), None

    batch = SHAPE((2, 4, 8), jnp.float32)
    before = traced(lambda w, x: lax.scan(layer, x, w)[0].sum(), x=batch)
    forward, backward = scans(before.program)
    mask = {o for s in (forward, backward) for o in s.operands if isinstance(o, int)}
    assert any(before.program.avals[o].shape == (2, 4, 8) for o in mask)
    after = unroll_scans(before).program
    spread = [
        e
        for e in after.equations
        if e.name == "broadcast_in_dim" and after.avals[e.results[0]].dtype == bool
        if after.avals[e.results[0]].shape == (2, 4, 8)
    ]
    assert [module_name(e.scope) for e in spread] == [f"layer_{i}" for i in range(TRIPS)]
    for number, equation in enumerate(spread):
        readers = [e for e in after.equations if equation.results[0] in e.operands]
        assert {module_name(e.scope) for e in readers} == {f"layer_{number}"}
        assert len(readers) == 2, "forward and backward"


# -- names


def test_trips_are_called_after_their_module() -> None:
    program = unroll_scans(gpt()).program
    names = [f"GPT/layers_{i}" for i in range(TRIPS)]
    modules = products(program)
    for name in names:
        # Six products forward, each with two in the backward pass.
        assert sum(module.startswith(name + "/") for module in modules) == 18
    layers = find_layers(program, batch=gpt().batch)
    assert [layer.name for layer in layers] == [*names, "GPT/embed.attend"]
    assert layers[1].flops == layers[2].flops
    assert all(e.scope == str(e.name_stack) for e in program.equations if e.name == "dot_general")


def test_two_stacks_of_layers_are_told_apart() -> None:
    def forward(w: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w[0])
        return over_layers(w[1], x)

    step = unroll_scans(traced(forward, [WEIGHTS, WEIGHTS]))
    expected = [f"layer_{i}" for i in range(2 * TRIPS)]
    layers = find_layers(step.program, batch=step.batch)
    assert [layer.name for layer in layers] == expected
    backward = products(step.program)[2 * TRIPS :]
    assert backward == [name for name in reversed(expected) for _ in range(2)][: len(backward)]


def test_loops_in_a_trip_are_named_too() -> None:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w), x), None

    step = unroll_scans(traced(lambda w, x: lax.scan(layer, x, w)[0].sum()))
    forward = scans(step.program)[:TRIPS]
    names = [module_name(e.scope) for s in forward for e in s.bodies[0].equations]
    assert set(names) == {f"layer_{i}" for i in range(TRIPS)}
    numbers = [v for e in step.program.equations for v in e.results]
    numbers += [
        v
        for e in step.program.equations
        for b in e.bodies
        for v in (*b.inputs, *(r for inner in b.equations for r in inner.results))
    ]
    assert len(numbers) == len(set(numbers)), "each value has a number of its own"


def test_a_mark_in_the_body_is_still_refused() -> None:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        x = jnp.tanh(x @ w)
        autopar.mark_layer_boundary()
        return x, None

    step = unroll_scans(traced(lambda w, x: lax.scan(layer, x, w)[0].sum()))
    assert not scans(step.program)
    with pytest.raises(TraceError, match="inside a scan body"):
        layers_by_marks(step.program, step.batch)

"""Stacks over layers in parts: which rows go where, and programs that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from autopar.ir.program import Program
from autopar.ir.rows import join_rows, take_rows
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import attach_layers, loop_batch
from autopar.rewrite.layers import find_layers
from autopar.rewrite.slices_inside import with_slices_inside
from autopar.rewrite.split_stacks import SplitStep, StackPart, split_stacks
from autopar.rewrite.step_source import StepSource
from autopar.tracer.trace import StepOptions

WIDTH, LAYERS, ROWS = 4, 4, 8
PARAMS = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
MOMENT = jnp.ones((LAYERS, WIDTH, WIDTH))
BATCH = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))

Update = Callable[[Array, Array, Array], tuple[Array, Array]]


def step_with(update: Update) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            x, _ = jax.lax.scan(lambda x, own: (jnp.tanh(x @ own), None), batch, w)
            return jnp.mean(x**2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        w, moment = update(state["w"], state["m"], grad)
        return {"w": w, "m": moment}, value

    return step


def plain(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    moment = 0.9 * moment + grad
    return w - 0.1 * moment, moment


def by_norm(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    norm = jnp.sqrt(jnp.sum(grad**2)) + jnp.max(jnp.abs(w)) + jnp.mean(w, axis=0).sum()
    moment = 0.9 * moment + grad / norm
    own = jnp.sum(w**2, axis=(1, 2), keepdims=True)
    return w - 0.1 * moment * own, moment


def by_sum_of_a_constant(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    return w - 0.1 * grad * jnp.sum(np.float32(2.0)), moment


def by_mean_of_layers(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    moment = moment + jnp.mean(grad**2, axis=0, keepdims=True)
    return w - 0.1 * grad / jnp.sqrt(moment) * jnp.arange(WIDTH, dtype=jnp.float32), moment


def by_rates(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    """A factor per layer: JAX multiplies arrays of a size with those of size one."""
    moment = 0.9 * moment + grad
    rates = 0.5 ** jnp.arange(LAYERS, dtype=jnp.float32)
    return w - 0.1 * moment * rates.reshape(-1, 1, 1), moment


def sorted_layers(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    moment = jnp.sort(moment + grad, axis=0)
    return w - 0.1 * moment, moment


def split(update: Update, stacks: Any = None) -> tuple[TracedStep, SplitStep, list[int]]:
    """The step on two stages, split."""
    state = {"m": MOMENT, "w": PARAMS}
    source = StepSource.of(step_with(update), (state, BATCH), {}, StepOptions())
    step = source.as_loop(2)
    assert step.loop is not None
    loop = step.program.equations[step.loop]
    layers = find_layers(loop.bodies[0], 2, batch=loop_batch(loop))
    stage_of = list(attach_layers(loop.bodies[0], layers).layer_of)
    return step, split_stacks(step, stage_of, 2, stacks), stage_of


def run(program: Program, arrays: list[Any]) -> list[Any]:
    """What a program computes, equation by equation."""
    env: dict[int, Any] = {
        **dict(program.captured),
        **dict(zip(program.inputs, arrays, strict=True)),
    }

    def read(operand: Any) -> Any:
        return env[operand] if isinstance(operand, int) else operand.value

    for equation in program.equations:
        operands = [read(o) for o in equation.operands]
        if equation.name == "scan":
            results = run_scan(equation, operands)
        else:
            results = equation.primitive.bind(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        env.update(zip(equation.results, results, strict=True))
    return [read(o) for o in program.outputs]


def run_scan(equation: Any, operands: list[Any]) -> list[Any]:
    (body,), params = equation.bodies, equation.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    xs, rows = operands[num_consts + num_carry :], []
    for trip in range(params["length"]):
        out = run(body, [*consts, *carry, *(x[trip] for x in xs)])
        carry, made = out[:num_carry], out[num_carry:]
        rows.append(made)
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def leaves_of(split: SplitStep) -> list[Any]:
    whole = [MOMENT, PARAMS, BATCH]
    return [whole[i] if rows is None else take_rows(whole[i], rows) for i, rows in split.inputs]


def joined(split: SplitStep, results: list[Any]) -> list[Any]:
    parts: dict[int, list[Any]] = {}
    for (position, _), array in zip(split.outputs, results, strict=True):
        parts.setdefault(position, []).append(array)
    return [own[0] if len(own) == 1 else jnp.concatenate(own) for own in parts.values()]


@pytest.mark.parametrize(
    "update",
    [plain, by_norm, by_sum_of_a_constant, by_mean_of_layers, by_rates, sorted_layers],
)
def test_the_same_is_computed(update: Update) -> None:
    _, made, stage_of = split(update)
    state = {"m": MOMENT, "w": PARAMS}
    want = jax.tree.leaves(jax.jit(step_with(update))(state, BATCH))
    inside, stages = with_slices_inside(made.step, stage_of, made.pieces)
    for step in (made.step, inside):
        got = joined(made, run(step.program, leaves_of(made)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert inside.loop is not None
    assert len(stages) == len(inside.program.equations[inside.loop].bodies[0].equations)


@pytest.mark.parametrize("update", [plain, by_rates])
def test_parameters_moments_and_results_are_split_alike(update: Update) -> None:
    step, made, _ = split(update)
    halves = [((0, 2),), ((2, 4),)]
    assert made.inputs == (
        (0, halves[0]),
        (0, halves[1]),
        (1, halves[0]),
        (1, halves[1]),
        (2, None),
    )
    assert [own for own in made.outputs if own[1] is not None] == list(made.inputs[:4])
    assert made.owners == {0: 0, 1: 1, 2: 0, 3: 1}
    assert made.step.state == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert made.step.call.paths[0] == made.step.call.paths[1] == step.call.paths[0]
    # Nothing puts a whole stack together.
    sizes = [
        made.step.program.avals[r].shape for e in made.step.program.equations for r in e.results
    ]
    assert PARAMS.shape not in sizes


def test_slices_of_parts_are_taken_inside_of_the_loop() -> None:
    _, made, stage_of = split(plain)
    inside, _ = with_slices_inside(made.step, stage_of, made.pieces)
    assert inside.loop is not None and made.step.loop is not None
    before = inside.program.equations[: inside.loop]
    assert not [e for e in before if e.name in ("slice", "squeeze")]
    names = [e.name for e in inside.program.equations[inside.loop].bodies[0].equations]
    assert names.count("slice") >= LAYERS


def test_state_that_couples_layers_stays_whole() -> None:
    _, made, _ = split(sorted_layers)
    assert made.inputs == ((0, None), (1, ((0, 2),)), (1, ((2, 4),)), (2, None))


def test_nothing_is_split_if_no_argument_should_be() -> None:
    _, made, _ = split(plain, {})
    assert all(rows is None for _, rows in made.inputs)


def test_parts_that_are_given() -> None:
    """Only these arguments are split, in these parts, whoever reads their rows."""
    uneven = (StackPart(((0, 1),), 0), StackPart(((1, 4),), 1))
    _, made, _ = split(plain, {1: uneven})
    assert made.inputs == ((0, None), (1, ((0, 1),)), (1, ((1, 4),)), (2, None))
    state = {"m": MOMENT, "w": PARAMS}
    want = jax.tree.leaves(jax.jit(step_with(plain))(state, BATCH))
    got = joined(made, run(made.step.program, leaves_of(made)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# -- scans of scans

OUTER = 2


def nested_step(update: Update) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            inner = lambda x, own: (jnp.tanh(x @ own), None)  # noqa: E731
            outer = lambda x, own: jax.lax.scan(inner, x, own)[0]  # noqa: E731
            x, _ = jax.lax.scan(lambda x, own: (outer(x, own), None), batch, w)
            return jnp.mean(x**2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        w, moment = update(state["w"], state["m"], grad)
        return {"w": w, "m": moment}, value

    return step


def by_sums_of_trips(w: Array, moment: Array, grad: Array) -> tuple[Array, Array]:
    """The moment of a layer depends on all layers of its outer trip, so trips are not divided."""
    moment = moment + jnp.sum(grad**2, axis=1, keepdims=True)
    return w - 0.1 * grad / jnp.sqrt(moment), moment


HALVES = ((0, 1),), ((1, 2),)
THIRDS = ((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 1)), ((1, 2), (1, 3))


@pytest.mark.parametrize(
    ("update", "num_stages", "moments", "weights"),
    [
        (plain, 2, HALVES, HALVES),
        (plain, 3, THIRDS, THIRDS),
        (by_norm, 3, HALVES, THIRDS),
        (by_sums_of_trips, 2, HALVES, HALVES),
        (by_sums_of_trips, 3, HALVES, THIRDS),
    ],
)
def test_layers_of_scans_of_scans(
    update: Update, num_stages: int, moments: Any, weights: Any
) -> None:
    """Each stage has the layers that it runs, of whole outer trips or of parts of them; a moment
    that is made with sums over the layers of a trip is split by trips."""
    params = jnp.concatenate([PARAMS, PARAMS[:2]]).reshape(OUTER, 3, WIDTH, WIDTH)
    moment = jnp.ones_like(params)
    state = {"m": moment, "w": params}
    function = nested_step(update)
    source = StepSource.of(function, (state, BATCH), {}, StepOptions())
    step = source.as_loop(2)
    assert step.loop is not None
    loop = step.program.equations[step.loop]
    layers = find_layers(loop.bodies[0], 6, batch=loop_batch(loop))
    layer_of = attach_layers(loop.bodies[0], layers).layer_of
    stage_of = [x if x < 0 else x * num_stages // 6 for x in layer_of]
    made = split_stacks(step, stage_of, num_stages)
    assert made.inputs[:-1] == (*((0, rows) for rows in moments), *((1, rows) for rows in weights))
    assert set(made.owners.values()) == set(range(num_stages))
    equations = made.step.program.equations
    shapes = [made.step.program.avals[r].shape for e in equations for r in e.results]
    if update is plain:
        assert params.shape not in shapes  # nothing puts a whole stack together
    whole = [moment, params, BATCH]
    leaves = [whole[i] if rows is None else take_rows(whole[i], rows) for i, rows in made.inputs]
    parts: dict[int, list[Any]] = {}
    for (position, rows), array in zip(made.outputs, run(made.step.program, leaves), strict=True):
        parts.setdefault(position, []).append((rows, array))
    want = jax.tree.leaves(jax.jit(function)(state, BATCH))
    for position, expected in enumerate(want):
        rows, arrays = zip(*parts[position], strict=True)
        got = arrays[0] if rows[0] is None else join_rows(arrays, rows, jnp.concatenate)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)

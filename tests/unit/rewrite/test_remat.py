"""A program with layers computed again gives the same, keeps less and is marked as what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from autopar import _jax
from autopar.ir.graph import check_graph
from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.layers import find_layers, worth_recomputing
from autopar.rewrite.remat import rematerialise, with_remat
from autopar.sharding.assemble import unsharded
from autopar.tracer.build import build_graph
from autopar.tracer.costs import aval_bytes
from autopar.tracer.regions import BACKWARD, equation_regions, module_name
from autopar.tracer.trace_step import trace_step
from examples.models.gpt import GPTConfig, example

RNG = np.random.default_rng(0)
# XLA's scheduler for CPUs usually minds parallelism; this one minds memory, as those for GPUs do.
FOR_MEMORY: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def train_step(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), loss

    return step


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1])


def unrolled_loss(params: Any, x: Any, block: Callable[..., Any] = block) -> Any:
    for w in params:
        x = block(x, w)
    return (x**2).mean()


def scanned_loss(params: Any, x: Any, block: Callable[..., Any] = block) -> Any:
    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params)
    return (x**2).mean()


PARAMS = [(array(8, 16), array(16, 8)) for _ in range(4)]
STACKED = jax.tree.map(lambda *leaves: np.stack(leaves), *PARAMS)
X = array(4, 8)


def recomputed(traced: TracedStep) -> TracedStep:
    layers = worth_recomputing(find_layers(traced.program, batch=traced.batch))
    assert layers
    return with_remat(traced, layers)


def one_device(traced: TracedStep) -> Callable[..., Any]:
    """The program itself as a function, nothing sharded."""
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    return annotated_function(traced.program, unsharded(traced.program), mesh)


def check(step: Callable[..., Any], *args: Any) -> tuple[TracedStep, TracedStep]:
    """The rewritten step gives what the step gives, and makes a sound graph."""
    before = trace_step(step, args)
    num_values = len(before.program.avals)
    after = recomputed(before)
    assert len(before.program.avals) == num_values, "the program itself is left as it was"
    check_graph(build_graph(after))
    got = jax.jit(one_device(after))(*before.call.leaves)
    want = jax.jit(step)(*args)
    for ours, theirs in zip(got, jax.tree.leaves(want), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if jnp.issubdtype(theirs.dtype, jnp.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return before, after


def count(program: Program, name: str) -> int:
    return sum(e.name == name for e in program.equations)


def read_in_backward(program: Program) -> set[int]:
    regions = equation_regions(program)
    return {
        operand
        for equation, region in zip(program.equations, regions, strict=True)
        if region == BACKWARD and equation.name != "optimization_barrier"
        for operand in equation.operands
        if isinstance(operand, int)
    }


def test_unrolled_layers() -> None:
    before, after = check(train_step(unrolled_loss), PARAMS, X)
    assert after.remat == ("layer 0", "layer 1", "layer 2")
    assert count(after.program, "optimization_barrier") == 3
    # The backward pass reads of the forward pass what the last layer left, and the stream.
    made = {r for e in before.program.equations[:60] for r in e.results}
    layers = find_layers(before.program, batch=before.batch)
    early = {
        r for x in layers[:3] for i in x.equations for r in before.program.equations[i].results
    }
    kept = {v for layer in layers[1:] for v in layer.inputs}
    assert read_in_backward(before.program) & early & made - kept
    assert not read_in_backward(after.program) & early - kept


def test_only_some_layers() -> None:
    traced = trace_step(train_step(unrolled_loss), (PARAMS, X))
    layers = find_layers(traced.program, batch=traced.batch)
    program = rematerialise(traced.program, [layers[1]])
    assert count(program, "optimization_barrier") == 1
    assert rematerialise(traced.program, []).equations == traced.program.equations


def test_originals_that_only_the_backward_pass_read_are_gone() -> None:
    before, after = check(train_step(unrolled_loss), PARAMS, X)
    # sin's derivative, cos, was computed in the forward pass; now only with the copies.
    regions = equation_regions(after.program)
    where = [r for e, r in zip(after.program.equations, regions, strict=True) if e.name == "cos"]
    assert where.count(BACKWARD) == 3
    assert len(where) == count(before.program, "cos") == 4


def test_copies_are_backward_equations_of_the_same_module() -> None:
    def named_loss(params: Any, x: Any) -> Any:
        for index, w in enumerate(params):
            with jax.named_scope(f"block_{index}"):
                x = block(x, w)
        return (x**2).mean()

    before, after = check(train_step(named_loss), PARAMS, X)
    assert after.remat == ("block_0", "block_1", "block_2")
    originals = {r for e in before.program.equations for r in e.results}
    regions = equation_regions(after.program)
    copied = [
        (equation, region)
        for equation, region in zip(after.program.equations, regions, strict=True)
        if equation.name == "sin" and originals.isdisjoint(equation.results)
    ]
    assert [module_name(e.scope) for e, _ in copied] == ["block_2", "block_1", "block_0"]
    assert {region for _, region in copied} == {BACKWARD}
    assert all("rematted_computation" in str(e.name_stack) for e, _ in copied)


def test_the_barrier_holds_the_cotangent_and_no_parameter() -> None:
    _, after = check(train_step(unrolled_loss), PARAMS, X)
    equations = after.program.equations
    regions = equation_regions(after.program)
    maker = {r: i for i, e in enumerate(equations) for r in e.results}
    parameters = set(after.program.inputs[:-1])
    barriers = [e for e in equations if e.name == "optimization_barrier"]
    read = {o for e in equations for o in e.operands if isinstance(o, int)}
    for barrier in barriers:
        assert not parameters & set(barrier.operands)
        cotangents = [
            (o, r)
            for o, r in zip(barrier.operands, barrier.results, strict=True)
            if isinstance(o, int) and o in maker and regions[maker[o]] == BACKWARD
        ]
        assert len(cotangents) == 1
        # XLA drops what leaves a barrier unread, and with it the order.
        assert cotangents[0][1] in read


def test_the_barrier_holds_no_zeros_that_a_slope_selects() -> None:
    """They are what the backward pass of a `relu` reads first, and are there from the beginning."""

    def loss(params: Any, x: Any) -> Any:
        for number, w in enumerate(params):
            with jax.named_scope(f"layer_{number}"):
                x = jax.nn.relu(jax.nn.relu(x @ w[0]) @ w[1])
        return (x**3).mean()

    _, after = check(train_step(loss), PARAMS, X)
    barriers = [e for e in after.program.equations if e.name == "optimization_barrier"]
    constant = after.program.made_of_constants()
    assert all(constant.isdisjoint(barrier.inputs) for barrier in barriers)
    assert [len(barrier.operands) for barrier in barriers] == [2] * (len(PARAMS) - 1)


def test_casts_of_parameters_are_shared() -> None:
    def loss(params: Any, x: Any) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return unrolled_loss(low, x.astype(jnp.bfloat16)).astype(jnp.float32)

    traced = trace_step(train_step(loss), (PARAMS, X))
    after = recomputed(traced)
    parameters = set(traced.program.inputs[:-1])

    def casts(program: Program) -> int:
        return sum(
            e.name == "convert_element_type" and e.operands[0] in parameters
            for e in program.equations
        )

    assert casts(traced.program) == casts(after.program) == 8


@pytest.mark.ci
def test_random_bits_are_made_again_from_the_same_key() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, key = batch
        for index, w in enumerate(params):
            mask = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, x.shape)
            x = jnp.where(mask, block(x, w), 0)
        return (x**2).mean()

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        before, after = check(train_step(loss), PARAMS, (X, key))
        made = {r for e in before.program.equations if e.name == "random_bits" for r in e.results}
        assert made
        assert count(after.program, "random_bits") > count(before.program, "random_bits")


@pytest.mark.ci
def test_keys_in_the_state_pass_the_barrier() -> None:
    """A mask made of a key that is no part of the batch would else be merged with the original."""

    def step(state: Any, x: Any) -> Any:
        params, key = state

        def loss(params: Any) -> Any:
            h = x
            for index, w in enumerate(params):
                mask = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, h.shape)
                h = jnp.where(mask, block(h, w), 0)
            return (h**2).mean()

        loss_value, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, jax.random.split(key)[0]), loss_value

    _, after = check(step, (PARAMS, jax.random.key(1)), X)
    shielded = {
        r for e in after.program.equations if e.name == "optimization_barrier" for r in e.results
    }
    bits = [e for e in after.program.equations if e.name == "random_bits"]
    assert sum(bool(shielded & set(e.operands)) for e in bits) == 3


def test_effects_are_not_repeated() -> None:
    seen: list[float] = []

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = block(x, w)
            jax.debug.callback(lambda total: seen.append(float(total)), jnp.tanh(x).sum())
        return (x**2).mean()

    check(train_step(loss), PARAMS, X)
    jax.effects_barrier()
    assert len(seen) == 2 * 4, "once per layer, in the step and in the reference"


def test_values_that_the_step_returns_stay() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h, seen = x, []
            for w in params:
                inner = jnp.sin(h @ w[0])
                seen.append(inner)
                h = h + jnp.tanh(inner @ w[1])
            return (h**2).mean(), seen

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, seen

    check(step, PARAMS, X)


def test_derivative_whose_first_equation_reads_no_cotangent() -> None:
    @jax.custom_vjp
    def twice_as_steep(x: Any) -> Any:
        return jnp.sin(x)

    twice_as_steep.defvjp(
        lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(jnp.exp(x * 0.1)),)
    )

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = twice_as_steep(jnp.tanh(x @ w[0]) @ w[1])
        return (x**2).mean()

    _, after = check(train_step(loss), PARAMS, X)
    barriers = [e for e in after.program.equations if e.name == "optimization_barrier"]
    assert all(len(barrier.operands) >= 2 for barrier in barriers)


@pytest.mark.ci
def test_layers_with_loops_and_branches_inside() -> None:
    def loss(params: Any, x: Any) -> Any:
        for index, w in enumerate(params):
            with jax.named_scope(f"block_{index}"):
                h = jnp.sin(x @ w[0])
                h, means = lax.scan(lambda c, s: (jnp.tanh(c) * s, c.mean()), h, jnp.arange(3.0))
                h = lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h) @ w[1]
                turns = lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i, lax.stop_gradient(h))
                x = x + h * jnp.cos(turns) + means.sum()
        return (x**2).mean()

    before, after = check(train_step(loss), PARAMS, X)
    assert len(after.remat) == 3
    names = ("scan", "cond")
    assert all(count(after.program, n) > count(before.program, n) for n in names)


@pytest.mark.ci
def test_own_checkpoints_of_the_user_stay_and_compose() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    for own in (jax.checkpoint(block), jax.checkpoint(block, policy=policy)):

        def every_second(params: Any, x: Any, own: Callable[..., Any] = own) -> Any:
            for index, w in enumerate(params):
                x = (own if index % 2 else block)(x, w)
            return (x**2).mean()

        check(train_step(every_second), PARAMS, X)


def test_nothing_is_left_to_recompute_if_the_user_does_it_all() -> None:
    step = train_step(lambda params, x: unrolled_loss(params, x, jax.checkpoint(block)))
    traced = trace_step(step, (PARAMS, X))
    assert not worth_recomputing(find_layers(traced.program, batch=traced.batch))


def test_equal_programs_of_other_shapes_change_alike() -> None:
    step = train_step(unrolled_loss)
    large = trace_step(step, (PARAMS, np.concatenate([X, X])))
    small = trace_step(step, (PARAMS, X))
    layers = worth_recomputing(find_layers(large.program, batch=large.batch))
    programs = [rematerialise(t.program, layers) for t in (large, small)]
    shapes = [
        [(e.name, [o for o in e.operands if isinstance(o, int)], e.results) for e in p.equations]
        for p in programs
    ]
    assert shapes[0] == shapes[1]


# -- scans


def scans(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.name == "scan"]


@pytest.mark.representatives("False-2")
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_layers(unroll: int, reverse: bool) -> None:
    def loss(params: Any, x: Any) -> Any:
        body = lambda x, w: (block(x, w), None)  # noqa: E731
        return (lax.scan(body, x, params, unroll=unroll, reverse=reverse)[0] ** 2).mean()

    before, after = check(train_step(loss), STACKED, X)
    forward, backward = scans(after.program)
    assert len(scans(before.program)[0].results) > 2
    assert len(forward.results) == 2, "the carry, and the stack of what enters each trip"
    assert after.program.avals[forward.results[1]].shape == (4, *X.shape)
    assert forward.results[1] in backward.operands
    assert {"tanh", "sin", "optimization_barrier"} <= {e.name for e in backward.bodies[0].equations}
    assert "cos" not in {e.name for e in forward.bodies[0].equations}


@pytest.mark.ci
def test_scan_with_stacks_that_others_read_and_constants() -> None:
    def step(params: Any, x: Any) -> Any:
        stacked, shared = params

        def loss(params: Any) -> Any:
            stacked, shared = params
            table = jnp.asarray(X)  # captured

            def body(carry: Any, w: Any) -> Any:
                h, count = carry
                inner = jnp.sin(h @ w[0])
                h = h + jnp.tanh(inner @ w[1]) @ shared * jnp.exp(table) * (count + 1.0)
                return (h, count + 1), (inner, h.sum())

            (h, _), (inner, sums) = lax.scan(body, (x, 0), stacked)
            return (h**2).mean() + jnp.sin(sums).sum(), inner

        (value, inner), grads = jax.value_and_grad(loss, has_aux=True)((stacked, shared))
        new = jax.tree.map(lambda p, g: p - 0.1 * g, (stacked, shared), grads)
        return new, value, inner

    check(step, (STACKED, array(8, 8)), X)


@pytest.mark.ci
def test_scan_with_random_bits_and_a_callback() -> None:
    seen: list[float] = []

    def loss(params: Any, batch: Any) -> Any:
        x, key = batch

        def body(carry: Any, w: Any) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            noise = io_callback(lambda a: np.asarray(a) * 0.5, shape, lax.stop_gradient(x))
            jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
            mask = jax.random.bernoulli(own, 0.5, x.shape)
            return (jnp.where(mask, block(x, w) * jnp.exp(noise), 0), key), None

        return (lax.scan(body, (x, key), params)[0][0] ** 2).mean()

    check(train_step(loss), STACKED, (X, jax.random.key(0)))
    jax.effects_barrier()
    assert len(seen) == 2 * 4, "once per trip, in the step and in the reference"


@pytest.mark.ci
def test_scan_with_a_loop_inside() -> None:
    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            inner = lambda c, s: (jnp.tanh(c @ w[0] @ w[1]) * s, c.mean())  # noqa: E731
            x, means = lax.scan(inner, x, jnp.arange(2.0) + 1)
            return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x) + means.sum(), None

        return (lax.scan(body, x, params)[0] ** 2).mean()

    check(train_step(loss), STACKED, X)


@pytest.mark.ci
def test_scan_of_the_users_own_checkpoint() -> None:
    for policy in (None, jax.checkpoint_policies.dots_saveable):
        own = jax.checkpoint(block, policy=policy, prevent_cse=False)
        step = train_step(lambda params, x, own=own: scanned_loss(params, x, own))
        traced = trace_step(step, (STACKED, X))
        layers = find_layers(traced.program, batch=traced.batch)
        (scan,) = [layer for layer in layers if layer.scan is not None]
        if policy is None:  # the carry alone is kept already
            assert scan.residual_bytes == 0
            assert rematerialise(traced.program, [scan]).equations == traced.program.equations
        else:
            assert scan.residual_bytes > 0
            check(step, STACKED, X)


# -- memory


def wide(x: Any, w: Any) -> Any:
    h = x
    for _ in range(3):
        h = jnp.sin(jnp.tanh(h @ w[0]) @ w[1])
    return x + h


def wide_step(scan: bool, block: Callable[..., Any]) -> TracedStep:
    params = [(np.zeros((32, 64), np.float32), np.zeros((64, 32), np.float32))] * 8
    loss, args = unrolled_loss, (params, np.zeros((256, 32), np.float32))
    if scan:
        loss, args = scanned_loss, (jax.tree.map(lambda *p: np.stack(p), *params), args[1])
    return trace_step(train_step(lambda params, x: loss(params, x, block)), args)


def peak_live_bytes(program: Program) -> int:
    """The most that is alive at once if equations run in their order and nothing is fused."""
    last = {o: i for i, e in enumerate(program.equations) for o in e.operands if isinstance(o, int)}
    last.update((o, len(program.equations)) for o in program.outputs if isinstance(o, int))
    live = peak = 0
    ends: dict[int, int] = {}
    for index, equation in enumerate(program.equations):
        for result in equation.results:
            live += aval_bytes(program.avals[result])
            end = last.get(result, index)
            ends[end] = ends.get(end, 0) + aval_bytes(program.avals[result])
        peak = max(peak, live)
        live -= ends.pop(index, 0)
    return peak


def test_little_of_unrolled_layers_is_alive_at_once() -> None:
    plain, by_user = wide_step(False, wide), wide_step(False, jax.checkpoint(wide))
    none, ours, theirs = (peak_live_bytes(t.program) for t in (plain, recomputed(plain), by_user))
    assert ours <= 1.2 * theirs
    assert ours < 0.7 * none


def temp_bytes(traced: TracedStep) -> int:
    jitted = jax.jit(one_device(traced), donate_argnums=traced.donated)
    stats = jitted.lower(*traced.avals).compile(compiler_options=FOR_MEMORY).memory_analysis()
    assert stats is not None
    return int(stats.temp_size_in_bytes)


def check_memory(plain: TracedStep, by_user: TracedStep, is_less: bool) -> None:
    """XLA needs no more than with `jax.checkpoint` around each block, and less than without.
    For CPUs it removes barriers first and then may merge what they kept apart, for us as for
    `jax.checkpoint`; not so in loops."""
    none, ours, theirs = map(temp_bytes, (plain, recomputed(plain), by_user))
    print(f"temporary bytes: {none} without, {ours} ours, {theirs} with jax.checkpoint")
    assert ours <= 1.2 * theirs
    assert ours < (0.7 if is_less else 1.01) * none


@pytest.mark.representatives("False")
@pytest.mark.parametrize("scan", [False, True])
def test_memory_is_that_of_checkpointed_blocks(scan: bool) -> None:
    own = jax.checkpoint(wide, prevent_cse=not scan)
    check_memory(wide_step(scan, wide), wide_step(scan, own), is_less=scan)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_memory_of_a_deep_gpt(scan: bool) -> None:
    config = GPTConfig(64, 8, 4, seq_len=128, vocab_size=128, scan_layers=scan)

    def traced(**changes: Any) -> TracedStep:
        model = example(replace(config, **changes), batch_size=8)
        return trace_step(model.train_step, (model.abstract_state(), model.abstract_batch()))

    check_memory(traced(), traced(remat=True), is_less=scan)

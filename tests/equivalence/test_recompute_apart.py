"""`jax.checkpoint` around several layers that are on several stages: each stage computes its own
layers again with its own parameters, and three steps give what `jax.jit` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.api import ParallelFunction
from tests.equivalence.pipelines import WIDTH, batch_of, check
from tests.equivalence.test_stacks import bytes_by_stage, layer, pipeline, state_of, step_of

ADAM = optax.adam(1e-2, eps=1e-3)
Loss = Callable[[Any, Any], Any]


def matrices(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), (*shape, WIDTH, WIDTH)) / WIDTH**0.5


def perceptrons(*lengths: int) -> dict[str, Any]:
    return {"w": matrices(*lengths), "b": jnp.full((*lengths, WIDTH), 0.1)}


def blocks(*lengths: int) -> dict[str, Any]:
    names = ("query", "key", "value", "up", "down")
    weights = {name: matrices(*lengths, seed=n) for n, name in enumerate(names)}
    return {**weights, "scale": jnp.full((*lengths, WIDTH), 1.1)}


def block(x: Any, own: Any) -> tuple[Any, None]:
    """Attention between features, with all that has a derivative of its own: a norm, a softmax, an
    activation."""
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
    y = y * own["scale"]
    scores = (y @ own["query"])[..., :, None] * (y @ own["key"])[..., None, :]
    x = x + jnp.einsum("...qk,...k->...q", jax.nn.softmax(scores), y @ own["value"])
    return x + jax.nn.gelu(x @ own["up"]) @ own["down"], None


def outer_alone(of_layer: Callable[[Any, Any], Any]) -> Loss:
    """The layers of an outer trip are under one `jax.checkpoint`."""

    def group(x: Any, own: Any) -> tuple[Any, None]:
        return jax.lax.scan(of_layer, x, own)[0], None

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(group), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


def outer_and_inner(params: Any, batch: Any) -> Any:
    def group(x: Any, own: Any) -> tuple[Any, None]:
        return jax.lax.scan(jax.checkpoint(block), x, own)[0], None

    x, _ = jax.lax.scan(jax.checkpoint(group), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def under_one(params: Any, batch: Any) -> Any:
    """A scan under one `jax.checkpoint`."""

    def every(x: Any, own: Any) -> Any:
        return jax.lax.scan(block, x, own)[0]

    return jnp.mean((jax.checkpoint(every)(batch["x"], params) - batch["y"]) ** 2)


def three_deep(params: Any, batch: Any) -> Any:
    def middle(x: Any, own: Any) -> tuple[Any, None]:
        return jax.lax.scan(jax.checkpoint(layer), x, own)[0], None

    def outer(x: Any, own: Any) -> tuple[Any, None]:
        return jax.lax.scan(jax.checkpoint(middle), x, own)[0], None

    x, _ = jax.lax.scan(jax.checkpoint(outer), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def written_out(params: Any, batch: Any) -> Any:
    """Without scans: each half of the layers is under one `jax.checkpoint`."""

    def half(x: Any, own: Any) -> Any:
        for each in own:
            x, _ = block(x, each)
        return x

    x = batch["x"]
    for own in params:
        x = jax.checkpoint(half)(x, own)
    return jnp.mean((x - batch["y"]) ** 2)


def layers_of(stacks: Any) -> list[list[Any]]:
    outer, inner = jax.tree.leaves(stacks)[0].shape[:2]
    return [
        [jax.tree.map(lambda x, n=n, m=m: x[n, m], stacks) for m in range(inner)]
        for n in range(outer)
    ]


def on_three(*layers: list[int]) -> autopar.PipeshardParallel:
    submeshes = [(1, 2), (1, 2), (1, 4)]
    return autopar.PipeshardParallel(2, stages=autopar.ManualStages(list(layers), submeshes))


def with_layers(num_layers: int, num_stages: int) -> autopar.PipeshardParallel:
    layers, stages = autopar.AutoLayers(num_layers), autopar.UniformStages(num_stages)
    return autopar.PipeshardParallel(2, layers=layers, stages=stages)


# name -> (loss, parameters, method)
Case = tuple[Loss, Callable[[], Any], Callable[[], autopar.PipeshardParallel]]
CASES: Mapping[str, Case] = {
    "2 under one on 2": (under_one, lambda: blocks(2), lambda: with_layers(2, 2)),
    "4 under one on 2": (under_one, lambda: blocks(4), lambda: with_layers(4, 2)),
    "2x2 on 4": (outer_and_inner, lambda: blocks(2, 2), lambda: with_layers(4, 4)),
    "2x4 on 4": (outer_and_inner, lambda: blocks(2, 4), lambda: with_layers(8, 4)),
    "outer alone, 2x2 on 4": (outer_alone(block), lambda: blocks(2, 2), lambda: with_layers(4, 4)),
    "outer alone, 2x4 on 4": (outer_alone(block), lambda: blocks(2, 4), lambda: with_layers(8, 4)),
    "outer alone, 2x3 on 3": (
        outer_alone(layer),
        lambda: perceptrons(2, 3),
        lambda: on_three([0, 1], [2, 3], [4, 5]),
    ),
    "three deep, 2x2x2 on 4": (three_deep, lambda: perceptrons(2, 2, 2), lambda: pipeline(4)),
    "written out on 4": (written_out, lambda: layers_of(blocks(2, 2)), lambda: with_layers(4, 4)),
    "written out on 2": (written_out, lambda: layers_of(blocks(1, 2)), lambda: with_layers(2, 2)),
}


def assert_only_carries_are_sent(parallel: ParallelFunction) -> None:
    """Each boundary is crossed once by an activation and once by its cotangent; beside these, only
    counters are sent."""
    executable = parallel.last_executable
    num_stages = len(executable.plan.stages)
    once, each = [], []
    for transfer in executable.pipeline.transfers:
        buffer = executable.buffers[transfer.source, transfer.ref.value]
        ends = (transfer.source, transfer.target)
        (once if transfer.ref.micro_batch is None else each).append((ends, buffer.shape))
    assert all(shape == () for _, shape in once), once
    assert all(shape[-1:] == (WIDTH,) for _, shape in each), each
    between = [(k, k + 1) for k in range(num_stages - 1)]
    assert sorted(ends for ends, _ in each) == sorted([*between, *((b, a) for a, b in between)])


@pytest.mark.representatives("2x4 on 4", "outer alone, 2x3 on 3", "written out on 2")
@pytest.mark.parametrize("name", CASES)
def test_each_stage_computes_its_own_layers_again(name: str) -> None:
    loss, params, method = CASES[name]
    step, state = step_of(ADAM, loss), state_of(ADAM, params())
    parallel = check(step, state, method())
    if loss is not written_out:  # whose cotangents are sums of several, with nothing to say so
        assert_only_carries_are_sent(parallel)
    plan = parallel.last_executable.plan
    assert not plan.warnings
    num_stages = len(plan.stages)
    parallel_state, _ = parallel(jax.tree.map(jnp.array, state), batch_of(0))
    held = bytes_by_stage(parallel_state, plan)
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(state)) - 4
    shares = [len(range(*s.layers)) for s in plan.stages]
    assert len(shares) == num_stages
    for own, share in zip(held, shares, strict=True):
        assert own <= whole * share / sum(shares) + 4


def test_flax_remat_scan_on_four_stages() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
            return x + y

    model = nn.remat_scan(Block, lengths=(2, 2))()
    params = model.init(jax.random.key(0), batch_of(0)["x"])

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)

    parallel = check(step_of(ADAM, loss), state_of(ADAM, params), with_layers(4, 4))
    assert_only_carries_are_sent(parallel)

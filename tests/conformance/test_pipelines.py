"""Pipelines of four micro-batches equal the serial step within 1e-3.

MLP: batch 64, hidden 16, 4 layers. BERT layers: batch 16, sequence 256, hidden 512, 8 heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from examples.models import Example, build
from tests.equivalence.pipelines import check

BATCH_SIZE, HIDDEN, NUM_LAYERS = 64, 16, 4
NUM_STAGES = (2, 4)
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def pipeline(num_stages: int, **options: Any) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(4, stages=autopar.UniformStages(num_stages), **options)


def mlp() -> Example:
    return build("mlp-tiny", BATCH_SIZE, hidden_size=HIDDEN, num_layers=NUM_LAYERS)


def batches_of(example: Example) -> list[Any]:
    return [example.make_batch(key=jax.random.key(i)) for i in range(2)]


@pytest.mark.ci
@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_mlp(num_stages: int) -> None:
    example = mlp()
    parallel = check(
        example.train_step,
        example.create_state(),
        pipeline(num_stages),
        batches=batches_of(example),
        **TOLERANCE,
    )
    stages = parallel.last_executable.plan.input_stages[0].params
    each = NUM_LAYERS // num_stages
    assert [own["kernel"] for own in stages] == [(k // each,) for k in range(NUM_LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_bert_layers(num_stages: int) -> None:
    sizes = {"hidden_size": 512, "num_heads": 8, "seq_len": 256, "num_layers": 4}
    example = build("bert-layers-tiny", 16, **sizes)
    check(
        example.train_step,
        example.create_state(),
        pipeline(num_stages),
        batches=batches_of(example),
        **TOLERANCE,
    )


def tied_step(optimizer: optax.GradientTransformation) -> Any:
    """A table of embeddings at both ends of an MLP."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x = params["table"][batch["x"]]
            for w in params["layers"]:
                x = jax.nn.relu(x @ w)
            logits = x @ params["table"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def tied_case() -> tuple[Any, list[Any]]:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS + 1)
    params = {
        "table": jax.random.normal(keys[0], (32, HIDDEN)),
        "layers": [jax.random.normal(k, (HIDDEN, HIDDEN)) / 4 for k in keys[1:]],
    }
    rng = np.random.default_rng(0)
    batches = [
        {name: jnp.asarray(rng.integers(0, 32, BATCH_SIZE), jnp.int32) for name in "xy"}
        for _ in range(2)
    ]
    return params, batches


@pytest.mark.ci
@pytest.mark.parametrize(
    "num_stages", [pytest.param(n, marks=() if n == 2 else pytest.mark.slow) for n in NUM_STAGES]
)
def test_tied_embeddings_and_the_norm_over_all_stages(num_stages: int) -> None:
    params, batches = tied_case()
    # A norm far below that of the gradients, so that it matters in every step.
    optimizer = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0))
    state = {"params": params, "opt": optimizer.init(params)}
    parallel = check(
        tied_step(optimizer), state, pipeline(num_stages), batches=batches, **TOLERANCE
    )
    stages = parallel.last_executable.plan.input_stages[0]["params"]
    assert set(stages["layers"]) == {(s,) for s in range(num_stages)}


@pytest.mark.slow
def test_zero_inside_stages() -> None:
    """Too little memory to hold moments whole: they are split, and gradients reduce-scattered."""
    example = mlp()
    state = example.create_state()
    budget = 9_000  # of 22 kB that are held if every device has all of the state
    method = autopar.PipeshardParallel(
        4,
        stages=autopar.ManualStages([[0, 1], [2, 3]], [(1, 4), (1, 4)], [(4,), (4,)]),
        options=autopar.ShardingOptions(memory_budget_bytes=budget),
    )
    parallel = check(example.train_step, state, method, batches=batches_of(example), **TOLERANCE)
    plan = parallel.last_executable.plan
    assert plan.estimated_peak_bytes <= budget
    moments = [t for t in plan.inputs if "['kernel']" in t.path and "opt_state" in t.path]
    assert len(moments) == 2 * NUM_LAYERS
    assert all(entry >= 0 for t in moments for entry in t.layout)


@pytest.mark.representatives("2")
@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_inference(num_stages: int) -> None:
    params, batches = tied_case()

    def infer(params: Any, batch: Any) -> Any:
        x = params["table"][batch["x"]]
        for w in params["layers"]:
            x = jax.nn.relu(x @ w)
        return x @ params["table"].T

    parallel = autopar.parallelize(infer, method=pipeline(num_stages, schedule="inference"))
    for batch in batches:
        want = jax.jit(infer)(params, batch)
        np.testing.assert_allclose(parallel(params, batch), want, **TOLERANCE)
    phases = {
        stage_program.phase.value
        for stage_program in parallel.last_executable.pipeline.stage_programs
    }
    assert "backward" not in phases and "forward" in phases

"""Equal layers of a stage run as one loop, and three steps give what `jax.jit` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.ir.pipeline import PER_MICRO_BATCH
from autopar.lower import lower_step
from autopar.lower.roll_layers import roll_layers
from autopar.lower.stage_bodies import StageProgramBody, StagePrograms
from tests.equivalence.pipelines import WIDTH, check, own_buffers

LAYERS_PER_STAGE = 6  # the ends of a stage may have layouts of their own


@pytest.fixture
def rolled(monkeypatch: pytest.MonkeyPatch) -> list[StagePrograms]:
    """The stage programs of every step that is lowered."""
    seen: list[StagePrograms] = []

    def note(written_out: StagePrograms) -> StagePrograms:
        seen.append(roll_layers(written_out))
        return seen[-1]

    monkeypatch.setattr(lower_step, "roll_layers", note)
    return seen


def looped(staged: StagePrograms) -> list[StageProgramBody]:
    return [p for p in staged.programs if p.stage_program.phase in PER_MICRO_BATCH]


def layer(x: Any, own: Any) -> tuple[Any, None]:
    hidden = jnp.tanh(x @ own["up"] + own["b"])
    return x + hidden @ own["down"], None


def noisy_layer(x: Any, own: Any) -> tuple[Any, None]:
    """A layer with a key of its own."""
    params, key = own
    x, _ = layer(x, params)
    return x * jax.random.bernoulli(key, 0.9, x.shape[-1:]), None


def saved_products(x: Any, own: Any) -> tuple[Any, None]:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(layer, policy=policy)(x, own)


def params_of(num_layers: int) -> Any:
    up, down, head = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {
            "up": jax.random.normal(up, (num_layers, WIDTH, 2 * WIDTH)) / 4,
            "b": jnp.full((num_layers, 2 * WIDTH), 0.1, jnp.float32),
            "down": jax.random.normal(down, (num_layers, 2 * WIDTH, WIDTH)) / 8,
        },
        "head": jax.random.normal(head, (WIDTH, WIDTH)) / 3,
    }


def step_of(
    body: Callable[..., Any], optimizer: optax.GradientTransformation, keys: bool = False
) -> Callable[..., Any]:
    def loss_of(params: Any, batch: Any) -> Any:
        layers = params["layers"]
        num_layers = layers["b"].shape[0]
        xs = (layers, jax.random.split(jax.random.key(1), num_layers)) if keys else layers
        x, _ = jax.lax.scan(body, batch["x"], xs)
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def method_of(
    schedule: str = "1f1b", remat: str = "none", num_stages: int = 2
) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(
        4,
        stages=autopar.UniformStages(num_stages),
        schedule=schedule,
        options=autopar.ShardingOptions(remat=remat),
    )


adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "1f1b": (step_of(layer, adam), {}),
    "gpipe": (step_of(layer, adam), {"schedule": "gpipe"}),
    "zero bubble": (step_of(layer, adam), {"schedule": "zero_bubble"}),
    "recomputed": (step_of(layer, adam), {"remat": "all"}),
    "checkpoint": (step_of(jax.checkpoint(layer), adam), {}),
    "policy": (step_of(saved_products, adam), {}),
    "keys": (step_of(noisy_layer, adam, keys=True), {}),
    "four stages": (step_of(layer, adam), {"num_stages": 4}),
}


@pytest.mark.representatives("1f1b")
@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_stage_are_one_loop(name: str, rolled: list[StagePrograms]) -> None:
    step, options = CASES[name]
    params = params_of(LAYERS_PER_STAGE * options.get("num_stages", 2))
    state = {"params": params, "opt": adam.init(params)}
    check(step, own_buffers(state), method_of(**options))
    for program in looped(rolled[-1]):
        (_, loop), *others = program.loops
        assert not others
        assert loop.num_trips >= LAYERS_PER_STAGE - 2

"""Reinforcement learning updates: PPO with epochs of shuffled minibatches, DQN with a target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import adamw, integers, normal, pick


class Atari(nn.Module):
    """Nature's convolutions, with as many heads as asked for."""

    dim: int
    heads: tuple[int, ...]

    @nn.compact
    def __call__(self, frames: jax.Array) -> list[jax.Array]:
        x = frames.astype(jnp.float32) / 255
        x = nn.relu(nn.Conv(self.dim, (8, 8), strides=(4, 4))(x))
        x = nn.relu(nn.Conv(2 * self.dim, (4, 4), strides=(2, 2))(x))
        x = nn.relu(nn.Dense(16 * self.dim)(x.reshape(x.shape[0], -1)))
        return [nn.Dense(n)(x) for n in self.heads]


def advantages(reward: Any, done: Any, value: Any, last: Any) -> jax.Array:
    """Generalized advantage estimates by a scan backwards in time; arrays are (time, actors)."""

    def back(carry: Any, now: Any) -> Any:
        advantage, after = carry
        reward, done, value = now
        error = reward + 0.99 * after * (1 - done) - value
        advantage = error + 0.99 * 0.95 * (1 - done) * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(last), last)
    return jax.lax.scan(back, start, (reward, done, value), reverse=True)[1]


@zoo_program("ppo", source="written", layers=False, rtol=5e-3, atol=1e-3)
def ppo(size: Size) -> ZooStep:
    """Advantages are normalized over a minibatch, and minibatches are drawn from the whole batch,
    so micro-batches would change the result."""
    time, actors, side, dim, actions = pick(
        size, (6, 8, 16, 4, 5), (128, 1024, 84, 32, 18), (64, 128, 84, 32, 18)
    )
    epochs, minibatches = pick(size, (2, 4), (4, 8))
    net: Any = Atari(dim, (actions, 1))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-3))

    def make_state() -> Any:
        params = net.init(jax.random.key(0), jnp.zeros((1, side, side, 4)))
        return {"params": params, "opt": tx.init(params), "key": jax.random.key(1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        logits, value = net.apply(params, batch["frames"])
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, batch["action"][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - batch["log_p"])
        a = batch["advantage"]
        a = (a - a.mean()) / (a.std() + 1e-2)
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a).mean()
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1).mean()
        return policy + 0.5 * jnp.mean((value[:, 0] - batch["return"]) ** 2) - 0.01 * entropy

    def step(state: Any, rollout: Any, last_value: jax.Array) -> Any:
        advantage = advantages(rollout["reward"], rollout["done"], rollout["value"], last_value)
        data = {k: rollout[k] for k in ("frames", "action", "log_p")}
        data |= {"advantage": advantage, "return": advantage + rollout["value"]}
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

        def minibatch(carry: Any, index: jax.Array) -> Any:
            params, opt = carry
            part = jax.tree.map(lambda x: x[index], data)
            value, grads = jax.value_and_grad(loss)(params, part)
            updates, opt = tx.update(grads, opt)
            return (optax.apply_updates(params, updates), opt), value

        def epoch(carry: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, time * actors)
            return jax.lax.scan(minibatch, carry, order.reshape(minibatches, -1))

        key, *keys = jax.random.split(state["key"], epochs + 1)
        carry = state["params"], state["opt"]
        (params, opt), losses = jax.lax.scan(epoch, carry, jnp.stack(keys))
        return {"params": params, "opt": opt, "key": key}, losses.mean()

    def make_batch(i: int) -> tuple:
        shape = (time, actors)
        rollout = {
            "frames": integers(i, 256, *shape, side, side, 4).astype(jnp.uint8),
            "action": integers(i, actions, *shape),
            "log_p": -1 - jax.nn.sigmoid(normal(i, *shape)),
            "reward": normal(i + 1, *shape),
            "done": (integers(i, 5, *shape) == 0).astype(jnp.float32),
            "value": normal(i + 2, *shape),
        }
        return rollout, normal(i + 3, actors)

    return ZooStep(step, make_state, make_batch)


@zoo_program("dqn", source="written", layers=True)
def dqn(size: Size) -> ZooStep:
    """Double Q-learning with priorities out; the target network is copied every other step by a
    `cond`."""
    rows, side, dim, actions = pick(size, (16, 16, 4, 5), (4096, 84, 32, 18), (4096, 84, 32, 18))
    net: Any = Atari(dim, (actions,))
    tx = adamw()

    def make_state() -> Any:
        params = net.init(jax.random.key(0), jnp.zeros((1, side, side, 4)))
        target = jax.tree.map(jnp.copy, params)
        return {"params": params, "target": target, "opt": tx.init(params), "step": jnp.int32(0)}

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        best = net.apply(state["params"], batch["next"])[0].argmax(-1)
        after = net.apply(state["target"], batch["next"])[0]
        after = jnp.take_along_axis(after, best[:, None], 1)[:, 0]
        goal = batch["reward"] + 0.99 * (1 - batch["done"]) * after

        def loss(params: Any) -> Any:
            q = net.apply(params, batch["frames"])[0]
            error = goal - jnp.take_along_axis(q, batch["action"][:, None], 1)[:, 0]
            return optax.huber_loss(error).mean(), jnp.abs(error)

        (value, priority), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        count = state["step"] + 1
        target = jax.lax.cond(count % 2 == 0, lambda: params, lambda: state["target"])
        state = {"params": params, "target": target, "opt": opt, "step": count}
        return state, {"loss": value, "priority": priority}

    def make_batch(i: int) -> tuple:
        frames = integers(i, 256, 2, rows, side, side, 4).astype(jnp.uint8)
        return (
            {
                "frames": frames[0],
                "next": frames[1],
                "action": integers(i, actions, rows),
                "reward": normal(i, rows),
                "done": (integers(i, 5, rows) == 0).astype(jnp.float32),
            },
        )

    return ZooStep(step, make_state, make_batch)

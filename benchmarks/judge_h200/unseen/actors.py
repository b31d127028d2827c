"""Reinforcement learning: a model of the world, and many updates of an actor in one step."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    convolution,
    layer_norm,
    normal,
    trained_with_key,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def world_model(rows: int, *, time: int = 50, width: int = 512, channels: int = 32) -> ZooStep:
    """Images to classes that are drawn at every step of a recurrence, and back to images (a model
    of Dreamer), in float32."""
    groups, classes, actions = 32, 32, 6
    latent = groups * classes
    widths = (3, channels, 2 * channels, 4 * channels, 8 * channels)
    flat = 4 * 4 * widths[-1]
    sizes: Sizes = {"mix": (latent + actions, width), "gates": (2 * width, 3 * width)}
    for n, (into, out) in enumerate(itertools.pairwise(widths)):
        sizes |= {f"down_{n}": (4, 4, into, out), f"up_{n}": (4, 4, out, into)}
    sizes |= {"prior_1": (width, width), "prior_2": (width, latent)}
    sizes |= {"after_1": (width + flat, width), "after_2": (width, latent)}
    sizes |= {"image": (width + latent, flat), "reward_1": (width + latent, width)}
    sizes["reward_2"] = (width, 1)

    def loss(
        w: Any, key: jax.Array, images: jax.Array, acted: jax.Array, rewards: jax.Array
    ) -> jax.Array:
        x = images.reshape(time * rows, 64, 64, 3)
        for n in range(4):
            x = jax.nn.silu(layer_norm(convolution(x, w[f"down_{n}"], 2)))
        seen = x.reshape(time, rows, flat)

        def draw(key: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = logits.reshape(rows, groups, classes)
            p = 0.99 * jax.nn.softmax(logits) + 0.01 / classes
            hot = jax.nn.one_hot(jax.random.categorical(key, jnp.log(p)), classes)
            return (hot + p - jax.lax.stop_gradient(p)).reshape(rows, latent), p

        def tick(state: Any, now: Any) -> Any:
            h, z = state
            embedded, action, key = now
            x = jax.nn.silu(layer_norm(jnp.concatenate([z, action], -1) @ w["mix"]))
            gates = layer_norm(jnp.concatenate([x, h], -1) @ w["gates"])
            reset, new, keep = jnp.split(gates, 3, -1)
            new, keep = jnp.tanh(jax.nn.sigmoid(reset) * new), jax.nn.sigmoid(keep - 1)
            h = keep * new + (1 - keep) * h
            inner = jax.nn.silu(layer_norm(jnp.concatenate([h, embedded], -1) @ w["after_1"]))
            z, after = draw(key, inner @ w["after_2"])
            return (h, z), (h, z, after)

        first = jnp.zeros((rows, width)), jnp.zeros((rows, latent))
        given = (seen, acted, jax.random.split(key, time))
        _, (h, z, after) = jax.lax.scan(tick, first, given)
        prior = jax.nn.silu(layer_norm(h @ w["prior_1"])) @ w["prior_2"]
        prior = jax.nn.log_softmax(prior.reshape(after.shape))
        both = jnp.concatenate([h, z], -1)
        x = (both @ w["image"]).reshape(time * rows, 4, 4, widths[-1])
        for n in reversed(range(4)):
            x = jax.lax.conv_transpose(
                x, w[f"up_{n}"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.silu(layer_norm(x)) if n else x
        image_loss = ((x - images.reshape(x.shape)) ** 2).sum((1, 2, 3)).mean()
        reward = jax.nn.silu(both @ w["reward_1"]) @ w["reward_2"]
        apart = (after * (jnp.log(after) - prior)).sum((-1, -2)).mean()
        return image_loss + ((reward[..., 0] - rewards) ** 2).mean() + apart

    def batch(i: int) -> tuple[jax.Array, ...]:
        images = normal(i, time, rows, 64, 64, 3)
        return images, normal(i + 1, time, rows, actions), normal(i + 2, time, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch, adamw(clip=100.0))


def actor_and_critics(
    rows: int, *, updates: int = 64, width: int = 256, seen: int = 376, actions: int = 17
) -> ZooStep:
    """Many updates of an actor and two critics (soft actor-critic) as one scan over batches."""

    def network(into: int, out: int) -> Any:
        return weights(
            {"w0": (into, width), "b0": (width,), "w1": (width, width), "b1": (width,)}
        ) | (weights({"w2": (width, out), "b2": (out,)}))

    def run(w: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(x @ w["w0"] + w["b0"])
        return jax.nn.relu(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]

    def both(critics: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(run, (0, None))(critics, x)[..., 0]

    def act(actor: Any, state: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(run(actor, state), 2, -1)
        log_std = jnp.clip(log_std, -5, 2)
        noise = jax.random.normal(key, mean.shape)
        drawn = mean + jnp.exp(log_std) * noise
        action = jnp.tanh(drawn)
        log_p = -0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-6)
        return action, log_p.sum(-1)

    adam = adamw(3e-4, 0.0)

    def make_state() -> Any:
        actor = network(seen, 2 * actions)
        critics = jax.tree.map(lambda w: jnp.stack([w, 0.9 * w]), network(seen + actions, 1))
        return {
            "actor": (actor, adam.init(actor)),
            "critics": (critics, adam.init(critics)),
            "slow": critics,
            "key": jax.random.key(5),
        }

    def update(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        now, action, reward, then = batch
        key, one, two = jax.random.split(state["key"], 3)
        (actor, actor_opt), (critics, critics_opt) = state["actor"], state["critics"]
        following, log_p = act(actor, then, one)
        ahead = both(state["slow"], jnp.concatenate([then, following], -1)).min(0)
        target = reward + 0.99 * (ahead - 0.2 * log_p)

        def of_critics(critics: Any) -> jax.Array:
            values = both(critics, jnp.concatenate([now, action], -1))
            return ((values - target) ** 2).mean(1).sum()

        def of_actor(actor: Any) -> jax.Array:
            made, log_p = act(actor, now, two)
            values = both(critics, jnp.concatenate([now, made], -1))
            return (0.2 * log_p - values.min(0)).mean()

        value, grads = jax.value_and_grad(of_critics)(critics)
        critics, critics_opt = adam.update(grads, critics_opt, critics)
        actor, actor_opt = adam.update(jax.grad(of_actor)(actor), actor_opt, actor)
        slow = jax.tree.map(lambda s, c: 0.995 * s + 0.005 * c, state["slow"], critics)
        new = {"actor": (actor, actor_opt), "critics": (critics, critics_opt)}
        return new | {"slow": slow, "key": key}, value

    def step(state: Any, *batches: jax.Array) -> Any:
        return jax.lax.scan(update, state, batches)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (
            normal(i, updates, rows, seen),
            jnp.tanh(normal(i + 1, updates, rows, actions)),
            normal(i + 2, updates, rows),
            normal(i + 3, updates, rows, seen),
        )

    return ZooStep(step, make_state, batch)

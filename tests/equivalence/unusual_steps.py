"""Train steps that do more than a loss and an optimizer: name → step, state, batches.

A memory bank in the state, rewards compared within groups, a router whose bias is no parameter, a
population, a mesh of a globe rolled out in time, two views, advantages by a reversed scan, images
mixed with others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


@dataclass(frozen=True)
class Unusual:
    """`step(state, batch) -> (state, metrics)`; `batch_of(i)` is that of call i."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch_of: Callable[[int], Any]


def adam() -> optax.GradientTransformation:
    """A large epsilon: Adam would turn the rounding of a zero gradient into a whole step."""
    return optax.adamw(1e-3, eps=1e-3)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(seed: int, limit: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, limit)


def weights(seed: int, *shape: int) -> jax.Array:
    return normal(seed, *shape) / np.sqrt(shape[-2])


def mlp_init(seed: int, *sizes: int) -> list[Any]:
    pairs = pairwise(sizes)
    return [(weights(97 * seed + i, a, b), jnp.zeros(b)) for i, (a, b) in enumerate(pairs)]


def mlp(layers: list[Any], x: jax.Array) -> jax.Array:
    for w, b in layers[:-1]:
        x = jax.nn.silu(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def updated(tx: Any, grads: Any, opt: Any, params: Any) -> tuple[Any, Any]:
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def memory_bank() -> Unusual:
    """MoCo: keys of a momentum encoder go into a queue, and a few rows into the log."""
    tx, width, bank, rate = optax.sgd(0.05, momentum=0.9), 16, 72, 0.05

    def embed(params: Any, x: jax.Array) -> jax.Array:
        z = mlp(params, x.reshape(len(x), -1))
        return z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)

    def step(state: Any, batch: Any) -> Any:
        slow = optax.incremental_update(state["params"], state["slow"], rate)
        keys = embed(slow, batch["key"])

        def loss(params: Any) -> Any:
            queries = embed(params, batch["query"])
            own = jnp.sum(queries * keys, -1, keepdims=True)
            logits = jnp.concatenate([own, queries @ state["queue"].T], 1) / 0.2
            labels = jnp.zeros(len(logits), int)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        queue = lax.dynamic_update_slice(state["queue"], keys, (state["at"], 0))
        at = (state["at"] + len(keys)) % bank
        new = {"params": params, "slow": slow, "opt": opt, "queue": queue, "at": at}
        hardest = lax.top_k(-logits[:, 0], 3)[1]
        return new, {"loss": value, "first": logits[:2], "hardest": hardest}

    params = mlp_init(0, 48, 64, 64, width)
    queue = normal(9, bank, width)
    state = {"params": params, "slow": mlp_init(0, 48, 64, 64, width), "opt": tx.init(params)}
    state |= {"queue": queue / jnp.linalg.norm(queue, axis=1, keepdims=True), "at": jnp.int32(0)}

    def batch_of(i: int) -> Any:
        return {"query": normal(i, 24, 4, 4, 3), "key": normal(50 + i, 24, 4, 4, 3)}

    return Unusual(step, state, batch_of)


def attention(w: Any, x: jax.Array, heads: int) -> jax.Array:
    rows, length, width = x.shape
    qkv = (x @ w["qkv"]).reshape(rows, length, 3 * heads, width // heads)
    q, k, v = jnp.split(qkv, 3, 2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(x.shape) @ w["out"]


def attention_init(seed: int, width: int) -> Any:
    return {"qkv": weights(seed, width, 3 * width), "out": weights(seed + 1, width, width)}


def groups_of_rewards() -> Unusual:
    """GRPO: advantages within groups of four samples, a reference that follows every second step,
    a mask of lengths, a vocabulary and heads that no mesh divides."""
    vocabulary, width, group, rows = 101, 24, 4, 16
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam())

    def init() -> Any:
        layers = [(attention_init(10 * i, width), mlp_init(i, width, 48, width)) for i in (1, 2)]
        return {"tokens": weights(3, vocabulary, width), "layers": layers}

    def log_p(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["tokens"][tokens[:, :-1]]
        for mixer, feed in params["layers"]:
            x = attention(mixer, x, 3)
            x = x + mlp(feed, x)
        logits = jax.nn.log_softmax(x @ params["tokens"].T)
        return jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]

    def step(state: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        reference = log_p(state["reference"], tokens)
        reward = batch["reward"].reshape(-1, group)
        spread = reward.std(1, keepdims=True) + 1e-2
        advantage = ((reward - reward.mean(1, keepdims=True)) / spread).reshape(-1, 1)
        mask = jnp.arange(tokens.shape[1] - 1) < batch["length"][:, None]

        def loss(params: Any) -> Any:
            now = log_p(params, tokens)
            ratio = jnp.exp(now - batch["old"])
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            kl = jnp.exp(reference - now) - (reference - now) - 1
            per_row = jnp.sum((0.04 * kl - gain) * mask, 1) / mask.sum(1)
            return per_row.mean(), jnp.sum(kl * mask) / mask.sum()

        (value, kl), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        count = state["count"] + 1
        follow = lambda new, old: jnp.where(count % 2 == 0, new, old)  # noqa: E731
        kept = jax.tree.map(follow, params, state["reference"])
        new = {"params": params, "reference": kept, "opt": opt, "count": count}
        return new, {"loss": value, "kl": kl, "reward": reward.mean()}

    params = init()
    state = {"params": params, "reference": init(), "opt": tx.init(params), "count": jnp.int32(0)}

    def batch_of(i: int) -> Any:
        tokens = integers(i, vocabulary, rows, 9)
        old = 0.1 * normal(i + 9, rows, 8) - 4
        length = jnp.arange(rows) % 5 + 4
        return {"tokens": tokens, "reward": normal(i + 5, rows), "old": old, "length": length}

    return Unusual(step, state, batch_of)


def balanced_experts() -> Unusual:
    """Experts by `ragged_dot`; the router's bias is moved by the load, and has no gradient."""
    experts, top, width, vocabulary = 8, 2, 32, 64
    tx = adam()

    def mix(w: Any, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        score = jax.nn.sigmoid(x @ w["router"])
        chosen = lax.top_k(score + bias, top)[1]
        share = jnp.take_along_axis(score, chosen, 1)
        share = (share / share.sum(1, keepdims=True)).ravel()
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=experts).astype(jnp.int32)
        y = jax.nn.silu(lax.ragged_dot(x[order // top], w["up"], sizes))
        y = lax.ragged_dot(y, w["down"], sizes) * share[order][:, None]
        return jnp.zeros_like(x).at[order // top].add(y), sizes

    def step(state: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            x, loads = params["tokens"][tokens[:, :-1]], []
            for w, bias in zip(params["layers"], state["bias"], strict=True):
                x = attention(w["mixer"], x, 4)
                y, load = mix(w, bias, x.reshape(-1, width))
                x, loads = x + y.reshape(x.shape), [*loads, load]
            logits = x @ params["tokens"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean(), jnp.stack(loads)

        (value, load), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        bias = state["bias"] + 1e-3 * jnp.sign(load.mean(1, keepdims=True) - load)
        return {"params": params, "opt": opt, "bias": bias}, {"loss": value, "load": load.max()}

    def layer(seed: int) -> Any:
        up, down = weights(seed, experts, width, 64), weights(seed + 1, experts, 64, width)
        router = weights(seed + 2, width, experts)
        mixer = attention_init(seed + 3, width)
        return {"router": router, "up": up, "down": down, "mixer": mixer}

    params = {"tokens": weights(1, vocabulary, width), "layers": [layer(10), layer(20)]}
    state = {"params": params, "opt": tx.init(params), "bias": jnp.zeros((2, experts))}
    return Unusual(step, state, lambda i: integers(i, vocabulary, 16, 9))


def population() -> Unusual:
    """Six models with learning rates of their own; every second step the worst two become copies
    of the best two."""
    size = 6
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, eps=1e-3)

    def train(params: Any, opt: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)
        )(params)
        return *updated(tx, grads, opt, params), loss

    def step(state: Any, batch: Any) -> Any:
        key, new_key = jax.random.split(state["key"])
        model = jax.vmap(train, (0, 0, None))(state["params"], state["opt"], batch)
        *model, losses = model
        score = 0.9 * state["score"] + 0.1 * losses

        def exploit(model: Any) -> Any:
            rank = jnp.argsort(score)
            source = jnp.arange(size).at[rank[-2:]].set(rank[:2])
            params, opt = jax.tree.map(lambda a: a[source], model)
            factor = jnp.where(jax.random.bernoulli(key, 0.5, (size,)), 1.2, 0.8)
            rate = opt.hyperparams["learning_rate"] * factor
            return [params, opt._replace(hyperparams={**opt.hyperparams, "learning_rate": rate})]

        params, opt = lax.cond(state["count"] % 2 == 1, exploit, lambda model: model, model)
        new = {"params": params, "opt": opt, "score": score, "key": new_key}
        return {**new, "count": state["count"] + 1}, {"best": losses.min(), "all": losses}

    models = [mlp_init(i, 20, 48, 48, 4) for i in range(size)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    state = {"params": params, "opt": jax.vmap(tx.init)(params), "score": jnp.zeros(size)}
    state |= {"key": jax.random.key(1), "count": jnp.int32(0)}
    return Unusual(step, state, lambda i: {"x": normal(i, 24, 20), "y": normal(i + 9, 24, 4)})


def globe() -> Unusual:
    """GraphCast: from a grid to a mesh and back by `segment_sum`, a scan over processors, rolled
    out for two steps under `jax.checkpoint`."""
    cells, nodes, width, features = 40, 12, 24, 6
    draw = np.random.default_rng(0)
    down = draw.integers(0, cells, 80), draw.integers(0, nodes, 80)
    across = draw.integers(0, nodes, 48), draw.integers(0, nodes, 48)
    tx = optax.chain(optax.clip_by_global_norm(32.0), adam())

    def passed(w: Any, edges: jax.Array, ends: Any, sent: jax.Array, got: jax.Array) -> Any:
        source, target = ends
        message = mlp(w[0], jnp.concatenate([edges, sent[source], got[target]], -1))
        total = jax.ops.segment_sum(message, target, num_segments=len(got))
        return edges + message, got + mlp(w[1], jnp.concatenate([got, total], -1))

    def forecast(params: Any, x: jax.Array) -> jax.Array:
        x = x.swapaxes(0, 1)

        def spread(a: jax.Array) -> jax.Array:
            return jnp.broadcast_to(a[:, None], (len(a), x.shape[1], width))

        grid, mesh = mlp(params["encode"], x), spread(params["nodes"])
        mesh = passed(params["down"], spread(params["edges"]), down, grid, mesh)[1]

        def process(carry: Any, w: Any) -> Any:
            edges, mesh = carry
            return passed(w, edges, across, mesh, mesh), None

        carry = (spread(params["mesh_edges"]), mesh)
        mesh = lax.scan(process, carry, params["process"])[0][1]
        up = down[1], down[0]
        grid = passed(params["up"], spread(params["edges"]), up, mesh, grid)[1]
        return mlp(params["decode"], grid).swapaxes(0, 1)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            def roll(x: jax.Array, wanted: jax.Array) -> Any:
                x = x + forecast(params, x)
                return x, jnp.mean((x - wanted) ** 2)

            _, losses = lax.scan(jax.checkpoint(roll), batch["now"], batch["next"].swapaxes(0, 1))
            return losses.mean(), losses

        (value, losses), grads = jax.value_and_grad(loss, has_aux=True)(state[0])
        return updated(tx, grads, state[1], state[0]), {"loss": value, "by step": losses}

    def pair(seed: int) -> Any:
        return mlp_init(seed, 3 * width, width, width), mlp_init(seed + 1, 2 * width, width, width)

    process = jax.tree.map(lambda *leaves: jnp.stack(leaves), pair(5), pair(7), pair(9))
    params = {"nodes": normal(1, nodes, width), "edges": normal(2, 80, width), "process": process}
    params |= {"mesh_edges": normal(3, 48, width), "down": pair(11), "up": pair(13)}
    params |= {"encode": mlp_init(1, features, width), "decode": mlp_init(2, width, features)}

    def batch_of(i: int) -> Any:
        return {"now": normal(i, 8, cells, features), "next": normal(i + 9, 8, 2, cells, features)}

    return Unusual(step, (params, tx.init(params)), batch_of)


def siamese() -> Unusual:
    """SimSiam: two noisy views of each row, one after the other through one network, and a
    predictor of the other view."""
    tx, width = adam(), 6

    def step(state: Any, x: jax.Array) -> Any:
        key, new_key = jax.random.split(state["key"])
        rows = len(x)
        views = jnp.tile(x, (2, 1)) + 0.1 * jax.random.normal(key, (2 * rows, x.shape[1]))

        def loss(params: Any) -> Any:
            z = mlp(params["embed"], views)
            z = z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 0.1)
            first, second = jnp.split(z, 2)
            other = lax.stop_gradient(jnp.concatenate([second, first]))
            return -jnp.mean(jnp.sum(mlp(params["predict"], z) * other, axis=1)), z

        (value, z), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        return {"params": params, "opt": opt, "key": new_key}, {"loss": value, "z": z}

    params = {"embed": mlp_init(1, 7, 24, 24, width), "predict": mlp_init(2, width, 11, width)}
    state = {"params": params, "opt": tx.init(params), "key": jax.random.key(0)}
    return Unusual(step, state, lambda i: normal(i, 16, 7))


def clipped_policy() -> Unusual:
    """PPO: advantages by a scan backwards in time, normalised where the batch has their baseline, a
    clipped ratio, and a metric that compares each row with the mean of all."""
    tx, rows, steps = optax.chain(optax.clip_by_global_norm(0.5), adam()), 16, 6

    def step(state: Any, batch: Any) -> Any:
        values = mlp(state["params"]["value"], batch["seen"])[..., 0]
        after = jnp.concatenate([values[:, 1:], batch["last"][:, None]], 1)
        alive = 1 - batch["done"]
        errors = batch["reward"] + 0.99 * after * alive - values

        def earlier(gain: jax.Array, now: Any) -> Any:
            error, alive = now
            gain = error + 0.94 * alive * gain
            return gain, gain

        scanned = lax.scan(earlier, jnp.zeros(rows), (errors.T, alive.T), reverse=True)[1]
        gains = lax.stop_gradient(scanned.T)
        returns = gains + lax.stop_gradient(values)
        scale = batch["reward"].std() + 1e-2

        def loss(params: Any) -> Any:
            log_p = jax.nn.log_softmax(mlp(params["policy"], batch["seen"]))
            chosen = jnp.take_along_axis(log_p, batch["action"][..., None], -1)[..., 0]
            ratio = jnp.exp(chosen - batch["old"])
            clipped = jnp.clip(ratio, 0.8, 1.2)
            policy = -jnp.minimum(ratio * gains, clipped * gains).mean() / scale
            found = mlp(params["value"], batch["seen"])[..., 0]
            entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1).mean()
            value = jnp.mean((found - returns) ** 2)
            return policy + 0.5 * value - 0.01 * entropy, jnp.mean(ratio != clipped)

        (value, clipped), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        explained = 1 - jnp.var(returns - values) / jnp.var(returns)
        metrics = {"loss": value, "clipped": clipped, "explained": explained}
        return {"params": params, "opt": opt}, metrics

    params = {"policy": mlp_init(1, 6, 24, 4), "value": mlp_init(2, 6, 24, 1)}

    def batch_of(i: int) -> Any:
        batch = {"seen": normal(i, rows, steps, 6), "action": integers(i, 4, rows, steps)}
        batch |= {"old": 0.1 * normal(i + 1, rows, steps) - 1.4, "last": normal(i + 2, rows)}
        batch |= {"reward": normal(i + 3, rows, steps)}
        return batch | {"done": (normal(i + 4, rows, steps) > 1).astype(jnp.float32)}

    return Unusual(step, {"params": params, "opt": tx.init(params)}, batch_of)


def mixed_images() -> Unusual:
    """Mixup and CutMix with the images of a permutation, a moving average of the parameters, and
    the largest differences of rows from the mean as a metric."""
    tx, classes = adam(), 5

    def step(state: Any, batch: Any) -> Any:
        key, by, share, at = jax.random.split(state["key"], 4)
        x, labels = batch["x"], jax.nn.one_hot(batch["label"], classes)
        order = jax.random.permutation(by, len(x))
        share = jax.random.uniform(share, (len(x), 1))
        place = jnp.arange(8) - jax.random.randint(at, (2, 1), 0, 8)
        is_cut = jnp.all(jnp.abs(jnp.stack(jnp.meshgrid(*place))) < 3, axis=0)
        weight = share[:, :, None, None]
        x = jnp.where(is_cut[..., None], x[order], weight * x + (1 - weight) * x[order])
        labels = share * labels + (1 - share) * labels[order]

        def loss(params: Any) -> Any:
            logits = mlp(params, x.reshape(len(x), -1))
            return optax.softmax_cross_entropy(logits, labels).mean(), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt = updated(tx, grads, state["opt"], state["params"])
        slow = optax.incremental_update(params, state["slow"], 0.05)
        far = jnp.max(jnp.abs(logits - logits.mean(0)), axis=0)
        return {"params": params, "slow": slow, "opt": opt, "key": key}, (value, far)

    params = mlp_init(1, 192, 24, 24, classes)
    state = {"params": params, "slow": mlp_init(1, 192, 24, 24, classes), "opt": tx.init(params)}

    def batch_of(i: int) -> Any:
        return {"x": normal(i, 16, 8, 8, 3), "label": integers(i, classes, 16)}

    return Unusual(step, state | {"key": jax.random.key(3)}, batch_of)


STEPS: dict[str, Callable[[], Unusual]] = {
    "memory-bank": memory_bank,
    "groups-of-rewards": groups_of_rewards,
    "balanced-experts": balanced_experts,
    "population": population,
    "globe": globe,
    "siamese": siamese,
    "clipped-policy": clipped_policy,
    "mixed-images": mixed_images,
}

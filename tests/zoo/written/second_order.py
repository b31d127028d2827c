"""Gradients of gradients: Newton steps by conjugate gradients, MAML, a WGAN's penalty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    adamw,
    cross_entropy,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
)


@zoo_program("newton-cg", source="written", layers=False)
def newton_cg(size: Size) -> ZooStep:
    """Hessian-vector products, forward over reverse, inside conjugate gradients that stop early.
    A step along the curvature of the whole batch is no mean of steps over rows."""
    rows, width, hidden, classes = pick(size, (16, 7, 12, 3), (65536, 1024, 4096, 1000))

    def make_state() -> Any:
        return {"params": mlp_init(jax.random.key(0), width, hidden, hidden, classes)}

    def dot(a: Any, b: Any) -> jax.Array:
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x * y), a, b))

    def axpy(s: jax.Array, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda x, y: s * x + y, x, y)

    def conjugate_gradients(product: Any, b: Any, steps: int) -> Any:
        def go_on(carry: Any) -> jax.Array:
            return (carry[3] > 1e-8) & (carry[4] < steps)

        def iterate(carry: Any) -> Any:
            x, r, p, rr, n = carry
            ap = product(p)
            alpha = rr / dot(p, ap)
            x, r = axpy(alpha, p, x), axpy(-alpha, ap, r)
            new = dot(r, r)
            return x, r, axpy(new / rr, p, r), new, n + 1

        start = jax.tree.map(jnp.zeros_like, b), b, b, dot(b, b), 0
        return jax.lax.while_loop(go_on, iterate, start)[0]

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(mlp(params, x, jnp.tanh), labels)

        value, grads = jax.value_and_grad(loss)(state["params"])

        def damped(v: Any) -> Any:
            return axpy(jnp.float32(1.0), v, jax.jvp(jax.grad(loss), (state["params"],), (v,))[1])

        direction = conjugate_gradients(damped, grads, 5)
        return {"params": axpy(jnp.float32(-0.5), direction, state["params"])}, value

    return ZooStep(step, make_state, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@zoo_program("maml", source="written", layers=True)
def maml(size: Size) -> ZooStep:
    """Tasks are the rows; each takes two steps of its own within the loss."""
    tasks, shots, width, hidden = pick(size, (16, 5, 3, 12), (1024, 32, 64, 2048))

    def fit(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((mlp(params, x, jnp.tanh) - y) ** 2)

    def after_adaptation(params: Any, task: dict[str, jax.Array]) -> jax.Array:
        adapted = params
        for _ in range(2):
            grads = jax.grad(fit)(adapted, task["x"], task["y"])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, grads)
        return fit(adapted, task["query_x"], task["query_y"])

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return jax.vmap(after_adaptation, in_axes=(None, 0))(params, batch).mean()

    def make_batch(i: int) -> tuple:
        x, query = normal(2 * i, tasks, shots, width), normal(2 * i + 1, tasks, shots, width)
        phase = normal(i, tasks, 1, 1)
        target = lambda x: jnp.sin(x[..., :1] + phase)  # noqa: E731
        return ({"x": x, "y": target(x), "query_x": query, "query_y": target(query)},)

    return trained(lambda: mlp_init(jax.random.key(0), width, hidden, hidden, 1), loss, make_batch)


@zoo_program("wgan-gp", source="written", layers=False)
def wgan_gp(size: Size) -> ZooStep:
    """Several critic steps in a scan, each with the norm of the critic's gradient in its loss, then
    a generator step. Layers inside the scan are out of a pipeline's reach."""
    rows, width, latent, hidden, rounds = pick(size, (16, 6, 4, 16, 2), (65536, 784, 128, 4096, 5))
    tx = adamw()

    def make_state() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        g = mlp_init(a, latent, hidden, hidden, width)
        c = mlp_init(b, width, hidden, hidden, 1)
        return {"g": g, "c": c, "g_opt": tx.init(g), "c_opt": tx.init(c), "key": jax.random.key(2)}

    def critic(c: Any, x: jax.Array) -> jax.Array:
        return mlp(c, x, jax.nn.silu)[..., 0]

    def c_loss(c: Any, g: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        noise_key, mix_key = jax.random.split(key)
        fake = mlp(g, jax.random.normal(noise_key, (len(x), latent)))
        mixed = x + jax.random.uniform(mix_key, (len(x), 1)) * (fake - x)
        slope = jax.vmap(jax.grad(critic, 1), (None, 0))(c, mixed)
        penalty = jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)
        return critic(c, fake).mean() - critic(c, x).mean() + 10 * penalty

    def step(state: Any, x: jax.Array) -> Any:
        key, g_key, c_key = jax.random.split(state["key"], 3)

        def round_(carry: Any, key: jax.Array) -> Any:
            c, opt = carry
            value, grads = jax.value_and_grad(c_loss)(c, state["g"], x, key)
            updates, opt = tx.update(grads, opt, c)
            return (optax.apply_updates(c, updates), opt), value

        start = state["c"], state["c_opt"]
        (c, c_opt), values = jax.lax.scan(round_, start, jax.random.split(c_key, rounds))

        def g_loss(g: Any) -> jax.Array:
            return -critic(c, mlp(g, jax.random.normal(g_key, (len(x), latent)))).mean()

        grads = jax.grad(g_loss)(state["g"])
        updates, g_opt = tx.update(grads, state["g_opt"], state["g"])
        g = optax.apply_updates(state["g"], updates)
        return {"g": g, "c": c, "g_opt": g_opt, "c_opt": c_opt, "key": key}, values

    return ZooStep(step, make_state, lambda i: (normal(i, rows, width),))

"""Models defined by equations: neural ODEs, a deep equilibrium, a physics-informed network."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    cross_entropy,
    dense_init,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
)


def field(params: Any, t: jax.Array, y: jax.Array) -> jax.Array:
    time = jnp.broadcast_to(t, (*y.shape[:-1], 1))
    return mlp(params, jnp.concatenate([y, time], axis=-1), jnp.tanh)


@zoo_program("neural-ode", source="written", layers=False)
def neural_ode(size: Size) -> ZooStep:
    """Fixed steps of Runge-Kutta's fourth order in a scan, differentiated through."""
    rows, width, hidden, times = pick(
        size, (16, 3, 24, 5), (65536, 64, 4096, 64), (8192, 64, 2048, 16)
    )

    def rk4(params: Any, y: jax.Array, t: jax.Array) -> Any:
        h = 1 / times
        k1 = field(params, t, y)
        k2 = field(params, t + h / 2, y + h / 2 * k1)
        k3 = field(params, t + h / 2, y + h / 2 * k2)
        k4 = field(params, t + h, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    def loss(params: Any, start: jax.Array, path: jax.Array) -> jax.Array:
        _, ys = jax.lax.scan(partial(rk4, params), start, jnp.arange(times) / times)
        return jnp.mean((ys.swapaxes(0, 1) - path) ** 2)

    return trained(
        lambda: mlp_init(jax.random.key(0), width + 1, hidden, hidden, width),
        loss,
        lambda i: (normal(i, rows, width), normal(i + 1, rows, times, width)),
    )


def integrate(f: Any, y: Any, end: float, tolerance: float) -> Any:
    """y(end) of y' = f(t, y) from t = 0, by Heun's method with Euler's as its error estimate and a
    step for all rows; `y` is a tree."""

    def add(y: Any, h: jax.Array, *slopes: Any) -> Any:
        return jax.tree.map(lambda y, *k: y + h * sum(k) / len(k), y, *slopes)

    def size_of(k1: Any, k2: Any) -> jax.Array:
        gaps = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), k1, k2)
        return jax.tree.reduce(jnp.maximum, gaps)

    def advance(carry: Any) -> Any:
        t, h, y, n = carry
        h = jnp.minimum(h, end - t)
        k1 = f(t, y)
        k2 = f(t + h, add(y, h, k1))
        error = h / 2 * size_of(k1, k2)
        accepted = error < tolerance
        moved = add(y, h, k1, k2)
        y = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), moved, y)
        factor = jnp.clip(0.9 * jnp.sqrt(tolerance / (error + 1e-9)), 0.2, 5.0)
        return jnp.where(accepted, t + h, t), h * factor, y, n + 1

    def go_on(carry: Any) -> jax.Array:
        t, _, _, n = carry
        return (t < end - 1e-6) & (n < 200)

    return jax.lax.while_loop(go_on, advance, (0.0, 0.1 * end, y, 0))[2]


@zoo_program("neural-ode-adaptive", source="written", layers=False, rtol=5e-3, atol=1e-3)
def neural_ode_adaptive(size: Size) -> ZooStep:
    """An unknown number of steps in a `while_loop`; gradients by the adjoint equation, itself
    integrated backwards, as a `custom_vjp`. All rows share a step size."""
    rows, width, hidden, classes = pick(size, (16, 5, 16, 3), (65536, 64, 4096, 10))
    tolerance = 1e-3

    @jax.custom_vjp
    def flow(params: Any, y: jax.Array) -> jax.Array:
        return integrate(partial(field, params), y, 1.0, tolerance)

    def forward(params: Any, y: jax.Array) -> Any:
        out = flow(params, y)
        return out, (params, out)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        params, out = saved

        def slopes(s: jax.Array, state: Any) -> Any:
            y, a, _ = state
            dy, pull = jax.vjp(lambda p, y: field(p, 1 - s, y), params, y)
            d_params, d_y = pull(a)
            return -dy, d_y, d_params

        zeros = jax.tree.map(jnp.zeros_like, params)
        _, a, grads = integrate(slopes, (out, cotangent, zeros), 1.0, tolerance)
        return grads, a

    flow.defvjp(forward, backward)

    def init() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        return {
            "field": mlp_init(a, width + 1, hidden, hidden, width),
            "out": dense_init(b, width, classes),
        }

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(flow(params["field"], x) @ params["out"], labels)

    return trained(init, loss, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@zoo_program("equilibrium", source="written", layers=False)
def equilibrium(size: Size) -> ZooStep:
    """z = tanh(W z + U x) iterated until it stands still; its gradient solves the transposed
    equation the same way."""
    rows, width, dim, classes = pick(size, (16, 7, 12, 3), (65536, 1024, 8192, 1000))

    def fixed_point(f: Any, z: jax.Array) -> jax.Array:
        def go_on(carry: Any) -> jax.Array:
            before, z, n = carry
            return (jnp.abs(z - before).max() > 1e-6) & (n < 100)

        def iterate(carry: Any) -> Any:
            _, z, n = carry
            return z, f(z), n + 1

        return jax.lax.while_loop(go_on, iterate, (z, f(z), 0))[1]

    def cell(params: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(z @ params["w"] + x @ params["u"])

    @jax.custom_vjp
    def solve(params: Any, x: jax.Array) -> jax.Array:
        return fixed_point(partial(cell, params, x), jnp.zeros((x.shape[0], dim)))

    def forward(params: Any, x: jax.Array) -> Any:
        z = solve(params, x)
        return z, (params, x, z)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        params, x, z = saved
        _, pull_z = jax.vjp(partial(cell, params, x), z)
        u = fixed_point(lambda u: pull_z(u)[0] + cotangent, cotangent)
        _, pull = jax.vjp(lambda p, x: cell(p, x, z), params, x)
        return pull(u)

    solve.defvjp(forward, backward)

    def init() -> Any:
        a, b, c = jax.random.split(jax.random.key(0), 3)
        cell = {"w": 0.4 * dense_init(a, dim, dim), "u": dense_init(b, width, dim)}
        return {"cell": cell, "out": dense_init(c, dim, classes)}

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(solve(params["cell"], x) @ params["out"], labels)

    return trained(init, loss, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@zoo_program("pinn", source="written", layers=True)
def pinn(size: Size) -> ZooStep:
    """Burgers' equation: derivatives of the network by its inputs, within the loss."""
    rows, hidden, depth = pick(size, (16, 16, 2), (262144, 2048, 6), (16384, 2048, 4))

    def loss(params: Any, points: jax.Array, edge: jax.Array, value: jax.Array) -> jax.Array:
        def u(x: jax.Array, t: jax.Array) -> jax.Array:
            return mlp(params, jnp.stack([x, t]), jnp.tanh)[0]

        def residual(point: jax.Array) -> jax.Array:
            x, t = point
            u_x = jax.grad(u)
            u_xx = jax.grad(u_x)
            return jax.grad(u, 1)(x, t) + u(x, t) * u_x(x, t) - 0.01 * u_xx(x, t)

        inside = jnp.mean(jax.vmap(residual)(points) ** 2)
        return inside + jnp.mean((jax.vmap(lambda p: u(*p))(edge) - value) ** 2)

    return trained(
        lambda: mlp_init(jax.random.key(0), 2, *[hidden] * depth, 1),
        loss,
        lambda i: (normal(i, rows, 2), normal(i + 1, rows, 2), normal(i, rows)),
    )

"""equinox and the libraries built on it: diffrax, optimistix, lineax, flowjax, paramax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import images, label_loss, next_token_loss, rows_of, tokens, train_step


def _step_of_module(
    make_module: Callable[[], Any], loss_fn: Callable[..., jax.Array], make_batch: Any
) -> ZooStep:
    """Parameters are the module's arrays; everything else of it is closed over."""
    import equinox as eqx

    shapes = eqx.filter_eval_shape(make_module)
    _, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def make_params() -> Any:
        return eqx.filter(make_module(), eqx.is_array)

    def loss(params: Any, *batch: Any) -> jax.Array:
        return loss_fn(eqx.combine(params, static), *batch)

    return train_step(loss, make_params, make_batch)


@zoo_program("equinox-vit", source="equinox", layers=True, packages=("equinox",))
def equinox_vit(size: Size) -> ZooStep:
    import equinox as eqx

    width, heads, depth, patch, side, rows = (16, 2, 2, 4, 8, 8)
    if not size.is_small:
        width, heads, depth, patch, side, rows = (1024, 16, 24, 16, 224, 512)  # ViT-L/16

    class Block(eqx.Module):
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            one, two = jax.random.split(key)
            self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=two)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Vit(eqx.Module):
        patches: eqx.nn.Conv2d
        positions: jax.Array
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, depth + 3)
            self.patches = eqx.nn.Conv2d(3, width, patch, patch, key=keys[0])
            count = (side // patch) ** 2
            self.positions = 0.02 * jax.random.normal(keys[1], (count, width))
            self.blocks = [Block(key) for key in keys[3:]]
            self.head = eqx.nn.Linear(width, 10, key=keys[2])

        def __call__(self, image: jax.Array) -> jax.Array:
            x = self.patches(image.transpose(2, 0, 1)).reshape(width, -1).T + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(0))

    def loss(model: Any, batch: Any) -> jax.Array:
        return label_loss(jax.vmap(model)(batch["image"]), batch["label"])

    return _step_of_module(lambda: Vit(jax.random.key(0)), loss, images(rows, side, 10))


@zoo_program("equinox-gru", source="equinox", packages=("equinox",))
def equinox_gru(size: Size) -> ZooStep:
    """A recurrent language model: `eqx.nn.GRUCell` in a scan."""
    import equinox as eqx

    width, length, vocabulary, rows = (16, 6, 32, 8) if size.is_small else (2048, 512, 32000, 256)

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        cell: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            one, two, three = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(vocabulary, width, key=one)
            self.cell = eqx.nn.GRUCell(width, width, key=two)
            self.head = eqx.nn.Linear(width, vocabulary, key=three)

        def __call__(self, sequence: jax.Array) -> jax.Array:
            def scan(hidden: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
                hidden = self.cell(self.embed(token), hidden)
                return hidden, hidden

            _, hidden = jax.lax.scan(scan, jnp.zeros(width), sequence)
            return jax.vmap(self.head)(hidden)

    def loss(model: Any, sequences: jax.Array) -> jax.Array:
        return next_token_loss(jax.vmap(model)(sequences), sequences)

    make = lambda: Model(jax.random.key(0))  # noqa: E731
    return _step_of_module(make, loss, tokens(rows, length, vocabulary))


@zoo_program("diffrax-neural-ode", source="diffrax", packages=("diffrax", "equinox"))
def diffrax_neural_ode(size: Size) -> ZooStep:
    """Adaptive steps, checkpointed backpropagation through a bounded while loop."""
    import diffrax
    import equinox as eqx

    width, hidden, rows = (4, 8, 8) if size.is_small else (256, 1024, 2048)

    def loss(field: Any, batch: Any) -> jax.Array:
        def solve(start: jax.Array) -> jax.Array:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
                max_steps=64,
            )
            return solution.ys[-1]

        return jnp.mean((jax.vmap(solve)(batch["x"]) - batch["y"]) ** 2)

    def make() -> Any:
        return eqx.nn.MLP(width, width, hidden, 2, jnp.tanh, key=jax.random.key(0))

    return _step_of_module(make, loss, rows_of(rows, width, width))


@zoo_program("diffrax-neural-sde", source="diffrax", packages=("diffrax", "equinox"))
def diffrax_neural_sde(size: Size) -> ZooStep:
    """A Brownian path per row, keys in the batch, fixed steps, one argument per array."""
    import diffrax
    import equinox as eqx

    width, hidden, rows, steps = (4, 8, 8, 4) if size.is_small else (256, 2048, 8192, 64)

    def loss(model: Any, starts: jax.Array, seeds: jax.Array) -> jax.Array:
        drift, diffusion = model

        def solve(start: jax.Array, seed: jax.Array) -> jax.Array:
            path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (width,), jax.random.key(seed))
            noise = diffrax.ControlTerm(lambda t, y, args: jnp.diag(jnp.tanh(diffusion(y))), path)
            terms = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: drift(y)), noise)
            solution = diffrax.diffeqsolve(
                terms, diffrax.Euler(), t0=0.0, t1=1.0, dt0=1 / steps, y0=start, max_steps=2 * steps
            )
            return solution.ys[-1]

        ends = jax.vmap(solve)(starts, seeds)
        return jnp.mean((ends.mean(-1) - 1.0) ** 2) + jnp.mean(ends**2)

    def make() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        mlp = lambda key: eqx.nn.MLP(width, width, hidden, 1, jnp.tanh, key=key)  # noqa: E731
        return mlp(one), mlp(two)

    def make_batch(i: int) -> tuple[Any, ...]:
        starts = jax.random.normal(jax.random.key(i), (rows, width))
        return starts, jnp.arange(rows, dtype=jnp.uint32) + i * rows

    return _step_of_module(make, loss, make_batch)


@zoo_program("optimistix-equilibrium", source="optimistix", packages=("optimistix", "equinox"))
def optimistix_equilibrium(size: Size) -> ZooStep:
    """A deep equilibrium model: the fixed point of a layer, differentiated implicitly."""
    import optimistix as optx

    # optimistix solves for the gradient with the Jacobian of the whole fixed point, as a matrix of
    # (rows · width)² entries: 1 GiB here.
    width, rows = (8, 8) if size.is_small else (64, 256)

    def make_params() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return {
            "inner": 0.3 * jax.random.normal(one, (width, width)) / width**0.5,
            "outer": jax.random.normal(two, (width, width)) / width**0.5,
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        driven = batch["x"] @ params["outer"]

        def layer(z: jax.Array, args: Any) -> jax.Array:
            inner, driven = args
            return jnp.tanh(z @ inner + driven)

        solver = optx.FixedPointIteration(rtol=1e-6, atol=1e-6)
        args = (params["inner"], driven)
        found = optx.fixed_point(layer, solver, jnp.zeros_like(driven), args, max_steps=64)
        return jnp.mean((found.value - batch["y"]) ** 2)

    return train_step(loss, make_params, rows_of(rows, width, width))


@zoo_program("optimistix-levenberg", source="optimistix", packages=("optimistix",))
def optimistix_levenberg(size: Size) -> ZooStep:
    """Each row's parameters are fitted by Levenberg–Marquardt inside the step (meta-learning)."""
    import optimistix as optx

    width, rows, points = (2, 8, 6) if size.is_small else (32, 8192, 256)

    def make_params() -> Any:
        return {"start": jnp.ones(width), "scale": jnp.array(0.5)}

    def loss(params: Any, batch: Any) -> jax.Array:
        times = jnp.linspace(0.0, 1.0, points)

        def residual(weights: jax.Array, target: jax.Array) -> jax.Array:
            powers = times[:, None] ** jnp.arange(width)
            return jnp.tanh(powers @ weights) - params["scale"] * target

        def fit(target: jax.Array) -> jax.Array:
            solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
            adjoint = optx.RecursiveCheckpointAdjoint(checkpoints=4)
            found = optx.least_squares(
                residual, solver, params["start"], target, max_steps=4, throw=False, adjoint=adjoint
            )
            return jnp.mean(residual(found.value, target) ** 2)

        return jnp.mean(jax.vmap(fit)(batch["x"]))

    return train_step(loss, make_params, rows_of(rows, points))


@zoo_program("lineax-kalman", source="lineax", packages=("lineax",))
def lineax_kalman(size: Size) -> ZooStep:
    """Linear solves with a learned positive definite operator, by conjugate gradients."""
    import lineax as lx

    width, rows = (8, 8) if size.is_small else (1024, 4096)

    def make_params() -> Any:
        return {"root": jax.random.normal(jax.random.key(0), (width, width)) / width**0.5}

    def loss(params: Any, batch: Any) -> jax.Array:
        matrix = params["root"] @ params["root"].T + jnp.eye(width)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        solver = lx.CG(rtol=1e-5, atol=1e-5, max_steps=32)
        solve = lambda y: lx.linear_solve(operator, y, solver, throw=False).value  # noqa: E731
        return jnp.mean((jax.vmap(solve)(batch["x"]) - batch["y"]) ** 2)

    return train_step(loss, make_params, rows_of(rows, width, width))


@zoo_program("flowjax-coupling", source="flowjax", packages=("flowjax", "paramax", "equinox"))
def flowjax_coupling(size: Size) -> ZooStep:
    """A spline coupling flow, with paramax's wrapped parameters."""
    import equinox as eqx
    import paramax
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    width, layers, hidden, rows = (4, 2, 8, 16) if size.is_small else (64, 16, 1024, 65536)

    def make() -> Any:
        return coupling_flow(
            jax.random.key(0),
            base_dist=Normal(jnp.zeros(width)),
            transformer=RationalQuadraticSpline(knots=4, interval=4),
            flow_layers=layers,
            nn_width=hidden,
        )

    def is_leaf(x: Any) -> bool:
        return isinstance(x, paramax.NonTrainable)

    def arrays(flow: Any) -> Any:
        return eqx.filter(flow, eqx.is_inexact_array, is_leaf=is_leaf)

    flow = make()
    _, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_leaf)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        unwrapped = paramax.unwrap(eqx.combine(params, static, is_leaf=is_leaf))
        return -unwrapped.log_prob(rows).mean()

    def make_batch(i: int) -> tuple[Any, ...]:
        return (jax.random.normal(jax.random.key(i), (rows, width)),)

    return train_step(loss, lambda: arrays(make()), make_batch)

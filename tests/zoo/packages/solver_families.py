"""Steps with a solver inside: optimal transport, Gaussian processes, state-space models, bilevel
problems, evolution strategies and tree search."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import momentum, rows_of, train_step


@zoo_program("ott-sinkhorn", source="ott-jax", packages=("ott",), rtol=5e-3, atol=1e-3)
def ott_sinkhorn(size: Size) -> ZooStep:
    """A generator trained by the entropic transport cost between its rows and the batch's."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    width, hidden, rows = (4, 8, 16) if size.is_small else (256, 4096, 8192)

    def make_params() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return {
            "first": jax.random.normal(one, (width, hidden)) * width**-0.5,
            "second": jax.random.normal(two, (hidden, width)) * hidden**-0.5,
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        made = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
        geometry = pointcloud.PointCloud(made, batch["y"], epsilon=1.0)
        solver = sinkhorn.Sinkhorn(min_iterations=20, max_iterations=20)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    return train_step(loss, make_params, rows_of(rows, width, width), optax.sgd(1e-2))


@zoo_program("tinygp-tasks", source="tinygp", packages=("tinygp",), rtol=5e-3, atol=1e-3)
def tinygp_tasks(size: Size) -> ZooStep:
    """One kernel for many regressions: a Cholesky factor per row of the batch."""
    from tinygp import GaussianProcess, kernels

    rows, points, width = (8, 6, 2) if size.is_small else (512, 1024, 16)

    def make_params() -> Any:
        return {"amplitude": jnp.zeros(()), "scale": jnp.zeros(()), "warp": jnp.eye(width)}

    def loss(params: Any, batch: Any) -> jax.Array:
        kernel = jnp.exp(params["amplitude"]) * kernels.ExpSquared(jnp.exp(params["scale"]))

        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            return GaussianProcess(kernel, x @ params["warp"], diag=0.1).log_probability(y)

        return -jnp.mean(jax.vmap(one)(batch["x"], batch["y"]))

    def make_batch(i: int) -> tuple[Any, ...]:
        x = jax.random.normal(jax.random.key(i), (rows, points, width))
        return ({"x": x, "y": jnp.sin(x[..., 0])},)

    return train_step(loss, make_params, make_batch, optax.sgd(1e-2))


@zoo_program("dynamax-hmm", source="dynamax", packages=("dynamax",), rtol=5e-3, atol=1e-3)
def dynamax_hmm(size: Size) -> ZooStep:
    """A hidden Markov model by gradients: forward filtering in a scan, in log space."""
    from dynamax.hidden_markov_model import DiagonalGaussianHMM

    states, width, rows, length = (3, 2, 8, 6) if size.is_small else (512, 64, 1024, 512)
    model = DiagonalGaussianHMM(states, width)

    def make_params() -> Any:
        params, _ = model.initialize(jax.random.key(0))
        return params._replace(emissions=params.emissions)

    def loss(params: Any, sequences: jax.Array) -> jax.Array:
        each = jax.vmap(lambda sequence: model.marginal_log_prob(params, sequence))
        return -jnp.mean(each(sequences)) / length

    def make_batch(i: int) -> tuple[Any, ...]:
        return (jax.random.normal(jax.random.key(i), (rows, length, width)),)

    return train_step(loss, make_params, make_batch, optax.sgd(1e-3))


@zoo_program("jaxopt-bilevel", source="jaxopt", packages=("jaxopt",), rtol=5e-3, atol=1e-3)
def jaxopt_bilevel(size: Size) -> ZooStep:
    """A regulariser learned through the optimum of a ridge regression, by implicit gradients."""
    import jaxopt

    width, rows = (4, 16) if size.is_small else (2048, 65536)

    def make_params() -> Any:
        return {"penalty": jnp.zeros(width), "start": jnp.zeros((width, 1))}

    def loss(params: Any, batch: Any) -> jax.Array:
        def inner(weights: jax.Array, penalty: jax.Array) -> jax.Array:
            errors = batch["x"] @ weights - batch["y"]
            return jnp.mean(errors**2) + jnp.sum(jnp.exp(penalty)[:, None] * weights**2)

        solver = jaxopt.GradientDescent(inner, stepsize=0.1, maxiter=20, tol=0.0)
        found = solver.run(params["start"], params["penalty"]).params
        return jnp.mean((batch["x"] @ found - 1.1 * batch["y"]) ** 2)

    return train_step(loss, make_params, rows_of(rows, width))


@zoo_program("evosax-strategy", source="evosax", packages=("evosax",), rtol=5e-3, atol=1e-3)
def evosax_strategy(size: Size) -> ZooStep:
    """No gradients: a population asked for, evaluated on the batch and told its fitness."""
    from evosax.algorithms import Open_ES

    width, population, rows = (8, 8, 16) if size.is_small else (65536, 4096, 4096)
    strategy = Open_ES(population, jnp.zeros(width), optimizer=optax.sgd(0.1))
    params = strategy.default_params

    def make_state() -> Any:
        first = strategy.init(jax.random.key(0), jnp.ones(width), params)
        return {"strategy": first, "key": jax.random.key(1)}

    def step(state: Any, batch: Any) -> Any:
        key, ask, tell = jax.random.split(state["key"], 3)
        people, new = strategy.ask(ask, state["strategy"], params)
        errors = people @ batch["x"].T - batch["y"][:, 0]
        fitness = jnp.mean(errors**2, -1)
        new, _ = strategy.tell(tell, people, fitness, new, params)
        return {"strategy": new, "key": key}, fitness.mean()

    return ZooStep(step, make_state, rows_of(rows, width))


@zoo_program("mctx-search", source="mctx", packages=("mctx",), rtol=5e-3, atol=1e-3)
def mctx_search(size: Size) -> ZooStep:
    """A policy improved by Gumbel MuZero's tree search with the model itself, then imitated."""
    import mctx

    width, hidden, actions, rows, simulations = (4, 8, 3, 8, 4)
    if not size.is_small:
        width, hidden, actions, rows, simulations = (512, 4096, 64, 4096, 32)
    optimizer = momentum()

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        draw = lambda key, a, b: jax.random.normal(key, (a, b)) * a**-0.5  # noqa: E731
        params = {
            "trunk": draw(keys[0], width, hidden),
            "policy": draw(keys[1], hidden, actions),
            "value": draw(keys[2], hidden, 1),
            "moves": draw(keys[3], actions, width),
        }
        return params, optimizer.init(params), jax.random.key(1)

    def predict(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ params["trunk"])
        return y @ params["policy"], (y @ params["value"])[:, 0]

    def recurrent(params: Any, _: Any, action: jax.Array, x: jax.Array) -> Any:
        x = jnp.tanh(x + params["moves"][action])
        logits, value = predict(params, x)
        output = mctx.RecurrentFnOutput(
            reward=x[:, 0], discount=jnp.full_like(value, 0.9), prior_logits=logits, value=value
        )
        return output, x

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, key = state
        key, used = jax.random.split(key)
        logits, value = predict(params, batch["x"])
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=batch["x"])
        found = mctx.gumbel_muzero_policy(
            params, used, root, recurrent, num_simulations=simulations,
            max_num_considered_actions=actions,
        )  # fmt: skip

        def loss_fn(params: Any) -> jax.Array:
            logits, value = predict(params, batch["x"])
            policy = optax.softmax_cross_entropy(logits, found.action_weights).mean()
            return policy + jnp.mean((value - batch["y"][:, 0]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    return ZooStep(step, make_state, rows_of(rows, width))

"""Probabilistic programs: numpyro's stochastic variational inference, and samplers of blackjax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import rows_of


@zoo_program("numpyro-svi", source="numpyro", packages=("numpyro",))
def numpyro_svi(size: Size) -> ZooStep:
    """A Bayesian network with a mean-field guide; `SVI.update` as it is."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    width, hidden, rows = (4, 8, 16) if size.is_small else (1024, 16384, 65536)

    def model(x: Any, y: Any) -> None:
        first = numpyro.sample("first", dist.Normal(jnp.zeros((width, hidden)), 1).to_event(2))
        second = numpyro.sample("second", dist.Normal(jnp.zeros((hidden, 1)), 1).to_event(2))
        mean = jnp.tanh(x @ first) @ second
        with numpyro.plate("rows", rows):
            numpyro.sample("y", dist.Normal(mean[:, 0], 1.0), obs=y)

    svi = SVI(model, AutoNormal(model), optax.sgd(1e-4), Trace_ELBO())
    make_rows = rows_of(rows, width)

    def make_batch(i: int) -> tuple[Any, ...]:
        (batch,) = make_rows(i)
        return batch["x"], batch["y"][:, 0]

    def step(state: Any, x: Any, y: Any) -> Any:
        return svi.update(state, x, y)

    return ZooStep(step, lambda: svi.init(jax.random.key(0), *make_batch(0)), make_batch)


@zoo_program("numpyro-vae", source="numpyro", packages=("numpyro",))
def numpyro_vae(size: Size) -> ZooStep:
    """numpyro's example of a variational autoencoder, with parameters of `numpyro.param`."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO

    width, hidden, latent, rows = (12, 8, 2, 16) if size.is_small else (12288, 8192, 512, 4096)

    def dense(name: str, x: Any, ins: int, outs: int) -> Any:
        init = lambda key: jax.random.normal(key, (ins, outs)) * ins**-0.5  # noqa: E731
        return x @ numpyro.param(f"{name}.w", init) + numpyro.param(f"{name}.b", jnp.zeros(outs))

    def model(x: Any) -> None:
        with numpyro.plate("rows", rows):
            z = numpyro.sample("z", dist.Normal(jnp.zeros((rows, latent)), 1).to_event(1))
            y = jax.nn.relu(dense("decode_1", z, latent, hidden))
            logits = dense("decode_2", y, hidden, width)
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    def guide(x: Any) -> None:
        y = jax.nn.relu(dense("encode_1", x, width, hidden))
        mean, scale = dense("mean", y, hidden, latent), dense("scale", y, hidden, latent)
        with numpyro.plate("rows", rows):
            numpyro.sample("z", dist.Normal(mean, jax.nn.softplus(scale)).to_event(1))

    svi = SVI(model, guide, optax.sgd(1e-3), Trace_ELBO())

    def make_batch(i: int) -> tuple[Any, ...]:
        return ((jax.random.uniform(jax.random.key(i), (rows, width)) > 0.5).astype(jnp.float32),)

    def make_state() -> Any:
        return svi.init(jax.random.key(0), *make_batch(0))

    return ZooStep(lambda state, x: svi.update(state, x), make_state, make_batch)


@zoo_program("blackjax-sgld", source="blackjax", packages=("blackjax",))
def blackjax_sgld(size: Size) -> ZooStep:
    """Stochastic gradient Langevin dynamics; the chain's key is state."""
    import blackjax

    width, hidden, rows = (4, 8, 16) if size.is_small else (4096, 16384, 16384)

    def log_density(params: Any, batch: Any) -> Any:
        x, y = batch["x"], batch["y"]
        out = jnp.tanh(x @ params["first"]) @ params["second"]
        prior = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return -jnp.sum((out - y) ** 2) - 0.5 * prior

    sampler = blackjax.sgld(jax.grad(log_density))

    def make_state() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        params = {
            "first": jax.random.normal(one, (width, hidden)) * width**-0.5,
            "second": jax.random.normal(two, (hidden, 1)) * hidden**-0.5,
        }
        return {"params": sampler.init(params), "key": jax.random.key(1)}

    def step(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(state["key"])
        params = sampler.step(used, state["params"], batch, 1e-4)
        return {"params": params, "key": key}, log_density(params, batch)

    return ZooStep(step, make_state, rows_of(rows, width))


@zoo_program("blackjax-hmc", source="blackjax", packages=("blackjax",))
def blackjax_hmc(size: Size) -> ZooStep:
    """A step of Hamiltonian Monte Carlo for many chains at once; the data is the batch."""
    import blackjax

    width, chains, rows = (4, 8, 16) if size.is_small else (1024, 512, 65536)

    def make_state() -> Any:
        return {
            "position": jax.random.normal(jax.random.key(0), (chains, width)),
            "key": jax.random.key(1),
        }

    def step(state: Any, batch: Any) -> Any:
        def log_density(position: Any) -> Any:
            return -jnp.mean((batch["x"] @ position - batch["y"][:, 0]) ** 2)

        sampler = blackjax.hmc(log_density, 0.05, jnp.ones(width), num_integration_steps=4)
        key, used = jax.random.split(state["key"])
        chain = jax.vmap(sampler.init)(state["position"])
        chain, info = jax.vmap(sampler.step)(jax.random.split(used, chains), chain)
        return {"position": chain.position, "key": key}, info.acceptance_rate.mean()

    return ZooStep(step, make_state, rows_of(rows, width))

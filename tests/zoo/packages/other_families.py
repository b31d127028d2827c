"""Libraries with a module system or a subject of their own: e3nn-jax, penzai, brax,
jax-md, gemma."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import (
    momentum,
    next_token_loss,
    tokens,
    train_step,
    train_step_with_statistics,
)


@zoo_program(
    "e3nn-equivariant", source="e3nn-jax", packages=("e3nn_jax", "flax"), rtol=5e-3, atol=5e-4
)
def e3nn_equivariant(size: Size) -> ZooStep:
    """Atoms of a batch of molecules: spherical harmonics, tensor products, energies and forces
    (a gradient inside the loss)."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    molecules, atoms, depth, hidden = (8, 4, 1, "4x0e + 2x1o")
    if not size.is_small:
        molecules, atoms, depth, hidden = (512, 64, 4, "128x0e + 128x1o + 128x2e")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, features: Any, vectors: Any) -> Any:
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=True)
            sent = e3nn.tensor_product(features[None, :], harmonics, filter_ir_out=irreps)
            received = e3nn.mean(sent, axis=1)
            linear = lambda: e3nn.flax.Linear(irreps, force_irreps_out=True)  # noqa: E731
            mixed = linear()(e3nn.concatenate([features, received]).regroup())
            activations = [jax.nn.silu, *[None] * (len(irreps) - 1)]
            return e3nn.scalar_activation(mixed, activations) + linear()(features)

    irreps = e3nn.Irreps(hidden)

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, positions: Any) -> Any:
            vectors = positions[:, None] - positions[None, :] + 0.1
            features = e3nn.IrrepsArray("1x0e", jnp.ones((atoms, 1)))
            features = e3nn.flax.Linear(irreps, force_irreps_out=True)(features)
            for _ in range(depth):
                features = Layer()(features, e3nn.IrrepsArray("1o", vectors))
            return e3nn.flax.Linear("1x0e")(features).array.sum()

    model = Energy()

    def loss(params: Any, batch: Any) -> jax.Array:
        energy = lambda positions: model.apply(params, positions)  # noqa: E731
        energies, slopes = jax.vmap(jax.value_and_grad(energy))(batch["positions"])
        wrong = (energies - batch["energy"]) ** 2
        return jnp.mean(wrong) + jnp.mean((slopes + batch["forces"]) ** 2)

    def make_batch(i: int) -> tuple[Any, ...]:
        draw = jax.random.normal(jax.random.key(i), (2, molecules, atoms, 3))
        energy = jnp.cos(jnp.arange(molecules) + 1.0 * i)
        return ({"positions": draw[0], "forces": 0.1 * draw[1], "energy": energy},)

    def make_params() -> Any:
        positions = jax.random.normal(jax.random.key(5), (atoms, 3))
        return model.init(jax.random.key(0), positions)

    return train_step(loss, make_params, make_batch, optax.sgd(1e-3))


@zoo_program("penzai-llama", source="penzai", layers=True, packages=("penzai",))
def penzai_llama(size: Size) -> ZooStep:
    """penzai's Llama, on named arrays. Parameters are bound in the step to a model without them,
    which is a pytree with constants of its own."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    heads, groups, width, features, hidden, depth, vocabulary, length, rows = (
        (1, 2, 16, 8, 32, 2, 32, 8, 8)
        if size.is_small
        else (8, 4, 4096, 128, 14336, 32, 32000, 2048, 16)  # Mistral-7B
    )
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=heads,
        query_head_multiplier=groups,
        embedding_dim=width,
        projection_dim=features,
        mlp_hidden_dim=hidden,
        num_decoder_blocks=depth,
        vocab_size=vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )

    def make_variables() -> Any:
        model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
        unbound, variables = pz.unbind_params(model, freeze=True)
        return {variable.label: variable.value for variable in variables}, unbound

    def loss(params: Any, unbound: Any, batch: jax.Array) -> Any:
        values = [pz.ParameterValue(label=k, value=v, metadata={}) for k, v in params.items()]
        model = pz.bind_variables(unbound, values)
        named = pz.nx.wrap(batch).tag("batch", "seq")
        positions = pz.nx.arange("seq", batch.shape[1])
        logits = model(named, token_positions=positions).unwrap("batch", "seq", "vocabulary")
        return next_token_loss(logits, batch), unbound

    return train_step_with_statistics(loss, make_variables, tokens(rows, length, vocabulary))


@zoo_program("brax-ppo", source="brax", packages=("brax",), rtol=5e-3, atol=5e-4)
def brax_ppo(size: Size) -> ZooStep:
    """The update of brax's PPO: generalised advantages by a scan over time, normalised over the
    batch, a clipped surrogate and an entropy bonus."""
    from brax.training.agents.ppo import losses, networks
    from brax.training.types import Transition

    observed, acted, rows, time, hidden = (6, 2, 8, 4, (8, 8))
    if not size.is_small:
        observed, acted, rows, time, hidden = (376, 17, 8192, 32, (4096, 4096, 4096))
    made = networks.make_ppo_networks(
        observed, acted, policy_hidden_layer_sizes=hidden, value_hidden_layer_sizes=hidden
    )
    optimizer = momentum()

    def make_state() -> Any:
        one, two, key = jax.random.split(jax.random.key(0), 3)
        params = losses.PPONetworkParams(
            policy=made.policy_network.init(one), value=made.value_network.init(two)
        )
        return params, optimizer.init(params), key

    def make_batch(i: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(i), 4)
        action = jax.random.normal(keys[1], (rows, time, acted))
        data = Transition(
            observation=jax.random.normal(keys[0], (rows, time, observed)),
            action=jnp.tanh(action),
            reward=jax.random.normal(keys[2], (rows, time)),
            discount=jnp.ones((rows, time)),
            next_observation=jax.random.normal(keys[3], (rows, time, observed)),
            extras={
                "state_extras": {"truncation": jnp.zeros((rows, time))},
                "policy_extras": {
                    "raw_action": action,
                    "log_prob": -jnp.ones((rows, time)),
                    "distribution_params": jnp.zeros((rows, time, 2 * acted)),
                },
            },
        )
        return (data,)

    def step(state: Any, data: Any) -> Any:
        params, opt_state, key = state
        key, used = jax.random.split(key)
        grad = jax.value_and_grad(losses.compute_ppo_loss, has_aux=True)
        (_, metrics), grads = grad(params, None, data, used, made)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), metrics

    return ZooStep(step, make_state, make_batch)


@zoo_program("jax-md-potential", source="jax-md", packages=("jax_md", "flax"), rtol=5e-3, atol=5e-4)
def jax_md_potential(size: Size) -> ZooStep:
    """A graph network as potential: configurations of atoms in a periodic box, energies and forces
    (a gradient inside the loss)."""
    import flax.nnx as nnx
    from jax_md import energy, space

    configurations, atoms, width, rounds = (8, 5, 8, 2) if size.is_small else (128, 256, 128, 3)
    displacement, _ = space.periodic(4.0)

    def build() -> Any:
        potential = energy.graph_network(
            displacement,
            1.5,
            key=jax.random.key(0),
            n_recurrences=rounds,
            mlp_sizes=(width, width),
        )
        return potential.model

    graph, _, functions = nnx.split(build(), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graph, params, functions)
        energies, slopes = jax.vmap(jax.value_and_grad(model))(batch["positions"])
        wrong = (energies - batch["energy"]) ** 2
        return jnp.mean(wrong) + jnp.mean((slopes + batch["forces"]) ** 2)

    def make_batch(i: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(i))
        positions = jax.random.uniform(keys[0], (configurations, atoms, 3), maxval=4.0)
        forces = 0.1 * jax.random.normal(keys[1], positions.shape)
        energies = jnp.cos(jnp.arange(configurations) + 1.0 * i)
        return ({"positions": positions, "forces": forces, "energy": energies},)

    return train_step(loss, lambda: nnx.state(build(), nnx.Param), make_batch, optax.sgd(1e-3))


@zoo_program("gemma-3", source="gemma", layers=True, packages=("gemma",))
def gemma_3(size: Size) -> ZooStep:
    """The Gemma 3 of its package: local and global attention in turns, one key-value head, norms
    before and after each block."""
    import dataclasses

    from gemma import gm

    config = gm.nn.Gemma3_1B().config
    rows, length, dtype = 16, 2048, jnp.bfloat16
    if size.is_small:
        rows, length, dtype = 8, 8, jnp.float32
        config = dataclasses.replace(
            config,
            num_embed=64,
            embed_dim=16,
            hidden_dim=32,
            num_heads=2,
            head_dim=8,
            sliding_window_size=4,
            attention_types=config.attention_types[4:7],
        )
    model = gm.nn.Gemma3_1B(config=config, dtype=dtype)

    def loss(params: Any, ids: Any) -> jax.Array:
        return next_token_loss(model.apply(params, ids).logits, ids)

    def make_params() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))

    return train_step(loss, make_params, tokens(rows, length, config.num_embed))

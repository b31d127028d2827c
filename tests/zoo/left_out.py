"""Packages that the zoo does not show, and why: the one list, which docs/zoo.md repeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeftOut:
    """`tried` is the release that pip chose beside JAX 0.12."""

    package: str
    tried: str
    reason: str


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut(
        "gemma",
        "4.0.1",
        "pip does not resolve its requirements (kauldron, xmanager, google-cloud-bigquery) within "
        "four minutes on two busy cores; with their modules installed one by one, it imports",
    ),
    LeftOut(
        "haliax",
        "1.3",
        "imports `BuiltInKeyEntry` of `jax._src.tree_util`, which no JAX from 0.10.2 to 0.12 has",
    ),
    LeftOut(
        "jax-md",
        "the newest",
        "pip did not resolve its requirements within four minutes on two busy cores",
    ),
    LeftOut("kfac-jax", "0.0.8", "reads `jax.core.Effects`, which JAX 0.12 no longer has"),
    LeftOut(
        "levanter",
        "the newest",
        "needs haliax; pip did not resolve it within four minutes on two busy cores",
    ),
    LeftOut(
        "MaxText",
        "0.2.5",
        "does not import without its extras, which need transformers 5.17; the Flax models of "
        "transformers end with release 4",
    ),
    LeftOut("neural-tangents", "0.6.5", "imports `Jaxpr` of `jax.core`, gone in JAX 0.12"),
    LeftOut(
        "sbx-rl",
        "the newest",
        "needs PyTorch, whose CUDA packages did not install within four minutes; brax's PPO stands "
        "for reinforcement learning",
    ),
    LeftOut(
        "tensorflow-probability",
        "0.25.0",
        "the release reads `jax.interpreters.xla.pytype_aval_mappings`, gone since before JAX "
        "0.10.2; distrax, rlax and dynamax run on its nightly build",
    ),
    LeftOut(
        "FlaxT5 of transformers",
        "4.57.6",
        "calls `jnp.clip(a_max=…)`, which JAX 0.12 refuses; other Flax models of that release run",
    ),
)

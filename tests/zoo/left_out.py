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
        "haliax",
        "1.3",
        "imports `BuiltInKeyEntry` of `jax._src.tree_util`, which no JAX from 0.10.2 to 0.12 has",
    ),
    LeftOut("kfac-jax", "0.0.8", "reads `jax.core.Effects`, which JAX 0.12 no longer has"),
    LeftOut(
        "levanter",
        "1.1",
        "needs haliax, and transformers before 4.36, which has other Flax models than the zoo's",
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
        "0.21.0",
        "the newest release, 0.28, excludes JAX 0.12; 0.21 needs tensorflow-probability (below). "
        "brax's PPO stands for reinforcement learning",
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

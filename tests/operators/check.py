"""Cases run by autopar beside `jax.jit`: a family at a time, or each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import autopar
from tests.operators.cases import Case

MESHES = ((8,), (2, 4))


def families(cases: dict[str, Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases.values():
        found.setdefault(case.family, []).append(case)
    return found


def wanted_results(cases: Sequence[Case]) -> list[Any]:
    """The results of each case by `jax.jit`: the oracle."""
    return jax.jit(_together(cases))(*_inputs(cases))


def wrong_cases(
    cases: Sequence[Case], mesh_shape: tuple[int, ...], wanted: Sequence[Any]
) -> dict[str, str]:
    """{primitive: what is wrong}, of cases run as one step on a mesh. If the step fails, each case
    is run alone to find who is to blame."""
    method = autopar.ShardParallel(_mesh(mesh_shape))
    step = autopar.parallelize(_together(cases), method=method, batch_argnums=(), donate_argnums=())
    try:
        results = step(*_inputs(cases))
    except Exception as error:
        if len(cases) == 1:
            text = str(error).partition("\n")[0]
            return {cases[0].primitive: f"{type(error).__name__}: {text}"}
        found: dict[str, str] = {}
        for case, want in zip(cases, wanted, strict=True):
            found |= wrong_cases([case], mesh_shape, [want])
        return found or {"all of them together": f"{type(error).__name__}: {error}"}
    found = {}
    for case, got, want in zip(cases, results, wanted, strict=True):
        what = _difference(got, want, case.tolerance)
        if what:
            found[case.primitive] = what
    return found


def _mesh(shape: tuple[int, ...]) -> autopar.LogicalMesh:
    """Prices only communication, so that what can be split is split."""
    return autopar.LogicalMesh(shape, alpha=(1e-6,) * len(shape), beta=(1e-9,) * len(shape))


def _together(cases: Sequence[Case]) -> Any:
    def step(inputs: Any, dummy: Any) -> Any:
        del dummy
        return [case.step(*args) for case, args in zip(cases, inputs, strict=True)]

    return step


def _inputs(cases: Sequence[Case]) -> Any:
    return [case.args for case in cases], np.zeros((8, 8), np.float32)


def _difference(got: Any, want: Any, tolerance: float) -> str:
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"{jax.tree.structure(got)} instead of {jax.tree.structure(want)}"
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"{ours.dtype}{ours.shape} instead of {theirs.dtype}{theirs.shape}"
        a, b = np.asarray(ours), np.asarray(theirs)
        exact = not np.issubdtype(b.dtype, np.inexact)
        scale = 0.0 if exact else tolerance * max(1.0, float(np.max(np.abs(b), initial=0.0)))
        if not np.allclose(a, b, rtol=0.0 if exact else tolerance, atol=scale, equal_nan=True):
            return f"differs by up to {np.max(np.abs(a.astype(complex) - b.astype(complex))):.2g}"
    return ""

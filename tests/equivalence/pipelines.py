"""What tests of pipelines share: a step on stages gives what `jax.jit` gives, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

import autopar

NUM_STEPS = 3
WIDTH, ROWS = 8, 16


def own_buffers(tree: Any) -> Any:
    """A copy whose buffers may be donated."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, tree)


def weights(key: Any, num: int, width: int = WIDTH) -> list[dict[str, Any]]:
    return [
        {
            "w": jax.random.normal(k, (width, width)) / width**0.5,
            "b": jnp.full((width,), 0.1, jnp.float32),
        }
        for k in jax.random.split(key, num)
    ]


def batch_of(index: int, rows: int = ROWS, width: int = WIDTH) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(100 + index))
    shape = (rows, width)
    return {"x": jax.random.normal(first, shape), "y": jax.random.normal(second, shape)}


def assert_equal(
    got: Any,
    want: Any,
    where: str = "",
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    loose: dict[str, float] | None = None,
) -> None:
    """`loose`: end of a path -> another absolute tolerance."""
    assert jax.tree.structure(got) == jax.tree.structure(want), where
    for (path, b), a in zip(tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        name = f"{where} {keystr(path)}"
        if not isinstance(b, jax.Array):
            assert a == b, name
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == jnp.bfloat16:
            a, b = a.astype(np.float32), b.astype(np.float32)
        own = [x for end, x in (loose or {}).items() if name.endswith(end)]
        np.testing.assert_allclose(a, b, rtol=rtol, atol=max([atol, *own]), err_msg=name)


def check(
    step: Callable[..., Any],
    state: Any,
    method: Any,
    *,
    batches: Sequence[Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> autopar.api.ParallelFunction:
    """Train for some steps, on a pipeline and by `jax.jit`: all results and the last state are the
    same. `step` is from state and batch to (state, results)."""
    batches = [batch_of(i) for i in range(NUM_STEPS)] if batches is None else batches
    parallel = autopar.parallelize(step, method=method, **options)
    serial = jax.jit(step)
    mine, theirs = own_buffers(state), own_buffers(state)
    for index, batch in enumerate(batches):
        mine, result = parallel(mine, batch)
        theirs, wanted = serial(theirs, batch)
        assert_equal(result, wanted, f"step {index}:", rtol=rtol, atol=atol)
    assert_equal(mine, theirs, "state:", rtol=rtol, atol=atol)
    assert parallel.last_executable.plan.is_pipeline
    return parallel

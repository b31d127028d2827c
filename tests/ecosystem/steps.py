"""What the tests of other libraries' steps share: data, methods, and equality of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

import autopar

ON_A_MESH = autopar.ShardParallel((2, 4))
SHARDED = autopar.Zero3Parallel()
TWO_STAGES = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))


def batch(seed: int = 0, rows: int = 16, width: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal((2, rows, width)).astype(np.float32)
    return {"x": draw[0], "y": draw[1]}


def own(tree: Any) -> Any:
    """A copy whose arrays may be donated."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, tree)


def check_close(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Equal up to the order of sums; what is no array is the same, of the same type."""
    flat, tree = tree_flatten_with_path(got)
    wanted, wanted_tree = jax.tree.flatten(want)
    assert tree == wanted_tree
    for (path, one), other in zip(flat, wanted, strict=True):
        if not hasattr(one, "dtype"):
            assert type(one) is type(other) and one == other, keystr(path)
            continue
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype, keystr(path)
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=rtol, atol=atol, err_msg=keystr(path)
        )


def check_functional(
    step: Callable[..., Any],
    state: Any,
    batches: Sequence[Any],
    method: Any,
    jit: Callable[..., Any] = jax.jit,
    **tolerances: float,
) -> tuple[Any, Any]:
    """`state, loss = step(state, batch)` gives what it gives on one device, over all batches.
    Returns the last state and the plan."""
    want, got = state, own(state)
    serial, parallel = jit(step), autopar.parallelize(step, method=method)
    for one in batches:
        want, want_loss = serial(want, one)
        got, got_loss = parallel(got, one)
        check_close(got_loss, want_loss, **tolerances)
    check_close(got, want, **tolerances)
    return got, parallel.last_executable.plan

"""Cases of factorisations and solves of small matrices, eight at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import linalg

from tests.operators.cases import bound, definite, floats, operator

SQUARE, DEFINITE = floats(8, 4, 4) + 3 * np.eye(4, dtype=np.float32), definite(8, 4, 4)
TALL, RIGHT = floats(8, 6, 4), floats(8, 4, 2)
FAMILY = "matrices"


def case(primitive: str, function: Any, *args: Any, **options: Any) -> None:
    operator(primitive, FAMILY, function, *args, **{"tolerance": 1e-3, **options})


def of_magnitude(function: Any) -> Any:
    """Vectors are determined but for their sign."""
    return lambda a: [jnp.abs(x) for x in function(a)]


case("cholesky", linalg.cholesky, DEFINITE)
case(
    "cholesky_update",
    lambda a, v: linalg.cholesky_update(jnp.swapaxes(linalg.cholesky(a), 0, 1), v),
    DEFINITE[0],
    floats(4),
    gradient=False,
)
case(
    "eig",
    lambda a: jnp.sort(jnp.abs(linalg.eig(a, compute_left_eigenvectors=False)[0]), -1),
    SQUARE,
    gradient=False,
)
case("eigh", lambda a: linalg.eigh(a)[1], DEFINITE)
case("hessenberg", of_magnitude(linalg.hessenberg), SQUARE, gradient=False)
case("householder_product", linalg.householder_product, TALL, floats(8, 4), gradient=False)
case("geqrf", of_magnitude(bound("geqrf")), TALL, gradient=False)
case(
    "geqp3",
    lambda a: bound("geqp3", use_magma=None)(a, jnp.zeros((8, 4), jnp.int32))[1],
    TALL,
    gradient=False,
)
case(
    "ormqr",
    lambda a, t, c: bound("ormqr", left=True, transpose=False)(a, t, c),
    TALL,
    floats(8, 4),
    floats(8, 6, 2),
    gradient=False,
)
case("lu", lambda a: linalg.lu(a)[0], SQUARE)
case(
    "lu_pivots_to_permutation",
    lambda a: linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 4),
    SQUARE,
)
case("qr", lambda a: linalg.qr(a, full_matrices=False)[1], TALL)
case("schur", lambda a: jnp.abs(linalg.schur(a)[0]), DEFINITE, gradient=False)
case("svd", lambda a: linalg.svd(a, full_matrices=False, compute_uv=False), TALL)
case(
    "symmetric_product",
    lambda a, c: linalg.symmetric_product(a, c, alpha=2.0, beta=1.0),
    TALL,
    definite(8, 6, 6),
    gradient=False,
)
case(
    "triangular_solve",
    lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
    SQUARE,
    RIGHT,
)
case(
    "tridiagonal",
    lambda a: of_magnitude(lambda x: linalg.tridiagonal(x)[1:3])(a),
    DEFINITE,
    gradient=False,
)
case(
    "tridiagonal_solve",
    lambda d, b: linalg.tridiagonal_solve(d * 0.1, d + 5, d * 0.1, b),
    floats(8, 4),
    RIGHT,
    gradient=True,
)
case(
    "custom_linear_solve",
    lambda a, b: lax.custom_linear_solve(
        lambda x: a @ x,
        b,
        lambda _, y: jnp.linalg.inv(a) @ y,
        transpose_solve=lambda _, y: jnp.linalg.inv(a).T @ y,
    ),
    SQUARE[0],
    floats(4),
)

"""Cases of operators that work on each element alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.operators.cases import bound, floats, integers, is_differentiable, operator, unit

A, B = floats(8, 16), floats(8, 16, seed=1)
UNIT, POSITIVE = unit(8, 16), unit(8, 16, seed=1) * 3
INTS, SMALL = integers(8, 16, limit=100), integers(8, 16, limit=7, seed=1)
COMPLEX = A + 1j * B

ANY = {
    "abs": lax.abs,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "ceil": lax.ceil,
    "cos": lax.cos,
    "cosh": lax.cosh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "floor": lax.floor,
    "is_finite": lax.is_finite,
    "logistic": lax.logistic,
    "neg": lax.neg,
    "round": lax.round,
    "sign": lax.sign,
    "sin": lax.sin,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lambda x: lax.tan(x / 4),
    "tanh": lax.tanh,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.float16),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
}
for name, function in ANY.items():
    tolerance = 1e-3 if name == "convert_element_type" else 2e-5
    operator(name, "elementwise", function, A, tolerance=tolerance)

BOUNDED = {
    "acos": lax.acos,
    "acosh": lambda x: lax.acosh(x + 1),
    "asin": lax.asin,
    "atanh": lax.atanh,
    "cbrt": lax.cbrt,
    "digamma": lax.digamma,
    "erf_inv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "log": lax.log,
    "log1p": lax.log1p,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
}
for name, function in BOUNDED.items():
    operator(name, "positive numbers", function, UNIT)
operator("log2", "positive numbers", bound("log2", accuracy=None), UNIT)
operator("one_minus_square", "positive numbers", bound("one_minus_square"), UNIT)
operator(
    "polynomial",
    "positive numbers",
    lambda x: lax.polynomial(x, (1.0, 2.0, 3.0)),  # type: ignore[attr-defined]
    UNIT,
)

TWO = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lambda a, b: lax.div(a, lax.abs(b) + 1),
    "rem": lambda a, b: lax.rem(a, lax.abs(b) + 1),
    "max": lax.max,
    "min": lax.min,
    "atan2": lax.atan2,
    "nextafter": lax.nextafter,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "eq_to": bound("eq_to"),
    "le_to": bound("le_to"),
    "lt_to": bound("lt_to"),
    "add_any": bound("add_any"),
    "complex": lax.complex,
    "select_n": lambda a, b: lax.select_n(a > 0, a, b),
    "clamp": lambda a, b: lax.clamp(-lax.abs(b), a, lax.abs(b)),
}
for name, function in TWO.items():
    operator(name, "two operands", function, A, B, gradient=is_differentiable(function, A, B))

operator("pow", "special functions", lax.pow, POSITIVE, UNIT)
operator("igamma", "special functions", lax.igamma, POSITIVE, UNIT)
operator("igammac", "special functions", lax.igammac, POSITIVE, UNIT)
operator(
    "igamma_grad_a", "special functions", bound("igamma_grad_a"), POSITIVE, UNIT, gradient=False
)
operator(
    "polygamma",
    "special functions",
    lambda x: lax.polygamma(jnp.ones_like(x), x),
    POSITIVE,
    tolerance=1e-4,
)
operator(
    "zeta",
    "special functions",
    lambda q: lax.zeta(jnp.full_like(q, 2.5), q),
    POSITIVE,
    gradient=False,
)
operator(
    "regularized_incomplete_beta",
    "special functions",
    lambda x: lax.betainc(jnp.full_like(x, 1.5), jnp.full_like(x, 2.5), x),
    UNIT,
)

INTEGERS = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
}
for name, function in INTEGERS.items():
    operator(name, "integers", function, INTS, SMALL)
operator("not", "integers", lax.bitwise_not, INTS)
operator("clz", "integers", lax.clz, INTS)
operator("population_count", "integers", lax.population_count, INTS)
operator(
    "bitcast_convert_type",
    "integers",
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    A,
    gradient=True,
)

operator("conj", "complex numbers", lambda x: lax.conj(x) * (1 + 2j), COMPLEX.astype(np.complex64))
operator("real", "complex numbers", lax.real, COMPLEX.astype(np.complex64))
operator("imag", "complex numbers", lax.imag, COMPLEX.astype(np.complex64))

operator("copy", "identities", lambda x: jnp.array(x, copy=True) * 2, A)
operator("stop_gradient", "identities", lambda x: lax.stop_gradient(x) * x, A)
operator("name", "identities", lambda x: checkpoint_name(jnp.sin(x), "seen"), A)
operator("optimization_barrier", "identities", lambda a, b: lax.optimization_barrier((a, b)), A, B)
operator("tie", "identities", bound("tie"), A, B)

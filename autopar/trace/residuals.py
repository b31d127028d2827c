"""Which forward values a stage keeps for its backward pass, and which it makes again there.

What JAX's derivative hands from forward to backward is chosen for one program, in which XLA fuses
elementwise ops into their readers. Between two programs every such value would be written, kept for
each micro-batch in flight, and read back. So values that cost next to nothing are made again from
others that are there anyway: parameters, constants, or what is kept in any case. The bytes kept
never grow: each value is made again only if the sources that would have to be kept in its place,
and are not kept yet, have fewer bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autopar.trace.figures import aval_bytes
from autopar.trace.program import Equation

# One pass over the result's elements, from elements at the same or fewer places: XLA fuses it into
# whatever reads it. Products, reductions, gathers, sorts and random bits are not among them.
CHEAP = frozenset({
    "abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt",
    "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv",
    "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "reshape", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose",
    "xor",
})  # fmt: skip


def is_cheap(equation: Equation) -> bool:
    return equation.name in CHEAP and not equation.has_effect and not equation.bodies

"""Sizes of products, convolutions and attention kernels: from an `Equation` to an `OpSize`.

An `OpSize` says which dimensions of the operands and results are its rows, columns and so on: all
that the time of such an op depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from jax import lax
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.graph import OpSize
from autopar.ir.program import Equation

RAGGED_PRODUCT = "ragged_dot_general"
# XLA for GPUs (0.11) leaves the product of a matrix and a vector to a library from so many elements
# on, and never that of two vectors.
_LEAST_OF_VECTORS = 1e7
_CAUSAL = ("CAUSAL", "PADDING_CAUSAL")


def equation_work(equation: Equation, avals: Sequence[ShapedArray]) -> OpSize | None:
    """None for any other equation, and if one of the first two operands is a constant."""
    if not all(isinstance(operand, int) for operand in equation.operands[:2]):
        return None
    if equation.name == "dot_general":
        return _product(equation, avals)
    if equation.name == "conv_general_dilated":
        return _convolution(equation, avals)
    if equation.name == RAGGED_PRODUCT:
        return _ragged_product(equation, avals)
    if equation.name in _jax.FUSED_ATTENTION:
        return _attention(equation)
    return None


def num_groups(equation: Equation, avals: Sequence[ShapedArray]) -> int:
    """How often XLA's GPU compiler does the work of a ragged product (JAX 0.12, compiled for
    H100s): for every group over all rows, those of other groups as zeros. A batch is not masked."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, _), (batch, _) = numbers.dot_dimension_numbers
    sizes = equation.operands[2]
    aval = avals[sizes] if isinstance(sizes, int) else sizes.aval
    return 1 if numbers.lhs_ragged_dimensions[0] in batch else aval.shape[-1]


def _ragged_product(equation: Equation, avals: Sequence[ShapedArray]) -> OpSize:
    """Rows of groups times a matrix of each group: one product over all matrices one below the
    other. If rows are what is contracted, a product for each group, the result's first
    dimension."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, right_contracting), (batch, right_batch) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    shapes = _shapes(equation, avals)
    rows = [d for d in range(len(shapes[0])) if d not in (*contracting, *batch)]
    summed = (*groups, *right_contracting)
    columns = [d for d in range(len(shapes[1])) if d not in (*summed, *right_batch)]
    result = len(equation.inputs)
    own = ((result, 0),) if numbers.lhs_ragged_dimensions[0] in contracting else ()
    dims = (*own, *_dims_of(0, batch)), _dims_of(0, rows), _dims_of(1, columns)
    return OpSize("product", (*dims, _dims_of(1, summed)))


def _product(equation: Equation, avals: Sequence[ShapedArray]) -> OpSize | None:
    """None for one that XLA makes of multiplications and sums."""
    (contracting, right_contracting), (batch, right_batch) = equation.params["dimension_numbers"]
    left, right, *_ = _shapes(equation, avals)
    rows = [d for d in range(len(left)) if d not in (*contracting, *batch)]
    columns = [d for d in range(len(right)) if d not in (*right_contracting, *right_batch)]
    m, n, k = (
        prod(shape[d] for d in dims)
        for shape, dims in ((left, rows), (right, columns), (left, contracting))
    )
    if k == 1 or (min(m, n) == 1 and (max(m, n) == 1 or (m + n) * k < _LEAST_OF_VECTORS)):
        return None
    return OpSize(
        "product",
        (_dims_of(0, batch), _dims_of(0, rows), _dims_of(1, columns), _dims_of(0, contracting)),
        is_exact=_is_exact(equation, avals),
    )


def _is_exact(equation: Equation, avals: Sequence[ShapedArray]) -> bool:
    """Whether 32-bit numbers are multiplied as they are, not rounded to TF32."""
    if any(avals[v].dtype.itemsize < 4 for v in equation.inputs[:2]):
        return False
    asked = equation.params["precision"]
    asked = asked if isinstance(asked, tuple) else (asked,)
    return lax.Precision.HIGHEST in asked or lax.DotAlgorithmPreset.F32_F32_F32 in asked


def _convolution(equation: Equation, avals: Sequence[ShapedArray]) -> OpSize | None:
    """Gradients are convolutions too: the kernel's gradient has windows as its result, and no
    stride; the gradient of a strided input has zeros between its rows."""
    params = equation.params
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return None
    numbers = params["dimension_numbers"]
    left, right, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    shapes = _shapes(equation, avals)

    has_holes = prod(params["rhs_dilation"]) > 1
    traits = {"has_holes": has_holes, "is_exact": _is_exact(equation, avals)}

    def size(position: int, spec: Sequence[int]) -> int:
        return prod(shapes[position][d] for d in spec[2:])

    # dims: images, positions of a result, in and out channels, the window
    if size(1, right) > size(2, out) and prod(params["window_strides"]) == 1:
        dims = (
            _dims_of(0, left[1:2]),
            _dims_of(1, right[2:]),
            _dims_of(0, left[:1]),
            _dims_of(2, out[1:2]),
        )
        # A convolution along one dimension has its zeros written out.
        spread = prod(params["lhs_dilation"])
        apart = 0 if spread == 1 else spread if len(out) > 3 else 1
        return OpSize("kernel-gradient", (*dims, _dims_of(2, out[2:])), apart=apart, **traits)
    if prod(params["lhs_dilation"]) > 1:
        dims = (
            _dims_of(0, left[:1]),
            _dims_of(0, left[2:]),
            _dims_of(2, out[1:2]),
            _dims_of(0, left[1:2]),
        )
        return OpSize("input-gradient", (*dims, _dims_of(1, right[2:])), **traits)
    dims = (
        _dims_of(2, out[:1]),
        _dims_of(2, out[2:]),
        _dims_of(0, left[1:2]),
        _dims_of(2, out[1:2]),
    )
    return OpSize("forward", (*dims, _dims_of(1, right[2:])), **traits)


def _attention(equation: Equation) -> OpSize:
    """Queries and keys are (batch, length, heads, head size), or heads before length."""
    length, heads = (1, 2) if equation.params["layout"] == 0 else (2, 1)
    is_causal = getattr(equation.params["mask_type"], "name", "") in _CAUSAL
    kind = "attention" if equation.name == _jax.FUSED_ATTENTION[0] else "attention-gradient"
    dims = (
        _dims_of(0, (0, heads)),
        _dims_of(0, (length,)),
        _dims_of(1, (length,)),
        _dims_of(0, (3,)),
    )
    return OpSize(kind, dims, is_causal)


def _shapes(equation: Equation, avals: Sequence[ShapedArray]) -> list[tuple[int, ...]]:
    return [tuple(avals[v].shape) for v in (*equation.inputs, *equation.results)]


def _dims_of(position: int, dims: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((position, d) for d in dims)

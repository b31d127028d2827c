"""Which dimensions hold rows together: from `Equation`s to classes of tied dimensions.

One rule per primitive says which dimensions of its operands and results an equation ties, and which
it fixes, because the places along them matter (`rewrite.micro_batch_trace` has the idea). An
equation without a rule fixes all of its dimensions. A loop ties what goes into and out of its
bodies, whose equations follow; the trips of a scan are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program
from autopar.rewrite.scan_remat import scan_parts

# Every element of the result depends on the same element of each operand, or on the only one.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "population_count", "pow", "random_clone",
    "random_fold_in", "random_seed", "real", "reduce_precision", "regularized_incomplete_beta",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sharding_constraint", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta", _jax.CONSTRAIN,
}  # fmt: skip
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor",
)  # fmt: skip
# Matrices or vectors along the last dimensions of the first operand: how many these are. Those in
# front of them, which all arrays have, are computed one by one.
_INNER = {
    "cholesky": 2, "cholesky_update": 2, "eig": 2, "eigh": 2, "geqp3": 2, "geqrf": 2,
    "hessenberg": 2, "householder_product": 2, "lu": 2, "lu_pivots_to_permutation": 1, "qr": 2,
    "schur": 2, "svd": 2, "tridiagonal": 2, "tridiagonal_solve": 1,
    "random_unwrap": 0, "random_wrap": 1,
}  # fmt: skip
# Parameters with a size per dimension: primitive -> (parameter, whether of its first operand).
SIZES = {
    "broadcast_in_dim": ("shape", False),
    "reshape": ("new_sizes", False),
    "iota": ("shape", False),
    "random_bits": ("shape", False),
    "random_split": ("shape", False),
    "slice": ("limit_indices", True),
    "dynamic_slice": ("slice_sizes", True),
    "gather": ("slice_sizes", True),
}


class RowTies:
    """Dimensions of values in classes: those of one class hold rows together or not at all."""

    def __init__(self, avals: Sequence[ShapedArray]) -> None:
        self._shapes = [getattr(aval, "shape", ()) for aval in avals]
        self._first = []  # of each value's dimensions among all
        count = 0
        for shape in self._shapes:
            self._first.append(count)
            count += len(shape)
        self._parent = list(range(count))
        self._fixed: list[int] = []
        self._numbered: list[int] = []

    def rank(self, value: int) -> int:
        return len(self._shapes[value])

    def shape(self, operand: Operand) -> tuple[int, ...]:
        return self._shapes[operand] if isinstance(operand, int) else ()

    def fix(self, value: Operand, dims: Iterable[int], numbered: bool = False) -> None:
        """`numbered`: places along them are known by number alone, which some equations of a
        micro-batch may do as well (`rewrite.row_uses`)."""
        if isinstance(value, int):
            first = self._first[value]
            places = self._numbered if numbered else self._fixed
            places.extend([first + dim for dim in dims])

    def tie(self, value: Operand, dim: int, other: Operand, other_dim: int) -> None:
        if isinstance(value, int) and isinstance(other, int):
            one = self._class(self._first[value] + dim)
            another = self._class(self._first[other] + other_dim)
            self._parent[one] = another

    def tie_all(self, values: Iterable[Operand], others: Iterable[Operand]) -> None:
        """Tie all dimensions of each value to those of another with the same shape."""
        for value, other in zip(values, others, strict=True):
            for dim in range(len(self.shape(value))):
                self.tie(value, dim, other, dim)

    def tie_trips(self, stacks: Iterable[Operand], slices: Iterable[Operand]) -> None:
        """Tie the dimensions of slices to those of stacks along a first dimension, and fix it."""
        for stack, part in zip(stacks, slices, strict=True):
            self.fix(stack, (0,))
            for dim in range(len(self.shape(part))):
                self.tie(part, dim, stack, dim + 1)

    def tie_or_fix(self, free: bool, *places: tuple[Operand, int]) -> None:
        """Tie the dimensions at these places if `free`, else fix them."""
        for value, dim in places:
            if free:
                self.tie(value, dim, *places[0])
            else:
                self.fix(value, (dim,))

    def add(self, equation: Equation) -> None:
        """Tie and fix dimensions as an equation needs it."""
        if equation.name in _ELEMENTWISE:
            _elementwise(self, equation)
            return
        rule = _RULES.get(equation.name)
        if rule is not None and not equation.has_effect:
            rule(self, equation)
            return
        for value in (*equation.operands, *equation.results):
            self.fix(value, range(len(self.shape(value))))

    def add_body(self, body: Program) -> None:
        """Tie and fix dimensions as a program needs it; its captured arrays hold no rows."""
        for value, _ in body.captured:
            self.fix(value, range(self.rank(value)))
        for equation in body.equations:
            self.add(equation)

    def rows(
        self, batch: Sequence[tuple[int, int]], numbered: bool = False
    ) -> dict[int, int] | None:
        """Value -> its dimension that is tied to one of the batch's; None if one of these is fixed,
        unless that is `numbered`, or a value has two."""
        classes = {self._class(self._first[value] + dim) for value, dim in batch}
        fixed = self._fixed if numbered else self._every_fixed
        if any(self._class(place) in classes for place in fixed):
            return None
        dims: dict[int, int] = {}
        for value, shape in enumerate(self._shapes):
            first = self._first[value]
            for dim in range(len(shape)):
                if self._class(first + dim) in classes:
                    if value in dims:
                        return None
                    dims[value] = dim
        return dims

    def is_free(self, value: int, dim: int) -> bool:
        """Whether no place tied to this dimension is fixed."""
        wanted = self.class_of(value, dim)
        return all(self._class(place) != wanted for place in self._every_fixed)

    @property
    def _every_fixed(self) -> list[int]:
        return [*self._fixed, *self._numbered] if self._numbered else self._fixed

    def class_of(self, value: int, dim: int) -> int:
        """A number that all dimensions tied to this one share."""
        return self._class(self._first[value] + dim)

    def _class(self, place: int) -> int:
        parent = self._parent
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place


def has_ties(name: str) -> bool:
    """Whether a rule says how a primitive treats the dimensions of its arrays."""
    return name in _ELEMENTWISE or name in _RULES


def _elementwise(ties: RowTies, equation: Equation) -> None:
    result, *others = equation.results
    shape = ties.shape(result)
    for operand in (*equation.operands, *others):
        for dim, size in enumerate(ties.shape(operand)):
            if size == shape[dim]:  # one element may stand for all
                ties.tie(operand, dim, result, dim)


def _same_places(ties: RowTies, equation: Equation, fixed: Iterable[int]) -> None:
    """All arrays have the same dimensions, and elements depend on others along the fixed ones."""
    arrays = [v for v in (*equation.operands, *equation.results) if ties.shape(v)]
    for dim in range(len(ties.shape(arrays[0]))):
        ties.tie_or_fix(dim not in fixed, *((v, dim) for v in arrays))


def _barrier(ties: RowTies, equation: Equation) -> None:
    ties.tie_all(equation.operands, equation.results)


def _bitcast(ties: RowTies, equation: Equation) -> None:
    (operand,), (result,) = equation.operands, equation.results
    same = ties.shape(operand) == ties.shape(result)
    for value in () if same else (operand, result):
        ties.fix(value, range(len(ties.shape(value))))
    if same:
        _elementwise(ties, equation)


def _broadcast(ties: RowTies, equation: Equation) -> None:
    operand, result = equation.operands[0], equation.results[0]
    shape, whole = ties.shape(operand), ties.shape(result)
    for dim, to in enumerate(equation.params["broadcast_dimensions"]):
        if isinstance(operand, int) and shape[dim] == whole[to]:
            ties.tie(operand, dim, result, to)


def _reshape(ties: RowTies, equation: Equation) -> None:
    """Ties the outermost dimensions of each group of dimensions that are merged or split."""
    (operand, *_), (result,) = equation.operands, equation.results
    old, new = ties.shape(operand), ties.shape(result)
    if equation.params.get("dimensions") is not None or 0 in old:
        ties.fix(operand, range(len(old)))
        ties.fix(result, range(len(new)))
        return
    sides = ([d for d, n in enumerate(old) if n > 1], [d for d, n in enumerate(new) if n > 1])
    at, to = 0, 0
    while at < len(sides[0]):
        first, first_to = at, to
        size, size_to = old[sides[0][at]], new[sides[1][to]]
        while size != size_to:
            if size < size_to:
                at += 1
                size *= old[sides[0][at]]
            else:
                to += 1
                size_to *= new[sides[1][to]]
        at, to = at + 1, to + 1
        ties.tie(operand, sides[0][first], result, sides[1][first_to])
        ties.fix(operand, sides[0][first + 1 : at])
        ties.fix(result, sides[1][first_to + 1 : to])


def _transpose(ties: RowTies, equation: Equation) -> None:
    (operand,), (result,) = equation.operands, equation.results
    for to, dim in enumerate(equation.params["permutation"]):
        ties.tie(operand, dim, result, to)


def _without(ties: RowTies, operand: Operand, result: Operand, dropped: Sequence[int]) -> None:
    kept = [d for d in range(len(ties.shape(operand))) if d not in dropped]
    for to, dim in enumerate(kept):
        ties.tie(operand, dim, result, to)


def _reduce(ties: RowTies, equation: Equation) -> None:
    _without(ties, equation.operands[0], equation.results[0], equation.params["axes"])


def _place_of_extreme(ties: RowTies, equation: Equation) -> None:
    ties.fix(equation.operands[0], equation.params["axes"])
    _reduce(ties, equation)


def _squeeze(ties: RowTies, equation: Equation) -> None:
    operand, dropped = equation.operands[0], equation.params["dimensions"]
    ties.fix(operand, dropped)
    _without(ties, operand, equation.results[0], dropped)


def _product(ties: RowTies, equation: Equation) -> None:
    (left, right), (result,) = equation.operands, equation.results
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    for dim, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        ties.tie(left, dim, right, other)
    place = 0
    for dim in left_batch:
        ties.tie(left, dim, result, place)
        place += 1
    for operand, used in ((left, (*left_sum, *left_batch)), (right, (*right_sum, *right_batch))):
        for dim in range(len(ties.shape(operand))):
            if dim not in used:
                ties.tie(operand, dim, result, place)
                place += 1


def _convolution(ties: RowTies, equation: Equation) -> None:
    (left, right), (result,) = equation.operands, equation.results
    numbers, params = equation.params["dimension_numbers"], equation.params
    (batch, feature, *space) = numbers.lhs_spec
    (made, summed, *window) = numbers.rhs_spec
    (out_batch, out_feature, *out_space) = numbers.out_spec
    for value, dims in ((left, space), (right, window), (result, out_space)):
        ties.fix(value, dims)
    one_batch, one_feature = params["batch_group_count"] == 1, params["feature_group_count"] == 1
    ties.tie_or_fix(one_batch, (left, batch), (result, out_batch))
    ties.tie_or_fix(one_feature, (left, feature), (right, summed))
    ties.tie_or_fix(one_batch and one_feature, (right, made), (result, out_feature))


def _concatenate(ties: RowTies, equation: Equation) -> None:
    _same_places(ties, equation, (equation.params["dimension"],))


def _fft(ties: RowTies, equation: Equation) -> None:
    (operand,), (result,) = equation.operands, equation.results
    transformed = len(equation.params["fft_lengths"])
    for dim in range(ties.rank(result)):
        free = dim < ties.rank(result) - transformed
        ties.tie_or_fix(free, (operand, dim), (result, dim))


def _along_axis(ties: RowTies, equation: Equation) -> None:
    _same_places(ties, equation, (equation.params["axis"],))


def _reverse(ties: RowTies, equation: Equation) -> None:
    _same_places(ties, equation, equation.params["dimensions"])


def _sort(ties: RowTies, equation: Equation) -> None:
    _same_places(ties, equation, (equation.params["dimension"],))


def _slice(ties: RowTies, equation: Equation) -> None:
    (operand,), (result,) = equation.operands, equation.results
    for dim, (size, part) in enumerate(zip(ties.shape(operand), ties.shape(result), strict=True)):
        ties.tie_or_fix(size == part, (operand, dim), (result, dim))


def _dynamic_slice(ties: RowTies, equation: Equation) -> None:
    operand, (result,) = equation.operands[0], equation.results
    for dim, (size, part) in enumerate(zip(ties.shape(operand), ties.shape(result), strict=True)):
        ties.tie_or_fix(size == part, (operand, dim), (result, dim))


def _dynamic_update_slice(ties: RowTies, equation: Equation) -> None:
    (operand, update, *_), (result,) = equation.operands, equation.results
    for dim, (size, part) in enumerate(zip(ties.shape(operand), ties.shape(update), strict=True)):
        ties.tie_or_fix(size == part, (operand, dim), (update, dim), (result, dim))


def _pad(ties: RowTies, equation: Equation) -> None:
    operand, result = equation.operands[0], equation.results[0]
    for dim, config in enumerate(equation.params["padding_config"]):
        ties.tie_or_fix(not any(config), (operand, dim), (result, dim))


def _iota(ties: RowTies, equation: Equation) -> None:
    ties.fix(equation.results[0], (equation.params["dimension"],), numbered=True)


def _random_bits(ties: RowTies, equation: Equation) -> None:
    """Bits of rows are drawn as those of the whole batch (`rewrite.micro_batch_body`), or from a
    key of their own."""
    (key,), (result,) = equation.operands, equation.results
    num_keys = len(ties.shape(key))
    for dim in range(num_keys):
        ties.tie(key, dim, result, dim)
    if num_keys:
        ties.fix(result, range(num_keys, ties.rank(result)))


def _random_split(ties: RowTies, equation: Equation) -> None:
    """Each key becomes several; of one key, a row each."""
    (key,), (result,) = equation.operands, equation.results
    num_keys = len(ties.shape(key))
    for dim in range(num_keys):
        ties.tie(key, dim, result, dim)
    ties.fix(result, range(num_keys, ties.rank(result)), numbered=num_keys == 0)


def _one_by_one(ties: RowTies, equation: Equation) -> None:
    """All arrays share their first dimensions, and elements depend on others along the rest."""
    first = equation.operands[0]
    num_free = len(ties.shape(first)) - _INNER[equation.name]
    for value in (*equation.operands, *equation.results):
        for dim in range(num_free):
            ties.tie(value, dim, first, dim)
        ties.fix(value, range(num_free, len(ties.shape(value))))


def _triangular_solve(ties: RowTies, equation: Equation) -> None:
    """One side of the right-hand side has a column, or a row, per system."""
    (matrix, right), (result,) = equation.operands, equation.results
    rank = ties.rank(result)
    systems = rank - 1 if equation.params["left_side"] else rank - 2
    for dim in range(rank):
        is_batch = dim < rank - 2
        ties.tie_or_fix(is_batch, (matrix, dim))
        ties.tie_or_fix(is_batch or dim == systems, (right, dim), (result, dim))
        if is_batch:
            ties.tie(matrix, dim, right, dim)


def _approximate_top_k(ties: RowTies, equation: Equation) -> None:
    _same_places(ties, equation, (equation.params["reduction_dimension"],))


def _gather(ties: RowTies, equation: Equation) -> None:
    (operand, indices), (result,) = equation.operands, equation.results
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    paired = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    for dim, other in zip(*paired, strict=True):
        ties.tie(operand, dim, indices, other)
    last = len(ties.shape(indices)) - 1
    ties.fix(indices, (last,))
    from_indices = [d for d in range(ties.rank(result)) if d not in numbers.offset_dims]
    for dim, to in enumerate(from_indices):
        ties.tie(indices, dim, result, to)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(sizes)) if d not in dropped]
    for dim, to in zip(kept, numbers.offset_dims, strict=True):
        is_whole = sizes[dim] == ties.shape(operand)[dim] and dim not in numbers.start_index_map
        ties.tie_or_fix(is_whole, (operand, dim), (result, to))
    ties.fix(operand, (*numbers.start_index_map, *numbers.collapsed_slice_dims), numbered=True)


def _scatter(ties: RowTies, equation: Equation) -> None:
    (operand, indices, updates), (result,) = equation.operands, equation.results
    numbers = equation.params["dimension_numbers"]
    for dim in range(ties.rank(result)):
        ties.tie(operand, dim, result, dim)
    paired = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    for dim, other in zip(*paired, strict=True):
        ties.tie(result, dim, indices, other)
    last = len(ties.shape(indices)) - 1
    ties.fix(indices, (last,))
    window = numbers.update_window_dims
    from_indices = [d for d in range(len(ties.shape(updates))) if d not in window]
    for dim, to in enumerate(from_indices):
        ties.tie(indices, dim, updates, to)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(ties.rank(result)) if d not in dropped]
    scattered = numbers.scatter_dims_to_operand_dims
    for dim, to in zip(kept, window, strict=True):
        is_whole = ties.shape(result)[dim] == ties.shape(updates)[to] and dim not in scattered
        ties.tie_or_fix(is_whole, (result, dim), (updates, to))
    ties.fix(result, (*scattered, *numbers.inserted_window_dims), numbered=True)


def _windows(ties: RowTies, equation: Equation) -> None:
    """A window of one element, without strides and padding, leaves a dimension as it is."""
    params, arrays = equation.params, (*equation.operands, *equation.results)
    for dim, size in enumerate(params["window_dimensions"]):
        dilations = [params.get(f"{name}_dilation") for name in ("base", "window")]
        alone = size == params["window_strides"][dim] == 1 and not any(params["padding"][dim])
        alone = alone and all(d is None or d[dim] == 1 for d in dilations)
        ties.tie_or_fix(alone, *((v, dim) for v in arrays))


def _scan(ties: RowTies, equation: Equation) -> None:
    (body,) = equation.bodies
    inside, outside = scan_parts(equation, body.inputs), scan_parts(equation, equation.operands)
    num_carry = len(inside.carry)
    ties.tie_all(inside.consts, outside.consts)
    ties.tie_all(inside.carry, outside.carry)
    ties.tie_all(inside.carry, body.outputs[:num_carry])
    ties.tie_all(inside.carry, equation.results[:num_carry])
    ties.tie_trips(outside.xs, inside.xs)
    ties.tie_trips(equation.results[num_carry:], body.outputs[num_carry:])
    ties.add_body(body)


def _while(ties: RowTies, equation: Equation) -> None:
    condition, body = equation.bodies
    num_cond = equation.params["cond_nconsts"]
    first = num_cond + equation.params["body_nconsts"]
    consts, carry = equation.operands[:first], equation.operands[first:]
    ties.tie_all(condition.inputs, (*consts[:num_cond], *carry))
    ties.tie_all(body.inputs, (*consts[num_cond:], *carry))
    ties.tie_all(body.inputs[first - num_cond :], body.outputs)
    ties.tie_all(body.inputs[first - num_cond :], equation.results)
    (goes_on,) = condition.outputs  # one for each row under `jax.vmap`
    for dim in range(len(ties.shape(goes_on))):
        for result in equation.results:
            ties.tie(goes_on, dim, result, dim)
    ties.add_body(condition)
    ties.add_body(body)


def _cond(ties: RowTies, equation: Equation) -> None:
    for branch in equation.bodies:
        ties.tie_all(branch.inputs, equation.operands[1:])
        ties.tie_all(equation.results, branch.outputs)
        ties.add_body(branch)


_SCATTERS = (
    "scatter-add", "scatter_add", "scatter", "scatter-sub", "scatter-mul", "scatter-max",
    "scatter-min",
)  # fmt: skip
_WINDOWS = (
    "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add",
    "select_and_gather_add",
)  # fmt: skip
_RULES: dict[str, Callable[[RowTies, Equation], None]] = {
    "optimization_barrier": _barrier,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("argmax", "argmin"), _place_of_extreme),
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "concatenate": _concatenate,
    "fft": _fft,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_axis),
    "top_k": _along_axis,
    "rev": _reverse,
    "sort": _sort,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "iota": _iota,
    "random_bits": _random_bits,
    "random_split": _random_split,
    "gather": _gather,
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(_WINDOWS, _windows),
    **dict.fromkeys(_INNER, _one_by_one),
    "triangular_solve": _triangular_solve,
    "approx_top_k": _approximate_top_k,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}

"""What a step does with the rows of its batch: two aligned programs → `RowUses`.

A micro-batch's equation has the results of the whole batch's in its rows only if it treats rows
alike. That is known of an equation where `rewrite.row_ties` leaves its batch dimension free; of a
kernel where its sharding rule does; and where the rows that it takes are known integers: with
`x[jnp.arange(B), labels]` each row takes its own column. Any other equation *mixes* rows: of an
operation without a rule nothing is assumed.

Rows may also come from their number alone (`jnp.arange(B)`, a mask of NumPy's). Such rows are
*counted*, and what computes with them counts a micro-batch's own rows from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from autopar.ir.program import Constant, Equation, Operand, Program, values_in
from autopar.rewrite.batch_dependence import RowShapes
from autopar.rewrite.known_integers import KnownElements, constants_of_body
from autopar.rewrite.row_orders import RowOrders, find_row_orders
from autopar.rewrite.row_ties import RowTies, has_ties
from autopar.rewrite.scan_remat import scan_parts
from autopar.tracer.rules import PRIMITIVE_RULES
from autopar.tracer.user_rules import user_rule_of

# Draws, sums and regroups rows by rules of their own (`micro_batch_body`, `row_orders`).
_TREATED_APART = ("random_bits", "ragged_dot_general", "reshape", "optimization_barrier")
# An array of numbers of rows stays one.
_KEEPS_NUMBERS = (
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "concatenate", "convert_element_type",
    "transpose", "copy", "copy_p",
)  # fmt: skip


@dataclass(frozen=True)
class RowUses:
    """By results of equations, those of bodies included.

    mixed:    may combine different rows of the batch.
    unknown:  of these, whose operation has no rule.
    placed:   computed with the places of rows.
    counted:  numbers of rows, or what is made of them.
    orders:   of rows, in each value.
    """

    mixed: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    placed: frozenset[int] = frozenset()
    counted: frozenset[int] = frozenset()
    orders: RowOrders = field(default_factory=RowOrders)

    def mixes(self, equation: Equation) -> bool:
        return not self.mixed.isdisjoint(equation.results)


@dataclass(frozen=True)
class Dealing:
    """Rows of the batch as `micro_batch_rows.cut` deals them to `num` micro-batches."""

    num: int
    blocks: int

    def cut(self, array: np.ndarray, dim: int, order: int = 1) -> np.ndarray:
        shape, blocks = array.shape, order * self.blocks
        inside = shape[dim] // (self.num * blocks)
        apart = array.reshape(*shape[:dim], blocks, self.num, inside, *shape[dim + 1 :])
        stacked = np.moveaxis(apart, dim + 1, 0)
        return stacked.reshape(self.num, *shape[:dim], blocks * inside, *shape[dim + 1 :])

    def takes_own(
        self,
        num_rows: int,
        whole: np.ndarray,
        part: np.ndarray,
        dim: int,
        orders: tuple[int | None, int | None],
    ) -> bool:
        """Whether micro-batches that take their rows by the numbers `part` have what all rows take
        by the numbers `whole`, in the rows along `dim` of the numbers. `orders`: of the rows that
        are taken, and of the numbers."""
        of_rows, of_numbers = orders
        if of_rows is None or of_numbers is None or part.size * self.num != whole.size:
            return False
        if whole.shape[dim] % (self.num * self.blocks * of_numbers):
            return False
        if num_rows % (self.num * self.blocks * of_rows):
            return False
        rows = self.cut(np.arange(num_rows), 0, of_rows)
        if part.size and not 0 <= part.min() <= part.max() < rows.shape[1]:
            return False
        wanted = self.cut(whole, dim, of_numbers)
        return all(np.array_equal(own[part], want) for own, want in zip(rows, wanted, strict=True))


def find_row_uses(
    whole: Program, part: Program, shapes: RowShapes, dealing: Dealing, rows: int
) -> RowUses:
    """`rows`: of a micro-batch."""
    orders = find_row_orders(whole, part, shapes, rows)
    uses = _Uses(shapes, dealing, orders, KnownElements(whole), KnownElements(part))
    uses.program(whole, part, is_outermost=True)
    mixed = frozenset(uses.mixed) | orders.mixed | orders.regrouped
    unknown, placed, counted = map(frozenset, (uses.unknown, uses.placed, uses.counted))
    return RowUses(mixed, unknown, placed, counted, orders)


@dataclass
class _Uses:
    shapes: RowShapes
    dealing: Dealing
    orders: RowOrders
    whole: KnownElements
    part: KnownElements
    mixed: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    placed: set[int] = field(default_factory=set)
    fixed: set[int] = field(default_factory=set)  # have rows, the same whatever the batch holds
    counted: set[int] = field(default_factory=set)  # depend on the place of a row

    def program(self, whole: Program, part: Program, is_outermost: bool = False) -> None:
        for (value, array), (_, large) in zip(part.captured, whole.captured, strict=True):
            if self.shapes.has_rows(value) and not is_cut(array, self.shapes.dims(value)):
                self.fixed.add(value)
                if not self.is_same_cut(value, large, array):
                    self.counted.add(value)
        for large, small in zip(whole.equations, part.equations, strict=True):
            if small.bodies:
                self.loop(large, small)
            elif not (is_outermost and splits_keys(small, self.shapes)):
                self.equation(large, small)

    def is_same_cut(self, value: int, whole: Any, part: Any) -> bool:
        dims = self.shapes.dims(value)
        if len(dims) != 1:
            return False
        wanted = self.dealing.cut(np.asarray(whole), dims[0])
        return all(np.array_equal(rows, np.asarray(part)) for rows in wanted)

    def loop(self, whole: Equation, part: Equation) -> None:
        """Marks what enters bodies, then what leaves them."""
        for large, small in zip(whole.bodies, part.bodies, strict=True):
            constants = constants_of_body(part, small)
            self.fixed.update(v for v, o in constants if isinstance(o, int) and o in self.fixed)
            # What is no constant follows them: carries, and slices of a scan.
            num_others = len(small.inputs) - len(constants)
            others = zip(small.inputs[::-1][:num_others], part.operands[::-1], strict=False)
            entering = [*constants, *others]
            self.counted.update(value for value, operand in entering if self.counts(operand))
            self.program(large, small)
            if self.differs_by_trips(whole, part, large, small):
                self.mixed.update(part.results)
            if small is part.bodies[-1] or part.name == "cond":
                pairs = zip(part.results, small.outputs, strict=True)
                self.counted.update(result for result, out in pairs if self.counts(out))

    def differs_by_trips(
        self, whole: Equation, part: Equation, large: Program, small: Program
    ) -> bool:
        """Whether a micro-batch makes fewer trips, other than one for each of its rows alone."""
        if part.name == "while":
            return _constants(large) != _constants(small)
        if part.name != "scan" or whole.params["length"] == part.params["length"]:
            return False
        inside, outside = scan_parts(part, small.inputs), scan_parts(part, part.operands)
        stacks = (*outside.xs, *part.results[len(inside.carry) :])
        if not any(isinstance(v, int) and 0 in self.shapes.dims(v) for v in stacks):
            return True
        stacked = small.outputs[len(inside.carry) :]
        return not _made_from(small, inside.carry).isdisjoint(values_in(stacked))

    def counts(self, operand: Operand) -> bool:
        return isinstance(operand, int) and operand in self.counted

    def equation(self, whole: Equation, part: Equation) -> None:
        inputs = [v for v in part.inputs if self.shapes.has_rows(v)]
        rows = [r for r in part.results if self.shapes.has_rows(r)]
        if not inputs and not rows:
            return
        counted = self.counted.intersection(inputs)
        mixes = bool(rows) and part.name not in _TREATED_APART and self.mixes(whole, part)
        if self.fixed.issuperset(inputs):
            self.fixed.update(rows)
            if counted or mixes:
                self.counted.update(rows)
            if counted and not rows:
                self.placed.update(part.results)
            return
        if mixes:
            self.mixed.update(part.results)
            if not has_ties(part.name):
                self.unknown.update(part.results)
        if not counted:
            return
        if part.name in _KEEPS_NUMBERS and _is_integer(self.shapes.micro[part.results[0]]):
            self.counted.update(rows)
        elif not self.takes_own_rows(whole, part):
            self.placed.update(part.results)

    def mixes(self, whole: Equation, part: Equation) -> bool:
        """Whether it is not known to make the rows of its results from those of its operands."""
        dims_of = self.shapes.dims
        pairs = any(len(dims_of(r)) > 1 for r in part.results)
        if pairs and any(len(dims_of(v)) == 1 for v in part.inputs):
            return True
        if not has_ties(part.name):
            return not self.is_free_by_rule(whole)
        if not self.orders.joined.isdisjoint(part.results):
            return False
        if part.name in ("slice", "pad") and self.keeps_places(whole, part):
            return False
        if part.name == "conv_general_dilated" and _groups(whole) != _groups(part):
            return False  # a group of features per row, as `vmap` makes them
        own = self.rows_taken_by_number(whole, part)
        values = list(dict.fromkeys((*whole.inputs, *whole.results)))
        number = {value: index for index, value in enumerate(values)}
        ties = RowTies([self.shapes.full[value] for value in values])
        ties.add(
            whole.of_values(
                tuple(o if isinstance(o, Constant) else number[o] for o in whole.operands),
                tuple(number[r] for r in whole.results),
            )
        )
        return not all(
            ties.is_free(number[value], dim)
            for value in values
            for dim in dims_of(value)
            if (value, dim) not in own
        )

    def keeps_places(self, whole: Equation, part: Equation) -> bool:
        """Whether it takes, say, every other row, or puts rows there."""
        long, short = part.operands[0], part.results[0]
        if part.name == "pad":
            long, short = short, long
        if not isinstance(long, int) or not isinstance(short, int):
            return False
        dims = self.shapes.dims(long)
        if len(dims) != 1 or self.shapes.dims(short) != dims:
            return False
        (dim,) = dims
        num_rows = self.shapes.full[long].shape[dim]
        large = _places(whole, self.shapes.full[short].shape[dim], dim)
        small = _places(part, self.shapes.micro[short].shape[dim], dim)
        orders = self.orders.of(long), self.orders.of(short)
        return self.dealing.takes_own(num_rows, large, small, 0, orders)

    # -- rows taken by number

    def rows_taken_by_number(self, whole: Equation, part: Equation) -> set[tuple[int, int]]:
        """(value, dimension) of rows that a gather or scatter takes, each row its own."""
        if not self.takes_own_rows(whole, part):
            return set()
        arrays = [v for v in (part.operands[0], *part.results) if isinstance(v, int)]
        own = {(value, dim) for value in arrays for dim in self.shapes.dims(value)}
        if part.name == "gather":
            own = {place for place in own if place[0] == part.operands[0]}
        return own

    def takes_own_rows(self, whole: Equation, part: Equation) -> bool:
        """Whether the numbers by which a gather or scatter takes elements are, where they depend on
        places of rows, those of each row itself."""
        if part.name == "gather":
            chosen = part.params["dimension_numbers"].start_index_map
            array = part.operands[0]
        elif part.name.startswith("scatter"):
            chosen = part.params["dimension_numbers"].scatter_dims_to_operand_dims
            array = part.results[0]
        else:
            return False
        indices = part.operands[1]
        if not isinstance(array, int) or not isinstance(indices, int):
            return False
        along = self.shapes.dims(indices)
        if len(along) != 1 or along[0] == len(self.shapes.micro[indices].shape) - 1:
            return False
        rows = self.shapes.dims(array)
        large, small = self.whole.read(whole.operands[1]), self.part.read(indices)
        order = self.orders.of(indices)
        if large is None or small is None or order is None or self.counts_unknown(indices):
            return False
        for column, dim in enumerate(chosen):
            numbers, part_numbers = large[..., column], small[..., column]
            if dim in rows:
                if np.ma.is_masked(numbers) or np.ma.is_masked(part_numbers):
                    return False
                size = self.shapes.full[array].shape[dim]
                orders = self.orders.of(array), order
                if not self.dealing.takes_own(
                    size, np.asarray(numbers), np.asarray(part_numbers), along[0], orders
                ):
                    return False
            elif not self.is_cut_of(numbers, part_numbers, along[0], order):
                return False
        return True

    def counts_unknown(self, value: Operand) -> bool:
        """Whether numbers depend on the place of a row in a way that is not known."""
        if not isinstance(value, int) or value not in self.counted:
            return False
        maker = self.part.maker.get(value)
        if maker is not None and maker.name in _KEEPS_NUMBERS:
            return any(map(self.counts_unknown, maker.operands))
        return self.part.read(value) is None or self.whole.read(value) is None

    def is_cut_of(
        self, whole: np.ma.MaskedArray, part: np.ma.MaskedArray, dim: int, order: int
    ) -> bool:
        """Whether known numbers of a micro-batch are those of its rows in the whole batch."""
        if np.ma.getmaskarray(part).all():
            return True  # not known, so made of the batch
        if np.ma.is_masked(whole) or np.ma.is_masked(part):
            return False
        if whole.shape[dim] % (self.dealing.num * self.dealing.blocks * order):
            return False
        wanted = self.dealing.cut(np.asarray(whole), dim, order)
        return all(np.array_equal(rows, np.asarray(part)) for rows in wanted)

    # -- operations without ties

    def is_free_by_rule(self, equation: Equation) -> bool:
        """Whether a kernel's sharding rule lets all its rows be split together."""
        full = self.shapes.full
        operands = [o.aval if isinstance(o, Constant) else full[o] for o in equation.operands]
        results = [full[r] for r in equation.results]
        values = (*equation.operands, *equation.results)
        user_rule = user_rule_of(equation, operands, results)
        if user_rule is not None:
            return self.share_one((*user_rule.operands, *user_rule.results), values, ())
        primitive_rule = PRIMITIVE_RULES.get(equation.name)
        if primitive_rule is None:
            return False
        rule = primitive_rule(equation, operands, results)
        return self.share_one((*rule.operands, *rule.results), values, rule.fixed)

    def share_one(
        self, names: Sequence[Any], values: Sequence[Operand], fixed: Iterable[Any]
    ) -> bool:
        """Whether all dimensions with rows are, or begin with, one free dimension of the rule."""
        first = {
            next(iter(names[index][dim]), None)
            for index, value in enumerate(values)
            if isinstance(value, int)
            for dim in self.shapes.dims(value)
        }
        return len(first) == 1 and None not in first and first.isdisjoint(fixed)


def _constants(program: Program) -> list[str]:
    equations = program.all_equations()
    return [str(o.value) for e in equations for o in e.operands if isinstance(o, Constant)]


def _made_from(program: Program, values: Sequence[int]) -> set[int]:
    made = set(values)
    for equation in program.equations:
        if not made.isdisjoint(equation.inputs):
            made.update(equation.results)
    return made


def _places(equation: Equation, count: int, dim: int) -> np.ndarray:
    """The places that a slice takes along a dimension, or at which a padding puts its operand."""
    if equation.name == "pad":
        first, _, between = equation.params["padding_config"][dim]
        return first + np.arange(count) * (between + 1)
    strides = equation.params["strides"]
    stride = strides[dim] if strides else 1
    return equation.params["start_indices"][dim] + np.arange(count) * stride


def splits_keys(equation: Equation, shapes: RowShapes) -> bool:
    """Whether it splits a key into one per row. Outside of loops that is done for the whole batch,
    as keys are small."""
    return equation.name == "random_split" and not any(map(shapes.has_rows, equation.operands))


def is_cut(array: Any, dims: tuple[int, ...]) -> bool:
    """Whether a captured array is split like the batch. Captured indices, and masks over pairs of
    rows, come from the micro-batch's trace instead."""
    return len(dims) == 1 and jnp.issubdtype(array.dtype, jnp.inexact)


def _groups(convolution: Equation) -> tuple[int, int]:
    params = convolution.params
    return params["feature_group_count"], params["batch_group_count"]


def _is_integer(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or jnp.issubdtype(aval.dtype, jnp.bool_)

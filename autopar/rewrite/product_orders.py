"""Transposes moved from a product's largest array to its smaller ones: `TracedStep` → `TracedStep`.

    s = transpose(k · q)           →   s = transpose(q) · k         if s is the largest
    transpose(s) · k               →   transpose(s · k)             if s is the largest

A product has its result as (batch, dimensions of the first operand, those of the second), each in
the order of its operand, and XLA reads an operand as (batch, free, contracted) or (batch,
contracted, free). It chooses how an array lies so that transposes cost nothing, if all products
around agree on the order within these groups; if they do not, it writes the array again in another
order. Grouped-query attention is the case that counts: `bqngd,bknd->bngqk` gives the scores with
rows before groups, `bngqk,bknd->bqngd` reads them with groups before rows, and XLA writes them, by
far the largest arrays of the step, again and again in both passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import prod

from jax.core import ShapedArray

from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.residuals import is_cheap
from autopar.tracer.copy_equations import Copier, with_avals

_TIMES = 2  # the largest array has so many times the elements of what is transposed in its place


def order_products(step: TracedStep) -> TracedStep:
    """The step with transposes of smaller arrays in place of larger ones; the step itself if there
    are none."""
    copier = Copier(list(step.program.avals))
    new = _ordered(step.program, copier)
    if new is step.program:
        return step
    equations = tuple(with_avals(e, copier.avals) for e in new.equations)
    program = replace(new, equations=equations, avals=copier.avals)
    return step.with_program(program, is_reordered=True)


def _ordered(program: Program, copier: Copier) -> Program:
    """The program with ordered products at any depth. Values keep their numbers, new ones come
    after them."""
    orders = _Orders(program, copier)
    for equation in program.equations:
        orders.add(equation)
    return orders.program()


@dataclass(frozen=True)
class _Operand:
    """An operand of a product, with its contracted and its batch dimensions; these go together with
    those of the other operand, one by one."""

    value: int
    rank: int
    contracted: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        taken = {*self.contracted, *self.batch}
        return tuple(d for d in range(self.rank) if d not in taken)

    def moved(self, value: int, to: Sequence[int]) -> _Operand:
        """Another value in its place, which has dimension d as its dimension `to[d]`."""
        contracted = tuple(to[d] for d in self.contracted)
        return _Operand(value, self.rank, contracted, tuple(to[d] for d in self.batch))

    def with_contracted(self, order: Iterable[int]) -> _Operand:
        return replace(self, contracted=tuple(self.contracted[i] for i in order))

    def with_batch(self, order: Iterable[int]) -> _Operand:
        return replace(self, batch=tuple(self.batch[i] for i in order))


def _operands(product: Equation, avals: Sequence[ShapedArray]) -> tuple[_Operand, _Operand]:
    contracted, batch = product.params["dimension_numbers"]
    left, right = (
        _Operand(value, len(avals[value].shape), tuple(contracted[side]), tuple(batch[side]))
        for side, value in enumerate(product.inputs)
    )
    return left, right


def _product(
    like: Equation, left: _Operand, right: _Operand, result: int, *, is_swapped: bool = False
) -> Equation:
    """A product with the names and types of the equation `like`, whose operands are the other way
    round if `is_swapped`."""
    precision = like.params["precision"]
    if is_swapped and isinstance(precision, tuple):
        precision = precision[::-1]
    numbers = ((left.contracted, right.contracted), (left.batch, right.batch))
    params = {**like.params, "dimension_numbers": numbers, "precision": precision}
    return like.of_values((left.value, right.value), (result,), params=params)


@dataclass(frozen=True)
class _Touch:
    """A product whose largest array is one of a family of values: of the same shape, with
    elementwise equations between them.

    groups:     the dimensions of the family that the product keeps together, in its order.
    may_change: whether the product can follow the order of the family.
    """

    product: Equation
    groups: tuple[tuple[int, ...], ...]
    may_change: bool

    @property
    def is_in_order(self) -> bool:
        return all(map(_rises, self.groups))


class _Orders:
    """Writes the equations of one program, in order."""

    def __init__(self, program: Program, copier: Copier) -> None:
        self.given, self.copier = program, copier
        self.producers = {r: e for e in program.equations for r in e.results}
        reads = program.num_reads()
        transposes = filter(_is_transpose, program.equations)
        # A value -> the transpose that alone reads it.
        self.transposes = {e.inputs[0]: e for e in transposes if reads[e.inputs[0]] == 1}
        self.equations: list[Equation] = []
        self.has_changed = False
        self.bypassed: set[int] = set()  # results of transposes that products no longer read
        self.dropped: set[int] = set()  # results of transposes that products give themselves
        self.chosen = self.products_to_change()

    def add(self, equation: Equation) -> None:
        if not self.dropped.isdisjoint(equation.results):
            return
        if equation.bodies:
            bodies = tuple(_ordered(body, self.copier) for body in equation.bodies)
            if any(new is not old for new, old in zip(bodies, equation.bodies, strict=True)):
                equation, self.has_changed = replace(equation, bodies=bodies), True
        if equation.results[:1] not in self.chosen:
            self.equations.append(equation)
            return
        self.has_changed = True
        if self.large_operand(equation) is None:
            self.give_in_order(equation)
        else:
            self.read_in_order(equation)

    def program(self) -> Program:
        if not self.has_changed:
            return self.given
        reads = replace(self.given, equations=tuple(self.equations)).num_reads()
        unread = {value for value in self.bypassed if not reads[value]}
        equations = tuple(e for e in self.equations if unread.isdisjoint(e.results))
        return replace(self.given, equations=equations)

    # -- which products change

    def products_to_change(self) -> set[tuple[int, ...]]:
        """The results of products that follow the order of a family, for families about whose order
        their products disagree."""
        found: list[tuple[int, _Touch]] = []
        for product in filter(_is_product, self.given.equations):
            side = self.large_operand(product)
            one = self.touch_of_result(product) if side is None else self.touch(product, side)
            found += [one] if one is not None else []
        if all(touch.is_in_order for _, touch in found):
            return set()
        family = self.families()
        touches: dict[int, list[_Touch]] = {}
        for value, touch in found:
            touches.setdefault(family.get(value, value), []).append(touch)
        transposed = {family.get(value, value) for value in self.transposed_by_others()}
        return {
            touch.product.results
            for one, group in touches.items()
            if one not in transposed and _disagree(group)
            if all(t.is_in_order or t.may_change for t in group)
            for touch in group
            if not touch.is_in_order
        }

    def transposed_by_others(self) -> set[int]:
        """Values that are transposed, or made by a transpose, for other readers than products and
        of other values than their results: how those lie decides as well."""
        found: set[int] = set()
        readers = self.given.readers()
        outputs = set(self.given.output_values)
        for transpose in filter(_is_transpose, self.given.equations):
            (source,), (result,) = transpose.inputs, transpose.results
            maker = self.producers.get(source)
            if source not in self.transposes or maker is None or not _is_product(maker):
                found.add(result)
            users = [self.given.equations[i] for i in readers.get(result, ())]
            if result in outputs or not all(map(_is_product, users)):
                found.add(source)
        return found

    def families(self) -> dict[int, int]:
        """Values -> the first one of their family."""
        first: dict[int, int] = {}

        def root(value: int) -> int:
            while first.get(value, value) != value:
                value = first[value]
            return value

        for equation in self.given.equations:
            if equation.name == "transpose" or not is_cheap(equation):
                continue
            (result,) = equation.results
            for value in equation.inputs:
                if self.shape(value) == self.shape(result):
                    a, b = sorted((root(value), root(result)))
                    first[b] = a
        return {value: root(value) for value in first}

    def large_operand(self, product: Equation) -> int | None:
        """Which operand is by far the largest of the product's arrays, if one is."""
        sizes = [self.size(v) for v in product.inputs]
        side = 0 if sizes[0] >= sizes[1] else 1
        others = max(sizes[1 - side], self.size(product.results[0]))
        return side if sizes[side] >= _TIMES * others else None

    def touch(self, product: Equation, side: int) -> tuple[int, _Touch]:
        operand = _operands(product, self.copier.avals)[side]
        transpose, value = self.producers.get(operand.value), operand.value
        groups = (operand.batch, operand.free, operand.contracted)
        if transpose is not None and _is_transpose(transpose):
            dims, value = transpose.params["permutation"], transpose.inputs[0]
            groups = tuple(tuple(dims[d] for d in group) for group in groups)
        # The order of batch dimensions is that of the result too.
        may_change = value != operand.value or _rises(operand.batch)
        return value, _Touch(product, groups, may_change)

    def touch_of_result(self, product: Equation) -> tuple[int, _Touch] | None:
        (result,) = product.results
        if self.size(result) < _TIMES * max(map(self.size, product.inputs)):
            return None
        left, right = _operands(product, self.copier.avals)
        num_batch, middle = len(left.batch), len(left.batch) + len(left.free)
        ends = (range(num_batch), range(num_batch, middle), range(middle, middle + len(right.free)))
        transpose = self.transposes.get(result)
        if transpose is None:
            return result, _Touch(product, tuple(map(tuple, ends)), may_change=True)
        wanted = tuple(transpose.params["permutation"])
        groups = tuple(tuple(wanted.index(d) for d in group) for group in ends)
        may_change = _halves(wanted, num_batch, middle) is not None
        return transpose.results[0], _Touch(product, groups, may_change)

    # -- how they change

    def shape(self, value: int) -> tuple[int, ...]:
        return self.copier.avals[value].shape

    def size(self, value: int) -> int:
        return prod(self.shape(value))

    def transpose(self, value: int, order: Sequence[int], like: Equation) -> int:
        """Add a transpose of a value, with the names of the transpose `like`."""
        shape = self.shape(value)
        aval = self.copier.avals[value].update(shape=tuple(shape[d] for d in order))
        result = self.copier.new_value(aval)
        params = {**like.params, "permutation": tuple(order)}
        self.equations.append(like.of_values((value,), (result,), params=params))
        return result

    def give_in_order(self, product: Equation) -> None:
        """Write a product that gives its result as the transpose that reads it would."""
        (result,) = product.results
        transpose = self.transposes[result]
        left, right = _operands(product, self.copier.avals)
        num_batch = len(left.batch)
        middle = num_batch + len(left.free)
        wanted = tuple(transpose.params["permutation"])
        halves = _halves(wanted, num_batch, middle)
        assert halves is not None
        of_left, of_right, is_swapped = halves
        left, right = (
            self.with_free(
                operand.with_batch(wanted[:num_batch]), [d - begin for d in dims], transpose
            )
            for operand, begin, dims in ((left, num_batch, of_left), (right, middle, of_right))
        )
        pair = (right, left) if is_swapped else (left, right)
        (ordered,) = transpose.results
        self.equations.append(_product(product, *pair, ordered, is_swapped=is_swapped))
        self.dropped.add(ordered)

    def with_free(self, operand: _Operand, order: Sequence[int], like: Equation) -> _Operand:
        """The operand with its free dimensions in another order: transposed, unless it has it."""
        if _rises(order):
            return operand
        free = (operand.free[i] for i in order)
        dims = (*operand.batch, *free, *operand.contracted)
        return operand.moved(self.transpose(operand.value, dims, like), _inverse(dims))

    def read_in_order(self, product: Equation) -> None:
        """Write a product that reads its largest operand as it is before it is transposed."""
        (result,) = product.results
        given, side = _operands(product, self.copier.avals), self.large_operand(product)
        assert side is not None
        large, small = given[side], given[1 - side]
        transpose = self.producers.get(large.value)
        if transpose is None or not _is_transpose(transpose):
            order = _inverse(large.contracted)
            left, right = (operand.with_contracted(order) for operand in given)
            self.equations.append(_product(product, left, right, result))
            return
        dims = tuple(transpose.params["permutation"])
        read = large.moved(transpose.inputs[0], dims)
        batch, contracted = _inverse(read.batch), _inverse(read.contracted)
        new = [
            operand.with_batch(batch).with_contracted(contracted)
            for operand in ((read, small) if side == 0 else (small, read))
        ]
        # Where the dimensions of the given result are in the new one.
        begin = len(batch) + (0 if side == 0 else len(small.free))
        order = list(range(len(self.shape(result))))
        order[: len(batch)] = _inverse(batch)
        order[begin : begin + len(large.free)] = [
            begin + read.free.index(dims[d]) for d in large.free
        ]
        if _rises(order):
            self.equations.append(_product(product, new[0], new[1], result))
        else:
            aval, shape = self.copier.avals[result], self.shape(result)
            value = self.copier.new_value(
                aval.update(shape=tuple(shape[d] for d in _inverse(order)))
            )
            self.equations.append(_product(product, new[0], new[1], value))
            params = {**transpose.params, "permutation": tuple(order)}
            self.equations.append(transpose.of_values((value,), (result,), params=params))
        self.bypassed.add(large.value)


def _disagree(touches: Sequence[_Touch]) -> bool:
    """Whether two of them keep two dimensions together, but in different orders."""
    pairs = {p for touch in touches for group in touch.groups for p in combinations(group, 2)}
    return any((b, a) in pairs for a, b in pairs)


def _halves(
    wanted: tuple[int, ...], num_batch: int, middle: int
) -> tuple[tuple[int, ...], tuple[int, ...], bool] | None:
    """The free dimensions of both operands in the order that is wanted of the result, and whether
    those of the second come first; None if no product gives this order."""
    batch, rest = wanted[:num_batch], wanted[num_batch:]
    left = tuple(d for d in rest if d < middle)
    right = tuple(d for d in rest if d >= middle)
    if any(d >= num_batch for d in batch) or rest not in ((*left, *right), (*right, *left)):
        return None
    return left, right, rest != (*left, *right)


def _is_plain(equation: Equation) -> bool:
    return not (equation.marks or equation.inner_marks)


def _is_transpose(equation: Equation) -> bool:
    return equation.name == "transpose" and bool(equation.inputs) and _is_plain(equation)


def _is_product(equation: Equation) -> bool:
    """Whether it is a product of two values that may get another order."""
    if equation.name != "dot_general" or len(equation.inputs) < 2 or not _is_plain(equation):
        return False
    return equation.params.get("out_sharding") is None


def _rises(dimensions: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(dimensions))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))

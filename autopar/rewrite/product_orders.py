"""Transposes moved from a product's largest array to its smaller ones: `TracedStep` → `TracedStep`.

    s = transpose(k · q)           →   s = transpose(q) · k         if s is the largest
    transpose(s) · k               →   transpose(s · k)             if s is the largest

A product gives its result as (batch, dimensions of the first operand, those of the second), each in
the order of its operand. XLA swaps operands, and so exchanges whole groups, for nothing; any other
order it has to write anew. Grouped-query attention is the case that counts: in `bqngd,bknd->bngqk`
the groups `g` and the rows `q` change places, and XLA writes the scores, by far the largest arrays
of the step, transposed, again and again in both passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from jax.core import ShapedArray

from autopar.ir.program import Equation, Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.copy_equations import Copier, with_avals

_TIMES = 2  # the largest array has so many times the elements of what is transposed in its place


def order_products(step: TracedStep) -> TracedStep:
    """The step with transposes of smaller arrays in place of larger ones; the step itself if there
    are none."""
    copier = Copier(list(step.program.avals))
    new = _ordered(step.program, copier)
    if new is step.program:
        return step
    loop = step.loop
    if loop is not None:
        results = step.program.equations[loop].results
        loop = next(i for i, e in enumerate(new.equations) if e.results == results)
    equations = tuple(with_avals(e, copier.avals) for e in new.equations)
    program = replace(new, equations=equations, avals=copier.avals)
    return replace(step, program=program, loop=loop, is_reordered=True)


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


class _Orders:
    """Writes the equations of one program, in order."""

    def __init__(self, program: Program, copier: Copier) -> None:
        self.given, self.copier = program, copier
        self.producers = {r: e for e in program.equations for r in e.results}
        reads = program.num_reads()
        # The only reader of a value, if that is a transpose.
        self.transposes = {
            e.inputs[0]: e
            for e in program.equations
            if _is_transpose(e) and reads[e.inputs[0]] == 1
        }
        self.equations: list[Equation] = []
        self.has_changed = False
        self.bypassed: set[int] = set()  # results of transposes that products no longer read
        self.dropped: set[int] = set()  # results of transposes that products give themselves

    def add(self, equation: Equation) -> None:
        if not self.dropped.isdisjoint(equation.results):
            return
        if equation.bodies:
            bodies = tuple(_ordered(body, self.copier) for body in equation.bodies)
            if any(new is not old for new, old in zip(bodies, equation.bodies, strict=True)):
                equation, self.has_changed = replace(equation, bodies=bodies), True
        if _is_product(equation) and (
            self.gives_in_order(equation) or self.reads_in_order(equation)
        ):
            self.has_changed = True
        else:
            self.equations.append(equation)

    def program(self) -> Program:
        if not self.has_changed:
            return self.given
        reads = replace(self.given, equations=tuple(self.equations)).num_reads()
        unread = {value for value in self.bypassed if not reads[value]}
        equations = tuple(e for e in self.equations if unread.isdisjoint(e.results))
        return replace(self.given, equations=equations)

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

    def gives_in_order(self, product: Equation) -> bool:
        """Write a product that gives its result as the transpose that reads it would."""
        (result,) = product.results
        transpose = self.transposes.get(result)
        if transpose is None or self.size(result) < _TIMES * max(map(self.size, product.inputs)):
            return False
        left, right = _operands(product, self.copier.avals)
        num_batch = len(left.batch)
        middle = num_batch + len(left.free)
        wanted = tuple(transpose.params["permutation"])
        batch, rest = wanted[:num_batch], wanted[num_batch:]
        of_left = tuple(d for d in rest if d < middle)
        of_right = tuple(d for d in rest if d >= middle)
        is_swapped = rest == (*of_right, *of_left)
        if any(d >= num_batch for d in batch) or not (is_swapped or rest == (*of_left, *of_right)):
            return False  # no product gives this order
        if _rises(batch) and _rises(of_left) and _rises(of_right):
            return False  # XLA swaps the operands itself
        left, right = (
            self.with_free(operand.with_batch(batch), [d - begin for d in free], transpose)
            for operand, begin, free in ((left, num_batch, of_left), (right, middle, of_right))
        )
        pair = (right, left) if is_swapped else (left, right)
        (ordered,) = transpose.results
        self.equations.append(_product(product, *pair, ordered, is_swapped=is_swapped))
        self.dropped.add(ordered)
        return True

    def with_free(self, operand: _Operand, order: Sequence[int], like: Equation) -> _Operand:
        """The operand with its free dimensions in another order: transposed, unless it has it."""
        if _rises(order):
            return operand
        free = (operand.free[i] for i in order)
        dims = (*operand.batch, *free, *operand.contracted)
        return operand.moved(self.transpose(operand.value, dims, like), _inverse(dims))

    def reads_in_order(self, product: Equation) -> bool:
        """Write a product that reads its largest operand as it is before it is transposed."""
        (result,) = product.results
        given = _operands(product, self.copier.avals)
        side = 0 if self.size(given[0].value) >= self.size(given[1].value) else 1
        large, small = given[side], given[1 - side]
        if self.size(large.value) < _TIMES * max(map(self.size, (small.value, result))):
            return False
        transpose = self.producers.get(large.value)
        if transpose is None or not _is_transpose(transpose):
            return self.contracts_in_order(product, given, side)
        dims = tuple(transpose.params["permutation"])
        if all(_rises([dims[d] for d in g]) for g in (large.batch, large.free, large.contracted)):
            return False  # XLA reads it as it lies
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
        return True

    def contracts_in_order(
        self, product: Equation, given: tuple[_Operand, _Operand], side: int
    ) -> bool:
        """Write a product whose contracted dimensions are in the order of one operand."""
        order = _inverse(given[side].contracted)
        if _rises(order):
            return False
        left, right = (operand.with_contracted(order) for operand in given)
        self.equations.append(_product(product, left, right, product.results[0]))
        return True


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

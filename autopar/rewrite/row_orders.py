"""In which order the rows of the batch lie in each value: two aligned programs → `RowOrders`.

A dimension may hold more than one element per row. (B, k) reshaped to B · k has those of a row side
by side: order 1. (k, B) reshaped to k · B has the batch k times: order k, as have `jnp.tile` and k
views that are concatenated. A micro-batch keeps the order, with rows of its own. So it computes its
part of what the whole batch does only where rows that meet have one order. In
`jnp.tile(x, 2) * jnp.repeat(y, 2)` each row meets other rows, and those of a micro-batch meet among
themselves.

Rows that are made from nothing but their number (random bits, `jnp.arange`), or put among zeros,
take the order in which they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.rewrite.batch_dependence import RowShapes
from autopar.rewrite.row_ties import RowTies, has_ties
from autopar.rewrite.scan_remat import scan_parts


@dataclass(eq=False)
class _Open:
    """The order of rows that have none yet."""

    known: int | None = None
    same: _Open | None = None  # the order is that of another one

    def found(self) -> _Open:
        return self if self.same is None else self.same.found()


_Order = int | _Open | None  # None: in groups that no order describes
_Known = tuple[_Order, ...]  # empty: the same in every row


@dataclass(frozen=True)
class RowOrders:
    """By results of equations.

    mixed:     rows of different orders meet.
    regrouped: a reshape puts rows that are far apart into groups.
    joined:    a concatenation of arrays that each hold all rows.
    """

    orders: dict[int, _Order] = field(default_factory=dict)
    mixed: frozenset[int] = frozenset()
    regrouped: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()

    def of(self, value: int) -> int | None:
        """How often the batch repeats within the batch dimension of a value; None if rows are
        regrouped in another way."""
        order = self.orders.get(value, 1)
        return order.found().known or 1 if isinstance(order, _Open) else order


def find_row_orders(whole: Program, part: Program, shapes: RowShapes, rows: int) -> RowOrders:
    """`rows`: of a micro-batch."""
    found = _Finder(shapes, rows)
    found.program(whole, part)
    return RowOrders(
        found.orders, frozenset(found.mixed), frozenset(found.regrouped), frozenset(found.joined)
    )


@dataclass
class _Finder:
    """A value that is in no table has rows alike, or no more elements than rows."""

    shapes: RowShapes
    rows: int
    orders: dict[int, _Order] = field(default_factory=dict)
    mixed: set[int] = field(default_factory=set)
    regrouped: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)

    def program(self, whole: Program, part: Program) -> None:
        self.orders.update((value, 1) for value, _ in part.captured if self.is_long(value))
        for large, small in zip(whole.equations, part.equations, strict=True):
            if small.bodies:
                self.loop(large, small)
            elif small.name == "reshape":
                self.reshape(small)
            elif any(v in self.orders for v in small.inputs) or any(
                map(self.is_long, small.results)
            ):
                self.equation(large, small)

    def size(self, value: int) -> int:
        """The elements along the batch dimension; 0 if there is none."""
        dims = self.shapes.dims(value)
        return self.shapes.micro[value].shape[dims[0]] if dims else 0

    def is_long(self, value: int) -> bool:
        return self.size(value) > self.rows

    def known(self, operand: Operand) -> _Known:
        if not isinstance(operand, int) or operand not in self.orders:
            return ()
        order = self.orders[operand]
        if isinstance(order, _Open):
            order = order.found()
            return (order if order.known is None else order.known,)
        return (order,)

    def put(self, value: int, order: _Known) -> None:
        self.orders.pop(value, None)
        if order and (self.is_long(value) or (None in order and self.shapes.has_rows(value))):
            self.orders[value] = order[0]

    def meet(self, operands: Iterable[_Known], results: Iterable[int]) -> _Known:
        """The one order of operands whose rows meet; where they differ, the results are mixed."""
        given = [order for operand in operands for order in operand]
        if None in given:
            return (None,)
        orders = {order for order in given if isinstance(order, int)}
        if len(orders) > 1:
            self.mixed.update(results)
        if orders:
            order = max(orders)
            for other in given:
                if isinstance(other, _Open):
                    other.found().known = order
            return (order,)
        opened = list(dict.fromkeys(o.found() for o in given if isinstance(o, _Open)))
        for other in opened[1:]:
            other.same = opened[0]
        return tuple(opened[:1])

    def equation(self, whole: Equation, part: Equation) -> None:
        inputs = [v for v in part.inputs if self.shapes.has_rows(v)]
        long = [result for result in part.results if self.is_long(result)]
        if not inputs:
            is_number = part.name in ("random_bits", "iota")
            for result in long:
                alike = part.name == "broadcast_in_dim"
                self.put(result, () if alike else (_Open() if is_number else 1,))
            return
        if any(self.known(v) == (None,) for v in inputs):
            for result in part.results:
                self.put(result, (None,))
            return
        tied = self.tied(whole) if has_ties(part.name) else self.by_size(part)
        for result in long:
            self.put(result, (_Open() if part.name == "pad" else 1,))
        if part.name == "concatenate":
            self.concatenation(part)
        for values in tied:
            met = [self.known(value) for value in values if value in inputs]
            order = self.meet(met, part.results)
            for result in values:
                if met and result in long:
                    self.put(result, order)

    def by_size(self, equation: Equation) -> Iterable[Sequence[int]]:
        classes: dict[int, list[int]] = {}
        for value in (*equation.inputs, *equation.results):
            if self.is_long(value):
                classes.setdefault(self.size(value), []).append(value)
        return classes.values()

    def tied(self, equation: Equation) -> Iterable[Sequence[int]]:
        """The values whose rows an equation ties to each other."""
        values = list(dict.fromkeys((*equation.inputs, *equation.results)))
        number = {value: index for index, value in enumerate(values)}
        ties = RowTies([self.shapes.full[value] for value in values])
        ties.add(
            equation.of_values(
                tuple(o if isinstance(o, Constant) else number[o] for o in equation.operands),
                tuple(number[r] for r in equation.results),
            )
        )
        classes: dict[int, list[int]] = {}
        for value in values:
            if self.is_long(value):
                for dim in self.shapes.dims(value):
                    classes.setdefault(ties.class_of(number[value], dim), []).append(value)
        return classes.values()

    def concatenation(self, equation: Equation) -> None:
        (result,) = equation.results
        dim, orders = equation.params["dimension"], 0
        per_row = set[int]()
        for operand in equation.operands:
            if not isinstance(operand, int) or self.shapes.dims(operand) != (dim,):
                return
            order = self.meet([self.known(operand) or (1,)], ())[0]
            order = 1 if isinstance(order, _Open) else order
            assert order is not None  # that was looked at before
            orders += order
            per_row.add(self.size(operand) // order)
        if len(per_row) == 1:
            self.put(result, (orders,))
            self.joined.add(result)

    # -- reshapes

    def reshape(self, equation: Equation) -> None:
        (result,) = equation.results
        if not equation.inputs or not self.shapes.has_rows(result):
            return
        operand = equation.inputs[0]
        known = self.known(operand)
        if not known and not self.is_long(operand):
            known = (1,)
        if known and isinstance(known[0], _Open):
            known[0].known = 1
            known = (1,)
        if known and known[0] is not None:
            known = (self.reshaped(equation, operand, result, known[0]),)
            if None in known:
                self.regrouped.add(result)
        self.put(result, known)

    def reshaped(
        self, equation: Equation, operand: int, result: int, order: int | _Open
    ) -> int | None:
        assert isinstance(order, int)
        shapes = self.shapes
        old, new = shapes.micro[operand].shape, shapes.micro[result].shape
        if not shapes.dims(operand):
            return 1
        at, to = shapes.dims(operand)[0], shapes.dims(result)[0]
        dims = tuple(equation.params.get("dimensions") or range(len(old)))
        before = prod(old[dim] for dim in dims[: dims.index(at)]) * order
        after, rest = divmod(before, prod(new[:to]))
        # Elements that come together in the result are of one row, or of neighbouring rows.
        are_whole = prod(new) % (prod(new[to + 1 :]) * before * self.rows) == 0
        return after if after and not rest and (after == 1 or are_whole) else None

    # -- loops

    def loop(self, whole: Equation, part: Equation) -> None:
        bodies = list(zip(whole.bodies, part.bodies, strict=True))
        if part.name == "cond":
            for large, small in bodies:
                self.enter(small.inputs, part.operands[1:])
                self.program(large, small)
            for result, outs in zip(
                part.results, zip(*(s.outputs for _, s in bodies), strict=True), strict=True
            ):
                self.put(result, self.meet(map(self.known, outs), part.results))
        elif part.name == "scan":
            self.scan(part, bodies[0])
        else:
            self.while_loop(part, bodies)

    def enter(self, inside: Sequence[int], outside: Sequence[Operand]) -> None:
        for value, operand in zip(inside, outside, strict=True):
            self.put(value, self.known(operand))

    def scan(self, scan: Equation, body: tuple[Program, Program]) -> None:
        inside, outside = scan_parts(scan, body[1].inputs), scan_parts(scan, scan.operands)
        self.enter(inside.consts, outside.consts)
        self.enter(inside.xs, outside.xs)
        num_carry = len(inside.carry)
        carry = self.carries(scan, [body], inside.carry, outside.carry, body[1].outputs[:num_carry])
        for result, order in zip(scan.results, carry, strict=False):
            self.put(result, order)
        trips = [v for v in outside.xs if isinstance(v, int) and 0 in self.shapes.dims(v)]
        order_of_trips = self.meet(map(self.known, trips), ())
        stacks, slices = scan.results[num_carry:], body[1].outputs[num_carry:]
        for result, out in zip(stacks, slices, strict=True):
            is_trips = 0 in self.shapes.dims(result)
            self.put(result, order_of_trips or (1,) if is_trips else self.known(out))

    def while_loop(self, loop: Equation, bodies: list[tuple[Program, Program]]) -> None:
        condition, body = bodies[0][1], bodies[1][1]
        num_cond = loop.params["cond_nconsts"]
        first = num_cond + loop.params["body_nconsts"]
        self.enter(condition.inputs[:num_cond], loop.operands[:num_cond])
        self.enter(body.inputs[: first - num_cond], loop.operands[num_cond:first])
        inside = body.inputs[first - num_cond :]
        carry = self.carries(loop, [bodies[1]], inside, loop.operands[first:], body.outputs)
        self.enter(condition.inputs[num_cond:], inside)
        self.program(*bodies[0])
        for result, order in zip(loop.results, carry, strict=True):
            self.put(result, order)

    def carries(
        self,
        loop: Equation,
        bodies: list[tuple[Program, Program]],
        inside: Sequence[int],
        inits: Sequence[Operand],
        outs: Sequence[Operand],
    ) -> list[_Known]:
        """The orders of carries: those they enter with, or, where that is none, leave with."""
        orders = [self.known(operand) for operand in inits]
        while True:
            for value, order in zip(inside, orders, strict=True):
                self.put(value, order)
            for large, small in bodies:
                self.program(large, small)
            left = [
                self.meet((order, self.known(out)), loop.results)
                for order, out in zip(orders, outs, strict=True)
            ]
            if [len(order) for order in left] == [len(order) for order in orders]:
                return left
            orders = left

"""Where each equation runs in a loop over micro-batches: aligned traces → `MicroBatchPlacement`.

It says which values have rows, which equations the prologue, the loop and the epilogue run, and
which values the loop hands to the epilogue. The loop runs the equations that make or read rows. A
value without rows that flows back into them *crosses* the batch. If it does not depend on a
product, the prologue computes it, for the whole batch; otherwise the loop does, for each
micro-batch. What needs rows by their place waits for the epilogue, to which the loop hands them; so
do rows that other rows decide, if no product depends on them (`rows_outside`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.errors import TraceError
from autopar.ir.program import Equation, Program, values_in
from autopar.rewrite.batch_dependence import (
    NONLINEAR,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    WHOLE,
    ZERO,
    BatchDependence,
    operand_dependence,
    picks_rows,
    result_dependence,
)
from autopar.rewrite.micro_batch_body import MicroBatches
from autopar.rewrite.row_uses import splits_keys
from autopar.rewrite.rows_outside import HEAVY, Pair, RowsOutside, depending_on, heavy_values
from autopar.tracer.regions import BACKWARD, region_by_name
from autopar.tracer.sums import ADDITIONS, LINEAR_UNARY


class MicroBatchPlacement:
    """The decisions for one step; indices are positions in `pairs`."""

    def __init__(
        self, full: Program, part: Program, micro_batches: MicroBatches, out_paths: Sequence[str]
    ) -> None:
        self.full, self.part, self.micro_batches = full, part, micro_batches
        self.out_paths = out_paths
        self.rows_before: set[int] = set()  # rows that the prologue makes
        self.rows_after: set[int] = set()  # pairs with rows that the epilogue runs
        self.waiting: set[int] = set()  # what depends on these
        self.hoisted: set[int] = set()  # crossing values that the prologue computes exactly
        self.pairs = _live_pairs(full, part)
        self.dependence = self.classify()
        self.pairs = [q for p in self.pairs for q in _split_barrier(p, self.dependence)]
        self.producer = {r: i for i, p in enumerate(self.pairs) for r in p.results}
        while crossing := self.light_crossings():
            self.hoisted |= crossing
            self.dependence = self.classify()
        heavy = heavy_values(self.pairs, self.dependence, self.hoisted)
        outside = RowsOutside(self.pairs, self.dependence, micro_batches, heavy)
        self.rows_before, self.rows_after = outside.before, outside.after
        self.by_number = outside.by_number
        self.waiting = depending_on(self.pairs, self.rows_after)
        self.per_micro_batch = self.dependencies(self.crossings(self.pairs))
        self.late = self.reduced_late()
        self.accumulated: dict[int, None] = {}  # values that the loop hands to the epilogue
        self.stacked: dict[int, None] = {}  # rows that are results of the step, or picked from
        self.in_loop: set[int] = set()  # indices of pairs
        self.before: set[int] = set()
        self.after: set[int] = set()
        self.place()
        self.check_crossings()

    # -- classification

    def classify(self) -> dict[int, BatchDependence]:
        shapes = self.micro_batches.shapes
        dependence: dict[int, BatchDependence] = {}
        for value in (*self.part.inputs, *(v for v, _ in self.part.captured)):
            dependence[value] = ROWS if shapes.has_rows(value) else SAME
        for pair in self.pairs:
            operands = [operand_dependence(o, dependence) for o in pair.part.operands]
            for value, kind in zip(
                pair.results, result_dependence(pair.part, operands, shapes), strict=True
            ):
                dependence[value] = SAME if value in self.hoisted else kind
        return dependence

    def order_of(self, value: int) -> int | None:
        return self.micro_batches.uses.orders.of(value)

    def is_sum(self, value: int) -> bool:
        """Whether a value depends on the batch but has no rows."""
        return self.dependence[value] not in (ROWS, SAME, ZERO)

    def touches_rows(self, pair: Pair) -> bool:
        return any(self.dependence[v] is ROWS for v in (*pair.reads, *pair.results))

    def crossings(self, pairs: Iterable[Pair]) -> set[int]:
        """Values without rows that depend on the batch, and that the loop reads beside rows."""
        inside = (p for p in pairs if self.touches_rows(p) and not self.runs_outside(p))
        return {v for p in inside for v in p.reads if self.is_sum(v)}

    def runs_outside(self, pair: Pair) -> bool:
        made = pair.results
        return not (self.waiting.isdisjoint(made) and self.rows_before.isdisjoint(made))

    def light_crossings(self) -> set[int]:
        """Crossing values that do not depend on a product."""
        heavy = heavy_values(self.pairs, self.dependence, self.hoisted)
        return {v for v in self.crossings(self.pairs) if v not in heavy}

    def dependencies(self, crossing: Iterable[int]) -> set[int]:
        """Values without rows that the loop computes for each micro-batch: crossing values and
        those that they depend on."""
        values: set[int] = set()
        left = list(crossing)
        while left:
            value = left.pop()
            if value in values:
                continue
            values.add(value)
            pair = self.pairs[self.producer[value]]
            if not self.touches_rows(pair):
                left += [v for v in pair.reads if self.is_sum(v)]
        return values

    def check_crossings(self) -> None:
        """Notes, or refuses, what the loop has to compute for a micro-batch in place of the whole
        batch."""
        in_loop = [self.pairs[index] for index in sorted(self.in_loop)]
        for value in self.dependencies(self.crossings(in_loop)):
            pair = self.pairs[self.producer[value]]
            if self.touches_rows(pair):
                if self.dependence[value] is WHOLE:
                    raise picks_rows(pair.part)
                self.note_crossing(pair)

    def note_crossing(self, pair: Pair) -> None:
        self.micro_batches.notes.add(
            "crossing",
            pair.part,
            f"every row of the batch uses {pair.part.name} over the batch; with "
            f"{self.micro_batches.num} micro-batches each uses its own reduction instead",
        )

    def reduced_late(self) -> set[int]:
        """Pairs without rows that the loop runs all the same, to sum up their results: in a
        derivative, a sum times a micro-batch's value (the products are summed, not the factors);
        and sums that are only added, such as the gradients of a weight used twice (one carry
        instead of two)."""
        num_reads = Counter(v for p in self.pairs for v in p.reads)
        num_reads.update(self.part.output_values)
        late: set[int] = set()
        for index, pair in enumerate(self.pairs):
            is_sum = all(self.dependence[r] is SUM for r in pair.results) and not pair.part.bodies
            if (
                self.touches_rows(pair)
                or not is_sum
                or not self.waiting.isdisjoint(pair.results)
                or not self.per_micro_batch.isdisjoint(pair.results)
            ):
                continue
            has_nonlinear = any(
                v in self.per_micro_batch and self.dependence[v] is NONLINEAR for v in pair.reads
            )
            if has_nonlinear and region_by_name(pair.part.scope) == BACKWARD:
                late.add(index)
            elif pair.part.name in ADDITIONS and len(pair.reads) == 2:
                terms = [self.carried(v, late, num_reads) for v in pair.reads]
                if None not in terms:
                    late |= {index, *(i for term in terms if term for i in term)}
        return late

    def carried(self, value: int, late: set[int], num_reads: Counter[int]) -> set[int] | None:
        """Linear pairs between this value and one that the loop makes in full, if nothing else
        reads any of them."""
        between: set[int] = set()
        while num_reads[value] == 1 and value in self.producer and value not in self.waiting:
            index = self.producer[value]
            pair = self.pairs[index]
            if index in late or (self.touches_rows(pair) and not self.adds_to(pair, 0)):
                return between if self.dependence[value] is SUM else None
            if pair.part.name not in LINEAR_UNARY or self.dependence[value] is not SUM:
                return None
            between.add(index)
            (value,) = pair.reads
        return None

    # -- placement

    def place(self) -> None:
        for out, path in zip(self.part.outputs, self.out_paths, strict=True):
            if not isinstance(out, int):
                continue
            if out in self.rows_before:
                self.need_before([out])
            elif (
                self.dependence[out] is ROWS
                and out in self.producer
                and self.producer[out] not in self.rows_after
            ):
                if splits_keys(self.pairs[self.producer[out]].part, self.micro_batches.shapes):
                    self.need_before([out])
                    continue
                self.check_rows_out(out, path)
                self.stacked[out] = None
                self.need_pair_in_loop(self.producer[out])
            else:
                self.need_after([out])
        for index, pair in enumerate(self.pairs):
            if pair.part.has_effect:
                if self.touches_rows(pair):
                    self.need_pair_in_loop(index)
                elif index not in self.before:
                    self.after.add(index)
                    self.need_after(pair.reads)
        self.after -= self.before

    def check_rows_out(self, value: int, path: str) -> None:
        pair = self.pairs[self.producer[value]]
        if self.order_of(value) is None:
            raise TraceError(
                f"{path} (made at {pair.part.source_line}): the rows of the batch are no longer "
                "adjacent in it, so those of micro-batches cannot be put together again. Return it "
                "with the batch as its first dimension, or use num_micro_batches=1."
            )
        if len(self.micro_batches.shapes.dims(value)) > 1:
            raise TraceError(
                f"{path} (made at {pair.part.source_line}): it relates every row of the batch to "
                "every other, which micro-batches cannot give. Return a sum or mean of it, or use "
                "num_micro_batches=1."
            )

    def need_after(self, values: Iterable[int]) -> None:
        """Requires values of the whole batch in the epilogue (or the prologue)."""
        left = list(values)
        while left:
            value = left.pop()
            index = self.producer.get(value)
            if index is None or index in self.before or value in self.accumulated:
                continue
            if index in self.after:
                continue
            if value in self.hoisted:
                self.need_before([value])
                continue
            pair = self.pairs[index]
            if self.dependence[value] is WHOLE or index in self.rows_after:
                self.after.add(index)
                self.need_rows(pair)
                left += [v for v in pair.reads if self.dependence[v] is not ROWS]
            elif index in self.late or self.touches_rows(pair):
                self.accumulated[value] = None
                self.need_pair_in_loop(index)
                if self.adds_to(pair, 0):
                    left += values_in(pair.part.operands[:1])
            elif index not in self.after:
                self.after.add(index)
                left += pair.reads

    def need_rows(self, pair: Pair) -> None:
        """Requires the rows that a pair reads, all of them, in the epilogue. Rows whose places
        count are made there."""
        for value in pair.reads:
            index = self.producer.get(value)
            if self.dependence[value] is not ROWS or index is None:
                continue
            made_by = self.pairs[index]
            if value in self.rows_before or splits_keys(made_by.part, self.micro_batches.shapes):
                self.need_before([value])
            elif index in self.after:
                continue
            elif index in self.made_after(pair):
                self.after.add(index)
                self.need_rows(made_by)
                self.need_after(v for v in made_by.reads if self.dependence[v] is not ROWS)
            else:
                if self.order_of(value) is None or len(self.micro_batches.shapes.dims(value)) > 1:
                    raise picks_rows(pair.part)
                self.stacked[value] = None
                self.need_pair_in_loop(index)

    def made_after(self, pair: Pair) -> set[int]:
        """Pairs whose rows the epilogue makes for this one; others it takes from the loop."""
        is_whole = any(self.dependence[r] is WHOLE for r in pair.results)
        return self.by_place if is_whole else self.by_number | self.rows_after

    @cached_property
    def by_place(self) -> set[int]:
        """Pairs that make rows which a micro-batch would make otherwise: by number, in another
        order, or from what depends on all rows, up to the next product."""
        uses = self.micro_batches.uses
        moved, crossed = set[int](), set[int]()
        for index, pair in enumerate(self.pairs):
            made_by = [self.producer.get(v, -1) for v in pair.reads if self.dependence[v] is ROWS]
            if pair.part.has_effect:
                continue
            if uses.mixes(pair.part) or not moved.isdisjoint(made_by):
                moved.add(index)
            meets_sum = any(map(self.is_sum, pair.reads)) or not crossed.isdisjoint(made_by)
            if meets_sum and pair.part.name not in HEAVY:
                crossed.add(index)
        return self.by_number | moved | crossed | self.rows_after

    def need_before(self, values: Iterable[int]) -> None:
        """Requires values in the prologue, of the whole batch where they depend on it."""
        left = list(values)
        while left:
            index = self.producer.get(left.pop())
            if index is not None and index not in self.before:
                self.before.add(index)
                left += self.pairs[index].reads

    def is_outside(self, value: int) -> bool:
        """Whether the loop reads a value without making it."""
        index = self.producer.get(value)
        if index is None or value in self.hoisted or value in self.rows_before:
            return True
        is_same = self.dependence[value] in (SAME, ZERO)
        return is_same and not self.touches_rows(self.pairs[index])

    def need_pair_in_loop(self, index: int) -> None:
        left = [index]
        while left:
            at = left.pop()
            if at in self.in_loop:
                continue
            pair = self.pairs[at]
            if splits_keys(pair.part, self.micro_batches.shapes):
                self.before.add(at)
                self.need_before(pair.reads)
                continue
            self.in_loop.add(at)
            for position, operand in enumerate(pair.part.operands):
                if not isinstance(operand, int) or self.adds_to(pair, position):
                    continue
                if self.is_outside(operand):
                    self.need_before([operand])
                else:
                    left.append(self.producer[operand])

    def adds_to(self, pair: Pair, position: int) -> bool:
        """Whether an operand is what a scatter-add over rows adds to; the epilogue adds it."""
        if position or pair.part.name not in SCATTER_ADD:
            return False
        if operand_dependence(pair.part.operands[0], self.dependence) is ZERO:
            return False
        return self.touches_rows(pair) and self.dependence[pair.results[0]] is not ROWS


def _live_pairs(full: Program, part: Program) -> list[Pair]:
    """The equations that a result or an effect needs."""
    live = set(part.output_values)
    pairs: list[Pair] = []
    for whole, micro in zip(reversed(full.equations), reversed(part.equations), strict=True):
        if micro.has_effect or not live.isdisjoint(micro.results):
            live.update(micro.inputs)
            pairs.append(Pair(whole, micro))
    return pairs[::-1]


def _split_barrier(pair: Pair, dependence: dict[int, BatchDependence]) -> list[Pair]:
    """One barrier for each part of the program, where a barrier ties values of several."""
    if pair.part.name != "optimization_barrier":
        return [pair]

    def group(value: int) -> str:
        kind = dependence[value]
        return "rows" if kind is ROWS else "same" if kind in (SAME, ZERO) else "sums"

    pairs = []
    for wanted in ("same", "rows", "sums"):
        at = [i for i, r in enumerate(pair.results) if group(r) == wanted]

        def only(equation: Equation, at: list[int] = at) -> Equation:
            return replace(
                equation,
                operands=tuple(equation.operands[i] for i in at),
                results=tuple(equation.results[i] for i in at),
            )

        if at:
            pairs.append(Pair(only(pair.whole), only(pair.part)))
    return pairs

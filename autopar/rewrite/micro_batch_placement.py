"""Where every equation of a step goes when it is run on micro-batches.

From the two aligned traces of a step to a `Placement`: which values have rows, which equations the
prologue, the loop and the epilogue run, and what the loop hands to the epilogue. The loop runs what
makes or reads rows. A value without rows that flows back into them *crosses* the batch: without a
product above it the prologue computes it, at the whole batch; otherwise the loop does, for each
micro-batch by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.errors import TraceError
from autopar.ir.program import Equation, Program, values_in
from autopar.rewrite.additive import (
    OWN,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    ZERO,
    Makeup,
    of_operand,
    results_of,
)
from autopar.rewrite.micro_batch_body import MicroBatches
from autopar.tracer.regions import BACKWARD, region_by_name
from autopar.tracer.sums import ADDITIONS, LINEAR_UNARY

# What a crossing value is not computed at the whole batch for.
_HEAVY = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """An equation as the two traces have it."""

    whole: Equation
    part: Equation

    @property
    def results(self) -> tuple[int, ...]:
        return self.part.results

    @property
    def reads(self) -> list[int]:
        return self.part.inputs


class Placement:
    """The decisions for one step; indices are those of `pairs`."""

    def __init__(
        self, full: Program, part: Program, of: MicroBatches, out_paths: Sequence[str]
    ) -> None:
        self.full, self.part, self.of = full, part, of
        self.out_paths = out_paths
        self.hoisted: set[int] = set()  # crossing values that the prologue computes exactly
        self.pairs = _live_pairs(full, part)
        self.makeup = self.classify()
        self.pairs = [q for p in self.pairs for q in _parted(p, self.makeup)]
        self.producer = {r: i for i, p in enumerate(self.pairs) for r in p.results}
        while crossing := self.light_crossings():
            self.hoisted |= crossing
            self.makeup = self.classify()
        self.row_order = self.find_row_order()
        self.own = self.used_in_loop()
        self.late = self.reduced_late()
        self.accumulated: dict[int, None] = {}  # values that the loop hands to the epilogue
        self.stacked: dict[int, None] = {}  # rows that are results of the step
        self.in_loop: set[int] = set()  # indices of pairs
        self.before: set[int] = set()
        self.after: set[int] = set()
        self.place()

    # -- what is what

    def classify(self) -> dict[int, Makeup]:
        shapes = self.of.shapes
        makeup: dict[int, Makeup] = {}
        for value in (*self.part.inputs, *(v for v, _ in self.part.captured)):
            makeup[value] = ROWS if shapes.has_rows(value) else SAME
        for pair in self.pairs:
            operands = [of_operand(o, makeup) for o in pair.part.operands]
            for value, kind in zip(
                pair.results, results_of(pair.part, operands, shapes), strict=True
            ):
                makeup[value] = SAME if value in self.hoisted else kind
        return makeup

    def find_row_order(self) -> dict[int, int | None]:
        """How often the batch is repeated within the batch dimension of a value: (heads, B)
        reshaped to (heads · B) has it `heads` times; None where rows are regrouped otherwise."""
        found: dict[int, int | None] = {}
        for pair in self.pairs:
            given = [found.get(v, 1) for v in pair.reads if self.makeup[v] is ROWS]
            order = None if None in given else max([1, *(g for g in given if g)])
            for value in pair.results:
                if self.makeup[value] is not ROWS:
                    continue
                found[value] = order
                if pair.part.name == "reshape" and order and given:
                    found[value] = self.reshaped_order(pair, value, order)
        return found

    def reshaped_order(self, pair: Pair, value: int, order: int) -> int | None:
        shapes = self.of.shapes

        def elements_before(value: int) -> int:
            return prod(shapes.micro[value].shape[: shapes.dims(value)[0]])

        before = elements_before(pair.reads[0]) * order
        after, rest = divmod(before, elements_before(value))
        if after and not rest:
            return after
        self.of.notes.add(
            "regrouped",
            pair.part,
            "reshape puts rows of the batch that are far apart into groups; with "
            f"{self.of.num} micro-batches a group has rows of one micro-batch",
        )
        return None

    def is_sum(self, value: int) -> bool:
        """Depends on the batch and has no rows."""
        return self.makeup[value] not in (ROWS, SAME, ZERO)

    def touches_rows(self, pair: Pair) -> bool:
        return any(self.makeup[v] is ROWS for v in (*pair.reads, *pair.results))

    def crossings(self) -> set[int]:
        return {v for p in self.pairs if self.touches_rows(p) for v in p.reads if self.is_sum(v)}

    def light_crossings(self) -> set[int]:
        """Crossing values that have no product above them."""
        heavy: set[int] = set()  # values that depend on the batch through a product
        for pair in self.pairs:
            from_batch = any(self.makeup[v] not in (SAME, ZERO) for v in pair.reads)
            is_heavy = pair.part.name in _HEAVY and from_batch
            if is_heavy or any(v in heavy for v in pair.reads):
                heavy.update(v for v in pair.results if v not in self.hoisted)
        return {v for v in self.crossings() if v not in heavy}

    def used_in_loop(self) -> set[int]:
        """Values without rows that the loop computes for each micro-batch by itself: those that
        cross, and what they are made of."""
        found: set[int] = set()
        left = list(self.crossings())
        while left:
            value = left.pop()
            if value in found:
                continue
            found.add(value)
            pair = self.pairs[self.producer[value]]
            if self.touches_rows(pair):
                self.note_crossing(pair)
            else:
                left += [v for v in pair.reads if self.is_sum(v)]
        return found

    def note_crossing(self, pair: Pair) -> None:
        self.of.notes.add(
            "crossing",
            pair.part,
            f"{pair.part.name} over the batch is used by every row of it; with {self.of.num} "
            "micro-batches each uses its own reduction in the place of the whole batch's",
        )

    def reduced_late(self) -> set[int]:
        """Pairs without rows that the loop runs all the same, so that their result is summed up:
        in a derivative, a sum times a micro-batch's own value (the product is summed up, not its
        factors); and sums that are only added, as the gradients of a weight that is used twice
        (one carry in the place of two)."""
        num_reads = Counter(v for p in self.pairs for v in p.reads)
        num_reads.update(self.part.output_values)
        found: set[int] = set()
        for index, pair in enumerate(self.pairs):
            is_sum = all(self.makeup[r] is SUM for r in pair.results) and not pair.part.bodies
            if self.touches_rows(pair) or not is_sum or not self.own.isdisjoint(pair.results):
                continue
            has_own = any(v in self.own and self.makeup[v] is OWN for v in pair.reads)
            if has_own and region_by_name(pair.part.scope) == BACKWARD:
                found.add(index)
            elif pair.part.name in ADDITIONS and len(pair.reads) == 2:
                terms = [self.carried(v, found, num_reads) for v in pair.reads]
                if None not in terms:
                    found |= {index, *(i for term in terms if term for i in term)}
        return found

    def carried(self, value: int, late: set[int], num_reads: Counter[int]) -> set[int] | None:
        """Linear pairs between this value and what the loop makes in full, if nothing else reads
        any of them."""
        between: set[int] = set()
        while num_reads[value] == 1 and value in self.producer:
            index = self.producer[value]
            pair = self.pairs[index]
            if index in late or (self.touches_rows(pair) and not self.adds_to(pair, 0)):
                return between if self.makeup[value] is SUM else None
            if pair.part.name not in LINEAR_UNARY or self.makeup[value] is not SUM:
                return None
            between.add(index)
            (value,) = pair.reads
        return None

    # -- where it goes

    def place(self) -> None:
        for out, path in zip(self.part.outputs, self.out_paths, strict=True):
            if not isinstance(out, int):
                continue
            if self.makeup[out] is ROWS and out in self.producer:
                if self.is_row_keys(self.pairs[self.producer[out]]):
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
        if self.row_order[value] != 1:
            raise TraceError(
                f"{path} (made at {pair.part.source_line}): the rows of the batch are not "
                "neighbours in it any more, so those of micro-batches cannot be put together "
                "again. Return it with the batch as its first dimension, or use "
                "num_micro_batches=1."
            )
        if len(self.of.shapes.dims(value)) > 1:
            raise TraceError(
                f"{path} (made at {pair.part.source_line}): it relates every row of the batch to "
                "every other, which micro-batches cannot give. Return a sum or mean of it, or use "
                "num_micro_batches=1."
            )

    def need_after(self, values: Iterable[int]) -> None:
        """Values that the epilogue (or the prologue) must have, as those of the whole batch."""
        left = list(values)
        while left:
            value = left.pop()
            index = self.producer.get(value)
            if index is None or index in self.before or value in self.accumulated:
                continue
            if value in self.hoisted:
                self.need_before([value])
                continue
            pair = self.pairs[index]
            if index in self.late or self.touches_rows(pair):
                self.accumulated[value] = None
                self.need_pair_in_loop(index)
                if self.adds_to(pair, 0):
                    left += values_in(pair.part.operands[:1])
            elif index not in self.after:
                self.after.add(index)
                left += pair.reads

    def need_before(self, values: Iterable[int]) -> None:
        """Values that the prologue must compute, at the whole batch where they depend on it."""
        left = list(values)
        while left:
            index = self.producer.get(left.pop())
            if index is not None and index not in self.before:
                self.before.add(index)
                left += self.pairs[index].reads

    def is_outside(self, value: int) -> bool:
        """The loop reads it and does not make it."""
        index = self.producer.get(value)
        if index is None or value in self.hoisted:
            return True
        is_same = self.makeup[value] in (SAME, ZERO)
        return is_same and not self.touches_rows(self.pairs[index])

    def need_pair_in_loop(self, index: int) -> None:
        left = [index]
        while left:
            at = left.pop()
            if at in self.in_loop:
                continue
            pair = self.pairs[at]
            if self.is_row_keys(pair):
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

    def is_row_keys(self, pair: Pair) -> bool:
        """A key split into one for each row: done for the whole batch, the keys are small."""
        return pair.part.name == "random_split" and not any(
            self.makeup[v] is ROWS for v in pair.reads
        )

    def adds_to(self, pair: Pair, position: int) -> bool:
        """What a scatter-add over rows adds to; the epilogue adds it."""
        if position or pair.part.name not in SCATTER_ADD:
            return False
        if of_operand(pair.part.operands[0], self.makeup) is ZERO:
            return False
        return self.touches_rows(pair) and self.makeup[pair.results[0]] is not ROWS


def _live_pairs(full: Program, part: Program) -> list[Pair]:
    """Equations that a result or an effect needs."""
    live = set(part.output_values)
    found: list[Pair] = []
    for whole, own in zip(reversed(full.equations), reversed(part.equations), strict=True):
        if own.has_effect or not live.isdisjoint(own.results):
            live.update(own.inputs)
            found.append(Pair(whole, own))
    return found[::-1]


def _parted(pair: Pair, makeup: dict[int, Makeup]) -> list[Pair]:
    """A barrier ties values that go to different parts of the program: one for each part."""
    if pair.part.name != "optimization_barrier":
        return [pair]

    def group(value: int) -> str:
        kind = makeup[value]
        return "rows" if kind is ROWS else "same" if kind in (SAME, ZERO) else "sums"

    found = []
    for wanted in ("same", "rows", "sums"):
        at = [i for i, r in enumerate(pair.results) if group(r) == wanted]

        def only(equation: Equation, at: list[int] = at) -> Equation:
            return replace(
                equation,
                operands=tuple(equation.operands[i] for i in at),
                results=tuple(equation.results[i] for i in at),
            )

        if at:
            found.append(Pair(only(pair.whole), only(pair.part)))
    return found

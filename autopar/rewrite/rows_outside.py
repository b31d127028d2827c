"""Rows that are made outside of the loop over micro-batches: pairs of equations → `RowsOutside`.

A micro-batch cannot make rows that come from several rows of the batch, or from a sum over it.
Where they do not depend on a product (images mixed with other images, ranks of labels), the
prologue makes them for the whole batch, and the loop cuts them like the batch. Where no product
depends on them (the variance of predictions, as a metric; sorted scores, as a result), the epilogue
makes them, from rows that the loop hands to it. Only what lies between products, as in BatchNorm,
is left to the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.program import Equation
from autopar.rewrite.batch_dependence import ROWS, SAME, ZERO, BatchDependence
from autopar.rewrite.micro_batch_body import MicroBatches
from autopar.rewrite.row_uses import splits_keys

# Too heavy to compute for the whole batch: values that depend on these are not hoisted.
HEAVY = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
}  # fmt: skip
_STAYS_IN_LOOP = HEAVY | {"ragged_dot_general", "optimization_barrier"}


@dataclass(frozen=True)
class Pair:
    """An equation in the two traces."""

    whole: Equation
    part: Equation

    @property
    def results(self) -> tuple[int, ...]:
        return self.part.results

    @cached_property
    def reads(self) -> tuple[int, ...]:
        return self.part.inputs


def heavy_values(
    pairs: Iterable[Pair], dependence: Mapping[int, BatchDependence], hoisted: set[int]
) -> set[int]:
    """Values that depend on the batch through a product."""
    heavy: set[int] = set()
    for pair in pairs:
        from_batch = any(dependence[v] not in (SAME, ZERO) for v in pair.reads)
        is_heavy = pair.part.name in HEAVY and from_batch
        if is_heavy or any(v in heavy for v in pair.reads):
            heavy.update(v for v in pair.results if v not in hoisted)
    return heavy


class RowsOutside:
    """`before`: values that the prologue makes. `after`: indices of pairs that the epilogue runs;
    none of them is read by a pair that stays in the loop."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        dependence: Mapping[int, BatchDependence],
        micro_batches: MicroBatches,
        heavy: set[int],
    ) -> None:
        self.pairs, self.dependence, self.micro_batches = pairs, dependence, micro_batches
        self.producer = {r: i for i, pair in enumerate(pairs) for r in pair.results}
        self.readers: dict[int, list[int]] = {}
        for index, pair in enumerate(pairs):
            for value in dict.fromkeys(pair.reads):
                self.readers.setdefault(value, []).append(index)
        self.before = self.find_before(heavy)
        self.after = self.find_after()

    def may_mix(self, equation: Equation) -> bool:
        uses = self.micro_batches.uses
        return uses.mixes(equation) or not uses.placed.isdisjoint(equation.results)

    def differs(self, pair: Pair) -> bool:
        """Whether a micro-batch would make its rows otherwise. Of an operation without a rule that
        is not known, and its operands may be large."""
        unknown = self.micro_batches.uses.unknown
        return self.may_mix(pair.part) and unknown.isdisjoint(pair.results)

    def has_rows(self, value: int) -> bool:
        return self.dependence[value] is ROWS

    def touches_rows(self, pair: Pair) -> bool:
        return any(map(self.has_rows, (*pair.reads, *pair.results)))

    def can_be_cut(self, value: int) -> bool:
        """Whether rows of micro-batches can be put together, and apart."""
        micro_batches = self.micro_batches
        if len(micro_batches.shapes.dims(value)) != 1:
            return False
        return value not in self.producer or micro_batches.uses.orders.of(value) is not None

    # -- before the loop

    def find_before(self, heavy: set[int]) -> set[int]:
        """Rows of the batch that meet other rows, and what follows from them without a product.
        Numbers of rows stay in the loop, where they count a micro-batch's own rows."""
        counted = set(self.micro_batches.uses.counted)
        found: set[int] = set()
        for pair in self.pairs:
            if pair.part.has_effect or pair.part.bodies:
                continue
            if not all(map(self.has_rows, pair.results)):
                continue
            if not heavy.isdisjoint((*pair.reads, *pair.results)):
                continue
            follows = not found.isdisjoint(pair.reads) and counted.isdisjoint(pair.reads)
            if (follows or self.differs(pair)) and counted.isdisjoint(pair.results):
                found.update(pair.results)
        return found - self.kept_inside(found, found | counted)

    def kept_inside(self, found: set[int], linked: set[int]) -> set[int]:
        """Of the linked values, those that the loop makes after all: it cannot be handed them, and
        what they are made of or with. A pair that mixes rows there reads the places of its own
        rows, so labels in that order need the order of a micro-batch too."""
        kept = {value for value in linked if self.is_needed_inside(value, found, linked)}
        num_kept = -1
        while num_kept < len(kept):
            num_kept = len(kept)
            for pair in self.pairs:
                group = linked.intersection((*pair.reads, *pair.results))
                if not linked.isdisjoint(pair.results) and not kept.isdisjoint(group):
                    kept |= group
        return kept

    def is_needed_inside(self, value: int, found: set[int], linked: set[int]) -> bool:
        readers = [self.pairs[index] for index in self.readers.get(value, ())]
        is_read = any(found.isdisjoint(pair.results) for pair in readers)
        if is_read and value in found and not self.can_be_cut(value):
            return True
        inside = [pair for pair in readers if linked.isdisjoint(pair.results)]
        return any(
            self.may_mix(equation)
            for pair in inside
            for equation in (pair.part, *(e for b in pair.part.bodies for e in b.all_equations()))
        )

    # -- after the loop

    def find_after(self) -> set[int]:
        forced: set[int] = set()
        while True:
            after = self.after_without(self.needed_by_loop(forced))
            beyond = {index for index in after if not self.can_be_handed(index, after)}
            if not beyond:
                return after
            forced |= beyond

    def can_be_handed(self, index: int, after: set[int]) -> bool:
        """Whether the rows that a pair reads are made outside, or can be put together there."""
        made_there = after | self.by_number
        return all(
            self.can_be_cut(v) or self.producer.get(v) in made_there
            for v in self.pairs[index].reads
            if self.has_rows(v)
        )

    @cached_property
    def by_number(self) -> set[int]:
        """Pairs that make rows of which the batch tells the number alone (`jnp.arange`)."""
        unread = set[int]()
        for index, pair in enumerate(self.pairs):
            made_by = [self.producer.get(v, -1) for v in pair.reads if self.has_rows(v)]
            if unread.issuperset(made_by) and not pair.part.has_effect:
                unread.add(index)
        return unread

    def after_without(self, stays: set[int]) -> set[int]:
        waits: set[int] = set()  # values of the epilogue
        after: set[int] = set()
        for index, pair in enumerate(self.pairs):
            if index in stays or not self.touches_rows(pair):
                continue
            if (
                self.differs(pair)
                or not waits.isdisjoint(pair.reads)
                or any(self.waits_for_sum(v, stays) for v in pair.reads)
            ):
                after.add(index)
                waits.update(pair.results)
        return after

    def needed_by_loop(self, forced: set[int]) -> set[int]:
        """The forced pairs and others that run in the loop or before it, those that they depend on,
        and those that read what the loop has mixed: the best of a micro-batch's rows has no number
        in the batch."""
        stays = forced | {i for i, pair in enumerate(self.pairs) if self.stays(pair)}
        while True:
            for index, pair in reversed(list(enumerate(self.pairs))):
                readers = (r for value in pair.results for r in self.readers.get(value, ()))
                if not stays.isdisjoint(readers):
                    stays.add(index)
            mixed: set[int] = set()
            reading = set[int]()
            for index, pair in enumerate(self.pairs):
                if not mixed.isdisjoint(pair.reads):
                    reading.add(index)
                elif index not in stays or not self.may_mix(pair.part):
                    continue
                if self.before.isdisjoint(pair.results):
                    mixed.update(filter(self.has_rows, pair.results))
            if reading <= stays:
                return stays
            stays |= reading

    def stays(self, pair: Pair) -> bool:
        equation = pair.part
        if not self.touches_rows(pair):
            return False
        if not self.before.isdisjoint(pair.results) or equation.has_effect or equation.bodies:
            return True
        return equation.name in _STAYS_IN_LOOP or splits_keys(equation, self.micro_batches.shapes)

    def waits_for_sum(self, value: int, stays: set[int]) -> bool:
        """Whether a value depends on all rows, and no pair in the loop reads it beside rows."""
        if self.dependence[value] in (ROWS, SAME, ZERO):
            return False
        return all(i not in stays for i in self.readers[value] if self.touches_rows(self.pairs[i]))


def depending_on(pairs: Sequence[Pair], chosen: set[int]) -> set[int]:
    """Values made by the chosen pairs, or from theirs."""
    found: set[int] = set()
    for index, pair in enumerate(pairs):
        if index in chosen or not found.isdisjoint(pair.reads):
            found.update(pair.results)
    return found

"""Splits sums that several stages add to into one per stage: looped `Program` → looped `Program`.

The gradient of a weight that two stages use is one carry of the loop over micro-batches, to which
both add. Unchanged, one stage would send its term for every micro-batch. Here each stage gets its
own carry, and their sums are added once, after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program
from autopar.rewrite.program_writer import ProgramWriter, add, zeros
from autopar.tracer.sums import ADDITIONS, LINEAR_UNARY, is_zero, zeros_made


@dataclass(frozen=True)
class _Term:
    """A value that is added to a carry after some linear ops, innermost first."""

    value: int
    ops: tuple[Equation, ...]


def split_sums(
    program: Program, loop: int, stage_of: Sequence[int]
) -> tuple[Program, int, tuple[int, ...]]:
    """(program, position of its loop, stage per equation of its body). `stage_of`: the stage of
    every equation of the body, negative if it belongs to none."""
    return _SumSplitter(program, loop, stage_of).split()


class _SumSplitter:
    def __init__(self, program: Program, loop: int, stage_of: Sequence[int]) -> None:
        self.program, self.position = program, loop
        self.loop = program.equations[loop]
        (self.body,) = self.loop.bodies
        self.stage_of = stage_of
        self.num_consts, self.num_carry = _jax.scan_sizes(self.loop.params)
        self.maker = self.body.producers()
        self.num_reads = self.body.num_reads()

    def split(self) -> tuple[Program, int, tuple[int, ...]]:
        groups = self.groups()
        if not groups:
            return self.program, self.position, tuple(self.stage_of)
        outer, inner = ProgramWriter(self.program.avals), ProgramWriter(self.program.avals)
        outer.equations += self.program.equations[: self.position]
        dropped: set[int] = set()
        stages: list[int] = []
        later: list[tuple[Equation, int]] = []
        # (operand outside, input inside, output inside, result outside)
        carries: list[tuple[Operand, int, Operand, int]] = []
        finals: list[tuple[int, list[int], Equation]] = []  # result, its parts, its addition
        for position in range(self.num_carry):
            at = self.num_consts + position
            operand, inside = self.loop.operands[at], self.body.inputs[at]
            out, result = self.body.outputs[position], self.loop.results[position]
            if position not in groups:
                carries.append((operand, inside, out, result))
                continue
            chain, by_stage = groups[position]
            dropped |= chain
            like = self.body.equations[self.maker[out]] if isinstance(out, int) else self.loop
            parts: list[int] = []
            for stage, terms in sorted(by_stage.items()):
                aval = self.program.avals[inside]
                carry = inner.new_value(aval)
                inner.equations.clear()
                total: Operand = carry
                for term in terms:
                    total = inner.emit(add, [total, self.copy_term(inner, term)], like)
                later += ((equation, stage) for equation in inner.equations)
                start = outer.emit(zeros, [], shape=tuple(aval.shape), dtype=aval.dtype)
                parts.append(outer.new_value(aval))
                carries.append((start, carry, total, parts[-1]))
            finals.append((result, parts, like))
        equations = [e for i, e in enumerate(self.body.equations) if i not in dropped]
        stages = [s for i, s in enumerate(self.stage_of) if i not in dropped]
        equations += (e for e, _ in later)
        stages += (s for _, s in later)
        loop = len(outer.equations)
        outer.equations.append(self.rewritten_loop(equations, carries))
        for result, parts, like in finals:
            total = parts[0]
            for part in parts[1:]:
                total = outer.emit(add, [total, part], like)
            outer.equations[-1] = replace(outer.equations[-1], results=(result,))
        outer.equations += self.program.equations[self.position + 1 :]
        program = replace(self.program, equations=tuple(outer.equations))
        return program, loop, tuple(stages)

    def rewritten_loop(
        self, equations: list[Equation], carries: list[tuple[Operand, int, Operand, int]]
    ) -> Equation:
        consts, first_x = self.num_consts, self.num_consts + self.num_carry
        body = replace(
            self.body,
            equations=tuple(equations),
            inputs=(
                *self.body.inputs[:consts],
                *(inside for _, inside, _, _ in carries),
                *self.body.inputs[first_x:],
            ),
            outputs=(*(out for _, _, out, _ in carries), *self.body.outputs[self.num_carry :]),
        )
        return replace(
            self.loop,
            operands=(
                *self.loop.operands[:consts],
                *(operand for operand, _, _, _ in carries),
                *self.loop.operands[first_x:],
            ),
            results=(*(r for _, _, _, r in carries), *self.loop.results[self.num_carry :]),
            params={**self.loop.params, "num_consts": consts, "num_carry": len(carries)},
            bodies=(body,),
        )

    def copy_term(self, inner: ProgramWriter, term: _Term) -> int:
        """A term with its linear ops applied to it alone."""
        value = term.value
        for op in term.ops:
            result = inner.new_value(self.program.avals[op.results[0]])
            inner.equations.append(replace(op, operands=(value,), results=(result,)))
            value = result
        return value

    def groups(self) -> dict[int, tuple[set[int], dict[int, list[_Term]]]]:
        """{position of a carry: (its additions, its terms by stage)}, for carries that start at
        zero and to which more than one stage adds."""
        zeros: set[int] = set()
        for equation in self.program.equations[: self.position]:
            zeros.update(zeros_made(equation, zeros))
        groups = {}
        for position in range(self.num_carry):
            at = self.num_consts + position
            carry, out = self.body.inputs[at], self.body.outputs[position]
            if not is_zero(self.loop.operands[at], zeros) or self.num_reads[carry] != 1:
                continue
            chain: set[int] = set()
            terms = self.terms(out, carry, (), chain)
            if sum(t.value == carry for t in terms) != 1 or len(chain) == 0:
                continue
            if any(t.value == carry and t.ops for t in terms):
                continue
            by_stage: dict[int, list[_Term]] = {}
            for term in terms:
                if term.value != carry:
                    by_stage.setdefault(self.stage_made(term.value), []).append(term)
            if len(by_stage) > 1:
                anywhere = by_stage.pop(-1, [])
                by_stage[min(by_stage)] += anywhere
            if len(by_stage) > 1:
                groups[position] = (chain, by_stage)
        return groups

    def terms(
        self, value: Operand, carry: int, ops: tuple[Equation, ...], chain: set[int]
    ) -> list[_Term]:
        if not isinstance(value, int):
            return []
        maker = self.maker.get(value)
        if maker is None or self.num_reads[value] != 1:
            return [_Term(value, ops)]
        equation = self.body.equations[maker]
        all_values = all(isinstance(o, int) for o in equation.operands)
        if equation.name in ADDITIONS and all_values:
            chain.add(maker)
            return [t for o in equation.operands for t in self.terms(o, carry, ops, chain)]
        if equation.name in LINEAR_UNARY and len(equation.operands) == 1 and all_values:
            inside: set[int] = set()
            terms = self.terms(equation.operands[0], carry, (equation, *ops), inside)
            # An op may stand with the addition though its operand is of another stage.
            if len(terms) > 1 or self.stage_made(terms[0].value) != self.stage_of[maker]:
                chain |= {maker, *inside}
                return terms
        return [_Term(value, ops)]

    def stage_made(self, value: int) -> int:
        """The stage that makes a value; -1 if none does."""
        maker = self.maker.get(value)
        return -1 if maker is None else self.stage_of[maker]

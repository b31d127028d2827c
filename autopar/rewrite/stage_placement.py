"""Which stage runs the equations outside the loop: from a looped `Program` to a `StagePlacement`.

A stage owns the arguments that it reads, and the optimizer's results for them. An equation outside
the loop runs where most of the bytes that it reads are. Small values made from small arguments and
constants alone (step counters, schedules, keys) are computed by every stage that reads them; other
values are computed once and sent. An argument has one owner, the first stage that reads it, and a
result that replaces an argument is returned to its owner.

Before and after the loop a stage may have to wait for others (for the norm of all gradients). Its
work there is cut into *parts*; a value from another stage was made in an earlier part of that one.
After the loop an equation runs in the latest possible part, so that little is stored in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar import _jax
from autopar.ir.program import Equation, Program
from autopar.tracer.costs import aval_bytes

SMALL_BYTES = 16  # scalars and keys: every stage can have its own copy


@dataclass(frozen=True)
class StagePlacement:
    """stages:    per equation outside the loop, the stages that run it (all, for the loop itself).
    owner:     value outside the loop -> the stage that has it, unless every reader makes it.
    parts:     (equation, stage) -> the part of the prologue or epilogue that it runs in.
    received:  per stage, values outside the loop that it gets from their owners, in order.
    outputs:   per output of the program, the stage that has it.
    num_parts: (of the prologue, of the epilogue).
    """

    stages: tuple[frozenset[int], ...]
    owner: dict[int, int]
    parts: dict[tuple[int, int], int]
    received: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    num_parts: tuple[int, int]


def place_stages(
    program: Program,
    loop: int,
    stage_of: Sequence[int],
    num_stages: int,
    state: Iterable[tuple[int, int]],
    owners: Mapping[int, int] | None = None,
) -> StagePlacement:
    """`stage_of`: the stage of every equation of the loop's body, negative if every reader computes
    it itself. `state`: (input, output) positions that belong together. `owners`: position of an
    input that is already placed -> its stage."""
    input_of = {o: i for i, o in state}
    return _PlacementFinder(program, loop, stage_of, num_stages, input_of, owners or {}).placement()


def stages_that_need(
    program: Program, loop: int, stage_of: Sequence[int], num_stages: int
) -> dict[int, set[int]]:
    """{value outside the loop: the stages that need it for the loop, directly or not}."""
    return _PlacementFinder(program, loop, stage_of, num_stages, {}, {}).prologue_needs


class _PlacementFinder:
    def __init__(
        self,
        program: Program,
        loop: int,
        stage_of: Sequence[int],
        num_stages: int,
        input_of: dict[int, int],
        owners: Mapping[int, int],
    ) -> None:
        self.program, self.loop = program, loop
        self.fixed_owner = {program.inputs[i]: stage for i, stage in owners.items()}
        self.num_stages = num_stages
        self.input_of = input_of
        self.inputs = frozenset(program.inputs)
        self.owner: dict[int, int] = {}
        self.small: set[int] = set()  # values that every reader may compute itself
        self.at: dict[int, int] = {}  # equation -> its stage, if it has one
        self.readers = program.readers()
        self.body_maker: dict[int, int] = {}
        self.body_readers: dict[int, set[int]] = {}
        (body,) = program.equations[loop].bodies
        for equation, stage in zip(body.equations, stage_of, strict=True):
            self.body_maker.update((r, stage) for r in equation.results)
            if stage >= 0:
                for value in equation.inputs:
                    self.body_readers.setdefault(value, set()).add(stage)
        self.loop_needs = self.loop_reads()
        self.prologue_needs = self.through_prologue()

    def placement(self) -> StagePlacement:
        self.find_small()
        self.own_loop_results()
        for value in self.program.inputs:
            if self.prologue_needs.get(value):
                self.owner[value] = min(self.prologue_needs[value])
        self.owner.update(self.fixed_owner)
        self.place_equations()
        outputs = self.own_outputs()
        stages, received = self.demand(outputs)
        prologue = self.early_parts(stages)
        epilogue = self.late_parts(stages)
        num = (1 + max(prologue.values(), default=0), 1 + max(epilogue.values(), default=0))
        parts = {**prologue, **epilogue}
        return StagePlacement(tuple(stages), self.owner, parts, received, outputs, num)

    # -- the loop

    def loop_reads(self) -> dict[int, set[int]]:
        """{value outside: the stages that need it for the loop}."""
        loop = self.program.equations[self.loop]
        (body,) = loop.bodies
        num_consts, num_carry = _jax.scan_sizes(loop.params)
        needs: dict[int, set[int]] = {}
        for position, (operand, inside) in enumerate(zip(loop.operands, body.inputs, strict=True)):
            if isinstance(operand, int):
                needs.setdefault(operand, set()).update(self.body_readers.get(inside, ()))
                if num_consts <= position < num_consts + num_carry:
                    needs[operand].add(self.result_stage(position - num_consts))
        for position, out in enumerate(body.outputs):  # inputs that are returned unchanged
            if isinstance(out, int) and out in body.inputs:
                operand = loop.operands[body.inputs.index(out)]
                if isinstance(operand, int):
                    needs.setdefault(operand, set()).add(self.result_stage(position))
        return needs

    def result_stage(self, position: int) -> int:
        """The stage that makes a result of the loop."""
        loop = self.program.equations[self.loop]
        (body,) = loop.bodies
        out = body.outputs[position]
        if isinstance(out, int) and out in self.body_maker:
            return max(self.body_maker[out], 0)
        num_consts, num_carry = _jax.scan_sizes(loop.params)
        if position < num_carry:
            out = body.inputs[num_consts + position]
        return min(self.body_readers.get(out, {0}) if isinstance(out, int) else {0})

    def own_loop_results(self) -> None:
        for position, result in enumerate(self.program.equations[self.loop].results):
            self.owner[result] = self.result_stage(position)

    def through_prologue(self) -> dict[int, set[int]]:
        """{value outside: the stages that need it for the loop, directly or not}."""
        needs = {value: set(stages) for value, stages in self.loop_needs.items()}
        for index in range(self.loop - 1, -1, -1):
            equation = self.program.equations[index]
            stages: set[int] = set().union(*(needs.get(r, ()) for r in equation.results))
            for value in equation.inputs:
                needs.setdefault(value, set()).update(stages)
        return needs

    # -- owners

    def find_small(self) -> None:
        """Finds the small values made from small arguments and constants alone, and the values made
        from constants alone, of any size."""
        avals = self.program.avals
        free: set[int] = set()
        self.small.update(v for v in self.program.inputs if aval_bytes(avals[v]) <= SMALL_BYTES)
        self.small.update(v for v, _ in self.program.captured)
        for index, equation in enumerate(self.program.equations):
            reads = equation.inputs
            if index == self.loop or equation.has_effect or not equation.results:
                continue
            if free.issuperset(reads) and not equation.bodies:
                free.update(equation.results)
                self.small.update(equation.results)
            elif self.small.issuperset(reads):
                size = sum(aval_bytes(avals[r]) for r in equation.results)
                if size <= SMALL_BYTES:
                    self.small.update(equation.results)

    def place_equations(self) -> None:
        """Places each equation where most bytes of its operands are. An equation without placed
        operands (a moment times a constant) goes with its readers, and takes its operands along."""
        equations = self.program.equations
        outside = [i for i in range(len(equations)) if i != self.loop]
        makes_small = {
            i
            for i in outside
            if equations[i].results and self.small.issuperset(equations[i].results)
        }
        free = [i for i in outside if i not in makes_small]
        changed = True
        while changed:
            changed = False
            for index in free:
                changed |= self.settle(index, self.by_operands(equations[index]))
            free = [i for i in free if i not in self.at]
            for index in reversed(free):
                changed |= self.settle(index, self.by_results(equations[index]))
            free = [i for i in free if i not in self.at]
            if not changed and free:
                first = free.pop(0)
                changed = self.settle(first, self.by_state(equations[first]))
        for value in self.program.inputs:
            self.owner.setdefault(value, 0)

    def settle(self, index: int, stage: int | None) -> bool:
        if stage is None:
            return False
        self.at[index] = stage
        equation = self.program.equations[index]
        for value in equation.results:
            self.owner[value] = stage
        for value in equation.inputs:
            if value in self.inputs and value not in self.small:
                self.owner.setdefault(value, stage)
        return True

    def by_operands(self, equation: Equation) -> int | None:
        weights: dict[int, int] = {}
        for value in equation.inputs:
            if value in self.owner and value not in self.small:
                size = aval_bytes(self.program.avals[value])
                weights[self.owner[value]] = weights.get(self.owner[value], 0) + size
        if not weights:
            return None
        return max(weights, key=lambda s: (weights[s], -s))

    def by_results(self, equation: Equation) -> int | None:
        needed = set().union(*(self.prologue_needs.get(r, ()) for r in equation.results))
        if needed:
            return min(needed)
        for value in equation.results:
            for reader in self.readers.get(value, ()):
                if reader in self.at:
                    return self.at[reader]
        return None

    def by_state(self, equation: Equation) -> int:
        """The stage of an equation without placed neighbours: that of the argument it replaces."""
        for position, output in enumerate(self.program.outputs):
            if output in equation.results and position in self.input_of:
                return self.owner.get(self.program.inputs[self.input_of[position]], 0)
        return 0

    def own_outputs(self) -> tuple[int, ...]:
        stages = []
        for position, output in enumerate(self.program.outputs):
            if position in self.input_of:
                stages.append(self.owner[self.program.inputs[self.input_of[position]]])
            elif isinstance(output, int) and output in self.owner:
                stages.append(self.owner[output])
            else:
                stages.append(0)
        return tuple(stages)

    # -- which stages run an equation

    def demand(
        self, outputs: Sequence[int]
    ) -> tuple[list[frozenset[int]], tuple[tuple[int, ...], ...]]:
        """(stages that run each equation, values that each stage receives)."""
        equations = self.program.equations
        needs: dict[int, set[int]] = {}
        for stage, output in zip(outputs, self.program.outputs, strict=True):
            if isinstance(output, int):
                needs.setdefault(output, set()).add(stage)
        stages: list[frozenset[int]] = [frozenset()] * len(equations)
        for index in range(len(equations) - 1, -1, -1):
            equation = equations[index]
            if index == self.loop:
                stages[index] = frozenset(range(self.num_stages))
                for value, users in self.loop_needs.items():
                    needs.setdefault(value, set()).update(users)
                continue
            if index in self.at:
                runs_on = {self.at[index]}
            else:
                runs_on = set().union(*(needs.get(r, ()) for r in equation.results))
                if not runs_on and equation.has_effect:
                    runs_on = {0}
            stages[index] = frozenset(runs_on)
            for value in equation.inputs:
                needs.setdefault(value, set()).update(runs_on)
        state = {self.program.inputs[i] for i in self.input_of.values()}
        for value in self.program.inputs:  # of the stages that read it, the first
            is_free = value in self.small and not self.prologue_needs.get(value)
            if is_free and value not in state | self.fixed_owner.keys() and needs.get(value):
                self.owner[value] = min(needs[value])
        unowned = {v for v, _ in self.program.captured}
        for index, equation in enumerate(equations):
            if index != self.loop and index not in self.at:
                unowned.update(equation.results)
        received: list[list[int]] = [[] for _ in range(self.num_stages)]
        for value in sorted(needs):
            if value not in unowned:
                for stage in sorted(needs[value] - {self.owner[value]}):
                    received[stage].append(value)
        return stages, tuple(map(tuple, received))

    # -- parts

    def crosses(self, value: int, stage: int) -> bool:
        return self.owner.get(value, stage) != stage

    def early_parts(self, stages: Sequence[frozenset[int]]) -> dict[tuple[int, int], int]:
        """The prologue: every equation as early as it can run."""
        parts: dict[tuple[int, int], int] = {}
        made: dict[tuple[int, int], int] = {}  # (value, stage) -> part
        for index in range(self.loop):
            equation = self.program.equations[index]
            for stage in stages[index]:
                part = 0
                for value in equation.inputs:
                    if (value, stage) in made:
                        part = max(part, made[value, stage])
                    elif self.crosses(value, stage):
                        sent = made.get((value, self.owner[value]))
                        part = max(part, 0 if sent is None else sent + 1)
                parts[index, stage] = part
                made.update(((r, stage), part) for r in equation.results)
        return parts

    def late_parts(self, stages: Sequence[frozenset[int]]) -> dict[tuple[int, int], int]:
        """The epilogue: every equation as late as its readers allow, with only as many parts as the
        longest path through the stages needs."""
        equations = self.program.equations
        after: dict[tuple[int, int], int] = {}  # (equation, stage) -> parts that must follow
        needed: dict[tuple[int, int], int] = {}  # (value, stage) -> parts that must follow
        for index in range(len(equations) - 1, self.loop, -1):
            equation = equations[index]
            for stage in stages[index]:
                following = max((needed.get((r, stage), 0) for r in equation.results), default=0)
                after[index, stage] = following
                for value in equation.inputs:
                    crossing = self.crosses(value, stage)
                    key = (value, self.owner[value] if crossing else stage)
                    needed[key] = max(needed.get(key, 0), following + crossing)
        # Results of the loop that are sent are first finished in a part of their stage.
        finished = set(equations[self.loop].results)
        deepest = max([0, *after.values(), *(n for (v, _), n in needed.items() if v in finished)])
        return {key: deepest - following for key, following in after.items()}

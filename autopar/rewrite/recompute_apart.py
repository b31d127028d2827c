"""Recomputation that spans stages, cut at their boundaries: `TracedStep` → body of its loop.

`jax.checkpoint` around several layers (an outer trip of a scan of scans, as of `nn.remat_scan`)
computes all of them again behind one barrier, before the backward pass of the last. If they are on
several stages, each should compute its own layers only: what the layers before have made, its
forward pass has received, so it begins with that. Layers of one stage stay as they are.

What the backward pass computes again is found by numbering values: an equation that equals one of
the forward pass, barriers aside, makes what that made. So the result is the same, whatever is taken
for what. A barrier whose readers are on several stages becomes one for each of these, which takes
what the stage reads of it, and a cotangent that the stage waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import ANYWHERE, LoopLayers
from autopar.tracer.copy_equations import MARK, Copier, with_avals
from autopar.tracer.layer_runs import same_constant, same_params, same_program
from autopar.tracer.regions import module_name

_BARRIER = "optimization_barrier"


def recompute_apart(step: TracedStep, layers: LoopLayers, stage_of_layer: Sequence[int]) -> Program:
    """The body of the step's loop; the same if no recomputation spans stages. Values of the forward
    pass keep their numbers. `stage_of_layer`: the stage of every layer."""
    assert step.loop is not None
    (body,) = step.program.equations[step.loop].bodies
    is_spanning = any(
        equation.name == _BARRIER and is_backward
        for equation, is_backward in zip(body.equations, layers.is_backward, strict=True)
    )
    if not is_spanning or len(set(stage_of_layer)) < 2:
        return body
    return _Apart(step, body, layers, stage_of_layer).body()


class _Apart:
    def __init__(
        self, step: TracedStep, body: Program, layers: LoopLayers, stage_of_layer: Sequence[int]
    ) -> None:
        self.program = body
        self.is_backward = layers.is_backward
        self.stage = [None if x == ANYWHERE else stage_of_layer[x] for x in layers.layer_of]
        self.maker = body.producers()
        self.readers = body.readers()
        self.original = self.find_originals(step)
        self.light = self.find_light()
        self.module_stages = self.find_module_stages()
        self.homes = self.find_homes()
        self.sources = self.find_sources()
        self.copier = Copier(list(body.avals))
        self.equations: list[Equation] = []
        self.made: dict[tuple[int, int], Operand] = {}  # (value, stage) -> the stage's own
        # Per (barrier, stage): where it is in `equations`, and what it takes, with its results.
        self.shields: dict[tuple[int, int], tuple[int, dict[int, int]]] = {}
        self.shielded_at: dict[tuple[int, int], int] = {}  # the equation that it comes before
        self.index = 0
        self.tokens: dict[
            int, dict[int, int]
        ] = {}  # stage -> cotangent -> itself, behind a barrier

    # -- what is computed again

    def find_originals(self, step: TracedStep) -> dict[int, int]:
        """Value of the backward pass -> the same value of the forward pass."""
        assert step.loop is not None
        numbering = _Numbering()
        for equation in step.program.equations[: step.loop]:
            numbering.add(equation)
        loop = step.program.equations[step.loop]
        num_consts, _ = _jax.scan_sizes(loop.params)
        for operand, value in zip(loop.operands[:num_consts], self.program.inputs, strict=False):
            numbering.set_equal(value, operand)
        inputs = frozenset(self.program.inputs)
        first: dict[int, int] = {}  # number -> the value of the forward pass that has it
        found: dict[int, int] = {}
        for index, equation in enumerate(self.program.equations):
            numbering.add(equation)
            for result in equation.results:
                number = numbering.of(result)
                if not self.is_backward[index]:
                    first.setdefault(number, result)
                elif number in first:
                    found[result] = first[number]
                elif number in inputs:
                    found[result] = number
        return found

    def is_made_backward(self, value: int) -> bool:
        return value in self.maker and self.is_backward[self.maker[value]]

    def find_light(self) -> set[int]:
        """Values of the backward pass that depend on no cotangent: what is computed again, and what
        follows from that alone."""
        light: set[int] = set()
        for index, equation in enumerate(self.program.equations):
            if not self.is_backward[index] or equation.has_effect:
                continue
            if equation.name == _BARRIER:
                pairs = zip(equation.operands, equation.results, strict=True)
                light.update(r for o, r in pairs if self.is_light(o, light))
                continue
            is_again = MARK in equation.scope or equation.results[0] in self.original
            if is_again and all(self.is_light(o, light) for o in equation.operands):
                light.update(equation.results)
        return light

    def is_light(self, operand: Operand, light: set[int]) -> bool:
        return (
            not isinstance(operand, int) or operand in light or not self.is_made_backward(operand)
        )

    # -- where

    def find_module_stages(self) -> dict[str, set[int]]:
        """Module -> the stages of its equations in the forward pass, and of those below it."""
        found: dict[str, set[int]] = {}
        for index, equation in enumerate(self.program.equations):
            stage = self.stage[index]
            if self.is_backward[index] or stage is None:
                continue
            parts = module_name(equation.scope).split("/")
            for end in range(1, len(parts) + 1):
                found.setdefault("/".join(parts[:end]), set()).add(stage)
        return found

    def find_homes(self) -> list[set[int]]:
        """Per equation of the backward pass, the stages that it serves: of one that is computed
        again, that of the original; of others without cotangents and of barriers, those of what
        reads them."""
        homes: list[set[int]] = [set() for _ in self.program.equations]
        for index in range(len(homes) - 1, -1, -1):
            equation = self.program.equations[index]
            if not self.is_backward[index] or not equation.results:
                continue
            after = (homes[r] for v in equation.results for r in self.readers.get(v, ()))
            first = self.maker.get(self.original.get(equation.results[0], -1))
            stage = None if first is None else self.stage[first]
            if equation.name != _BARRIER and self.light.isdisjoint(equation.results):
                homes[index] = self.stages_of_reader(equation)
            elif equation.name == _BARRIER or stage is None:
                homes[index] = set().union(*after)
            else:
                homes[index] = {stage}
        return homes

    def stages_of_reader(self, equation: Equation) -> set[int]:
        """The stage of an equation that reads cotangents: its module's, or else that of the last
        layer whose values it reads."""
        parts = module_name(equation.scope).split("/")
        for end in range(len(parts), 0, -1):
            stages = self.module_stages.get("/".join(parts[:end]), set())
            if len(stages) == 1:
                return stages
        makers = (self.original.get(v, v) for v in equation.inputs)
        known = (self.stage[self.maker[v]] for v in makers if v in self.maker)
        stages = {s for s in known if s is not None}
        return {max(stages)} if stages else set()

    def is_split(self, index: int) -> bool:
        """Whether it is a barrier of the backward pass that serves several stages."""
        is_barrier = self.program.equations[index].name == _BARRIER
        return is_barrier and self.is_backward[index] and len(self.homes[index]) > 1

    def find_sources(self) -> dict[int, int]:
        """Value -> the barrier that it comes from, of those that serve several stages. What waits
        for a barrier of its own stage comes from that."""
        sources: dict[int, int] = {}
        for index, equation in enumerate(self.program.equations):
            if not self.is_backward[index]:
                continue
            if self.is_split(index):
                sources.update(dict.fromkeys(equation.results, index))
            elif all(r in self.light for r in equation.results):
                known = [sources[v] for v in equation.inputs if v in sources]
                sources.update(dict.fromkeys(equation.results, max(known)) if known else {})
        return sources

    # -- writing

    def body(self) -> Program:
        if not self.sources:
            return self.program
        outputs = list(self.program.outputs)
        for index, equation in enumerate(self.program.equations):
            self.index = index
            if equation.results and all(r in self.sources for r in equation.results):
                continue  # each stage makes it when it first needs it
            if not self.sources.keys().isdisjoint(equation.inputs):
                equation = self.reading_its_own(equation, self.one_stage(index))
            self.equations.append(equation)
        for position, output in enumerate(outputs):
            if isinstance(output, int) and output in self.sources:
                stage = self.one_stage(self.maker[output])
                outputs[position] = self.own(output, stage, self.program.equations[-1])
        for (barrier, _), (place, taken) in self.shields.items():
            split = self.program.equations[barrier]
            self.equations[place] = split.of_values(tuple(taken), tuple(taken.values()))
        avals = self.copier.avals
        equations = tuple(with_avals(e, avals) for e in self.equations)
        return replace(self.program, outputs=tuple(outputs), equations=equations, avals=avals)

    def one_stage(self, index: int) -> int:
        return max(self.homes[index], default=max(s for s in self.stage if s is not None))

    def reading_its_own(self, equation: Equation, stage: int) -> Equation:
        operands = [self.own(o, stage, equation) for o in equation.operands]
        behind = self.tokens.get(stage, {})
        operands = [behind.get(o, o) if isinstance(o, int) else o for o in operands]
        return equation.of_values(tuple(operands))

    def own(self, value: Operand, stage: int, reader: Equation, again: bool = False) -> Operand:
        """The value as a stage has it, for a reader that waits for a cotangent; `again`: for what
        that stage computes again for this reader."""
        if not isinstance(value, int) or value not in self.sources:
            return value
        if (value, stage) in self.made:
            return self.made[value, stage]
        index = self.maker[value]
        equation = self.program.equations[index]
        if equation.name == _BARRIER:
            operand = equation.operands[equation.results.index(value)]
            if not isinstance(operand, int):
                return operand
            if not self.is_split(index):
                return self.own(operand, stage, reader, again)
            if operand in self.sources:
                if operand not in self.original:
                    return self.own(operand, stage, reader, again)
                operand = self.original[operand]
            return self.behind_barrier(index, operand, stage, reader, again)
        if value in self.original and stage not in self.homes[index]:
            source = self.sources[value]
            return self.behind_barrier(source, self.original[value], stage, reader, again)
        renamed = {
            v: own
            for v in equation.inputs
            if isinstance(own := self.own(v, stage, reader, again=True), int)
        }
        self.equations.append(self.copier.equation(equation, renamed))
        for result in equation.results:
            self.made[result, stage] = renamed[result]
        return self.made[value, stage]

    def behind_barrier(
        self, barrier: int, value: int, stage: int, reader: Equation, again: bool
    ) -> int:
        """A value behind the stage's part of a barrier, which waits for a cotangent that the first
        reader waits for. A reader that is a barrier needs no other."""
        if reader.name == _BARRIER and not again:
            return value
        if (barrier, stage) not in self.shields:
            taken: dict[int, int] = {}
            token = next((v for v in reader.inputs if self.is_cotangent(v)), None)
            if token is not None and token not in self.sources:
                taken[token] = self.copier.new_value(self.copier.avals[token])
                self.tokens.setdefault(stage, {})[token] = taken[token]
            self.shields[barrier, stage] = len(self.equations), taken
            self.shielded_at[barrier, stage] = self.index
            self.equations.append(self.program.equations[barrier])  # until all is known
        _, taken = self.shields[barrier, stage]
        if self.maker.get(value, -1) >= self.shielded_at[barrier, stage]:
            return value
        if value not in taken:
            taken[value] = self.copier.new_value(self.copier.avals[value])
        return taken[value]

    def is_cotangent(self, value: int) -> bool:
        return self.is_made_backward(value) and value not in self.light


class _Numbering:
    """Numbers of values: equal for values known to be equal. Barriers change nothing."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.known: dict[tuple, list[Equation]] = {}
        self.constants: list[tuple[int, Constant]] = []

    def of(self, value: int) -> int:
        return self.numbers.get(value, value)

    def set_equal(self, value: int, operand: Operand) -> None:
        if isinstance(operand, int):
            self.numbers[value] = self.of(operand)
            return
        equal = (v for v, constant in self.constants if same_constant(constant, operand))
        self.numbers[value] = next(equal, value)
        self.constants.append((value, operand))

    def add(self, equation: Equation) -> None:
        if equation.name == _BARRIER:
            for operand, result in zip(equation.operands, equation.results, strict=True):
                if isinstance(operand, int):
                    self.numbers[result] = self.of(operand)
            return
        if equation.has_effect:
            return
        operands = (self.of(o) if isinstance(o, int) else None for o in equation.operands)
        alike = self.known.setdefault((equation.name, *operands), [])
        for one in alike:
            if _is_equal(one, equation):
                pairs = zip(equation.results, one.results, strict=True)
                self.numbers.update((result, self.of(other)) for result, other in pairs)
                return
        alike.append(equation)


def _is_equal(one: Equation, other: Equation) -> bool:
    """Whether two equations of equal values make the same."""
    constants = zip(one.operands, other.operands, strict=True)
    return (
        len(one.results) == len(other.results)
        and len(one.bodies) == len(other.bodies)
        and same_params(one, other)
        and all(
            same_constant(a, b)
            for a, b in constants
            if isinstance(a, Constant) and isinstance(b, Constant)
        )
        and all(map(same_program, one.bodies, other.bodies))
    )

"""Splits stacks over stages: from a looped `TracedStep` to one with stacked arguments in parts.

A model that scans over its layers has parameters stacked along a first dimension, a row per layer.
Where its layers run on several stages, each stage should hold its own rows of the parameters, of
the optimizer's moments and of the gradients, and update them itself. So each such argument becomes
several, one for every stage that reads rows of it, and what the update computes row by row is
computed for each part. A stage then owns a part as it owns any argument.

Which rows go to which stage follows from who reads them: the slices that `unroll_scans` has made.
The rest follows from the equations before and after the loop over micro-batches. In most of them
(elementwise ones, means over other dimensions) a row of the result comes from the same rows of the
operands, so all have the same parts. Sums over all rows (the norm of all gradients) are summed in
each part first. Rows that are moved (gradients of `p[1:]`, of rows in groups) come from what they
were put together from. Anything else reads the parts put together again, which is right, but has to
be sent; state that is updated so (sorted along layers, say) stays whole, on one stage. State that
the layers replace themselves, put together row by row after the loop, has the parts of its readers.

Of a scan of scans, the layers are the indices of a stack's first two dimensions, and stages may
have layers of one trip of the outer scan. The rows of a part are then a box of both dimensions (so
on for deeper scans), and equations compute row by row if they do for each index of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.ir.rows import Rows, boxes, first_row, join_rows, num_rows, rows_shape
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import ProgramWriter
from autopar.rewrite.residuals import CHEAP
from autopar.rewrite.row_sources import is_grouping, takes_rows
from autopar.rewrite.scan_remat import live_equations
from autopar.rewrite.stage_placement import stages_that_need


@dataclass(frozen=True)
class StackPart:
    """Rows of a stack, and the stage that holds them."""

    rows: Rows
    stage: int


Parts = tuple[StackPart, ...]  # in the order of their rows, which are all rows
Stacks = Mapping[int, Parts]  # input, by position -> its parts


@dataclass(frozen=True)
class SplitStep:
    """A step whose stacks are in parts.

    inputs, outputs: for each of the step's, the position of the whole step's that it is or is a
                     part of, and which rows of it; None for all.
    owners:          input that is a part, by position -> the stage that holds it.
    pieces:          values that are parts of others.
    """

    step: TracedStep
    inputs: tuple[tuple[int, Rows | None], ...]
    outputs: tuple[tuple[int, Rows | None], ...]
    owners: dict[int, int]
    pieces: frozenset[int]


def split_stacks(
    step: TracedStep,
    stage_of: Sequence[int],
    num_stages: int,
    stacks: Stacks | None = None,
) -> SplitStep:
    """`stage_of`: the stage of every equation of the loop's body, negative if it belongs to none.
    `stacks`: the arguments that are split; None for all that can be."""
    parts = _PartFinder(step, stage_of, num_stages, stacks).parts()
    if not parts:
        every = tuple((i, None) for i in range(len(step.program.inputs)))
        outputs = tuple((o, None) for o in range(len(step.program.outputs)))
        return SplitStep(step, every, outputs, {}, frozenset())
    return _Splitter(step, parts).split()


# -- equations that compute row by row

# Of an op over all rows, how results of parts are combined.
_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
    "reduce_and": jnp.bitwise_and,
    "reduce_or": jnp.bitwise_or,
}
_WITH_AXES = ("argmax", "argmin", *_COMBINED)
_MOVES = ("broadcast_in_dim", "reshape", "slice", "squeeze", "transpose", "expand_dims", "iota")
_ELEMENTWISE = CHEAP - {*_MOVES, "bitcast_convert_type"}


def _rows_of(
    equation: Equation, avals: Sequence[ShapedArray], depth: int
) -> tuple[int, ...] | None:
    """The operands, by position, whose rows become those of the result; None if it does not compute
    row by row. `depth`: the number of dimensions whose indices are rows."""
    if equation.bodies or equation.has_effect or len(equation.results) != 1:
        return None
    out = tuple(avals[equation.results[0]].shape)
    shapes = [_shape(o, avals) for o in equation.operands]
    if len(out) < depth:
        return None
    leading = tuple(range(depth))
    name, params = equation.name, equation.params
    if name in _ELEMENTWISE:
        if not all(shape == () or len(shape) == len(out) for shape in shapes):
            return None
        with_rows = tuple(n for n, shape in enumerate(shapes) if shape[:depth] == out[:depth])
        others = (shape[:depth] for n, shape in enumerate(shapes) if n not in with_rows)
        return with_rows if all(set(sizes) <= {1} for sizes in others) else None
    if name == "iota":
        return () if params["dimension"] >= depth and not equation.operands else None
    if name == "concatenate":
        return tuple(range(len(shapes))) if params["dimension"] >= depth else None
    if name == "dot_general":
        _, (left, right) = params["dimension_numbers"]
        return (0, 1) if left[:depth] == right[:depth] == leading else None
    if name == "broadcast_in_dim" and len(shapes) == 1:
        dimensions = tuple(params["broadcast_dimensions"])
        sizes = dict(zip(dimensions, shapes[0], strict=True))
        if all(sizes.get(dim, 1) == 1 != out[dim] or dim not in sizes for dim in leading):
            return ()
        keeps = dimensions[:depth] == leading and shapes[0][:depth] == out[:depth]
        return (0,) if keeps else None
    if len(shapes) != 1 or shapes[0][:depth] != out[:depth]:
        return None
    return (0,) if _keeps_rows(equation, shapes[0], depth) else None


def _keeps_rows(equation: Equation, shape: tuple[int, ...], depth: int) -> bool:
    """Whether an equation of one operand leaves each row of it where it is."""
    name, params = equation.name, equation.params
    if name in _WITH_AXES:
        return min(params["axes"], default=depth) >= depth
    if name == "transpose":
        return tuple(params["permutation"][:depth]) == tuple(range(depth))
    if name == "reshape":
        return params["dimensions"] is None
    if name == "squeeze":
        return min(params["dimensions"], default=depth) >= depth
    if name == "slice":
        return _sliced_rows(equation, depth) == tuple((0, size) for size in shape[:depth])
    return False


def _sliced_rows(equation: Equation, depth: int) -> Rows | None:
    """The rows that a slice takes, if it is one of consecutive rows."""
    if equation.name != "slice" or not isinstance(equation.operands[0], int):
        return None
    params = equation.params
    strides = params["strides"]
    if strides is not None and any(stride != 1 for stride in strides[:depth]):
        return None
    return tuple(zip(params["start_indices"], params["limit_indices"], strict=True))[:depth]


def _shape(operand: Operand, avals: Sequence[ShapedArray]) -> tuple[int, ...]:
    aval = operand.aval if isinstance(operand, Constant) else avals[operand]
    return tuple(aval.shape)


# -- which values have parts


class _PartFinder:
    """Finds parts at every depth that slices ask for; at more of them, those of the most."""

    def __init__(
        self,
        step: TracedStep,
        stage_of: Sequence[int],
        num_stages: int,
        stacks: Stacks | None,
    ) -> None:
        assert step.loop is not None
        self.step, self.program, self.loop = step, step.program, step.loop
        self.avals = self.program.avals
        self.needs = stages_that_need(self.program, self.loop, stage_of, num_stages)
        self.readers = self.program.readers()
        self.stacks = stacks

    def parts(self) -> dict[int, Parts]:
        """The parts of values outside the loop."""
        inputs = self.program.inputs
        wanted: dict[int, dict[int, Parts]] = {}  # number of dimensions -> value -> its parts
        for i, parts in (self.stacks or {}).items():
            wanted.setdefault(_depth(parts), {})[inputs[i]] = parts
        if self.stacks is None:
            others = list(self.readers)
        else:  # arguments are split as given; what is made of others, as it was then
            others = [v for v in self.readers if v not in inputs] if self.stacks else []
        for value in others:
            for parts in self.by_slices(value):
                wanted.setdefault(_depth(parts), {}).setdefault(value, parts)
        found: dict[int, Parts] = {}
        for depth, seeds in sorted(wanted.items()):
            found.update(self.parts_at(depth, seeds))
        if self.stacks is not None:
            for i in set(range(len(inputs))) - set(self.stacks):
                found.pop(inputs[i], None)
        return found if any(value in found for value in inputs) else {}

    def parts_at(self, depth: int, seeds: Mapping[int, Parts]) -> dict[int, Parts]:
        """The parts of values whose rows are those of the seeds. Where the arguments that are split
        are given, others are not."""
        groups = _RowGroups(self.step, depth)
        inputs = self.program.inputs
        given = {inputs[i] for i in self.stacks or ()}
        whole = set() if self.stacks is None else {groups.root(v) for v in inputs}
        parts_of: dict[int, Parts] = {}
        for value, parts in seeds.items():
            if value in given or groups.root(value) not in whole:
                parts_of.setdefault(groups.root(value), parts)
        if self.stacks is None:
            for root in groups.roots_that_stay_whole():
                parts_of.pop(root, None)
        every = [*self.program.inputs, *(r for e in self.program.equations for r in e.results)]
        return {v: parts_of[root] for v in every if (root := groups.root(v)) in parts_of}

    def by_slices(self, value: int) -> list[Parts]:
        """The parts that the loop's stages read of a value, before the loop: its rows, and the rows
        of more dimensions if several stages read of one row."""
        shape = _shape(value, self.avals)
        if not shape or shape[0] < 2:
            return []
        slices: list[tuple[Rows, int]] = []
        for index in self.readers[value]:
            equation = self.program.equations[index]
            rows = _sliced_rows(equation, len(shape)) if index < self.loop else None
            needed = self.needs.get(equation.results[0]) if rows is not None else None
            if rows is not None and needed and rows[0] != (0, shape[0]):
                slices.append((_of_layers(rows, shape), min(needed)))
        if not slices:
            return []
        depth = max(len(rows) for rows, _ in slices)
        stages = np.full(shape[:depth], num_stages := max(stage for _, stage in slices) + 1)
        for rows, stage in slices:
            stages[tuple(slice(*one) for one in rows)] = stage
        in_rows = stages.reshape(shape[0], -1)
        found = [_runs(in_rows.min(1), num_stages)]
        if any(len({*row} - {num_stages}) > 1 for row in in_rows.tolist()):
            found.append(_runs(stages, num_stages))
        return [parts for parts in found if parts is not None]


class _RowGroups:
    """Values with the same rows: a forest of them."""

    def __init__(self, step: TracedStep, depth: int) -> None:
        self.step, self.program, self.depth = step, step.program, depth
        self.group: dict[int, int] = {}  # value -> another of the same rows
        for index, equation in enumerate(self.program.equations):
            rows = None if index == step.loop else self.rows_of(equation)
            if rows is not None:
                for operand in (equation.operands[n] for n in rows):
                    if isinstance(operand, int):
                        self.join(operand, equation.results[0])
            elif equation.name == "concatenate":  # of gradients, row by row: it is its own group
                self.root(equation.results[0])
        self.join_state_of_new_rows()

    def rows_of(self, equation: Equation) -> tuple[int, ...] | None:
        return _rows_of(equation, self.program.avals, self.depth)

    def join_state_of_new_rows(self) -> None:
        """State that the layers themselves replace row by row (a cache) goes with its new rows."""
        inputs, outputs = self.program.inputs, self.program.outputs
        taken = {self.root(v) for v in (*inputs, *(v for v, _ in self.program.captured))}
        for index, equation in enumerate(self.program.equations):
            of_rows = equation.name == "concatenate" or self.rows_of(equation) is not None
            if index == self.step.loop or not of_rows:
                taken.update(map(self.root, equation.results))
        for i, o in self.step.state:
            output = outputs[o]
            if isinstance(output, int) and self.root(output) not in taken:
                self.join(inputs[i], output)

    def root(self, value: int) -> int:
        while (other := self.group.setdefault(value, value)) != value:
            self.group[value] = value = self.group.setdefault(other, other)
        return value

    def join(self, one: int, other: int) -> None:
        self.group[self.root(one)] = self.root(other)

    def roots_that_stay_whole(self) -> set[int]:
        """Groups with rows of the batch or random keys, or with state that is updated otherwise
        than row by row."""
        inputs, outputs = self.program.inputs, self.program.outputs
        keys = (v for v in inputs if _jax.is_extended_dtype(self.program.avals[v].dtype))
        roots = {self.root(v) for v in (*keys, *(inputs[i] for i in self.step.batch))}
        for i, o in self.step.state:
            output = outputs[o]
            if not isinstance(output, int) or self.root(output) != self.root(inputs[i]):
                roots.add(self.root(inputs[i]))
        return roots


def _depth(parts: Parts) -> int:
    return len(parts[0].rows)


def _of_layers(rows: Rows, shape: Sequence[int]) -> Rows:
    """The leading dimensions of a slice that say which layers it takes: of single rows, the
    dimensions inside too, as long as it takes a part of them."""
    depth = 1
    while depth < len(rows) and rows[depth] != (0, shape[depth]):
        if rows[depth - 1][1] - rows[depth - 1][0] != 1:
            break
        depth += 1
    return rows[:depth]


def _runs(stages: np.ndarray, nobody: int) -> Parts | None:
    """Parts of consecutive rows with one stage each; rows that `nobody` reads go with those before
    them. None if a stage has all of the rows, or comes back later."""
    known = next(stage for stage in stages.flat if stage != nobody)
    runs: list[tuple[int, int]] = []  # (number of rows, stage)
    for stage in stages.flat:
        known = known if stage == nobody else stage
        if runs and runs[-1][1] == known:
            runs[-1] = runs[-1][0] + 1, known
        else:
            runs.append((1, int(known)))
    is_once = len({stage for _, stage in runs}) == len(runs)
    if len(runs) < 2 or not is_once:
        return None
    ends = accumulate((number for number, _ in runs), initial=0)
    return tuple(
        StackPart(rows, stage)
        for (start, end), (_, stage) in zip(pairwise(ends), runs, strict=True)
        for rows in boxes(start, end, stages.shape)
    )


# -- writing


class _Splitter:
    def __init__(self, step: TracedStep, parts: Mapping[int, Parts]) -> None:
        assert step.loop is not None
        self.step, self.program, self.loop = step, step.program, step.loop
        self.parts = parts
        self.writer = ProgramWriter(self.program.avals)
        self.is_whole = {v for v, _ in self.program.captured}  # values that are there whole
        self.wholes: dict[int, int] = {}  # value -> the same, put together from its parts
        self.pieces: dict[int, list[Operand]] = {}  # value -> its parts
        self.cut: dict[tuple[int, Rows], Operand] = {}  # rows taken from whole values
        self.maker = {r: e for e in self.program.equations for r in e.results}

    def split(self) -> SplitStep:
        program, parts = self.program, self.parts
        inputs: list[int] = []
        given: list[tuple[int, Rows | None]] = []
        owners: dict[int, int] = {}
        for position, value in enumerate(program.inputs):
            if value not in parts:
                self.is_whole.add(value)
                inputs.append(value)
                given.append((position, None))
                continue
            pieces = [self.new_piece(value, part.rows) for part in parts[value]]
            self.pieces[value] = list(pieces)
            for piece, part in zip(pieces, parts[value], strict=True):
                owners[len(inputs)] = part.stage
                inputs.append(piece)
                given.append((position, part.rows))
        for index, equation in enumerate(program.equations):
            self.equation(index, equation)
        replaced = {o: i for i, o in self.step.state if program.inputs[i] in parts}
        outputs: list[Operand] = []
        made: list[tuple[int, Rows | None]] = []
        for position, output in enumerate(program.outputs):
            if position in replaced:
                own = parts[program.inputs[replaced[position]]]
                for part, piece in zip(own, self.pieces_of(output, own), strict=True):
                    outputs.append(piece)
                    made.append((position, part.rows))
            else:
                outputs.append(self.whole(output))
                made.append((position, None))
        program = replace(
            program,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            equations=tuple(live_equations(self.writer.equations, outputs)),
            captured=(*program.captured, *self.writer.captured),
        )
        pieces = frozenset(v for own in self.pieces.values() for v in own if isinstance(v, int))
        traced = self.traced(program, given, made)
        return SplitStep(traced, tuple(given), tuple(made), owners, pieces)

    def traced(
        self,
        program: Program,
        given: Sequence[tuple[int, Rows | None]],
        made: Sequence[tuple[int, Rows | None]],
    ) -> TracedStep:
        step, avals = self.step, program.avals
        input_at = {one: n for n, one in enumerate(given)}
        output_at = {one: n for n, one in enumerate(made)}
        rows_of: dict[int, list[Rows | None]] = {}
        for position, rows in given:
            rows_of.setdefault(position, []).append(rows)
        types = tuple(avals[v] for v in program.inputs)
        (loop,) = (n for n, e in enumerate(program.equations) if e is self.loop_equation)
        return replace(
            step,
            program=program,
            call=replace(
                step.call, leaves=types, paths=tuple(step.call.paths[i] for i, _ in given)
            ),
            avals=types,
            out_paths=tuple(step.out_paths[o] for o, _ in made),
            out_avals=tuple(_type_of(out, avals) for out in program.outputs),
            state=tuple(
                (input_at[i, rows], output_at[o, rows])
                for i, o in step.state
                for rows in rows_of[i]
            ),
            batch=tuple(input_at[i, None] for i in step.batch),
            donated=tuple(input_at[i, rows] for i in step.donated for rows in rows_of[i]),
            loop=loop,
        )

    # -- values

    def new_piece(self, value: int, rows: Rows) -> int:
        aval = self.program.avals[value]
        return self.writer.new_value(aval.update(shape=rows_shape(aval.shape, rows)))

    def whole(self, operand: Operand, like: Equation | None = None) -> Operand:
        """The value, put together if it is in parts."""
        if not isinstance(operand, int) or operand in self.is_whole:
            return operand
        if operand not in self.wholes:
            rows = tuple(part.rows for part in self.parts[operand])
            joined = self.writer.emit(_joined, self.pieces[operand], like, rows=rows)
            assert isinstance(joined, int)
            self.wholes[operand] = joined
        return self.wholes[operand]

    def pieces_of(
        self, operand: Operand, parts: Parts, like: Equation | None = None
    ) -> list[Operand]:
        """The operand in these parts, cut if it is not in them."""
        if isinstance(operand, int) and operand in self.pieces and self.parts[operand] == parts:
            return self.pieces[operand]
        whole = self.whole(operand, like)
        return [self.rows(whole, part.rows, like) for part in parts]

    def rows(self, whole: Operand, rows: Rows, like: Equation | None) -> Operand:
        key = (whole, rows) if isinstance(whole, int) else None
        if key is not None and key in self.cut:
            return self.cut[key]
        taken = self.writer.emit(taken_rows, [whole], like, rows=rows)
        if key is not None:
            self.cut[key] = taken
        return taken

    # -- equations

    def equation(self, index: int, equation: Equation) -> None:
        if index == self.loop:
            self.copy(equation)
            self.loop_equation = self.writer.equations[-1]
        elif self.is_in_parts(equation):
            self.row_by_row(equation)
        elif not self.slice(equation) and not self.combined(equation):
            self.copy(equation)

    def is_in_parts(self, equation: Equation) -> bool:
        return len(equation.results) == 1 and equation.results[0] in self.parts

    def copy(self, equation: Equation) -> None:
        """The equation as it is, on whole values."""
        operands = tuple(self.whole(o, equation) for o in equation.operands)
        self.writer.equations.append(replace(equation, operands=operands))
        self.is_whole.update(equation.results)

    def row_by_row(self, equation: Equation) -> None:
        """The equation for each part of its result."""
        (result,) = equation.results
        parts = self.parts[result]
        rows = _rows_of(equation, self.program.avals, _depth(parts))
        if rows is None:
            if equation.name == "concatenate" and self.concatenate(equation, parts):
                return
            if (moved := self.moved_rows(equation, parts)) is not None:
                self.pieces[result] = moved
                return
            self.copy(equation)
            self.pieces[result] = self.pieces_of(result, parts, equation)
            return
        operands = [
            self.pieces_of(o, parts, equation) if n in rows else [self.whole(o, equation)]
            for n, o in enumerate(equation.operands)
        ]
        pieces: list[Operand] = []
        for number, part in enumerate(parts):
            piece = self.new_piece(result, part.rows)
            self.writer.equations.append(
                replace(
                    equation,
                    operands=tuple(own[number if len(own) > 1 else 0] for own in operands),
                    results=(piece,),
                    params=_params_for(equation, part.rows),
                )
            )
            pieces.append(piece)
        self.pieces[result] = pieces

    def concatenate(self, equation: Equation, parts: Parts) -> bool:
        """Rows that are put together, part by part; False if a part ends inside of an operand."""
        shape = _shape(equation.results[0], self.program.avals)
        operands = self.operands_of_rows(equation, _depth(parts))
        if operands is None:
            return False
        ends = list(accumulate(number for _, number in operands))
        bounds = list(accumulate((num_rows(part.rows) for part in parts), initial=0))
        if not set(bounds[1:]) <= set(ends):
            return False
        pieces: list[Operand] = []
        for part, (first, last) in zip(parts, pairwise(bounds), strict=True):
            own = [
                self.whole(operand, equation)
                for (operand, _), end in zip(operands, ends, strict=True)
                if first < end <= last
            ]
            wanted = rows_shape(shape, part.rows)
            is_it = len(own) == 1 and _type_of(own[0], self.writer.avals).shape == wanted
            pieces.append(
                own[0] if is_it else self.writer.emit(_stacked, own, equation, shape=wanted)
            )
        self.pieces[equation.results[0]] = pieces
        return True

    def moved_rows(self, equation: Equation, parts: Parts) -> list[Operand] | None:
        """Rows that a slice takes, a pad puts among others, a reshape takes out of groups or a
        reversal moves, for each part: gradients of a stack whose rows scans read so. None if the
        equation does nothing of that."""
        value = equation.operands[0] if equation.operands else None
        if not isinstance(value, int) or _depth(parts) != 1:
            return None
        runs = [part.rows[0] for part in parts]
        shape, result = (_shape(v, self.program.avals) for v in (value, equation.results[0]))
        if equation.name == "slice" and takes_rows(equation, shape):
            if (taken := _sliced_rows(equation, 1)) is None:
                return None
            ((start, _),) = taken
            return [self.rows_from(value, start + a, start + b, equation) for a, b in runs]
        if equation.name == "reshape" and is_grouping(result, shape):
            return self.ungrouped(equation, value, runs)
        if equation.name == "rev" and tuple(equation.params["dimensions"]) == (0,):
            mirrored = (
                self.rows_from(value, shape[0] - b, shape[0] - a, equation) for a, b in runs
            )
            return [self.writer.emit(lax.rev, [x], equation, dimensions=(0,)) for x in mirrored]
        if equation.name != "pad":
            return None
        (low, high, _), *others = equation.params["padding_config"]
        if low < 0 or high < 0 or any(any(each) for each in others):
            return None
        return [self.padded(equation, value, a, b) for a, b in runs]

    def ungrouped(
        self, reshape: Equation, value: int, runs: Sequence[tuple[int, int]]
    ) -> list[Operand] | None:
        """Rows of the result of a reshape that takes them out of groups."""
        _, size, *inner = _shape(value, self.program.avals)
        if made := self.rows_made(value, 2):
            return [self.joined(made, a, b, reshape) for a, b in runs]
        if any(n % size for run in runs for n in run):
            return None
        groups = ((self.rows_from(value, a // size, b // size, reshape), b - a) for a, b in runs)
        return [
            self.writer.emit(lax.reshape, [own], reshape, new_sizes=(number, *inner))
            for own, number in groups
        ]

    def padded(self, pad: Equation, value: int, start: int, end: int) -> Operand:
        """Rows of the result of a pad of rows."""
        (low, _, between), *others = pad.params["padding_config"]
        size, *inner = _shape(value, self.program.avals)
        step, filling = between + 1, self.whole(pad.operands[1], pad)
        first, last = (min(max(-((low - n) // step), 0), size) for n in (start, end))
        if first >= last:
            return self.writer.emit(_full, [filling], pad, shape=(end - start, *inner))
        own = self.rows_from(value, first, last, pad)
        around = (low + first * step - start, end - (low + (last - 1) * step + 1), between)
        return self.writer.emit(lax.pad, [own, filling], pad, padding_config=(around, *others))

    def rows_from(self, value: int, first: int, last: int, like: Equation) -> Operand:
        """Rows of a value, taken from what it is made of, so that it need not be put together."""
        size = _shape(value, self.program.avals)[0]
        if value in self.pieces and _depth(self.parts[value]) == 1:
            runs = (part.rows[0] for part in self.parts[value])
            return self.joined(zip(self.pieces[value], runs, strict=True), first, last, like)
        made = self.rows_made(value, 1) if (first, last) != (0, size) else []
        if made:
            return self.joined(made, first, last, like)
        whole = self.whole(value, like)
        return whole if (first, last) == (0, size) else self.rows(whole, ((first, last),), like)

    def rows_made(self, value: int, depth: int) -> list[tuple[Operand, tuple[int, int]]]:
        """What a value's rows are put together from, and which rows each is; empty if they are
        not."""
        maker = self.maker.get(value)
        found = [] if maker is None else self.operands_of_rows(maker, depth) or []
        ends = accumulate((number for _, number in found), initial=0)
        operands = (self.whole(operand, maker) for operand, _ in found)
        return list(zip(operands, pairwise(ends), strict=True))

    def joined(
        self,
        blocks: Iterable[tuple[Operand, tuple[int, int]]],
        first: int,
        last: int,
        like: Equation,
    ) -> Operand:
        """Rows of several blocks of rows as one array."""
        taken: list[Operand] = []
        for block, (start, end) in blocks:
            a, b = max(first, start) - start, min(last, end) - start
            if a < b:
                is_all = (a, b) == (0, end - start)
                taken.append(block if is_all else self.rows(block, ((a, b),), like))
        if len(taken) == 1:
            return taken[0]
        inner = _type_of(taken[0], self.writer.avals).shape[1:]
        return self.writer.emit(_stacked, taken, like, shape=(last - first, *inner))

    def operands_of_rows(self, equation: Equation, depth: int) -> list[tuple[Operand, int]] | None:
        """What is put together, in order, each with the number of its rows: of more than one
        dimension, operands that are rows put together as well, one row each."""
        if equation.name != "concatenate" or equation.params["dimension"] != 0:
            return None
        avals = self.program.avals
        if depth == 1:
            return [(operand, _shape(operand, avals)[0]) for operand in equation.operands]
        found: list[tuple[Operand, int]] = []
        for operand in equation.operands:
            row = self.maker.get(operand) if isinstance(operand, int) else None
            if row is None or not _is_one_row(row, avals):
                return None
            inside = self.maker.get(row.inputs[0])
            own = None if inside is None else self.operands_of_rows(inside, depth - 1)
            if own is None:
                return None
            found += own
        return found

    def slice(self, equation: Equation) -> bool:
        """A slice of rows that are all in one part."""
        (value, *_) = equation.operands or (None,)
        if not isinstance(value, int) or value not in self.pieces:
            return False
        depth = _depth(self.parts[value])
        rows = _sliced_rows(equation, depth)
        if rows is None:
            return False
        for part, piece in zip(self.parts[value], self.pieces[value], strict=True):
            both = list(zip(rows, part.rows, strict=True))
            if all(first <= start and end <= last for (start, end), (first, last) in both):
                params = dict(equation.params)
                for key, own in (("start_indices", 0), ("limit_indices", 1)):
                    moved = (row[own] - first for row, (first, _) in both)
                    params[key] = (*moved, *params[key][depth:])
                self.writer.equations.append(replace(equation, operands=(piece,), params=params))
                self.is_whole.update(equation.results)
                return True
        return False

    def combined(self, equation: Equation) -> bool:
        """A sum, or the like, over all rows: of each part, then of the parts."""
        if equation.name not in _COMBINED or len(equation.operands) != 1:
            return False
        (value,), (result,) = equation.operands, equation.results
        if not isinstance(value, int) or value not in self.pieces:  # some constants have no hash
            return False
        if not set(range(_depth(self.parts[value]))) <= set(equation.params["axes"]):
            return False
        aval = self.program.avals[result]
        partial: list[Operand] = []
        for piece in self.pieces[value]:
            own = self.writer.new_value(aval)
            self.writer.equations.append(replace(equation, operands=(piece,), results=(own,)))
            partial.append(own)
        function = _COMBINED[equation.name]
        reduce(lambda a, b: self.writer.emit(function, [a, b], equation), partial)
        last = self.writer.equations[-1]
        self.writer.equations[-1] = replace(last, results=(result,))
        self.is_whole.add(result)
        return True


def _is_one_row(equation: Equation, avals: Sequence[ShapedArray]) -> bool:
    """Whether the result is the operand as an array of one row."""
    if equation.name not in ("broadcast_in_dim", "reshape") or not equation.inputs:
        return False
    return _shape(equation.results[0], avals) == (1, *_shape(equation.operands[0], avals))


def _params_for(equation: Equation, rows: Rows) -> dict[str, Any]:
    """The equation's parameters for a part of its result."""
    params = dict(equation.params)
    key = {
        "broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes",
        "slice": "limit_indices",
    }.get(equation.name)  # fmt: skip
    if key is not None:
        params[key] = rows_shape(params[key], rows)
    return params


def _type_of(operand: Operand, avals: Sequence[ShapedArray]) -> ShapedArray:
    return operand.aval if isinstance(operand, Constant) else avals[operand]


def _joined(*parts: Array, rows: tuple[Rows, ...]) -> Array:
    return join_rows(parts, rows, lax.concatenate)


def _stacked(*rows: Array, shape: tuple[int, ...]) -> Array:
    return lax.reshape(lax.concatenate(rows, 0), shape)


def _full(value: Array, *, shape: tuple[int, ...]) -> Array:
    return lax.full(shape, value)


def taken_rows(whole: Array, *, rows: Rows) -> Array:
    """Rows of an array."""
    inner = whole.shape[len(rows) :]
    return lax.slice(
        whole, (*first_row(rows), *[0] * len(inner)), (*(end for _, end in rows), *inner)
    )

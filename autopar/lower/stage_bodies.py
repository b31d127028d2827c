"""Stage programs with their equations: what a mesh runs, as data, and as functions for `jax.jit`.

`lower.stage_programs` cuts these out of a stage's step; `lower.roll_layers` turns equal layers of
one into a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from autopar.ir.pipeline import Pipeline, Ref, StageProgram
from autopar.ir.program import Constant, Equation, Operand
from autopar.ir.program_sharding import Chain, EquationSharding
from autopar.ir.spec import Layout
from autopar.lower.annotate import Moved, Writer
from autopar.lower.unreduced import AnyMesh, partial_axes


def stacked_layout(layout: Layout | None) -> Layout | None:
    """The layout of a stack of arrays that have this one each: no axis splits the stack's rows.
    Lanes of partial sums stay in front."""
    return None if layout is None else tuple(e + 1 if e >= 0 else e for e in layout)


@dataclass(frozen=True)
class Entry:
    """How buffers become a value in a stage program: rows of all micro-batches are stacked, or a
    row is taken out of a stack of layers, and the value is taken through a chain of layouts.
    `layout`: of the value, before that."""

    refs: tuple[Ref, ...]
    value: int
    layout: Layout | None
    chain: Chain = ()
    is_stack: bool = False
    row: int | None = None


@dataclass(frozen=True)
class Exit:
    """How a value becomes buffers: taken through a chain, then split into micro-batches, or
    replaced by zeros with lanes for its partial sums. `rows`: exits that are stacked instead, one
    per layer; `filling`: the number that all of them consist of, if that is known."""

    refs: tuple[Ref, ...]
    operand: Operand
    chain: Chain
    layout: Layout | None
    is_stack: bool = False
    starts_sum: bool = False
    rows: tuple[Exit, ...] = ()
    filling: Constant | None = None


@dataclass(frozen=True)
class LoopCarry:
    """What a layer hands to the next.

    value:  that of the body which holds it when a trip begins.
    start:  what the first trip begins with.
    made:   the body's value that the next trip begins with.
    end:    the value that the last trip makes, in the program around the loop.
    layout: the value's layout in the loop; None where the compiler decides.
    end_layout: the layout that the program around it expects.
    """

    value: int
    start: Operand
    made: int
    end: int
    layout: Layout | None
    end_layout: Layout | None


@dataclass(frozen=True)
class LoopRead:
    """A value of the body that is the trip's row of a stack."""

    value: int
    stack: int
    layout: Layout | None


@dataclass(frozen=True)
class LoopWrite:
    """A stack that each trip writes its row of. `start`: the stack that is updated; None for a new
    one, `stack`."""

    operand: int
    chain: Chain
    layout: Layout | None
    aval: ShapedArray
    stack: int
    start: int | None


@dataclass(frozen=True)
class LoopSlice:
    """A slice of consecutive rows, by a trip of another `step` later than by the first one."""

    equation: Equation
    sharding: EquationSharding
    first: int
    step: int


@dataclass(frozen=True)
class LayerLoop:
    """Equal layers as one loop: equations of one of them, which each trip runs on values of its
    own. `is_reversed`: the first trip has the last rows of stacks."""

    num_trips: int
    is_reversed: bool
    equations: tuple[Equation, ...]
    shardings: tuple[EquationSharding, ...]
    slices: tuple[LoopSlice, ...]
    carries: tuple[LoopCarry, ...]
    reads: tuple[LoopRead, ...]
    writes: tuple[LoopWrite, ...]

    @property
    def inputs(self) -> list[int]:
        """The values of the program around it that it reads."""
        own = {r for e in self.equations for r in e.results}
        own.update(s.equation.results[0] for s in self.slices)
        own.update(c.value for c in self.carries)
        own.update(r.value for r in self.reads)
        read = [v for e in self.equations for v in e.inputs if v not in own]
        read += (v for s in self.slices for v in s.equation.inputs)
        read += (c.start for c in self.carries if isinstance(c.start, int))
        read += (r.stack for r in self.reads)
        read += (w.start for w in self.writes if w.start is not None)
        return list(dict.fromkeys(read))

    @property
    def results(self) -> list[int]:
        """The values of the program around it that it makes."""
        return [*(c.end for c in self.carries), *(w.stack for w in self.writes)]


@dataclass(frozen=True)
class StageProgramBody:
    """A stage program with its equations and their shardings. `loops`: (the number of equations
    before it, a loop over equal layers), in order."""

    stage_program: StageProgram
    entries: tuple[Entry, ...]
    exits: tuple[Exit, ...]
    equations: tuple[Equation, ...]
    shardings: tuple[EquationSharding, ...]
    captured: tuple[tuple[int, Any], ...]
    avals: list[ShapedArray]
    loops: tuple[tuple[int, LayerLoop], ...] = ()


@dataclass(frozen=True)
class StagePrograms:
    """All stage programs of a pipeline. `layouts`: (stage, value of a ref) -> the layout of its
    buffers, in which `PARTIAL` means lanes; None for scalars and whole arrays."""

    pipeline: Pipeline
    programs: tuple[StageProgramBody, ...]
    layouts: dict[tuple[int, int], Layout | None]


def stage_program_function(
    stage_program: StageProgramBody, mesh: AnyMesh, platform: str | None = None
) -> Callable[..., list[Any]]:
    """A flat function from the stage program's reads to its writes, for `jax.jit`."""
    writer = Writer(mesh, platform)

    def run(*arrays: Any) -> list[Any]:
        return _Runner(writer, stage_program).run(arrays)

    return run


class _Runner:
    """One trace of a stage program."""

    def __init__(self, writer: Writer, body: StageProgramBody) -> None:
        self.writer, self.body = writer, body
        self.env: dict[int, Any] = {}
        self.lanes: dict[int, tuple[int, ...]] = {}
        self.moved: Moved = {}

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        body, writer = self.body, self.writer
        given = dict(zip(body.stage_program.reads, arrays, strict=True))
        for entry in body.entries:
            parts = [given[ref] for ref in entry.refs]
            array = jnp.stack(parts) if entry.is_stack else parts[0]
            if entry.row is not None:
                axis = len(partial_axes(entry.layout))
                array = jax.lax.index_in_dim(array, entry.row, axis, keepdims=False)
            self.env[entry.value], self.lanes[entry.value] = writer.enter(
                array, entry.layout, entry.chain
            )
        self.env.update(body.captured)
        first = 0
        for position, loop in body.loops:
            self.run_equations(slice(first, position))
            self.run_loop(loop)
            first = position
        self.run_equations(slice(first, None))
        return [array for exit_ in body.exits for array in self.leave(exit_)]

    def run_equations(self, which: slice) -> None:
        body = self.body
        self.read = self.writer.run_equations(
            body.equations[which],
            body.shardings[which],
            body.avals,
            self.env,
            self.lanes,
            self.moved,
        )

    def leave(self, exit_: Exit) -> list[Any]:
        """The arrays of an exit's buffers."""
        writer = self.writer
        if exit_.rows:
            axis = len(partial_axes(exit_.layout))
            rows = [self.leave(row)[0] for row in (exit_.rows[:1] if exit_.filling else exit_.rows)]
            if exit_.filling is not None:
                shape = (*rows[0].shape[:axis], len(exit_.rows), *rows[0].shape[axis:])
                stack = jnp.full(shape, exit_.filling.value, rows[0].dtype)
            else:
                stack = jnp.stack(rows, axis)
            return [writer.constrain(stack, exit_.layout)]
        array = self.read(exit_.operand, exit_.chain)
        if exit_.starts_sum:
            return [writer.start_sum(array, exit_.layout)]
        if exit_.is_stack:
            return [writer.constrain(array[m], exit_.layout) for m in range(len(exit_.refs))]
        return [writer.constrain(array, exit_.layout)]

    # -- loops over layers

    def run_loop(self, loop: LayerLoop) -> None:
        self.move_before(loop)
        carried = [self.start_of(c) for c in loop.carries]
        stacks = [self.stack_of(w, loop.num_trips) for w in loop.writes]
        updated = {w.start: n for n, w in enumerate(loop.writes) if w.start is not None}

        def trip(state: tuple[list[Any], list[Any]], number: Any) -> tuple[Any, None]:
            carried, stacks = state
            row = loop.num_trips - 1 - number if loop.is_reversed else number
            env, lanes, moved = dict(self.env), dict(self.lanes), dict(self.moved)
            env.update(zip((c.value for c in loop.carries), carried, strict=True))
            for read in loop.reads:
                at = updated.get(read.stack)
                stack = self.env[read.stack] if at is None else stacks[at]
                axes = partial_axes(read.layout)
                array = jax.lax.dynamic_index_in_dim(stack, row, len(axes), keepdims=False)
                env[read.value] = self.writer.constrain(array, read.layout)
                lanes[read.value] = axes
            for one in loop.slices:
                env[one.equation.results[0]] = self.slice_rows(one, number)
            read = self.writer.run_equations(
                loop.equations, loop.shardings, self.body.avals, env, lanes, moved
            )
            new_stacks = []
            for write, stack in zip(loop.writes, stacks, strict=True):
                array = self.writer.constrain(read(write.operand, write.chain), write.layout)
                axis = len(partial_axes(write.layout))
                stack = jax.lax.dynamic_update_index_in_dim(stack, array, row, axis)
                new_stacks.append(self.writer.constrain(stack, stacked_layout(write.layout)))
            new = [self.writer.constrain(read(c.made, ()), c.layout) for c in loop.carries]
            return (new, new_stacks), None

        (carried, stacks), _ = jax.lax.scan(
            trip, (carried, stacks), jnp.arange(loop.num_trips, dtype=jnp.int32)
        )
        for carry, array in zip(loop.carries, carried, strict=True):
            self.env[carry.end] = self.writer.constrain(array, carry.end_layout)
        for write, stack in zip(loop.writes, stacks, strict=True):
            self.env[write.stack] = stack
            self.lanes[write.stack] = partial_axes(write.layout)

    def move_before(self, loop: LayerLoop) -> None:
        """Reshard what all trips read in another layout once, before the loop."""
        pairs = [*zip(loop.equations, loop.shardings, strict=True)]
        pairs += ((one.equation, one.sharding) for one in loop.slices)
        outside = set(loop.inputs)
        for equation, sharding in pairs:
            for operand, chain in zip(equation.operands, sharding.operands, strict=True):
                if chain and isinstance(operand, int) and operand in outside:
                    self.read(operand, chain)

    def start_of(self, carry: LoopCarry) -> Any:
        return self.writer.constrain(jnp.asarray(self.read(carry.start, ())), carry.layout)

    def stack_of(self, write: LoopWrite, num_trips: int) -> Any:
        if write.start is not None:
            return self.env[write.start]
        sizes = self.writer.mesh.axis_sizes
        lanes = [sizes[axis] for axis in partial_axes(write.layout)]
        zeros = jnp.zeros((*lanes, num_trips, *write.aval.shape), write.aval.dtype)
        return self.writer.constrain(zeros, stacked_layout(write.layout))

    def slice_rows(self, one: LoopSlice, number: Any) -> Any:
        """A trip's rows of an array that all trips read."""
        params, sharding = one.equation.params, one.sharding
        array = self.read(one.equation.operands[0], sharding.operands[0])
        starts, limits = list(params["start_indices"]), list(params["limit_indices"])
        sizes = [limit - start for start, limit in zip(starts, limits, strict=True)]
        starts[0] = one.first + one.step * number
        rows = jax.lax.dynamic_slice(array, starts, sizes)
        for layout in sharding.results[0]:
            rows = self.writer.constrain(rows, layout)
        return rows

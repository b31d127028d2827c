"""From a `Program` and its `ProgramSharding` to a function that `jax.jit` compiles.

Every equation is bound again as it was traced, under the user's names and source lines, with public
`with_sharding_constraint`s on operands that change layout and on every result. So custom calls,
callbacks and custom partitioning keep working, and the partitioner has no freedom left: with
constraints on products and gathers alone, XLA's propagation chose the rest, and an early experiment
with a GPT took 3.7 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.program_sharding import Chain, EquationSharding, ProgramSharding, Refetch
from autopar.ir.spec import PARTIAL, WHOLE, Layout, to_partition_spec
from autopar.lower.philox import PLATFORMS as PHILOX_PLATFORMS
from autopar.lower.philox import philox_bits
from autopar.lower.ragged_parts import operands_on_part
from autopar.lower.unreduced import (
    AnyMesh,
    bind_unreduced,
    partial_axes,
    unreduced_layout,
    unreduced_zeros,
)
from autopar.tracer.op_sizes import RAGGED_PRODUCT

_GPUS = ("gpu", "cuda", "rocm")
Moved = dict[tuple[int, Chain], Any]  # values in other layouts: by value and chain


def annotated_function(
    program: Program, sharding: ProgramSharding, mesh: AnyMesh, platform: str | None = None
) -> Callable[..., list[Any]]:
    """A flat function of the program's inputs, constrained as planned. A mesh without devices needs
    a platform."""
    writer = Writer(mesh, platform)

    def run(*inputs: Any) -> list[Any]:
        return writer.run(program, sharding, inputs)

    return run


class Writer:
    def __init__(self, mesh: AnyMesh, platform: str | None = None) -> None:
        self.mesh = mesh
        if platform is None:
            assert isinstance(mesh, Mesh), "a mesh without devices has no platform"
            platform = mesh.devices.flat[0].platform
        self.platform = platform
        self.shardings: dict[tuple[Layout, int], NamedSharding] = {}

    def constrain(self, value: Any, layout: Layout | None) -> Any:
        ndim = getattr(value, "ndim", 0)
        if layout is None or ndim == 0 or _jax.is_extended_dtype(value.dtype):
            return value
        key = (layout, ndim)
        if key not in self.shardings:
            spec = to_partition_spec(unreduced_layout(layout), ndim, self.mesh.axis_names)
            self.shardings[key] = NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(value, self.shardings[key])

    def take_through(self, value: Any, axes: tuple[int, ...], chain: Chain) -> Any:
        """Constrain a value to one layout after the other; it has lanes for `axes`. Lanes that a
        layout no longer has are summed."""
        for layout in chain:
            remaining = partial_axes(layout)
            summed = tuple(i for i, axis in enumerate(axes) if axis not in remaining)
            value = self.constrain(value.sum(summed) if summed else value, layout)
            axes = remaining
        return value

    def run(self, program: Program, sharding: ProgramSharding, inputs: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(program.captured)
        lanes: dict[int, tuple[int, ...]] = {}  # values that are partial sums
        for value, array, layout in zip(program.inputs, inputs, sharding.inputs, strict=True):
            env[value], lanes[value] = self.enter(array, layout)
        read = self.run_equations(program.equations, sharding.equations, program.avals, env, lanes)
        return [read(o, c) for o, c in zip(program.outputs, sharding.outputs, strict=True)]

    def enter(
        self, array: Any, layout: Layout | None, chain: Chain = ()
    ) -> tuple[Any, tuple[int, ...]]:
        """(an array of this layout taken through a chain of layouts, its lanes after that)."""
        array, lanes = self.constrain(array, layout), partial_axes(layout)
        if not chain:
            return array, lanes
        return self.take_through(array, lanes, chain), partial_axes(chain[-1])

    def start_sum(self, array: Any, layout: Layout | None) -> Any:
        """The first value of a sum: the array itself, or zeros with lanes."""
        return self.constrain(unreduced_zeros(array, layout, self.mesh), layout)

    def run_equations(
        self,
        equations: Sequence[Equation],
        shardings: Sequence[EquationSharding],
        avals: Sequence[ShapedArray],
        env: dict[int, Any],
        lanes: dict[int, tuple[int, ...]],
        moved: Moved | None = None,
    ) -> Callable[[Any, Chain], Any]:
        """Bind equations on the values in `env`, adding results to it, lanes of partial sums to
        `lanes`, values in other layouts to `moved`. Returns how an operand is read by a chain."""
        moved = {} if moved is None else moved
        refetched: dict[tuple[int, Chain, int], Any] = {}  # values resharded again

        def read(operand: Operand, chain: Chain) -> Any:
            if not isinstance(operand, int):
                return operand.value
            if not chain:
                return env[operand]
            for end in range(1, len(chain) + 1):
                key = (operand, chain[:end])
                if key not in moved:
                    before = moved[operand, chain[: end - 1]] if end > 1 else env[operand]
                    axes = partial_axes(chain[end - 2]) if end > 1 else lanes.get(operand, ())
                    moved[key] = self.take_through(before, axes, chain[end - 1 : end])
            return moved[operand, chain]

        def refetch(operand: Operand, chain: Chain, how: Refetch) -> Any:
            """Reshard again behind a barrier, or XLA would merge it with the earlier resharding."""
            assert isinstance(operand, int)
            shared = chain[: how.num_shared]
            key = (operand, chain, how.num_shared)
            if key not in refetched:
                array, _ = jax.lax.optimization_barrier((read(operand, shared), env[how.after]))
                for layout in chain[how.num_shared :]:
                    array = self.constrain(array, layout)
                refetched[key] = array
            return refetched[key]

        for equation, sharding in zip(equations, shardings, strict=True):
            context = _jax.equation_context(
                equation.source_info, equation.name_stack, equation.context
            )
            with context:
                operands = [
                    read(o, c) for o, c in zip(equation.operands, sharding.operands, strict=True)
                ]
                for how in sharding.refetched:
                    operand = equation.operands[how.operand]
                    chain = sharding.operands[how.operand]
                    operands[how.operand] = refetch(operand, chain, how)
                results = self.bind(equation, sharding, operands, avals)
                for value, array, chain in zip(
                    equation.results, results, sharding.results, strict=True
                ):
                    axes = partial_axes(chain[0] if chain else None)
                    axes = sharding.lanes.axes if sharding.lanes else axes
                    env[value] = self.take_through(array, axes, chain)
                    lanes[value] = partial_axes(chain[-1]) if chain else axes
        return read

    def bind(
        self,
        equation: Equation,
        sharding: EquationSharding,
        operands: list[Any],
        avals: Sequence[ShapedArray],
    ) -> list[Any]:
        if sharding.local and self.runs_on_shards(equation):
            return self.on_shards(
                equation, sharding, operands, [avals[r] for r in equation.results]
            )
        if equation.name == "scan":
            return self.scan(equation, sharding, operands)
        if equation.name == "while":
            return self.while_loop(equation, sharding, operands)
        if equation.name == "cond":
            return self.cond(equation, sharding, operands)
        if sharding.lanes is not None:
            return bind_unreduced(equation, sharding.lanes, operands, self.mesh)
        return _jax.bind_kernel(equation.primitive, equation.params, operands)

    def runs_on_shards(self, equation: Equation) -> bool:
        """XLA's random generator is known on CPUs and GPUs only."""
        return equation.name != "random_bits" or self.platform in PHILOX_PLATFORMS

    def on_shards(
        self,
        equation: Equation,
        sharding: EquationSharding,
        operands: list[Any],
        avals: list[ShapedArray],
    ) -> list[Any]:
        """Bind an operator that XLA cannot split on each device, to its shards. Results that are
        partial sums along an axis are reduced at once."""
        operand_layouts, result_layouts = sharding.local
        names = self.mesh.axis_names
        complete = [tuple(max(entry, WHOLE) for entry in layout) for layout in result_layouts]
        values = [o for o, operand in enumerate(equation.operands) if isinstance(operand, int)]

        if equation.name == "random_bits":
            return [self.random_bits(operands[0], equation.params, complete[0])]

        def run(*shards: Any) -> list[Any]:
            local = list(operands)
            for position, shard in zip(values, shards, strict=True):
                local[position] = shard
            if equation.name == RAGGED_PRODUCT:
                local = operands_on_part(equation, local, operand_layouts[0], self.mesh)
            shapes = [
                _shard_shape(aval.shape, layout, self.mesh.axis_sizes)
                for aval, layout in zip(avals, complete, strict=True)
            ]
            params = _jax.params_on_parts(
                equation.name, equation.params, [jax.numpy.shape(shard) for shard in local], shapes
            )
            results = _jax.bind_kernel(equation.primitive, params, local)
            for number, layout in enumerate(result_layouts):
                axes = tuple(n for n, e in zip(names, layout, strict=True) if e == PARTIAL)
                if axes:
                    results[number] = jax.lax.psum(results[number], axes)
            return results

        def specs(layouts: Sequence[Layout], arrays: Sequence[Any]) -> Any:
            return [
                to_partition_spec(layout, len(array.shape), names)
                for layout, array in zip(layouts, arrays, strict=True)
            ]

        arrays = [operands[position] for position in values]
        in_specs = specs([operand_layouts[position] for position in values], arrays)
        bound = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=specs(complete, avals),
            check_vma=False,
        )
        return list(bound(*arrays))

    def random_bits(self, key: Any, params: dict[str, Any], layout: Layout) -> Any:
        """The bits of an rbg key, on each device those of its shard."""
        shape, bit_width = params["shape"], params["bit_width"]
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        shard = _shard_shape(shape, layout, self.mesh.axis_sizes)

        def run(words: Any) -> Any:
            starts: list[Any] = [0] * len(shape)
            for name, dim in zip(self.mesh.axis_names, layout, strict=True):
                if dim >= 0:
                    starts[dim] = starts[dim] * sizes[name] + jax.lax.axis_index(name)
            starts = [start * size for start, size in zip(starts, shard, strict=True)]
            return philox_bits(words, shape, starts, shard, bit_width)

        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=to_partition_spec(layout, len(shape), self.mesh.axis_names),
            check_vma=False,
        )(jax.random.key_data(key))

    def scan(
        self, equation: Equation, sharding: EquationSharding, operands: list[Any]
    ) -> list[Any]:
        (body,), (body_sharding,) = equation.bodies, sharding.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        consts = operands[:num_consts]
        entering = body_sharding.inputs[num_consts : num_consts + num_carry]
        init = [
            self.constrain(unreduced_zeros(array, layout, self.mesh), layout)
            for array, layout in zip(operands[num_consts:], entering, strict=False)
        ]
        xs = operands[num_consts + num_carry :]

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self.run(body, body_sharding, [*consts, *carry, *x])
            return self.in_rows(out[:num_carry]), out[num_carry:]

        carry, ys = jax.lax.scan(
            step,
            self.in_rows(init),
            xs,
            length=equation.params["length"],
            reverse=equation.params["reverse"],
            unroll=equation.params["unroll"],
        )
        stacks = [
            # The lanes of a stack of arrays come first again.
            jnp.moveaxis(y, 0, len(partial_axes(chain[0] if chain else None)))
            for y, chain in zip(ys, sharding.results[num_carry:], strict=True)
        ]
        return [*carry, *stacks]

    def in_rows(self, carries: Sequence[Any]) -> list[Any]:
        """Carries on a single GPU, row by row: XLA lays a loop's carry out as one of its products
        likes it, and all else in the trip is slower for it. Images stay as XLA wants them."""
        if self.platform not in _GPUS or self.mesh.size > 1:
            return list(carries)
        return [
            _jax.row_major(carry)
            if getattr(carry, "ndim", 0) in (2, 3) and not _jax.is_extended_dtype(carry.dtype)
            else carry
            for carry in carries
        ]

    def while_loop(
        self, equation: Equation, sharding: EquationSharding, operands: list[Any]
    ) -> list[Any]:
        (condition, body), (cond_sharding, body_sharding) = equation.bodies, sharding.bodies
        cond_consts = equation.params["cond_nconsts"]
        num_consts = cond_consts + equation.params["body_nconsts"]

        def goes_on(carry: list[Any]) -> Any:
            inputs = [*operands[:cond_consts], *carry]
            return self.run(condition, cond_sharding, inputs)[0]

        def trip(carry: list[Any]) -> list[Any]:
            inputs = [*operands[cond_consts:num_consts], *carry]
            new = self.run(body, body_sharding, inputs)
            if is_batched:
                running = goes_on(carry)
                new = [_where(running, n, old) for n, old in zip(new, carry, strict=True)]
            return new

        # Under `jax.vmap` each loop of the batch has its own condition: all run until the last one
        # ends, and finished ones keep their values.
        (goes,) = condition.outputs
        is_batched = isinstance(goes, int) and bool(condition.avals[goes].shape)
        init = operands[num_consts:]
        return list(jax.lax.while_loop(lambda carry: jax.numpy.any(goes_on(carry)), trip, init))

    def cond(
        self, equation: Equation, sharding: EquationSharding, operands: list[Any]
    ) -> list[Any]:
        branches = [
            lambda *args, b=branch, s=branch_sharding: self.run(b, s, args)
            for branch, branch_sharding in zip(equation.bodies, sharding.bodies, strict=True)
        ]
        return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def _shard_shape(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    shard = list(shape)
    for entry, size in zip(layout, mesh_shape, strict=True):
        if entry >= 0:
            shard[entry] //= size
    return tuple(shard)


def _where(mask: Any, new: Any, old: Any) -> Any:
    """`mask` has the leading dimensions of the other two."""
    dims = tuple(range(mask.ndim))
    return jax.lax.select(jax.lax.broadcast_in_dim(mask, new.shape, dims), new, old)

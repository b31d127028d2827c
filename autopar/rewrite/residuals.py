"""Which forward values a stage stores for its backward pass, and which it recomputes there.

From forward equations and the values that the backward pass reads to a `ResidualChoice`. JAX's
derivative chooses residuals for one program, in which XLA fuses elementwise ops into their readers.
Between two programs every such value would be written, stored for each micro-batch in flight, and
read back. So values that cost next to nothing are recomputed from parameters, constants and stored
values.

The bytes stored are minimal, or a cost of storing and of making values again, where the caller
has one. A value can be recomputed if every path back through cheap equations
meets a stored value before one that cannot be recomputed. So the stored values are a vertex cut
between the latter and the values read, weighted by bytes, and maximum flow finds a minimum one
(`_minimum_cut`); to make a value again at a cost is an edge of that capacity from the flow's
source to the value. Of equal cuts it is the one closest to the readers, which recomputes least. The
cut is a quarter to a third of what JAX's derivative would hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.core import ShapedArray

from autopar.ir.program import Equation
from autopar.tracer.costs import aval_bytes, equation_flops

_FLOPS_PER_BYTE = 200  # of products, in the time in which a GPU moves a byte

# One pass over the result's elements, each from one element per operand: XLA fuses it into its
# readers. Products, reductions, gathers, sorts and random bits are not among them.
CHEAP = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota",
    "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "mulhi",
    "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count", "pow", "real",
    "reduce_precision", "rem", "reshape", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice", "sqrt",
    "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor",
})  # fmt: skip


def is_cheap(equation: Equation) -> bool:
    return equation.name in CHEAP and not equation.has_effect and not equation.bodies


def _free_if_cheap(equation: Equation) -> int | None:
    return 0 if is_cheap(equation) else None


def repeat_cost(equation: Equation, avals: Sequence[ShapedArray]) -> int | None:
    """Bytes that could be moved in the time of an equation, products too; None if it must not run
    again."""
    if equation.name == "reduce_precision":
        return None  # so JAX marks what a policy of `jax.checkpoint` saves
    if is_cheap(equation) or _is_row_maximum(equation, avals):
        return 0
    if equation.name != "dot_general" or equation.has_effect:
        return None
    moved = sum(aval_bytes(avals[v]) for v in (*equation.inputs, *equation.results))
    return moved + int(equation_flops(equation, avals) / _FLOPS_PER_BYTE)


def _is_row_maximum(equation: Equation, avals: Sequence[ShapedArray]) -> bool:
    """A softmax's: XLA computes the softmax in one kernel if nothing else reads its maximum."""
    if equation.name != "reduce_max" or len(equation.inputs) != 1:
        return False
    rank = len(avals[equation.inputs[0]].shape)
    return tuple(equation.params["axes"]) == (rank - 1,)


@dataclass(frozen=True)
class ResidualChoice:
    """stored: values handed to the backward pass; recomputed: positions of the forward equations
    that it runs again first, in order."""

    stored: tuple[int, ...]
    recomputed: tuple[int, ...]


def choose_residuals(
    forward: Sequence[Equation],
    read: Collection[int],
    available: Collection[int],
    avals: Sequence[ShapedArray],
    *,
    store_cost: Callable[[int], int] | None = None,
    repeat_cost: Callable[[Equation], int | None] = _free_if_cheap,
) -> ResidualChoice:
    """What to store of a forward pass whose backward pass reads the values `read`.

    forward:     its equations, in order; values that it reads from outside may be stored too.
    available:   values that the backward pass has in any case (parameters, constants).
    store_cost:  of a value, by default its bytes.
    repeat_cost: of running an equation again, in the same unit; None if that must not be.
    """
    costs = {p: repeat_cost(e) for p, e in enumerate(forward)}
    maker = {e.results[0]: p for p, e in enumerate(forward) if costs[p] is not None}
    wanted = sorted(v for v in set(read) if v not in available)
    known = set(available)
    # Every value on a path back from the wanted ones through equations that may run again.
    nodes: dict[int, int] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in nodes or value in known:
            continue
        nodes[value] = len(nodes)
        if value in maker:
            stack.extend(forward[maker[value]].inputs)
    edges = [(o, v) for v in nodes if v in maker for o in forward[maker[v]].inputs if o in nodes]
    stored = _minimum_cut(
        nodes,
        {v: aval_bytes(avals[v]) if store_cost is None else store_cost(v) for v in nodes},
        {v: costs[maker[v]] if v in maker else None for v in nodes},
        edges,
        wanted,
    )
    recomputed: set[int] = set()
    stack = [v for v in wanted if v not in stored]
    while stack:
        position = maker[stack.pop()]
        if position not in recomputed:
            recomputed.add(position)
            stack.extend(o for o in forward[position].inputs if o in nodes and o not in stored)
    return ResidualChoice(tuple(sorted(stored)), tuple(sorted(recomputed)))


def _minimum_cut(
    nodes: dict[int, int],
    store_cost: Mapping[int, int],
    repeat_cost: Mapping[int, int | None],
    edges: Sequence[tuple[int, int]],
    targets: Sequence[int],
) -> set[int]:
    """The values to store: every path to a target passes one of them, or begins at a value that is
    made again at its own cost; the sum of the costs is minimal. Of several such cuts, the one
    closest to the targets."""
    if not any(cost is None or cost for cost in repeat_cost.values()):
        return set()
    from scipy.sparse import csr_array  # slow to import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    # A value is an edge from its entry 2k to its exit 2k + 1; flows are 32-bit integers.
    start, end, unlimited = 2 * len(nodes), 2 * len(nodes) + 1, np.iinfo(np.int32).max
    repeated = {v: cost for v in nodes if (cost := repeat_cost[v])}
    scaled = _scaled([*(store_cost[v] for v in nodes), *repeated.values()])
    flows = [(2 * k, 2 * k + 1, scaled[k]) for k in range(len(nodes))]
    flows += [(2 * nodes[o] + 1, 2 * nodes[v], unlimited) for o, v in set(edges)]
    flows += [(start, 2 * nodes[v], unlimited) for v in nodes if repeat_cost[v] is None]
    flows += [
        (start, 2 * nodes[v], cost) for v, cost in zip(repeated, scaled[len(nodes) :], strict=True)
    ]
    flows += [(2 * nodes[v] + 1, end, unlimited) for v in targets]
    rows, columns, capacities = (np.array(x, dtype=np.int32) for x in zip(*flows, strict=True))
    shape = (end + 1, end + 1)
    capacity = csr_array((capacities, (rows, columns)), shape=shape)
    flow = maximum_flow(capacity, start, end).flow
    left = capacity.astype(np.int64) - flow.astype(np.int64)
    left.eliminate_zeros()
    left.data = (left.data > 0).astype(np.int8)
    left.eliminate_zeros()
    reaches = set(breadth_first_order(left.T.tocsr(), end, return_predecessors=False).tolist())
    return {v for v, k in nodes.items() if 2 * k + 1 in reaches and 2 * k not in reaches}


def _scaled(weights: list[int]) -> list[int]:
    """Integers in the same proportion whose sum has 30 bits; rounding affects small ones only."""
    unit = max(int(np.gcd.reduce(weights)), 1)
    total = sum(weights) // unit
    if total < 2**30:
        return [w // unit for w in weights]
    return [max(round(w / unit * (2**30 / total)), min(w, 1)) for w in weights]

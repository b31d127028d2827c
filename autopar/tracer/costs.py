"""Costs of equations and nodes before sharding: flops, bytes, batch factors, order of values.

From equations and the nodes of a graph to numbers that `build` stores on nodes and values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.ffts import fft_bytes
from autopar.ir.graph import Node, NodeKind, Value
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.tracer.op_sizes import RAGGED_PRODUCT, num_groups
from autopar.tracer.regions import UPDATE

# Ops whose result shares its operand's memory.
VIEWS = {
    "reshape", "squeeze", "expand_dims", "optimization_barrier", "stop_gradient", "copy_p",
    "random_wrap", "random_unwrap", "bitcast_convert_type", _jax.CONSTRAIN,
}  # fmt: skip
# Ops that XLA does not fuse into their neighbours: they read and write memory.
UNFUSED = {
    "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add",
    "sort", "top_k", "dynamic_slice", "dynamic_update_slice", "concatenate", "cumsum",
    "cumlogsumexp", "cummax", "cumprod", "fft", "reduce_window", "reduce_window_sum",
    "reduce_window_max", "select_and_scatter_add", "cholesky", "triangular_solve", "custom_call",
    "pallas_call", "argsort", "scan_slice", "scan_stack", "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
}  # fmt: skip
# Fused with what they read, but their results are written.
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax",
    "argmin", "reduce_xor", "reduce",
}  # fmt: skip
# Instructions per element of expensive ops; all others take 1.
INSTRUCTIONS = {
    "tanh": 40.0, "erf": 40.0, "erf_inv": 40.0, "pow": 40.0, "exp": 12.0, "exp2": 12.0,
    "log": 12.0, "log1p": 20.0, "expm1": 20.0, "logistic": 16.0, "sin": 20.0, "cos": 20.0,
    "div": 8.0, "sqrt": 8.0, "rsqrt": 8.0, "threefry2x32": 60.0, "random_bits": 60.0,
}  # fmt: skip
# The kernels of fused attention, with the number of products in each.
_FUSED_ATTENTION = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
_READS_PART = ("gather", "dynamic_slice", "slice")  # as much of their first operand as they return
_WRITES_PART = {"dynamic_update_slice": 1, "scatter": 2}  # as much as this operand holds, in place
# A trip of a scan reads its slice in place: the ops that read it pay, as in an unrolled loop. What
# it takes to write a slice into a stack is in `tracer.kernels`.
_STACKS = ("scan_slice", "scan_stack")


# A Triton kernel holds a row of at most so many elements, as a power of two of them.
MAX_TILE_ROW = 2**14
# XLA (0.12, compiled softmaxes of many sizes) makes the softmax of 16-bit scores, in 32 bits, there
# if rows are padded little. Where memory is fast, as an H200's, it does so for few scores, or many
# rows of a device with less padding.
_FAST_MEMORY = 16.0  # instructions per byte moved
_MAX_PADDING = 1.5
_LESS_PADDING, _MANY_ROWS, _FEW_SCORES = 1.17, 2**16, 2**22


def fits_tiles(shape: Sequence[int], rate: float = 0.0, is_split: bool = False) -> bool:
    """Whether XLA makes the softmax of such scores in tiles; rows are short enough. `rate`:
    instructions in the time of moving a byte; `is_split`: a device has some of the rows."""
    padding = (1 << (shape[-1] - 1).bit_length()) / shape[-1]
    if prod(shape) <= _FEW_SCORES:
        return True
    if rate > _FAST_MEMORY:
        return padding <= _MAX_PADDING
    return prod(shape[:-1]) > _MANY_ROWS and not is_split and padding <= _LESS_PADDING


def aval_bytes(aval: ShapedArray) -> int:
    dtype = getattr(aval, "dtype", None)
    return prod(getattr(aval, "shape", ())) * (getattr(dtype, "itemsize", 0) or 0)


def program_flops(program: Program) -> float:
    """The flops of all equations; a loop's body counts once per trip if the trips are known."""
    total = 0.0
    for equation in program.equations:
        if equation.bodies:
            trips = equation.params.get("length", 1)
            total += trips * sum(program_flops(body) for body in equation.bodies)
        elif equation.results:
            total += equation_flops(equation, program.avals)
    return total


def equation_flops(equation: Equation, avals: Sequence[ShapedArray]) -> float:
    """Floating point operations: two per multiply-add of a product or convolution, of a ragged
    product all that XLA does with zeros; one per element of the largest operand or result
    elsewhere."""

    def shape_of(operand: Operand) -> tuple[int, ...]:
        aval = operand.aval if isinstance(operand, Constant) else avals[operand]
        return getattr(aval, "shape", ())

    size = float(prod(shape_of(equation.results[0])))
    if equation.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        shape = shape_of(equation.operands[0])
        return 2.0 * size * prod(shape[d] for d in contracting)
    if equation.name == RAGGED_PRODUCT:
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contracting, _), _ = numbers.dot_dimension_numbers
        shape = shape_of(equation.operands[0])
        groups = (
            1 if numbers.lhs_ragged_dimensions[0] in contracting else num_groups(equation, avals)
        )
        return 2.0 * size * prod(shape[d] for d in contracting) * groups
    if equation.name == "conv_general_dilated":
        shape = shape_of(equation.operands[1])
        out_feature = equation.params["dimension_numbers"].rhs_spec[0]
        groups = equation.params["batch_group_count"]
        # The gradient of a strided convolution dilates its operand with zeros, which cost nothing.
        zeros = prod(equation.params["lhs_dilation"])
        return 2.0 * size * prod(shape) / shape[out_feature] / max(groups, 1) / zeros
    if equation.name in _FUSED_ATTENTION:
        key = shape_of(equation.operands[1])
        num_keys = key[1] if equation.params["layout"] == 0 else key[2]
        return 2.0 * size * num_keys * _FUSED_ATTENTION[equation.name]
    return max([size, *(float(prod(shape_of(o))) for o in equation.operands)])


def part_bytes(equation: Equation, avals: Sequence[ShapedArray]) -> float | None:
    """The bytes of its first operand that an equation reads, or writes in place; None for all of
    them. Operands are those of the equation: a node lacks the constants among them."""
    if not equation.operands or isinstance(equation.operands[0], Constant):
        return None
    name = "scatter" if equation.name.startswith("scatter") else equation.name
    if name in _READS_PART:
        return float(aval_bytes(avals[equation.results[0]]))
    if name in _WRITES_PART:
        part = equation.operands[_WRITES_PART[name]]
        return float(aval_bytes(part.aval if isinstance(part, Constant) else avals[part]))
    return None


def array_passes(equation: Equation, avals: Sequence[ShapedArray]) -> float:
    """How often a Fourier transform reads and writes its arrays; 1 for all else."""
    if equation.name != "fft":
        return 1.0
    (operand,), (result,) = equation.operands, equation.results
    read = aval_bytes(operand.aval if isinstance(operand, Constant) else avals[operand])
    written = aval_bytes(avals[result])
    kind, lengths = equation.params["fft_type"].name, equation.params["fft_lengths"]
    return fft_bytes(kind, lengths, read, written) / max(read + written, 1)


def touched_bytes(
    node: Node, values: Sequence[Value], in_memory: Collection[int]
) -> tuple[float, ...]:
    """The bytes that a node moves to and from memory, per operand and then per result."""
    if node.kind is not NodeKind.OP or node.name in VIEWS or node.name in _STACKS:
        return (0.0,) * (len(node.operands) + len(node.results))
    touched = [
        float(values[v].num_bytes) if v in in_memory else 0.0
        for v in (*node.operands, *node.results)
    ]
    part = node.part_bytes
    if part is not None and node.name in _READS_PART:
        touched[0] = min(touched[0], part)
    elif part is not None and node.name in _WRITES_PART:
        # In place: the rest of the array is neither read nor written.
        touched = [min(count, part) for count in touched]
    return tuple(touched)


def batch_factors(
    nodes: Sequence[Node], values: Sequence[Value], batch_inputs: Sequence[int]
) -> list[int | None]:
    """Follow the first dimension of the batch inputs through the rules."""
    batch_dim = {v: 0 for v in batch_inputs if values[v].shape}
    factors: list[int | None] = [None] * len(nodes)
    has_loops = any(node.kind is NodeKind.MERGE for node in nodes)
    for _ in range(2 if has_loops else 1):  # twice: loop carries learn from their bodies
        for index, node in enumerate(nodes):
            factor = None
            for value, dims in zip(node.operands, node.rule.operands, strict=True):
                dim = batch_dim.get(value)
                if dim is not None and dims[dim]:
                    factor = dims[dim][0]
                    break
            if node.kind is NodeKind.INPUT and node.results[0] in batch_dim:
                first = node.rule.results[0][0]
                factor = first[0] if first else None
            factors[index] = factor
            if factor is None:
                continue
            for value, dims in zip(node.results, node.rule.results, strict=True):
                for dim, dim_factors in enumerate(dims):
                    if dim_factors and dim_factors[0] == factor:
                        batch_dim[value] = dim
                        break
    return factors


def deferred_values(nodes: Sequence[Node], batch_inputs: Collection[int]) -> set[int]:
    """Values that no heavy op waits for: gradients, which reach the update through light ops alone,
    and values made from state alone (parameters on their way to their use)."""
    from_state: set[int] = set()
    made: set[int] = set()
    urgent: set[int] = set()  # read on the way to a product, or carried around a loop
    for node in nodes:
        kind = node.kind
        if kind is NodeKind.INPUT:
            from_state.update(v for v in node.results if v not in batch_inputs)
        elif node.operands and from_state.issuperset(node.operands):
            from_state.update(node.results)
        if kind is NodeKind.MERGE:
            urgent.update(v for v in node.operands if v not in made)
        made.update(node.results)
    deferred: set[int] = set()
    for node in reversed(nodes):
        if urgent.isdisjoint(node.results):
            deferred.update(node.results)
            waited_for = node.is_heavy
        else:
            deferred.update(v for v in node.results if v not in urgent)
            waited_for = True
        if waited_for and node.region != UPDATE:
            urgent.update(node.operands)
    return deferred | from_state


def state_orders(nodes: Sequence[Node]) -> dict[int, tuple[int, ...]]:
    """{unfinished gradient: the positions in it of the dimensions of its state}, of those that are
    transposed on the way: JAX makes the gradient of `x @ w` as `(dy.T @ x).T`."""
    passed = {
        node.operands[0]: node
        for node in nodes
        if node.name in ("transpose", "convert_element_type") and node.operands
    }
    orders = {}
    for node in nodes:
        if node.kind is not NodeKind.FINISH:
            continue
        order = own = tuple(range(len(node.rule.results[0])))
        value = node.results[0]
        while (reader := passed.get(value)) is not None and reader.region != UPDATE:
            before, after = reader.rule.operands[0], reader.rule.results[0]
            if reader.name == "transpose":
                order = tuple(order[before.index(factors)] for factors in after)
            value = reader.results[0]
        if order != own:
            orders[node.operands[0]] = order
    return orders

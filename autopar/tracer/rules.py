"""Sharding rules of equations, taken from Shardy: from distinct `Equation`s to `RuledEquation`s.

Every *distinct* equation of the program (primitive, parameters, operand types) is lowered once, all
in one StableHLO module. Shardy's `sdy-populate-op-sharding-rules` pass writes on each op the rule
that the partitioner will follow, and `compose` reads it. A model of a hundred equal layers
therefore lowers no more than one of a single layer.

`PRIMITIVE_RULES` are the exceptions: primitives whose lowering hides their structure. Random bits
are generated in a loop or a kernel, yet every element is independent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from enum import Enum
from math import prod
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from autopar import _jax
from autopar.errors import AutoparError
from autopar.ir.failures import Failure
from autopar.ir.graph import Rule
from autopar.ir.program import Constant, Equation
from autopar.tracer.compose import RuledEquation, compose_rule, replicated_rule
from autopar.tracer.halo import has_windows, with_halos
from autopar.tracer.op_sizes import RAGGED_PRODUCT
from autopar.tracer.user_rules import fit_rule, user_rule_of

# Number of distinct equations lowered together.
_CHUNK = 512
# Rules that lowering told, by equation: graphs of one step share nearly all of them.
_lowered: dict[Hashable, RuledEquation] = {}
_MOST_LOWERED = 8192

Avals = list[ShapedArray]


def equation_key(equation: Equation, avals: Sequence[ShapedArray]) -> Hashable:
    """Equal keys lower to equal ops. The values of scalar constants do not matter to sharding."""
    operands = tuple(
        (_aval_key(o.aval), "constant") if isinstance(o, Constant) else _aval_key(avals[o])
        for o in equation.operands
    )
    # Names do not matter either: layers may use different ones.
    params = {} if equation.name == _jax.CONSTRAIN else equation.params
    return equation.name, _params_key(params), operands


def _aval_key(aval: ShapedArray) -> Hashable:
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)


def _params_key(params: dict[str, Any]) -> Hashable:
    key = tuple(params.items())
    try:
        hash(key)
    except TypeError:
        return tuple((name, repr(value)) for name, value in key)
    return key


def rules_of_equations(
    equations: Sequence[Equation], avals: Sequence[ShapedArray]
) -> list[RuledEquation]:
    """Rules of distinct equations (no loops), from one lowering of all of them."""
    ruled: dict[int, RuledEquation] = {}
    to_lower = []
    for index, equation in enumerate(equations):
        primitive_rule = PRIMITIVE_RULES.get(equation.name)
        operands, results = _avals_of(equation, avals)
        user_rule = user_rule_of(equation, operands, results) if results else None
        if user_rule is not None:
            rule, note = fit_rule(user_rule, equation, operands, results)
            ruled[index] = RuledEquation(rule, note=note)
        elif primitive_rule is not None:
            ruled[index] = RuledEquation(primitive_rule(equation, operands, results))
        elif equation.name == "shard_map":
            # The user's sharding on the user's mesh.
            note = "is entered and left replicated: autopar does not look into it"
            ruled[index] = RuledEquation(replicated_rule(operands, results), note=note)
        elif equation.has_effect or not results or _is_of_platform(equation):
            # An effect cannot be lowered out of its context, and a kernel only for its platform;
            # neither can be split.
            unruled = (equation.name,) if results else ()
            ruled[index] = RuledEquation(replicated_rule(operands, results), unruled)
        else:
            to_lower.append(index)
    keys = {
        i: (equations[i].primitive, equation_key(equations[i], avals))
        for i in to_lower
        if _is_plain(equations[i])
    }
    ruled.update({i: _lowered[key] for i, key in keys.items() if key in _lowered})
    to_lower = [i for i in to_lower if i not in ruled]
    for start in range(0, len(to_lower), _CHUNK):
        indices = to_lower[start : start + _CHUNK]
        ruled.update(
            zip(indices, _lower_and_read([equations[i] for i in indices], avals), strict=True)
        )
    if len(_lowered) > _MOST_LOWERED:
        _lowered.clear()
    _lowered.update({keys[i]: ruled[i] for i in to_lower if i in keys and not ruled[i].failure})
    return [_adjust_for_xla(equations[i], ruled[i], avals) for i in range(len(equations))]


_PLAIN = (bool, int, float, str, bytes, type(None), Enum, np.dtype)


def _is_plain(equation: Equation) -> bool:
    """Whether all parameters are data: equal ones mean the same in another program, and keeping
    them keeps nothing of the user's alive."""
    values = list(equation.params.values())
    while values:
        value = values.pop()
        if isinstance(value, tuple):
            values += value
        elif not isinstance(value, _PLAIN):
            return False
    return True


def _is_of_platform(equation: Equation) -> bool:
    return _jax.kernel_platforms(equation.name, equation.params) is not None


def _adjust_for_xla(
    equation: Equation, ruled: RuledEquation, avals: Sequence[ShapedArray]
) -> RuledEquation:
    """The rule without splits that XLA gets wrong, and with the windows that it can split."""
    if has_windows(equation) and ruled.rule.sizes:
        operands, results = _avals_of(equation, avals)
        return replace(ruled, rule=with_halos(equation, ruled.rule, operands, results[0]))
    if equation.name == RAGGED_PRODUCT:  # XLA gathers whatever is split
        return replace(ruled, rule=replace(ruled.rule, local=True))
    if equation.name.startswith("scatter"):
        return replace(ruled, rule=_without_split_target(equation, ruled.rule, avals))
    if equation.name != "mul" or not any(isinstance(o, Constant) for o in equation.operands):
        return ruled
    aval = avals[equation.results[0]]
    if aval.ndim == 1 and str(aval.dtype) in ("int32", "uint32"):
        # XLA's simplifier mistakes the product for an index computation: a slice of such a slice
        # loses the factor (JAX 0.10.2 and 0.12).
        rule = replace(ruled.rule, fixed=frozenset(range(len(ruled.rule.sizes))))
        return replace(ruled, rule=rule)
    return ruled


def _without_split_target(equation: Equation, rule: Rule, avals: Sequence[ShapedArray]) -> Rule:
    """XLA turns a scatter by a single index into an update of a slice. If the array was whole
    before and is split here, shards without the index are updated too (JAX 0.10.2, not 0.12)."""
    _, indices, *_ = _avals_of(equation, avals)[0]
    dims = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    if prod(indices.shape[:-1]) != 1:
        return rule
    targets = {f for dim in dims for f in rule.operands[0][dim]}
    return replace(rule, fixed=rule.fixed | targets)


def identity_rule(shape: Sequence[int], num_operands: int = 1) -> Rule:
    """Operands and result of one shape, split together."""
    dims, sizes = _free_dims([shape])
    return Rule((dims[0],) * num_operands, (dims[0],), sizes)


def _avals_of(equation: Equation, avals: Sequence[ShapedArray]) -> tuple[Avals, Avals]:
    operands = [o.aval if isinstance(o, Constant) else avals[o] for o in equation.operands]
    return operands, [avals[r] for r in equation.results]


def _free_dims(
    shapes: Sequence[Sequence[int]],
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[int, ...]]:
    """A separate factor for every dimension of every shape: (dimensions, factor sizes)."""
    sizes: list[int] = []
    dims_of = []
    for shape in shapes:
        dims = []
        for size in shape:
            dims.append((len(sizes),) if size > 1 else ())
            sizes += [size] if size > 1 else []
        dims_of.append(tuple(dims))
    return tuple(dims_of), tuple(sizes)


# -- rules by primitive


def _elementwise(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """The dimensions of the operands line up with those of the results, from the right."""
    del equation
    (dims,), sizes = _free_dims([results[0].shape])

    def line_up(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        aligned = dims[len(dims) - len(shape) :]
        return tuple(d if size > 1 else () for d, size in zip(aligned, shape, strict=True))

    return Rule(tuple(line_up(a.shape) for a in operands), (dims,) * len(results), sizes)


def _generate(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """The result's dimensions are free and the operands (keys) whole."""
    del equation
    dims, sizes = _free_dims([a.shape for a in results])
    whole = replicated_rule(operands, ())
    return Rule(whole.operands, dims, sizes)


def _random_bits(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """Free, like everything generated. XLA would draw all bits of an rbg key on every device; we
    draw them shard by shard. One count of the generator gives several elements of the last
    dimension."""
    rule = _generate(equation, operands, results)
    if operands[0].shape or not _jax.draws_bits_by_philox(operands[0].dtype):
        return rule
    shape = results[0].shape
    per_count = 2 if equation.params["bit_width"] == 64 else 4
    if not shape or shape[-1] % per_count or shape[-1] == per_count:
        return replace(rule, local=True)
    (dims,), sizes = _free_dims([(*shape[:-1], shape[-1] // per_count, per_count)])
    dims = (*dims[:-2], (*dims[-2], *dims[-1]))
    return Rule(rule.operands, (dims,), sizes, fixed=frozenset(dims[-1][-1:]), local=True)


def _keys(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """Keys are small and stay whole."""
    del equation
    return replicated_rule(operands, results)


def _tied(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """Result k is operand k; they are free of each other."""
    del equation, operands
    dims, sizes = _free_dims([getattr(a, "shape", ()) for a in results])
    return Rule(dims, dims, sizes)


def _top_k(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """Every dimension is free except the one that is searched."""
    (operand,) = operands
    searched = equation.params.get("axis", -1) % len(operand.shape)
    (dims,), sizes = _free_dims([operand.shape])
    result_dims = tuple(() if d == searched else factors for d, factors in enumerate(dims))
    fixed = frozenset(dims[searched])
    return Rule((dims,), (result_dims,) * len(results), sizes, fixed=fixed, local=True)


def _fft(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """The dimensions in front of the transformed ones are free."""
    return _batched(len(equation.params["fft_lengths"]), operands, results)


def _factorised(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """A factorisation of matrices: the dimensions in front of rows and columns are free."""
    del equation
    return _batched(2, operands, results)


def _batched(num_inner: int, operands: Avals, results: Avals) -> Rule:
    """All arrays share their leading dimensions: all but the last `num_inner` of the first one."""
    batch = operands[0].shape[: len(operands[0].shape) - num_inner]
    (dims,), sizes = _free_dims([batch])

    def with_rest(aval: ShapedArray) -> tuple[tuple[int, ...], ...]:
        return dims + ((),) * (len(aval.shape) - len(batch))

    return Rule(tuple(map(with_rest, operands)), tuple(map(with_rest, results)), sizes, local=True)


def _permutation(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """Pivots as a permutation: the dimensions in front of the last are free."""
    del equation
    return _batched(1, operands, results)


def _elementwise_loop(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """A series summed until all elements have converged: run on shards, no device waits for the
    elements of another."""
    return replace(_elementwise(equation, operands, results), local=True)


def _fused_attention(equation: Equation, operands: Avals, results: Avals) -> Rule:
    """cuDNN's attention, forward or backward: batch and heads are free. If several query heads
    share a key head, a split of the key heads splits the query heads as well."""
    query, key = operands[0].shape, operands[1].shape
    heads_at = 2 if equation.params["layout"] == 0 else 1
    num_heads, num_groups = query[heads_at], key[heads_at]
    batch, group, member = 0, 1, 2
    sizes = (query[0], num_groups, num_heads // num_groups)

    def dims(aval: ShapedArray, heads_at: int) -> tuple[tuple[int, ...], ...]:
        factors: list[tuple[int, ...]] = [()] * len(aval.shape)
        if aval.shape and aval.shape[0] == query[0]:
            factors[0] = (batch,)
        if len(aval.shape) > heads_at:
            if aval.shape[heads_at] == num_heads:
                factors[heads_at] = (group, member) if sizes[member] > 1 else (group,)
            elif aval.shape[heads_at] == num_groups:
                factors[heads_at] = (group,)
        return tuple(factors)

    # Queries, keys, values and arrays of their shape, beside statistics (batch, heads, …), biases
    # (batch or 1, heads or 1, …) and lengths (batch).
    like = {tuple(a.shape) for a in operands[:3]}
    of = [dims(a, heads_at if a.shape in like else 1) for a in (*operands, *results)]
    fixed = {member} | {f for f, size in enumerate(sizes) if size == 1}
    others = [a for a in results if a.shape not in like]
    if any(a.shape[:2] != (query[0], num_heads) for a in others):
        # The gradient of a bias shared by batch or heads is a sum over them; statistics of packed
        # sequences have another batch dimension.
        fixed |= {batch, group}
    count = len(operands)
    return Rule(tuple(of[:count]), tuple(of[count:]), sizes, fixed=frozenset(fixed), local=True)


PRIMITIVE_RULES: dict[str, Callable[[Equation, Avals, Avals], Rule]] = {
    _jax.CONSTRAIN: _elementwise,
    "random_bits": _random_bits,
    "threefry2x32": _elementwise,
    "random_unwrap": _keys,
    "random_wrap": _keys,
    "random_split": _keys,
    "random_fold_in": _keys,
    "random_seed": _keys,
    "random_clone": _keys,
    "copy": _elementwise,
    "optimization_barrier": _tied,
    "top_k": _top_k,
    "dot_product_attention_fwd_wrapper": _fused_attention,
    "dot_product_attention_bwd_wrapper": _fused_attention,
    "fft": _fft,
    "lu": _factorised,
    "lu_pivots_to_permutation": _permutation,
    "igamma": _elementwise_loop,
    "igammac": _elementwise_loop,
    "igamma_grad_a": _elementwise_loop,
    "regularized_incomplete_beta": _elementwise_loop,
}


# -- rules by lowering


def _lower_and_read(
    equations: Sequence[Equation], avals: Sequence[ShapedArray]
) -> list[RuledEquation]:
    try:
        return _read_rules(equations, avals, _lower(equations, avals))
    except AutoparError:
        raise
    except Exception as error:
        # Bisect to find the equation that fails, and leave it without a rule; the plan's warnings
        # name it. JAX cannot lower some for this platform. All else is a failure of ours.
        if len(equations) == 1:
            (equation,) = equations
            rule = replicated_rule(*_avals_of(equation, avals))
            is_ours = not isinstance(error, NotImplementedError)
            failure = Failure.of(f"the rule of {equation.name}", error) if is_ours else None
            return [RuledEquation(rule, (equation.name,), failure=failure)]
        half = len(equations) // 2
        return [
            *_lower_and_read(equations[:half], avals),
            *_lower_and_read(equations[half:], avals),
        ]


def _read_rules(
    equations: Sequence[Equation], avals: Sequence[ShapedArray], module: Any
) -> list[RuledEquation]:
    _jax.populate_sharding_rules(module)
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    (block,) = functions["main"].operation.regions[0].blocks
    arguments, outputs = iter(block.arguments), iter(list(block.operations)[-1].operands)
    return [
        compose_rule(
            equation,
            avals,
            [next(arguments) for _ in equation.inputs],
            [next(outputs) for _ in equation.results],
            functions,
        )
        for equation in equations
    ]


def _lower(equations: Sequence[Equation], avals: Sequence[ShapedArray]) -> Any:
    """A StableHLO module whose main function runs every equation on separate arguments."""
    arguments = [
        jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype)
        for equation in equations
        for v in equation.inputs
    ]

    def run_all(*flat: Any) -> list[list[Any]]:
        left, outs = iter(flat), []
        for equation in equations:
            operands = [
                o.value if isinstance(o, Constant) else next(left) for o in equation.operands
            ]
            outs.append(_jax.bind(equation.primitive, equation.params, operands))
        return outs

    return _jax.lowered(jax.jit(run_all, keep_unused=True), *arguments).compiler_ir("stablehlo")

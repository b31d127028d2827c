"""Sharding rules for equations, taken from Shardy rather than written by us.

Every *distinct* equation of the program (primitive, parameters, operand types) is lowered once,
all of them in one StableHLO module, and Shardy's `sdy-populate-op-sharding-rules` pass writes on
each op the very rule that the partitioner will follow; `autopar.tracer.compose` reads them. A model
of a hundred equal layers therefore lowers no more than one of a single layer.

The exceptions are in `PRIMITIVE_RULES`: primitives whose lowering hides what they are. Random bits
are generated in a loop or a kernel, yet every element is independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax

from autopar import _jax
from autopar.ir.graph import Rule
from autopar.ir.program import Constant, Equation
from autopar.tracer.compose import RuledEquation, compose_rule, replicated_rule
from autopar.tracer.halo import has_windows, with_halos
from autopar.tracer.user_rules import fit_rule, user_rule_of

# Distinct equations that are lowered together.
_CHUNK = 512


def equation_key(equation: Equation, avals: Sequence[Any]) -> Any:
    """Equal keys lower to equal ops. The values of scalar constants do not matter to sharding."""
    operands = tuple(
        (_aval_key(o.aval), "constant") if isinstance(o, Constant) else _aval_key(avals[o])
        for o in equation.operands
    )
    # A name does not matter either, so that layers may give theirs different ones.
    params = {} if equation.name == _jax.CONSTRAIN else equation.params
    return equation.name, _params_key(params), operands


def _aval_key(aval: Any) -> Any:
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)


def _params_key(params: dict[str, Any]) -> Any:
    key = tuple(params.items())
    try:
        hash(key)
    except TypeError:
        return tuple((name, repr(value)) for name, value in key)
    return key


def rules_of_equations(equations: Sequence[Equation], avals: Sequence[Any]) -> list[RuledEquation]:
    """Rules for distinct equations (loops excluded), by one lowering of all of them."""
    found: dict[int, RuledEquation] = {}
    to_lower = []
    for index, equation in enumerate(equations):
        judge = PRIMITIVE_RULES.get(equation.name)
        operands, results = _avals_of(equation, avals)
        given = user_rule_of(equation, operands, results) if results else None
        if given is not None:
            rule, note = fit_rule(given, equation, operands, results)
            found[index] = RuledEquation(rule, note=note)
        elif judge is not None:
            found[index] = RuledEquation(judge(equation, operands, results))
        elif equation.name == "shard_map":
            # The user's own sharding, on the user's own mesh.
            note = "is entered and left replicated: autopar does not look into it"
            found[index] = RuledEquation(replicated_rule(operands, results), note=note)
        elif equation.has_effect or not results:
            # Out of its place an effect cannot be lowered, nor may it be split.
            unruled = (equation.name,) if results else ()
            found[index] = RuledEquation(replicated_rule(operands, results), unruled)
        else:
            to_lower.append(index)
    for start in range(0, len(to_lower), _CHUNK):
        indices = to_lower[start : start + _CHUNK]
        ruled = _lower_and_read([equations[i] for i in indices], avals)
        found.update(zip(indices, ruled, strict=True))
    return [_within_what_xla_can(equations[i], found[i], avals) for i in range(len(equations))]


def _within_what_xla_can(
    equation: Equation, ruled: RuledEquation, avals: Sequence[Any]
) -> RuledEquation:
    """The rule less what XLA is known to get wrong, and with the windows that it can split."""
    if has_windows(equation) and ruled.rule.sizes:
        operands, results = _avals_of(equation, avals)
        return replace(ruled, rule=with_halos(equation, ruled.rule, operands, results[0]))
    if equation.name.startswith("scatter"):
        return replace(ruled, rule=_without_split_target(equation, ruled.rule, avals))
    if equation.name != "mul" or not any(isinstance(o, Constant) for o in equation.operands):
        return ruled
    aval = avals[equation.results[0]]
    if aval.ndim == 1 and str(aval.dtype) in ("int32", "uint32"):
        # XLA's simplifier takes the product for the computation of an index: a slice of such a
        # slice loses the factor (JAX 0.10.2 and 0.12).
        rule = replace(ruled.rule, fixed=frozenset(range(len(ruled.rule.sizes))))
        return replace(ruled, rule=rule)
    return ruled


def _without_split_target(equation: Equation, rule: Rule, avals: Sequence[Any]) -> Rule:
    """A scatter by a single index becomes an update of a slice; in parts of an array that was whole
    before, those that do not have the index are updated too (JAX 0.10.2, not 0.12)."""
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


def _avals_of(equation: Equation, avals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    operands = [o.aval if isinstance(o, Constant) else avals[o] for o in equation.operands]
    return operands, [avals[r] for r in equation.results]


def _free_dims(
    shapes: Sequence[Sequence[int]],
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[int, ...]]:
    """A factor of its own for every dimension of every shape: (dimensions, factor sizes)."""
    sizes: list[int] = []
    dims_of = []
    for shape in shapes:
        dims = []
        for size in shape:
            dims.append((len(sizes),) if size > 1 else ())
            sizes += [size] if size > 1 else []
        dims_of.append(tuple(dims))
    return tuple(dims_of), tuple(sizes)


# -- primitives judged by their name


def _elementwise(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Dimensions of the operands line up, from the right, with those of the results."""
    del equation
    (dims,), sizes = _free_dims([results[0].shape])

    def line_up(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        own = dims[len(dims) - len(shape) :]
        return tuple(d if size > 1 else () for d, size in zip(own, shape, strict=True))

    return Rule(tuple(line_up(a.shape) for a in operands), (dims,) * len(results), sizes)


def _generate(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """The result's dimensions are free and the operands (keys) whole."""
    del equation
    dims, sizes = _free_dims([a.shape for a in results])
    whole = replicated_rule(operands, ())
    return Rule(whole.operands, dims, sizes)


def _random_bits(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Free, as all that is generated. XLA would draw all bits of an rbg key on every device: those
    are drawn part by part. A generator's count gives several elements of the last dimension."""
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


def _keys(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Keys are small and stay whole."""
    del equation
    return replicated_rule(operands, results)


def _tied(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Result k is operand k; they are free of each other."""
    del equation, operands
    dims, sizes = _free_dims([getattr(a, "shape", ()) for a in results])
    return Rule(dims, dims, sizes)


def _top_k(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Every dimension is free but the one that is searched."""
    (operand,) = operands
    searched = equation.params.get("axis", -1) % len(operand.shape)
    (dims,), sizes = _free_dims([operand.shape])
    kept = tuple(() if d == searched else own for d, own in enumerate(dims))
    fixed = frozenset(dims[searched])
    return Rule((dims,), (kept,) * len(results), sizes, fixed=fixed, local=True)


def _fft(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """Dimensions in front of those transformed are free."""
    return _batched(len(equation.params["fft_lengths"]), operands, results)


def _factorised(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """A factorisation of matrices: the dimensions in front of rows and columns are free."""
    del equation
    return _batched(2, operands, results)


def _batched(num_own: int, operands: list[Any], results: list[Any]) -> Rule:
    """All have the same leading dimensions, which are all but the last of the first operand."""
    batch = operands[0].shape[: len(operands[0].shape) - num_own]
    (dims,), sizes = _free_dims([batch])

    def with_rest(aval: Any) -> tuple[tuple[int, ...], ...]:
        return dims + ((),) * (len(aval.shape) - len(batch))

    return Rule(tuple(map(with_rest, operands)), tuple(map(with_rest, results)), sizes, local=True)


def _elementwise_loop(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """A series that is summed until all elements have converged: on parts, no device waits for
    the elements of another."""
    return replace(_elementwise(equation, operands, results), local=True)


def _fused_attention(equation: Equation, operands: list[Any], results: list[Any]) -> Rule:
    """cuDNN's attention, forward or backward: batch and heads are free. Where several query heads
    share a key head, a split of the key heads splits the query heads with them."""
    query, key = operands[0].shape, operands[1].shape
    heads_at = 2 if equation.params["layout"] == 0 else 1
    num_heads, num_groups = query[heads_at], key[heads_at]
    batch, group, member = 0, 1, 2
    sizes = (query[0], num_groups, num_heads // num_groups)

    def dims(aval: Any, heads_at: int) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = [()] * len(aval.shape)
        if aval.shape and aval.shape[0] == query[0]:
            found[0] = (batch,)
        if len(aval.shape) > heads_at:
            if aval.shape[heads_at] == num_heads:
                found[heads_at] = (group, member) if sizes[member] > 1 else (group,)
            elif aval.shape[heads_at] == num_groups:
                found[heads_at] = (group,)
        return tuple(found)

    # Queries, keys and values, and what is of their shape, beside statistics (batch, heads, …),
    # biases (batch or 1, heads or 1, …) and lengths (batch).
    like = {tuple(a.shape) for a in operands[:3]}
    of = [dims(a, heads_at if a.shape in like else 1) for a in (*operands, *results)]
    fixed = {member} | {f for f, size in enumerate(sizes) if size == 1}
    others = [a for a in results if a.shape not in like]
    if any(a.shape[:2] != (query[0], num_heads) for a in others):
        # The gradient of a bias that batch or heads share is a sum over them; statistics of
        # packed sequences have a batch of their own.
        fixed |= {batch, group}
    count = len(operands)
    return Rule(tuple(of[:count]), tuple(of[count:]), sizes, fixed=frozenset(fixed), local=True)


PRIMITIVE_RULES: dict[str, Callable[[Equation, list[Any], list[Any]], Rule]] = {
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
    "igamma": _elementwise_loop,
    "igammac": _elementwise_loop,
    "igamma_grad_a": _elementwise_loop,
    "regularized_incomplete_beta": _elementwise_loop,
}


# -- primitives judged by what they lower to


def _lower_and_read(equations: Sequence[Equation], avals: Sequence[Any]) -> list[RuledEquation]:
    try:
        module = _lower(equations, avals)
    except Exception:
        # Some equation cannot be lowered here: it needs another platform, or its surroundings.
        # Find it by halves and leave it unruled; the plan then names it in its warnings.
        if len(equations) == 1:
            rule = replicated_rule(*_avals_of(equations[0], avals))
            return [RuledEquation(rule, (equations[0].name,))]
        half = len(equations) // 2
        return [
            *_lower_and_read(equations[:half], avals),
            *_lower_and_read(equations[half:], avals),
        ]
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


def _lower(equations: Sequence[Equation], avals: Sequence[Any]) -> Any:
    """A StableHLO module whose main function runs every equation on arguments of its own."""
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

    return jax.jit(run_all, keep_unused=True).lower(*arguments).compiler_ir("stablehlo")

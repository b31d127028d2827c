"""Sharding rules for equations, taken from Shardy rather than written by us.

Every *distinct* equation of the program (primitive, parameters, operand types) is lowered once,
all of them in one StableHLO module, and Shardy's `sdy-populate-op-sharding-rules` pass writes on
each op the very rule that the partitioner will follow. An equation that lowers to several ops gets
the composition of their rules: dimensions that must be split together share a factor. A model of
a hundred equal layers therefore lowers no more than one of a single layer.

Ops that Shardy gives no rule are in three tables below: elementwise ops of the chlo dialect, ops
that make their result from nothing (constants, iota), and primitives whose lowering hides what
they are (random bits are generated in a loop or a kernel, yet every element is independent).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar import _jax
from autopar.ir.graph import Rule
from autopar.trace.program import Constant, Equation

_SOURCES = ("stablehlo.constant", "stablehlo.iota", "stablehlo.create_token")
_TIED_OPS = ("stablehlo.optimization_barrier",)
# Elementwise although Shardy says nothing of them: operands of the result's shape split with it.
_ELEMENTWISE_DIALECT = "chlo."
_NOT_ELEMENTWISE_CHLO = ("chlo.top_k", "chlo.scan", "chlo.ragged_dot")
# Primitives judged before lowering. "elementwise": dimensions line up from the right with the
# result's. "generate": the result's dimensions are free and the operands (keys) whole.
PRIMITIVE_RULES = {
    "threefry2x32": "elementwise",
    "random_bits": "generate",
    "random_unwrap": "keys",
    "random_wrap": "keys",
    "random_split": "keys",
    "random_fold_in": "keys",
    "random_seed": "keys",
    "random_clone": "keys",
    "copy": "elementwise",
    "optimization_barrier": "tied",
}
_LINEAR = ("add", "add_any")
_RULE_TEXT = re.compile(r"op_sharding_rule<\((?P<ins>.*?)\)->\((?P<outs>.*?)\)(?P<rest>.*)>")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")


@dataclass(frozen=True)
class RuledEquation:
    """A rule, and the StableHLO ops of the equation that had none (then all is `fixed`)."""

    rule: Rule
    unruled_ops: tuple[str, ...] = ()
    op_names: tuple[str, ...] = ()


def equation_key(equation: Equation, avals: Sequence[Any]) -> Any:
    """Equal keys lower to equal ops. The values of scalar constants do not matter to sharding."""
    operands = tuple(
        (_aval_key(o.aval), np.ndim(o.value)) if isinstance(o, Constant) else _aval_key(avals[o])
        for o in equation.operands
    )
    return equation.name, _params_key(equation.params), operands


def _aval_key(aval: Any) -> Any:
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", aval))


def _params_key(params: dict[str, Any]) -> Any:
    parts = []
    for name, value in params.items():
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        parts.append((name, value))
    return tuple(parts)


def rules_of_equations(
    equations: Sequence[Equation], avals: Sequence[Any]
) -> list[RuledEquation]:
    """Rules for distinct equations (loops excluded), by one lowering of all of them."""
    results: list[RuledEquation | None] = [None] * len(equations)
    to_lower = []
    for index, equation in enumerate(equations):
        kind = PRIMITIVE_RULES.get(equation.name)
        if kind is None:
            to_lower.append(index)
        else:
            results[index] = _primitive_rule(kind, equation, avals)
    chunk = 512
    for start in range(0, len(to_lower), chunk):
        indices = to_lower[start : start + chunk]
        ruled = _lower_and_read([equations[i] for i in indices], avals)
        for index, rule in zip(indices, ruled, strict=True):
            results[index] = rule
    return [r for r in results if r is not None]


def replicated_rule(operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of an op nobody knows: nothing may be split."""
    none = lambda avals: tuple(((),) * len(getattr(a, "shape", ())) for a in avals)  # noqa: E731
    return Rule(none(operands), none(results), ())


def identity_rule(shape: Sequence[int], num_operands: int = 1) -> Rule:
    """Operands and result of one shape, split together."""
    dims, sizes = [], []
    for size in shape:
        dims.append((len(sizes),) if size > 1 else ())
        if size > 1:
            sizes.append(size)
    return Rule((tuple(dims),) * num_operands, (tuple(dims),), tuple(sizes))


def _operand_avals(equation: Equation, avals: Sequence[Any]) -> list[Any]:
    return [o.aval if isinstance(o, Constant) else avals[o] for o in equation.operands]


def _primitive_rule(kind: str, equation: Equation, avals: Sequence[Any]) -> RuledEquation:
    operands = _operand_avals(equation, avals)
    results = [avals[r] for r in equation.results]
    if kind == "keys":
        return RuledEquation(replicated_rule(operands, results))
    if kind == "tied":  # result k is operand k; others are free of each other
        sizes: list[int] = []
        dims_of = []
        for aval in results:
            dims = []
            for size in getattr(aval, "shape", ()):
                dims.append((len(sizes),) if size > 1 else ())
                if size > 1:
                    sizes.append(size)
            dims_of.append(tuple(dims))
        return RuledEquation(Rule(tuple(dims_of), tuple(dims_of), tuple(sizes)))
    rule = identity_rule(results[0].shape, 0)
    result_dims = rule.results[0]
    in_dims = []
    for aval in operands:
        shape = aval.shape
        offset = len(result_dims) - len(shape)
        generate = kind == "generate"
        in_dims.append(
            tuple(
                () if generate or size == 1 else result_dims[offset + d]
                for d, size in enumerate(shape)
            )
        )
    return RuledEquation(Rule(tuple(in_dims), (result_dims,) * len(results), rule.sizes))


def _lower_and_read(equations: Sequence[Equation], avals: Sequence[Any]) -> list[RuledEquation]:
    arguments, counts = [], []
    for equation in equations:
        own = [avals[o] for o in equation.operands if isinstance(o, int)]
        arguments += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in own]
        counts.append(len(own))

    def run_all(*flat: Any) -> list[list[Any]]:
        position, outs = 0, []
        for equation, count in zip(equations, counts, strict=True):
            own = iter(flat[position : position + count])
            position += count
            operands = [
                o.value if isinstance(o, Constant) else next(own) for o in equation.operands
            ]
            outs.append(_jax.bind(equation.primitive, equation.params, operands))
        return outs

    lowered = jax.jit(run_all, keep_unused=True).lower(*arguments)
    module = lowered.compiler_ir("stablehlo")
    _jax.populate_sharding_rules(module)
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    main = functions["main"].operation
    block_args = list(main.regions[0].blocks[0].arguments)
    returned = list(list(main.regions[0].blocks[0].operations)[-1].operands)
    ruled, arg_at, out_at = [], 0, 0
    for equation, count in zip(equations, counts, strict=True):
        num_results = len(equation.results)
        own_args = block_args[arg_at : arg_at + count]
        own_outs = returned[out_at : out_at + num_results]
        arg_at += count
        out_at += num_results
        ruled.append(_compose(equation, avals, own_args, own_outs, functions))
    return ruled


@dataclass
class _Composer:
    """Union-find over the dimensions of every SSA value of one equation."""

    functions: dict[str, Any]
    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    reduction: set[int] = field(default_factory=set)
    fixed: set[int] = field(default_factory=set)
    unruled: list[str] = field(default_factory=list)
    op_names: list[str] = field(default_factory=list)

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            self.parent[a] = self.parent[self.parent[a]]
            a = self.parent[a]
        return a

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b] = a
            self.size[a] = min(self.size[a], self.size[b])
            if b in self.fixed:
                self.fixed.add(a)
            if b in self.reduction:
                self.reduction.add(a)

    def fresh_dims(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [(self.new(n),) if n > 1 else () for n in shape]

    def value_dims(self, value: Any, env: dict[Any, list[tuple[int, ...]]]) -> list:
        """Factors of an SSA value's dimensions, walking up to the block's arguments."""
        if value in env:
            return env[value]
        op = _jax.op_result_or_none(value)
        assert op is not None, "a block argument of another equation"
        self.visit(op, env)
        return env[value]

    def visit(self, op: Any, env: dict[Any, list[tuple[int, ...]]]) -> None:
        # An explicit stack: chains of ops can be longer than Python's recursion limit.
        stack = [op]
        while stack:
            current = stack[-1]
            if all(r in env for r in current.results) and len(current.results):
                stack.pop()
                continue
            pending = [
                owner
                for operand in current.operands
                if operand not in env and (owner := _jax.op_result_or_none(operand)) is not None
            ]
            if pending:
                stack += pending
                continue
            self.apply(current, env)
            stack.pop()

    def apply(self, op: Any, env: dict[Any, list[tuple[int, ...]]]) -> None:
        name = op.operation.name
        operands = [env[o] for o in op.operands]
        shapes = [_tensor_shape(r) for r in op.results]
        if name == "func.call":
            self.call(op, operands, env)
            return
        if name not in ("func.return",):
            self.op_names.append(name)
        attributes = op.operation.attributes
        if "sdy.sharding_rule" in attributes:
            text = str(attributes["sdy.sharding_rule"])
            parsed = _parse_rule(text)
            vacuous = name == "stablehlo.custom_call"
            if parsed is not None and not vacuous:
                self.apply_rule(op, parsed, operands, shapes, env)
                return
        if name in _SOURCES:
            results = [self.fresh_dims(shape) for shape in shapes]
        elif name in _TIED_OPS:
            results = operands
        elif name.startswith(_ELEMENTWISE_DIALECT) and name not in _NOT_ELEMENTWISE_CHLO:
            dims = self.fresh_dims(shapes[0])
            for operand, value in zip(operands, op.operands, strict=True):
                if _tensor_shape(value) == shapes[0]:
                    for a, b in zip(dims, operand, strict=True):
                        self.tie(a, b)
            results = [dims] * len(shapes)
        else:
            self.unruled.append(name)
            results = [self.fresh_dims(shape) for shape in shapes]
            for dims in (*operands, *results):
                self.fixed.update(self.find(f) for factors in dims for f in factors)
        for result, dims in zip(op.results, results, strict=True):
            env[result] = dims

    def call(self, op: Any, operands: list, env: dict[Any, list[tuple[int, ...]]]) -> None:
        callee = self.functions[str(op.attributes["callee"]).lstrip("@")].operation
        block = callee.regions[0].blocks[0]
        inner = dict(zip(block.arguments, operands, strict=True))
        returns = list(block.operations)[-1]
        for result, value in zip(op.results, returns.operands, strict=True):
            env[result] = self.value_dims(value, inner)

    def apply_rule(
        self, op: Any, parsed: _ParsedRule, operands: list, shapes: list, env: dict
    ) -> None:
        factor_of = {name: self.new(size) for name, size in parsed.sizes.items()}
        self.reduction.update(factor_of[n] for n in parsed.reduction)
        self.fixed.update(factor_of[n] for n in parsed.fixed)
        for names_of_dims, dims in zip(parsed.operands, operands, strict=True):
            for names, own in zip(names_of_dims, dims, strict=True):
                self.tie(own, tuple(factor_of[n] for n in names if parsed.sizes[n] > 1))
        results = []
        for names_of_dims in parsed.results:
            results.append(
                [tuple(factor_of[n] for n in names if parsed.sizes[n] > 1) for names in names_of_dims]
            )
        for result, dims in zip(op.results, results, strict=True):
            env[result] = dims

    def tie(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        """Make two dimensions split together. If one is a product of factors and the other is
        not, only the major factor can follow; the minor ones are fixed."""
        if not a or not b:
            return
        if len(a) == len(b):
            for x, y in zip(a, b, strict=True):
                self.union(x, y)
            return
        self.union(a[0], b[0])
        for f in (*a[1:], *b[1:]):
            self.fixed.add(self.find(f))


def _compose(
    equation: Equation,
    avals: Sequence[Any],
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    functions: dict[str, Any],
) -> RuledEquation:
    composer = _Composer(functions)
    env: dict[Any, list[tuple[int, ...]]] = {}
    arg_shapes = [_tensor_shape(a) for a in arguments]
    arg_dims = [composer.fresh_dims(shape) for shape in arg_shapes]
    # A reshape alone has operand dimensions of several factors: let the argument take them.
    single = _single_op(arguments, outputs)
    if single is not None:
        parsed = _parse_rule(str(single.operation.attributes["sdy.sharding_rule"]))
        if parsed is not None:
            return _direct(equation, avals, single, parsed, arguments)
    env.update(zip(arguments, arg_dims, strict=True))
    out_dims = [composer.value_dims(value, env) for value in outputs]
    operand_avals = _operand_avals(equation, avals)
    if composer.unruled:
        rule = replicated_rule(operand_avals, [avals[r] for r in equation.results])
        return RuledEquation(rule, tuple(composer.unruled), tuple(composer.op_names))
    by_operand, position = [], 0
    for operand in equation.operands:
        if isinstance(operand, Constant):
            by_operand.append([()] * np.ndim(operand.value))
        else:
            by_operand.append(arg_dims[position])
            position += 1
    return RuledEquation(
        _finish_rule(equation, composer, by_operand, out_dims, operand_avals, avals),
        (),
        tuple(composer.op_names),
    )


def _finish_rule(
    equation: Equation,
    composer: _Composer,
    operand_dims: list,
    result_dims: list,
    operand_avals: Sequence[Any],
    avals: Sequence[Any],
) -> Rule:
    numbering: dict[int, int] = {}

    def number(dims: list, aval: Any) -> tuple[tuple[int, ...], ...]:
        # Dimensions beyond the logical ones (the words of a PRNG key) are not the user's.
        shape = getattr(aval, "shape", ())
        return tuple(
            tuple(numbering.setdefault(composer.find(f), len(numbering)) for f in factors)
            for factors in dims[: len(shape)]
        )

    ins = tuple(number(d, a) for d, a in zip(operand_dims, operand_avals, strict=True))
    outs = tuple(
        number(d, avals[r]) for d, r in zip(result_dims, equation.results, strict=True)
    )
    sizes = tuple(composer.size[root] for root in numbering)
    in_results = {f for dims in outs for factors in dims for f in factors}
    fixed_roots = {composer.find(f) for f in composer.fixed}
    reduction_roots = {composer.find(f) for f in composer.reduction}
    reduction = frozenset(
        n for root, n in numbering.items() if root in reduction_roots and n not in in_results
    )
    # A factor that a result lost without being a reduction, or that is reduced inside the
    # equation and still in a result (cumulative ops), cannot be split.
    lost = {n for n in numbering.values() if n not in in_results and n not in reduction}
    inner = {n for root, n in numbering.items() if root in reduction_roots and n in in_results}
    fixed = {n for root, n in numbering.items() if root in fixed_roots} | lost | inner
    return Rule(
        ins, outs, sizes, reduction, frozenset(fixed), linear=equation.name in _LINEAR
    )


def _single_op(arguments: Sequence[Any], outputs: Sequence[Any]) -> Any | None:
    """The op, if the equation is exactly one op with a rule applied to its arguments in order."""
    if not outputs:
        return None
    op = _jax.op_result_or_none(outputs[0])
    if op is None or "sdy.sharding_rule" not in op.operation.attributes:
        return None
    if op.operation.name == "stablehlo.custom_call" or list(op.results) != list(outputs):
        return None
    return op if list(op.operands) == list(arguments) else None


def _direct(
    equation: Equation, avals: Sequence[Any], op: Any, parsed: _ParsedRule, arguments: Sequence[Any]
) -> RuledEquation:
    names = [n for n, size in parsed.sizes.items() if size > 1]
    index = {n: i for i, n in enumerate(names)}
    dims = lambda groups: tuple(  # noqa: E731
        tuple(tuple(index[n] for n in ns if n in index) for ns in group) for group in groups
    )
    position, operands = iter(dims(parsed.operands)), []
    for operand in equation.operands:
        constant = isinstance(operand, Constant)
        operands.append(((),) * np.ndim(operand.value) if constant else next(position))
    results = dims(parsed.results)
    avals_in = _operand_avals(equation, avals)
    trim = lambda d, aval: d[: len(getattr(aval, "shape", ()))]  # noqa: E731
    return RuledEquation(
        Rule(
            tuple(trim(d, a) for d, a in zip(operands, avals_in, strict=True)),
            tuple(trim(d, avals[r]) for d, r in zip(results, equation.results, strict=True)),
            tuple(parsed.sizes[n] for n in names),
            frozenset(index[n] for n in parsed.reduction if n in index),
            frozenset(index[n] for n in parsed.fixed if n in index),
            linear=equation.name in _LINEAR,
        ),
        (),
        (op.operation.name,),
    )


@dataclass(frozen=True)
class _ParsedRule:
    operands: list[list[list[str]]]
    results: list[list[list[str]]]
    sizes: dict[str, int]
    reduction: frozenset[str]
    fixed: frozenset[str]


def _parse_rule(text: str) -> _ParsedRule | None:
    """Read `([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}`."""
    match = _RULE_TEXT.search(text)
    if match is None:
        return None

    def values(part: str) -> list[list[list[str]]]:
        return [
            [_FACTOR.findall(dim) for dim in group.split(",")] if group.strip() else []
            for group in re.findall(r"\[(.*?)\]", part)
        ]

    def named(kind: str) -> list[str]:
        found = re.search(kind + r"=\{(.*?)\}", match["rest"])
        return _FACTOR.findall(found[1]) if found else []

    sizes = {n: int(v) for n, v in re.findall(r"([a-z](?:_\d+)?)=(\d+)", match["rest"])}
    fixed = frozenset(named("need_replication") + named("permutation"))
    return _ParsedRule(
        values(match["ins"]), values(match["outs"]), sizes, frozenset(named("reduction")), fixed
    )


def _tensor_shape(value: Any) -> tuple[int, ...]:
    shape = getattr(value.type, "shape", None)
    return tuple(shape) if shape is not None else ()

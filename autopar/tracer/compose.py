"""From the StableHLO ops of one equation to its rule: Shardy's rules, read and composed.

Shardy writes on each op which dimensions share a factor. An equation that lowers to one op takes
that op's rule as it is. One that lowers to several takes their composition: a union-find over the
dimensions of all values between, in which a dimension of an operand and one of a result share a
factor if a chain of ops ties them.

Shardy has no rule for some ops. The tables below hold those we know: ops without operands
(constants, iota) and elementwise ops of the chlo dialect. Any other op is reported, and its
equation is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.failures import Failure
from autopar.ir.graph import Rule
from autopar.ir.program import Constant, Equation

_SOURCES = ("stablehlo.constant", "stablehlo.iota", "stablehlo.create_token")
_TIED_OPS = ("stablehlo.optimization_barrier",)
# Elementwise, but without a rule in Shardy: operands of the result's shape are split with it.
_ELEMENTWISE_DIALECT = "chlo."
_NOT_ELEMENTWISE_CHLO = ("chlo.top_k", "chlo.scan", "chlo.ragged_dot")
_RULE = "sdy.sharding_rule"
# Primitives through which partial sums may flow.
_LINEAR = ("add", "add_any")

_RULE_TEXT = re.compile(r"op_sharding_rule<\((?P<ins>.*?)\)->\((?P<outs>.*?)\)(?P<rest>.*)>")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")

Dims = list[tuple[int, ...]]  # the factors of each dimension of a value


@dataclass(frozen=True)
class RuledEquation:
    """An equation's rule, and what the user should know about it: the StableHLO ops that have no
    rule (then nothing is split), or a note on how it runs."""

    rule: Rule
    unruled_ops: tuple[str, ...] = ()
    op_names: tuple[str, ...] = ()
    note: str = ""
    failure: Failure | None = None  # why autopar has no rule though it should have one

    @property
    def warning(self) -> str:
        """The plan's warning about the equation, or an empty string."""
        if self.note or not self.unruled_ops:
            return self.note
        return (
            "runs replicated: no sharding rule is known for it (autopar.register_rule can give one)"
        )


def compose_rule(
    equation: Equation,
    avals: Sequence[ShapedArray],
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    functions: dict[str, Any],
) -> RuledEquation:
    """The rule of an equation whose SSA values are `arguments` (without constant operands) and
    `outputs`; `functions` are the module's functions by name."""
    operand_avals = [o.aval if isinstance(o, Constant) else avals[o] for o in equation.operands]
    # The dimensions of a lone reshape's operand may have several factors, so its rule stays as is.
    single = _single_op(arguments, outputs)
    if single is not None and (parsed := _rule_of(single)) is not None:
        rule = _direct(equation, avals, parsed, operand_avals)
        return RuledEquation(rule, (), (single.operation.name,))
    composer = _Composer(functions)
    arg_dims = [composer.fresh_dims(_tensor_shape(a)) for a in arguments]
    env = dict(zip(arguments, arg_dims, strict=True))
    out_dims = [composer.value_dims(value, env) for value in outputs]
    op_names = tuple(composer.op_names)
    if composer.unruled:
        rule = replicated_rule(operand_avals, [avals[r] for r in equation.results])
        return RuledEquation(rule, tuple(composer.unruled), op_names)
    by_operand = _with_constants(equation, arg_dims)
    rule = _finish_rule(equation, composer, by_operand, out_dims, operand_avals, avals)
    return RuledEquation(rule, (), op_names)


def replicated_rule(operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of an unknown op: nothing may be split."""

    def whole(avals: Sequence[ShapedArray]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(((),) * len(getattr(aval, "shape", ())) for aval in avals)

    return Rule(whole(operands), whole(results), ())


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
        if a == b:
            return
        self.parent[b] = a
        self.size[a] = min(self.size[a], self.size[b])
        for kind in (self.fixed, self.reduction):
            if b in kind:
                kind.add(a)

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

    def fresh_dims(self, shape: Sequence[int]) -> Dims:
        return [(self.new(n),) if n > 1 else () for n in shape]

    def value_dims(self, value: Any, env: dict[Any, Dims]) -> Dims:
        """Factors of an SSA value's dimensions, walking up to the block's arguments."""
        # An explicit stack: chains of ops can be longer than Python's recursion limit.
        op = None if value in env else _jax.op_result_or_none(value)
        stack = [] if op is None else [op]
        while stack:
            current = stack[-1]
            if len(current.results) and all(r in env for r in current.results):
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
        return env[value]

    def apply(self, op: Any, env: dict[Any, Dims]) -> None:
        name = op.operation.name
        operands = [env[o] for o in op.operands]
        if name == "func.call":
            self.call(op, operands, env)
            return
        self.op_names.append(name)
        shapes = [_tensor_shape(r) for r in op.results]
        parsed = _rule_of(op)
        if parsed is not None:
            results = self.ruled(parsed, operands)
        elif name in _SOURCES:
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
        env.update(zip(op.results, results, strict=True))

    def call(self, op: Any, operands: list[Dims], env: dict[Any, Dims]) -> None:
        callee = self.functions[str(op.attributes["callee"]).lstrip("@")].operation
        block = callee.regions[0].blocks[0]
        inner = dict(zip(block.arguments, operands, strict=True))
        returns = list(block.operations)[-1]
        for result, value in zip(op.results, returns.operands, strict=True):
            env[result] = self.value_dims(value, inner)

    def ruled(self, parsed: _ParsedRule, operands: list[Dims]) -> list[Dims]:
        factor_of = {name: self.new(size) for name, size in parsed.sizes.items()}
        self.reduction.update(factor_of[n] for n in parsed.reduction)
        self.fixed.update(factor_of[n] for n in parsed.fixed)

        def factors(names: list[str]) -> tuple[int, ...]:
            return tuple(factor_of[n] for n in names if parsed.sizes[n] > 1)

        for names_of_dims, dims in zip(parsed.operands, operands, strict=True):
            for names, dim in zip(names_of_dims, dims, strict=True):
                self.tie(dim, factors(names))
        return [[factors(names) for names in names_of_dims] for names_of_dims in parsed.results]


def _with_constants(equation: Equation, dims: Sequence[Any]) -> list[Any]:
    """The dimensions of every operand, from those of the operands that are not constant."""
    present = iter(dims)
    return [
        ((),) * np.ndim(o.value) if isinstance(o, Constant) else next(present)
        for o in equation.operands
    ]


def _finish_rule(
    equation: Equation,
    composer: _Composer,
    operand_dims: list[Dims],
    result_dims: list[Dims],
    operand_avals: Sequence[ShapedArray],
    avals: Sequence[ShapedArray],
) -> Rule:
    numbering: dict[int, int] = {}

    def number(dims: Dims, aval: ShapedArray) -> tuple[tuple[int, ...], ...]:
        # Dimensions beyond the logical ones (the words of a PRNG key) are not the user's.
        shape = getattr(aval, "shape", ())
        return tuple(
            tuple(numbering.setdefault(composer.find(f), len(numbering)) for f in factors)
            for factors in dims[: len(shape)]
        )

    ins = tuple(number(d, a) for d, a in zip(operand_dims, operand_avals, strict=True))
    outs = tuple(number(d, avals[r]) for d, r in zip(result_dims, equation.results, strict=True))
    sizes = tuple(composer.size[root] for root in numbering)
    in_results = {f for dims in outs for factors in dims for f in factors}
    fixed_roots = {composer.find(f) for f in composer.fixed}
    reduction_roots = {composer.find(f) for f in composer.reduction}
    reduced = {n for root, n in numbering.items() if root in reduction_roots}
    reduction = reduced - in_results
    # A factor that a result lost without being a reduction, or that is reduced inside the
    # equation and still in a result (cumulative ops), cannot be split.
    lost = set(numbering.values()) - in_results - reduction
    fixed = {n for root, n in numbering.items() if root in fixed_roots}
    fixed |= _in_two_dims((*ins, *outs))
    return Rule(
        ins,
        outs,
        sizes,
        frozenset(reduction),
        frozenset(fixed | lost | (reduced & in_results)),
        linear=equation.name in _LINEAR,
    )


def _in_two_dims(values: Sequence[tuple[tuple[int, ...], ...]]) -> set[int]:
    """Factors that two dimensions of one value share, as in the product of a matrix and its
    transpose: a shard needs the rows of all others."""
    found: set[int] = set()
    for dims in values:
        factors = [f for dim in dims for f in dim]
        found |= {f for f in factors if factors.count(f) > 1}
    return found


def _single_op(arguments: Sequence[Any], outputs: Sequence[Any]) -> Any | None:
    """The op, if the equation is exactly one op with a rule applied to its arguments in order."""
    op = _jax.op_result_or_none(outputs[0])
    if op is None or list(op.results) != list(outputs) or list(op.operands) != list(arguments):
        return None
    return op


def _direct(
    equation: Equation,
    avals: Sequence[ShapedArray],
    parsed: _ParsedRule,
    operand_avals: Sequence[ShapedArray],
) -> Rule:
    names = [n for n, size in parsed.sizes.items() if size > 1]
    index = {n: i for i, n in enumerate(names)}

    def dims(groups: list[list[list[str]]]) -> list[tuple[tuple[int, ...], ...]]:
        return [
            tuple(tuple(index[n] for n in names if n in index) for names in group)
            for group in groups
        ]

    def trim(values: Any, avals: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        pairs = zip(values, avals, strict=True)
        return tuple(d[: len(getattr(aval, "shape", ()))] for d, aval in pairs)

    # A factor that a result lost without being a reduction cannot be split (the rows of a solve).
    fixed = parsed.fixed | (parsed.in_operands - parsed.in_results - parsed.reduction)
    return Rule(
        trim(_with_constants(equation, dims(parsed.operands)), operand_avals),
        trim(dims(parsed.results), [avals[r] for r in equation.results]),
        tuple(parsed.sizes[n] for n in names),
        frozenset(index[n] for n in parsed.reduction if n in index),
        frozenset(index[n] for n in fixed if n in index),
        linear=equation.name in _LINEAR,
    )


@dataclass(frozen=True)
class _ParsedRule:
    operands: list[list[list[str]]]
    results: list[list[list[str]]]
    sizes: dict[str, int]
    reduction: frozenset[str]
    fixed: frozenset[str]

    @property
    def in_operands(self) -> set[str]:
        return {n for dims in self.operands for names in dims for n in names}

    @property
    def in_results(self) -> set[str]:
        return {n for dims in self.results for names in dims for n in names}


def _rule_of(op: Any) -> _ParsedRule | None:
    """Shardy's rule of an op; None if it has none, or one that says nothing."""
    if _RULE not in op.operation.attributes:
        return None
    parsed = _parse_rule(str(op.operation.attributes[_RULE]))
    if op.operation.name == "stablehlo.custom_call":
        if not parsed.in_operands & parsed.in_results:
            return None  # a kernel that Shardy does not know: its rule ties nothing
        parsed = replace(parsed, fixed=parsed.fixed | (parsed.in_results - parsed.in_operands))
    if op.operation.name == "stablehlo.dynamic_update_slice":
        # Shardy lets the updated dimension be split, but XLA's partitioner then does not clamp a
        # start beyond the end, and the update is lost (JAX 0.10.2 and 0.12).
        target, update = ({n for names in dims for n in names} for dims in parsed.operands[:2])
        parsed = replace(parsed, fixed=parsed.fixed | (target - update))
    return parsed


def _parse_rule(text: str) -> _ParsedRule:
    """Read `([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}`."""
    match = _RULE_TEXT.search(text)
    assert match is not None, text
    rest = match["rest"]

    def values(part: str) -> list[list[list[str]]]:
        return [
            [_FACTOR.findall(dim) for dim in group.split(",")] if group.strip() else []
            for group in re.findall(r"\[(.*?)\]", part)
        ]

    def named(kind: str) -> list[str]:
        names = re.search(kind + r"=\{(.*?)\}", rest)
        return _FACTOR.findall(names[1]) if names else []

    sizes = {n: int(v) for n, v in re.findall(r"([a-z](?:_\d+)?)=(\d+)", rest)}
    fixed = frozenset(named("need_replication") + named("permutation"))
    return _ParsedRule(
        values(match["ins"]), values(match["outs"]), sizes, frozenset(named("reduction")), fixed
    )


def _tensor_shape(value: Any) -> tuple[int, ...]:
    shape = getattr(value.type, "shape", None)
    return tuple(shape) if shape is not None else ()

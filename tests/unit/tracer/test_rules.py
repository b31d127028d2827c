"""The rule of one equation: which dimensions share a factor, what is reduced, what is fixed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import CONSTRAIN
from autopar.errors import DependencyError
from autopar.ir.program import Constant, Equation
from autopar.tracer import rules
from autopar.tracer.build import build_graph
from autopar.tracer.costs import equation_flops
from autopar.tracer.rules import (
    PRIMITIVE_RULES,
    equation_key,
    identity_rule,
    replicated_rule,
    rules_of_equations,
)
from autopar.tracer.trace_step import trace_step


@pytest.fixture(autouse=True)
def no_known_rules(monkeypatch: Any) -> None:
    monkeypatch.setattr(rules, "_lowered", {})


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ids(*shape: int) -> Any:
    return ones(*shape, dtype=jnp.int32)


def last_equation(fn: Callable[..., Any], args: Any) -> tuple[Equation, list[Any]]:
    program = trace_step(fn, args).program
    return program.equations[-1], program.avals


def describe(fn: Callable[..., Any], args: Any) -> str:
    """The rule of a function's last equation: `ab,bc->ac reduce b`, one letter per factor, `*` for
    a dimension without one, parentheses around a product of factors, constants left out."""
    return describe_equation(*last_equation(fn, args))


def describe_equation(equation: Equation, avals: list[Any]) -> str:
    (ruled,) = rules_of_equations([equation], avals)
    assert not ruled.unruled_ops
    rule = ruled.rule
    letters: dict[int, str] = {}

    def letter(factor: int) -> str:
        return letters.setdefault(factor, "abcdefghij"[len(letters)])

    def value(dims: Any) -> str:
        parts = ["".join(letter(f) for f in factors) or "*" for factors in dims]
        return "".join(f"({part})" if len(part) > 1 else part for part in parts)

    operands = ",".join(
        value(dims)
        for dims, operand in zip(rule.operands, equation.operands, strict=True)
        if not isinstance(operand, Constant)
    )
    text = f"{operands}->{','.join(value(dims) for dims in rule.results)}"
    for kind, factors in (("reduce", rule.reduction), ("fixed", rule.fixed)):
        known = sorted(letters[f] for f in factors if f in letters)
        text += f" {kind} {''.join(known)}" if known else ""
    return text


def gather_rows(table: Any, index: Any) -> Any:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(table, index, numbers, (1, 8), mode="clip")


def scatter(kind: Callable[..., Any]) -> Callable[..., Any]:
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lambda t, i, u: kind(t, i, u, numbers)


def conv(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


RULES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "dot": (lambda a, b: a @ b, (ones(8, 16), ones(16, 4)), "ab,bc->ac reduce b"),
    "batched dot": (
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
        (ones(2, 8, 16), ones(2, 16, 4)),
        "abc,acd->abd reduce c",
    ),
    "dot with a dimension of one": (
        lambda a, b: a @ b,
        (ones(8, 1), ones(1, 4)),
        "a*,*b->ab",
    ),
    "split a dimension": (lambda a: a.reshape(2, 4, 16), (ones(8, 16),), "(ab)c->abc"),
    "merge dimensions": (lambda a: a.reshape(128), (ones(8, 16),), "ab->(ab)"),
    "split and merge": (lambda a: a.reshape(2, 64), (ones(8, 16),), "(ab)c->a(bc)"),
    "add a dimension": (lambda a: a.reshape(8, 1, 16), (ones(8, 16),), "ab->a*b"),
    "transpose": (lambda a: a.T, (ones(8, 16),), "ab->ba"),
    "broadcast": (
        lambda a: lax.broadcast_in_dim(a, (4, 8, 16), (1,)),
        (ones(8),),
        "a->bac",
    ),
    "broadcast a dimension of one": (
        lambda a: lax.broadcast_in_dim(a, (8, 16), (0, 1)),
        (ones(8, 1),),
        "a*->ab",
    ),
    "add": (lambda a, b: a + b, (ones(8, 16), ones(8, 16)), "ab,ab->ab"),
    "add a scalar": (lambda a, b: a + b, (ones(8, 16), ones()), "ab,->ab"),
    "add a constant": (lambda a: a + 1.0, (ones(8, 16),), "ab->ab"),
    "add what has a dimension of one": (
        lambda a, b: lax.add_p.bind(a, b),
        (ones(8, 1), ones(8, 1)),
        "a*,a*->a*",
    ),
    # XLA's simplifier loses the factor in slices of slices of such a product.
    "multiply integers by a constant": (lambda a: a * 5, (ids(8),), "a->a fixed a"),
    "multiply integers": (lambda a, b: a * b, (ids(8), ids(8)), "a,a->a"),
    "multiply rows of integers": (lambda a: a * 5, (ids(8, 16),), "ab->ab"),
    "elementwise of chlo": (lambda a: lax.erf_inv(a), (ones(8, 16),), "ab->ab"),
    "sum": (lambda a: a.sum(0), (ones(8, 16),), "ab->b reduce a"),
    "max": (lambda a: a.max((0, 2)), (ones(8, 16, 4),), "abc->b reduce ac"),
    "argmax": (lambda a: lax.argmax(a, 1, jnp.int32), (ones(8, 16),), "ab->a reduce b"),
    "cumsum": (lambda a: lax.cumsum(a, 1), (ones(8, 16),), "ab->ab fixed b"),
    "sort": (lambda a: lax.sort(a, dimension=0), (ones(8, 16),), "ab->ab fixed a"),
    "top_k": (lambda a: lax.top_k(a, 2), (ones(8, 16),), "ab->a*,a* fixed b"),
    "slice": (lambda a: lax.slice(a, (0, 0), (8, 4)), (ones(8, 16),), "ab->ab fixed b"),
    "pad": (
        lambda a: lax.pad(a, np.float32(0), ((0, 0, 0), (1, 1, 0))),
        (ones(8, 16),),
        "ab->ab fixed b",
    ),
    "concatenate": (
        lambda a, b: lax.concatenate([a, b], 0),
        (ones(8, 16), ones(8, 16)),
        "ab,ab->ab fixed a",
    ),
    "reverse": (lambda a: lax.rev(a, (1,)), (ones(8, 16),), "ab->ab fixed b"),
    "dynamic slice": (
        lambda a, i: lax.dynamic_slice(a, (i, i), (8, 4)),
        (ones(8, 16), ids()),
        "ab,,->ab fixed b",
    ),
    # The updated dimension could be split, says Shardy, but XLA gets it wrong.
    "dynamic update": (
        lambda a, b, i: lax.dynamic_update_slice(a, b, (i, i)),
        (ones(8, 16), ones(8, 4), ids()),
        "ab,ac,,->ab fixed bc",
    ),
    "lookup": (gather_rows, (ones(32, 8), ids(16, 1)), "ab,c*->cb reduce a"),
    "lookup per row": (
        lambda t, i: jnp.take_along_axis(t, i, 1, mode="clip"),
        (ones(8, 32), ids(8, 4)),
        "ab,ac*->ac reduce b",
    ),
    "scatter add": (
        scatter(lax.scatter_add),
        (ones(32, 8), ids(16, 1), ones(16, 8)),
        "ab,c*,cb->ab reduce c",
    ),
    "scatter set": (
        scatter(lax.scatter),
        (ones(32, 8), ids(16, 1), ones(16, 8)),
        "ab,c*,cb->ab fixed c",
    ),
    "iota": (lambda a: lax.broadcasted_iota(jnp.int32, (8, 16), 0), (ones(),), "->ab"),
    "random bits": (lambda k: jax.random.bits(k, (8, 16)), (jax.random.key(0),), "->ab"),
    "split keys": (lambda k: jax.random.split(k, 8), (jax.random.key(0),), "->*"),
    "incomplete gamma": (
        lambda a, b: lax.igamma(a, b),
        (ones(8, 16), ones(8, 16)),
        "ab,ab->ab",
    ),
    "barrier": (
        lambda a, b: lax.optimization_barrier((a, b)),
        (ones(8, 16), ones(8)),
        "ab,c->ab,c",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    fn, args, expected = RULES[name]
    assert describe(fn, args) == expected


def test_convolution() -> None:
    # What is done with the kernel's window differs between releases; it is never split. The image
    # is, along its windows.
    text = describe(conv, (ones(8, 5, 5, 16), ones(3, 3, 16, 4)))
    match = re.fullmatch(r"a(.)(.)(b|.),(.)(.)(.)(.)->a\1\2(.) reduce (.)(?: fixed .*)?", text)
    assert match, text
    channels, out_channels = match[3], match[7]
    assert match[6] == channels == match[9]
    assert match[8] == out_channels
    fixed = set(text.partition("fixed ")[2])
    assert {match[4], match[5]} <= fixed | {"*"}
    assert not {"a", match[1], match[2], channels, out_channels} & fixed


@pytest.mark.parametrize(("num_groups", "heads"), [(16, "b"), (4, "(bc)")])
def test_fused_attention(num_groups: int, heads: str) -> None:
    def loss(query: Any, key: Any) -> Any:
        out = jax.nn.dot_product_attention(query, key, key, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    query = ones(8, 128, 16, 64, dtype=jnp.bfloat16)
    key = ones(8, 128, num_groups, 64, dtype=jnp.bfloat16)
    program = trace_step(jax.grad(loss, argnums=(0, 1)), (query, key)).program
    kernels = [e for e in program.equations if "attention" in e.name]
    forward, backward = kernels
    of_query, of_key, of_stats = f"a*{heads}*", "a*b*", f"a{heads}*"
    unused = ",".join("*" * 7)
    text = describe_equation(forward, program.avals)
    fixed = " fixed c" if num_groups < 16 else ""
    assert text == f"{of_query},{of_key},{of_key},{unused}->{of_query},{of_stats}{fixed}"
    text = describe_equation(backward, program.avals)
    operands = f"{of_query},{of_key},{of_key},{unused},{of_stats},{of_query},{of_query}"
    assert text == f"{operands}->{of_query},{of_key},{of_key}{fixed}"
    flops = [equation_flops(e, program.avals) for e in kernels]
    assert flops == [4 * 8 * 128 * 16 * 64 * 128, 10 * 8 * 128 * 16 * 64 * 128]


def test_op_without_a_rule() -> None:
    equation, avals = last_equation(
        lambda a: lax.linalg.qr(a, full_matrices=False)[0], (ones(8, 8),)
    )
    (ruled,) = rules_of_equations([equation], avals)
    assert ruled.unruled_ops
    assert ruled.rule == replicated_rule([ones(8, 8)], [ones(8, 8), ones(8, 8)])


def test_effects_are_not_lowered() -> None:
    def fn(a: Any) -> Any:
        return jax.experimental.io_callback(lambda a: a, ones(8), a, ordered=True)

    equation, avals = last_equation(fn, (ones(8),))
    (ruled,) = rules_of_equations([equation], avals)
    assert ruled.unruled_ops == ("io_callback",)


@pytest.mark.parametrize("error", [NotImplementedError("for another platform"), KeyError("x")])
def test_an_equation_that_cannot_be_lowered_spares_the_others(
    monkeypatch: Any, error: Exception
) -> None:
    """JAX may be unable to lower it; anything else is a failure, which the plan's warnings name."""
    good, avals = last_equation(lambda a: jnp.sin(a), (ones(8),))
    bad, _ = last_equation(lambda a: jnp.cos(a), (ones(8),))
    from autopar.tracer import rules

    lower = rules._lower

    def fail(equations: Any, avals: Any) -> Any:
        if bad in equations:
            raise error
        return lower(equations, avals)

    monkeypatch.setattr(rules, "_lower", fail)
    found = rules_of_equations([good, bad, good], avals)
    assert [ruled.unruled_ops for ruled in found] == [(), ("cos",), ()]
    assert found[0].rule == identity_rule((8,))
    assert found[0].failure is None
    failure = found[1].failure
    if isinstance(error, NotImplementedError):
        assert failure is None
    else:
        assert failure is not None and failure.what == "the rule of cos"
        assert failure.exception.startswith("KeyError: 'x'")


def test_a_failure_is_in_the_graph_with_its_flops(monkeypatch: Any) -> None:
    from autopar.tracer import rules

    lower = rules._lower

    def fail(equations: Any, avals: Any) -> Any:
        if any(e.name == "dot_general" for e in equations):
            raise IndexError("of ours")
        return lower(equations, avals)

    monkeypatch.setattr(rules, "_lower", fail)

    def fn(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    (unruled,) = build_graph(trace_step(fn, (ones(8, 8), ones(16, 8)))).unruled
    assert unruled.name == "dot_general" and unruled.failure is not None
    assert unruled.flops == 3 * 2 * 16 * 8 * 8


def test_errors_of_our_own_are_no_missing_rules(monkeypatch: Any) -> None:
    from autopar.tracer import rules

    def lacking(equations: Any, avals: Any) -> Any:
        raise DependencyError("a pass of MLIR")

    monkeypatch.setattr(rules, "_lower", lacking)
    with pytest.raises(DependencyError):
        equation, avals = last_equation(jnp.sin, (ones(8),))
        rules_of_equations([equation], avals)


def test_equal_equations_have_one_key() -> None:
    program = trace_step(
        lambda a, b: (a + b, b + a, a + 1.0, a + 2.0, a * b, (a + b).T), (ones(8, 8), ones(8, 8))
    ).program
    keys = [equation_key(e, program.avals) for e in program.equations]
    adds = [k for k, e in zip(keys, program.equations, strict=True) if e.name == "add"]
    assert len(adds) == 5
    assert len(set(adds)) == 2, "of two arrays, and of an array and a constant"
    assert len(set(keys)) == 4


def test_judged_primitives_are_those_of_jax() -> None:
    """A primitive that JAX renames would be judged by its lowering without a word."""

    def fn(key: Any, a: Any) -> Any:
        key = jax.random.clone(jax.random.fold_in(jax.random.wrap_key_data(key), 1))
        keys = jax.random.split(key)
        seeded = jax.random.key_data(jax.random.key(a[0].astype(int)))
        bits = jax.random.bits(keys[0], (8,))
        hashed = jax.extend.random.threefry_2x32(seeded, bits)
        special = [lax.igamma(a, a), lax.igammac(a, a), lax.igamma_grad_a(a, a)]
        special += [lax.betainc(a, a, a), jnp.fft.fft(a), lax.linalg.lu(jnp.outer(a, a))]
        special += [lax.linalg.lu_pivots_to_permutation(jnp.arange(8), 8)]
        return hashed, special, jnp.copy(a), lax.top_k(a, 2), lax.optimization_barrier(a)

    args = (jax.random.key_data(jax.random.key(0)), ones(8))
    program = trace_step(fn, args).program
    named = {name for name in PRIMITIVE_RULES if "attention" not in name}
    named -= {CONSTRAIN}  # ours
    assert named <= {e.name for e in program.equations}


def test_a_matrix_times_its_transpose_is_not_split_along_its_rows() -> None:
    equation, avals = last_equation(
        lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=1.0),
        (ones(16, 8), ones(16, 16)),
    )
    (ruled,) = rules_of_equations([equation], avals)
    for dims in (*ruled.rule.operands, *ruled.rule.results):
        split = [f for factors in dims for f in factors if f not in ruled.rule.fixed]
        assert len(split) == len(set(split))


# -- rules are lowered once


def test_another_program_lowers_only_what_is_new(monkeypatch):
    lowered = []
    lower = rules._lower

    def noted(equations, avals):
        lowered.append([equation.name for equation in equations])
        return lower(equations, avals)

    monkeypatch.setattr(rules, "_lower", noted)

    def rules_of(fn, *args):
        program = trace_step(fn, args).program
        return rules_of_equations(program.equations, program.avals)

    first = rules_of(lax.dot, ones(4, 8), ones(8, 2))
    again = rules_of(lambda x, y: jnp.sin(lax.dot(x, y)), ones(4, 8), ones(8, 2))
    other = rules_of(lax.dot, ones(4, 8), ones(8, 16))
    assert lowered == [["dot_general"], ["sin"], ["dot_general"]]
    assert again[0] == first[0]
    assert other[0].rule.sizes != first[0].rule.sizes


def test_rules_of_functions_are_not_kept():
    program = trace_step(lambda x: jax.pure_callback(lambda y: y, ones(4), x), (ones(4),)).program
    rules_of_equations(program.equations, program.avals)
    assert not rules._lowered

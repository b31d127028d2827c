"""Rules that users register for opaque operators: from text to `UserRule` to `Rule`.

`register_rule("my_kernel", "i k, k j -> i j", reduction="k")` is parsed here, and fitted to every
equation of that name at plan time. XLA cannot split such an operator, so its rule is `local`: every
device binds the operator to its shards. A letter stays whole if the equation cannot be bound to
shards along it (a Pallas kernel with the whole dimension in one block); the plan's warnings say
why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import jax
from jax.core import ShapedArray

from autopar import _jax
from autopar.errors import ArgumentError, shortened
from autopar.ir.graph import Rule
from autopar.ir.program import Constant, Equation

_DIMENSION = re.compile(r"\((?P<group>[^()]*)\)|(?P<one>[^\s()]+)")
_LETTER = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_WHOLE = ("_", ".")

Shape = tuple[int, ...]
Ranks = tuple[tuple[int, ...], ...]
Dims = tuple[tuple[str, ...], ...]  # the letters of each dimension; none where it stays whole


@dataclass(frozen=True)
class UserRule:
    """A user's rule, parsed from its text."""

    name: str
    text: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: frozenset[str]
    replicated: frozenset[str]

    @property
    def ranks(self) -> Ranks:
        return tuple(tuple(map(len, values)) for values in (self.operands, self.results))


# By name, then by the number of dimensions of each operand and result.
_rules: dict[str, dict[Ranks, UserRule]] = {}


def register_rule(
    name: str, rule: str | None, *, reduction: str = "", replicated: str = ""
) -> None:
    """Say how an operator that autopar cannot look into may be split over devices.

        autopar.register_rule("my_kernel", "b s, s h -> b h", reduction="s")

    name:       what the operator is called: the `name` of a `pallas_call`, the target of a
                `jax.ffi.ffi_call`, the name of the function in a `jax.pure_callback` or
                `io_callback`, or the name of a primitive as it stands in the jaxpr. Functions with
                custom derivatives and jitted functions are looked into and need no rule.
    rule:       the dimensions of all operands, and after `->` of all results, as einsum has them:
                arrays between commas, dimensions between spaces. Dimensions with the same letter
                (or word) are split together. `(i j)` is one dimension made of two, the major first;
                `_` is one that stays whole; nothing between two commas is a scalar. A name can have
                several rules, told apart by their numbers of dimensions (a kernel and the same
                under `jax.vmap`); `None` takes all of them back.
    reduction:  letters, between spaces, that operands have and results do not, such that the
                operator applied to parts along that letter and the results *added up* is the
                operator. A maximum over the letter is not of that kind; nothing checks this.
    replicated: letters that must not be split.

    A letter that only operands or only results have stays whole, unless it is a reduction. A split
    operator runs once per device on that device's parts of its operands: what it computes for
    one part must not depend on the others, and a callback is called once per device, with parts
    of different devices at the same time. The attributes of an `ffi_call` are passed as they are.
    A Pallas kernel can be split along a letter only where its grid runs over it: one axis of the
    grid is the block's index along the letter wherever it occurs, and the kernel asks neither for
    its place on that axis (`pl.program_id`) nor for its length. Rules are looked up when a step
    is planned: register them before the first call. A rule that cannot be read is an
    `ArgumentError`.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"register_rule({name!r}): needs the operator's name, as text.")
    if rule is None:
        _rules.pop(name, None)
        return
    parsed = parse_rule(name, rule, reduction, replicated)
    _rules.setdefault(name, {})[parsed.ranks] = parsed


def registered_rules() -> dict[str, tuple[UserRule, ...]]:
    """All rules that users have registered, by name."""
    return {name: tuple(rules.values()) for name, rules in sorted(_rules.items())}


def parse_rule(name: str, text: str, reduction: str = "", replicated: str = "") -> UserRule:
    call = f"register_rule({name!r}, {text!r})"
    if not isinstance(text, str) or text.count("->") != 1:
        raise ArgumentError(
            f"register_rule({name!r}, {shortened(text)}): needs operands, one '->' and results, "
            "such as 'i k, k j -> i j'."
        )
    left, right = text.split("->")
    operands, results = _parse_side(call, left), _parse_side(call, right)
    in_operands, in_results = _letters(operands), _letters(results)
    summed, whole = (
        _parse_letters(call, label, letters, in_operands | in_results)
        for label, letters in (("reduction", reduction), ("replicated", replicated))
    )
    for letter in sorted(summed):
        if letter in in_results or letter not in in_operands:
            raise ArgumentError(
                f"{call}: the reduction {letter!r} must be in an operand and in no result; its "
                "parts are added up. Take it out of `reduction` or out of the results."
            )
    return UserRule(name, text, operands, results, summed, whole)


def _parse_side(call: str, side: str) -> tuple[Dims, ...]:
    if not side.strip():
        return ()
    return tuple(_parse_dims(call, value) for value in side.split(","))


def _parse_dims(call: str, value: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    for match in _DIMENSION.finditer(value):
        names = (match["group"] if match["one"] is None else match["one"]).split()
        if names in ([_WHOLE[0]], [_WHOLE[1]]):
            dims.append(())
            continue
        odd = [n for n in names if not _LETTER.fullmatch(n)]
        if odd or not names:
            raise ArgumentError(
                f"{call}: {(odd or ['()'])[0]!r} is no dimension. Write letters between spaces, "
                "'(i j)' for a dimension made of two, '_' for one that stays whole."
            )
        dims.append(tuple(names))
    if re.sub(_DIMENSION, "", value).strip():
        raise ArgumentError(f"{call}: the parentheses in {value.strip()!r} do not match.")
    letters = [n for names in dims for n in names]
    twice = sorted({n for n in letters if letters.count(n) > 1})
    if twice:
        raise ArgumentError(
            f"{call}: {twice[0]!r} occurs twice in {value.strip()!r}; an array can be split along "
            "a letter once. Use two letters, or '_'."
        )
    return tuple(dims)


def _letters(values: Sequence[Dims]) -> frozenset[str]:
    return frozenset(n for dims in values for names in dims for n in names)


def _parse_letters(call: str, label: str, text: Any, known: frozenset[str]) -> frozenset[str]:
    names = text.replace(",", " ").split() if isinstance(text, str) else [text]
    odd = [n for n in names if n not in known]
    if odd:
        raise ArgumentError(
            f"{call}: {label}={text!r} names {odd[0]!r}, which the rule does not have. Give "
            "letters of the rule, between spaces."
        )
    return frozenset(names)


# -- fitting a rule to an equation


def user_rule_of(
    equation: Equation, operands: Sequence[ShapedArray], results: Sequence[ShapedArray]
) -> UserRule | None:
    """The rule registered for an equation, by the user's name for it or else by its primitive."""
    if not _rules:
        return None
    for name in (*_jax.given_names(equation.name, equation.params), equation.name):
        rules = _rules.get(name)
        if not rules:
            continue
        ranks = tuple(tuple(len(a.shape) for a in avals) for avals in (operands, results))
        if ranks not in rules:
            known = "; ".join(repr(rule.text) for rule in rules.values())
            shapes = [[tuple(a.shape) for a in avals] for avals in (operands, results)]
            raise ArgumentError(
                f"register_rule({name!r}, …): {known} does not fit {name!r} at "
                f"{equation.source_line}, which has operands {shapes[0]} and results {shapes[1]}. "
                "Give a rule with a group for every array and a letter for each of its dimensions."
            )
        return rules[ranks]
    return None


def fit_rule(
    given: UserRule,
    equation: Equation,
    operands: Sequence[ShapedArray],
    results: Sequence[ShapedArray],
) -> tuple[Rule, str]:
    """The rule for one equation, and a warning about letters that cannot be split."""
    where = f"{given.name!r} at {equation.source_line}"
    shapes = [tuple(a.shape) for a in (*operands, *results)]
    dims = (*given.operands, *given.results)
    sizes = _sizes(given, where, dims, shapes)
    tied = _letters(given.operands) & _letters(given.results) | given.reduction
    fixed = {n for n in sizes if n not in tied or n in given.replicated}
    parts: dict[str, int] = {}
    reasons: dict[str, list[str]] = {}
    for letter in sizes:
        if letter in fixed or sizes[letter] == 1:
            continue
        try:
            parts[letter] = _parts(given, equation, operands, results, letter, sizes[letter])
        except _jax.CannotSplit as error:
            fixed.add(letter)
            reasons.setdefault(str(error), []).append(letter)
    rule = _numbered(given, sizes, fixed, parts)
    text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    if not text:
        return rule, ""
    how = "is not split along" if parts else "runs replicated; it cannot be split along"
    return rule, f"{how} {text}"


def _sizes(
    given: UserRule, where: str, dims: Sequence[Dims], shapes: Sequence[Shape]
) -> dict[str, int]:
    """The size of every letter; in a product of letters, the sizes of the others give it."""
    sizes: dict[str, int] = {}
    groups = [
        (names, size)
        for array_dims, shape in zip(dims, shapes, strict=True)
        for names, size in zip(array_dims, shape, strict=True)
        if names
    ]
    groups.sort(key=lambda group: len(group[0]))
    for _ in groups:
        for names, size in groups:
            open_names = [n for n in names if n not in sizes]
            known = prod(sizes[n] for n in names if n in sizes)
            if len(open_names) == 1 and size % known == 0:
                sizes[open_names[0]] = size // known
    for names, size in groups:
        if any(n not in sizes for n in names):
            raise ArgumentError(
                f"register_rule({given.name!r}, {given.text!r}): the shapes {list(shapes)} of "
                f"{where} do not determine the sizes of {names}. Give each of them a separate "
                "dimension in some array."
            )
        if prod(sizes[n] for n in names) != size:
            raise ArgumentError(
                f"register_rule({given.name!r}, {given.text!r}): {' '.join(names)!r} is "
                f"{prod(sizes[n] for n in names)} in one place and {size} in another, in {where} "
                f"with the shapes {list(shapes)}. Use different letters, or '_'."
            )
    return sizes


def _parts(
    given: UserRule,
    equation: Equation,
    operands: Sequence[ShapedArray],
    results: Sequence[ShapedArray],
    letter: str,
    size: int,
) -> int:
    """The number of equal shards that a letter can be split into; `CannotSplit` if it cannot."""
    avals = (*operands, *results)
    dims = (*given.operands, *given.results)
    limits = _jax.part_limits(equation.name, equation.params, [tuple(a.shape) for a in avals])
    count = size
    for array_dims, aval, limit in zip(dims, avals, limits, strict=True):
        for names, length, max_parts in zip(array_dims, aval.shape, limit, strict=True):
            if letter in names and max_parts < length:
                # Shards of a dimension are runs of blocks only along its major letter.
                count = gcd(count, max_parts if names[0] == letter else 1)
    if count <= 1:
        raise _jax.CannotSplit("its blocks do not run over that dimension, one per step")
    ways = next(n for n in range(2, count + 1) if count % n == 0)
    local = [
        tuple(n // ways if letter in names else n for names, n in zip(d, a.shape, strict=True))
        for d, a in zip(dims, avals, strict=True)
    ]
    _check_on_parts(equation, operands, local)
    return count


def _check_on_parts(
    equation: Equation, operands: Sequence[ShapedArray], local: list[Shape]
) -> None:
    """Check that the equation, bound to shards, gives shards."""
    count = len(operands)
    params = _jax.params_on_parts(equation.name, equation.params, local[:count], local[count:])
    structs = [
        jax.ShapeDtypeStruct(shape, aval.dtype)
        for shape, aval in zip(local[:count], operands, strict=True)
    ]
    constant = [isinstance(o, Constant) and not local[i] for i, o in enumerate(equation.operands)]

    def bind(*arrays: Any) -> list[Any]:
        values = [
            o.value if fixed else array  # type: ignore[union-attr]
            for o, fixed, array in zip(equation.operands, constant, arrays, strict=True)
        ]
        return _jax.bind(equation.primitive, params, values)

    try:
        made = [tuple(r.shape) for r in jax.eval_shape(bind, *structs)]
    except Exception as error:
        raise _jax.CannotSplit(f"on parts it fails ({shortened(str(error))})") from error
    if made != local[count:]:
        raise _jax.CannotSplit(f"on parts it gives {made}, not {local[count:]}")


def _numbered(
    given: UserRule, sizes: dict[str, int], fixed: set[str], parts: dict[str, int]
) -> Rule:
    """The rule with numbered factors for letters. A letter that can be split into fewer shards than
    its size becomes two factors, the minor one fixed."""
    numbers: dict[str, tuple[int, ...]] = {}
    factor_sizes: list[int] = []
    fixed_factors: set[int] = set()
    for letter, size in sizes.items():
        if size == 1:
            numbers[letter] = ()
            continue
        count = parts.get(letter, size)
        major, minor = len(factor_sizes), len(factor_sizes) + 1
        factor_sizes.append(count)
        if letter in fixed:
            fixed_factors.add(major)
        if count < size:
            fixed_factors.add(minor)
            factor_sizes.append(size // count)
        numbers[letter] = (major, minor) if count < size else (major,)

    def factors(values: tuple[Dims, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(f for n in names for f in numbers[n]) for names in dims) for dims in values
        )

    return Rule(
        factors(given.operands),
        factors(given.results),
        tuple(factor_sizes),
        frozenset(numbers[n][0] for n in given.reduction if numbers[n]),
        frozenset(fixed_factors),
        local=True,
    )

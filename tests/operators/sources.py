"""Where the rule of a primitive comes from, read from autopar's tracer.

A case's step is traced as autopar does it. What became of the primitive tells its source:

- *inlined*: the flat program has its body, or simpler equations, in place of it;
- *loop*: its body is sharded equation by equation (scan, while, cond);
- *ours*: a rule of `autopar.tracer.rules.PRIMITIVE_RULES`, or of an elementwise op of the chlo
  dialect, which Shardy leaves out;
- *Shardy*: the rule that the partitioner itself follows;
- *replicated*: every device computes all of it, and why.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from autopar.ir.graph import Rule
from autopar.ir.program import LOOPS, Equation
from autopar.tracer.compose import RuledEquation
from autopar.tracer.rules import PRIMITIVE_RULES, rules_of_equations
from autopar.tracer.simpler_equations import SIMPLIFIED
from autopar.tracer.trace_step import trace_step
from tests.operators.cases import Case

SOURCES = ("Shardy", "ours", "loop", "inlined", "replicated")


@dataclass(frozen=True)
class RuleSource:
    """`rule`: which dimensions are split together, as `ab,bc->ac`; empty if there is no rule."""

    source: str
    rule: str = ""
    note: str = ""


def source_of(case: Case) -> RuleSource:
    step = trace_step(case.step, case.args, batch_argnums=())
    equation = next((e for e in step.program.all_equations() if e.name == case.primitive), None)
    if equation is None:
        if case.primitive not in bound_names(jax.make_jaxpr(case.step)(*case.args)):
            raise ValueError(f"the case of {case.primitive} does not bind it")
        if any(e.name == "shard_map" for e in step.program.all_equations()):
            return RuleSource("replicated", note="runs inside shard_map, as the user says")
        if case.primitive == "device_put":
            return RuleSource("inlined", note="dropped: it names no device")
        others = "simpler operators take" if case.primitive in SIMPLIFIED else "its body takes"
        return RuleSource("inlined", note=f"{others} its place")
    if equation.name in LOOPS:
        return RuleSource("loop", note="each equation of its body has its own rule")
    (ruled,) = rules_of_equations([equation], step.program.avals)
    return _source(equation, ruled)


def _source(equation: Equation, ruled: RuledEquation) -> RuleSource:
    if ruled.note:
        return RuleSource("replicated", note=ruled.note)
    if not equation.results:
        return RuleSource("replicated", note="has no result")
    if ruled.unruled_ops:
        ops = [op for op in dict.fromkeys(ruled.unruled_ops) if op != equation.name]
        note = "an effect, which happens once" if equation.has_effect else "not lowered alone"
        return RuleSource("replicated", note=f"no rule for {', '.join(ops)}" if ops else note)
    text = rule_text(ruled.rule)
    if equation.name in PRIMITIVE_RULES:
        doc = inspect.getdoc(PRIMITIVE_RULES[equation.name]) or ""
        return RuleSource("ours", text, " ".join(doc.partition(".")[0].partition(":")[0].split()))
    if not _free(ruled.rule):
        return RuleSource("Shardy", text, "no dimension may be split")
    chlo = [op for op in ruled.op_names if op.startswith("chlo.")]
    if chlo:
        return RuleSource("ours", text, f"elementwise {', '.join(dict.fromkeys(chlo))}")
    note = "applied to shards" if ruled.rule.local else ""
    return RuleSource("Shardy", text, "windows with halos are ours" if ruled.rule.halos else note)


def _free(rule: Rule) -> set[int]:
    return set(range(len(rule.sizes))) - rule.fixed


def rule_text(rule: Rule) -> str:
    """A letter for every factor that may be split, `·` for one that may not, `1` for a dimension of
    size 1: `ab,bc->ac`. Factors of one dimension are in brackets."""
    letters = {f: string.ascii_letters[i % 52] for i, f in enumerate(sorted(_free(rule)))}

    def dimension(factors: tuple[int, ...]) -> str:
        text = "".join(letters.get(f, "·") for f in factors)
        return f"({text})" if len(factors) > 1 else text or "·"

    def values(each: Any) -> str:
        return ", ".join("".join(map(dimension, dims)) or "scalar" for dims in each)

    return f"{values(rule.operands)} → {values(rule.results)}".strip()


def bound_names(jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr and in the jaxprs of its parameters."""
    return {eqn.primitive.name for eqn in _equations(jaxpr)}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(value)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")

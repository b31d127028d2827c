"""A plan in ten lines, for `print(plan)`, and as a table, for notebooks."""

from __future__ import annotations

from html import escape

from autopar.inspect.breakdown import limits_of, shares_of
from autopar.inspect.explain import cluster_text, where_text
from autopar.inspect.lines import counted, paragraph
from autopar.inspect.module_tree import Module, module_tree, words_text
from autopar.inspect.verdict import verdict_lines
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, format_seconds, seconds_like

MOST_MODULES = 8


def summary_text(plan: ParallelPlan) -> str:
    """About ten lines: what runs where, what it takes and what limits it."""
    lines = [
        where_text(plan),
        *paragraph(f"method   {plan.asked or plan.method}"),
        *paragraph(f"cluster  {cluster_text(plan)}"),
        *paragraph(f"step     {_step_text(plan)}"),
        *paragraph(f"memory   {format_bytes(plan.estimated_peak_bytes)} per device at the peak"),
        *paragraph(f"layers   {_layers_text(plan)}"),
        *[line for sentence in limits_of(plan)[:1] for line in paragraph(f"limit    {sentence}")],
        *verdict_lines(plan),
    ]
    if plan.warnings:
        lines.append(f"{counted(len(plan.warnings), 'warning')}: see plan.warnings")
    return "\n".join([*lines, "more: plan.explain()"])


def _step_text(plan: ParallelPlan) -> str:
    if not plan.is_timed:
        return f"cost {plan.estimated_step_s:.6g} in the units of the mesh"
    shares = shares_of(plan)
    parts = [
        (shares.compute, "compute"),
        (shares.communication, "communication"),
        (shares.bubble, "bubble"),
        (shares.host, "host memory"),
        (shares.launch, "launches"),
    ]
    named = ", ".join(f"{part / shares.step:.0%} {name}" for part, name in parts if part)
    return f"{format_seconds(plan.estimated_step_s)} predicted" + (f": {named}" if named else "")


def _layers_text(plan: ParallelPlan) -> str:
    """The parallelism of the largest modules."""
    top = _largest(module_tree(plan))
    texts = [f"{_name(m)}: {words_text(m.words)}" for m in top if m.words]
    return "; ".join(texts[:4]) or "no modules with matrix products"


def _name(module: Module) -> str:
    return f"{module.name} ({module.count})" if module.count > 1 else module.name


def _largest(root: Module) -> list[Module]:
    """Modules below the one that holds all others, by compute."""
    at = root
    while len([c for c in at.children.values() if c.words]) == 1:
        at = next(c for c in at.children.values() if c.words)
        if not at.children:
            return [at]
    return sorted(at.children.values(), key=lambda module: -module.compute_s)


def summary_html(plan: ParallelPlan) -> str:
    """Head, largest modules and verdict. Everything from the plan is escaped."""
    time = seconds_like(plan.estimated_step_s) if plan.is_timed else "{:.4g}".format
    rows = [
        (
            _name(module),
            time(module.compute_s),
            time(module.communication_s),
            words_text(module.words),
        )
        for module in _largest(module_tree(plan))[:MOST_MODULES]
    ]
    head = ("module", "compute", "communication", "parallelism")
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    facts = [_step_text(plan), cluster_text(plan), f"method {plan.asked or plan.method}"]
    sentences = [*limits_of(plan)[:1], *plan.warnings]
    return (
        f"<div class='autopar-plan'><strong>{escape(where_text(plan))}</strong>"
        f"<div>{'<br>'.join(map(escape, facts))}</div>"
        f"<table><thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr></thead>"
        f"<tbody>{cells}</tbody></table>"
        f"<div>{'<br>'.join(map(escape, sentences))}</div>"
        f"<div>{escape(' '.join(line.strip() for line in verdict_lines(plan)))}</div></div>"
    )

"""Methods as text, and what can be read from it: a method ↔ the `method` of a plan.

A plan keeps its method as the user would write it, `ShardParallel(num_micro_batches=4)`. From a
plan file that text alone says which kind of method asked for what.
"""

from __future__ import annotations

import ast
from dataclasses import MISSING, dataclass, fields

from autopar.ir.mesh import LogicalMesh
from autopar.methods import AnyMethod, PlacedParallel, ShardingOptions

# Options that constrain layouts, beside those that begin with `allow_`.
_CONSTRAINING = {"pins", "forbid_axes", "batch_axis"}
_NOT_IN_TEXT = ("in_specs", "out_specs", "memory_correction", "host_memory", "xla_options")
_PLACING = {"ManualParallel", "FollowParallel"}


@dataclass(frozen=True)
class MethodSummary:
    """The name of a method's class, and the arguments given to it and to its options."""

    name: str
    arguments: frozenset[str]

    @property
    def constrains_layouts(self) -> bool:
        """Whether it asks something of arrays that a plan does not hold otherwise."""
        return (
            self.name in _PLACING
            or not self.arguments.isdisjoint(_CONSTRAINING)
            or any(argument.startswith("allow_") for argument in self.arguments)
        )


def method_text(method: AnyMethod | ShardingOptions) -> str:
    """The method as the user would write it, without defaults, specs, what XLA was
    found to keep, host memory and XLA's options, of which the plan says itself what it takes."""
    if isinstance(method, PlacedParallel):
        return f"{method.name}()"
    parts = []
    for field in fields(method):
        value = getattr(method, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in _NOT_IN_TEXT or value == default:
            continue
        if isinstance(value, ShardingOptions):
            text = method_text(value)
        else:
            text = repr(value.shape if isinstance(value, LogicalMesh) else value)
        parts.append(f"{field.name}={text}")
    return f"{type(method).__name__}({', '.join(parts)})"


def read_method(text: str) -> MethodSummary:
    """What a text of `method_text` says. Of a text that is no call only the name is known."""
    name = text.partition("(")[0]
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return MethodSummary(name, frozenset())
    return MethodSummary(
        name,
        frozenset(
            keyword.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg is not None
        ),
    )

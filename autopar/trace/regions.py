"""Which part of the step an equation belongs to, read from JAX's own name stacks.

`jvp(GPT)/Block_0/Dense_1` is the forward pass of a module, `transpose(jvp(GPT))/Block_0/Dense_1`
its backward pass, and an equation after the backward pass with neither is the optimizer's update.
Plain JAX code has the transformations in its stack too, only no module names. Equations without
any sign go by data flow: what depends on a gradient is update, and so is what feeds the update
alone (schedules, step counters).
"""

from __future__ import annotations

import re

from autopar.trace.program import Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

_WRAPPER = re.compile(r"(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|jit)\(([^()]*)\)")
_NOISE = ("checkpoint", "rematted_computation", "while", "body", "cond", "closed_call")


def region_by_name(name_stack: str) -> str | None:
    if "transpose(" in name_stack:
        return BACKWARD
    if "jvp(" in name_stack or name_stack:
        return FORWARD
    return None


def module_name(name_stack: str) -> str:
    """The user's own module path: transformations stripped, `GPT/Block_0/Dense_1` left."""
    previous = None
    while previous != name_stack:
        previous, name_stack = name_stack, _WRAPPER.sub(r"\1", name_stack)
    parts = [part for part in name_stack.split("/") if part and part not in _NOISE]
    return "/".join(parts)


def equation_regions(program: Program) -> list[str]:
    """The region of every top-level equation of the program."""
    equations = program.equations
    named = [region_by_name(e.scope) for e in equations]
    has_gradient = BACKWARD in named
    if not has_gradient:
        return [FORWARD] * len(equations)
    after_gradient: set[int] = set()
    regions: list[str | None] = list(named)
    for index, equation in enumerate(equations):
        reads = [o for o in equation.operands if isinstance(o, int)]
        if named[index] == BACKWARD:
            after_gradient.update(equation.results)
        elif any(o in after_gradient for o in reads):
            after_gradient.update(equation.results)
            regions[index] = UPDATE
    # What is left without a name feeds the update, or belongs to the forward pass.
    read_outside_update: set[int] = set()
    for index in range(len(equations) - 1, -1, -1):
        equation = equations[index]
        if regions[index] is None:
            outside = any(r in read_outside_update for r in equation.results)
            regions[index] = FORWARD if outside else UPDATE
        if regions[index] != UPDATE:
            read_outside_update.update(o for o in equation.operands if isinstance(o, int))
    return [r or FORWARD for r in regions]

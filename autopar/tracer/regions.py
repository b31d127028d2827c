"""Regions of a step, forward, backward or update: from a `Program` to the region of each equation.

JAX's name stacks tell most: `jvp(GPT)/Block_0/Dense_1` is the forward pass of a module,
`transpose(jvp(GPT))/Block_0/Dense_1` its backward pass. Plain JAX code has the transformations in
its stack too, only no module names. Equations without either go by data flow: what depends on a
gradient is the optimizer's update, and so is what feeds only the update (weight decay, schedules,
step counters).
"""

from __future__ import annotations

import re
from functools import lru_cache

from autopar.ir.program import Equation, Program

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

_WRAPPER = re.compile(
    r"(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|jit)\(([^()]*)\)"
)
_NOISE = ("checkpoint", "rematted_computation")
_TRIPS = "expected_trips="


def region_by_name(scope: str) -> str | None:
    """The region according to the transformations in a scope; None without any."""
    if "transpose(" in scope:
        return BACKWARD
    return FORWARD if "jvp(" in scope else None


@lru_cache(maxsize=65536)
def module_name(scope: str) -> str:
    """The user's module path, without transformations: `GPT/Block_0/Dense_1`."""
    previous = None
    while previous != scope:
        previous, scope = scope, _WRAPPER.sub(r"\1", scope)
    parts = [part for part in scope.split("/") if part and part not in _NOISE]
    return "/".join(part for part in parts if not part.startswith(_TRIPS))


def _has_backward(loop: Equation) -> bool:
    """A loop around a whole step (gradient accumulation) has backward passes in its body."""
    return any(
        region_by_name(equation.scope) == BACKWARD
        for body in loop.bodies
        for equation in body.all_equations()
    )


def equation_regions(program: Program) -> list[str]:
    """The region of every top-level equation of the program."""
    equations = program.equations
    regions = [
        region_by_name(e.scope) or (BACKWARD if _has_backward(e) else None) for e in equations
    ]
    if BACKWARD not in regions:
        return [FORWARD] * len(equations)
    after_gradient: set[int] = set()
    for index, equation in enumerate(equations):
        if regions[index] == BACKWARD:
            after_gradient.update(equation.results)
        elif not after_gradient.isdisjoint(equation.inputs):
            after_gradient.update(equation.results)
            regions[index] = UPDATE
    # The rest feeds the update or the passes, or goes straight to the result. In the last case it
    # is forward if it has a module's name (metrics), else update (counters, averages).
    read_by_update: set[int] = set()
    read_by_passes: set[int] = set()
    for index in range(len(equations) - 1, -1, -1):
        equation = equations[index]
        region = regions[index]
        if region is None:
            feeds_update = not read_by_update.isdisjoint(equation.results)
            feeds_passes = not read_by_passes.isdisjoint(equation.results)
            is_update = (feeds_update or not equation.scope) and not feeds_passes
            region = UPDATE if is_update else FORWARD
            regions[index] = region
        readers = read_by_update if region == UPDATE else read_by_passes
        readers.update(equation.inputs)
    return [region or FORWARD for region in regions]

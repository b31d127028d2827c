"""Kernels that devices cannot run: from a `Program` and a platform to a `CompileError`, or nothing.

A step with cuDNN's attention or a Pallas kernel can be planned anywhere, for GPUs that are not
there. Run on other devices, it would fail deep inside of XLA.
"""

from __future__ import annotations

from autopar import _jax
from autopar.errors import CompileError
from autopar.ir.program import Program

_REMEDIES = {
    "a Pallas kernel": "pass interpret=True to pallas_call there, or use another function",
    "cuDNN's attention": "use jax.nn.dot_product_attention(…, implementation='xla') there",
}


def check_kernels(name: str, program: Program, platform: str) -> None:
    """Raises if an equation of the step `name` is a kernel for another platform."""
    for equation in program.all_equations():
        known = _jax.kernel_platforms(equation.name, equation.params)
        if known is None or platform in known[1]:
            continue
        what, platforms = known
        remedy = _REMEDIES.get(what, "use another function there")
        raise CompileError(
            f"{name}: {equation.source_line} is {what}, which runs on {' or '.join(platforms)} "
            f"devices, and this step is to run on {platform} devices. Planning for a cluster with "
            f"such devices is possible (autopar.plan); to run it on {platform}, {remedy}."
        )

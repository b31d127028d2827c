"""Objects of other libraries among the arguments and results of a step.

    nnx        modules, optimizers and metrics that the step changes in place, as `nnx.jit` has it:
               arguments with objects → arguments with `ObjectNode`s (a pytree of their arrays),
               and from the result of the pure function back into the caller's objects
    equinox_modules   equinox modules, whose leaves that are no arrays are part of the program, as
               `eqx.filter_jit` has it

Neither library is imported here: an object of a library that nobody imported cannot be there.
"""

from autopar.ir.objects.equinox_modules import is_array, is_filtered, is_filtered_type
from autopar.ir.objects.nnx import (
    NOTHING_TAKEN,
    TakenObjects,
    assembled,
    has_objects,
    is_object,
    put_back,
    run_pure,
    taken_apart,
)
from autopar.ir.objects.nodes import ObjectNode, ObjectResult, leaves_in_nodes

__all__ = [
    "NOTHING_TAKEN",
    "ObjectNode",
    "ObjectResult",
    "TakenObjects",
    "assembled",
    "has_objects",
    "is_array",
    "is_filtered",
    "is_filtered_type",
    "is_object",
    "leaves_in_nodes",
    "put_back",
    "run_pure",
    "taken_apart",
]

"""Methods of plans that need rooms above: `plan.explain()` is text, and a plan is data.

`ParallelPlan` and `Blocks` name these methods; `autopar.inspect.plan_methods` has their bodies, and
is imported when the first of them is called. Nothing else in autopar looks upwards.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_BODIES = "autopar.inspect.plan_methods"


def late_method(name: str) -> Callable[..., Any]:
    """The function of that name in `autopar.inspect.plan_methods`."""
    return getattr(import_module(_BODIES), name)

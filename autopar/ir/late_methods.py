"""Methods of plans that need packages above `ir`: `plan.explain()` is text, a plan is data.

`ParallelPlan` and `Blocks` declare these methods; `autopar.inspect.plan_methods` has their bodies
and is imported on the first call. Nothing else in autopar imports upwards.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_BODIES = "autopar.inspect.plan_methods"


def late_method(name: str) -> Callable[..., Any]:
    """The function of that name in `autopar.inspect.plan_methods`."""
    return getattr(import_module(_BODIES), name)

"""Methods of plans that need packages above `ir`: `plan.explain()` is text, a plan is data.

`ParallelPlan` and `Blocks` declare these methods. The module that has a method's body is imported
when it is called, and no other, so a plan can be read and shown where no solver is installed.
Nothing else in autopar imports upwards.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from autopar._requirements import raise_if_missing

_BODIES = {
    "explain": ("autopar.inspect.explain", "explain"),
    "summary": ("autopar.inspect.summary", "summary_text"),
    "summary_html": ("autopar.inspect.summary", "summary_html"),
    "explain_path": ("autopar.inspect.why", "explain_path"),
    "report": ("autopar.inspect.report_page", "write_report"),
    "timeline": ("autopar.stages.simulate", "predicted_timeline"),
    "blocks": ("autopar.inspect.blocks", "blocks_of"),
    "blocks_text": ("autopar.inspect.blocks_text", "blocks_text"),
    "strategies": ("autopar.inspect.strategies_text", "strategy_text"),
    "with_pins": ("autopar.inspect.pins", "with_pins"),
}


def late_method(name: str) -> Callable[..., Any]:
    """The function behind a method. Raises `DependencyError` if it needs a missing package."""
    module, function = _BODIES[name]
    try:
        return getattr(import_module(module), function)
    except ImportError as error:
        raise_if_missing(error)
        raise

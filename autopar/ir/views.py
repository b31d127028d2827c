"""Ways to look at a plan that need more than the plan: layers above provide them.

`ParallelPlan.explain`, `report`, `timeline`, `blocks` and `with_pins` are methods of data that
knows nothing of text, pages, schedules or solvers. Which module can is said here when autopar is
imported; it is imported when first asked.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol


class PlanViews(Protocol):
    def explain(self, plan: Any, path: str | None, depth: int | None) -> str: ...

    def report(self, plan: Any, target: str | Path, measured: Any) -> None: ...

    def timeline(self, plan: Any) -> Any: ...

    def with_pins(self, plan: Any, pins: Any) -> Any: ...

    def strategies(self, plan: Any) -> str: ...

    def blocks(self, plan: Any, stage: int) -> Any: ...

    def blocks_text(self, blocks: Any) -> str: ...


_known: list[PlanViews] = []


_home: list[str] = []


def provide(views: PlanViews) -> None:
    _known[:] = [views]


def provide_from(module: str) -> None:
    """`module` calls `provide` when it is imported."""
    _home[:] = [module]


def views() -> PlanViews:
    if not _known:
        importlib.import_module(*_home)
    return _known[0]

"""A plan as one HTML page: from a `ParallelPlan` (and a measured `Timeline`) to a file.

The file contains everything: the plan as JSON, and the style and scripts next to this module, which
draw it in the browser. It needs no network, and its content policy forbids any.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

from autopar.errors import ArgumentError, PlanError
from autopar.inspect.report_page.data import page_data
from autopar.inspect.report_page.page import render
from autopar.ir.files import write_whole
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline


def write_report(
    plan: ParallelPlan,
    target: str | Path,
    measured: Timeline | None = None,
    compare: Mapping[str, ParallelPlan | str] | None = None,
) -> None:
    """Write the page, whole or not at all. `compare`: plans beside it by name, or why there is
    none."""
    where = f"report({str(target)!r})"
    if not isinstance(plan, ParallelPlan):
        raise PlanError(
            f"{where}: needs a ParallelPlan, got a {type(plan).__name__}. Plan first, or read a "
            "file that plan.save() wrote with ParallelPlan.load()."
        )
    if measured is not None:
        _check_measured(plan, measured, where)
    try:
        path = Path(target)
    except TypeError as error:
        raise ArgumentError(f"{where}: needs the path of a file to write.") from error
    if path.is_dir():
        raise PlanError(f"{where}: this is a folder; give the path of a file, such as plan.html.")
    if not path.parent.is_dir():
        raise PlanError(f"{where}: the folder {path.parent} does not exist; create it first.")
    if not _is_comparison(compare or {}):
        raise ArgumentError(
            f"{where}: compare must be a dict from names to ParallelPlans, such as "
            "{'data parallel': plan_b}."
        )
    content = render(page_data(plan, measured, compare))
    try:
        write_whole(path, content)
    except OSError as error:
        raise PlanError(
            f"{where}: cannot write the file ({error.strerror or error}). Choose a writable folder "
            "on a disk with free space."
        ) from error


def _is_comparison(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(other, (ParallelPlan, str))
        for name, other in given.items()
    )


def _check_measured(plan: ParallelPlan, measured: object, where: str) -> None:
    if not isinstance(measured, Timeline):
        raise ArgumentError(
            f"{where}: measured must be a Timeline, got a {type(measured).__name__}. Pass one of "
            "the timelines that autopar.trace recorded, or None."
        )
    num_meshes = len({stage.mesh for stage in plan.stages})
    if measured.num_meshes != num_meshes:
        raise ArgumentError(
            f"{where}: the plan has {num_meshes} meshes, the measured timeline "
            f"{measured.num_meshes}. Pass a timeline of a step that ran with this plan."
        )
    meshes = range(num_meshes)
    if not all(e.mesh in meshes and -inf < e.start_s <= e.end_s < inf for e in measured.events):
        raise ArgumentError(
            f"{where}: measured has events on unknown meshes, or that end before they start. Pass "
            "a timeline as autopar.trace recorded it."
        )

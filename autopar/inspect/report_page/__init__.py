"""A plan as one HTML page: from a `ParallelPlan` (and a measured `Timeline`) to a file.

Everything is in that file: figures as JSON, and the style and scripts beside this module, which
draw them in the browser. It asks the network for nothing, and forbids itself to.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

from autopar.errors import ArgumentError, PlanError
from autopar.inspect.report_page.data import page_data
from autopar.inspect.report_page.page import render
from autopar.ir.files import write_whole
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline


def write_report(plan: ParallelPlan, target: str | Path, measured: Timeline | None = None) -> None:
    """Write the page; a crash leaves the old file or the new one, never half."""
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
        raise PlanError(f"{where}: is a folder; give the path of a file, such as plan.html.")
    if not path.parent.is_dir():
        raise PlanError(f"{where}: the folder {path.parent} does not exist; make it first.")
    content = render(page_data(plan, measured))
    try:
        write_whole(path, content)
    except OSError as error:
        raise PlanError(
            f"{where}: cannot be written ({error.strerror or error}). Choose a file in a folder "
            "that you may write to, with room for it."
        ) from error


def _check_measured(plan: ParallelPlan, measured: object, where: str) -> None:
    if not isinstance(measured, Timeline):
        raise ArgumentError(
            f"{where}: measured must be a Timeline, got a {type(measured).__name__}. Give one of "
            "the timelines that autopar.trace recorded, or nothing."
        )
    num_meshes = len({stage.mesh for stage in plan.stages})
    if measured.num_meshes != num_meshes:
        raise ArgumentError(
            f"{where}: measured has {measured.num_meshes} meshes, the plan {num_meshes}. Give a "
            "timeline of a step that ran by this plan."
        )
    meshes = range(num_meshes)
    if not all(e.mesh in meshes and -inf < e.start_s <= e.end_s < inf for e in measured.events):
        raise ArgumentError(
            f"{where}: measured has events on no mesh of the plan, or that end before they start. "
            "Give a timeline as autopar.trace recorded it."
        )

"""How a plan was found: from a plan's solver and search reports to lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from autopar.inspect.lines import counted, mesh_text, paragraph
from autopar.ir.plan import WALL, ParallelPlan, SolverReport, StagePlan
from autopar.ir.stages import PipelineChoice, SearchReport, StageChoice, TriedPlan
from autopar.ir.text import format_bytes, format_seconds


def solver_lines(plan: ParallelPlan) -> list[str]:
    """The objective with its proof, the size of the problem, and seconds per pass."""
    solver = plan.solver
    objective = format_seconds(solver.objective) if plan.is_timed else f"{solver.objective:.6g}"
    lines = [f"solver: objective {objective}, {proof_text(solver)}"]
    sizes = solver.sizes
    if "variables" in sizes:
        lines += paragraph(
            f"{counted(sizes.get('equations', 0), 'equation')}, "
            f"{counted(sizes['variables'], 'variable')} and "
            f"{counted(sizes.get('constraints', 0), 'constraint')} after reductions, "
            f"{counted(sizes.get('solves', 1), 'solve')}"
        )
    spent = {name: s for name, s in solver.seconds.items() if "." not in name and s >= 1e-3}
    wall_s = solver.seconds.get(WALL)
    if spent:
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in spent.items())
        total_s = sum(spent.values()) if wall_s is None else wall_s
        lines += paragraph(f"planned in {format_seconds(total_s)}: {parts}")
    if solver.stopped is not None:
        lines += paragraph(solver.stopped)
    if plan.cached:
        lines += paragraph(f"read from the plan cache: {plan.cached}")
    return lines


def proof_text(solver: SolverReport) -> str:
    """The optimality gap. Folding equal layers restricts the problem, so it is mentioned."""
    proven = "proven optimal" if solver.gap == 0 else f"within {solver.gap:.2%} of optimal"
    classes, nodes = solver.sizes.get("classes"), solver.sizes.get("nodes")
    if classes is None or classes == nodes:
        return proven
    return f"{proven} with shared decisions for equal layers ({classes} for {nodes} ops)"


def search_lines(search: SearchReport) -> list[str]:
    lines = []
    if search.num_candidates:
        lines.append(
            f"search: priced {search.num_candidates} stage candidates over "
            f"{counted(search.num_layers, 'layer')}, pruned {search.num_pruned}, tried "
            f"{counted(search.num_bounds, 'bound')}"
        )
        if search.seconds:
            spent = (f"{name} {format_seconds(s)}" for name, s in search.seconds.items())
            lines += paragraph(f"time: {', '.join(spent)}")
    else:
        lines.append("search:")
    if search.intra_only_s is not None:
        lines.append(f"  without a pipeline: {format_seconds(search.intra_only_s)}")
    elif search.num_candidates:
        lines.append("  without a pipeline: does not fit, or was not searched")
    if search.best:
        lines.append("  best pipelines by the cost tables:")
        for choice in search.best:
            lines += paragraph(_choice_line(choice), "    ")
    if search.checked:
        solved = (f"{format_seconds(s)} (tables {format_seconds(t)})" for t, s in search.checked)
        lines += paragraph(f"solved exactly: {', '.join(solved)}")
    for note in search.notes:
        lines += paragraph(note)
    if search.tried:
        lines += _tried_lines(search.tried)
    return lines


def _tried_lines(tried: Sequence[TriedPlan]) -> list[str]:
    """Plans that were timed or compiled, with their predictions; the chosen one is marked."""
    is_timed = any(one.compiled_s is None for one in tried)
    how = "timed with synthetic inputs" if is_timed else "compiled"
    lines = [f"  {counted(len(tried), 'plan')} {how}; → is chosen:"]
    for one in tried:
        predicted = f"predicted {format_seconds(one.predicted_s)}"
        if one.compiled_s is not None:
            measured = f"as compiled {format_seconds(one.compiled_s)}"
            measured += f", {format_bytes(one.memory_bytes)}"
            measured += f", {one.failure}" if one.failure else ""
        elif one.measured_s is None:
            measured = f"failed: {one.failure}"
        else:
            measured = f"measured {format_seconds(one.measured_s)} ± {one.spread:.0%}"
            measured += f", {format_bytes(one.memory_bytes)}" if one.memory_bytes else ""
        known = ", from the database" if one.is_known else ""
        mark = "→ " if one.is_chosen else "  "
        lines += paragraph(f"{mark}{predicted}, {measured}{known}: {one.what}", "    ")
    return lines


def _choice_line(choice: PipelineChoice) -> str:
    micro_batches = counted(choice.num_micro_batches, "micro-batch")
    return f"{format_seconds(choice.step_s)}, {micro_batches}: {stages_text(choice.stages)}"


def stages_text(stages: Sequence[StageChoice | StagePlan]) -> str:
    """`2 × (6 layers on 1×4 devices as a 2×2 mesh, recomputed); 4 layers on 1×4 devices`."""
    texts = []
    for (layers, submesh, shape, remat), group in groupby(stages, key=stage_key):
        count = len(list(group))
        text = f"{counted(layers, 'layer')} on {'×'.join(map(str, submesh))} devices"
        is_row = prod(shape) == shape[0] and submesh[0] == 1  # the only mesh of one axis
        if tuple(submesh) != tuple(shape) and not is_row:
            text += f" as {mesh_text(shape)}"
        text += ", recomputed" if remat else ""
        texts.append(f"{count} × ({text})" if count > 1 else text)
    return "; ".join(texts)


def stage_key(stage: StageChoice | StagePlan) -> tuple[int, tuple[int, ...], tuple[int, ...], bool]:
    """What tells stages of a plan apart, beside which layers they are."""
    return stage.layers[1] - stage.layers[0], stage.submesh, stage.mesh_shape, stage.remat

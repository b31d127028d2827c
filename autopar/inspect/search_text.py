"""How a plan was found, as text: the solver's proof, the search for stages, where time went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from autopar.inspect.breakdown import is_timed
from autopar.inspect.lines import counted, paragraph
from autopar.ir.plan import ParallelPlan, SolverReport
from autopar.ir.stages import PipelineChoice, SearchReport, TriedPlan
from autopar.ir.text import format_bytes, format_seconds


def solver_lines(plan: ParallelPlan) -> list[str]:
    """What is known of the objective, the size of the problem, and seconds per pass."""
    solver = plan.solver
    objective = format_seconds(solver.objective) if is_timed(plan) else f"{solver.objective:.6g}"
    lines = [f"solver: objective {objective}, {_proof(solver)}"]
    sizes = solver.sizes
    if "variables" in sizes:
        lines += paragraph(
            f"{counted(sizes.get('equations', 0), 'equation')}, "
            f"{counted(sizes['variables'], 'variable')} and "
            f"{counted(sizes.get('constraints', 0), 'constraint')} after reductions, "
            f"{counted(sizes.get('solves', 1), 'solve')}"
        )
    spent = {name: s for name, s in solver.seconds.items() if "." not in name and s >= 1e-3}
    if spent:
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in spent.items())
        lines += paragraph(f"planned in {format_seconds(sum(spent.values()))}: {parts}")
    return lines


def _proof(solver: SolverReport) -> str:
    """How good the objective is known to be. Folding is a restriction, so it is said."""
    proven = "proven optimal" if solver.gap == 0 else f"within {solver.gap:.2%} of optimal"
    classes, nodes = solver.sizes.get("classes"), solver.sizes.get("nodes")
    if classes is None or classes == nodes:
        return proven
    return f"{proven} with equal layers alike ({classes} decisions for {nodes} ops)"


def search_lines(search: SearchReport) -> list[str]:
    lines = []
    if search.num_candidates:
        lines.append(
            f"search: {search.num_candidates} ways to run layers of {search.num_layers} priced, "
            f"{search.num_pruned} pruned, {counted(search.num_bounds, 'bound')} tried"
        )
        if search.seconds:
            spent = (f"{name} {format_seconds(s)}" for name, s in search.seconds.items())
            lines += paragraph(f"took {', '.join(spent)}")
    else:
        lines.append("search:")
    if search.intra_only_s is not None:
        lines.append(f"  without a pipeline: {format_seconds(search.intra_only_s)}")
    elif search.num_candidates:
        lines.append("  without a pipeline: does not fit, or was not asked for")
    if search.best:
        lines.append("  pipelines, by what the tables predict:")
        for choice in search.best:
            lines += paragraph(_choice_line(choice), "    ")
    if search.checked:
        solved = (f"{format_seconds(s)} (tables {format_seconds(t)})" for t, s in search.checked)
        lines += paragraph(f"as solved exactly: {', '.join(solved)}")
    for note in search.notes:
        lines += paragraph(note)
    if search.tried:
        lines += _tried_lines(search.tried)
    return lines


def _tried_lines(tried: Sequence[TriedPlan]) -> list[str]:
    """Plans that were run, with what was predicted of them; the one that was taken is marked."""
    ran = any(one.compiled_s is None for one in tried)
    how = "run with made-up inputs, the fastest taken" if ran else "compiled, the best taken"
    lines = [f"  {how} ({counted(len(tried), 'plan')}):"]
    for one in tried:
        predicted = f"predicted {format_seconds(one.predicted_s)}"
        if one.compiled_s is not None:
            measured = f"as XLA compiled it {format_seconds(one.compiled_s)}"
            measured += f", {format_bytes(one.memory_bytes)}"
            measured += f", {one.failure}" if one.failure else ""
        elif one.measured_s is None:
            measured = f"did not run: {one.failure}"
        else:
            measured = f"measured {format_seconds(one.measured_s)} ± {one.spread:.0%}"
            measured += f", {format_bytes(one.memory_bytes)}" if one.memory_bytes else ""
        known = ", timed earlier" if one.is_known else ""
        mark = "→ " if one.is_chosen else "  "
        lines += paragraph(f"{mark}{predicted}, {measured}{known}: {one.what}", "    ")
    return lines


def _choice_line(choice: PipelineChoice) -> str:
    stages = []
    for key, run in groupby(
        choice.stages, key=lambda s: (s.layers[1] - s.layers[0], s.submesh, s.mesh_shape, s.remat)
    ):
        count = len(list(run))
        layers, submesh, shape, remat = key
        mesh = "×".join(map(str, submesh))
        as_mesh = f" as {'×'.join(map(str, shape))}" if tuple(submesh) != shape else ""
        as_mesh = "" if prod(shape) == shape[0] and submesh[0] == 1 else as_mesh
        again = ", recomputed" if remat else ""
        times = f"{count} × " if count > 1 else ""
        stages.append(f"{times}({counted(layers, 'layer')} on {mesh}{as_mesh}{again})")
    micro_batches = counted(choice.num_micro_batches, "micro-batch")
    return f"{format_seconds(choice.step_s)}, {micro_batches}: {', '.join(stages)}"

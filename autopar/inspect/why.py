"""Why is this array sharded like this? From a `ParallelPlan` and a path to a `Why`.

`alternatives` solves, `neighbours` looks around the array, `why_text` formats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from jax.numpy import dtype

from autopar.errors import ArgumentError
from autopar.inspect.alternatives import SolvedLayouts, solve_layouts, value_in
from autopar.inspect.breakdown import cause_text
from autopar.inspect.find_arrays import (
    ArrayKind,
    PlanArray,
    arrays_at,
    find_arrays,
    first_of_each_path,
)
from autopar.inspect.layouts_text import layout_sentence, layout_text
from autopar.inspect.neighbours import Uses, neighbours, uses_in
from autopar.inspect.resharding import changed_collectives
from autopar.inspect.why_text import explain_why
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.spec import WHOLE, spec_to_text
from autopar.ir.text import format_bytes, format_seconds
from autopar.ir.why import Alternative, Why
from autopar.progress import Progress, logged
from autopar.sharding.layout_constraints import LayoutRequest
from autopar.sharding.marginals import Marginal
from autopar.sharding.origin import Origin

MOST_ALTERNATIVES = 12


def explain_path(plan: ParallelPlan, path: str) -> str:
    """Why an array is sharded as it is, as text."""
    return explain_why(why(plan, path))


def why(plan: ParallelPlan, path: str, *, most: int = MOST_ALTERNATIVES) -> Why:
    """`path`: of an input, an output or a named value, or a pattern for arrays of one shape and
    layout. `most`: how many layouts are solved."""
    started = time.perf_counter()
    if not isinstance(path, str) or not path:
        raise ArgumentError(
            f"explain({path!r}): needs the path of an input or output, such as "
            f"{plan.inputs[0].path!r}, or a name given by autopar.constrain."
        )
    arrays = find_arrays(plan, path)
    stage, mesh_plan, notes = None, plan, ()
    if plan.is_pipeline:
        stage, mesh_plan, arrays, notes = _on_first_stage(plan, arrays)
    _check_same_type(path, arrays)
    with Progress(f"explaining {path}"), logged(f"explaining {path}"):
        answer = _on_mesh(mesh_plan, arrays, most)
    reasons = (_parallelism(mesh_plan, array.tensor.path) for array in arrays)
    return replace(
        answer,
        stage=stage,
        reason=next(filter(None, reasons), ""),
        notes=(*notes, *answer.notes),
        seconds=time.perf_counter() - started,
    )


def _on_first_stage(
    plan: ParallelPlan, arrays: Sequence[PlanArray]
) -> tuple[int, ParallelPlan, list[PlanArray], tuple[str, ...]]:
    """The first stage that holds any of the arrays, its plan, its arrays, and notes."""
    stages = sorted({array.tensor.stages[0] for array in arrays})
    stage = stages[0]
    notes: tuple[str, ...] = ()
    if len(stages) > 1:
        others = f"Stage {stages[1]} has" if len(stages) == 2 else "Other stages have"
        notes = (f"{others} matching arrays too; this is stage {stage}.",)
    paths = {array.tensor.path for array in arrays if array.tensor.stages[0] == stage}
    stage_plan = plan.stages[stage].plan
    assert stage_plan is not None
    held = first_of_each_path([array for p in paths for array in arrays_at(stage_plan, p)])
    return stage, stage_plan, held, notes


def _check_same_type(path: str, arrays: Sequence[PlanArray]) -> None:
    first = arrays[0].tensor
    for other in (array.tensor for array in arrays[1:]):
        if (other.shape, other.layout) != (first.shape, first.layout):
            raise ArgumentError(
                f"explain({path!r}): matches {len(arrays)} arrays of different shapes or layouts, "
                f"such as {first.path} {first.shape} and {other.path} {other.shape}. Give the path "
                "of one, or a pattern for arrays of one shape and layout."
            )


def _parallelism(plan: ParallelPlan, path: str) -> str:
    if plan.details is None:
        return ""
    for use in plan.details.parallelism:
        if use.path == path:
            words = ", ".join(f"{axis}: {word}" for axis, word in use.words)
            return f"{words} ({use.reason})" if use.reason else words
    return ""


# -- on one mesh


def _on_mesh(plan: ParallelPlan, arrays: Sequence[PlanArray], most: int) -> Why:
    first = arrays[0]
    tensor, names = first.tensor, plan.axis_names
    answer = Why(
        paths=tuple(array.tensor.path for array in arrays),
        equivalent_paths=(),
        kind=f"{first.kind} ({tensor.role})" if tensor.role else str(first.kind),
        array=f"{tensor.dtype}{list(tensor.shape)}",
        spec=layout_text(tensor.layout, len(tensor.shape), names),
        words=layout_sentence(tensor.layout, plan.mesh_shape, names),
        mesh=", ".join(f"{n}={s}" for n, s in zip(names, plan.mesh_shape, strict=True)),
        step_s=plan.estimated_step_s,
        peak_bytes=plan.estimated_peak_bytes,
        budget_bytes=plan.memory_budget_bytes,
        is_timed=plan.is_timed,
    )
    if plan.num_devices == 1:
        return replace(answer, notes=("The plan has one device, so no array is split.",))
    if not tensor.shape:
        return replace(answer, notes=("It is a scalar, so every device has it.",))
    if not isinstance(plan.origin, Origin):
        return replace(answer, notes=_stored_notes(plan, tensor))
    origin = plan.origin
    sharding = origin.sharding
    value = value_in(sharding.graph, first, origin)
    if value is None:
        return replace(answer, notes=("The step returns a constant here.",))
    solved = solve_layouts(origin, arrays, most)
    notes = origin.notes
    if len(solved.marginals) == 1:
        notes = (*notes, f"{plan.method} allows no other layout; with_pins does.")
    uses = uses_in(solved.graph)
    return replace(
        answer,
        equivalent_paths=solved.equivalent_paths,
        neighbours=tuple(neighbours(sharding, value, uses_in(sharding.graph))),
        alternatives=tuple(
            _alternative(plan, tensor, solved, marginal, uses) for marginal in solved.marginals
        ),
        pinned=_pinned(origin, arrays),
        notes=notes,
    )


def _stored_notes(plan: ParallelPlan, tensor: Tensor) -> tuple[str, ...]:
    """What a plan file says of an array: its size, and the collectives that move it or its
    gradient. Prices of other layouts need the program."""
    splits = [n for n, d in zip(plan.mesh_shape, tensor.layout, strict=True) if d != WHOLE]
    notes = []
    if (whole := tensor_bytes(tensor)) is not None:
        share = format_bytes(whole / prod(splits))
        notes.append(f"It takes {share} on each device, of {format_bytes(whole)}.")
    for one in plan.details.collectives if plan.details is not None else ():
        if one.value not in (tensor.path, f"gradient of {tensor.path}"):
            continue
        cost = f", {format_seconds(one.seconds)} per step" if plan.is_timed else ""
        notes.append(
            f"{one.value}: {one.kind} along {' and '.join(one.axes)} ({cause_text(one)}), "
            f"{format_bytes(one.num_bytes)} sent{cost}."
        )
    notes.append(
        "Prices of other layouts need the traced step, which plan files do not store: "
        "autopar.parallelize(fn, method=plan).plan(*args).explain(path), or "
        "`autopar plan FACTORY --cluster … --why PATH`."
    )
    return tuple(notes)


def tensor_bytes(tensor: Tensor) -> int | None:
    """None for random keys, whose types have no size of their own."""
    try:
        return prod(tensor.shape) * dtype(tensor.dtype).itemsize
    except TypeError:
        return None


def _alternative(
    plan: ParallelPlan,
    tensor: Tensor,
    solved: SolvedLayouts,
    marginal: Marginal,
    uses: Uses,
) -> Alternative:
    base, mesh = solved.base, solved.base.mesh
    alternative = Alternative(
        layout_text(marginal.layout, len(tensor.shape), mesh.axis_names),
        layout_sentence(marginal.layout, mesh.shape, mesh.axis_names),
        marginal.layout == tensor.layout,
    )
    sharding = marginal.sharding
    if sharding is None:
        bound_s = marginal.lower_bound
        return replace(alternative, step_s=bound_s, is_bound=bound_s < inf)
    costs, choice = sharding.problem.pairwise.costs, sharding.choice
    around = [] if solved.value is None else neighbours(sharding, solved.value, uses)
    counts, sent_bytes = changed_collectives(base, sharding)
    return replace(
        alternative,
        producer_s=sum(float(costs[owner][choice[owner]]) for owner in solved.results),
        reshard_s=solved.num_arrays * sum(neighbour.seconds for neighbour in around),
        step_s=plan.estimated_step_s + sharding.objective - base.objective,
        peak_bytes=sharding.memory.peak_bytes,
        fits=marginal.fits,
        gap=min(sharding.gap, 1.0),
        changes=tuple(sorted((kind, n) for kind, n in counts.items() if n)),
        extra_bytes=sent_bytes,
    )


def _pinned(origin: Origin, arrays: Sequence[PlanArray]) -> str:
    """What the user asks of the arrays; of state, on either side of the step."""
    asked, state = origin.constraints, origin.step.state
    requests: list[LayoutRequest] = []
    for array in arrays:
        match array.kind:
            case ArrayKind.INPUT:
                requests.append(asked.inputs[array.index])
                requests += [asked.outputs[o] for i, o in state if i == array.index]
            case ArrayKind.OUTPUT:
                requests.append(asked.outputs[array.index])
                requests += [asked.inputs[i] for i, o in state if o == array.index]
            case _:
                requests.append(asked.named[array.index][1])
    texts = [f"{r.source} asks for {spec_to_text(r.spec)}" for r in requests if r.spec is not None]
    texts += [
        f"forbid_axes forbids splitting it over {', '.join(r.forbidden_axes)}"
        for r in requests
        if r.forbidden_axes
    ]
    return "; ".join(dict.fromkeys(texts))

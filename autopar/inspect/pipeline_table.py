"""A pipeline's plan as text: its stages, what each holds, and what the search considered.

Lines are at most `WIDTH` columns wide. Layers that differ in their numbers alone are one entry with
a count, arrays of one module and type are one row, and stages that hold the same are shown once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from math import inf, prod

from autopar.inspect.table import module_table, tensor_table
from autopar.ir.plan import ParallelPlan, StagePlan, Tensor
from autopar.ir.stages import PipelineChoice, SearchReport
from autopar.ir.text import (
    format_bytes,
    format_seconds,
    layer_names,
    name_pattern,
    name_skeleton,
    rows_of,
)

WIDTH = 100


def explain_pipeline(plan: ParallelPlan) -> str:
    lines = [*_summary(plan), "", *_stage_table(plan), "", *_layer_lists(plan)]
    lines += _stage_arrays(plan)
    plain = tuple(t for t in plan.outputs if t.role != "state")
    if plain and plan.schedule:
        lines += ["", *tensor_table("results that are not state", plain, plan)]
    if plan.named:
        lines += ["", *tensor_table("named values", plan.named, plan)]
    copied = [f"{t.path} ({_numbers(t.stages[1:])})" for t in plan.inputs if t.stages[1:]]
    if copied and plan.schedule:
        lines += ["", "copied to other stages in every step:", *(f"  {c}" for c in copied)]
    if plan.modules:
        lines += ["", *_wrapped(module_table(plan.modules, timed=True), "collectives")]
    if plan.search is not None:
        lines += ["", *search_lines(plan.search)]
    if plan.warnings:
        lines += ["", *(f"warning: {warning}" for warning in plan.warnings)]
    return "\n".join(line if line.startswith("warning") else _fitted(line) for line in lines)


def _summary(plan: ParallelPlan) -> list[str]:
    used = {device for stage in plan.stages for device in stage.devices}
    num_meshes = len({stage.mesh for stage in plan.stages})
    on = f"{num_meshes} submeshes, " if num_meshes < plan.num_stages else ""
    stages, devices = _counted(plan.num_stages, "stage"), _counted(len(used), "device")
    head = f"{plan.name}: a pipeline of {stages} on {on}{devices}"
    lines = [f"{head} ({plan.device})", f"  {plan.method}"]
    step = f"estimated step {format_seconds(plan.estimated_step_s)}"
    if plan.schedule:
        micro_batches = _counted(plan.num_micro_batches, "micro-batch")
        lines.append(f"  schedule {plan.schedule}, {micro_batches}")
        lines.append(f"  {step}, of which devices wait {bubble_share(plan):.0%}")
    else:
        lines += ["  each stage makes its own results; nothing is sent between them", f"  {step}"]
    budget = plan.memory_budget_bytes
    of = f" of a budget of {format_bytes(budget)}" if budget < inf else ""
    lines.append(f"  peak {format_bytes(plan.estimated_peak_bytes)} per device{of}")
    lines.append(f"  communication {format_bytes(plan.communication_bytes)} per device at most")
    return lines


def _counted(count: int, thing: str) -> str:
    many = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{many if count != 1 else ''}"


def bubble_share(plan: ParallelPlan) -> float:
    """The share of the predicted step in which a device does nothing, on average over devices."""
    busy_s = sum(
        (plan.num_micro_batches * (stage.forward_s + stage.backward_s) + stage.once_s)
        * len(stage.devices)
        for stage in plan.stages
    )
    devices = {device for stage in plan.stages for device in stage.devices}
    whole_s = len(devices) * plan.estimated_step_s
    return max(0.0, 1 - busy_s / whole_s) if whole_s else 0.0


# -- stages


def _stage_table(plan: ParallelPlan) -> list[str]:
    header = ["stage", "layers", "submesh", "mesh", "devices"]
    header += ["forward", "backward", "once", "waits", "peak", "of budget"]
    rows = []
    for number, stage in enumerate(plan.stages):
        assert stage.plan is not None
        budget, peak = stage.plan.memory_budget_bytes, stage.plan.estimated_peak_bytes
        rows.append(
            (
                str(number),
                _range(*stage.layers),
                "×".join(map(str, stage.submesh)),
                "×".join(map(str, stage.mesh_shape)),
                _numbers(stage.devices),
                *(_time(t) for t in _times(stage)),
                format_bytes(peak),
                f"{peak / budget:.0%}" if budget < inf else "-",
            )
        )
    return ["stages, with seconds of one micro-batch:", *rows_of(tuple(header), rows)]


def _times(stage: StagePlan) -> tuple[float, ...]:
    if not stage.forward_s:  # of stages that only make results
        return (stage.cost, 0.0, 0.0, 0.0)
    return stage.forward_s, stage.backward_s, stage.once_s, stage.transfer_s


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _layer_lists(plan: ParallelPlan) -> list[str]:
    lines = ["layers:"]
    for number, stage in enumerate(plan.stages):
        names = layer_names(plan.layers[slice(*stage.layers)])
        again = "; computed again in the backward pass" if stage.remat else ""
        lines.append(f"  stage {number}: {names}{again}")
    return lines


def _range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def _numbers(numbers: Sequence[int]) -> str:
    """0–3, 8: runs of numbers by their ends."""
    ordered = sorted(numbers)
    runs = []
    for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(_range(members[0], members[-1] + 1))
    return ", ".join(runs)


# -- arrays


def _stage_arrays(plan: ParallelPlan) -> list[str]:
    """What each stage holds, stages that hold the same together."""
    alike: dict[tuple, list[tuple[int, list[_Row]]]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        rows = _array_rows(plan, number)
        if rows:
            key = (stage.mesh_shape, tuple((name_skeleton(r[0]), *r[1:-1], r[-1]) for r in rows))
            alike[key].append((number, rows))
    lines: list[str] = []
    for (shape, _), members in alike.items():
        numbers = [number for number, _ in members]
        merged = [
            (name_pattern([rows[i][0] for _, rows in members]), *members[0][1][i][1:])
            for i in range(len(members[0][1]))
        ]
        what = "makes" if not plan.schedule else "holds"
        many = "stages" if len(numbers) > 1 else "stage"
        what = what if len(numbers) == 1 else what.removesuffix("s")
        mesh = "×".join(map(str, shape))
        title = f"{many} {_numbers(numbers)} {what}, on the mesh {mesh}:"
        header = ("path", "array", "spec", "role", "count")
        others = list(zip(header, *merged, strict=True))[1:]
        spare = WIDTH - 2 - sum(2 + max(map(len, column)) for column in others)
        shortened = [(_elided(row[0], max(20, spare)), *row[1:]) for row in merged]
        lines += ["", title, *rows_of(header, shortened)]
    return lines


_Row = tuple[str, str, str, str, str]  # path, array, spec, role, count


def _array_rows(plan: ParallelPlan, stage: int) -> list[_Row]:
    groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    tensors = plan.inputs if plan.schedule else plan.outputs
    for tensor in tensors:
        if tensor.stages[0] != stage:
            continue
        array = f"{tensor.dtype}{list(tensor.shape)}"
        tail = name_skeleton(_tail(tensor.path))
        groups[tail, array, str(plan.spec_of(tensor)), tensor.role].append(tensor)
    return [
        (_common_path([t.path for t in members]), array, spec, role, str(len(members)))
        for (_, array, spec, role), members in groups.items()
    ]


def _tail(path: str) -> str:
    """What a parameter and its moments have in common: the path from the first key on."""
    at = path.find("['")
    return path[at:] if at > 0 else path


def _common_path(paths: Sequence[str]) -> str:
    heads = list(dict.fromkeys(path.removesuffix(_tail(path)) for path in paths))
    tail = name_pattern([_tail(path) for path in paths])
    if len(heads) == 1:
        return heads[0] + tail
    same = 0
    while len({head[: same + 1] for head in heads}) == 1 and same < min(map(len, heads)):
        same += 1
    return f"{heads[0][:same]}…{tail}"


def _elided(text: str, width: int) -> str:
    """The end of a path tells more than its beginning."""
    if len(text) <= width:
        return text
    front = max(1, width // 4)
    return f"{text[:front]}…{text[front + 1 - width :]}"


def _wrapped(table: Sequence[str], last_column: str) -> list[str]:
    """A table whose last cells, lists separated by commas, go on in further lines."""
    title, header, rule, *rows = table
    at = header.index(last_column)
    lines = [title, header, rule[:WIDTH]]
    for row in rows:
        line, *left = row.split(", ") if len(row) > WIDTH else [row]
        for item in left:
            if len(line) + len(item) + 3 > WIDTH:
                lines.append(line + ",")
                line = " " * at + item
            else:
                line = f"{line}, {item}"
        lines.append(line)
    return lines


def _fitted(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


# -- the search


def search_lines(search: SearchReport) -> list[str]:
    lines = []
    if search.num_candidates:
        lines.append(
            f"search: {search.num_candidates} ways to run layers of {search.num_layers} priced, "
            f"{search.num_pruned} pruned, {_counted(search.num_bounds, 'bound')} tried"
        )
        if search.seconds:
            spent = (f"{name} {format_seconds(s)}" for name, s in search.seconds.items())
            lines.append(f"  took {', '.join(spent)}")
    else:
        lines.append("search:")
    if search.intra_only_s is not None:
        lines.append(f"  without a pipeline: {format_seconds(search.intra_only_s)}")
    elif search.num_candidates:
        lines.append("  without a pipeline: does not fit, or was not asked for")
    if search.best:
        lines.append("  pipelines, by what the tables predict:")
        lines += (f"    {_choice_line(choice)}" for choice in search.best)
    if search.checked:
        solved = (f"{format_seconds(s)} (tables {format_seconds(t)})" for t, s in search.checked)
        lines.append(f"  as solved exactly: {', '.join(solved)}")
    lines += (f"  {note}" for note in search.notes)
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
        stages.append(f"{times}({_counted(layers, 'layer')} on {mesh}{as_mesh}{again})")
    micro_batches = _counted(choice.num_micro_batches, "micro-batch")
    return f"{format_seconds(choice.step_s)}, {micro_batches}: {', '.join(stages)}"

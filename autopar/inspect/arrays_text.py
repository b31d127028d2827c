"""The arrays of a plan with their specs: from `Tensor`s to a table.

Arrays of equal layers and of one type share a row with their count, as do a parameter and its
moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.inspect.lines import WIDTH, elided, number_runs
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.text import name_pattern, name_skeleton, table

_HEADER = ("path", "array", "spec", "role", "count", "stages")


def array_table(title: str, tensors: Sequence[Tensor], plan: ParallelPlan) -> list[str]:
    """Of a pipeline, with the stages that hold them."""
    rows = _rows(tensors, plan)
    header = _HEADER
    if not plan.is_pipeline:
        rows, header = [row[:-1] for row in rows], _HEADER[:-1]
    others = list(zip(header, *rows, strict=True))[1:]
    spare = WIDTH - 2 - sum(2 + max(map(len, column)) for column in others)
    shown = [(elided(row[0], max(20, spare)), *row[1:]) for row in rows]
    return [f"{title}:", *table(header, shown, width=WIDTH)]


def _rows(tensors: Sequence[Tensor], plan: ParallelPlan) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    meshes = len({stage.mesh_shape for stage in plan.stages})
    for tensor in tensors:
        array = f"{tensor.dtype}{list(tensor.shape)}"
        tail = name_skeleton(tail_of(tensor.path))
        spec = str(plan.spec_of(tensor))
        if meshes > 1:
            spec += f" on {'×'.join(map(str, plan.stages[tensor.stages[0]].mesh_shape))}"
        groups[tail, array, spec, tensor.role].append(tensor)
    return [
        (
            common_path([t.path for t in members]),
            array,
            spec,
            role,
            str(len(members)),
            number_runs(sorted({s for t in members for s in t.holders()})),
        )
        for (_, array, spec, role), members in groups.items()
    ]


def tail_of(path: str) -> str:
    """The path from the first key on, which a parameter and its moments share."""
    at = path.find("['")
    return path[at:] if at > 0 else path


def common_path(paths: Sequence[str]) -> str:
    heads = list(dict.fromkeys(path.removesuffix(tail_of(path)) for path in paths))
    tail = name_pattern([tail_of(path) for path in paths])
    if len({name_skeleton(head) for head in heads}) == 1:
        return name_pattern(heads) + tail
    same = 0
    while len({head[: same + 1] for head in heads}) == 1 and same < min(map(len, heads)):
        same += 1
    return f"{heads[0][:same]}…{tail}"

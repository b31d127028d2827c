"""Stages that the user asks for: from `UniformStages` and `ManualStages` to a pipeline.

What is left open is chosen as in the search: of equal stages the layers and variants, by the same
objective; of given stages the variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.errors import ArgumentError, shortened
from autopar.ir.stages import LayerTable, PipelineChoice, SearchReport, StageChoice, Submesh
from autopar.stages.ranges import Ranges, Setting
from autopar.stages.search import as_plan, most_in_flight, search_stages
from autopar.stages.submeshes import place, uniform_submesh


def uniform_stages(
    num_stages: int, tables: Sequence[LayerTable], setting: Setting, *, top: int = 5
) -> tuple[PipelineChoice | None, SearchReport]:
    """The best pipeline of so many stages of equally many devices; None if none fits. Of the
    tables, those of `uniform_submesh(num_stages, cluster)` are read."""
    num_layers = len(tables[0].latency_s)
    if num_stages > num_layers:
        raise ArgumentError(
            f"UniformStages(num_stages={num_stages}): every stage needs a layer, and there are "
            f"{num_layers}. Ask for {num_layers} stages or fewer, or for more layers with "
            "autopar.AutoLayers(…)."
        )
    submesh = uniform_submesh(num_stages, setting.cluster)
    return search_stages(tables, setting, num_stages=num_stages, top=top, submeshes={submesh})


def manual_stages(
    layer_ids: Sequence[Sequence[int]],
    submeshes: Sequence[Submesh],
    mesh_shapes: Sequence[tuple[int, ...] | None],
    tables: Sequence[LayerTable],
    setting: Setting,
) -> PipelineChoice:
    """The given stages, each under the best variant of its mesh that fits; where none fits, under
    that which exceeds memory least (`StageChoice.peak_bytes` tells). The tables must have variants
    of every submesh."""
    ranges = Ranges(tables, setting)
    check_layer_ids(layer_ids, ranges.num_layers)
    place(submeshes, setting.cluster)
    stages: list[StageChoice] = []
    for i, (ids, submesh, shape) in enumerate(zip(layer_ids, submeshes, mesh_shapes, strict=True)):
        known = [v for v, table in enumerate(tables) if table.submesh == tuple(submesh)]
        fitting = [v for v in known if shape is None or _same(tables[v].mesh_shape, shape)]
        if not fitting:
            shapes = sorted({tables[v].mesh_shape for v in known})
            raise ArgumentError(
                f"ManualStages(mesh_shapes=…): stage {i} cannot be sharded on a mesh of shape "
                f"{shape}. Choose one of {shapes} for its submesh {tuple(submesh)}, or None."
            )
        in_flight = most_in_flight(setting, len(layer_ids) - i)
        at = (ids[0], ids[-1] + 1)
        stages.append(_best(ranges, fitting, at, in_flight))
    return as_plan(stages, setting)


def _best(
    ranges: Ranges, variants: Sequence[int], layers: tuple[int, int], in_flight: int
) -> StageChoice:
    def excess_and_cost(variant: int) -> tuple[float, float]:
        budget = ranges.setting.budget_bytes(ranges.tables[variant].submesh)
        peak = ranges.peak_bytes(variant, *layers, in_flight)
        excess = 0.0 if budget == inf else max(0.0, peak - budget)
        return excess, float(ranges.cost_s[variant, *layers])

    return ranges.stage(min(variants, key=excess_and_cost), *layers, in_flight)


def check_layer_ids(layer_ids: Sequence[Sequence[int]], num_layers: int) -> None:
    flat = [layer for ids in layer_ids for layer in ids]
    if flat == list(range(num_layers)) and all(layer_ids):
        return
    given = f"ManualStages(layer_ids={shortened(layer_ids)})"
    beyond = sorted({layer for layer in flat if not 0 <= layer < num_layers})
    missing = sorted(set(range(num_layers)) - set(flat))
    if beyond:
        wrong = f"there is no layer {beyond[0]}: the step has {num_layers} layers, from 0 on"
    elif missing:
        wrong = f"layer {missing[0]} is in no stage: the step has {num_layers} layers, from 0 on"
    elif not all(layer_ids):
        wrong = "a stage has no layer"
    else:
        wrong = "layers are given twice or out of order"
    raise ArgumentError(
        f"{given}: {wrong}. Give every layer to one stage, in order, such as [[0, 1], [2, 3]]; "
        "autopar.AutoLayers(n) sets how many there are."
    )


def _same(mesh_shape: tuple[int, ...], asked: tuple[int, ...]) -> bool:
    """Axes of one device do not count."""
    return [n for n in mesh_shape if n > 1] == [n for n in asked if n > 1]

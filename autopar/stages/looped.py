"""A step as a loop over micro-batches with its layers, and stages as they are wanted of it.

From a looped step to its layers (`find_looped`), from layers to stages (`even_ranges`), and from
stages to a step per stage (`slice_into`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf

import numpy as np

from autopar.errors import TraceError
from autopar.ir.layering import Layering, LayerSource
from autopar.ir.mesh import ClusterSpec
from autopar.ir.program import Program
from autopar.ir.rows import num_rows
from autopar.ir.stages import Submesh
from autopar.ir.traced_step import TracedStep
from autopar.methods import AutoLayers, ManualLayers
from autopar.rewrite.attach_layers import LoopLayers, attach_layers, loop_batch, move_layers
from autopar.rewrite.layer_boundaries import layers_by_marks
from autopar.rewrite.layers import Layer, find_layers
from autopar.rewrite.recompute_apart import recompute_apart
from autopar.rewrite.remat import rematerialise
from autopar.rewrite.split_stacks import SplitStep, Stacks, split_stacks
from autopar.rewrite.stage_slices import WHOLE_STACKS, SlicedStep, slice_step
from autopar.tracer.costs import aval_bytes, program_flops

# Time to start one stage program: Python, argument handling and the launch itself.
LAUNCH_S = {"cpu": 300e-6}
GPU_LAUNCH_S = 60e-6


def launch_s(cluster: ClusterSpec) -> float:
    """As measured, if it was."""
    measured = cluster.measured
    if measured is not None and measured.dispatch_s is not None:
        return measured.dispatch_s.seconds
    return LAUNCH_S.get(cluster.spec.name, GPU_LAUNCH_S)


@dataclass(frozen=True)
class StageSpec:
    """A stage as a method or the search wants it."""

    layers: tuple[int, int]
    submesh: Submesh
    mesh_shape: tuple[int, ...] | None = None
    remat: bool = False


@dataclass(frozen=True)
class LoopedStep:
    """A step as a loop over micro-batches, and its layers."""

    step: TracedStep
    layers: tuple[Layer, ...]

    @property
    def body(self) -> Program:
        assert self.step.loop is not None
        return self.step.program.equations[self.step.loop].bodies[0]

    @cached_property
    def attached(self) -> LoopLayers:
        return attach_layers(self.body, self.layers)

    @cached_property
    def layer_flops(self) -> tuple[float, ...]:
        """Of every layer, in both passes, for one micro-batch."""
        flops = [0.0] * len(self.layers)
        for equation, layer in zip(self.body.equations, self.attached.layer_of, strict=True):
            if layer >= 0:
                one_equation = replace(self.body, equations=(equation,))
                flops[layer] += program_flops(one_equation)
        return tuple(flops)

    @cached_property
    def stack_rows(self) -> tuple[tuple[int, ...], ...]:
        """Per argument that is a stack over layers, how many of its rows come before each layer,
        and before the end; each course once."""
        split = stacks_by_layer(self)
        courses: dict[int, list[int]] = {}
        for position, (argument, rows) in enumerate(split.inputs):
            if rows is not None:
                ends = courses.setdefault(argument, [0] * (len(self.layers) + 1))
                for later in range(split.owners[position] + 1, len(ends)):
                    ends[later] += num_rows(rows)
        return tuple(dict.fromkeys(map(tuple, courses.values())))

    @property
    def has_backward(self) -> bool:
        return any(self.attached.is_backward)

    def worth_recomputing(self, numbers: Iterable[int]) -> list[Layer]:
        """Those of these layers that free memory if they are computed again: not those that the
        user's `jax.checkpoint` recomputes anyway."""
        layers = [self.layers[i] for i in numbers]
        return [layer for layer in layers if layer.residual_bytes > 0 and not layer.is_last]

    def recomputing(self, numbers: Sequence[int]) -> LoopedStep:
        """The same with these layers computed again in the backward pass."""
        chosen = self.worth_recomputing(numbers)
        if not chosen:
            return self
        body = rematerialise(self.body, chosen)
        step = self.step.with_loop_body(body, remat=tuple(layer.name for layer in chosen))
        return LoopedStep(step, move_layers(self.body, self.layers, body))

    def recomputing_apart(self, stage_of_layer: Sequence[int]) -> LoopedStep:
        """The same with every stage recomputing its own layers alone."""
        body = recompute_apart(self.step, self.attached, stage_of_layer)
        if body is self.body:
            return self
        step = self.step.with_loop_body(body)
        return LoopedStep(step, move_layers(self.body, self.layers, body))


def layers_of(layering: Layering) -> AutoLayers | ManualLayers:
    """How layers were found, from a plan's word for it."""
    if layering.source is LayerSource.MANUAL:
        return ManualLayers()
    return AutoLayers("auto" if layering.num_layers is None else layering.num_layers)


def find_looped(
    step: TracedStep, layers: AutoLayers | ManualLayers, at_least: int = 1
) -> LoopedStep:
    if step.loop is None:
        raise TraceError(
            f"{step.name}: a pipeline cuts what a step computes with its batch into stages, and "
            "this step only stores the batch or parts of it. Use ShardParallel or AutoParallel."
        )
    loop = step.program.equations[step.loop]
    batch = loop_batch(loop)
    if isinstance(layers, ManualLayers):
        return LoopedStep(step, layers_by_marks(loop.bodies[0], batch))
    count = None if layers.num_layers == "auto" else int(layers.num_layers)
    loop_layers = find_layers(loop.bodies[0], count, batch=batch)
    if count is None and len(loop_layers) < at_least:
        loop_layers = find_layers(loop.bodies[0], at_least, batch=batch)
    return LoopedStep(step, loop_layers)


def slice_into(
    looped: LoopedStep,
    specs: Sequence[StageSpec],
    owners: Mapping[int, int] | None = None,
    stacks: Stacks | None = WHOLE_STACKS,
) -> SlicedStep:
    """A step per stage. `owners`, `stacks`: as `slice_step` takes them."""
    again = [i for spec in specs if spec.remat for i in range(*spec.layers)]
    stage_of = [s for s, spec in enumerate(specs) for _ in range(*spec.layers)]
    looped = looped.recomputing(again).recomputing_apart(stage_of)
    return slice_step(looped.step, looped.attached, stage_of, owners, stacks)


def stacks_by_layer(looped: LoopedStep) -> SplitStep:
    """The step with its stacks split over layers, as if these had been written out."""
    layers = looped.attached
    return split_stacks(looped.step, layers.layer_of, len(looped.layers))


def with_even_stacks(looped: LoopedStep, specs: Sequence[StageSpec]) -> list[StageSpec] | None:
    """Stages like these, but alike, so that a stack that is split over them is one array: each has
    as many rows of all stacks, on submeshes of one shape. None if there are no such stages."""
    rows = looped.stack_rows
    sizes = {ends[-1] for ends in rows}
    if len(sizes) != 1 or sizes.pop() % len(specs) or len({s.submesh for s in specs}) > 1:
        return None
    cuts = [0]
    for stage in range(1, len(specs)):
        fits = [
            cut
            for cut in range(cuts[-1] + 1, len(looped.layers))
            if all(ends[cut] * len(specs) == ends[-1] * stage for ends in rows)
        ]
        if not fits:
            return None
        cuts.append(fits[0])
    ranges = pairwise([*cuts, len(looped.layers)])
    shape = Counter(spec.mesh_shape for spec in specs).most_common(1)[0][0]
    any_remat = any(spec.remat for spec in specs)
    return [StageSpec(layers, specs[0].submesh, shape, any_remat) for layers in ranges]


_MOST_STAGES = 8  # of a pipeline that is searched at first


def first_micro_batches(step: TracedStep, cluster: ClusterSpec, budget: float = inf) -> int:
    """The number of micro-batches to search stages at first: four for every stage, if stages are
    hosts, or as many as memory asks for, but with two rows for every device of a host, or one if
    memory asks for it, so that a stage can still split them. On many hosts stages are larger: with
    few rows, tables would know nothing of splitting them. `budget`: the bytes that a device may
    hold."""
    rows = batch_rows(step)
    needed = _needed_micro_batches(step, cluster, budget)
    most = max(2, rows // (2 * cluster.devices_per_host))
    if needed > most:
        most = max(most, rows // cluster.devices_per_host)
    num_stages = min(max(2, cluster.num_hosts), _MOST_STAGES)
    wanted = min(most, max(4 * num_stages, needed))
    divisors = [n for n in range(1, rows + 1) if rows % n == 0] or [1]  # of no rows
    return min(divisors, key=lambda n: abs(n - wanted))


def _needed_micro_batches(step: TracedStep, cluster: ClusterSpec, budget: float) -> int:
    """How many micro-batches let the first of several stages keep what is in flight there without
    recomputation: about a third of what the layers' backward pass reads (see `rewrite.residuals`),
    for as many micro-batches as there are stages, beside its share of the state."""
    if budget == inf:
        return 1
    num_stages = min(max(2, cluster.num_hosts), _MOST_STAGES)
    layers = find_layers(step.program, batch=step.batch)
    state = sum(aval_bytes(step.avals[i]) for i, _ in step.state) / cluster.num_devices
    residuals = sum(layer.residual_bytes for layer in layers) / 3 / cluster.num_devices
    room = max(budget - state, 0.1 * budget) / 2
    return ceil(num_stages * residuals / room)


def batch_rows(step: TracedStep) -> int:
    for index in step.batch:
        if step.avals[index].shape:
            return step.avals[index].shape[0]
    raise TraceError(
        f"{step.name}: a pipeline needs a batch that can be cut into micro-batches, but no array "
        "of its arguments is one. Pass the batch as argument 1, or name it with batch_argnums."
    )


def even_ranges(work: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Contiguous non-empty ranges whose largest sum of work is least."""
    total = np.concatenate(([0.0], np.cumsum(work)))
    num = len(work)
    best = np.full((count + 1, num + 1), inf)
    cut = np.zeros((count + 1, num + 1), dtype=int)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, num - (count - k) + 1):
            for start in range(k - 1, end):
                worst = max(best[k - 1, start], total[end] - total[start])
                if worst < best[k, end]:
                    best[k, end], cut[k, end] = worst, start
    ends = [num]
    for k in range(count, 0, -1):
        ends.append(int(cut[k, ends[-1]]))
    return list(pairwise(ends[::-1]))


def halved(specs: Sequence[StageSpec], looped: LoopedStep) -> list[StageSpec]:
    """Twice as many stages as meshes, for an interleaved schedule: the same layers cut evenly."""
    count = 2 * len(specs)
    if len({spec.submesh for spec in specs}) > 1 or count > len(looped.layers):
        return list(specs)
    ranges = even_ranges([layer.flops for layer in looped.layers], count)
    any_remat = any(spec.remat for spec in specs)
    return [StageSpec(layers, specs[0].submesh, None, any_remat) for layers in ranges]

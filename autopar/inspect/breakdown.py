"""Where the time of a step goes: from `ParallelPlan` to `StepShares`, rates and sentences.

Seconds are per step, averaged over the devices in use. The cost model adds up compute and
communication, so all communication is exposed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.details import (
    OTHER_LAYOUT,
    PARTIAL_SUMS,
    REPLICATED,
    STATE,
    WINDOWS,
    CollectiveCost,
)
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, format_seconds, layer_names, name_pattern, name_skeleton

_PRODUCTS = (
    "dot_general",
    "conv_general_dilated",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
)
_ARRAY = re.compile(r"\w+\[[\d,*]*\]$")
_HALF = ("bfloat16", "float16")


def mesh_plans(plan: ParallelPlan) -> list[ParallelPlan]:
    """The plans of its meshes: one per stage, or itself."""
    return [stage.plan or plan for stage in plan.stages]


def num_devices(plan: ParallelPlan) -> int:
    """Devices in use."""
    used = {device for stage in plan.stages for device in stage.devices}
    return len(used) or plan.num_devices


@dataclass(frozen=True)
class StepShares:
    """Seconds. `communication`: what compute waits for; `bubble`: waiting for other stages;
    `launch`: starting programs; `host`: fetching state from host memory while other state is stored
    there; `hidden`: communication under compute, which is no part of the step."""

    step: float
    compute: float
    communication: float
    bubble: float = 0.0
    launch: float = 0.0
    host: float = 0.0
    hidden: float = 0.0


def mesh_shares(plan: ParallelPlan) -> list[StepShares]:
    """Of each mesh in turn, by the predicted timeline: what its programs take beyond compute and
    communication is launching them, and the rest of the step is waiting for other meshes. A mesh
    that is alone waits for nobody."""
    on_mesh: dict[int, list[ParallelPlan]] = defaultdict(list)
    for stage in plan.stages:
        on_mesh[stage.mesh].append(stage.plan or plan)
    step = plan.estimated_step_s
    is_alone = len(on_mesh) == 1
    busy = None if is_alone or not plan.schedule else plan.timeline().busy_s()
    shares = []
    for mesh in sorted(on_mesh):
        modules = [module for mesh_plan in on_mesh[mesh] for module in mesh_plan.modules]
        compute = sum(module.compute_s for module in modules)
        hidden = sum(mesh_plan.hidden_s or 0.0 for mesh_plan in on_mesh[mesh])
        communication = sum(module.communication_s for module in modules) - hidden
        busy_s = step if is_alone else compute + communication if busy is None else busy[mesh]
        host = sum(p.host.transfer_s for p in on_mesh[mesh] if p.host is not None)
        known = compute + communication + host
        launch = _rest(busy_s, known)
        bubble = _rest(step, known + launch)
        shares.append(StepShares(step, compute, communication, bubble, launch, host, hidden))
    return shares


def _rest(whole: float, part: float) -> float:
    """What is left of the whole, but for rounding."""
    return whole - part if whole - part > 1e-9 * whole else 0.0


def shares_of(plan: ParallelPlan) -> StepShares:
    """Averages over the devices in use."""
    size = {stage.mesh: len(stage.devices) or plan.num_devices for stage in plan.stages}
    parts = list(zip(sorted(size), mesh_shares(plan), strict=True))
    whole = sum(size.values())

    def mean(name: str) -> float:
        return sum(getattr(share, name) * size[mesh] for mesh, share in parts) / whole

    return StepShares(
        plan.estimated_step_s,
        mean("compute"),
        mean("communication"),
        mean("bubble"),
        mean("launch"),
        mean("host"),
        mean("hidden"),
    )


def bubble_share(plan: ParallelPlan) -> float:
    """The share of the predicted step in which devices wait for other stages, on average."""
    shares = shares_of(plan)
    return shares.bubble / shares.step if shares.step else 0.0


@dataclass(frozen=True)
class AchievedRates:
    """FLOP/s of one device in matrix products and convolutions.

    model:           each counted once.
    distinct:        and recomputation.
    computed:        and redundant work, which several devices repeat.
    peak:            the vendor's, in the precision of most of the work.
    redundant_along: axes along which devices repeat more than a tenth of the work.
    """

    model: float
    distinct: float
    computed: float
    peak: float
    redundant_along: tuple[str, ...] = ()


def rates_of(plan: ParallelPlan) -> AchievedRates | None:
    """None for a plan without a cluster or details."""
    if plan.cluster is None or not plan.estimated_step_s or not plan.is_timed:
        return None
    model = distinct = computed = 0.0
    precision = {True: 0.0, False: 0.0}
    repeated: dict[str, float] = defaultdict(float)
    for mesh_plan in mesh_plans(plan):
        if mesh_plan.details is None:
            return None
        ops = mesh_plan.details.ops
        product = [text in _PRODUCTS for text in ops.strings]
        half = [text.startswith(_HALF) for text in ops.strings]
        sizes = list(zip(mesh_plan.axis_names, mesh_plan.mesh_shape, strict=True))
        for name, array, words, flops in zip(
            ops.name, ops.array, ops.words, ops.flops, strict=True
        ):
            if not product[name]:
                continue
            all_flops = flops * mesh_plan.num_devices
            copies = 1
            for axis, size in sizes:
                if size > 1 and f"{axis}: {REPLICATED}" in ops.strings[words]:
                    copies *= size
                    repeated[axis] += all_flops
            computed += all_flops
            distinct += all_flops / copies
            precision[half[array]] += flops
        model += mesh_plan.details.model_flops
    device_s = plan.estimated_step_s * num_devices(plan)
    device = plan.cluster.spec
    peak = device.flops_16bit if precision[True] > precision[False] else device.flops_32bit
    along = tuple(axis for axis, flops in repeated.items() if flops > 0.1 * computed)
    return AchievedRates(model / device_s, distinct / device_s, computed / device_s, peak, along)


def is_array_type(value: str) -> bool:
    """Whether a value is known by its type only: neither an input nor derived from one."""
    return _ARRAY.match(value) is not None


def cause_text(one: CollectiveCost) -> str:
    """What a collective moves and why, in a few words."""
    if one.value.startswith("gradient of "):
        what = "gradients"
    else:
        what = "activations" if is_array_type(one.value) else "parameters"
    return {
        PARTIAL_SUMS: f"partial sums of {what}",
        OTHER_LAYOUT: f"resharded {what}",
        STATE: "updated state, back to its layout",
        WINDOWS: "halos of neighbours",
    }.get(one.cause, one.cause)


# -- what limits the step


def limits_of(plan: ParallelPlan) -> list[str]:
    """What limits the step, the largest share first, in sentences."""
    if not plan.estimated_step_s or not plan.is_timed:
        return []
    shares = shares_of(plan)
    parts = {
        "compute": shares.compute / shares.step,
        "communication": shares.communication / shares.step,
        "bubble": shares.bubble / shares.step,
        "launch": shares.launch / shares.step if shares.compute else 0.0,
        "host": shares.host / shares.step,
    }
    sentences = []
    for name, part in sorted(parts.items(), key=lambda item: -item[1]):
        if part >= (0.5 if name == "compute" else 0.1):
            text = {
                "compute": _compute,
                "communication": _communication,
                "launch": _launch,
                "host": _host,
            }
            if name == "bubble":
                sentences.append(_bubble(plan, part, parts["launch"]))
            else:
                sentences.append(text[name](plan, part))
    return [*sentences, *_redundant(plan), *_memory(plan)]


def _compute(plan: ParallelPlan, part: float) -> str:
    text = f"Compute takes {part:.0%} of the step"
    seconds: dict[str, float] = defaultdict(float)
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for mesh_plan in mesh_plans(plan):
        for module, compute_s in _module_seconds(mesh_plan):
            skeleton = name_skeleton(module)
            seconds[skeleton] += compute_s * mesh_plan.num_devices
            names[skeleton][module] = None
    if not seconds:
        return f"{text}."
    skeleton, most = max(seconds.items(), key=lambda item: item[1])
    whole = shares_of(plan).compute * num_devices(plan)
    name = name_pattern(list(names[skeleton]))
    return f"{text}; the largest part, {most / whole:.0%} of that, is in {name}."


def _module_seconds(plan: ParallelPlan) -> Iterator[tuple[str, float]]:
    """(module, compute seconds) of ops that have a module."""
    if plan.details is None:
        yield from ((cost.module, cost.compute_s) for cost in plan.modules if cost.module)
        return
    ops = plan.details.ops
    for module, compute_s in zip(ops.module, ops.compute_s, strict=True):
        if ops.strings[module]:
            yield ops.strings[module], compute_s


def _communication(plan: ParallelPlan, part: float) -> str:
    text = f"Communication takes {part:.0%} of the step"
    seconds: dict[tuple[str, tuple[str, ...], str], float] = defaultdict(float)
    for mesh_plan in mesh_plans(plan):
        for one in mesh_plan.details.collectives if mesh_plan.details is not None else ():
            seconds[one.kind, one.axes, cause_text(one)] += one.seconds * mesh_plan.num_devices
    if not seconds:
        return f"{text}."
    whole = sum(seconds.values())
    worst = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [
        f"{share / whole:.0%} of that is {kind} along {' and '.join(axes)} ({cause})"
        for (kind, axes, cause), share in worst[:2]
        if share >= 0.2 * whole or share == worst[0][1]
    ]
    return f"{text}: {', '.join(parts)}."


def _launch(plan: ParallelPlan, part: float) -> str:
    text = f"Starting programs takes {part:.0%} of the step"
    if not plan.schedule:
        return f"{text}: it is small for these devices."
    runs = [event for event in plan.timeline().events if event.kind == "run"]
    each_s = shares_of(plan).launch / max(1.0, len(runs) / len({e.mesh for e in runs}))
    batches = plan.num_micro_batches
    advice = "fewer micro-batches" if batches > 1 else "fewer stages"
    return (
        f"{text}: each mesh starts {len(runs) // len({e.mesh for e in runs})} programs of "
        f"{format_seconds(each_s)} overhead each. Larger batches or {advice} would help, and one "
        "mesh has a single program."
    )


def _host(plan: ParallelPlan, part: float) -> str:
    held = sum(p.host.num_bytes for p in mesh_plans(plan) if p.host is not None)
    return (
        f"Fetching {format_bytes(held)} of state from host memory takes {part:.0%} of the step: it "
        "takes as long for a larger batch."
    )


def _bubble(plan: ParallelPlan, part: float, launch: float) -> str:
    """`launch`: the share of the step in which programs are started, of which every micro-batch
    has some."""
    text = f"Pipeline bubbles take {part:.0%} of the step"
    costs = [stage.forward_s + stage.backward_s for stage in plan.stages]
    slowest = max(range(len(costs)), key=costs.__getitem__)
    mean = sum(costs) / len(costs)
    sends = [stage.transfer_s for stage in plan.stages]
    longest = max(range(len(sends)), key=sends.__getitem__)
    if sends[longest] > 0.25 * mean:
        return (
            f"{text}: per micro-batch, transfers to and from stage {longest} take "
            f"{format_seconds(sends[longest])}, while a stage computes {format_seconds(mean)}."
        )
    if mean and costs[slowest] > 1.1 * mean:
        return f"{text}; stage {slowest} takes {costs[slowest] / mean:.2f} times the average."
    if launch >= 0.1:
        return (
            f"{text}: the pipeline fills and drains. More micro-batches would not help: each has "
            f"programs to start, and starting takes {launch:.0%} of the step already."
        )
    return f"{text}: the pipeline fills and drains; more micro-batches would shorten them."


def _redundant(plan: ParallelPlan) -> list[str]:
    rates = rates_of(plan)
    if rates is None or rates.computed <= 1.05 * rates.distinct:
        return []
    part = 1 - rates.distinct / rates.computed
    along = f" along {' and '.join(rates.redundant_along)}" if rates.redundant_along else ""
    return [
        f"{part:.0%} of the matrix products are redundant: devices{along} repeat the same work, "
        "because splitting it would cost more communication or is not possible."
    ]


def _memory(plan: ParallelPlan) -> list[str]:
    sentences = []
    bounded = [p for p in mesh_plans(plan) if p.solver.unbounded and p.solver.objective]
    if bounded:
        worst = max(bounded, key=lambda p: p.solver.objective / p.solver.unbounded[0])
        free_s, free_bytes = worst.solver.unbounded
        what = "the step" if worst is plan else worst.name
        sentences.append(
            f"The memory budget costs time: without it {what} would take {format_seconds(free_s)} "
            f"instead of {format_seconds(worst.solver.objective)}, with a peak of "
            f"{format_bytes(free_bytes)} instead of {format_bytes(worst.estimated_peak_bytes)}."
        )
    rates = rates_of(plan)
    is_remat = plan.remat or any(stage.remat for stage in plan.stages)
    if is_remat and rates is not None and rates.distinct > rates.model:
        what = layer_names(plan.remat) if plan.remat else "some stages' layers"
        more = rates.distinct / rates.model - 1
        sentences.append(
            f"To save memory, the backward pass recomputes {what}: {more:.0%} more work in matrix "
            "products."
        )
    return sentences

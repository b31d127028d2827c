"""`autopar report`, `explain`, `diff` and `devices`: saved plans and known devices, as text.

JAX is imported by the commands that read a plan: `autopar devices` answers at once.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.targets import check_target
from autopar.errors import PlanError
from autopar.ir.devices import DEVICES
from autopar.ir.text import table

if TYPE_CHECKING:
    from autopar.ir.plan import ParallelPlan
    from autopar.ir.timeline import Timeline


def report(arguments: Namespace) -> int:
    plan = _load(arguments.plan)
    target = arguments.output or str(Path(arguments.plan).with_suffix(".html"))
    check_target(target, "--output")
    compare = {Path(other).stem: _load(other) for other in arguments.compare}
    plan.report(target, measured=_measured(arguments.measured, plan), compare=compare)
    print(f"report: {target}")
    return 0


def _measured(path: str | None, plan: ParallelPlan) -> Timeline | None:
    """The last step of a trace that ran on as many meshes as the plan."""
    if path is None:
        return None
    from autopar.inspect.record import read_trace

    timelines = read_trace(path)
    num_meshes = len({stage.mesh for stage in plan.stages})
    matching = [timeline for timeline in timelines if timeline.num_meshes == num_meshes]
    if not matching:
        meshes = "1 mesh" if num_meshes == 1 else f"{num_meshes} meshes"
        raise PlanError(
            f"--measured {path}: the plan has {meshes}, but none of the {len(timelines)} traced "
            "steps has. Give the trace of a run with this plan."
        )
    return matching[-1]


def _load(path: str) -> ParallelPlan:
    from autopar.ir.plan import ParallelPlan

    return ParallelPlan.load(path)


def explain(arguments: Namespace) -> int:
    plan = _load(arguments.plan)
    detail = "full" if arguments.full else "short"
    print(plan.explain(arguments.path, depth=arguments.depth, detail=detail))
    return 0


def diff(arguments: Namespace) -> int:
    from autopar.inspect.diff import diff as compare

    print(compare(_load(arguments.first), _load(arguments.second)))
    return 0


def devices(arguments: Namespace) -> int:
    header = ("device", "16-bit", "32-bit", "memory", "bandwidth", "link", "network", "efficiency")
    rows = [
        (
            spec.name,
            f"{spec.flops_16bit / 1e12:g} TFLOP/s",
            f"{spec.flops_32bit / 1e12:g} TFLOP/s",
            f"{spec.memory_bytes / 1e9:g} GB",
            f"{spec.memory_bandwidth / 1e9:,.0f} GB/s",
            f"{spec.intra_host_bandwidth / 1e9:g} GB/s",
            f"{spec.host_bandwidth * 8 / 1e9:g} Gb/s",
            f"{spec.efficiency:.0%}",
        )
        for spec in DEVICES.values()
    ]
    print("\n".join(table(header, rows)))
    print()
    print("16-bit, 32-bit: peak rates of matrix products; efficiency: the assumed share of them.")
    print("link: per device and direction, inside a host; network: of a whole host.")
    return 0


COMMANDS = {"report": report, "explain": explain, "diff": diff, "devices": devices}

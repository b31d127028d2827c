"""XLA's costs of a plan's programs next to the predicted ones: `VerifyReport` and its text.

Costs are per device: of a program for one run, of a mesh for a whole step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from autopar.ir.codec import encode
from autopar.ir.judged import JudgedStep
from autopar.ir.text import format_bytes, format_seconds, table
from autopar.measure.verify.jobs import Collectives, ProgramCosts

FORMAT = "autopar-verify"
FORMAT_VERSION = 1

_UNKNOWN = "–"


@dataclass(frozen=True)
class VerifiedProgram:
    """A compiled program. `pieces`: the stage programs that it is, since equal ones are compiled
    once; `runs`: how often each runs in a step; `figures`: its costs."""

    pieces: tuple[str, ...]
    runs: tuple[int, ...]
    topology: tuple[int, int]
    figures: ProgramCosts


@dataclass(frozen=True)
class Compared:
    """XLA's value and the predicted one; None if the plan has none."""

    xla: float
    predicted: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over XLA's."""
        return self.predicted / self.xla if self.predicted is not None and self.xla else None


@dataclass(frozen=True)
class ComparedCollectives:
    """All collectives of one kind on one mesh."""

    kind: str
    count: Compared
    sent_bytes: Compared


@dataclass(frozen=True)
class VerifiedMesh:
    """A stage's mesh, or the only one.

    peak_bytes:   the maximum over its programs of what XLA says the program uses (arguments,
                  outputs and temporaries, donated buffers once) plus all other live buffers.
    buffer_bytes: the most that buffers hold between programs.
    limit_bytes:  the device memory that a step may use.
    budget_bytes: the plan's memory budget, or None.
    judged:       the mesh's programs as the judge reads them from XLA's schedule, all runs of a
                  step; None if they were not judged.
    predicted_s:  the predicted step, if this is the only mesh.
    """

    mesh: int
    stages: tuple[int, ...]
    topology: tuple[int, int]
    mesh_shape: tuple[int, ...]
    peak_bytes: Compared
    buffer_bytes: float
    limit_bytes: float
    budget_bytes: float | None
    dot_flops: Compared
    collectives: tuple[ComparedCollectives, ...]
    judged: JudgedStep | None = None
    predicted_s: float | None = None

    @property
    def step_s(self) -> Compared | None:
        """The judged seconds of a step beside the predicted ones; None if it was not judged."""
        return None if self.judged is None else Compared(self.judged.step_s, self.predicted_s)

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit; negative if memory is left."""
        return self.peak_bytes.xla - self.limit_bytes

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0


@dataclass(frozen=True)
class VerifyReport:
    """The result of `autopar.verify`. `str(report)` has tables, `to_json()` everything.

    name:              of the step.
    target, device:    the GPU that it was compiled for, and its name.
    versions:          of jax, jaxlib and CUDA.
    is_pipeline, num_micro_batches: of the plan.
    programs:          XLA's memory, collectives and FLOPs of each.
    meshes:            predicted and compiled costs of each mesh, and its memory limit.
    seconds:           of the verification.
    """

    name: str
    target: str
    device: str
    versions: tuple[tuple[str, str], ...]
    is_pipeline: bool
    num_micro_batches: int
    programs: tuple[VerifiedProgram, ...]
    meshes: tuple[VerifiedMesh, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether every mesh stays within its memory limit, according to XLA."""
        return all(mesh.fits for mesh in self.meshes)

    @property
    def peak_bytes(self) -> float:
        """XLA's peak of the fullest mesh."""
        return max(mesh.peak_bytes.xla for mesh in self.meshes)

    @property
    def excess_bytes(self) -> float:
        """The largest excess of any mesh; negative if all have memory left."""
        return max(mesh.excess_bytes for mesh in self.meshes)

    def problem(self) -> str | None:
        """Which mesh does not fit, by how much, and what would help; None if all fit."""
        tight = max(self.meshes, key=lambda mesh: mesh.excess_bytes)
        if tight.fits:
            return None
        where = self.place(tight)
        lines = [
            f"{self.name} does not fit: {where} needs {format_bytes(tight.peak_bytes.xla)} per "
            f"device as XLA compiles it, {format_bytes(tight.excess_bytes)} more than the "
            f"{format_bytes(tight.limit_bytes)} that a step may use on {self.target}.",
            "Possible remedies:",
            *_remedies(tight, self.num_micro_batches),
        ]
        return "\n".join(lines)

    def place(self, mesh: VerifiedMesh) -> str:
        """A mesh by the stages it runs."""
        if not self.is_pipeline:
            return "the mesh " + "×".join(map(str, mesh.mesh_shape))
        numbers = ", ".join(map(str, mesh.stages))
        return (
            f"stage {numbers}" if len(mesh.stages) == 1 else f"mesh {mesh.mesh} (stages {numbers})"
        )

    def __str__(self) -> str:
        return report_text(self)

    def to_json(self) -> dict[str, Any]:
        """The report as data for `json.dumps`."""
        head = {"format": FORMAT, "version": FORMAT_VERSION, "fits": self.fits}
        return {**head, **encode(self), "versions": dict(self.versions)}

    def save(self, path: str | Path) -> None:
        """Write the report to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _remedies(mesh: VerifiedMesh, num_micro_batches: int) -> list[str]:
    remedies = []
    ratio = mesh.peak_bytes.ratio
    if ratio is not None and ratio < 1:
        budget = mesh.limit_bytes * ratio
        remedies.append(
            f"  - a smaller budget: the plan predicted {ratio:.2f} of XLA's peak, so a plan with "
            f"ShardingOptions(memory_budget_bytes={budget:.3g}) should fit"
        )
    remedies.append(
        f"  - smaller micro-batches (num_micro_batches={2 * num_micro_batches}) or a smaller batch"
    )
    remedies.append('  - recomputation of activations: ShardingOptions(remat="all")')
    count = mesh.topology[0] * mesh.topology[1]
    more = ceil(count * mesh.peak_bytes.xla / mesh.limit_bytes)
    remedies.append(f"  - about {more} devices instead of {count}, or devices with more memory")
    return remedies


def compared_collectives(
    of_xla: tuple[Collectives, ...], predicted: tuple[Collectives, ...] | None
) -> tuple[ComparedCollectives, ...]:
    """Kind by kind; a kind missing on one side counts as zero."""
    by_plan = {collective.kind: collective for collective in predicted or ()}
    by_xla = {collective.kind: collective for collective in of_xla}
    rows = []
    for kind in sorted({*by_plan, *by_xla}):
        none = Collectives(kind, 0, 0.0)
        xla, plan = by_xla.get(kind, none), by_plan.get(kind, none)
        is_known = predicted is not None
        rows.append(
            ComparedCollectives(
                kind,
                Compared(xla.count, plan.count if is_known else None),
                Compared(xla.sent_bytes, plan.sent_bytes if is_known else None),
            )
        )
    return tuple(rows)


# -- as text


def report_text(report: VerifyReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions)
    lines = [
        f"{report.name}, compiled for {report.device} ({report.target}) without a GPU: {versions}",
        "",
        "Memory per device",
        *table(
            ("where", "mesh", "predicted", "XLA", "ratio", "limit", "verdict"),
            [_memory_row(report, mesh) for mesh in report.meshes],
        ),
        "",
        "Compiled programs, per device and run",
        *table(
            (
                "program", "runs", "arguments", "outputs", "temporaries", "aliased", "total",
                "dot TFLOP", "collectives", "compile time",
            ),
            [_program_row(program) for program in report.programs],
        ),
        "",
        "Matrix products and collectives, per device and step: count, bytes sent",
        *table(
            ("where", "what", "predicted", "XLA", "ratio"),
            [row for mesh in report.meshes for row in _work_rows(report, mesh)],
        ),
        "",
        *_time_lines(report),
        *_notes(report),
    ]  # fmt: skip
    problem = report.problem()
    if problem is not None:
        lines += ["", problem]
    return "\n".join(lines)


def _memory_row(report: VerifyReport, mesh: VerifiedMesh) -> tuple[str, ...]:
    verdict = (
        f"fits, {format_bytes(-mesh.excess_bytes)} left"
        if mesh.fits
        else f"does not fit, {format_bytes(mesh.excess_bytes)} over"
    )
    return (
        report.place(mesh) if report.is_pipeline else "step",
        "×".join(map(str, mesh.mesh_shape)),
        _bytes(mesh.peak_bytes.predicted),
        format_bytes(mesh.peak_bytes.xla),
        _ratio(mesh.peak_bytes),
        format_bytes(mesh.limit_bytes),
        verdict,
    )


def _program_row(program: VerifiedProgram) -> tuple[str, ...]:
    costs = program.figures
    others = len(program.pieces) - 1
    collectives = ", ".join(
        f"{collective.kind} {collective.count:.0f} ({format_bytes(collective.sent_bytes)})"
        for collective in costs.collectives
    )
    return (
        program.pieces[0] + (f" and {others} equal" if others else ""),
        " ".join(map(str, sorted(set(program.runs)))),
        format_bytes(costs.argument_bytes),
        format_bytes(costs.output_bytes),
        format_bytes(costs.temp_bytes),
        format_bytes(costs.alias_bytes),
        format_bytes(costs.peak_bytes),
        f"{costs.dot_flops / 1e12:.3g}",
        collectives or "none",
        f"{costs.seconds:.1f} s",
    )


def _work_rows(report: VerifyReport, mesh: VerifiedMesh) -> list[tuple[str, ...]]:
    where = report.place(mesh) if report.is_pipeline else "step"
    flops = mesh.dot_flops
    rows: list[tuple[str, ...]] = [
        (
            where,
            "dot TFLOP",
            _UNKNOWN if flops.predicted is None else f"{flops.predicted / 1e12:.4g}",
            f"{flops.xla / 1e12:.4g}",
            _ratio(flops),
        )
    ]
    for collective in mesh.collectives:
        known = collective.count.predicted is not None
        rows.append(
            (
                where,
                collective.kind,
                f"{collective.count.predicted:.0f}, {_bytes(collective.sent_bytes.predicted)}"
                if known
                else _UNKNOWN,
                f"{collective.count.xla:.0f}, {format_bytes(collective.sent_bytes.xla)}",
                _ratio(collective.sent_bytes),
            )
        )
    if len(mesh.collectives) > 1:
        rows.append((where, *_sum_cells([c.sent_bytes for c in mesh.collectives])))
    return rows


def _sum_cells(parts: Sequence[Compared]) -> tuple[str, ...]:
    xla = sum(part.xla for part in parts)
    known = [part.predicted for part in parts if part.predicted is not None]
    if len(known) < len(parts):
        return "all collectives", _UNKNOWN, format_bytes(xla), _UNKNOWN
    ratio = f"{sum(known) / xla:.2f}" if xla else _UNKNOWN
    return "all collectives", format_bytes(sum(known)), format_bytes(xla), ratio


def _time_lines(report: VerifyReport) -> list[str]:
    """Of each program, and of a step on one mesh; nothing if none was judged."""
    judged = [(one, one.figures.times) for one in report.programs]
    rows = [
        (
            program.pieces[0],
            *map(format_seconds, (t.compute_s, t.links_s, t.exposed_s, t.step_s)),
        )
        for program, t in judged
        if t is not None
    ]
    if not rows:
        return []
    lines = [
        "Time per run, read from XLA's schedule",
        *table(("program", "kernels", "collectives", "exposed", "in all"), rows),
    ]
    step = report.meshes[0].step_s
    if step is not None and step.predicted is not None:
        lines += [
            f"The plan predicted {format_seconds(step.predicted)} for the step, {_ratio(step)} of "
            f"the {format_seconds(step.xla)} read here."
        ]
    return [*lines, ""]


def _notes(report: VerifyReport) -> list[str]:
    notes = [
        "ratio: predicted / XLA. XLA's memory is arguments + outputs + temporaries − aliased, plus",
        "other live buffers in a pipeline. XLA merges collectives of a kind and may replace one",
        "kind by another: compare the bytes of all kinds together rather than counts. Dot TFLOP",
        "include matrix products and convolutions.",
    ]
    for mesh in report.meshes:
        if mesh.fits and mesh.budget_bytes is not None and mesh.peak_bytes.xla > mesh.budget_bytes:
            over = format_bytes(mesh.peak_bytes.xla - mesh.budget_bytes)
            notes.append(
                f"{report.place(mesh)} exceeds the plan's budget of "
                f"{format_bytes(mesh.budget_bytes)} by {over}, but fits the device."
            )
    return notes


def _bytes(count: float | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)


def _ratio(compared: Compared) -> str:
    return _UNKNOWN if compared.ratio is None else f"{compared.ratio:.2f}"

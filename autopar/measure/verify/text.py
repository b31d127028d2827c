"""A `VerifyReport` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.ir.text import format_bytes, rows_of

if TYPE_CHECKING:
    from autopar.measure.verify.report import Compared, VerifiedMesh, VerifiedProgram, VerifyReport

_UNKNOWN = "–"


def report_text(report: VerifyReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions)
    lines = [
        f"{report.name}, compiled for {report.device} ({report.target}) without one: {versions}",
        "",
        "Memory per device",
        *rows_of(
            ("where", "mesh", "predicted", "XLA", "ratio", "may use", "verdict"),
            [_memory_row(report, mesh) for mesh in report.meshes],
        ),
        "",
        "Programs as XLA compiles them, per device and run",
        *rows_of(
            (
                "program", "runs", "arguments", "outputs", "temporaries", "aliased", "total",
                "dot TFLOP", "collectives", "compiled in",
            ),
            [_program_row(program) for program in report.programs],
        ),
        "",
        "Products and collectives per device and step: number and bytes sent",
        *rows_of(
            ("where", "what", "predicted", "XLA", "ratio"),
            [row for mesh in report.meshes for row in _work_rows(report, mesh)],
        ),
        "",
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
        else f"does not fit, {format_bytes(mesh.excess_bytes)} too much"
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
    own = program.figures
    others = len(program.pieces) - 1
    collectives = ", ".join(
        f"{one.kind} {one.count:.0f} ({format_bytes(one.sent_bytes)})" for one in own.collectives
    )
    return (
        program.pieces[0] + (f" and {others} equal" if others else ""),
        " ".join(map(str, sorted(set(program.runs)))),
        format_bytes(own.argument_bytes),
        format_bytes(own.output_bytes),
        format_bytes(own.temp_bytes),
        format_bytes(own.alias_bytes),
        format_bytes(own.peak_bytes),
        f"{own.dot_flops / 1e12:.3g}",
        collectives or "none",
        f"{own.seconds:.1f} s",
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
    for one in mesh.collectives:
        known = one.count.predicted is not None
        rows.append(
            (
                where,
                one.kind,
                f"{one.count.predicted:.0f}, {_bytes(one.sent_bytes.predicted)}"
                if known
                else _UNKNOWN,
                f"{one.count.xla:.0f}, {format_bytes(one.sent_bytes.xla)}",
                _ratio(one.sent_bytes),
            )
        )
    if len(mesh.collectives) > 1:
        rows.append((where, *_sum_cells([one.sent_bytes for one in mesh.collectives])))
    return rows


def _sum_cells(parts: Sequence[Compared]) -> tuple[str, ...]:
    xla = sum(part.xla for part in parts)
    known = [part.predicted for part in parts if part.predicted is not None]
    if len(known) < len(parts):
        return "all collectives", _UNKNOWN, format_bytes(xla), _UNKNOWN
    ratio = f"{sum(known) / xla:.2f}" if xla else _UNKNOWN
    return "all collectives", format_bytes(sum(known)), format_bytes(xla), ratio


def _notes(report: VerifyReport) -> list[str]:
    notes = [
        "ratio: predicted over XLA's. XLA's memory is arguments + outputs + temporaries − aliased",
        "and, in a pipeline, what lies in other buffers meanwhile. XLA merges collectives of one",
        "kind, and turns some kinds into others: compare bytes, of all kinds together, rather than",
        "numbers. Dot TFLOP are those of matrix products and convolutions.",
    ]
    for mesh in report.meshes:
        if mesh.fits and mesh.budget_bytes is not None and mesh.peak_bytes.xla > mesh.budget_bytes:
            over = format_bytes(mesh.peak_bytes.xla - mesh.budget_bytes)
            notes.append(
                f"{report.place(mesh)} is {over} over the plan's budget of "
                f"{format_bytes(mesh.budget_bytes)}, but fits the device."
            )
    return notes


def _bytes(count: float | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)


def _ratio(compared: Compared) -> str:
    return _UNKNOWN if compared.ratio is None else f"{compared.ratio:.2f}"

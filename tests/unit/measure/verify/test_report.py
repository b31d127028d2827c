import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.ir.judged import JudgedStep
from autopar.measure.verify.jobs import Collectives, ProgramCosts
from autopar.measure.verify.report import (
    Compared,
    VerifiedMesh,
    VerifiedProgram,
    VerifyReport,
    compared_collectives,
)

GIB = 2**30


def mesh(peak_gib: float, predicted_gib: float = 8.0, **changes) -> VerifiedMesh:
    made = VerifiedMesh(
        mesh=0,
        stages=(0,),
        topology=(1, 8),
        mesh_shape=(2, 4),
        peak_bytes=Compared(peak_gib * GIB, predicted_gib * GIB),
        buffer_bytes=GIB,
        limit_bytes=10 * GIB,
        budget_bytes=10 * GIB,
        dot_flops=Compared(4e12, 4e12),
        collectives=compared_collectives(
            (Collectives("all-gather", 4, 2.0 * GIB), Collectives("all-reduce", 1, 8.0)),
            (Collectives("all-gather", 10, 1.0 * GIB), Collectives("all-to-all", 2, 4.0)),
        ),
    )
    return replace(made, **changes)


def report(*meshes: VerifiedMesh, is_pipeline: bool = False) -> VerifyReport:
    figures = ProgramCosts(
        3 * GIB, 2 * GIB, 5 * GIB, GIB, (Collectives("all-gather", 4, 2.0 * GIB),), 1e12, 7.5
    )
    programs = (VerifiedProgram(("stage1_forward", "stage2_forward"), (4, 4), (1, 8), figures),)
    return VerifyReport(
        "train_step", "h100-80gb", "NVIDIA H100", (("jax", "1.2"), ("CUDA", "13")), is_pipeline,
        4, programs, meshes, 9.0,
    )  # fmt: skip


def test_what_fits():
    made = report(mesh(9.0), mesh(9.5))
    assert made.fits
    assert made.problem() is None
    assert made.excess_bytes == -0.5 * GIB
    assert made.peak_bytes == 9.5 * GIB


def test_what_does_not_fit_names_the_stage_the_excess_and_remedies():
    tight = mesh(12.5, predicted_gib=10.0, mesh=1, stages=(1,))
    made = report(mesh(9.0), tight, is_pipeline=True)
    assert not made.fits
    problem = made.problem() or ""
    assert "stage 1 needs 12.5 GiB per device" in problem
    assert "2.5 GiB more than the 10.0 GiB" in problem
    # 0.8 of XLA's peak was predicted: a budget of 0.8 of the limit would have sufficed.
    assert f"memory_budget_bytes={0.8 * 10 * GIB:.3g}" in problem
    assert "num_micro_batches=8" in problem
    assert "about 10 devices instead of 8" in problem
    assert str(made).endswith(problem)


def test_a_smaller_budget_is_no_remedy_where_too_much_was_predicted():
    assert "smaller budget" not in (report(mesh(11.0, predicted_gib=12.0)).problem() or "")


def test_stages_that_share_a_mesh_are_named_together():
    shared = mesh(12.0, stages=(0, 2))
    assert "mesh 0 (stages 0, 2) needs" in (report(shared, is_pipeline=True).problem() or "")
    assert "the mesh 2×4 needs" in (report(shared).problem() or "")


def test_collectives_of_either_side_are_compared_by_kind():
    rows = {row.kind: row for row in mesh(1.0).collectives}
    assert sorted(rows) == ["all-gather", "all-reduce", "all-to-all"]
    assert rows["all-gather"].sent_bytes.ratio == 0.5
    assert rows["all-reduce"].sent_bytes == Compared(8.0, 0.0)
    assert rows["all-to-all"].sent_bytes.ratio is None
    (unknown,) = compared_collectives((Collectives("all-gather", 4, 64.0),), None)
    assert unknown.count == Compared(4, None)


def test_text_shows_both_sides():
    text = str(report(mesh(9.0)))
    assert "compiled for NVIDIA H100 (h100-80gb) without a GPU: jax 1.2, CUDA 13" in text
    row = next(line for line in text.splitlines() if "fits, 1.0 GiB left" in line)
    assert row.split()[:8] == ["step", "2×4", "8.0", "GiB", "9.0", "GiB", "0.89", "10.0"]
    assert "stage1_forward and 1 equal" in text
    assert "10, 1.0 GiB  4, 2.0 GiB  0.50" in text
    assert "all collectives  1.0 GiB      2.0 GiB     0.50" in text


def test_times_that_the_judge_read():
    times = JudgedStep(0.020, 0.016, 0.010, 0.004)
    made = report(mesh(9.0, judged=times, predicted_s=0.018))
    assert "schedule" not in str(made)  # no program was judged
    (program,) = made.programs
    costs = replace(program.figures, times=times)
    text = str(replace(made, programs=(replace(program, figures=costs),)))
    rows = [line.split() for line in text.splitlines()]
    times = ["16.00", "ms", "10.00", "ms", "4.00", "ms", "20.00", "ms"]
    assert ["stage1_forward", *times] in rows
    assert "The plan predicted 18" in text and "0.90 of" in text


def test_text_without_predictions():
    unknown = mesh(9.0, collectives=compared_collectives((Collectives("shift", 1, 8.0),), None))
    text = str(report(replace(unknown, dot_flops=Compared(4e12, None))))
    assert any(
        line.split() == ["step", "shift", "–", "1,", "8", "B", "–"] for line in text.splitlines()
    )


def test_a_plan_over_its_own_budget_that_fits_the_device():
    text = str(report(mesh(9.0, budget_bytes=8 * GIB)))
    assert "the mesh 2×4 exceeds the plan's budget of 8.0 GiB by 1.0 GiB, but fits" in text
    assert "exceeds the plan's budget" not in str(report(mesh(9.0)))


def test_json(tmp_path: Path):
    made = report(mesh(12.5))
    made.save(tmp_path / "verify.json")
    body = json.loads((tmp_path / "verify.json").read_text())
    assert body["format"] == "autopar-verify"
    assert body["fits"] is False
    assert body["versions"] == {"jax": "1.2", "CUDA": "13"}
    assert body["meshes"][0]["peak_bytes"] == {"xla": 12.5 * GIB, "predicted": 8.0 * GIB}
    assert body["programs"][0]["pieces"] == ["stage1_forward", "stage2_forward"]
    assert body["programs"][0]["figures"]["temp_bytes"] == 5 * GIB


@pytest.mark.parametrize(("xla", "predicted"), [(0.0, 1.0), (1.0, None)])
def test_no_ratio_of_what_is_not_known(xla: float, predicted: float | None):
    assert Compared(xla, predicted).ratio is None

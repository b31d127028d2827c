"""The pure parts of the benchmarks that run or compile pipelines."""

from __future__ import annotations

import pytest

from autopar.ir.program import Phase, Piece
from autopar.runtime.hlo import CollectiveOp
from benchmarks import pipeline_compile
from benchmarks.pipeline_overhead import Case, in_schedule_order


def timed(stage: int, phase: Phase, number: int | None, seconds: float):
    return Piece(stage, phase, (), ()), number, seconds


def test_stages_work_side_by_side_on_paper() -> None:
    """Two stages, two micro-batches, forward 1 s, backward 2 s: F0 F1 | F0 B0 F1 B1 | … is 9 s on
    paper, and 12 s one after another."""
    runs = [
        timed(stage, phase, number, seconds)
        for stage in (0, 1)
        for phase, seconds in ((Phase.FORWARD, 1.0), (Phase.BACKWARD, 2.0))
        for number in (0, 1)
    ]
    case = Case(2, "1f1b", 2)
    assert in_schedule_order(runs, case) == pytest.approx(9.0)
    once = [timed(0, Phase.PREPARE, None, 0.25), timed(0, Phase.UPDATE, None, 0.5)]
    assert in_schedule_order([*runs, *once], case) == pytest.approx(9.75)


def test_one_slow_run_does_not_count() -> None:
    runs = [timed(0, Phase.FORWARD, number, 1.0) for number in range(3)]
    slow = [timed(0, Phase.BACKWARD, number, s) for number, s in enumerate((1.0, 1.0, 50.0))]
    assert in_schedule_order([*runs, *slow], Case(1, "1f1b", 3)) == pytest.approx(6.0)


def test_reductions_of_gradients_are_told_from_those_of_rows() -> None:
    def op(kind: str, *shapes: tuple[int, ...]) -> CollectiveOp:
        return CollectiveOp(kind, 4, 4, shapes)

    rows = op("all-reduce", (7, 1024, 2048))
    merged = op("all-reduce", (7, 1024), (2048, 2048))
    scattered = op("reduce-scatter", (512, 8192))
    others = [op("all-gather", (2048, 2048)), op("all-reduce", ()), rows]
    found = pipeline_compile.gradient_reductions([*others, merged, scattered])
    assert found == [merged, scattered]


def test_no_array_of_the_compiled_model_looks_like_rows() -> None:
    import jax

    example = pipeline_compile.example()
    assert pipeline_compile.ROWS % pipeline_compile.MARK == 0
    for leaf in jax.tree.leaves(example.abstract_state()):
        assert all(size % pipeline_compile.MARK for size in leaf.shape), leaf.shape
    assert example.config.seq_len % pipeline_compile.MARK

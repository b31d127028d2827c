"""The pure parts of the benchmarks that run or compile pipelines."""

from __future__ import annotations

import pytest

from autopar.cost.pipeline_times import pipeline_of_times
from autopar.ir.pipeline import Phase
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.runtime.hlo import CollectiveOp
from benchmarks import pipeline_compile
from benchmarks.pipeline_overhead import in_schedule_order
from tests.properties.clock_by_clock import chain_times


def neighbours(name: str, num_micro_batches: int, seconds: dict[Phase, list[float]]):
    """A pipeline of stages that send to their neighbours, and its lists."""
    stages = range(len(seconds[Phase.FORWARD]))
    times = chain_times(seconds, [0.0] * (len(stages) - 1))
    pipeline, _, _ = pipeline_of_times(times, stages, num_micro_batches)
    schedule = make_schedule(name, len(stages), num_micro_batches)
    return pipeline, emit_programs(pipeline, schedule)


def test_stages_work_side_by_side_on_paper() -> None:
    """Two stages, two micro-batches, forward 1 s, backward 2 s: F0 F1 | F0 B0 F1 B1 | … is 9 s on
    paper, and 12 s one after another."""
    seconds = {Phase.FORWARD: [1.0, 1.0], Phase.BACKWARD: [2.0, 2.0], Phase.UPDATE: [0.75, 0.0]}
    pipeline, programs = neighbours("1f1b", 2, seconds)
    timed = [
        (stage_program, None, seconds[stage_program.phase][stage_program.stage])
        for stage_program in pipeline.stage_programs
        for _ in range(1 if stage_program.phase is Phase.UPDATE else 2)
    ]
    assert in_schedule_order(timed, pipeline, programs) == pytest.approx(9.75)


def test_one_slow_run_does_not_count() -> None:
    pipeline, programs = neighbours("1f1b", 3, {Phase.FORWARD: [1.0], Phase.BACKWARD: [1.0]})
    forward, backward = pipeline.stage_programs
    timed = [(forward, n, 1.0) for n in range(3)]
    timed += ((backward, n, s) for n, s in enumerate((1.0, 1.0, 50.0)))
    assert in_schedule_order(timed, pipeline, programs) == pytest.approx(6.0)


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

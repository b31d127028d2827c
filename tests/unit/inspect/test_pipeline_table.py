"""Text about pipelines: closed forms of what it tells, and lines that stay short."""

from __future__ import annotations

import pytest

from autopar.inspect.pipeline_table import (
    WIDTH,
    bubble_share,
    explain_pipeline,
    search_lines,
)
from autopar.ir.plan import (
    FOLLOWING,
    MADE,
    Fingerprint,
    ModuleCost,
    ParallelPlan,
    ProgramSharding,
    SolverReport,
    StagePlan,
    Tensor,
    check_plan,
)
from autopar.ir.stages import PipelineChoice, SearchReport, StageChoice

LONG = "state.params" + "".join(f"['a_module_with_a_long_name_{i}']" for i in range(4))


def one_mesh(shape: tuple[int, ...]) -> ParallelPlan:
    return ParallelPlan(
        name="part",
        method="ShardParallel()",
        mesh_shape=shape,
        axis_names=("x", "y")[: len(shape)],
        device="v100",
        inputs=(),
        outputs=(),
        program=ProgramSharding((), (), ()),
        stages=(StagePlan((0, 1), (1, 4), shape, 1.0),),
        num_micro_batches=4,
        estimated_step_s=1.0,
        estimated_peak_bytes=2**30,
        communication_bytes=0.0,
        modules=(),
        solver=SolverReport(1.0, 1.0, 0.0),
        fingerprint=Fingerprint("", ""),
        memory_budget_bytes=4 * 2**30,
    )


def pipeline(num_stages: int = 4, **fields: object) -> ParallelPlan:
    """Equal stages of one second forward and two backward, in the time that 1f1b takes."""
    stages = tuple(
        StagePlan(
            (2 * s, 2 * s + 2),
            (1, 2),
            (2,),
            3.0,
            one_mesh((2,)),
            (2 * s, 2 * s + 1),
            s,
            forward_s=1.0,
            backward_s=2.0,
            remat=s == 0,
        )
        for s in range(num_stages)
    )
    inputs = tuple(
        Tensor(f"{LONG}['layer_{2 * s}']", (8, 8), "float32", (0,), "state", (s,))
        for s in range(num_stages)
    )
    shared = Tensor("state.params['embedding']", (8, 8), "float32", (1,), "state", (0, 3))
    plan = ParallelPlan(
        name="train_step",
        method="PipeshardParallel(num_micro_batches=4)",
        mesh_shape=(2 * num_stages,),
        axis_names=("x",),
        device="v100",
        inputs=(*inputs, shared),
        outputs=(Tensor("result[1]", (), "float32", (-1,), "", (num_stages - 1,)),),
        program=ProgramSharding((), (), ()),
        stages=stages,
        num_micro_batches=4,
        estimated_step_s=3.0 * (4 + num_stages - 1),
        estimated_peak_bytes=2**30,
        communication_bytes=0.0,
        modules=(),
        solver=SolverReport(1.0, 1.0, 0.0),
        fingerprint=Fingerprint("", ""),
        memory_budget_bytes=4 * 2**30,
        layers=tuple(f"GPT/Block_{i}" for i in range(2 * num_stages)),
        layering="auto",
        schedule="1f1b",
    )
    return plan if not fields else ParallelPlan(**{**plan.__dict__, **fields})


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_the_share_of_waiting(num_stages: int) -> None:
    assert bubble_share(pipeline(num_stages)) == pytest.approx((num_stages - 1) / (num_stages + 3))


def test_text() -> None:
    lines = explain_pipeline(pipeline()).split("\n")
    assert lines[0] == "train_step: a pipeline of 4 stages on 8 devices (v100)"
    assert "  estimated step 21.00 s, of which devices wait 43%" in lines
    assert "  peak 1.0 GiB per device of a budget of 4.0 GiB" in lines
    row = next(line for line in lines if line.startswith("  2 "))
    want = "2 4–5 1×2 2 4–5 1.00 s 2.00 s - - 1.0 GiB 25%"
    assert row.split() == want.split()
    assert "  stage 0: GPT/Block_* (2 layers); computed again in the backward pass" in lines
    assert "  stage 3: GPT/Block_* (2 layers)" in lines
    # Stages 1 to 3 hold the same; the path is too long and loses its middle.
    at = lines.index("stages 1–3 hold, on the mesh 2:")
    assert lines[at + 3].startswith("  state.params")
    assert "…" in lines[at + 3] and "['layer_*']" in lines[at + 3]
    assert "stage 0 holds, on the mesh 2:" in lines
    assert "  state.params['embedding'] (3)" in lines
    assert max(map(len, lines)) <= WIDTH


def test_long_lists_of_collectives_are_wrapped() -> None:
    kinds = tuple((f"all-gather(x, y) of kind {i}", 10 + i) for i in range(6))
    cost = ModuleCost("GPT/layer_0/attention/out", "forward", 1e-3, 2e-3, 1.0, kinds)
    lines = explain_pipeline(pipeline(modules=(cost,))).split("\n")
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(line.strip() for line in lines)
    for kind, count in kinds:
        assert f"{count} {kind}" in text
    at = lines.index("cost by module:")
    column = lines[at + 1].index("collectives")
    assert lines[at + 4][:column].strip() == ""


def test_stages_that_share_submeshes_and_that_only_make_results() -> None:
    stages = pipeline().stages
    text = explain_pipeline(pipeline(2, schedule="", layering=MADE))
    assert "each stage makes its own results; nothing is sent" in text
    shared = tuple(
        StagePlan(**{**s.__dict__, "mesh": n % 2, "devices": stages[n % 2].devices})
        for n, s in enumerate(stages)
    )
    text = explain_pipeline(pipeline(stages=shared))
    assert "a pipeline of 4 stages on 2 submeshes, 4 devices" in text


@pytest.mark.parametrize("layering", ["auto", "manual", "8", FOLLOWING + "held", FOLLOWING + "8"])
def test_layerings_that_plans_may_have(layering: str) -> None:
    plan = pipeline(layering=layering, inputs=(), outputs=())
    check_plan(plan)
    assert ParallelPlan.from_json(plan.to_json()) == plan


def test_what_the_search_considered() -> None:
    def choice(step_s: float, *stages: tuple[int, tuple[int, int], tuple[int, ...], bool]):
        first, found = 0, []
        for count, submesh, shape, remat in stages:
            layers = (first, first + count)
            found.append(StageChoice(layers, submesh, shape, remat, 0, 1.0, 0.0, 0.0, 0.0))
            first += count
        return PipelineChoice(tuple(found), 8, step_s)

    report = SearchReport(
        8,
        1000,
        900,
        12,
        {"search": 0.5},
        (
            choice(0.002, (4, (1, 8), (2, 4), False), (4, (1, 8), (2, 4), False)),
            choice(0.003, (1, (1, 4), (4,), True), (7, (1, 8), (4, 2), False)),
        ),
        ((0.002, 0.0021),),
        None,
        ("A note.",),
    )
    assert search_lines(report) == [
        "search: 1000 ways to run layers of 8 priced, 900 pruned, 12 bounds tried",
        "  took search 500.00 ms",
        "  without a pipeline: does not fit, or was not asked for",
        "  pipelines, by what the tables predict:",
        "    2.00 ms, 8 micro-batches: 2 × (4 layers on 1×8 as 2×4)",
        "    3.00 ms, 8 micro-batches: (1 layer on 1×4, recomputed), (7 layers on 1×8 as 4×2)",
        "  as solved exactly: 2.10 ms (tables 2.00 ms)",
        "  A note.",
    ]

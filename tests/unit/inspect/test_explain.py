"""Text about plans: what it must tell, closed forms of its figures, and lines that stay short."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.inspect.breakdown import bubble_share, limits_of, rates_of, shares_of
from autopar.inspect.explain import explain, explain_plan
from autopar.inspect.lines import WIDTH, number_runs
from autopar.inspect.report_page.charts import breakdown
from autopar.inspect.report_page.headline import headline_of
from autopar.inspect.search_text import search_lines
from autopar.ir.details import CollectiveCost, MemoryUse, OpRow, Parallelism, PlanDetails, op_table
from autopar.ir.layering import PER_STAGE_OUTPUTS, Layering, LayerSource, parse_layering
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import (
    WALL,
    Fingerprint,
    ModuleCost,
    ParallelPlan,
    SolverReport,
    StagePlan,
    Tensor,
    check_plan,
)
from autopar.ir.program_sharding import ProgramSharding
from autopar.ir.spec import WHOLE, Layout
from autopar.ir.stages import PipelineChoice, SearchReport, StageChoice
from autopar.ir.text import format_bytes, format_rate, format_seconds
from autopar.ir.timeline import MeshTransferTime, PipelineTimes, StageProgramTime
from examples.models import build

LONG = "state.params" + "".join(f"['a_module_with_a_long_name_{i}']" for i in range(4))


def tensor(path: str, layout: Layout = (WHOLE, WHOLE), role: str = "state") -> Tensor:
    return Tensor(path, (8, 8), "float32", layout, role)


def plan_of(**parts: Any) -> ParallelPlan:
    plan = ParallelPlan(
        name="train_step",
        method="ShardParallel()",
        mesh_shape=(2, 4),
        axis_names=("x", "y"),
        device="h100-sxm",
        inputs=(),
        outputs=(),
        program=ProgramSharding((), (), ()),
        stages=(StagePlan((0, 1), (1, 8), (2, 4), 0.002),),
        num_micro_batches=1,
        estimated_step_s=0.002,
        estimated_peak_bytes=3 * 2**20,
        communication_bytes=512,
        modules=(),
        solver=SolverReport(0.002, 0.002, 0.0),
        fingerprint=Fingerprint("", ""),
        cluster=ClusterSpec(1, 8),
    )
    return replace(plan, **parts)


def row(module: str, words: str = "x: data, y: replicated", **parts: Any) -> OpRow:
    own = OpRow(
        "dot_general", module, "forward", "bfloat16[8]", "P('x')", words, "a.py:1", 1, 0, 0, 0, 0
    )
    return own._replace(**parts)


def details(*rows: OpRow, **parts: Any) -> PlanDetails:
    own = PlanDetails(0.0, 0.0, op_table(list(rows)), (), None, ())
    return replace(own, **parts)


def section(text: str, start: str) -> list[str]:
    """The lines below the one that starts so, up to the next empty one."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    rest = lines[at + 1 :]
    return rest[: rest.index("")] if "" in rest else rest


def cells(lines: list[str]) -> list[list[str]]:
    """Cells of the rows below a table's header; they are two or more spaces apart."""
    return [[c.strip() for c in line.split("  ") if c.strip()] for line in lines[2:]]


def arrays_of(plan: ParallelPlan, title: str = "inputs:") -> list[list[str]]:
    return cells(section(explain_plan(plan), title))


# -- arrays


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["p[0]['w']", "p[1]['w']", "p[2]['w']"], ["p[*]['w']"]),
        (["o[0].mu[0]", "o[0].mu[1]"], ["o[0].mu[*]"]),
        (["o[0].mu[1]", "o[1].mu[1]"], ["o[*].mu[1]"]),
        (["o[0].mu[0]", "o[1].mu[1]"], ["o[*].mu[*]"]),
        (["o[0].mu[0]"], ["o[0].mu[0]"]),
        (["p['Block_9']['Dense_0']", "p['Block_10']['Dense_0']"], ["p['Block_*']['Dense_0']"]),
        (["p['h2o']", "p['h2o2']"], ["p['h2o']", "p['h2o2']"]),
        (["w1", "w2", "v1"], ["w*", "v1"]),
        (["p[0]['w']", "q", "p[1]['w']"], ["p[*]['w']", "q"]),
        (["s.params['w']", "s.mu['w']"], ["s.…['w']"]),
    ],
)
def test_only_numbers_that_differ_are_wildcards(paths: list[str], shown: list[str]) -> None:
    found = arrays_of(plan_of(inputs=tuple(map(tensor, paths))))
    assert [row[0] for row in found] == shown


def test_arrays_are_grouped_only_if_all_columns_agree() -> None:
    inputs = (
        tensor("state[0].w"),
        tensor("state[1].w", (0, WHOLE)),
        tensor("state[2].w"),
        tensor("state[3].w", role="batch"),
        replace(tensor("state[4].w"), dtype="bfloat16"),
        replace(tensor("state[5].w"), shape=(8, 4)),
    )
    assert arrays_of(plan_of(inputs=inputs)) == [
        ["state[*].w", "float32[8, 8]", "P()", "state", "2"],
        ["state[1].w", "float32[8, 8]", "P('x',)", "state", "1"],
        ["state[3].w", "float32[8, 8]", "P()", "batch", "1"],
        ["state[4].w", "bfloat16[8, 8]", "P()", "state", "1"],
        ["state[5].w", "float32[8, 4]", "P()", "state", "1"],
    ]


def test_state_is_shown_once_and_empty_tables_not_at_all() -> None:
    state = tensor("state")
    plan = plan_of(inputs=(state,), outputs=(replace(state, path="result[0]"),))
    assert "result" not in explain_plan(plan)
    assert "modules and parameter specs" not in explain_plan(plan)
    loss = tensor("result[1]", role="")
    found = arrays_of(replace(plan, outputs=(*plan.outputs, loss)), "outputs other than state:")
    assert [row[0] for row in found] == ["result[1]"]


# -- modules


def module_rows(plan: ParallelPlan, depth: int | None = None) -> list[str]:
    """Names, indented as they are nested."""
    lines = section(explain_plan(plan, depth), "modules and parameter specs")
    return [line[2:31].rstrip() for line in lines[2:] if line[2:31].strip()]


def test_equal_layers_are_one_line_and_others_are_not() -> None:
    rows = [row(f"GPT/layer_{i}/up", compute_s=1e-3, communication_bytes=1024.0) for i in range(4)]
    plan = plan_of(details=details(*rows))
    assert module_rows(plan) == ["GPT", "  layer_0–3 (4)", "    up (4)"]
    (line,) = (x for x in explain_plan(plan).split("\n") if "layer_0–3" in x)
    assert line.split()[2:7] == ["4.00", "ms", "-", "4.0", "KiB"]
    assert line.endswith("x: data; y: replicated")
    rows[2] = rows[2]._replace(words="x: data, y: tensor, column")
    plan = plan_of(details=details(*rows))
    assert module_rows(plan, 2) == ["GPT", "  layer_0–1, 3 (3)", "  layer_2"]
    assert module_rows(plan, 1) == ["GPT"]
    (line,) = (x for x in explain_plan(plan, 2).split("\n") if x.startswith("    layer_2"))
    assert line.endswith("x: data; y: tensor column")


def test_layers_that_alternate() -> None:
    words = ("x: data, y: replicated", "x: data, y: tensor, row")
    rows = [row(f"GPT/layer_{i}/up", words[i % 2], compute_s=1e-3) for i in range(8)]
    plan = plan_of(details=details(*rows))
    assert module_rows(plan, 2) == ["GPT", "  layer_0, 2, … (4)", "  layer_1, 3, … (4)"]
    (line,) = (x for x in explain_plan(plan, 1).split("\n") if x.startswith("  GPT "))
    assert line.split()[1:3] == ["8.00", "ms"]
    assert line.endswith("x: data; y: replicated / tensor")  # and goes on


def test_parameters_stand_below_their_module() -> None:
    path = "state.params['layer_{}']['up']['kernel']"
    uses = tuple(
        Parallelism(path.format(i), f"GPT/layer_{i}/up", (("x", "data + ZeRO"), ("y", "data")))
        for i in range(2)
    )
    inputs = tuple(tensor(path.format(i), (0, WHOLE)) for i in range(2))
    rows = (row(f"GPT/layer_{i}/up") for i in range(2))
    plan = plan_of(inputs=inputs, details=details(*rows, parallelism=uses))
    assert module_rows(plan) == ["GPT", "  layer_0–1 (2)", "    up (2)", "      kernel"]
    (line,) = (x for x in explain_plan(plan).split("\n") if x.startswith("        kernel"))
    assert line.split("  ")[-1] == "x: data + ZeRO; y: data"
    assert "P('x',)" in line


def test_what_has_no_module_comes_last() -> None:
    rows = [
        row("", region="update", compute_s=1.0),
        row("", compute_s=1.0),
        row("GPT", compute_s=1.0),
    ]
    assert module_rows(plan_of(details=details(*rows))) == ["GPT", "(update)", "(no module)"]


def test_plans_without_details_tell_modules_by_their_costs() -> None:
    modules = (
        ModuleCost("GPT/Block_0", "forward", 1e-3, 2e-6, 8.0, (("all-gather(x)", 1),)),
        ModuleCost("GPT/Block_1", "forward", 1e-3, 0.0, 0.0),
        ModuleCost("GPT/Block_0", "backward", 0.0, 3e-6, 8.0, (("all-reduce(y)", 2),)),
        ModuleCost("", "update", 1.5, 0.0, 0.0),
    )
    text = explain_plan(plan_of(modules=modules))
    (line,) = (x for x in text.split("\n") if "Block_0–1 (2)" in x)
    assert line.split()[2:] == ["2.00", "ms", "<", "0.01", "ms", "16", "B"]
    assert "(update)" in text


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "2"])
def test_depths_that_are_none(depth: Any) -> None:
    with pytest.raises(ArgumentError, match=r"explain\(depth="):
        explain(plan_of(), depth)


# -- the step


def test_head_says_what_how_and_how_well() -> None:
    lines = explain_plan(plan_of()).splitlines()
    assert lines[:3] == [
        "train_step: on a mesh x=2 × y=4 of 8 devices",
        "  method    ShardParallel()",
        "  cluster   1 host × 8 h100-sxm (74.5 GiB each), 372.5 GiB/s between devices of a host",
    ]
    assert "predicted step: 2.00 ms" in lines
    assert "  peak memory 3.0 MiB per device" in lines
    assert "  sent 512 B per device" in lines
    assert "solver: objective 2.00 ms, proven optimal" in lines


def test_rates_are_of_the_model_and_of_what_is_computed() -> None:
    # 4e12 operations of the model on 8 devices in 2 ms: 250 TFLOP/s each.
    split = "x: data, y: tensor, column"
    rows = (
        row("m", split, flops=6e11),
        row("m", split, array="float32[8]", flops=1e9, name="add"),
        row("m", "x: replicated, y: data", flops=4e11),
    )
    plan = plan_of(details=details(*rows, model_flops=4e12))
    rates = rates_of(plan)
    assert rates is not None and rates.redundant_along == ("x",)
    assert (rates.model, rates.distinct) == pytest.approx((250e12, 400e12))
    assert (rates.computed, rates.peak) == pytest.approx((500e12, 989e12))
    text = " ".join(explain_plan(plan).split())
    assert "250 TFLOP/s per device, 25.3% of the peak of 989 TFLOP/s; 400 TFLOP/s (40" in text
    assert "; 500 TFLOP/s (50.6%) including redundant work" in text
    assert "20% of the matrix products are redundant: devices along x repeat" in text
    assert rates_of(replace(plan, cluster=None)) is None


def test_costs_without_a_device_are_not_seconds() -> None:
    rows = (row("m", communication_s=1234.5, communication_bytes=8.0),)
    text = explain_plan(plan_of(device="communication only", details=details(*rows)))
    assert "predicted step" not in text and "what limits" not in text
    assert any("1234.5" in line and line.strip().startswith("m ") for line in text.split("\n"))
    assert "solver: objective 0.002, proven" in text


@pytest.mark.parametrize(
    ("gap", "sizes", "said"),
    [
        (0.0, {}, "proven optimal"),
        (0.0125, {}, "within 1.25% of optimal"),
        (0.0, {"classes": 9, "nodes": 9}, "proven optimal"),
        (
            0.0,
            {"classes": 3, "nodes": 9},
            "proven optimal with shared decisions for equal layers (3 for 9 ops)",
        ),
    ],
)
def test_proof_is_not_overstated(gap: float, sizes: dict[str, int], said: str) -> None:
    text = explain_plan(plan_of(solver=SolverReport(1.0, 1.0 - gap, gap, sizes)))
    (line,) = (x for x in text.split("\n") if x.startswith("solver: "))
    assert line.endswith(said)


def test_warnings_come_last() -> None:
    text = explain_plan(plan_of(warnings=("beware", "of the dog")))
    assert text.endswith("\n\nwarning: beware\nwarning: of the dog")


# -- what limits the step


def collective(kind: str, seconds: float, cause: str = "partial sums", **parts: Any) -> Any:
    own = CollectiveCost(
        kind, ("y",), cause, "m", "forward", "f32[8]", "a", "b", "P()", "P()", 2, 64.0, seconds
    )
    return replace(own, **parts)


def test_compute_limits() -> None:
    modules = (ModuleCost("GPT/layer_0", "forward", 1.8e-3, 0.2e-3, 0.0),)
    rows = (row("GPT/layer_0", compute_s=1.7e-3), row("head", compute_s=0.1e-3))
    plan = plan_of(modules=modules, details=details(*rows))
    assert shares_of(plan).compute == pytest.approx(1.8e-3)
    first, second = limits_of(plan)
    assert (
        first == "Compute takes 90% of the step; the largest part, 94% of that, is in GPT/layer_0."
    )
    assert second.startswith("Communication takes 10% of the step")


def test_communication_limits() -> None:
    modules = (ModuleCost("m", "forward", 0.2e-3, 1.8e-3, 0.0),)
    collectives = (
        collective("all-reduce", 1.2e-3),
        collective("all-gather", 0.5e-3, "other layout", value="state.w", axes=("x", "y")),
        collective("all-reduce", 0.1e-3, value="gradient of state.w"),
    )
    plan = plan_of(modules=modules, details=details(row("m"), collectives=collectives))
    (only,) = limits_of(plan)
    assert only == (
        "Communication takes 90% of the step: 67% of that is all-reduce along y (partial sums of "
        "activations), 28% of that is all-gather along x and y (resharded parameters)."
    )
    found = cells(section(explain_plan(plan), "collectives, worst first")[-1:] * 3)
    assert found == [["gradient of state.w", "2", "0.10 ms"]]
    table = section(explain_plan(plan), "collectives, worst first")
    kinds = [line.strip().split("  ")[0] for line in table[1:] if line[2] != " "]
    assert kinds == [
        "all-reduce along y: partial sums of activations",
        "all-gather along x and y: resharded parameters",
        "all-reduce along y: partial sums of gradients",
    ]


def test_memory_limits() -> None:
    solver = SolverReport(0.002, 0.002, 0.0, unbounded=(0.0015, 2.0**30))
    plan = plan_of(solver=solver, memory_budget_bytes=2.0**22, remat=("GPT/layer_0",))
    (budget,) = limits_of(plan)
    assert "without it the step would take 1.50 ms instead of 2.00 ms" in budget
    product = row("m", "x: data, y: sequence", flops=6e11)
    plan = replace(plan, details=details(product, model_flops=4e12))
    assert "recomputes GPT/layer_0: 20% more work in matrix products" in limits_of(plan)[1]


# -- memory


def test_memory_by_category() -> None:
    use = MemoryUse((0.0,), ((1.0,) * 7,), (2.0**20, 0, 0, 2.0**21, 0, 0, 0), 0.0, ())
    plan = plan_of(details=details(row("m"), memory=use), memory_budget_bytes=2.0**23)
    found = dict(pair for pair in cells(section(explain_plan(plan), "memory at")) if len(pair) == 2)
    assert found["activations"] == "2.0 MiB"
    assert found["peak"] == "3.0 MiB" and found["budget"] == "8.0 MiB"
    assert "gradients" not in found


# -- pipelines


def one_mesh(shape: tuple[int, ...]) -> ParallelPlan:
    return plan_of(
        name="part",
        mesh_shape=shape,
        axis_names=("x", "y")[: len(shape)],
        device="v100",
        stages=(StagePlan((0, 1), (1, 4), shape, 1.0),),
        num_micro_batches=4,
        estimated_peak_bytes=2**30,
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
    shared = Tensor("state.params['embedding']", (8, 8), "float32", (WHOLE,), "state", (0, 3))
    plan = plan_of(
        method="PipeshardParallel(num_micro_batches=4)",
        mesh_shape=(2 * num_stages,),
        axis_names=("x",),
        device="v100",
        inputs=(*inputs, shared),
        outputs=(Tensor("result[1]", (), "float32", (-1,), "", (num_stages - 1,)),),
        stages=stages,
        num_micro_batches=4,
        estimated_step_s=3.0 * (4 + num_stages - 1),
        estimated_peak_bytes=2**30,
        memory_budget_bytes=4 * 2**30,
        layers=tuple(f"GPT/Block_{i}" for i in range(2 * num_stages)),
        layering=Layering(LayerSource.AUTO),
        schedule="1f1b",
        cluster=ClusterSpec(1, 8, "v100"),
    )
    return replace(plan, **fields)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_the_share_of_waiting(num_stages: int) -> None:
    plan = pipeline(num_stages)
    assert bubble_share(plan) == pytest.approx((num_stages - 1) / (num_stages + 3))
    shares = shares_of(plan)
    parts = shares.compute + shares.communication + shares.bubble + shares.launch
    assert parts == pytest.approx(shares.step)


def test_text_of_a_pipeline() -> None:
    lines = explain_plan(pipeline()).split("\n")
    assert lines[0] == "train_step: a pipeline of 4 stages on 8 devices"
    assert "  schedule  1f1b, 4 micro-batches" in lines
    assert "predicted step: 21.00 s" in lines
    (line,) = (x for x in lines if x.startswith("  pipeline bubble"))
    assert line.split()[-3:] == ["9.00", "s", "43%"]
    assert "  peak memory 1.0 GiB per device, budget 4.0 GiB" in lines
    row = next(line for line in lines if line.startswith("  2 "))
    assert " ".join(row.split()) == "2 4–5 1×2 2 4–5 1.00 s 2.00 s - - 1.0 GiB 25%"
    assert "  stage 0: GPT/Block_* (2 layers); recomputed in the backward pass" in lines
    assert "  stage 3: GPT/Block_* (2 layers)" in lines
    rows = cells(section("\n".join(lines), "inputs:"))
    # The path is too long and loses its middle.
    assert rows[0][0].startswith("state.params") and "…" in rows[0][0]
    assert rows[0][0].endswith("['layer_*']") and rows[0][-2:] == ["4", "0–3"]
    assert "  state.params['embedding'] (3)" in lines
    assert max(map(len, lines)) <= WIDTH
    (waits,) = (line for line in limits_of(pipeline()) if line.startswith("Pipeline bubbles"))
    assert "43% of the step: the pipeline fills and drains" in waits


def test_stages_that_share_submeshes_and_that_only_make_results() -> None:
    stages = pipeline().stages
    text = explain_plan(pipeline(2, schedule="", layering=PER_STAGE_OUTPUTS))
    assert "each stage computes its own outputs" in text
    shared = tuple(
        replace(s, mesh=n % 2, devices=stages[n % 2].devices) for n, s in enumerate(stages)
    )
    text = explain_plan(pipeline(stages=shared))
    assert "a pipeline of 4 stages on 2 submeshes, 4 devices" in text


@pytest.mark.parametrize("layering", ["auto", "manual", "8", "following held", "following 8"])
def test_layerings_that_plans_may_have(layering: str) -> None:
    plan = pipeline(layering=parse_layering(layering), inputs=(), outputs=())
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
        "search: priced 1000 stage candidates over 8 layers, pruned 900, tried 12 bounds",
        "  time: search 500.00 ms",
        "  without a pipeline: does not fit, or was not searched",
        "  best pipelines by the cost tables:",
        "    2.00 ms, 8 micro-batches: 2 × (4 layers on 1×8 devices as a 2×4 mesh)",
        "    3.00 ms, 8 micro-batches: 1 layer on 1×4 devices, recomputed; 7 layers on 1×8 devices "
        "as a 4×2",
        "      mesh",
        "  solved exactly: 2.10 ms (tables 2.00 ms)",
        "  A note.",
    ]


# -- a plan as it is made


@cache
def real_plan() -> ParallelPlan:
    example = build("gpt-tiny")
    arguments = (example.abstract_state(), example.abstract_batch())
    method = autopar.ShardParallel((2, 4))
    cluster = ClusterSpec(1, 8, "cpu")
    return autopar.plan(example.train_step, *arguments, cluster=cluster, method=method)


def test_a_real_plan_fits_on_the_screen_and_comes_from_its_file() -> None:
    plan = real_plan()
    text = plan.explain(detail="full")
    # Blocks need the program, which a file does not hold.
    before, _, blocks = text.partition("\n\nparallel blocks")
    sequence = plan.blocks().sequence
    num_ops = sum(len(block.nodes) for block in sequence)  # depends on JAX's version
    assert f"{num_ops} ops in {len(sequence)} blocks" in blocks
    assert ParallelPlan.from_json(plan.to_json()).explain(detail="full") == before
    lines = text.split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    for start in ("what limits the step:", "modules and parameter specs", "inputs:", "solver: "):
        assert any(line.startswith(start) for line in lines), start
    deep = plan.explain(depth=9, detail="full").split("\n")
    shallow = plan.explain(depth=1, detail="full").split("\n")
    assert len(shallow) < len(deep)
    names = {line.split()[0] for line in deep if line.strip()}
    assert {"qkv", "kernel", "final_norm"} <= names


# -- figures


def test_runs_of_numbers() -> None:
    assert number_runs([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert number_runs([]) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3.5 * 2**20, "3.5 MiB"),
        (2**42, "4096.0 GiB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 µs"), (2.5e-6, "2.5 µs"), (0.0125, "12.50 ms"), (90, "90.00 s")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# -- one screen


def test_one_screen_says_the_most_important() -> None:
    product = row("GPT/layer_0/up", "x: data, y: tensor, column", compute_s=1.5e-3, flops=6e11)
    other = row("GPT/layer_0/norm", compute_s=2e-6)
    modules = (ModuleCost("GPT/layer_0/up", "forward", 1.9e-3, 1e-5, 0.0),)
    plan = plan_of(
        modules=modules,
        details=details(product, other, model_flops=4e12),
        asked="AutoParallel()",
        warnings=("mind this",),
        solver=SolverReport(0.002, 0.002, 0.0, seconds={"trace": 5.0, WALL: 2.5}),
    )
    text = plan.explain()
    assert len(text.splitlines()) <= 40
    assert "method    AutoParallel(), which chose ShardParallel()" in text
    for part in ("what limits the step:", "modules (equal", "verdict: ", "warning: mind this"):
        assert part in text
    assert "planned in 2.50 s" in text  # by the clock, not the sum of passes
    assert "inputs:" not in text and "solver:" not in text
    assert "< 0.01 ms" in text and "µs" not in text  # one unit in a table
    full = plan.explain(detail="full")
    assert "solver:" in full and "planned in 2.50 s: trace 5.00 s" in full
    with pytest.raises(ArgumentError, match=r"explain\(detail='all'\): needs 'short' or 'full'"):
        plan.explain(detail="all")


def test_a_plan_is_printed_in_ten_lines() -> None:
    plan = plan_of(
        modules=(ModuleCost("m", "forward", 1.5e-3, 0.0, 0.0),),
        details=details(row("<b>m", compute_s=1e-3)),
        name="<script>",
    )
    text = str(plan)
    assert len(text.splitlines()) <= 12 and "verdict: " in text
    assert len(repr(plan)) < 200 and "<ParallelPlan of <script>" in repr(plan)
    html = plan._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and "&lt;b&gt;m" in html


@pytest.mark.parametrize(
    ("rate", "text"),
    [(8.64e9, "8.64 GFLOP/s"), (86.4e9, "86.4 GFLOP/s"), (989e12, "989 TFLOP/s"),
     (1.2e15, "1.2 PFLOP/s"), (5e5, "0.5 MFLOP/s")],
)  # fmt: skip
def test_rates_have_a_prefix_and_three_digits(rate: float, text: str) -> None:
    assert format_rate(rate) == text


# -- launches and bubbles


def pipeline_of(launch_s: float, num_stages: int = 2, batches: int = 4) -> ParallelPlan:
    """Stages of 1 ms forward and backward each, plus launches."""
    stage_plan = plan_of(
        mesh_shape=(4,), axis_names=("x",),
        modules=(ModuleCost("m", "forward", 2e-3 * batches, 0.0, 0.0),),
    )  # fmt: skip
    seconds = (1e-3 + launch_s,) * num_stages
    programs = [
        StageProgramTime(stage, phase, 0, launch_s + (0.0 if phase == "update" else 1e-3))
        for stage in range(num_stages)
        for phase in ("forward", "backward", "update")
    ]
    sent = [
        MeshTransferTime(
            source, target, phase, 8.0, 0.0, value=2 * min(source, target) + offset, micro_batch=-1,
            writers=((3 * source + offset, -1),), readers=((3 * target + offset, -1),),
        )
        for s in range(num_stages - 1)
        for source, target, phase, offset in ((s, s + 1, "forward", 0), (s + 1, s, "backward", 1))
    ]  # fmt: skip
    times = PipelineTimes(
        seconds, seconds, (), (launch_s,) * num_stages, tuple(sent), tuple(programs)
    )
    stages = tuple(
        StagePlan(
            (n, n + 1), (1, 4), (4,), 0.0, plan=stage_plan, devices=tuple(range(4 * n, 4 * n + 4)),
            mesh=n, forward_s=seconds[n], backward_s=seconds[n], once_s=launch_s,
        )
        for n in range(num_stages)
    )  # fmt: skip
    plan = plan_of(
        stages=stages, schedule="1f1b", num_micro_batches=batches, times=times,
        layers=tuple(f"l{n}" for n in range(num_stages)), mesh_shape=(4 * num_stages,),
        axis_names=("x",), cluster=ClusterSpec(1, 4 * num_stages),
    )  # fmt: skip
    return replace(plan, estimated_step_s=plan.timeline().step_s)


def test_launches_that_take_most_of_the_step_are_said_first() -> None:
    plan = pipeline_of(launch_s=3e-3)
    shares = shares_of(plan)
    parts = shares.compute + shares.communication + shares.launch + shares.bubble
    assert parts == pytest.approx(shares.step)
    first, *rest = limits_of(plan)
    assert first.startswith("Starting programs takes ") and "fewer micro-batches" in first
    assert any("More micro-batches would not help" in text for text in rest)
    assert not any("would shorten them" in text for text in (first, *rest))


def test_without_launches_more_micro_batches_help() -> None:
    texts = limits_of(pipeline_of(launch_s=0.0))
    assert any("more micro-batches would shorten them" in text for text in texts)
    assert not any("Starting" in text for text in texts)


def test_one_stage_waits_for_nobody() -> None:
    shares = shares_of(pipeline_of(launch_s=1e-3, num_stages=1))
    assert shares.bubble == 0 and shares.launch == pytest.approx(shares.step - shares.compute)


def test_text_and_page_have_the_same_figures() -> None:
    plan = pipeline_of(launch_s=0.3e-3)
    shares = shares_of(plan)
    page = breakdown(plan)
    rows = [mesh["seconds"] for mesh in page["meshes"]]
    for name, part in (("launch", "launch overhead"), ("bubble", "bubble")):
        position = page["parts"].index(part)
        mean = sum(seconds[position] for seconds in rows) / len(rows)
        assert mean == pytest.approx(getattr(shares, name), rel=1e-2)
    assert headline_of(plan).bubble == pytest.approx(shares.bubble / shares.step)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.inspect.table import explain_plan
from autopar.ir.plan import (
    Fingerprint,
    ModuleCost,
    ParallelPlan,
    ProgramSharding,
    SolverReport,
    StagePlan,
    Tensor,
)
from autopar.ir.spec import WHOLE, Layout
from autopar.ir.text import format_bytes, format_seconds


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
    )
    return replace(plan, **parts)


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the rows below a table's title; cells are two or more spaces apart."""
    lines = text.split(f"{title}:\n")[1].split("\n\n")[0].splitlines()
    return [[c for c in line.split("  ") if c.strip()] for line in lines[2:]]


def first_cells(plan: ParallelPlan, title: str = "inputs") -> list[str]:
    return [row[0].strip() for row in rows(explain_plan(plan), title)]


# -- grouping


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
    ],
)
def test_only_numbers_that_differ_are_wildcards(paths: list[str], shown: list[str]) -> None:
    assert first_cells(plan_of(inputs=tuple(map(tensor, paths)))) == shown


def test_arrays_are_grouped_only_if_all_columns_agree() -> None:
    inputs = (
        tensor("state[0].w"),
        tensor("state[1].w", (0, WHOLE)),
        tensor("state[2].w"),
        tensor("state[3].w", role="batch"),
        replace(tensor("state[4].w"), dtype="bfloat16"),
        replace(tensor("state[5].w"), shape=(8, 4)),
    )
    found = [
        [c.strip() for c in row] for row in rows(explain_plan(plan_of(inputs=inputs)), "inputs")
    ]
    assert found == [
        ["state[*].w", "float32[8, 8]", "P()", "state", "2"],
        ["state[1].w", "float32[8, 8]", "P('x',)", "state", "1"],
        ["state[3].w", "float32[8, 8]", "P()", "batch", "1"],
        ["state[4].w", "bfloat16[8, 8]", "P()", "state", "1"],
        ["state[5].w", "float32[8, 4]", "P()", "state", "1"],
    ]


def test_modules_are_grouped_and_their_costs_added() -> None:
    modules = (
        ModuleCost("GPT/Block_0/Dense_1", "forward", 1e-3, 2e-6, 8.0, (("all-gather(x)", 1),)),
        ModuleCost("GPT/Block_1/Dense_1", "forward", 1e-3, 0.0, 0.0),
        ModuleCost("GPT/Block_0/Dense_1", "backward", 0.0, 3e-6, 8.0, (("all-reduce(y)", 2),)),
        ModuleCost("", "update", 1.5, 0.0, 0.0),
    )
    found = rows(explain_plan(plan_of(modules=modules)), "cost by module")
    assert [[c.strip() for c in row] for row in found] == [
        ["GPT/Block_*/Dense_1", "forward", "2", "2.00 ms", "2.0 µs", "1 all-gather(x)"],
        ["GPT/Block_0/Dense_1", "backward", "1", "-", "3.0 µs", "2 all-reduce(y)"],
        ["(no module)", "update", "1", "1.50 s", "-", "-"],
    ]


# -- the rest of the text


def test_head_says_what_how_and_how_well() -> None:
    head = explain_plan(plan_of()).splitlines()[:3]
    assert head == [
        "train_step: ShardParallel() on mesh x=2 × y=4 (h100-sxm)",
        "  objective 0.002 (proven optimal)",
        "  estimated step 2.00 ms, peak 3.0 MiB per device, communication 512 B per device",
    ]


def test_costs_without_a_device_are_not_seconds() -> None:
    modules = (ModuleCost("m", "forward", 0.0, 1234.5, 8.0),)
    text = explain_plan(plan_of(device="communication only", modules=modules))
    assert "estimated step" not in text
    assert rows(text, "cost by module")[0][4].strip() == "1234.5"


@pytest.mark.parametrize(
    ("gap", "sizes", "said"),
    [
        (0.0, {}, "(proven optimal)"),
        (0.0125, {}, "(within 1.25% of optimal)"),
        (0.0, {"classes": 9, "nodes": 9}, "(proven optimal)"),
        (
            0.0,
            {"classes": 3, "nodes": 9},
            "(proven optimal with equal layers alike, 3 decisions for 9 ops)",
        ),
    ],
)
def test_proof_is_not_overstated(gap: float, sizes: dict[str, int], said: str) -> None:
    text = explain_plan(plan_of(solver=SolverReport(1.0, 1.0 - gap, gap, sizes)))
    assert text.splitlines()[1].endswith(said)


def test_state_is_shown_once_and_empty_tables_not_at_all() -> None:
    state = tensor("state")
    plan = plan_of(inputs=(state,), outputs=(replace(state, path="result[0]"),))
    assert "result" not in explain_plan(plan)
    assert "cost by module" not in explain_plan(plan)
    loss = tensor("result[1]", role="")
    text = explain_plan(replace(plan, outputs=(*plan.outputs, loss)))
    assert [row[0].strip() for row in rows(text, "outputs that are not state")] == ["result[1]"]


def test_warnings_come_last() -> None:
    text = explain_plan(plan_of(warnings=("beware", "of the dog")))
    assert text.endswith("\n\nwarning: beware\nwarning: of the dog")


def test_columns_line_up_and_lines_have_no_trailing_blanks() -> None:
    inputs = (tensor("a"), tensor("a_much_longer_path", (0, 1), ""))
    lines = explain_plan(plan_of(inputs=inputs)).splitlines()
    assert all(line == line.rstrip() for line in lines)
    table = lines[lines.index("inputs:") + 1 :]
    column = table[0].index("array")
    assert [line[column - 2 : column + 1] for line in table] == ["  a", "  -", "  f", "  f"]


# -- figures


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

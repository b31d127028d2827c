"""`plan.blocks()`: the blocks of a plan add up to the plan, and say what was chosen."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import ArgumentError, PlanError
from autopar.ir.blocks import Blocks, check_blocks
from autopar.ir.plan import ParallelPlan
from examples.models import build

CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    # Wide enough to be split, with 4 layers to be folded.
    example = build("mlp-tiny", hidden_size=1024, num_layers=10)
    arguments = (example.abstract_state(), example.abstract_batch(4096))
    method = autopar.ShardParallel((2, 4))
    return autopar.plan(example.train_step, *arguments, cluster=CLUSTER, method=method)


@pytest.fixture(scope="module")
def blocks(plan) -> Blocks:
    return plan.blocks()


def test_costs_of_blocks_add_up_to_the_plan(plan, blocks) -> None:
    check_blocks(blocks)
    compute_s = sum(module.compute_s for module in plan.modules)
    communication_s = sum(module.communication_s for module in plan.modules)
    assert communication_s > 0
    # Blocks are rounded to four digits.
    assert sum(b.compute_s for b in blocks.blocks) == pytest.approx(compute_s, rel=1e-3)
    assert sum(b.communication_s for b in blocks.blocks) == pytest.approx(communication_s, rel=1e-3)
    sent = sum(b.communication_bytes for b in blocks.blocks)
    assert sent == pytest.approx(plan.communication_bytes, rel=1e-3)


def test_blocks_say_what_the_plan_chose(plan, blocks) -> None:
    sharding = plan.origin.sharding
    for block in blocks.blocks:
        assert block.chosen == sharding.choice[block.owner]
        named = {s.index: s.words for s in block.strategies}
        assert block.words == named.get(block.chosen, block.words)
        assert all(words.startswith("x: ") for words in named.values())
        assert 0 <= block.num_deviating < len(block.nodes)
        assert "mlp.py" in block.source
    assert {b.words for b in blocks.blocks if b.operator == "dot_general"} & {"x: data, y: data"}


def test_the_text_names_entries_and_repeats(blocks) -> None:
    text = str(blocks)
    assert text == blocks.text()
    assert f"{blocks.num_nodes} ops in {len(blocks.sequence)} blocks" in text
    for segment in blocks.segments:
        size = "1 block" if len(segment.blocks) == 1 else f"{len(segment.blocks)} blocks"
        times = f", {segment.count} times" if segment.count > 1 else ""
        assert f"{segment.name}: {size}{times}, " in text
    assert any(segment.count > 1 for segment in blocks.segments)
    assert "dot_general" in text and "x: data, y: data" in text and "examples/" not in text


def test_explain_counts_ops_blocks_and_segments(plan, blocks) -> None:
    text = " ".join(plan.explain(detail="full").split())
    assert f"{blocks.num_nodes} ops in {len(blocks.sequence)} blocks" in text
    assert "plan.blocks()" in text
    assert "plan.blocks()" not in ParallelPlan.from_json(plan.to_json()).explain(detail="full")


def test_a_plan_without_its_program_says_what_to_do(plan) -> None:
    with pytest.raises(PlanError, match=r"plan\.blocks\(\): needs the traced program"):
        ParallelPlan.from_json(plan.to_json()).blocks()


@pytest.mark.parametrize("stage", [1, -1, True, "0"])
def test_stages_that_are_not_there_are_refused(plan, stage) -> None:
    with pytest.raises(ArgumentError, match=r"plan\.blocks\(stage=.*this plan has 1"):
        plan.blocks(stage)


def test_one_device_has_nothing_to_choose() -> None:
    example = build("mlp-tiny")
    arguments = (example.abstract_state(), example.abstract_batch(8))
    plan = autopar.plan(example.train_step, *arguments, cluster=autopar.ClusterSpec(1, 1, "cpu"))
    with pytest.raises(PlanError, match="planned for one device"):
        plan.blocks()


def test_stages_of_a_pipeline_have_blocks_of_their_own() -> None:
    example = build("mlp-tiny")
    arguments = (example.abstract_state(), example.abstract_batch(16))
    method = autopar.PipeshardParallel(num_micro_batches=2, stages=autopar.UniformStages(2))
    plan = autopar.plan(example.train_step, *arguments, cluster=CLUSTER, method=method)
    for stage in range(2):
        blocks = plan.blocks(stage)
        check_blocks(blocks)
        assert blocks.mesh_shape == plan.stages[stage].mesh_shape
        # Three layers; the first of all needs no gradient of its input.
        assert sum(b.operator == "dot_general" for b in blocks.blocks) == 8 + stage
    with pytest.raises(ArgumentError, match="this plan has 2"):
        plan.blocks(2)

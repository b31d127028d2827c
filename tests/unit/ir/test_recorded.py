"""Small files that released autopars wrote: each must load, and be written again as it was.

A change of format adds files; those that are here stay, as long as their version is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import load_profile
from autopar.runtime.checkpoints.format import manifest_text, read_manifest

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", ["plan.json", "pipeline_plan.json"])
def test_plans(name: str) -> None:
    text = (RECORDED / name).read_text(encoding="utf-8")
    assert ParallelPlan.from_json(text).to_json() == text


def test_what_a_plan_says() -> None:
    plan = ParallelPlan.load(RECORDED / "plan.json")
    assert (plan.mesh_shape, plan.num_stages, plan.pinned[0][1]) == ((2,), 1, "P('x', None)")
    assert plan.cluster is not None and plan.cluster.spec.flops_16bit == 1e12
    assert plan.details is not None and len(plan.details.ops) > 10


def test_what_a_pipeline_and_its_search_say() -> None:
    plan = ParallelPlan.load(RECORDED / "pipeline_plan.json")
    assert (plan.num_stages, plan.schedule, str(plan.layering)) == (2, "1f1b", "2")
    assert plan.search is not None and plan.search.best[0].stages[0].layers == (0, 2)
    chosen, failed = plan.search.tried
    assert (chosen.measured_s, failed.measured_s, failed.compiled_s) == (0.12, None, 0.25)
    assert plan.times is not None and len(plan.times.stage_programs) == 8
    assert plan.cluster is not None and plan.cluster.priced_by is not None


def test_profile(tmp_path: Path) -> None:
    profile = load_profile(RECORDED / "profile.json")
    assert profile.digest == "307bcadf9f63b837"
    assert profile.attentions[0].backward.seconds == 1e-3
    profile.save(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_text() == (RECORDED / "profile.json").read_text()


def test_manifest() -> None:
    manifest = read_manifest(RECORDED)
    assert [leaf.kind for leaf in manifest.leaves] == [
        "complex",
        "float",
        "key",
        "array",
        "int",
        "array",
    ]
    assert manifest_text(manifest) == (RECORDED / "manifest.json").read_text()

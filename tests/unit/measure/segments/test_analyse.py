"""Combinations are distinct, cheap by the cost model, and hold the solver's own choice."""

import pytest

from autopar.cost.report import cost_report
from autopar.errors import ProfileError
from autopar.measure.segments.combine import layouts_of, part_problem
from autopar.measure.segments.text import analysis_text
from autopar.sharding.solve import solve_graph
from tests.unit.measure.segments.steps import analysed, prepared


@pytest.mark.ci
def test_combinations_of_a_segment():
    step = prepared("gpt-tiny")
    analysis = analysed(step)
    (space,) = analysis.meshes
    assert sorted(p for own in space.segments for p in own.parts) == [0, 1, 2, 3]
    for own in space.segments:
        assert 1 <= len(own.combinations) <= 4
        assert len({c.digest for c in own.combinations}) == len(own.combinations)
        assert own.num_strategies >= len(own.combinations)
        part = step.cut.parts[own.parts[0]]
        problem = part_problem(part, step.mesh((8,)))
        for c in own.combinations:
            layouts = layouts_of(problem, c.factors)
            assert layouts is not None
            report = cost_report(part.graph, step.mesh((8,)), layouts)
            assert c.symbolic_s == pytest.approx(report.compute_s + report.communication_s)


@pytest.mark.ci
def test_the_solvers_plan_is_among_them():
    step = prepared("gpt-tiny")
    (space,) = analysed(step).meshes
    mesh = step.mesh((8,))
    best = solve_graph(step.graph, mesh)
    for own in space.segments:
        kept = {c.factors for c in own.combinations}
        part = step.cut.parts[own.parts[0]]
        chosen = [best.strategies[n].factors if n >= 0 else None for n in part.nodes]
        assert any(
            all(a is None or a == b for a, b in zip(chosen, factors, strict=True))
            for factors in kept
        )


def test_another_program_is_refused():
    step, other = prepared("gpt-tiny"), prepared("mlp-tiny")
    with pytest.raises(ProfileError, match="another program"):
        other.check_same("train_step", step.fingerprint, "analysis.json")


def test_text_names_segments_and_spaces():
    text = analysis_text(analysed(prepared("gpt-tiny")))
    assert "4 segments, 3 of them unique" in text
    assert "dot_general of GPT/layer_0/attention/qkv (forward): 5 strategies" in text
    assert "best plan of the step" in text

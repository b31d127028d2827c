"""Every equation and node is in one part, equal layers are one segment, and nothing is lost."""

import pytest

from autopar.ir.graph import check_graph
from tests.unit.measure.segments.steps import prepared

STEPS = {
    "mlp": ("mlp-tiny", {}),
    "gpt": ("gpt-tiny", {"num_layers": 3}),
    "llama": ("llama-tiny", {"num_layers": 3}),
    "moe": ("moe-tiny", {}),
    "a scan over layers": ("gpt-tiny-scan", {}),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [name if name == "gpt" else pytest.param(name, marks=pytest.mark.slow) for name in STEPS],
)
def test_parts_are_the_step(name):
    model, options = STEPS[name]
    step = prepared(model, **options)
    cut, graph, program = step.cut, step.graph, step.traced.program
    assert len(cut.parts) > 1
    nodes = sorted(n for part in cut.parts for n in part.nodes if n >= 0)
    assert nodes == list(range(len(graph.nodes)))
    results = [e.results for part in cut.parts for e in part.program.equations]
    assert sorted(results) == sorted(e.results for e in program.equations)
    for number, part in enumerate(cut.parts):
        check_graph(part.graph)
        made = {r for e in part.program.equations for r in e.results}
        ports = {port.value for port in part.ports}
        for equation in part.program.equations:
            read = {o for o in equation.operands if isinstance(o, int)}
            assert read <= made | set(part.program.inputs) | {v for v, _ in part.program.captured}
        for port in part.ports:
            for source in port.sources:
                other = cut.parts[source.part]
                assert source.part != number
                assert source.node in other.nodes
        assert set(part.sent) <= made
        assert ports.isdisjoint(made)
    state = sum(len(part.graph.state) for part in cut.parts)
    assert state == len(graph.state)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_equal_layers_are_one_segment(name):
    model, options = STEPS[name]
    cut = prepared(model, **options).cut
    assert [len(own) for own in cut.segments] == [1, 3, 1]
    first, *others = (cut.parts[n] for n in cut.segments[1])
    for other in others:
        kinds = [(n.kind, n.name, n.rule) for n in first.graph.nodes]
        assert kinds == [(n.kind, n.name, n.rule) for n in other.graph.nodes]
        assert [first.graph.values[p.value].shape for p in first.ports] == [
            other.graph.values[p.value].shape for p in other.ports
        ]


def test_update_is_with_its_parameters():
    cut = prepared("gpt-tiny", num_layers=3).cut
    for number in cut.segments[1]:
        part = cut.parts[number]
        regions = {node.region for node in part.graph.nodes if node.equation is not None}
        assert regions == {"forward", "backward", "update"}
        assert len(part.graph.state) == 36  # 12 parameters with two moments

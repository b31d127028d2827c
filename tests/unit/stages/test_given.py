"""Stages as users ask for them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from autopar.errors import ArgumentError, MeshError
from autopar.ir.mesh import ClusterSpec
from autopar.stages.given import manual_stages, uniform_stages
from autopar.stages.submeshes import candidate_submeshes
from tests.unit.stages.figures import setting, table

CLUSTER = ClusterSpec(2, 4)
LATENCY = np.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def tables(**figures):
    return [
        table(submesh, LATENCY / prod(submesh), mesh_shape=shape, **figures)
        for submesh in candidate_submeshes(CLUSTER)
        for shape in ((prod(submesh),), (2, prod(submesh) // 2))[: 2 if prod(submesh) > 2 else 1]
    ]


def where(num_layers=6, **rest):
    return setting(CLUSTER, num_layers, 4, **rest)


def test_uniform_stages_are_balanced():
    choice, report = uniform_stages(2, tables(), where())
    assert [stage.submesh for stage in choice.stages] == [(1, 4), (1, 4)]
    assert [stage.layers for stage in choice.stages] == [(0, 2), (2, 6)]
    assert report.best[0] == choice
    choice, _ = uniform_stages(4, tables(), where())
    assert [stage.submesh for stage in choice.stages] == [(1, 2)] * 4
    assert choice.stages[0].layers == (0, 1)


def test_uniform_stages_that_do_not_fit():
    choice, report = uniform_stages(2, tables(held_bytes=10), where(memory_budget=25))
    assert choice is None and report.notes


def test_more_uniform_stages_than_layers():
    with pytest.raises(ArgumentError) as caught:
        uniform_stages(8, tables(), where())
    for part in ("UniformStages(num_stages=8)", "there are 6", "6 stages or fewer", "AutoLayers"):
        assert part in str(caught.value)


def test_uniform_stages_that_do_not_divide_the_cluster():
    with pytest.raises(MeshError, match=r"UniformStages\(num_stages=3\)"):
        uniform_stages(3, tables(), where())


def test_manual_stages():
    ids, submeshes = [[0, 1], [2], [3, 4, 5]], [(1, 2), (1, 2), (1, 4)]
    choice = manual_stages(ids, submeshes, [None, None, (2, 2)], tables(), where())
    assert [stage.layers for stage in choice.stages] == [(0, 2), (2, 3), (3, 6)]
    assert [stage.submesh for stage in choice.stages] == submeshes
    assert choice.stages[2].mesh_shape == (2, 2)
    assert choice.num_micro_batches == 4
    assert choice.step_s == pytest.approx((2 + 0.5 + 0.75) + 3 * 2)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4)])
def test_axes_of_one_device_do_not_count(shape):
    choice = manual_stages([[0, 1, 2], [3, 4, 5]], [(1, 4)] * 2, [shape] * 2, tables(), where())
    assert [stage.mesh_shape for stage in choice.stages] == [(4,), (4,)]


def test_manual_stages_take_the_variant_that_fits_or_nearly_does():
    both = [
        table((2, 4), LATENCY, in_flight_bytes=10),
        table((2, 4), LATENCY * 2, in_flight_bytes=1, remat=True),
    ]
    one_stage = ([[0, 1, 2, 3, 4, 5]], [(2, 4)], [None])
    assert not manual_stages(*one_stage, both, where()).stages[0].remat
    assert manual_stages(*one_stage, both, where(memory_budget=6)).stages[0].remat
    choice = manual_stages(*one_stage, both, where(memory_budget=2))
    assert choice.stages[0].remat and choice.stages[0].peak_bytes == 6


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([[0, 1], [2, 3, 4]], "layer 5 is in no stage: the step has 6 layers"),
        ([[0, 1, 2], [3, 4, 5, 6]], "there is no layer 6: the step has 6 layers"),
        ([[0, 1, 2], [2, 3, 4, 5]], "twice or out of order"),
        ([[3, 4, 5], [0, 1, 2]], "twice or out of order"),
        ([[0, 1, 2, 3, 4, 5], []], "a stage has no layer"),
    ],
)
def test_layers_that_are_not_those_of_the_step(ids, wrong):
    with pytest.raises(ArgumentError) as caught:
        manual_stages(ids, [(1, 4), (1, 4)], [None, None], tables(), where())
    assert str(caught.value).startswith("ManualStages(layer_ids=")
    assert wrong in str(caught.value)


@pytest.mark.parametrize("submeshes", [[(1, 4), (1, 2)], [(2, 4), (1, 4)], [(1, 2), (1, 6)]])
def test_submeshes_that_do_not_tile(submeshes):
    with pytest.raises(MeshError, match="do not tile the cluster of 2 × 4 devices"):
        manual_stages([[0, 1, 2], [3, 4, 5]], submeshes, [None, None], tables(), where())


def test_a_mesh_that_there_is_no_variant_of():
    with pytest.raises(ArgumentError) as caught:
        shapes = [None, (4, 2)]
        manual_stages([[0, 1, 2], [3, 4, 5]], [(1, 4), (1, 4)], shapes, tables(), where())
    for part in ("mesh_shapes", "stage 1", "(4, 2)", "[(2, 2), (4,)]", "(1, 4)"):
        assert part in str(caught.value)

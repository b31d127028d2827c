"""Stages that are found where the best can be said beforehand; tests/properties tries them all."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from autopar.ir.mesh import ClusterSpec
from autopar.stages.stage_search import search_stages
from autopar.stages.submeshes import candidate_submeshes
from tests.unit.stages.costs import setting, table


def linear_tables(cluster, latency_s, overhead=0.0, **figures):
    """As many times as fast on as many devices, but for an overhead that grows with them."""
    latency = np.asarray(latency_s, float)
    return [
        table(submesh, latency / prod(submesh) + overhead * (prod(submesh) - 1), **figures)
        for submesh in candidate_submeshes(cluster)
    ]


def summary(choice):
    return [(stage.layers, stage.submesh) for stage in choice.stages]


def test_one_stage_where_devices_scale():
    cluster = ClusterSpec(1, 4)
    choice, report = search_stages(linear_tables(cluster, [1.0] * 4), setting(cluster, 4, 8))
    assert summary(choice) == [((0, 4), (1, 4))]
    assert choice.step_s == pytest.approx(8 * 4 / 4)
    assert report.intra_only_s == pytest.approx(choice.step_s)


def test_stages_where_devices_do_not_scale():
    cluster = ClusterSpec(1, 4)
    tables = linear_tables(cluster, [1.0] * 4, overhead=1.0)
    choice, report = search_stages(tables, setting(cluster, 4, 100))
    assert summary(choice) == [((i, i + 1), (1, 1)) for i in range(4)]
    assert choice.step_s == pytest.approx(4 + 99 * 1)
    assert report.intra_only_s == pytest.approx(100 * 4 * (1 / 4 + 3))
    assert report.best[0] is choice


def test_with_one_micro_batch_nothing_is_gained_by_stages():
    cluster = ClusterSpec(1, 4)
    tables = linear_tables(cluster, [1.0] * 4, overhead=0.05)
    assert len(search_stages(tables, setting(cluster, 4, 1))[0].stages) == 1
    assert len(search_stages(tables, setting(cluster, 4, 1000))[0].stages) > 1


def test_unequal_layers_get_unequal_submeshes():
    cluster = ClusterSpec(1, 8)
    tables = linear_tables(cluster, [2.0, 2.0, 4.0], overhead=0.1)
    choice, _ = search_stages(tables, setting(cluster, 3, 64), num_stages=3)
    assert [stage.submesh for stage in choice.stages] == [(1, 2), (1, 2), (1, 4)]


def test_slow_links_between_hosts_make_stages_of_hosts():
    """Inside of a host devices scale; a submesh of two hosts pays for every layer, a pipeline only
    at its cut."""
    cluster = ClusterSpec(2, 4, host_bandwidth=1e9)
    tables = [
        table(submesh, np.ones(6) / prod(submesh) + (0.5 if submesh == (2, 4) else 0.0))
        for submesh in candidate_submeshes(cluster)
    ]
    choice, _ = search_stages(tables, setting(cluster, 6, 32, boundary_bytes=1e6))
    assert summary(choice) == [((0, 3), (1, 4)), ((3, 6), (1, 4))]


def test_cuts_are_made_where_little_crosses():
    cluster = ClusterSpec(2, 1)
    tables = [table((1, 1), [1.0] * 4)]
    crossing = np.array([1e12, 1e3, 1e12])
    choice, _ = search_stages(tables, setting(cluster, 4, 8, boundary_bytes=crossing))
    assert summary(choice)[0] == ((0, 2), (1, 1))
    assert choice.stages[0].transfer_s == pytest.approx(15e-6 + 1e3 / 400e9)
    # Without a backward pass nothing comes back to the first stage.
    forward = setting(cluster, 4, 8, boundary_bytes=crossing, has_backward=False)
    assert search_stages(tables, forward)[0].stages[0].transfer_s == 0


@pytest.mark.parametrize(
    ("schedule", "has_backward", "stage_programs"),
    [("1f1b", True, 2), ("gpipe", True, 2), ("zero_bubble", True, 3), ("inference", False, 1)],
)
def test_every_stage_program_is_started(schedule, has_backward, stage_programs):
    cluster = ClusterSpec(1, 1)
    where = setting(cluster, 2, 4, launch_s=0.5, schedule=schedule, has_backward=has_backward)
    choice, _ = search_stages([table((1, 1), [1.0, 1.0], once_s=0.25)], where)
    assert choice.step_s == pytest.approx(4 * (2 + stage_programs * 0.5) + 0.5)


# -- memory


def two_stages(schedule, budget, num_micro_batches=4):
    """Two layers on two devices, each with 10 held, 5 per micro-batch and 3 while it is run."""
    cluster = ClusterSpec(2, 1)
    tables = [table((1, 1), [1.0, 1.0], held_bytes=10, in_flight_bytes=5, working_bytes=3)]
    where = setting(cluster, 2, num_micro_batches, schedule=schedule, memory_budget=budget)
    return search_stages(tables, where, num_stages=2)


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("gpipe", [4, 4]),
        ("1f1b", [2, 1]),
        ("zero_bubble", [2, 1]),
        ("interleaved_1f1b", [2, 1]),
        ("1f1b_eager", [3, 1]),
        ("inference", [1, 1]),
    ],
)
def test_memory_by_position(schedule, in_flight):
    needed = 13 + 5 * in_flight[0]
    choice, _ = two_stages(schedule, needed)
    assert [stage.peak_bytes for stage in choice.stages] == [13 + 5 * f for f in in_flight]
    choice, report = two_stages(schedule, needed - 1)
    assert choice is None and report.best == () and report.notes


def test_never_more_in_flight_than_there_are():
    assert two_stages("1f1b", 18, num_micro_batches=1)[0].stages[0].peak_bytes == 18


def test_the_variant_depends_on_the_position():
    """The first stage keeps two micro-batches and has to recompute, the last one does not."""
    cluster = ClusterSpec(2, 1)
    tables = [
        table((1, 1), [1.0, 1.0], in_flight_bytes=10),
        table((1, 1), [1.5, 1.5], in_flight_bytes=1, remat=True),
    ]
    where = setting(cluster, 2, 8, memory_budget=10)
    choice, _ = search_stages(tables, where)
    assert [stage.remat for stage in choice.stages] == [True, False]
    assert [stage.table for stage in choice.stages] == [1, 0]


def test_what_would_be_best_if_it_fitted_gives_way_to_another_submesh():
    """On one device the first stage fits only if it recomputes; on two it need not."""
    cluster = ClusterSpec(3, 1)
    tables = [
        table((1, 1), [1.0, 1.0], in_flight_bytes=10),
        table((1, 1), [1.2, 1.2], in_flight_bytes=1, remat=True),
        table((2, 1), [1.05, 1.0], in_flight_bytes=5),
    ]
    fitting, _ = search_stages(tables, setting(cluster, 2, 2, memory_budget=15), top=1)
    assert summary(fitting) == [((0, 1), (2, 1)), ((1, 2), (1, 1))]
    assert fitting.step_s == pytest.approx(2.05 + 1.05)
    roomy, _ = search_stages(tables, setting(cluster, 2, 2, memory_budget=20), top=1)
    assert summary(roomy) == [((0, 1), (1, 1)), ((1, 2), (2, 1))]


def test_a_budget_by_submesh():
    cluster = ClusterSpec(1, 2)
    tables = linear_tables(cluster, [1.0, 1.0], held_bytes=4)
    by_submesh = {(1, 1): 4.0, (1, 2): 1.0}.__getitem__
    choice, _ = search_stages(tables, setting(cluster, 2, 4, memory_budget=by_submesh))
    assert len(choice.stages) == 2


def test_what_fits_nowhere_is_told():
    cluster = ClusterSpec(1, 1)
    tables = [table((1, 1), [1.0, 1.0], held_bytes=np.array([1e9, 5e9]))]
    choice, report = search_stages(tables, setting(cluster, 2, 4, memory_budget=3e9))
    assert choice is None
    assert "Layer 1 alone" in report.notes[0] and "1.9 GiB more" in report.notes[0]
    tables = [table((1, 1), [1.0, 1.0], held_bytes=2e9)]
    _, report = search_stages(tables, setting(cluster, 2, 4, memory_budget=3e9))
    assert "no pipeline fits as a whole" in report.notes[0]


# -- what the report says


def test_devices_that_cannot_be_used():
    cluster = ClusterSpec(1, 4)
    tables = [table((1, 1), [1.0, 1.0])]  # two layers, and no variant on more than one device
    choice, report = search_stages(tables, setting(cluster, 2, 4))
    assert len(choice.stages) == 2
    assert report.notes == ("No pipeline can use all 4 devices; 2 of them are used.",)


def test_more_stages_than_layers():
    cluster = ClusterSpec(1, 4)
    tables = linear_tables(cluster, [1.0, 1.0])
    choice, report = search_stages(tables, setting(cluster, 2, 4), num_stages=3)
    assert choice is None
    assert report.notes == ("3 stages need as many layers; there are 2.",)


def test_the_report_keeps_other_plans():
    cluster = ClusterSpec(2, 4)
    tables = linear_tables(cluster, [1.0] * 8, overhead=0.01)
    choice, report = search_stages(tables, setting(cluster, 8, 16), top=3)
    assert report.best[0] == choice and len(report.best) == 3
    assert len({tuple(summary(plan)) for plan in report.best}) == 3
    assert len({len(plan.stages) for plan in report.best}) > 1
    assert report.num_layers == 8
    assert report.num_candidates == len(tables) * 36
    assert 0 < report.num_bounds < report.num_pruned < report.num_candidates
    assert set(report.seconds) == {"ranges", "search"}
    assert len(search_stages(tables, setting(cluster, 8, 16), top=1)[1].best) == 1


def test_only_given_submeshes():
    cluster = ClusterSpec(1, 4)
    tables = linear_tables(cluster, [1.0] * 4)
    choice, _ = search_stages(tables, setting(cluster, 4, 8), submeshes={(1, 2)})
    assert [stage.submesh for stage in choice.stages] == [(1, 2), (1, 2)]
    assert choice.stages[0].table == 1
    choice, report = search_stages(tables, setting(cluster, 4, 8), submeshes={(1, 3)})
    assert choice is None and "no tables" in report.notes[0]


def test_submeshes_that_cannot_be_laid_out_are_passed_over():
    """1×3, 1×3 and 1×2 are as many devices as 2×4 has, and best; no two hosts of 4 have them."""
    cluster = ClusterSpec(2, 4)
    tables = [
        table((1, 3), np.ones(3) / 3),
        table((1, 2), np.ones(3) / 2),
        table((1, 4), np.ones(3)),
        table((2, 4), np.ones(3) * 2),
    ]
    choice, report = search_stages(tables, setting(cluster, 3, 64))
    assert sorted(stage.submesh for stage in choice.stages) == [(1, 2), (1, 2), (1, 4)]
    assert choice.step_s == pytest.approx(2 + 63 * 1)
    assert "cannot be laid out" in report.notes[0]


def test_submeshes_of_some_devices_of_each_host():
    cluster = ClusterSpec(2, 2)
    tables = [
        table((2, 1), [1.0, 1.0]),
        table((1, 2), [5.0, 5.0]),
        table((2, 2), [5.0, 5.0]),
    ]
    choice, report = search_stages(tables, setting(cluster, 2, 16))
    assert [stage.submesh for stage in choice.stages] == [(2, 1), (2, 1)]
    assert not report.notes

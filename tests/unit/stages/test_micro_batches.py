"""How many micro-batches: ranked by tables that were made at one number."""

from __future__ import annotations

from math import inf, prod

import numpy as np
import pytest

from autopar.ir.mesh import ClusterSpec
from autopar.stages.micro_batches import (
    candidate_micro_batches,
    choose_micro_batches,
    least_step_s,
    scaled_setting,
    scaled_tables,
)
from autopar.stages.stage_search import search_stages
from autopar.stages.submeshes import candidate_submeshes
from tests.unit.stages.costs import setting, table


def test_candidates_divide_the_batch():
    assert candidate_micro_batches(12) == (1, 2, 3, 4, 6, 12)
    assert candidate_micro_batches(12, min_rows=4) == (1, 2, 3)
    assert candidate_micro_batches(7) == (1, 7)
    assert candidate_micro_batches(2, min_rows=4) == (1,)


def test_there_are_64_candidates_at_most():
    batch_size = 2**6 * 3**3 * 5**2 * 7
    found = candidate_micro_batches(batch_size)
    assert len(found) == 64
    assert all(batch_size % n == 0 for n in found)
    assert {1, 2, 4, 8, 16, 32, 64} <= set(found)


CLUSTER = ClusterSpec(4, 1)
TABLES = [table((1, 1), [1.0] * 4, in_flight_bytes=8.0, held_bytes=1.0)]


def step_s(n, launch_s):
    """Four equal stages; tables are for 4 micro-batches, in which a layer takes 1 s."""
    return (n + 3) * (4 / n + 2 * launch_s)


@pytest.mark.parametrize("launch_s", [0.001, 0.01, 0.1, 0.5, 5.0])
def test_pipelines_are_filled_until_starting_stage_programs_costs_more(launch_s):
    numbers = candidate_micro_batches(64)
    found = choose_micro_batches(TABLES, setting(CLUSTER, 4, 4, launch_s=launch_s), numbers)
    expected = min(numbers, key=lambda n: step_s(n, launch_s))
    assert step_s(found.num_micro_batches, launch_s) <= step_s(expected, launch_s) * 1.002
    assert found.choice.step_s == pytest.approx(step_s(found.num_micro_batches, launch_s))
    assert found.choice.num_micro_batches == found.num_micro_batches
    assert list(found.steps_s) == list(numbers)
    assert min(found.steps_s.values()) >= found.choice.step_s / 1.002


def test_only_what_is_below_the_cutoff_is_of_interest():
    where, numbers = setting(CLUSTER, 4, 4, launch_s=0.1), candidate_micro_batches(64)
    best = choose_micro_batches(TABLES, where, numbers)
    best_s = best.choice.step_s
    found = choose_micro_batches(TABLES, where, numbers, cutoff_s=1.05 * best_s)
    assert found is not None and found.choice.step_s <= 1.002 * best_s
    assert choose_micro_batches(TABLES, where, numbers, cutoff_s=0.99 * best_s) is None


def test_at_the_tables_own_number_it_is_the_search():
    where = setting(CLUSTER, 4, 4, launch_s=0.1, boundary_bytes=1e9)
    found = choose_micro_batches(TABLES, where, [4])
    assert found.choice == search_stages(TABLES, where)[0]
    assert found.num_micro_batches == 4


def test_memory_asks_for_smaller_micro_batches():
    """The first of four stages keeps four micro-batches of 8 bytes at n = 4."""
    numbers = candidate_micro_batches(64)
    where = setting(CLUSTER, 4, 4, launch_s=5.0, memory_budget=9.0)
    found = choose_micro_batches(TABLES, where, numbers)
    assert found.num_micro_batches == 16
    assert found.choice.stages[0].peak_bytes == 1 + 4 * 8 * 4 / 16
    assert found.steps_s[8] == inf
    assert choose_micro_batches(TABLES, where, [1, 2, 4]) is None


def test_of_equally_good_numbers_the_smallest():
    cluster = ClusterSpec(1, 1)
    tables = [table((1, 1), [1.0])]
    for reference in (1, 8):
        found = choose_micro_batches(tables, setting(cluster, 1, reference), [1, 2, 4, 8])
        assert found.num_micro_batches == 1


def test_a_number_of_stages_and_submeshes_can_be_asked_for():
    cluster = ClusterSpec(1, 4)
    tables = [table(s, np.ones(4) / prod(s)) for s in candidate_submeshes(cluster)]
    where = setting(cluster, 4, 4)
    found = choose_micro_batches(tables, where, [4], num_stages=2, submeshes={(1, 2)})
    assert [stage.submesh for stage in found.choice.stages] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_fewer_micro_batches_save_no_more_than_what_each_costs(seed):
    """Also where memory is short: what fits with fewer fits with more."""
    rng = np.random.default_rng(seed)
    cluster = ClusterSpec(*((1, 4), (2, 2), (4, 1))[seed % 3])
    tables = [
        table(
            submesh,
            rng.uniform(0.5, 1.5, 5) / prod(submesh),
            once_s=rng.uniform(0, 1, 5),
            held_bytes=rng.uniform(0, 2, 5),
            in_flight_bytes=rng.uniform(0, 1, 5),
            working_bytes=rng.uniform(0, 1, 5),
        )
        for submesh in candidate_submeshes(cluster)
    ]
    schedule = ("1f1b", "gpipe", "1f1b_eager", "zero_bubble")[seed % 4]
    own = setting(
        cluster,
        5,
        16,
        schedule=schedule,
        launch_s=rng.uniform(0, 0.2),
        boundary_bytes=rng.uniform(0, 1e9),
        memory_budget=(inf, 12.0, 8.0)[seed % 5 % 3],
    )
    best, _ = search_stages(tables, own)
    for number in (1, 2, 4, 8):
        fewer, _ = search_stages(scaled_tables(tables, own, number), scaled_setting(own, number))
        least_s = least_step_s(best, own, number)
        assert fewer is None or fewer.step_s >= least_s * (1 - 1e-9)

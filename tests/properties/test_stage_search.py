"""The stage search against every pipeline: all cuts × submeshes × variants, with memory by
position, for every schedule. The formulas of costs and memory are written out here again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.devices import DeviceSpec
from autopar.ir.mesh import ClusterSpec
from autopar.ir.schedule import SCHEDULES
from autopar.ir.stages import LayerTable, Submesh
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.pruning import min_times, too_slow_submeshes
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages
from autopar.stages.submeshes import candidate_submeshes, place_submeshes
from autopar.stages.worthwhile import LITTLE, search_priced, search_tables

# In flight, by micro-batches n and stages s from this one to the last.
IN_FLIGHT = {
    "gpipe": lambda n, s: n,
    "1f1b": lambda n, s: min(n, s),
    "1f1b_eager": lambda n, s: min(n, 2 * s - 1),
    "interleaved_1f1b": lambda n, s: min(n, s),
    "zero_bubble": lambda n, s: min(n, s),
    "inference": lambda n, s: 1,
}
DEVICE = DeviceSpec("test", 1, 1, 1, 1, 100.0, 30.0, 0.01, 0.05, 1)
CLUSTERS = [(1, 1), (1, 2), (1, 4), (1, 6), (1, 8), (2, 2), (2, 4), (3, 2), (4, 2), (2, 3), (8, 1)]


def random_tables(
    random: np.random.Generator, cluster: ClusterSpec, num_layers: int
) -> list[LayerTable]:
    """One or two variants of most submeshes. Bytes are integers, so that exact fits count as fits;
    layers and times may be equal."""
    equal = random.random() < 0.3
    tables = []
    for submesh in candidate_submeshes(cluster):
        for _ in range(random.choice([0, 1, 2], p=[0.05, 0.45, 0.5])):

            def figures(most: int) -> np.ndarray:
                row = random.integers(0, most + 1, num_layers)
                return np.full(num_layers, row[0]) if equal else row

            slow = 8 / (prod(submesh) ** random.uniform(0.3, 1.1))
            tables.append(
                LayerTable(
                    submesh=submesh,
                    mesh_shape=(prod(submesh),),
                    latency_s=(1 + figures(7)) * slow,
                    forward_s=np.zeros(num_layers),
                    once_s=figures(5) * slow,
                    held_bytes=figures(30),
                    in_flight_bytes=figures(10),
                    working_bytes=figures(20),
                )
            )
    return tables


def random_setting(
    random: np.random.Generator, schedule: str, cluster: ClusterSpec, num_layers: int
) -> Setting:
    low, high = 40, 25 * num_layers + 80
    limits = {s: float(random.integers(low, high)) for s in candidate_submeshes(cluster)}
    budgets = [inf, float(random.integers(low, high)), limits.__getitem__]
    return Setting(
        cluster=cluster,
        boundary_bytes=random.integers(0, 60, num_layers - 1),
        num_micro_batches=int(random.choice([1, 2, 4, 8, 32])),
        schedule=schedule,
        memory_budget=budgets[random.integers(3)],
        launch_s=float(random.choice([0.0, 0.3])),
        has_backward=schedule != "inference",
    )


def stage_figures(table: LayerTable, first: int, end: int, setting: Setting):
    """(Cost, fixed bytes, bytes per micro-batch in flight) of a stage."""
    size, n = prod(table.submesh), setting.num_micro_batches
    waits = 0.0
    for cut, is_crossed in ((first, True), (end, setting.has_backward)):
        inner = 0 < cut < len(table.latency_s)
        if inner and is_crossed and setting.boundary_bytes[cut - 1]:
            if setting.cluster.num_hosts == 1:
                alpha, bandwidth = 0.01, size * 100.0
            else:
                hosts = -(-size // setting.cluster.devices_per_host)
                alpha, bandwidth = 0.05, min(size * 100.0, hosts * 30.0)
            waits += alpha + setting.boundary_bytes[cut - 1] / bandwidth
    stage_programs = {"inference": 1, "zero_bubble": 3}.get(setting.schedule, 2)
    layers = slice(first, end)
    cost = sum(table.latency_s[layers]) + sum(table.once_s[layers]) / n + waits
    cost += stage_programs * setting.launch_s
    fixed = sum(table.held_bytes[layers]) + max(table.working_bytes[layers])
    return cost, fixed, sum(table.in_flight_bytes[layers])


def brute_force(tables, setting: Setting, num_devices: int, num_stages: int | None) -> float:
    """The least step time on exactly `num_devices` devices; infinite if nothing fits."""
    num_layers, n = len(setting.boundary_bytes) + 1, setting.num_micro_batches
    budget = setting.memory_budget
    budgets = [budget(t.submesh) if callable(budget) else budget for t in tables]
    figures = {
        (v, k, e): stage_figures(table, k, e, setting)
        for v, table in enumerate(tables)
        for k in range(num_layers)
        for e in range(k + 1, num_layers + 1)
    }
    sizes = [prod(table.submesh) for table in tables]
    best = inf

    def extend(first: int, devices: int, stages_left: int, total: float, slowest: float) -> None:
        nonlocal best
        if stages_left == 0:
            if first == num_layers and devices == 0:
                best = min(best, total + (n - 1) * slowest)
            return
        in_flight = IN_FLIGHT[setting.schedule](n, stages_left)
        for end in range(first + 1, num_layers + 1):
            for v, size in enumerate(sizes):
                cost, fixed, each = figures[v, first, end]
                if size <= devices and fixed + in_flight * each <= budgets[v]:
                    left = devices - size
                    extend(end, left, stages_left - 1, total + cost, max(slowest, cost))

    for count in [num_stages] if num_stages else range(1, num_layers + 1):
        extend(0, num_devices, count, 0.0, 0.0)
    return best


def check_plan(plan, tables, setting: Setting, num_devices: int) -> None:
    """A plan is consistent: its costs add up, and its stages fit, cover all layers and can be
    placed."""
    n = setting.num_micro_batches
    cuts = [0, *(stage.layers[1] for stage in plan.stages)]
    assert [stage.layers for stage in plan.stages] == list(pairwise(cuts))
    assert cuts[-1] == len(setting.boundary_bytes) + 1
    assert sum(prod(stage.submesh) for stage in plan.stages) == num_devices
    whole = num_devices == setting.cluster.num_devices
    place_submeshes([stage.submesh for stage in plan.stages], setting.cluster, whole=whole)
    costs = []
    for i, stage in enumerate(plan.stages):
        table = tables[stage.table]
        assert (stage.submesh, stage.mesh_shape) == (table.submesh, table.mesh_shape)
        cost, fixed, each = stage_figures(table, *stage.layers, setting)
        costs.append(cost)
        peak = fixed + IN_FLIGHT[setting.schedule](n, len(plan.stages) - i) * each
        assert stage.peak_bytes == peak <= setting.budget_bytes(stage.submesh)
    assert plan.step_s == pytest.approx(sum(costs) + (n - 1) * max(costs))


@pytest.mark.representatives("1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_no_pipeline_is_better(schedule, seed):
    random = np.random.default_rng([seed, SCHEDULES.index(schedule)])
    cluster = ClusterSpec(*CLUSTERS[random.integers(len(CLUSTERS))], device=DEVICE)
    num_layers = int(random.choice([1, 2, 3, 4, 5, 6], p=[0.04, 0.1, 0.16, 0.2, 0.25, 0.25]))
    asked = [None, None, None, 1, 2, 3][random.integers(6)]
    tables = random_tables(random, cluster, num_layers)
    if not tables:
        return
    setting = random_setting(random, schedule, cluster, num_layers)
    alone, _ = search_stages(tables, setting, num_stages=asked, top=1)  # without looking around
    choice, report = search_stages(tables, setting, num_stages=asked)
    for num_devices in range(cluster.num_devices, 0, -1):
        expected = brute_force(tables, setting, num_devices, asked)
        if expected < inf:
            break
    if expected == inf:
        assert choice is None and report.best == () and report.notes
        return
    assert alone is not None and choice is not None
    assert alone.step_s == pytest.approx(expected, rel=1e-7)
    assert choice.step_s == pytest.approx(expected, rel=1e-7)
    assert (num_devices == cluster.num_devices) == (not report.notes)
    assert report.best[0] == choice
    assert [p.step_s for p in report.best] == sorted(p.step_s for p in report.best)
    for plan in report.best:
        check_plan(plan, tables, setting, num_devices)
        assert asked is None or len(plan.stages) == asked


@given(seed=st.integers(0, 2**32 - 1), gap=st.sampled_from([0.01, 0.1]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_gap_is_kept(seed, gap):
    random = np.random.default_rng(seed)
    cluster = ClusterSpec(2, 4, device=DEVICE)
    tables = random_tables(random, cluster, 5)
    setting = random_setting(random, "1f1b", cluster, 5)
    exact, _ = search_stages(tables, setting)
    rough, _ = search_stages(tables, setting, gap=gap)
    assert (exact is None) == (rough is None)
    if exact is not None and rough is not None:
        assert rough.step_s * (1 - gap) <= exact.step_s * (1 + 1e-7)
        assert search_stages(tables, setting, cutoff_s=exact.step_s * 0.999)[0] is None
        again = search_stages(tables, setting, cutoff_s=exact.step_s * 1.001)[0]
        assert again is not None and again.step_s == pytest.approx(exact.step_s)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_whole_hosts_are_counted_as_such(seed):
    random = np.random.default_rng(seed)
    cluster = ClusterSpec(*[(4, 2), (6, 2), (5, 3)][int(random.integers(3))], device=DEVICE)
    tables = random_tables(random, cluster, 5)
    tables = [table for table in tables if table.submesh[1] == cluster.devices_per_host]
    if not tables:
        return
    setting = random_setting(random, "1f1b", cluster, 5)
    choice, _ = search_stages(tables, setting)
    for num_devices in range(cluster.num_devices, 0, -1):
        expected = brute_force(tables, setting, num_devices, None)
        if expected < inf:
            break
    assert (choice is None) == (expected == inf)
    if choice is not None:
        assert choice.step_s == pytest.approx(expected, rel=1e-7)
        check_plan(choice, tables, setting, num_devices)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_submeshes_that_are_too_slow_are_in_no_better_plan(seed):
    random = np.random.default_rng(seed)
    cluster = ClusterSpec(*CLUSTERS[random.integers(len(CLUSTERS))], device=DEVICE)
    work_s = random.uniform(1, 20, 4)  # of each layer on one device, at full speed
    tables = [
        replace(table, latency_s=work_s / prod(table.submesh) * random.uniform(1, 1.5, 4))
        for table in random_tables(random, cluster, 4)
    ]
    setting = random_setting(random, "1f1b", cluster, 4)
    best, _ = search_stages(tables, setting) if tables else (None, None)
    submeshes = candidate_submeshes(cluster)
    large = [table for table in tables if prod(table.submesh) >= cluster.num_devices / 4]
    known = search_stages(large, setting)[0] if large else None
    if (
        best is None
        or known is None
        or sum(prod(s.submesh) for s in known.stages) < prod(submeshes[-1])
    ):
        return

    least_s = min_times(setting.num_micro_batches * work_s, float)
    slow = too_slow_submeshes(submeshes, least_s, 4, known.step_s)
    kept = [table for table in tables if table.submesh not in slow]
    found, _ = search_stages(kept, setting)
    assert found is not None and found.step_s == pytest.approx(best.step_s, rel=1e-7)


@dataclass
class Twins:
    """What makes a table's twin, which is slower and holds less, where a search asks for it."""

    twins: list[LayerTable]
    log: PlanningLog = field(default_factory=PlanningLog)
    priced: set[Submesh] = field(default_factory=set)

    def with_prices(self, tables, submeshes):
        self.priced.update(submeshes)
        return [*tables, *(twin for twin in self.twins if twin.submesh in submeshes)]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tables_that_save_memory_are_made_wherever_they_are_of_use(seed):
    random = np.random.default_rng(seed)
    cluster = ClusterSpec(*CLUSTERS[random.integers(len(CLUSTERS))], device=DEVICE)
    tables = random_tables(random, cluster, 4)
    twins = [
        replace(
            table,
            latency_s=table.latency_s * random.uniform(1.05, 2),
            held_bytes=table.held_bytes // 2,
            in_flight_bytes=table.in_flight_bytes // 2,
        )
        for table in tables
    ]
    setting = random_setting(random, "1f1b", cluster, 4)
    if not tables:
        return
    best, _ = search_stages([*tables, *twins], setting)
    maker = Twins(twins)
    known, report, _ = search_tables(tables, setting, maker.log)
    made, found, _ = search_priced(tables, setting, maker, known, report)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        used = [sum(prod(s.submesh) for s in choice.stages) for choice in (found, best)]
        assert used[0] == used[1]
        assert best.step_s * (1 - 1e-7) <= found.step_s <= best.step_s * (1 + LITTLE + 1e-7)
    # What fits without a budget and fits with it needs no twins, but for one mesh.
    free, _ = search_stages(tables, replace(setting, memory_budget=inf))
    if free is not None and known is not None and free.step_s == known.step_s:
        assert {t.submesh for t in made[len(tables) :]} <= {candidate_submeshes(cluster)[-1]}

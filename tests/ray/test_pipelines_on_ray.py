"""The pipelines of the local runtime on a Ray cluster of four hosts with two virtual devices each:
three steps equal three steps of `jax.jit(train_step)`. Two stages are two meshes of two processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import autopar
from autopar.ir.pipeline import Run
from autopar.ir.rows import num_rows
from autopar.ir.schedule import SCHEDULES
from tests.equivalence.pipelines import assert_equal, check, own_buffers
from tests.equivalence.pipelines import batch_of as stack_batch
from tests.equivalence.test_models import (
    NUM_STEPS,
    TINY,
    WITHOUT_GRADIENT,
    batch_of,
    reference,
)
from tests.equivalence.test_nested_stacks import NESTED
from tests.equivalence.test_stacks import UNLIKE, splits, stacked, state_of, step_of
from tests.ray.kills import Nodes
from tests.ray.training import fetched

pytestmark = pytest.mark.ci  # test_two_hosts stands for pipelines on Ray

UNEQUAL = ((1, 2), (1, 2), (2, 2))
STAGES = ("1", "2", "4", "unequal")
TRAINING = [name for name in SCHEDULES if name != "inference"]
IN_DEFAULT_RUN = {
    ("mlp-tiny", "2", "1f1b"),
    ("mlp-tiny", "2", "interleaved_1f1b"),
    ("mlp-tiny", "unequal", "1f1b_eager"),
}


@pytest.fixture(
    scope="module",
    autouse=True,
    params=["one node", pytest.param("four nodes", marks=pytest.mark.slow)],
)
def _cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hosts that share a node of Ray, or a node each (all on this machine)."""
    nodes = Nodes(num_nodes=4, cpus_per_node=2) if request.param == "four nodes" else None
    try:
        autopar.init(cluster="ray", num_hosts=4, devices_per_host=2)
        yield
    finally:
        autopar.shutdown()
        if nodes is not None:
            nodes.close()


def method_of(name: str, stages: str, schedule: str) -> Any:
    num_micro_batches = 1 if name.startswith("wresnet") else 4
    if stages == "1":
        return autopar.ShardParallel((2, 4), num_micro_batches=num_micro_batches)
    chosen: Any
    if stages == "unequal":
        submeshes = UNEQUAL * 2 if schedule == "interleaved_1f1b" else UNEQUAL
        chosen = autopar.ManualStages([[k] for k in range(len(submeshes))], submeshes)
    else:
        chosen = autopar.UniformStages(int(stages))
    return autopar.PipeshardParallel(num_micro_batches, stages=chosen, schedule=schedule)


CASES = [
    (name, stages, schedule)
    for name in TINY
    for stages in STAGES
    for schedule in (TRAINING if stages != "1" else ["1f1b"])
]


@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [
        pytest.param(*case, marks=() if case in IN_DEFAULT_RUN else pytest.mark.slow)
        for case in CASES
    ],
)
def test_pipeline_on_ray_equals_jit(name: str, stages: str, schedule: str) -> None:
    example, first, want_results, want_state = reference(name)
    step = autopar.parallelize(example.train_step, method=method_of(name, stages, schedule))
    state: Any = own_buffers(first)
    for index in range(NUM_STEPS):
        state, result = step(state, batch_of(example, index))
        assert_equal(fetched(result), want_results[index], f"step {index}:", rtol=1e-5)
    leaves = [x for x in jax.tree.leaves(state) if hasattr(x, "dtype")]
    assert all(isinstance(x, autopar.DistributedArray) for x in leaves)
    loose = {WITHOUT_GRADIENT: example.config.learning_rate}
    assert_equal(fetched(state), want_state, loose=loose)
    executable = step.last_executable
    assert executable.last_call.num_calls == sum(len(mesh.places) for mesh in executable.meshes)
    devices = {d for mesh in executable.meshes for d in mesh.devices}
    assert devices == set(range(8))
    if stages == "2" and schedule != "interleaved_1f1b":
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]


@pytest.mark.parametrize("name", ["odd", "shared", "scans of scans"])
def test_rows_of_stacked_parameters_are_where_their_layers_run(name: str, tmp_path: Path) -> None:
    optimizer = optax.adam(1e-2)
    if name in UNLIKE:
        num, of_stages, rows = UNLIKE[name]
        method = of_stages()
        step, first = step_of(optimizer), state_of(optimizer, stacked(num))
    else:
        loss, params, _, rows, _ = NESTED["2x3 on 3"]
        stages = autopar.ManualStages([[0, 1], [2, 3], [4, 5]], list(UNEQUAL))
        method = autopar.PipeshardParallel(2, stages=stages)
        step, first = step_of(optimizer, loss), state_of(optimizer, params())
    parallel = check(step, first, method)
    assert set(splits(parallel.last_executable.plan).values()) == {rows}
    state, _ = parallel(own_buffers(first), stack_batch(0))
    want, _ = jax.jit(step)(first, stack_batch(0))
    after, _ = jax.jit(step)(want, stack_batch(1))
    assert [num_rows(copy.rows) for copy in state["params"]["w"].copies] == list(rows)
    autopar.save_checkpoint(tmp_path, state, 1)
    restored = autopar.restore_checkpoint(tmp_path, parallel)
    assert_equal(fetched(restored), want)
    assert_equal(fetched(parallel(restored, stack_batch(1))[0]), after)
    other = autopar.parallelize(step, method="shard")
    assert_equal(fetched(other(state, stack_batch(1))[0]), after)


def test_a_step_on_ray_is_traced(tmp_path: Path) -> None:
    """Two meshes of two processes each: everything that the lists have, on one clock."""
    example = reference("mlp-tiny")[0]
    step = autopar.parallelize(example.train_step, method=method_of("mlp-tiny", "2", "1f1b"))
    state, batch = own_buffers(reference("mlp-tiny")[1]), batch_of(example, 0)
    state, _ = step(state, batch)
    profile_dir = tmp_path / "profile"
    with autopar.trace(tmp_path / "trace.json", profile_dir=profile_dir) as recorded:
        step(state, batch)
    assert recorded.notes == []
    (line,) = recorded.timelines
    (again,) = autopar.read_trace(tmp_path / "trace.json")
    assert len(again.events) == len(line.events)
    about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert len(about["clocks"]) == 4
    uncertain_s = about["clock_uncertainty_s"]
    programs = step.last_executable.programs
    for mesh, program in enumerate(programs.meshes):
        runs = [e for e in line.events if (e.kind, e.mesh) == ("run", mesh)]
        expected = [i.micro_batch for i in program.instructions if isinstance(i, Run)]
        assert [e.micro_batch for e in runs] == expected
    first_sent = min(e.start_s for e in line.events if e.kind == "send")
    assert min(e.end_s for e in line.events if e.kind == "recv") >= first_sent - 2 * uncertain_s
    assert len(list(profile_dir.glob("worker_*/**/*.xplane.pb"))) == 4

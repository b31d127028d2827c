"""`autopar.verify` around a stand-in for the compiler, which gives known figures. XLA itself is in
`proof/test_gpu_compiler.py`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import ClusterSpec, PipeshardParallel, ShardParallel, UniformStages
from autopar.compiler import plan_step
from autopar.errors import ArgumentError, CompileError, PlanError
from autopar.executables import make_executable
from autopar.ir.details import PARTIAL_SUMS, CollectiveCost, OpRow, PlanDetails, op_table
from autopar.measure.verify import verify_plan
from autopar.measure.verify.compare import bytes_on_one_device
from autopar.measure.verify.jobs import Collectives, CompileJob, ProgramCosts
from autopar.runtime.order import interleave, peak_bytes

WIDTH, ROWS = 16, 32
TEMP_BYTES, DOT_FLOPS, SENT_BYTES = 1000, 5.0, 10.0
H100S = ClusterSpec(2, 4, "h100-sxm")


def arguments(num_layers: int) -> tuple[Any, Any]:
    state = {"w": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * num_layers}
    return state, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def train_step(state, batch):
    def loss_of(params):
        x = batch
        for number, w in enumerate(params["w"]):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """The programs that were to be compiled."""
    seen: list[CompileJob] = []

    def compile_all(given, time_limit_s, done):
        seen.extend(given)
        return [figures_of(job.spec.reads, job.spec.writes) for job in given]

    monkeypatch.setattr(verify_plan, "compile_all", compile_all)
    monkeypatch.setattr(verify_plan, "cuda_version", lambda target: 13)
    return seen


def figures_of(reads, writes) -> ProgramCosts:
    return ProgramCosts(
        argument_bytes=sum(map(bytes_on_one_device, reads)),
        output_bytes=sum(map(bytes_on_one_device, writes)),
        temp_bytes=TEMP_BYTES,
        alias_bytes=0,
        collectives=(Collectives("all-reduce", 1, SENT_BYTES),),
        dot_flops=DOT_FLOPS,
        seconds=0.1,
    )


def test_a_step_on_one_mesh(jobs):
    step, args = autopar.parallelize(train_step), arguments(2)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel((2, 4)))
    report = autopar.verify(step, *args, plan=plan)
    (job,), (program,), (mesh,) = jobs, report.programs, report.meshes
    assert "cuda_compute_capability { major: 9 }" in job.target_config
    assert (program.pieces, program.runs) == (("step",), (1,))
    assert mesh.mesh_shape == (2, 4)
    assert mesh.peak_bytes.xla == program.figures.peak_bytes
    assert mesh.peak_bytes.predicted == plan.estimated_peak_bytes
    assert mesh.limit_bytes == pytest.approx(0.9 * 80e9)
    assert mesh.dot_flops.xla == DOT_FLOPS
    assert report.target == "h100-80gb"
    assert report.fits
    assert not report.is_pipeline


def test_the_memory_of_a_pipelines_meshes_is_that_of_the_runtime(jobs):
    args = arguments(4)
    method = PipeshardParallel(4, stages=UniformStages(2))
    planned = plan_step(train_step, args, {}, cluster=H100S, method=method)
    report = autopar.verify(train_step, *args, plan=planned.plan)
    executable = make_executable(planned, jax.devices())
    own_bytes = []
    for stage_program in executable.pipeline.stage_programs:
        refs = (*stage_program.reads, *stage_program.writes)
        arrays = [executable.buffers[stage_program.stage, ref.value] for ref in refs]
        own_bytes.append(TEMP_BYTES + sum(map(_bytes_on_one_device, arrays)))
    order = interleave(executable.programs)
    expected = peak_bytes(order, executable.programs, executable._bytes_of, own_bytes)
    assert [mesh.peak_bytes.xla for mesh in report.meshes] == list(expected)
    assert [mesh.buffer_bytes for mesh in report.meshes] == list(executable.live_bytes())
    assert [mesh.stages for mesh in report.meshes] == [(0,), (1,)]
    assert [mesh.topology for mesh in report.meshes] == [(1, 4), (1, 4)]
    runs = executable.num_instructions()["Run"]
    assert sum(mesh.dot_flops.xla for mesh in report.meshes) == runs * DOT_FLOPS
    (reduced,) = report.meshes[0].collectives
    own_runs = sum(
        sum(program.runs) for program in report.programs if program.pieces[0].startswith("stage0")
    )
    assert (reduced.count.xla, reduced.sent_bytes.xla) == (own_runs, own_runs * SENT_BYTES)


def _bytes_on_one_device(array) -> int:
    return prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def test_equal_stage_programs_are_compiled_once(jobs):
    args = arguments(4)
    method = PipeshardParallel(2, stages=UniformStages(4))
    plan = autopar.plan(train_step, *args, cluster=ClusterSpec(4, 2, "h100-sxm"), method=method)
    report = autopar.verify(train_step, *args, plan=plan)
    stage_programs = [name for program in report.programs for name in program.pieces]
    assert len(stage_programs) == len(set(stage_programs)) > len(jobs)
    together = {program.pieces for program in report.programs if len(program.pieces) > 1}
    assert ("stage1_forward", "stage2_forward") in together
    assert all("stage0_forward" not in names for names in together)


def test_another_target_has_its_own_memory(jobs):
    args = arguments(2)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel())
    report = autopar.verify(train_step, *args, plan=plan, target="v100-16gb")
    assert report.device == "Tesla V100-SXM2-16GB"
    assert "cuda_compute_capability { major: 7 }" in jobs[0].target_config
    assert report.meshes[0].limit_bytes < 0.92 * 17e9


def test_a_cluster_with_less_memory(jobs):
    args = arguments(2)
    cluster = ClusterSpec(1, 8, "h100-sxm", memory_bytes=5000)
    plan = autopar.plan(train_step, *args, cluster=cluster, method=autopar.DataParallel())
    report = autopar.verify(train_step, *args, plan=replace(plan, cluster=cluster))
    assert report.meshes[0].limit_bytes == pytest.approx(4500)
    assert not report.fits
    assert "does not fit" in (report.problem() or "")


def test_a_plans_own_budget_may_be_nearer_to_the_devices_memory(jobs):
    args = arguments(2)
    options = autopar.ShardingOptions(memory_budget_bytes=79e9)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel(options=options))
    report = autopar.verify(train_step, *args, plan=plan)
    assert report.meshes[0].limit_bytes == 79e9


def test_predictions_come_from_the_plans_details(jobs):
    args = arguments(2)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel())
    rows = [
        OpRow(name, "", "forward", "", "", "", "", 1.0, flops, 0.0, 0.0, 0.0)
        for name, flops in (("dot_general", 3.0), ("tanh", 100.0), ("conv_general_dilated", 4.0))
    ]
    costs = [
        CollectiveCost(kind, ("x",), PARTIAL_SUMS, "", "", "", "", "", "", "", count, 64.0, 0.0)
        for kind, count in (("all-reduce", 2), ("all-reduce", 1), ("shift", 5))
    ]
    details = PlanDetails(0.0, 0.0, op_table(rows), tuple(costs), None, ())
    report = autopar.verify(train_step, *args, plan=replace(plan, details=details))
    (mesh,) = report.meshes
    assert mesh.dot_flops.predicted == 7.0
    by_kind = {one.kind: one for one in mesh.collectives}
    assert (by_kind["all-reduce"].count.xla, by_kind["all-reduce"].count.predicted) == (1, 3)
    assert by_kind["all-reduce"].sent_bytes.predicted == 128.0
    assert by_kind["collective-permute"].count.predicted == 5


@pytest.mark.parametrize(
    ("devices", "topology"),
    [(range(8), (2, 4)), ((0, 1), (1, 2)), ((2, 3, 6, 7), (2, 2)), ((3, 4, 5), (1, 3))],
)
def test_where_some_of_a_clusters_devices_are(devices, topology):
    assert verify_plan._topology(tuple(devices), H100S) == topology


def test_hlo_goes_to_a_folder(jobs, tmp_path):
    args = arguments(1)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel())
    autopar.verify(train_step, *args, plan=plan, hlo_folder=tmp_path / "hlo")
    assert jobs[0].hlo_file == str(tmp_path / "hlo" / "train_step_step.hlo.txt")
    assert (tmp_path / "hlo").is_dir()


def test_mistakes(jobs, monkeypatch: pytest.MonkeyPatch):
    args = arguments(1)
    plan = autopar.plan(train_step, *args, cluster=H100S, method=ShardParallel())
    with pytest.raises(ArgumentError, match=r"plan='p\.json'"):
        autopar.verify(train_step, *args, plan="p.json")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="time_limit_s=0"):
        autopar.verify(train_step, *args, plan=plan, time_limit_s=0)
    with pytest.raises(ArgumentError, match="the first argument must be the train step"):
        autopar.verify(None, *args, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="did you mean 'h100-80gb'"):
        autopar.verify(train_step, *args, plan=plan, target="h100-80g")
    with pytest.raises(PlanError):
        autopar.verify(train_step, *arguments(2), plan=plan)
    on_cpus = autopar.plan(
        train_step, *args, cluster=ClusterSpec(1, 8, "cpu"), method=ShardParallel()
    )
    with pytest.raises(ArgumentError, match=r"the plan's device 'cpu'.*target='h100-80gb'"):
        autopar.verify(train_step, *args, plan=on_cpus)
    assert not jobs
    monkeypatch.undo()
    monkeypatch.setattr("autopar.measure.verify.targets._is_there", lambda module: False)
    with pytest.raises(CompileError, match=r"pip install 'autopar\[verify\]'"):
        autopar.verify(train_step, *args, plan=plan)
    with pytest.raises(CompileError, match=r"pip install 'autopar\[verify-cuda12\]'"):
        verify_plan.check_compiler(ClusterSpec(1, 8, "v100"))
    with pytest.raises(ArgumentError, match="'nonesuch': unknown GPU"):
        verify_plan.check_compiler(H100S, "nonesuch")


def test_a_step_that_calls_back_into_python(jobs):
    def noisy(state, batch):
        jax.debug.print("loss {}", jnp.sum(batch))
        return train_step(state, batch)

    args = arguments(1)
    plan = autopar.plan(noisy, *args, cluster=H100S, method=ShardParallel())
    with pytest.raises(CompileError, match=r"step of noisy calls back into Python"):
        autopar.verify(noisy, *args, plan=plan)


def test_random_keys_are_numbers(jobs):
    def step(state, batch):
        noise = jax.random.normal(state["key"], batch.shape)
        return {"key": jax.random.split(state["key"])[0]}, jnp.sum(noise + batch)

    args = ({"key": jax.eval_shape(lambda: jax.random.key(0))}, np.zeros((ROWS, WIDTH), np.float32))
    plan = autopar.plan(step, *args, cluster=H100S, method=ShardParallel())
    report = autopar.verify(step, *args, plan=plan)
    assert report.programs[0].figures.argument_bytes > 8

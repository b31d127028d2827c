"""XLA's GPU compiler, without a GPU: needs JAX's CUDA plugin, which `.[test]` does not install.

`.ci/verify` installs it and runs all of this. With CUDA 13 everything but V100s is compiled for,
with CUDA 12 everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import ClusterSpec, PipeshardParallel, ShardParallel, UniformStages
from autopar.errors import CompileError
from autopar.measure.verify.targets import cuda_version, load_target, target_names

WIDTH, ROWS = 256, 512


def why_not(target: str) -> str:
    """Why nothing can be compiled for a target here; empty if it can."""
    try:
        cuda_version(load_target(target))
    except CompileError as error:
        return str(error)
    return ""


MISSING = why_not("h100-80gb")
# By default where the compiler is installed, and else not even skipped.
pytestmark = [pytest.mark.slow, pytest.mark.skip(reason=MISSING)] if MISSING else []


def arguments():
    state = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    return state, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def train_step(state, batch):
    def loss_of(params):
        x = batch
        for number, w in enumerate(params):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


# Two products forward; backward, two for weights and one for the activations between.
FLOPS = 5 * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize(
    "name",
    [
        name if name == "h100-80gb" else pytest.param(name, marks=pytest.mark.slow)
        for name in target_names()
    ],
)
def test_a_data_parallel_step_on_every_target(name: str):
    if refused := why_not(name):
        assert load_target(name).compute_capability < (7, 5)
        assert "autopar[verify-cuda12]" in refused
        return
    args = arguments()
    device = autopar.DeviceSpec(name, 1e14, 1e13, load_target(name).memory_bytes, 1e12, 1e11, 1e10)
    plan = autopar.plan(
        train_step, *args, cluster=ClusterSpec(1, 8, device), method=autopar.DataParallel()
    )
    report = autopar.verify(train_step, *args, plan=plan, target=name, time_limit_s=300)
    (program,), (mesh,) = report.programs, report.meshes
    weights = 2 * WIDTH * WIDTH * 4
    assert program.figures.argument_bytes == weights + ROWS // 8 * WIDTH * 4
    assert program.figures.alias_bytes == weights
    assert mesh.dot_flops.xla == FLOPS / 8
    # The gradients and the loss are reduced, and nothing else is sent.
    (reduced,) = mesh.collectives
    assert reduced.kind == "all-reduce"
    assert reduced.sent_bytes.xla == 2 * 7 / 8 * (weights + 4)
    assert report.fits


def test_a_pipeline():
    args = arguments()
    method = PipeshardParallel(4, stages=UniformStages(2))
    plan = autopar.plan(train_step, *args, cluster=ClusterSpec(2, 2, "h100-sxm"), method=method)
    report = autopar.verify(train_step, *args, plan=plan, time_limit_s=300)
    assert report.fits
    # A product may be computed on both devices of a stage, if that is cheaper: the plan says so.
    for mesh in report.meshes:
        assert mesh.dot_flops.ratio == pytest.approx(1, rel=1e-3)
    assert sum(mesh.dot_flops.xla * 2 for mesh in report.meshes) >= FLOPS
    assert [mesh.topology for mesh in report.meshes] == [(1, 2), (1, 2)]


def test_a_program_that_does_not_fit(tmp_path):
    args = arguments()
    plan = autopar.plan(
        train_step, *args, cluster=ClusterSpec(1, 2, "h100-sxm"), method=ShardParallel()
    )
    small = tmp_path / "small.txtpb"
    config = load_target("h100-80gb").config
    small.write_text(config.replace("84942979072", "1000000"))
    report = autopar.verify(train_step, *args, plan=plan, target=small, time_limit_s=300)
    assert not report.fits
    assert "on small" in (report.problem() or "")


def test_the_compiler_ends_with_the_process_that_asked(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import autopar, test_gpu_compiler as own\n"
        "cluster, args = autopar.ClusterSpec(1, 2, 'h100-sxm'), own.arguments()\n"
        "method = autopar.ShardParallel()\n"
        "plan = autopar.plan(own.train_step, *args, cluster=cluster, method=method)\n"
        "autopar.verify(own.train_step, *args, plan=plan)\n"
    )
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    environment = {**os.environ, "TMPDIR": str(jobs), "PYTHONPATH": str(Path.cwd())}
    asking = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        assert _until(lambda: compilers(jobs), 120)
    finally:
        asking.kill()
        asking.wait()
    assert _until(lambda: not compilers(jobs), 60)
    assert list(jobs.rglob("job.bin")), "the job was not begun"
    assert not list(jobs.rglob("result.json")), "it was compiled to the end"


def compilers(folder: Path) -> list[str]:
    """Processes that were told to compile something in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:  # it is gone
            continue
        if b"autopar.measure.verify.child" in words and str(folder).encode() in words:
            found.append(process.name)
    return found


def _until(holds: Callable[[], object], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_the_time_limit_ends_the_compiler():
    args = arguments()
    plan = autopar.plan(
        train_step, *args, cluster=ClusterSpec(1, 2, "h100-sxm"), method=ShardParallel()
    )
    with pytest.raises(CompileError, match=r"train_step_step within 0\.5 s"):
        autopar.verify(train_step, *args, plan=plan, time_limit_s=0.5)

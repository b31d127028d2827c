"""Eight ranks measure their links together: on eight GPUs, or on shares of one."""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.mesh import cluster_of_profile
from autopar.ir.profile import COLLECTIVES, GpuShare, load_profile
from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, SharedGpu

pytestmark = pytest.mark.gpu

RANKS = 8


@pytest.fixture(scope="module")
def profile(ranks: Callable[[int], Ranks], tmp_path_factory):
    output = tmp_path_factory.mktemp("profile") / "ranks.json"
    parts = "overheads,memory,collectives,crossings"
    command = ["-m", "autopar", "profile", "--quick", "--only", parts, "--time", "60"]
    results = run_ranks(
        [sys.executable, *command, "--output", str(output)], ranks(RANKS), limit_s=240
    )
    texts = [f"rank {r.rank}: {r.output[-2000:]}" for r in results if r.failed]
    assert not texts, "\n".join(texts)
    return load_profile(output)


def test_the_profile_names_what_was_measured(profile, ranks):
    used = ranks(RANKS)
    assert (profile.num_hosts, profile.devices_per_host) == (1, RANKS)
    if isinstance(used, SharedGpu):
        assert profile.gpu_share == GpuShare(used.ranks_per_gpu, mps=True)
        assert profile.versions["nccl"] == used.nccl_version
    else:
        assert profile.gpu_share is None
    assert profile.platform == ("cpu" if isinstance(used, CpuRanks) else "gpu")


def test_every_rank_has_its_memory(profile):
    assert profile.launch_s is not None and profile.dispatch_s is not None
    assert 2e8 < profile.usable_memory_bytes < 200e9


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_of_all_ranks_are_measured(profile, kind):
    """The samples over all ranks come first, so a slow machine has them too."""
    found = [c for c in profile.collectives if c.kind == kind and c.ranks == RANKS]
    assert {c.stride for c in found} == {1} and {c.ranks_per_host for c in found} == {RANKS}
    least, *_, most = sorted(found, key=lambda c: c.num_bytes)
    assert most.num_bytes > 500 * least.num_bytes


def test_plans_are_priced_by_it(profile):
    cluster = cluster_of_profile(profile)

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (1024, 256)))
    plan = autopar.plan(step, w, x, cluster=cluster, method=autopar.DataParallel())
    assert "collectives" in plan.cluster.priced_by.parts
    assert plan.cluster.spec.memory_bytes == profile.usable_memory_bytes

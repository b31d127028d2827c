"""Times by samples, and steps that are priced by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.cost.collectives import all_gather_s, all_reduce_s, shift_s
from autopar.cost.curves import Curve, RateTable
from autopar.cost.measured import (
    LOOP_KERNEL_S,
    SUSTAINED_32BIT,
    USUAL_KERNEL_S,
    MeasuredCosts,
    measured_costs,
    min_work_s,
)
from autopar.cost.report import node_compute_s
from autopar.errors import ProfileError
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.profile import COLLECTIVES, find_profile, load_profile
from examples.models import build
from tests.machine_profiles import (
    BANDWIDTH,
    LAUNCH_S,
    RATE,
    collective_s,
    machine_profile,
    product_s,
    stream_s,
)

PROFILE = machine_profile()
COSTS = MeasuredCosts(PROFILE)
CLUSTER = ClusterSpec(1, 8, profile=PROFILE)


# -- samples and what is between them


def test_samples_are_met() -> None:
    assert COSTS.product_s("bfloat16", 1, 256, 1024, 64) == pytest.approx(
        product_s(1, 256, 1024, 64)
    )
    assert COSTS.stream_s("copy", 4**10) == pytest.approx(stream_s(4**10))
    for kind in COLLECTIVES:
        took = COSTS.collective_s(kind, 4, 2, 4, 4**10)
        assert took == pytest.approx(collective_s(kind, 4, 4**10)), kind
    assert COSTS.transfer_s(True, 4, 4**10) == pytest.approx(1e-5 + 4**10 / 100e9)


@pytest.mark.parametrize("shape", [(1, 500, 3000, 900), (1, 9000, 9000, 2048)])
def test_products_between_samples_are_near_the_truth(shape) -> None:
    assert COSTS.product_s("bfloat16", *shape) == pytest.approx(product_s(*shape), rel=0.3)


def test_outside_of_samples() -> None:
    huge = COSTS.product_s("bfloat16", 1, 10**6, 10**6, 10**5)
    assert huge is not None and 2e17 / huge == pytest.approx(RATE, rel=0.01)
    tiny = COSTS.product_s("bfloat16", 1, 2, 2, 2)
    assert tiny is not None and tiny == pytest.approx(LAUNCH_S, rel=0.05)
    large = COSTS.stream_s("elementwise", 2**36)
    assert large is not None and 2**36 / large == pytest.approx(BANDWIDTH, rel=0.02)
    assert COSTS.stream_s("elementwise", 1.0) == pytest.approx(stream_s(4**6))


def test_ranks_that_were_not_measured_follow_the_ring_law() -> None:
    took = COSTS.collective_s("all-reduce", 64, 1, 64, 2**24)
    assert took == pytest.approx(collective_s("all-reduce", 64, 2**24), rel=0.01)
    between = COSTS.collective_s("all-gather", 6, 1, 6, 2**24)
    assert between == pytest.approx(collective_s("all-gather", 6, 2**24), rel=0.01)


def test_on_cpus_that_share_cores_waiting_is_not_counted() -> None:
    profile = machine_profile("cpu", "cpu")
    cpu, gpu = MeasuredCosts(profile), MeasuredCosts(machine_profile())
    apart = tuple(replace(c, ranks_per_host=c.ranks // 2) for c in profile.collectives)
    hosts = MeasuredCosts(replace(profile, collectives=apart))
    for kind in COLLECTIVES:
        nothing = cpu.collective_s(kind, 4, 1, 4, 0.0)
        assert nothing == pytest.approx(cpu.launch_s)
        moved = cpu.collective_s(kind, 4, 1, 4, 1e6)
        waited, whole = gpu.collective_s(kind, 4, 1, 4, 0.0), gpu.collective_s(kind, 4, 1, 4, 1e6)
        assert None not in (moved, waited, whole)
        assert moved - nothing == pytest.approx(whole - waited)
        assert hosts.collective_s(kind, 4, 1, 2, 1e6) == pytest.approx(whole)


def test_what_was_not_measured_is_not_known() -> None:
    costs = MeasuredCosts(machine_profile(without=("convolutions", "attentions", "collectives")))
    assert costs.convolution_s("bfloat16", "forward", 32.0, 196.0, 64.0, 64.0, 9.0) is None
    assert costs.attention_s("bfloat16", False, True, 128, 512, 64) is None
    assert costs.collective_s("all-reduce", 2, 1, 2, 1e6) is None
    assert costs.product_s("float8_e4m3fn", 1, 64, 64, 64) is None
    assert COSTS.collective_s("all-reduce", 16, 1, 8, 1e6) is None, "groups that leave their host"


def test_16_bit_types_take_each_others_samples() -> None:
    assert COSTS.product_s("float16", 1, 256, 256, 256) == COSTS.product_s(
        "bfloat16", 1, 256, 256, 256
    )


def test_attention_without_a_mask_is_twice_as_much_work() -> None:
    masked = COSTS.attention_s("bfloat16", False, True, 128, 2048, 64)
    whole = COSTS.attention_s("bfloat16", False, False, 128, 2048, 64)
    assert masked == pytest.approx(1e-9 * 2048**2)
    assert whole == pytest.approx(2 * 1e-9 * 2048**2)


def test_every_kernel_of_a_gpu_waits_for_the_one_before() -> None:
    costs = MeasuredCosts(load_profile("h200"))
    for in_loop, kernel_s in ((False, USUAL_KERNEL_S), (True, LOOP_KERNEL_S)):
        kernels = "elementwise", "float32"
        few, many = (costs.kernels_s(*kernels, n, 1e9, in_loop=in_loop) for n in (1, 11))
        assert few is not None and many is not None
        assert many - few == pytest.approx(10 * kernel_s)


def test_noise_is_pooled() -> None:
    curve = Curve([(1.0, 1.0), (2.0, 4.0), (4.0, 1.0), (8.0, 16.0)])
    assert curve(2.0) == curve(4.0) == pytest.approx(2.0)
    assert curve(8.0) == pytest.approx(16.0)


def test_noise_between_neighbours_is_blurred() -> None:
    """Every other sample was taken while the device was busy."""
    sizes = [2**n for n in range(6, 14)]
    clean = [((m, n), m * n / 1e9) for m in sizes for n in sizes]
    noisy = [(at, s * (1 + 2 * ((i + i // 8) % 2))) for i, (at, s) in enumerate(clean)]
    assert RateTable(clean, (1, 1)).blur == 0.0
    blurred = RateTable(noisy, (1, 1))
    assert blurred.blur > 0
    assert blurred(512, 512) == pytest.approx(3**0.5 * 512**2 / 1e9, rel=0.3)


# -- meshes


def test_collectives_of_a_mesh_are_measured() -> None:
    mesh = mesh_of_cluster(CLUSTER, (2, 4))
    assert all_reduce_s(mesh, (0,), 4**10) == pytest.approx(collective_s("all-reduce", 2, 4**10))
    assert all_gather_s(mesh, (0, 1), 4**10) == pytest.approx(collective_s("all-gather", 8, 4**10))
    assert shift_s(mesh, (1,), 4**10) == pytest.approx(collective_s("collective-permute", 4, 4**10))


def test_links_without_samples_are_the_presets() -> None:
    for cluster in (
        ClusterSpec(1, 8, profile=machine_profile(num_devices=1)),
        ClusterSpec(2, 4, profile=PROFILE),  # the profile has one host only
    ):
        plain = ClusterSpec(cluster.num_hosts, cluster.devices_per_host, "h200-sxm")
        mesh, other = (mesh_of_cluster(c, (8,)) for c in (cluster, plain))
        assert all_reduce_s(mesh, (0,), 1e8) == all_reduce_s(other, (0,), 1e8)


def test_a_mesh_takes_a_profile_by_path_too(tmp_path) -> None:
    PROFILE.save(tmp_path / "mine.json")
    path = str(tmp_path / "mine.json")
    mesh = LogicalMesh((8,), profile=path)  # type: ignore[arg-type]
    assert mesh.profile == PROFILE and hash(mesh) == hash(LogicalMesh((8,), profile=PROFILE))
    assert all_reduce_s(mesh, (0,), 4**10) == pytest.approx(collective_s("all-reduce", 8, 4**10))


def test_the_least_time_of_work_is_by_the_best_rate() -> None:
    best = max(p.flops / p.time.seconds for p in PROFILE.products)
    assert min_work_s(CLUSTER, 1e15) == pytest.approx(1e15 / best)
    assert min_work_s(ClusterSpec(1, 8, "h200-sxm"), 1e15) == pytest.approx(1e15 / (0.8 * 989e12))


def test_placement_of_axes() -> None:
    mesh = mesh_of_cluster(ClusterSpec(2, 4, profile=PROFILE), (4, 2))
    assert mesh.placement((1,)) == (2, 1, 2)
    assert mesh.placement((0,)) == (4, 2, 2)
    assert mesh.placement((0, 1)) == (8, 1, 4)


# -- steps


@pytest.fixture(scope="module")
def planned():
    example = build("mlp-tiny")
    return autopar.plan(
        example.train_step,
        example.abstract_state(),
        example.abstract_batch(),
        cluster=CLUSTER,
        method=autopar.ShardParallel(),
    )


@pytest.mark.ci
def test_the_objective_is_what_the_report_adds_up(planned) -> None:
    total = sum(m.compute_s + m.communication_s for m in planned.modules)
    assert planned.solver.objective == pytest.approx(total)
    assert planned.estimated_step_s == pytest.approx(total + 1e-4), "and one program is started"
    assert "launch overhead" in planned.explain(detail="full")


def test_a_product_costs_what_was_measured_of_its_part() -> None:
    import jax.numpy as jnp

    x, w = jnp.zeros((4096, 1024), jnp.bfloat16), jnp.zeros((1024, 256), jnp.bfloat16)
    mesh = mesh_of_cluster(CLUSTER, (4,))
    plan = autopar.plan(
        lambda w, x: x @ w, w, x, cluster=CLUSTER, method=autopar.ShardParallel(mesh_shape=(4,))
    )
    graph = plan.origin.graph
    (product,) = (node for node in graph.nodes if node.name == "dot_general")
    values = product.operands
    by_rows = tuple((0,) if graph.values[v].shape[0] == 4096 else (-1,) for v in values)
    took = node_compute_s(graph, mesh, product, (by_rows, ((0,),)))
    assert took == pytest.approx(product_s(1, 1024, 256, 1024))
    by_sum = tuple((1,) if graph.values[v].shape[0] == 4096 else (0,) for v in values)
    took = node_compute_s(graph, mesh, product, (by_sum, ((-2,),)))
    assert took == pytest.approx(product_s(1, 4096, 256, 256))


def test_plans_say_what_they_are_priced_by(planned, tmp_path) -> None:
    text = " ".join(planned.explain(detail="full").split())
    assert f"formula.json ({PROFILE.digest}): NVIDIA H200, jax 0.0.1" in text
    assert "measured: products, convolutions, streams" in text
    assert PROFILE.digest in planned.to_json() and "launch_s" not in planned.to_json()
    planned.save(tmp_path / "plan.json")
    read = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert read.cluster.priced_by == planned.cluster.priced_by
    assert read.cluster.measured is None
    assert read.cluster.spec.memory_bytes == 100e9
    assert PROFILE.digest in read.explain(detail="full")


@pytest.mark.ci
def test_parts_that_were_not_measured_are_named() -> None:
    example = build("mlp-tiny")
    plan = autopar.plan(
        example.train_step,
        example.abstract_state(),
        example.abstract_batch(),
        cluster=ClusterSpec(1, 1, profile=machine_profile(num_devices=1, without=("crossings",))),
    )
    assert plan.estimated_step_s > 0
    text = " ".join(plan.explain(detail="full").split())
    assert "from the data sheet: collectives (links), transfers between meshes" in text


# -- bad input


def test_profiles_of_other_devices_are_refused() -> None:
    with pytest.raises(
        ProfileError, match=r"NVIDIA H200 \(h200-sxm\).*'a100-sxm'.*device='h200-sxm'"
    ):
        ClusterSpec(1, 8, "a100-sxm", profile=PROFILE)
    with pytest.raises(ProfileError, match="its platform is 'gpu'"):
        autopar.init(profile=PROFILE)


def test_other_versions_are_a_warning_once() -> None:
    import jax

    kind = jax.devices()[0].device_kind
    profile = machine_profile(kind, "cpu", dtypes=("float32",), versions={"jax": "0.0.3"})
    try:
        with pytest.warns(UserWarning, match=f"jax 0.0.3 there and {jax.__version__} here"):
            autopar.init(profile=profile)
        autopar.init(profile=profile)  # no second warning: it would be an error
        assert autopar.session.current().cluster().measured is profile
    finally:
        autopar.init()


def test_names_and_paths(tmp_path) -> None:
    with pytest.raises(ProfileError, match="no such table"):
        ClusterSpec(1, 1, profile="h900")
    with pytest.raises(ProfileError, match="cannot be read"):
        ClusterSpec(1, 1, profile=str(tmp_path / "nowhere.json"))
    with pytest.raises(autopar.ArgumentError, match="profile=3"):
        ClusterSpec(1, 1, profile=3)  # type: ignore[arg-type]
    PROFILE.save(tmp_path / "mine.json")
    cluster = ClusterSpec(1, 8, profile=str(tmp_path / "mine.json"))
    assert cluster.device == "h200-sxm" and cluster.measured == PROFILE
    assert cluster.spec.memory_bytes == 100e9
    assert ClusterSpec(1, 8, memory_bytes=5e9, profile=PROFILE).spec.memory_bytes == 5e9


def test_long_steps_of_32_bit_products_run_at_a_lower_clock() -> None:
    profile = find_profile("h200")
    (sample,) = [p for p in profile.products if p.dtype == "float32" and p.flops == 2 * 8192.0**3]
    took_s = measured_costs(profile).product_s("float32", 1, 8192, 8192, 8192)
    assert took_s == pytest.approx((1 + SUSTAINED_32BIT) * sample.time.seconds, rel=0.02)


def test_small_products_begin_as_those_of_any_type_and_end_with_their_share_of_the_work() -> None:
    """The H200's smallest sample of 32-bit products is 512 × 512 × 512."""
    costs = measured_costs(find_profile("h200"))
    begin_s, smallest_s = costs.least_product_s, costs.product_s("float32", 1, 512, 512, 512)
    eighth_s = costs.product_s("float32", 1, 256, 256, 256)
    assert smallest_s is not None and eighth_s is not None
    assert begin_s < eighth_s < begin_s + (smallest_s - begin_s) / 4 < smallest_s
    # Rows that no kernel loads whole slow what is between, not the beginning.
    whole, odd = (costs.product_s("float32", 1, 256, 34, 256, rows) for rows in (16, 4))
    assert whole is not None and odd is not None
    slow = costs.slow_rows("float32", 4)
    assert slow is not None
    assert begin_s < whole < odd < whole * slow(1, 256, 34, 256)

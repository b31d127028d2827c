from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler import plan_step
from autopar.errors import MemoryBudgetError, MeshError
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.lower.lower_step import annotate
from autopar.methods import DataParallel, ManualParallel, ShardParallel
from autopar.sharding.constraints import candidate_meshes
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.trace import StepOptions
from autopar.tracer.trace_step import trace_step


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(state, batch):
    def loss_of(params):
        return ((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


STATE, BATCH = {"w": array(8, 16), "v": array(16, 8)}, {"x": array(32, 8)}


def plan_of(cluster: ClusterSpec, method: Any = None, fn=step, args=(STATE, BATCH)):
    return plan_step(fn, args, {}, cluster=cluster, method=method).plan


# -- candidate meshes


def shapes(cluster: ClusterSpec, method: Any = None) -> list[tuple[int, ...]]:
    return [mesh.shape for mesh in candidate_meshes(cluster, method or ShardParallel())]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(2, [(2,)]), (4, [(4,), (2, 2)]), (6, [(6,), (2, 3), (3, 2)]), (8, [(8,), (2, 4), (4, 2)])],
)
def test_auto_tries_every_factorisation(devices: int, expected) -> None:
    """Both ways round: the order of the axes matters where both split one dimension."""
    assert shapes(ClusterSpec(1, devices)) == expected


def test_symmetric_meshes_differ_across_hosts() -> None:
    """Which axis leaves the host makes the difference."""
    cluster = ClusterSpec(2, 4, host_bandwidth=1e9)
    assert shapes(cluster) == [(8,), (2, 4), (4, 2)]
    one, two_by_four, four_by_two = candidate_meshes(cluster, ShardParallel())
    inside = 1 / cluster.spec.intra_host_bandwidth
    assert two_by_four.beta[0] > inside and two_by_four.beta[1] == inside
    assert four_by_two.beta[0] > inside and four_by_two.beta[1] == inside
    assert one.beta[0] > inside


def test_every_candidate_has_all_devices() -> None:
    for cluster in (ClusterSpec(1, 6), ClusterSpec(3, 4), ClusterSpec(4, 8)):
        meshes = candidate_meshes(cluster, ShardParallel())
        assert {mesh.num_devices for mesh in meshes} == {cluster.num_devices}
        assert len({(m.shape, m.alpha, m.beta) for m in meshes}) == len(meshes)


def test_methods_that_know_their_mesh() -> None:
    cluster = ClusterSpec(1, 8)
    assert shapes(cluster, DataParallel()) == [(8,)]
    assert shapes(cluster, ShardParallel((4, 2))) == [(4, 2)]
    assert shapes(cluster, ShardParallel((2, 2))) == [(2, 2)]  # some devices stay idle
    (mesh,) = candidate_meshes(cluster, ManualParallel((2, 4), ("data", "model"), None))
    assert (mesh.shape, mesh.axis_names) == ((2, 4), ("data", "model"))
    own = LogicalMesh((2, 4), alpha=(1, 2), beta=(3, 4))
    assert candidate_meshes(cluster, ShardParallel(own)) == [own]


def test_auto_takes_the_mesh_with_the_best_prediction() -> None:
    cluster = ClusterSpec(2, 4, "h100-sxm", host_bandwidth=1e9)
    best = plan_of(cluster)
    each = {s: plan_of(cluster, ShardParallel(s)) for s in shapes(cluster)}
    assert best.estimated_step_s == min(plan.estimated_step_s for plan in each.values())
    assert best.program == plan_of(cluster).program  # and does so again


def test_meshes_of_which_an_axis_divides_nothing_are_left_out() -> None:
    """Of the meshes of 12 only (3, 4) and (4, 3) have axes that all divide 16 or 3."""
    args = ({"w": array(16, 3), "v": array(3, 16)}, {"x": array(16, 16)})
    assert plan_of(ClusterSpec(1, 12), args=args).mesh_shape in ((3, 4), (4, 3))


def test_where_no_mesh_of_all_devices_divides_anything_fewer_are_used() -> None:
    """7 divides nothing; of 6 devices (2, 3) and (3, 2) can be used."""
    args = ({"w": array(16, 3), "v": array(3, 16)}, {"x": array(16, 16)})
    plan = plan_of(ClusterSpec(1, 7), args=args)
    assert plan.mesh_shape in ((2, 3), (3, 2))
    assert plan.warnings[0].startswith("6 of 7 devices are used")
    args = ({"w": array(7, 11), "v": array(11, 7)}, {"x": array(13, 7)})
    plan = plan_of(ClusterSpec(1, 5), args=args)
    assert plan.num_devices == 1
    assert plan.warnings[0].startswith("1 of 5 devices are used")
    with pytest.raises(MeshError, match="divides no dimension"):  # a mesh the user chose
        plan_of(ClusterSpec(1, 5), ShardParallel((5,)), args=args)


# -- fingerprints


def fingerprint(fn, *args) -> str:
    return program_fingerprint(trace_step(fn, args).program)


X, Y = array(8, 8), array(8, 8)


def test_fingerprint_of_the_same_program_is_the_same() -> None:
    def copy(state, batch):
        return step(state, batch)

    assert fingerprint(step, STATE, BATCH) == fingerprint(step, STATE, BATCH)
    assert fingerprint(step, STATE, BATCH) == fingerprint(copy, STATE, BATCH)
    # A function that is jitted, or has other constants, is the same program.
    assert fingerprint(jax.jit(step), STATE, BATCH) == fingerprint(step, STATE, BATCH)
    assert fingerprint(lambda x: x * 2.0, X) == fingerprint(lambda x: x * 3.0, X)


def looped(fn):
    return lambda x, y: jax.lax.scan(lambda c, _: (fn(c, y), None), x, None, length=3)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, y: x + y, lambda x, y: x - y),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x @ y, lambda x, y: x @ y.T),
        (lambda x, y: (x + y).sum(0), lambda x, y: (x + y).sum(1)),
        (lambda x, y: (x + y, x - y), lambda x, y: (x - y, x + y)),
        (lambda x, y: (x, y), lambda x, y: (y, x)),
        (lambda x, y: x + y, lambda x, y: (x + y).astype(jnp.bfloat16)),
        (looped(lambda c, y: c @ y), looped(lambda c, y: y @ c)),
        (looped(lambda c, y: c @ y), lambda x, y: x @ y),
    ],
    ids=range(9),
)
def test_fingerprint_of_another_program_is_another(one, other) -> None:
    assert fingerprint(one, X, Y) != fingerprint(other, X, Y)


def test_fingerprint_knows_shapes_and_types() -> None:
    prints = {
        fingerprint(lambda x: x * 2, x)
        for x in (array(8), array(16), array(8, 1), array(8, dtype=jnp.bfloat16))
    }
    assert len(prints) == 4


# -- plans


def test_plan_on_one_device_replicates_everything() -> None:
    planned = plan_step(step, (STATE, BATCH), {}, cluster=ClusterSpec(1, 1, "cpu"))
    plan = planned.plan
    assert plan.input_specs == ({"v": P(), "w": P()}, {"x": P()})
    assert plan.output_specs == ({"v": P(), "w": P()}, P())
    assert (plan.num_devices, plan.num_stages, plan.solver.gap) == (1, 1, 0)
    assert plan.solver.objective == plan.estimated_step_s > 0
    assert plan.communication_bytes == 0
    assert plan.estimated_peak_bytes >= 4 * (8 * 16 + 16 * 8 + 32 * 8)
    assert plan.details is not None and plan.details.flops > plan.details.model_flops > 0
    assert [t.role for t in plan.inputs] == ["state", "state", "batch"]
    function, _ = annotate(planned, jax.devices()[:1])
    leaves = [np.full(t.shape, 0.5, np.float32) for t in plan.inputs]
    jaxpr = jax.make_jaxpr(function)(*leaves)
    assert "sharding_constraint" not in str(jaxpr)
    v, w, x = leaves
    expected = jax.tree.leaves(step({"v": v, "w": w}, {"x": x}))
    for got, want in zip(function(*leaves), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_passes_are_timed() -> None:
    seconds = plan_of(ClusterSpec(1, 4)).solver.seconds
    assert list(seconds)[:5] == ["trace", "remat", "graph", "shard", "assign"]
    assert {"shard.fold", "shard.costs", "shard.reduce", "shard.solve"} < set(seconds)


def test_sizes_are_reported() -> None:
    sizes = plan_of(ClusterSpec(1, 4)).solver.sizes
    assert sizes["nodes"] >= sizes["classes"] >= sizes["core_nodes"]
    assert sizes["equations"] == trace_step(step, (STATE, BATCH)).program.num_equations()


def test_an_op_without_a_rule_is_warned_of_with_its_line() -> None:
    def decompose(x):
        return jnp.linalg.eigh(x @ x.T)[0]

    (warning,) = plan_of(ClusterSpec(1, 4), fn=decompose, args=(X,)).warnings
    assert "1 × eigh at" in warning and "test_compiler.py" in warning
    assert "runs replicated" in warning


def test_more_memory_than_there_is_is_warned_of_where_the_user_decides() -> None:
    (warning,) = plan_of(ClusterSpec(1, 4, memory_bytes=1e3), DataParallel()).warnings
    assert "estimated peak" in warning and "more than the device's" in warning
    assert plan_of(ClusterSpec(1, 4)).warnings == ()


@pytest.mark.ci
def test_more_memory_than_there_is_is_an_error_where_the_solver_decides() -> None:
    with pytest.raises(MemoryBudgetError, match="no sharding fits"):
        plan_of(ClusterSpec(1, 4, memory_bytes=1e3))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (None, "ShardParallel()"),
        (ShardParallel((2, 2)), "ShardParallel(mesh_shape=(2, 2))"),
        (ShardParallel(LogicalMesh((4,))), "ShardParallel(mesh_shape=(4,))"),
        (DataParallel(), "DataParallel()"),
        (
            ManualParallel((4,), ("x",), (None, P("x"))),
            "ManualParallel(mesh_shape=(4,), axis_names=('x',))",
        ),
    ],
)
def test_plan_says_its_method_in_short(method: Any, text: str) -> None:
    assert plan_of(ClusterSpec(1, 4), method).method == text


# -- data parallel and manual


def test_data_parallel_splits_the_batch_only() -> None:
    plan = plan_of(ClusterSpec(1, 4), DataParallel())
    assert plan.input_specs == ({"v": P(), "w": P()}, {"x": P("x")})
    assert plan.output_specs == ({"v": P(), "w": P()}, P())


def test_batch_by_position() -> None:
    def swapped(batch, state):
        return step(state, batch)

    options = StepOptions(batch_argnums=(0,))
    planned = plan_step(
        swapped,
        (BATCH, STATE),
        {},
        cluster=ClusterSpec(1, 4),
        method=DataParallel(),
        options=options,
    )
    assert planned.plan.input_specs[0] == {"x": P("x")}


MESH = ((2, 4), ("data", "model"))


@pytest.mark.parametrize(
    "in_specs",
    [
        (P(), P("data")),
        ({"w": P(None, "model"), "v": P("model")}, {"x": P("data")}),
        ({"w": P(), "v": None}, {"x": P(("data", "model"))}),
        (None, P(None, "model")),
    ],
)
def test_manual_inputs_lie_as_asked(in_specs: Any) -> None:
    plan = plan_of(ClusterSpec(1, 8), ManualParallel(*MESH, in_specs))
    expected = jax.tree.broadcast(in_specs, (STATE, BATCH), is_leaf=lambda x: x is None)
    asked = jax.tree.leaves(expected, is_leaf=lambda x: x is None)
    for want, got in zip(asked, jax.tree.leaves(plan.input_specs), strict=True):
        assert want is None or got == want
    assert plan.output_specs[0] == plan.input_specs[0]  # state leaves as it came


def test_manual_outputs_lie_as_asked() -> None:
    plan = plan_of(
        ClusterSpec(1, 8), ManualParallel(*MESH, None, ({"w": P("data"), "v": P()}, None))
    )
    assert plan.output_specs[0] == plan.input_specs[0] == {"w": P("data"), "v": P()}


def test_manual_state_may_leave_in_another_layout_and_is_then_not_donated() -> None:
    method = ManualParallel(*MESH, (P("data"), None), ({"w": P("model"), "v": None}, None))
    planned = plan_step(step, (STATE, BATCH), {}, cluster=ClusterSpec(1, 8), method=method)
    assert planned.plan.input_specs[0] == {"w": P("data"), "v": P("data")}
    assert planned.plan.output_specs[0] == {"w": P("model"), "v": P("data")}
    paths = [planned.traced.call.paths[i] for i in planned.traced.donated]
    assert paths == ["state['v']"]
    assert [t.role for t in planned.plan.inputs] == ["state", "", "batch"]


@pytest.mark.ci
def test_manual_specs_reach_the_devices() -> None:
    method = ManualParallel(*MESH, (P("data"), P("model")), (P("model"), P()))
    parallel = autopar.parallelize(step, method=method)
    state = {"w": jnp.full((8, 16), 0.1), "v": jnp.full((16, 8), 0.2)}
    batch = {"x": jnp.ones((32, 8))}
    want_state, want_loss = step(state, batch)
    new_state, loss = parallel(state, batch)
    assert {leaf.sharding.spec for leaf in new_state.values()} == {P("model")}
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for name, want in want_state.items():
        np.testing.assert_allclose(new_state[name], want, rtol=1e-5)


def test_a_mesh_of_a_cluster_is_priced_like_the_solver_prices_it() -> None:
    cluster = ClusterSpec(1, 8)
    given = plan_of(cluster, ShardParallel(mesh_of_cluster(cluster, (2, 4))))
    named = plan_of(cluster, ShardParallel((2, 4)))
    assert given.inputs == named.inputs
    assert given.solver.objective == named.solver.objective

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import session
from autopar.api import local_devices

ROOT = Path(__file__).parents[2]


def step(state, batch):
    """One step of gradient descent."""

    def loss_of(params):
        with jax.named_scope("encoder"):
            hidden = jnp.tanh(batch["x"] @ params["w"])
        with jax.named_scope("decoder"):
            return ((hidden @ params["v"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ABSTRACT = ({"w": array(8, 16), "v": array(16, 8)}, {"x": array(32, 8)})
EIGHT = autopar.ShardParallel((8,))


def make_state() -> dict[str, jax.Array]:
    """A new one for every call: steps donate it."""
    w, v = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(w, (8, 16)), "v": jax.random.normal(v, (16, 8))}


def make_batch(rows: int = 32) -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(1), (rows, 8))}


def assert_close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    yield
    autopar.shutdown()


# -- names


def test_public_names() -> None:
    assert set(autopar.__all__) == {
        "ArgumentError",
        "AutoLayers",
        "AutoParallel",
        "AutoStages",
        "AutoparError",
        "CheckpointError",
        "CheckpointPolicy",
        "CheckpointSave",
        "ClusterError",
        "ClusterSpec",
        "CompileError",
        "CreateStateParallel",
        "DataError",
        "DataLoader",
        "DataParallel",
        "DependencyError",
        "DeviceSpec",
        "DistributedArray",
        "FollowParallel",
        "LogicalMesh",
        "MachineProfile",
        "ManualLayers",
        "ManualParallel",
        "ManualStages",
        "MemoryBudgetError",
        "MeshError",
        "MetricsPolicy",
        "NonFiniteError",
        "ParallelFunction",
        "ParallelPlan",
        "PipeshardParallel",
        "PlanError",
        "PlanningError",
        "Preempted",
        "ProfileError",
        "PrometheusMetrics",
        "RestartPolicy",
        "ShardParallel",
        "ShardingOptions",
        "ShardingSolution",
        "SolverError",
        "SpecError",
        "TensorBoardMetrics",
        "Trace",
        "TraceError",
        "TraceFileError",
        "TrainingMetrics",
        "UniformStages",
        "UntestedJaxWarning",
        "VerifyReport",
        "WorkerError",
        "Zero2Parallel",
        "Zero3Parallel",
        "checkpoint_metadata",
        "checkpoint_steps",
        "compile",
        "constrain",
        "data_loader",
        "diff",
        "expected_trips",
        "get_last_dp_result",
        "init",
        "latest_step",
        "load_profile",
        "log_metrics",
        "mark_layer_boundary",
        "parallelize",
        "plan",
        "plan_verified",
        "profile_machine",
        "read_trace",
        "register_rule",
        "restore_checkpoint",
        "run_training",
        "save_checkpoint",
        "shutdown",
        "solve_sharding",
        "trace",
        "verify",
    }
    assert all(hasattr(autopar, name) for name in autopar.__all__)
    assert list(autopar.__all__) == sorted(autopar.__all__)


def test_public_names_are_documented() -> None:
    assert [name for name in autopar.__all__ if not getattr(autopar, name).__doc__] == []


# -- parallelize


def test_step_gives_what_the_function_gives() -> None:
    parallel = autopar.parallelize(step)
    state, want = make_state(), make_state()
    for _ in range(3):
        want, want_loss = step(want, make_batch())
        state, loss = parallel(state, make_batch())
        assert_close((state, loss), (want, want_loss))


def test_forms_of_parallelize() -> None:
    @autopar.parallelize
    def plain(state, batch):
        return step(state, batch)

    @autopar.parallelize(method=EIGHT)
    def with_options(state, batch):
        return step(state, batch)

    called = autopar.parallelize(step, method=EIGHT)
    want = step(make_state(), make_batch())
    for parallel in (plain, with_options, called):
        assert isinstance(parallel, autopar.ParallelFunction)
        assert_close(parallel(make_state(), make_batch()), want)


def test_a_parallel_function_looks_like_the_function() -> None:
    parallel = autopar.parallelize(step)
    assert parallel.__name__ == "step"
    assert parallel.__doc__ == "One step of gradient descent."
    assert parallel.__wrapped__ is step
    assert repr(parallel) == "<parallelized 'step'>"


def test_methods_of_a_class() -> None:
    class Trainer:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        @autopar.parallelize(method=EIGHT)
        def step(self, state, batch):
            return jax.tree.map(lambda p: p * self.rate, state), batch["x"].sum()

    halve, keep = Trainer(0.5), Trainer(1.0)
    for trainer in (halve, keep, halve):
        new_state, _ = trainer.step(make_state(), make_batch())
        assert_close(new_state["w"], make_state()["w"] * trainer.rate)
    assert halve.step is halve.step is not keep.step


def test_warm_calls_do_not_trace_again_and_other_shapes_do() -> None:
    traced = []

    def counted(state, batch):
        traced.append(batch["x"].shape)
        return step(state, batch)

    parallel = autopar.parallelize(counted, method=EIGHT)
    assert parallel.last_executable is None
    state, _ = parallel(make_state(), make_batch())
    first, times = parallel.last_executable, len(traced)
    state, _ = parallel(state, make_batch())
    assert (len(traced), parallel.last_executable) == (times, first)
    state, _ = parallel(state, make_batch(16))
    assert parallel.last_executable is not first and traced[-1] == (16, 8)
    times = len(traced)
    parallel(state, make_batch())
    assert (len(traced), parallel.last_executable) == (times, first)


def test_arguments_by_name() -> None:
    parallel = autopar.parallelize(step, method=EIGHT)
    want = step(make_state(), make_batch())
    assert_close(parallel(make_state(), batch=make_batch()), want)
    assert_close(parallel(state=make_state(), batch=make_batch()), want)


def test_static_arguments() -> None:
    def scaled(state, batch, scale):
        assert isinstance(scale, (int, str))
        return step(state, jax.tree.map(lambda x: x * int(scale), batch))

    parallel = autopar.parallelize(scaled, method=EIGHT, static_argnums=2)
    for scale in (1, 2, "2", 1):
        assert_close(
            parallel(make_state(), make_batch(), scale), scaled(make_state(), make_batch(), scale)
        )


def test_donation() -> None:
    state, batch = make_state(), make_batch()
    autopar.parallelize(step, method=EIGHT, donate_argnums=())(state, batch)
    assert not state["w"].is_deleted()
    autopar.parallelize(step, method=EIGHT)(state, batch)
    assert state["w"].is_deleted() and not batch["x"].is_deleted()


def test_results_have_the_shardings_of_the_plan() -> None:
    parallel = autopar.parallelize(step, method=autopar.ShardParallel((2, 4)))
    plan = parallel.plan(make_state(), make_batch())
    new_state, loss = parallel(make_state(), make_batch())
    assert jax.tree.map(lambda x: x.sharding.spec, new_state) == plan.output_specs[0]
    assert loss.sharding.spec == plan.output_specs[1]
    assert new_state["w"].sharding.mesh.shape == {"x": 2, "y": 4}


# -- plan


def test_plan_runs_nothing_and_takes_shapes() -> None:
    parallel = autopar.parallelize(step, method=EIGHT)
    plan = parallel.plan(*ABSTRACT)
    assert parallel.last_executable is None
    assert plan.inputs == parallel.plan(make_state(), make_batch()).inputs
    assert jax.tree.structure(plan.input_specs) == jax.tree.structure(ABSTRACT)
    new_state, loss = plan.output_specs
    assert new_state == plan.input_specs[0] and loss == P()
    assert plan.input_stages[1] == {"x": (0,)} and plan.output_stages[1] == (0,)
    assert (plan.num_stages, plan.num_micro_batches, plan.num_devices) == (1, 1, 8)
    (stage,) = plan.stages
    assert (stage.layers, stage.submesh, stage.mesh_shape) == ((0, 1), (1, 8), (8,))
    assert stage.cost == plan.estimated_step_s > 0
    assert plan.estimated_peak_bytes > 0
    assert [t.role for t in plan.inputs] == ["state", "state", "batch"]


@pytest.mark.ci
def test_plan_for_a_cluster_that_is_not_there() -> None:
    cluster = autopar.ClusterSpec(4, 8, "h100-sxm")
    plan = autopar.plan(step, *ABSTRACT, cluster=cluster)
    assert plan.num_devices == 32
    assert plan.stages[0].submesh == (4, 8)
    assert plan.device == "h100-sxm"


def test_plan_of_a_parallelized_function_keeps_its_options() -> None:
    def swapped(batch, state):
        return step(state, batch)

    parallel = autopar.parallelize(swapped, batch_argnums=0)
    cluster = autopar.ClusterSpec(1, 8, "cpu")
    plan = autopar.plan(
        parallel, ABSTRACT[1], ABSTRACT[0], cluster=cluster, method=autopar.DataParallel()
    )
    assert plan.input_specs[0] == {"x": P("x")}


def test_explain_speaks_in_the_names_of_the_user() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="bottom")(jnp.tanh(nn.Dense(64, name="top")(x)))

    model = Model()

    def train(params, batch):
        loss, grads = jax.value_and_grad(lambda p: (model.apply(p, batch["x"]) ** 2).mean())(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, loss, jnp.linalg.eigh(params["params"]["bottom"]["kernel"][:8])[0]

    params = jax.eval_shape(model.init, jax.random.key(0), ABSTRACT[1]["x"])
    cluster = autopar.ClusterSpec(1, 8, "cpu", memory_bytes=10)
    method = autopar.ManualParallel((2, 4), ("data", "model"), (None, P("data")))
    plan = autopar.plan(train, params, ABSTRACT[1], cluster=cluster, method=method)
    text = plan.explain(detail="full")
    for part in (
        "train: on a mesh data=2 × model=4 of 8 devices",
        "ManualParallel(",
        "1 host × 8 cpu",
        "proven optimal",
        "params['params']['top']['kernel']",
        "batch['x']",
        "float32[32, 8]",
        "P('data',)",
        "state",
        "result[1]",
        "  Model ",
        "    top ",
        "    bottom ",
        "warning: 1 × eigh at",
        "test_api.py",
        "warning: the estimated peak",
    ):
        assert part in text


def test_a_saved_plan_is_a_method(tmp_path: Path) -> None:
    made = autopar.parallelize(step, method=autopar.ShardParallel((2, 4)))
    plan = made.plan(*ABSTRACT)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.ParallelPlan.load(tmp_path / "plan.json")
    again = autopar.parallelize(step, method=loaded)
    assert again.plan(*ABSTRACT) == plan
    assert again.plan(*ABSTRACT).input_specs == plan.input_specs
    assert again.plan(*ABSTRACT).output_specs == plan.output_specs
    want, got = (f(make_state(), make_batch()) for f in (made, again))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, want)
    assert again.last_executable.collectives() == made.last_executable.collectives()


# -- solve_sharding


def test_solve_sharding() -> None:
    mesh = autopar.LogicalMesh((2, 4), ("data", "model"), alpha=(1, 1), beta=(1, 0.1))
    solution = autopar.solve_sharding(step, *ABSTRACT, mesh=mesh)
    assert solution.objective > 0
    assert solution.gap == 0 and solution.lower_bound == solution.objective
    assert solution.input_specs[0] == solution.output_specs[0]
    axes = {
        n for spec in jax.tree.leaves(solution.input_specs) for n in jax.tree.leaves(tuple(spec))
    }
    assert axes <= {"data", "model"}
    assert solution.sizes["nodes"] > 0 and solution.seconds["shard"] > 0
    assert solution.plan.device == "communication only"


def test_dearer_links_cost_more() -> None:
    def objective(beta: float) -> float:
        mesh = autopar.LogicalMesh((4,), alpha=(0.0,), beta=(beta,))
        return autopar.solve_sharding(step, *ABSTRACT, mesh=mesh).objective

    assert objective(2.0) == pytest.approx(2 * objective(1.0))


def test_options_reach_the_solver() -> None:
    layers = [{"w": array(16, 64), "v": array(64, 16)}] * 8

    def deep(params, x):
        for layer in params:
            x = x + jnp.tanh(x @ layer["w"]) @ layer["v"]
        return x

    mesh = autopar.LogicalMesh((4,))
    sizes = [
        autopar.solve_sharding(
            deep, layers, array(8, 16), mesh=mesh, options=autopar.ShardingOptions(fold_layers=fold)
        ).sizes
        for fold in (True, False)
    ]
    assert sizes[0]["classes"] < sizes[1]["classes"] == sizes[1]["nodes"]


# -- compile, and what was compiled


def test_compile() -> None:
    plan = autopar.parallelize(step, method=autopar.ShardParallel((2, 2))).plan(*ABSTRACT)
    programs = autopar.compile(step, *ABSTRACT, plan=plan, devices=jax.devices()[4:])
    assert list(programs) == ["step"]
    compiled = programs["step"]
    assert isinstance(compiled, jax.stages.Compiled)
    devices = {d for s in jax.tree.leaves(compiled.input_shardings[0]) for d in s.device_set}
    assert devices == set(jax.devices()[4:])
    assert "num_partitions=4" in (compiled.as_text() or "")
    # A parallelized function is taken for the function it wraps; devices default to all.
    assert list(autopar.compile(autopar.parallelize(step), *ABSTRACT, plan=plan)) == ["step"]


def test_last_executable_tells_what_was_compiled(tmp_path: Path) -> None:
    parallel = autopar.parallelize(step, method=autopar.DataParallel())
    parallel(make_state(), make_batch())
    executable = parallel.last_executable
    assert executable.plan.method == "DataParallel()"
    assert "HloModule" in executable.hlo_text()
    assert {op.kind for op in executable.collectives()} == {"all-reduce"}
    assert executable.memory_bytes() >= 4 * (2 * 8 * 16 + 4 * 8)
    executable.dump_debug_info(tmp_path / "new" / "folder")
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    index = written["README.txt"]
    assert "Not made" not in index and all(name in index for name in written if name[0] != "R")
    assert "HloModule" in written["step.optimized.hlo.txt"]
    assert written["plan.txt"].startswith("step: on a mesh x=8 of 8 devices")
    assert json.loads(written["figures.json"])["memory_bytes"] == executable.memory_bytes()


# -- init


def test_init_chooses_devices_and_shutdown_forgets_them() -> None:
    parallel = autopar.parallelize(step)
    for devices in (jax.devices()[:4], np.array(jax.devices()[2:4]), None):
        autopar.init(devices=devices)
        used = list(jax.devices() if devices is None else devices)
        assert list(local_devices()) == used
        state, _ = parallel(make_state(), make_batch())
        assert state["w"].sharding.device_set == set(used)
    autopar.init(devices=jax.devices()[:1])
    autopar.shutdown()
    assert list(local_devices()) == jax.devices()


def test_static_and_batch_arguments_of_functions_that_take_a_plan_or_a_mesh() -> None:
    """The batch comes first here, and the last argument is part of the program."""

    def powers(batch, state, power):
        loss = lambda w: ((batch @ w) ** power).mean()  # noqa: E731
        return state - 0.1 * jax.grad(loss)(state)

    options: dict[str, Any] = {"static_argnums": 2, "batch_argnums": 0}
    args = (array(32, 8), array(8, 16), 2)
    solution = autopar.solve_sharding(powers, *args, mesh=autopar.LogicalMesh((8,)), **options)
    assert [t.role for t in solution.plan.inputs] == ["batch", "state"]
    plan = autopar.plan(
        powers, *args, cluster=autopar.ClusterSpec(1, 8, "cpu"), method=EIGHT, **options
    )
    (program,) = autopar.compile(powers, *args, plan=plan, **options).values()
    batch, state = np.ones((32, 8), np.float32), np.full((8, 16), 0.5, np.float32)
    (result,) = program(batch, state)
    assert_close(result, powers(batch, state, 2))


# -- inside other transformations


@pytest.mark.parametrize("rows", [None, 8, 16, 6], ids=lambda rows: f"after {rows}")
def test_vmap_does_not_depend_on_earlier_calls(rows: int | None) -> None:
    """Six rows: no plan for another number of them divides these."""
    forward = autopar.parallelize(lambda w, x: jnp.tanh(x @ w), method=EIGHT)
    w, xs = jnp.ones((8, 8)), jax.random.normal(jax.random.key(0), (3, 6, 8))
    if rows is not None:
        forward(w, jnp.ones((rows, 8)))
    want = jnp.tanh(xs @ w)
    assert_close(jax.vmap(forward, (None, 0))(w, xs), want)
    assert_close(jax.jit(forward)(w, xs[0]), want[0])


def test_a_restart_on_an_equal_cluster_plans_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that is restarted a thousand times would keep a thousand plans."""
    parallel = autopar.parallelize(step, method=autopar.DataParallel())
    plans = []
    for number, num_devices in enumerate((2, 2, 4, 2)):
        cluster = SimpleNamespace(spec=autopar.ClusterSpec(1, num_devices, "cpu"), platform="cpu")
        remote: Any = SimpleNamespace(cluster=cluster, close=lambda: None)
        monkeypatch.setattr(session, "_current", session.Session(10_000 + number, remote=remote))
        plans.append(parallel.plan(*ABSTRACT))
    assert plans[1] is plans[0] and plans[3] is plans[0]
    assert plans[2].num_devices == 4

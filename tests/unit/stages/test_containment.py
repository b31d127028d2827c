"""Failures of autopar's own, put into real searches: contained, counted and named; raised if
nothing is left. Errors that speak to the user, and the user's own, come through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import AutoParallel, PipeshardParallel, ShardingOptions, ShardParallel
from autopar.errors import ArgumentError, MemoryBudgetError, PlanningError, SpecError
from autopar.rewrite import step_source
from autopar.sharding import plan_mesh
from autopar.stages import auto, auto_task, choose_stages, plan_pipeline, table_bench
from autopar.tracer import rules
from examples.models import build
from tests.unit.stages.traced_sizes import zero_by_factors

pytestmark = pytest.mark.representatives(
    "test_a_mesh_that_fails_is_left_out_and_named",
    "test_no_mesh_is_left",
    "test_without_tables_the_default_stays_on_one_mesh",
    "test_a_number_of_micro_batches_that_fails_is_halved_and_named",
    "test_the_default_goes_on_with_pipelines_and_with_one_mesh",
)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHTS, BATCH = [array(16, 16)] * 4, {"x": array(16, 16)}
HOST, HOSTS = autopar.ClusterSpec(1, 4, "a100-sxm"), autopar.ClusterSpec(2, 2, "a100-sxm")
# A step whose gradients, over a slow network, are a reason for a pipeline.
LARGE = [array(4096, 4096)] * 4, {"x": array(8192, 4096)}
FAR_HOSTS = autopar.ClusterSpec(2, 2, "a100-sxm", host_bandwidth=1e9)


def train_step(weights: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
    def loss(weights: list[Any]) -> Any:
        x = batch["x"]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(jnp.cumsum(x, axis=1) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def plan(
    method: Any = None, cluster: Any = HOST, fn: Any = train_step, args: Any = (WEIGHTS, BATCH)
) -> autopar.ParallelPlan:
    return autopar.plan(fn, *args, cluster=cluster, method=method)


class Injected:
    """Replaces a function by one that raises for the calls that `fails` picks."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        module: Any,
        name: str,
        fails: Callable[..., bool],
        error: Callable[[], Exception] = lambda: IndexError("tuple index out of range"),
    ) -> None:
        self.calls = self.raised = 0
        function = getattr(module, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if fails(*args, **kwargs):
                self.raised += 1
                raise error()
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, replaced)


def always(*_: Any, **__: Any) -> bool:
    return True


def warning_of(plan: autopar.ParallelPlan) -> str:
    (warning,) = [w for w in plan.warnings if "failure of autopar's own" in w]
    return warning


# -- meshes


def test_a_mesh_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan(ShardParallel())
    assert free.warnings == ()
    best = free.mesh_shape
    injected = Injected(
        monkeypatch, plan_mesh, "solve_graph", lambda graph, mesh, **_: mesh.shape == best
    )
    other = plan(ShardParallel())
    assert other.mesh_shape != best and injected.raised == 1 < injected.calls
    warning = warning_of(other)
    assert f"ruled out mesh {best}: IndexError: tuple index out of range" in warning
    assert "(autopar/sharding/plan_mesh.py:" in warning
    assert warning in " ".join(other.explain(detail="full").split())


def test_a_mesh_that_cannot_be_fitted_into_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = ShardingOptions(memory_budget_bytes=0.9 * plan(ShardParallel()).estimated_peak_bytes)
    best = plan(ShardParallel(options=tight)).mesh_shape
    Injected(
        monkeypatch,
        plan_mesh,
        "fit_into_memory",
        lambda sharding, *_, **__: sharding.mesh.shape == best,
    )
    other = plan(ShardParallel(options=tight))
    assert other.mesh_shape != best
    assert f"mesh {best}" in warning_of(other)


def test_no_mesh_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    Injected(monkeypatch, plan_mesh, "solve_graph", always)
    with pytest.raises(PlanningError, match=r"train_step: .* no plan on one mesh could") as caught:
        plan(ShardParallel())
    text = str(caught.value)
    assert "mesh (4,): IndexError: tuple index out of range (autopar/sharding/plan_mesh.py:" in text
    assert isinstance(caught.value.__cause__, IndexError)
    assert len({failure.what for failure in caught.value.failures}) > 1


@pytest.mark.parametrize("kind", [ArgumentError, autopar.ProfileError])
def test_errors_that_speak_to_the_user_come_through(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    Injected(monkeypatch, plan_mesh, "solve_graph", always, lambda: kind("what was given"))
    for method in (ShardParallel(), AutoParallel()):
        with pytest.raises(kind, match="what was given"):
            plan(method)


@pytest.mark.parametrize("method", [ShardParallel(num_micro_batches=2), PipeshardParallel(2)])
def test_what_the_users_function_raises_comes_through(method: Any) -> None:
    def picky(weights: list[Any], batch: dict[str, Any]) -> Any:
        if batch["x"].shape[0] != 16:
            raise KeyError("needs 16 rows")
        return train_step(weights, batch), zero_by_factors(batch["x"])

    with pytest.raises(autopar.TraceError, match="needs 16 rows") as caught:
        plan(method, fn=picky)
    assert isinstance(caught.value.__cause__, KeyError)


# -- operators


def any_named(equations: Any, name: str) -> bool:
    return any(equation.name == name for equation in equations)


def test_an_operator_whose_rule_fails_is_replicated_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "_lowered", {})
    Injected(monkeypatch, rules, "_lower", lambda equations, _: any_named(equations, "cumsum"))
    warnings = [w for w in plan(ShardParallel()).warnings if "cumsum" in w]
    assert warnings and all("IndexError: tuple index out of range" in w for w in warnings)


@pytest.mark.parametrize("method", [ShardParallel(), AutoParallel(), PipeshardParallel(2)])
def test_too_much_work_without_rules_is_an_error(
    monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    monkeypatch.setattr(rules, "_lowered", {})
    Injected(monkeypatch, rules, "_lower", lambda equations, _: any_named(equations, "dot_general"))
    with pytest.raises(PlanningError, match="of the step's flops would run replicated") as caught:
        plan(method)
    assert "the rule of dot_general: IndexError" in str(caught.value)


# -- pipelines


def test_a_mesh_of_a_submesh_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    Injected(monkeypatch, table_bench, "solve_graph", lambda graph, mesh, **_: mesh.shape == (2, 2))
    pipeline = plan(PipeshardParallel(2))
    assert "mesh (2, 2) of a (1, 4) submesh: IndexError" in warning_of(pipeline)


def test_without_tables_the_default_stays_on_one_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    Injected(monkeypatch, table_bench, "solve_graph", always)
    with pytest.raises(PlanningError, match="no mesh of any submesh could be priced"):
        plan(PipeshardParallel(2))
    whole = plan(AutoParallel(), FAR_HOSTS, args=LARGE)
    assert not whole.is_pipeline
    assert whole.search is not None and "autopar failed" in " ".join(whole.search.notes)
    assert "IndexError" in warning_of(whole) and "candidates" in warning_of(whole)


def test_without_a_bound_on_memory_one_mesh_still_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound is that of the graph that pipelines are searched with."""

    @jax.checkpoint
    def layer(x: Any, weight: Any) -> Any:
        return jnp.tanh(x @ weight)

    def checkpointed(weights: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
        def loss(weights: list[Any]) -> Any:
            x = batch["x"]
            for weight in weights:
                x = layer(x, weight)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    hosts = autopar.ClusterSpec(2, 2, "a100-sxm", host_bandwidth=1e11)
    injected = Injected(monkeypatch, auto, "loop_graph", lambda *_: True)
    options = ShardingOptions(memory_budget_bytes=2**30, planning_time_s=1e-6)
    args = [array(1024, 1024)] * 8, {"x": array(2**18, 1024)}
    made = plan(AutoParallel(options=options), hosts, checkpointed, args)
    assert injected.raised == 1
    assert not made.is_pipeline and made.estimated_peak_bytes <= 2**30
    assert "the memory of micro-batches" in " ".join(made.warnings)


def test_a_pipeline_that_cannot_be_solved_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages: list[int] = []

    def is_first(task: Any, looped: Any, specs: Any, report: Any) -> bool:
        stages.append(len(specs))
        return len(stages) == 1

    Injected(monkeypatch, plan_pipeline, "solve_pipeline", is_first)
    large = [array(2048, 2048)] * 4, {"x": array(4096, 2048)}  # so that there is a second best
    pipeline = plan(PipeshardParallel(8), HOSTS, args=large)
    assert len(stages) > 1
    assert "the pipeline on submeshes [" in warning_of(pipeline)
    Injected(monkeypatch, plan_pipeline, "solve_pipeline", always)
    with pytest.raises(PlanningError, match="no pipeline could be solved"):
        plan(PipeshardParallel(2), HOSTS)


def test_a_number_of_micro_batches_that_fails_is_halved_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first number is 4 here; 16 is said to be better, and 8 is next."""
    search = plan_pipeline.choose_stages
    numbers: list[int] = []

    def noted(looped: Any, *args: Any, **options: Any) -> Any:
        numbers.append(looped.step.num_micro_batches)
        return search(looped, *args, **options)

    def promising(looped: Any, found: Any, log: Any) -> Any:
        return replace(found, another=replace(found.choice, num_micro_batches=16))

    monkeypatch.setattr(plan_pipeline, "choose_stages", noted)
    monkeypatch.setattr(plan_pipeline, "with_another", promising)
    Injected(monkeypatch, step_source, "accumulate", lambda full, micro, number, *_: number == 16)
    pipeline = plan(PipeshardParallel("auto"), HOSTS)
    assert numbers[0] < 8 and numbers[1] == 8
    assert "ruled out 16 micro-batches: IndexError" in warning_of(pipeline)
    assert pipeline.search is not None
    assert any("16 micro-batches were not searched" in note for note in pipeline.search.notes)


def test_a_number_that_the_user_cannot_have_is_noted_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def picky(weights: list[Any], batch: dict[str, Any]) -> Any:
        if batch["x"].shape[0] < 4:
            raise ValueError("needs 4 rows")
        return train_step(weights, batch), zero_by_factors(batch["x"])

    monkeypatch.setattr(plan_pipeline, "first_micro_batches", lambda *_: 4)
    monkeypatch.setattr(choose_stages, "WORTH_ANOTHER", 1.0)
    monkeypatch.setattr(plan_pipeline, "_recomputes_more", lambda plan, report: True)
    pipeline = plan(PipeshardParallel("auto"), HOSTS, picky)
    assert pipeline.num_micro_batches == 4 and pipeline.search is not None
    (note,) = [note for note in pipeline.search.notes if "micro-batches" in note]
    assert note.startswith(
        "8 micro-batches were not searched: picky: num_micro_batches=8 traces it"
    )
    assert "needs 4 rows" in note
    assert pipeline.warnings == ()


# -- the default


def test_the_default_goes_on_with_pipelines_and_with_one_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        Injected(patch, auto_task, "plan_whole", always)
        pipeline = plan(AutoParallel(), HOSTS)
        assert pipeline.is_pipeline
        assert "ruled out a plan on one mesh: IndexError" in warning_of(pipeline)
    with monkeypatch.context() as patch:
        Injected(patch, auto_task, "plan_pipeline", always)
        whole = plan(AutoParallel(), FAR_HOSTS, args=LARGE)
        assert not whole.is_pipeline
        assert "ruled out pipelines: IndexError" in warning_of(whole)
    Injected(monkeypatch, auto_task, "plan_whole", always)
    Injected(monkeypatch, auto_task, "plan_pipeline", always)
    with pytest.raises(PlanningError, match="no plan on one mesh and no pipeline") as caught:
        plan(AutoParallel(), HOSTS)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_failure_does_not_hide_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mesh of two does not fit, the other fails: the error is that of memory, and says both."""
    Injected(monkeypatch, plan_mesh, "solve_graph", lambda graph, mesh, **_: mesh.shape == (4,))
    small = ShardingOptions(memory_budget_bytes=3000, remat="none")
    with pytest.raises(MemoryBudgetError, match="no sharding fits") as caught:
        plan(ShardParallel(options=small))
    assert "mesh (4,): autopar failed, IndexError" in caught.value.tried["what failed"]


def test_a_pin_in_vain_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ShardingOptions(pins={"nothing*": jax.sharding.PartitionSpec("x")})
    for method in (ShardParallel(options=options), AutoParallel(options=options)):
        with pytest.raises(SpecError, match="nothing"):
            plan(method, HOSTS)


def test_a_scan_that_cannot_be_written_out_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt-tiny-scan", num_layers=2)
    args = model.abstract_state(), model.abstract_batch()
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    assert plan(ShardParallel(), cluster, model.train_step, args).unrolled
    Injected(monkeypatch, step_source, "unroll_scans", always)
    found = plan(ShardParallel(), cluster, model.train_step, args)
    assert not found.unrolled
    assert "ruled out layers written out: IndexError" in warning_of(found)


def test_without_layers_the_default_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (auto_task, step_source):
        Injected(monkeypatch, module, "find_layers", always)
    whole = plan(AutoParallel(), HOSTS)
    assert "ruled out recomputation: IndexError" in warning_of(whole)
    tight = ShardingOptions(memory_budget_bytes=0.9 * plan(ShardParallel()).estimated_peak_bytes)
    other = plan(ShardParallel(options=tight))
    assert other.remat == () and "ruled out recomputation: IndexError" in warning_of(other)
    with pytest.raises(IndexError):
        plan(ShardParallel(options=ShardingOptions(remat="all")))

"""Plans from the cache: equal to those that were solved, and never for anything else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import fields, replace
from hashlib import sha256

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.ir.memory_found import MemoryCorrection
from autopar.ir.profile import find_profile
from autopar.plan_cache import folder as folders
from autopar.plan_cache import key as keys
from autopar.plan_cache.folder import PlanFolder
from autopar.tracer import user_rules
from autopar.tracer.trace import StepOptions, trace

CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")
ONE_MESH = autopar.ShardParallel((2, 4))


def shapes(rows=16, width=32, dtype=jnp.float32, weak=False):
    struct = jax.ShapeDtypeStruct
    state = {"w": struct((width, 4 * width), dtype), "v": struct((4 * width, width), dtype)}
    rate = struct((), jnp.float32, weak_type=weak)
    return state, {"x": struct((rows, width), dtype)}, rate


def make_step(scale=0.5, table=(1.0, 2.0), act=jnp.tanh, name="w"):
    constants = np.array(table, np.float32)

    def train_step(state, batch, rate):
        def loss(state):
            h = autopar.constrain(act(batch["x"] @ state["w"]), name)
            return (h @ state["v"]).mean() * scale + constants.sum()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - rate * g, state, grads), value

    return train_step


def plan(step=None, args=None, cluster=CLUSTER, method=ONE_MESH, **options):
    return autopar.plan(
        step or make_step(), *(args or shapes()), cluster=cluster, method=method, **options
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_told", set())
    return PlanFolder(tmp_path / "cache" / "plans")


METHODS = {
    "shard": ONE_MESH,
    "default": None,
    "micro-batches": autopar.ShardParallel((8,), num_micro_batches=2),
    "data": autopar.DataParallel(),
    "pinned": autopar.ShardParallel(
        (2, 4), options=autopar.ShardingOptions(pins={"state['w']": PartitionSpec("x", "y")})
    ),
    "recomputed": autopar.ShardParallel((2, 4), options=autopar.ShardingOptions(remat="all")),
    "pipeline": autopar.PipeshardParallel(
        2, layers=autopar.AutoLayers(2), stages=autopar.UniformStages(2)
    ),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_plan_from_the_cache_is_the_one_that_was_solved(method, cache):
    solved = plan(method=method)
    assert not solved.cached
    (file,) = cache.files()
    read = plan(method=method)
    assert read.cached == str(file.path)
    assert read == solved and read.to_json() == solved.to_json()
    assert read.input_specs == solved.input_specs and read.output_specs == solved.output_specs
    shown = read.explain(detail="full").replace(f"  read from the plan cache: {read.cached}\n", "")
    assert "plan cache" in read.explain(detail="full")
    assert "plan cache" not in solved.explain(detail="full")
    if not solved.is_pipeline:
        assert read.explain("state['v']") == solved.explain("state['v']")
    first = solved.explain(detail="full").splitlines()
    assert [line for line in shown.splitlines() if line in first] == first


def test_a_step_runs_as_the_solved_one(cache):
    args = jax.tree.map(lambda s: np.ones(s.shape, s.dtype) * 0.1, shapes())
    results = []
    for _ in range(2):
        step = autopar.parallelize(make_step(), donate_argnums=())
        results.append(step(*args))
    assert step.last_planned.plan.cached
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_step_with_constraints_of_its_own(cache):
    """Their parameters hold a mesh, and JAX's stand-in for none."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    place = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))

    def step(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), place)

    x = jnp.arange(16.0).reshape(8, 2)
    for _ in range(2):
        run = autopar.parallelize(step, method=ONE_MESH, batch_argnums=(0,))
        np.testing.assert_allclose(run(x), jnp.sin(x), rtol=1e-6)
    assert run.last_executable.plan.cached and not run.last_executable.plan.warnings


def test_a_failure_of_the_cache_is_a_warning_of_the_plan(monkeypatch):
    def fail(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr("autopar.compiler.plan_key", fail)
    (warning,) = plan().warnings
    assert "the plan cache" in warning and "AttributeError: no such thing" in warning


def test_pins_of_a_plan_from_the_cache():
    plan()
    read, pin = plan(), {"state['w']": PartitionSpec("x")}
    assert read.cached
    assert read.with_pins(pin).solver.objective == pytest.approx(
        autopar.plan(
            make_step(),
            *shapes(),
            cluster=CLUSTER,
            method=replace(ONE_MESH, options=autopar.ShardingOptions(pins=pin)),
        ).solver.objective
    )


# -- everything that decides


OTHERS = {
    "rows": {"args": shapes(rows=32)},
    "width": {"args": shapes(width=64)},
    "type": {"args": shapes(dtype=jnp.bfloat16)},
    "weak type": {"args": shapes(weak=True)},
    "a scalar constant": {"step": make_step(scale=0.25)},
    "an array's content": {"step": make_step(table=(1.0, 3.0))},
    "an array's shape": {"step": make_step(table=(1.0, 2.0, 3.0))},
    "an operator": {"step": make_step(act=jnp.sin)},
    "a named value": {"step": make_step(name="other")},
    "the batch": {"batch_argnums": (1, 2)},
    "hosts": {"cluster": autopar.ClusterSpec(2, 4, "h100-sxm")},
    "device": {"cluster": autopar.ClusterSpec(1, 8, "a100-sxm")},
    "memory": {"cluster": autopar.ClusterSpec(1, 8, "h100-sxm", memory_bytes=1e9)},
    "links": {"cluster": autopar.ClusterSpec(1, 8, "h100-sxm", host_bandwidth=1e9)},
    "mesh": {"method": autopar.ShardParallel((4, 2))},
    "method": {"method": autopar.DataParallel()},
    "micro-batches": {"method": autopar.ShardParallel((2, 4), num_micro_batches=2)},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_nothing_else_gets_the_plan(change, cache):
    plan()
    assert not plan(**change).cached
    assert len(cache.files()) == 2
    assert plan().cached


# Another value for every option of the solver.
OPTIONS = {
    "solver": "PULP_CBC_CMD",
    "solver_time_limit_s": 59.0,
    "fold_layers": False,
    "pins": {"state['w']": PartitionSpec("x")},
    "forbid_axes": {"state['w']": "x"},
    "batch_axis": "x",
    "allow_reduce_scatter": False,
    "allow_all_to_all": False,
    "allow_replicated_parameters": False,
    "memory_budget_bytes": 1e9,
    "host_memory": "never",
    "memory_correction": MemoryCorrection(1.1),
    "remat": "none",
    "overlap": True,
    "rerank": 2,
    "rerank_by": "program",
    "xla_options": {"xla_gpu_x": True},
    "planning_time_s": 59.0,
    "keep_best_on_interrupt": True,
}


def key_of(**request):
    given = {"cluster": CLUSTER, "method": ONE_MESH, "mesh": None, "one_mesh": False, **request}
    return keys.plan_key(given.pop("traced"), StepOptions.checked(), **given)


def trace_of(step):
    return trace(step, shapes(), {}, StepOptions.checked())


def test_every_option_is_part_of_the_key():
    assert OPTIONS.keys() == {field.name for field in fields(autopar.ShardingOptions)}
    traced = trace_of(make_step())
    found = {key_of(traced=traced)}
    for name, value in OPTIONS.items():
        options = autopar.ShardingOptions(**{name: value})
        found.add(key_of(traced=traced, method=replace(ONE_MESH, options=options)))
    assert len(found) == 1 + len(OPTIONS)


def test_methods_meshes_and_specs_are_part_of_the_key():
    traced = trace_of(make_step())
    spec = PartitionSpec("x")

    def manual(specs):
        return autopar.ManualParallel((2, 4), ("x", "y"), in_specs=specs)

    requests = [
        *({"method": method} for method in METHODS.values()),
        {"method": autopar.Zero2Parallel()},
        {"method": autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))},
        {"method": autopar.PipeshardParallel(2, stages=autopar.UniformStages(4))},
        {"method": autopar.PipeshardParallel(2, schedule="gpipe")},
        {"method": manual(({"w": spec, "v": None}, None, None))},
        {"method": manual(({"w": None, "v": spec}, None, None))},
        {"method": None, "one_mesh": True},
        {"method": autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))},
        {"method": autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.2))},
        {"method": None, "mesh": autopar.LogicalMesh((2, 4), alpha=(1, 1), beta=(1, 0.1))},
    ]
    assert len({key_of(traced=traced, **request) for request in requests}) == len(requests)


def test_a_profile_counts_by_its_content(tmp_path):
    traced, shipped = trace_of(make_step()), find_profile("h200")
    changed = replace(shipped, products=shipped.products[1:])
    found = [
        key_of(traced=traced, cluster=autopar.ClusterSpec(1, 8, profile=profile))
        for profile in (shipped, changed)
    ]
    file = tmp_path / shipped.name
    shipped.save(file)
    copied = key_of(traced=traced, cluster=autopar.ClusterSpec(1, 8, profile=str(file)))
    assert found[0] == copied != found[1]


def test_names_donation_rules_and_versions_are_part_of_the_key(monkeypatch):
    step = make_step()
    traced = trace_of(step)
    found = [key_of(traced=traced)]
    for change in ({"donated": ()}, {"batch": ()}, {"state": ()}, {"name": "other"}):
        found.append(key_of(traced=replace(traced, **change)))
    monkeypatch.setattr(user_rules, "_rules", {})
    autopar.register_rule("a_kernel", "i -> i")
    found.append(key_of(traced=traced))
    monkeypatch.setattr(keys, "planner_versions", lambda: ("another release",))
    found.append(key_of(traced=traced))
    assert len(set(found)) == len(found)


def step_at(line: int, code: str):
    """A step in a file of its own, from this line on."""
    source = "\n" * line + f"def train_step(state, batch, rate):\n    {code}\n"
    names = {"jnp": jnp}
    exec(compile(source, "a_users_file.py", "exec"), names)
    return names["train_step"]


def test_code_and_lines_are_part_of_the_key():
    """The same program for 16 rows, but not for micro-batches of 8; and another line to show."""
    general = "return state, (batch['x'].reshape(batch['x'].size) * rate).sum()"
    fixed = "return state, (batch['x'].reshape(512) * rate).sum()"
    found = [
        key_of(traced=trace_of(step_at(*given)))
        for given in ((1, general), (1, general), (1, fixed), (2, general))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_what_depends_on_more_is_not_kept(cache):
    step = autopar.parallelize(make_step(), method=ONE_MESH)
    args = shapes()
    solved = step.plan(*args)
    assert len(cache.files()) == 1
    assert not autopar.parallelize(make_step(), method=solved).plan(*args).cached
    evaluate = autopar.parallelize(
        lambda s, b: b["x"] @ s["w"], method=autopar.FollowParallel(step)
    )
    evaluate.plan(*args[:2])
    assert len(cache.files()) == 1
    timed = autopar.ShardParallel((2, 4), options=autopar.ShardingOptions(rerank=2))
    assert not keys.is_cacheable(timed)


class Odd:
    """A parameter that says nothing of what it is."""

    def __init__(self) -> None:
        self.state = 1

    def __hash__(self) -> int:
        return 1


def test_an_unknown_parameter_is_planned_every_time(cache, caplog):
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    odd = Primitive("odd_for_the_cache")
    odd.def_abstract_eval(lambda x, *, what: x)
    mlir.register_lowering(odd, lambda ctx, x, *, what: [x])

    def step(state, batch, rate):
        return state, odd.bind((batch["x"] @ state["w"]).sum(), what=Odd())

    with caplog.at_level(logging.INFO, "autopar"):
        assert not plan(step).cached
        assert not plan(step).cached
    assert cache.files() == []
    assert "is not kept: it holds a" in caplog.text


# -- files that are not what they should be


def test_a_file_cut_at_any_byte_is_planned_again(cache, caplog):
    solved = plan()
    (file,) = cache.files()
    content = file.path.read_bytes()
    sizes = {0, 1, *range(2, len(content), max(1, len(content) // 12)), len(content) - 1}
    for size in sorted(sizes):
        caplog.clear()
        folders._told.clear()
        file.path.write_bytes(content[:size])
        again = plan()
        assert not again.cached and replace(again, solver=solved.solver) == solved
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert "planned again" in record.getMessage()
        assert plan().cached  # replaced


def text_of(entry: dict) -> str:
    """An entry with a right checksum."""
    body = json.dumps(entry, separators=(",", ":"))
    head = '{"format":"autopar-cached-plan","version":1,"entry":'
    return f'{head}{body},"sha256":"{sha256(body.encode()).hexdigest()}"}}'


def test_a_foreign_file_is_planned_again(cache):
    plan()
    (file,) = cache.files()
    content = file.path.read_text()
    entry = json.loads(content)["entry"]
    assert text_of(entry) == content
    plan(make_step(scale=0.125))
    other = next(f.path for f in cache.files() if f.path != file.path)
    foreign = {
        "another key": other.read_text(),
        "a plan file": plan().to_json(),
        "an altered number": content.replace('"num_micro_batches":1', '"num_micro_batches":2'),
        "an impossible mesh": text_of({**entry, "plan": {**entry["plan"], "mesh_shape": [3, 4]}}),
        "an unknown field": text_of({**entry, "more": 1}),
        "not text": "\x00\x01",
    }
    for what, text in foreign.items():
        file.path.write_text(text)
        assert not plan().cached, what
        assert plan().cached


def test_a_plan_of_another_program_is_not_bound(cache):
    """A file under a wrong name, checksum and key right: the program is checked all the same."""
    plan()
    plan(make_step(act=jnp.sin))
    one, other = (file.path for file in cache.files())
    entry = json.loads(other.read_text())["entry"]
    other_key, key = other.stem, one.stem
    one.write_text(text_of({**entry, "key": key}))
    plans = [plan(), plan(make_step(act=jnp.sin))]
    assert sorted(bool(p.cached) for p in plans) == [False, True]
    assert other_key != key


def test_a_home_that_cannot_be_used_costs_one_log_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "home").write_text("a file")
    monkeypatch.delenv("AUTOPAR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert not plan().cached and not plan().cached
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "plans cannot be kept" in record.getMessage()


# -- another process

SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np
import autopar
import autopar.sharding.plan_mesh as plan_mesh, autopar.tracer.known_graphs as known_graphs
if sys.argv[1] == "second":
    def refuse(*args, **kwargs):
        raise AssertionError("planned again")
    known_graphs.build = plan_mesh.solve_graph = refuse

def train_step(state, batch):
    def loss(w):
        return jnp.tanh(batch @ w).mean()
    value, grad = jax.value_and_grad(loss)(state)
    return state - 0.1 * grad, value

step = autopar.parallelize(train_step)
state = np.ones((32, 64), np.float32)
for _ in range(2):
    state, value = step(state, np.ones((16, 32), np.float32))
print(step.last_planned.plan.cached != "", float(value))
print([m for m in ("pulp", "scipy.sparse") if m in sys.modules])
"""


def test_the_second_process_of_a_script_solves_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = []
    for which in ("first", "second"):
        done = subprocess.run(
            [sys.executable, str(script), which],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    first, second = outputs
    assert first[0].startswith("False") and second[0].startswith("True")
    assert first[0].split()[1] == second[0].split()[1]
    assert second[1] == "[]"

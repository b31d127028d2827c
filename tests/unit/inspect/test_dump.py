"""Debug dumps: what is in the folder, and that it is true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import highspy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.tiles import Gather, Tile, TilePlan, check_tile_plan
from autopar.runtime.debug import DebugFile

RNG = np.random.default_rng(0)
STATE = [(RNG.normal(size=(16, 16)) / 4).astype(np.float32) for _ in range(2)]
BATCH = RNG.normal(size=(32, 16)).astype(np.float32)


def step(state, batch):
    def loss(params):
        x = batch
        for w in params:
            x = autopar.constrain(jnp.tanh(x @ w), "hidden")
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value


def dumped(method: Any, folder: Path) -> tuple[Any, dict[str, str]]:
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    parallel(STATE, BATCH)
    parallel.last_executable.dump_debug_info(folder)
    return parallel, {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def one_mesh(tmp_path_factory) -> tuple[Any, dict[str, str], Path]:
    folder = tmp_path_factory.mktemp("one") / "new" / "folder"
    return *dumped(autopar.ShardParallel((2, 4)), folder), folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> tuple[Any, dict[str, str], Path]:
    folder = tmp_path_factory.mktemp("pipeline")
    method = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
    return *dumped(method, folder), folder


def listed(files: dict[str, str]) -> set[str]:
    lines = files["README.txt"].split("\n\n")[1].splitlines()
    return {line.split()[0] for line in lines}


@pytest.mark.ci
def test_the_index_names_every_file(one_mesh, pipeline) -> None:
    for _, files, _ in (one_mesh, pipeline):
        assert listed(files) == set(files) - {"README.txt"}
        assert "Not made" not in files["README.txt"]
        assert all(text.strip() for text in files.values())


def test_programs_before_annotated_and_optimized(one_mesh, pipeline) -> None:
    _, files, _ = one_mesh
    assert "stablehlo.dot_general" in files["before.mlir"]
    assert "sharding" not in files["before.mlir"].replace("mhlo.num_partitions", "")
    assert re.search(r"sdy.sharding|mhlo.sharding", files["step.annotated.mlir"])
    assert files["step.optimized.hlo.txt"].startswith("HloModule")
    parallel, files, _ = pipeline
    for name in parallel.last_executable.compiled:
        assert re.search(r"sdy.sharding|mhlo.sharding", files[f"{name}.annotated.mlir"])
        assert files[f"{name}.optimized.hlo.txt"].startswith("HloModule")
    for stage in range(2):
        text = files[f"stage{stage}.before.mlir"]
        assert "stablehlo.dot_general" in text and "sdy.sharding_constraint" not in text


def test_placement(one_mesh, pipeline) -> None:
    for parallel, files, _ in (one_mesh, pipeline):
        plan = parallel.last_executable.plan
        places = {(p["kind"], p["path"]): p for p in json.loads(files["placement.json"])}
        for place, sharding, aval in zip(
            (places["input", t.path] for t in plan.inputs),
            parallel.last_executable.input_shardings,
            parallel.last_executable.avals,
            strict=True,
        ):
            assert tuple(place["shard_shape"]) == sharding.shard_shape(aval.shape)
            assert place["bytes_per_device"] == 4 * np.prod(place["shard_shape"])
            assert place["path"] in files["placement.txt"]
        assert {p["path"] for p in places.values()} >= {t.path for t in plan.outputs}


def test_strategies(one_mesh, pipeline) -> None:
    parallel, files, _ = one_mesh
    sharding = parallel.last_executable.plan.origin.sharding
    told = json.loads(files["strategies.json"])
    assert len(told["nodes"]) == len(sharding.graph.nodes)
    cost = 0.0
    for owner, own in told["classes"].items():
        assert len(own["strategies"]) == len(sharding.problem.strategies[int(owner)])
        cost += own["strategies"][own["chosen"]]["cost"]
    assert 0 < cost <= sharding.objective * (1 + 1e-9)
    assert files["strategies.txt"].count("dot_general") >= 4
    assert "operators of stage 1" in pipeline[1]["strategies.txt"]


def read_lp(path: Path) -> float:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value


def test_the_solvers_problem_has_the_plans_optimum(one_mesh, pipeline) -> None:
    parallel, _, folder = one_mesh
    plan = parallel.last_executable.plan
    assert read_lp(folder / "problem.lp") == pytest.approx(
        1e6 * plan.origin.sharding.objective, rel=1e-6
    )
    parallel, _, folder = pipeline
    for k, stage in enumerate(parallel.last_executable.plan.stages):
        found = read_lp(folder / f"stage{k}.problem.lp")
        assert found == pytest.approx(1e6 * stage.plan.origin.sharding.objective, rel=1e-6)


def test_pipelines_tell_schedule_transfers_and_lists(pipeline) -> None:
    parallel, files, _ = pipeline
    executable = parallel.last_executable
    clocks = files["schedule.txt"].splitlines()
    assert clocks[0] == "1f1b" and "forward 0 of 0" in clocks[3]
    for mesh, program in enumerate(executable.programs.meshes):
        lines = files[f"instructions_mesh{mesh}.txt"].splitlines()
        assert len(lines) == len(program.instructions)
    transfers = json.loads(files["transfers.json"])
    assert len(transfers) == len(executable.pipeline.transfers) > 0
    for told in transfers:
        check_tile_plan(tile_plan(told))
        assert told["link_bytes"] >= told["lower_bound_bytes"]


def tile_plan(told: dict[str, Any]) -> TilePlan:
    def box(given: Any) -> Any:
        return tuple(tuple(ends) for ends in given)

    return TilePlan(
        tuple(told["shape"]),
        told["itemsize"],
        tuple(told["source_mesh"]),
        tuple(told["source_layout"]),
        tuple(told["target_mesh"]),
        tuple(told["target_layout"]),
        tuple(told["landing"]),
        tuple(Tile(t["source"], t["target"], box(t["box"])) for t in told["tiles"]),
        tuple(
            Gather(tuple(g["devices"]), tuple((d, box(b)) for d, b in g["parts"]), box(g["box"]))
            for g in told["gathers"]
        ),
    )


def test_versions_memory_and_reshardings(one_mesh) -> None:
    parallel, files, _ = one_mesh
    versions = json.loads(files["versions.json"])
    assert versions["jax"] == jax.__version__ and versions["autopar"] == autopar.__version__
    assert {"python", "jaxlib", "numpy", "highspy", "devices"} <= versions.keys()
    assert "predicted peak" in files["memory.txt"]
    figures = json.loads(files["figures.json"])
    assert figures["memory_bytes"] == parallel.last_executable.memory_bytes()
    assert files["resharding.txt"].split()[0] in ("value", "No")


def test_what_cannot_be_made_is_said(tmp_path: Path, one_mesh, monkeypatch) -> None:
    executable = one_mesh[0].last_executable

    def broken() -> str:
        raise ValueError("no text today")

    files = [DebugFile("good.txt", "a file", lambda: "text"), DebugFile("bad.txt", "none", broken)]
    monkeypatch.setattr(executable, "describe", lambda _: files)
    executable.dump_debug_info(tmp_path)
    index = (tmp_path / "README.txt").read_text()
    assert "Not made:\nbad.txt: ValueError: no text today" in index
    assert (tmp_path / "good.txt").read_text() == "text"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [
        *[".json"] * 2,
        ".mlir",
        *[".txt"] * 4,
    ]


def test_on_one_device(tmp_path: Path) -> None:
    autopar.init(devices=jax.devices()[:1])
    try:
        _, files = dumped(None, tmp_path)
    finally:
        autopar.shutdown()
    assert "problem.lp" not in files  # there was nothing to solve
    assert "Not made" not in files["README.txt"]


def test_initialisers_beside_a_pipeline(tmp_path: Path, pipeline) -> None:
    def init(key):
        return [jax.random.normal(k, (16, 16)) for k in jax.random.split(key, 2)]

    create = autopar.parallelize(
        init, method=autopar.CreateStateParallel(pipeline[0], jax.ShapeDtypeStruct((32, 16), "f4"))
    )
    create(jax.random.key(0))
    create.last_executable.dump_debug_info(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"stage0_results.annotated.mlir", "stage1_results.optimized.hlo.txt"} <= names
    assert {"stage0.before.mlir", "stage1.problem.lp", "before.mlir"} <= names
    assert "Not made" not in (tmp_path / "README.txt").read_text()

"""`import autopar` is quick, changes nothing, and gives every public name when it is asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopar

HEAVY = ("jax", "jaxlib", "numpy", "scipy", "pulp", "highspy", "ray", "cupy", "flax", "optax")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_heavy_is_imported_before_it_is_used():
    loaded = run(f"import autopar, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_command_line_parses_without_jax():
    loaded = run(
        "import sys\n"
        "from autopar.cli.arguments import make_parser\n"
        "make_parser().parse_args(['demo'])\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


@pytest.mark.ci
def test_a_loaded_plan_can_be_explained_by_itself(tmp_path: Path):
    def step(params, batch):
        return params - jnp.mean(batch @ params), jnp.mean(batch)

    arrays = (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32"))
    file = tmp_path / "plan.json"
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    autopar.plan(step, *arrays, cluster=cluster).save(file)
    text = run(
        "from autopar.ir.plan import ParallelPlan\n"
        f"print(ParallelPlan.load({str(file)!r}).explain())"
    )
    assert "batch" in text


@pytest.mark.ci
def test_a_module_is_an_attribute_and_a_typing_error_is_told():
    code = (
        "import autopar\n"
        "print(autopar.errors.AutoparError.__name__, autopar.methods.AutoStages.__name__)\n"
        "try: autopar.paralelize\n"
        "except AttributeError as e: print(e)\n"
    )
    names, told = run(code).splitlines()
    assert names == "AutoparError AutoStages"
    assert told.startswith("module 'autopar' has no attribute 'paralelize' (did you mean 'paralle")


def test_the_stub_is_read_and_nothing_heavy_with_it():
    assert set(autopar.__all__) == set(autopar._MODULE_OF)
    assert run("import autopar, sys; print('jax' in sys.modules, len(autopar.__all__) > 60)") == (
        "False True\n"
    )


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_public_name_is_there_and_documented(name: str):
    value = getattr(autopar, name)
    assert name in dir(autopar)
    assert inspect.getdoc(value), f"{name} has no docstring"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("blocked", "code", "said"),
    [
        ("ray", "autopar.init(cluster='ray')", "pip install 'autopar[ray]'"),
        (
            "orbax",
            "autopar.save_checkpoint('x', {'a': jnp.ones(2)}, step=1, format='orbax')",
            "pip install 'autopar[checkpoint]'",
        ),
        (
            "cupy",
            "from autopar.runtime.transports.cuda import import_cupy; import_cupy('nccl')",
            "autopar[cuda12] or autopar[cuda13]",
        ),
        (
            "flax",
            "from autopar.cli.demo import run_demo; run_demo(1, 8, 'cpu', 'local')",
            "pip install 'autopar[examples]'",
        ),
    ],
)
def test_an_optional_part_that_is_missing_is_named_with_what_to_install(
    blocked: str, code: str, said: str, tmp_path: Path
):
    told = run(
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.modules[{blocked!r}] = None\n"
        "import autopar, jax.numpy as jnp\n"
        f"try: {code}\n"
        "except autopar.AutoparError as error: print(error)\n"
    )
    assert said in told

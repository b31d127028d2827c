"""Every primitive of JAX has a case or a reason, and every case computes what `jax.jit` does.

A family of cases is one test per mesh. `docs/operators.md` is made from the same cases.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar._requirements import NEWEST_JAX
from tests.operators.cases import Case, load
from tests.operators.check import MESHES, families, wanted_results, wrong_cases
from tests.operators.excluded import EXCLUDED
from tests.operators.primitives import primitives
from tests.operators.sources import SOURCES, bound_names, source_of

CASES = load()
FAMILIES = families(CASES)
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
MESH_IDS = ["x".join(map(str, shape)) for shape in MESHES]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_every_primitive_has_a_case_or_a_reason() -> None:
    missing = set(primitives()) - set(CASES) - set(EXCLUDED)
    assert not missing, (
        f"JAX {jax.__version__} has primitives that nothing here tries: {sorted(missing)}. Add a "
        "case to tests/operators, or a reason to tests/operators/excluded.py."
    )
    assert not set(CASES) & set(EXCLUDED)


def test_the_search_for_primitives_finds_those_everybody_knows() -> None:
    known = {"add", "dot_general", "scan", "random_bits", "shard_map", "pallas_call", "scatter-add"}
    assert known <= set(primitives())
    assert len(primitives()) > 250


@cache
def wanted(family: str) -> list[Any]:
    return wanted_results(FAMILIES[family])


@pytest.mark.representatives(
    "8-indices",
    "2x4-shapes",
    "2x4-control flow",
    slow=[f"8-{family}" for family in FAMILIES if family != "indices"],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=MESH_IDS)
def test_operators_equal_jit(family: str, mesh_shape: tuple[int, ...]) -> None:
    assert wrong_cases(FAMILIES[family], mesh_shape, wanted(family)) == {}


def test_a_wrong_result_is_seen() -> None:
    case = CASES["sin"]
    (results,) = wanted_results([case])
    off = jax.tree.map(lambda x: x.at[3, 5].add(1e-3), results)
    assert wrong_cases([case], (8,), [off]) == {"sin": "differs by up to 0.001"}


@pytest.mark.ci
def test_cases_bind_their_primitives() -> None:
    for case in CASES.values():
        assert case.primitive in bound_names(jax.make_jaxpr(case.step)(*case.args)), case.primitive


@pytest.mark.ci
def test_a_case_without_a_gradient_has_none() -> None:
    """JAX refuses to differentiate it, or no input is inexact."""
    differentiable = []
    for case in CASES.values():
        inexact = any(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in case.args)
        if case.gradient or not inexact:
            continue
        try:
            jax.eval_shape(case.backward, *case.args)
        except Exception:
            continue
        differentiable.append(case.primitive)
    assert differentiable == []


@pytest.mark.ci
@pytest.mark.parametrize("name", [n for n in ("new_ref", "get", "swap") if n in primitives()])
def test_a_mutable_array_is_refused_by_name(name: str) -> None:
    """The exclusion that is autopar's own: what it says happens."""

    def step(x: Any, batch: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] + batch
        return jax.freeze(ref)

    assert name in bound_names(jax.make_jaxpr(step)(np.ones(8), np.ones(8)))
    with pytest.raises(autopar.TraceError, match="mutable array"):
        autopar.parallelize(step)(np.ones(8, np.float32), np.ones(8, np.float32))


# -- the page


def page_rows() -> dict[str, list[str]]:
    """{primitive: cells of its row}"""
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in lines}


def _sources() -> list[tuple[str, str]]:
    return [(case.primitive, _source(case)) for case in CASES.values()]


def _source(case: Case) -> str:
    source = source_of(case).source
    assert source in SOURCES
    return source


if jax.__version__ == NEWEST_JAX:  # the page is made with it

    def test_the_page_lists_all_cases_and_exclusions() -> None:
        again = "run `python -m benchmarks.operators --page docs/operators.md` again"
        text = PAGE.read_text()
        assert f"JAX {jax.__version__} has {len(primitives())} primitives" in text, again
        assert set(page_rows()) == set(CASES), again
        for name in set(primitives()) & set(EXCLUDED):
            assert f"`{name}`" in text, again
        assert "**" not in text.partition("## Rules")[2], "the page lists operators that are wrong"

    @pytest.mark.ci
    def test_the_page_has_the_rules_of_today() -> None:
        rows = page_rows()
        stale = {
            name: (rows[name][0], found) for name, found in _sources() if rows[name][0] != found
        }
        assert stale == {}, "run `python -m benchmarks.operators --page docs/operators.md` again"

    @pytest.mark.ci
    def test_mulhi_fails_under_plain_jit_too() -> None:
        """If XLA has learnt it, `mulhi` and the philox keys need cases."""
        mesh = Mesh(np.array(jax.devices()[:8]), ("i",))
        rows = NamedSharding(mesh, PartitionSpec("i"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="StableHLO"):
            jax.jit(primitives()["mulhi"].bind, in_shardings=rows)(
                *[np.ones((8, 8), np.uint32)] * 2
            )

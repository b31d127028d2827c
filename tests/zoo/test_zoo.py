"""Every program of the zoo, on two meshes and, where it has layers, in a pipeline of two stages.

`.ci/run` runs sixteen representatives, which need only the packages of the extra `test`. The others
are slow tests, and need the extra `zoo`:

    pip install -e '.[zoo]' && python -m pytest -n 2 -m 'ci or slow' tests/zoo
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.zoo.check import check_program, methods_of
from tests.zoo.program import ZooProgram, all_programs

# (program, method): sixteen that stand for the zoo in `.ci/run`.
REPRESENTATIVES: frozenset[tuple[str, str]] = frozenset(
    {
        ("optax-adafactor", "8"),
        ("optax-muon", "2x4"),
        ("optax-multi-steps", "stages"),
        ("optax-frozen-parts", "stages"),
        ("optax-sam", "8"),
        ("equinox-gru", "8"),
        ("nnx-transformer", "2x4"),
        ("haiku-lstm", "8"),
        ("two-towers", "2x4"),
        ("gan", "2x4"),
        ("gnn", "2x4"),
        ("neural-ode-adaptive", "2x4"),
        ("fp8", "2x4"),
        ("newton-cg", "8"),
        ("shard-map", "2x4"),
        ("x64", "2x4"),
    }
)


def cases() -> list[Any]:
    found = []
    for program in all_programs().values():
        for method in methods_of(program):
            is_ci = (program.name, method) in REPRESENTATIVES
            marks: list[Any] = [pytest.mark.ci if is_ci else pytest.mark.slow]
            if method in program.fails:
                marks.append(pytest.mark.xfail(reason=program.fails[method], strict=True))
            found.append(pytest.param(program, method, id=f"{program.name}-{method}", marks=marks))
    return found


def require(program: ZooProgram) -> None:
    if missing := program.missing():
        pytest.skip(f"{program.name} needs {', '.join(missing)}")


@pytest.mark.filterwarnings("default")  # other people's code may warn
@pytest.mark.parametrize(("program", "method"), cases())
def test_as_on_one_device(program: ZooProgram, method: str) -> None:
    require(program)
    check_program(program, method)


def test_representatives_exist() -> None:
    known = {(p.name, method) for p in all_programs().values() for method in methods_of(p)}
    assert known >= REPRESENTATIVES


def test_names_are_plain() -> None:
    """Names are test ids, arguments of the benchmark and file names."""
    assert all(name.replace("-", "").isalnum() for name in all_programs())

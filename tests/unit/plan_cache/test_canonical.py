"""Canonical forms: equal values have equal ones, in every process; unknown types have none."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.plan_cache.canonical import NotCanonicalError, canonical, code_digest

Pair = namedtuple("Pair", "a b")

DIFFERENT = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "list and tuple": ([1], (1,)),
    "text and bytes": ("a", b"a"),
    "mapping": ({"a": 1}, {"a": 2}),
    "sets": ({1, 2}, {1, 3}),
    "types of arrays": (np.zeros(2, np.float32), np.zeros(2, np.float16)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "content": (np.arange(100), np.arange(100)[::-1]),
    "scalars": (np.float32(1), np.float32(2)),
    "dtypes": (np.dtype("int8"), np.dtype("int16")),
    "named tuples": (Pair(1, 2), (1, 2)),
    "specs": (PartitionSpec("x"), PartitionSpec(None, "x")),
    "functions": (lambda x: x + 1, lambda x: x + 2),
    "partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "keys": (jax.random.key(0), jax.random.key(1)),
    "jaxprs": (jax.make_jaxpr(jnp.sin)(1.0), jax.make_jaxpr(jnp.cos)(1.0)),
}


@pytest.mark.parametrize("one, other", DIFFERENT.values(), ids=DIFFERENT)
def test_different_values_have_different_forms(one, other):
    assert repr(canonical(one)) == repr(canonical(one))
    assert repr(canonical(one)) != repr(canonical(other))


def test_the_order_of_mappings_and_sets_does_not_count():
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({"x", "y", "z"}) == canonical({"z", "y", "x"})


def closing_over(value):
    return lambda: value


def test_functions_are_told_apart_by_what_they_close_over():
    assert canonical(closing_over(1)) == canonical(closing_over(1))
    assert canonical(closing_over(1)) != canonical(closing_over(2))


def test_an_object_of_an_unknown_type_has_no_form():
    class Odd:
        def __init__(self) -> None:
            self.state = 1

    with pytest.raises(NotCanonicalError, match="Odd"):
        canonical((1, [Odd()]))
    with pytest.raises(NotCanonicalError):
        canonical(np.array([object()]))


def test_forms_are_equal_in_every_process():
    code = (
        "from autopar.plan_cache.canonical import canonical, code_digest\n"
        "def f(x):\n    return x in {'a', 'b', 'c', 'd'}, {'k': 1}, 'é'\n"
        "print(canonical({'s': {'a', 'b', 'c'}, 'f': f}), code_digest(f.__code__))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def test_code_is_the_same_wherever_it_stands():
    source = "def f(x):\n    return x + 1\n"
    codes = []
    for text in (source, "\n\n# moved\n" + source):
        names: dict = {}
        exec(compile(text, f"file{len(codes)}.py", "exec"), names)
        codes.append(names["f"].__code__)
    assert code_digest(codes[0]) == code_digest(codes[1])

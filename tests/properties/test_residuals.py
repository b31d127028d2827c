"""The saved residuals are the fewest bytes that the backward pass can run from: brute force."""

from __future__ import annotations

from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from autopar.ir.program import Equation
from autopar.rewrite.residuals import choose_residuals, is_cheap

NUM_INPUTS = 2
SETTINGS = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Equation], list[Any], set[int], set[int]]:
    """(equations, types, values read, values available)"""
    num = draw(st.integers(1, 7))
    equations = []
    for index in range(num):
        value = NUM_INPUTS + index
        operands = draw(st.lists(st.integers(0, value - 1), max_size=3, unique=True))
        primitive = SimpleNamespace(name=draw(st.sampled_from(["add", "mul", "dot_general"])))
        equations.append(Equation(primitive, {}, tuple(operands), (value,), "", None, None, None))
    values = st.integers(0, NUM_INPUTS + num - 1)
    sizes = [draw(st.integers(0, 9)) for _ in range(NUM_INPUTS + num)]
    types = [SimpleNamespace(shape=(size,), dtype=np.dtype(np.float32)) for size in sizes]
    available = draw(st.sets(st.integers(0, NUM_INPUTS - 1)))
    return equations, types, draw(st.sets(values, min_size=1)), available


def derivable(equations: list[Equation], there: set[int]) -> set[int]:
    known = set(there)
    for equation in equations:
        if is_cheap(equation) and known.issuperset(equation.operands):
            known.update(equation.results)
    return known


@given(graphs())
@SETTINGS
def test_no_choice_keeps_fewer_bytes(
    graph: tuple[list[Equation], list[Any], set[int], set[int]],
) -> None:
    equations, types, read, available = graph

    def size(values: Any) -> int:
        return sum(types[v].shape[0] * 4 for v in values)

    choice = choose_residuals(equations, read, available, types)
    there = available | set(choice.stored)
    for position in choice.recomputed:
        assert is_cheap(equations[position])
        assert there.issuperset(equations[position].operands), "in order"
        assert there.isdisjoint(equations[position].results), "none that is there"
        there.update(equations[position].results)
    assert read <= there

    others = [v for v in range(len(types)) if v not in available]
    subsets = chain.from_iterable(combinations(others, n) for n in range(len(others) + 1))
    fewest = min(size(s) for s in subsets if read <= derivable(equations, available | set(s)))
    assert size(choice.stored) == fewest <= size(read - available)

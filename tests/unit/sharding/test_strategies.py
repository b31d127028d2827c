from __future__ import annotations

from itertools import product

import pytest

from autopar.ir.graph import Rule
from autopar.ir.spec import PARTIAL, WHOLE, fits
from autopar.sharding.strategies import Strategy, enumerate_strategies

ROW, COLUMN, INNER = 0, 1, 2


def matmul(m: int, n: int, k: int) -> Rule:
    """Rows × inner, inner × columns → rows × columns."""
    return Rule(
        operands=(((ROW,), (INNER,)), ((INNER,), (COLUMN,))),
        results=(((ROW,), (COLUMN,)),),
        sizes=(m, n, k),
        reduction=frozenset({INNER}),
    )


def by_factors(rule: Rule, mesh_shape: tuple[int, ...]) -> dict[tuple[int, ...], Strategy]:
    return {s.factors: s for s in enumerate_strategies(rule, mesh_shape)}


def test_a_product_on_one_axis() -> None:
    found = by_factors(matmul(8, 8, 8), (4,))
    assert {f: (s.operands, s.results, s.parallelism) for f, s in found.items()} == {
        (-1,): (((WHOLE,), (WHOLE,)), ((WHOLE,),), 1),
        (ROW,): (((0,), (WHOLE,)), ((0,),), 4),
        (COLUMN,): (((WHOLE,), (1,)), ((1,),), 4),
        (INNER,): (((1,), (0,)), ((PARTIAL,),), 4),
    }


def test_a_product_on_two_axes() -> None:
    found = by_factors(matmul(8, 8, 8), (2, 4))
    assert set(found) == set(product((-1, ROW, COLUMN, INNER), repeat=2))
    both = found[ROW, INNER]
    assert both.operands == ((0, 1), (WHOLE, 0))
    assert both.results == ((0, PARTIAL),)
    assert both.parallelism == 8


def test_two_axes_on_one_factor() -> None:
    found = by_factors(matmul(8, 4, 6), (2, 4))
    assert found[ROW, ROW].operands == ((0, 0), (WHOLE, WHOLE))
    assert found[ROW, ROW].results == ((0, 0),)
    assert found[ROW, ROW].parallelism == 8
    assert (COLUMN, COLUMN) not in found  # 4 columns on 8 devices
    assert (COLUMN, -1) in found and (-1, COLUMN) in found
    assert (INNER, -1) in found and (-1, INNER) not in found  # 6 by 2, not by 4


@pytest.mark.parametrize(("size", "axis", "splits"), [(6, 2, True), (6, 4, False), (3, 2, False)])
def test_a_factor_is_split_evenly_or_not_at_all(size, axis, splits) -> None:
    rule = Rule((((0,),),), (((0,),),), (size,))
    assert ((0,) in by_factors(rule, (axis,))) is splits


def test_an_axis_of_size_one_is_not_used() -> None:
    found = enumerate_strategies(matmul(8, 8, 8), (1, 2))
    assert {s.factors[0] for s in found} == {-1}
    assert all(layout[0] == WHOLE for s in found for layout in (*s.operands, *s.results))
    assert len(found) == 4


def test_fixed_factors_stay_whole() -> None:
    rule = Rule((((0,), (1,)),), (((0,), (1,)),), (8, 8), fixed=frozenset({1}))
    found = by_factors(rule, (2,))
    assert set(found) == {(-1,), (0,)}
    assert len(by_factors(rule, (2, 2))) == 4


def test_an_op_with_everything_fixed_runs_replicated() -> None:
    rule = Rule((((0,),),), (((0,),),), (8,), fixed=frozenset({0}))
    (only,) = enumerate_strategies(rule, (2, 4))
    assert only == Strategy((((WHOLE, WHOLE)),), ((WHOLE, WHOLE),), (-1, -1), 1)


# -- dimensions made of several factors: reshape (8, 4) → (32,)

RESHAPE = Rule((((0,), (1,)),), (((0, 1),),), (8, 4))


def test_the_major_factor_of_a_dimension_can_be_split() -> None:
    found = by_factors(RESHAPE, (4,))
    assert set(found) == {(-1,), (0,)}
    assert found[(0,)].operands == ((0,),)
    assert found[(0,)].results == ((0,),)


def test_the_minor_factor_only_when_the_major_one_is_used_up_by_earlier_axes() -> None:
    found = by_factors(RESHAPE, (8, 4))
    assert found[0, 1].operands == ((0, 1),)
    assert found[0, 1].results == ((0, 0),)
    assert (-1, 1) not in found  # tiles of rows would be strided
    # The other way about, the minor factor's axis would be the major axis of the dimension.
    assert (1, 0) not in by_factors(RESHAPE, (4, 8))
    # Two of eight rows are not all of them.
    assert (0, 1) not in by_factors(RESHAPE, (2, 4))


def test_both_axes_on_the_major_factor() -> None:
    assert by_factors(RESHAPE, (2, 4))[0, 0].results == ((0, 0),)
    assert (0, 0) not in by_factors(RESHAPE, (4, 4))  # 8 rows on 16 devices


def test_a_dimension_of_two_factors_holds_where_it_is_an_operand() -> None:
    """(32,) → (8, 4): the same rule, read from right to left."""
    split = Rule((((0, 1),),), (((0,), (1,)),), (8, 4))
    found = by_factors(split, (8, 4))
    assert (-1, 1) not in found
    assert found[0, 1].operands == ((0, 0),)
    assert found[0, 1].results == ((0, 1),)


def test_dimensions_of_size_one_have_no_factor() -> None:
    rule = Rule((((), (0,)),), (((0,),),), (8,))
    found = by_factors(rule, (2,))
    assert found[(0,)].operands == ((1,),)


# -- partial sums


def test_partial_sums_flow_through_a_linear_op() -> None:
    add = Rule((((0,),), ((0,),)), (((0,),),), (8,), linear=True)
    found = by_factors(add, (2,))
    assert set(found) == {(-1,), (0,), (-2,)}
    partial = found[(-2,)]
    assert partial.operands == ((PARTIAL,), (PARTIAL,))
    assert partial.results == ((PARTIAL,),)
    assert partial.parallelism == 1  # every device adds what it has
    mixed = by_factors(add, (2, 2))[0, -2]
    assert mixed.operands == ((0, PARTIAL), (0, PARTIAL))
    assert mixed.parallelism == 2


def test_no_operand_of_another_op_is_partial() -> None:
    for strategy in enumerate_strategies(matmul(8, 8, 8), (2, 4)):
        assert not any(PARTIAL in layout for layout in strategy.operands)


def test_a_split_reduction_leaves_every_result_partial() -> None:
    rule = Rule((((0,), (1,)),), (((0,),), ((0,),)), (8, 8), reduction=frozenset({1}))
    assert by_factors(rule, (2,))[(1,)].results == ((PARTIAL,), (PARTIAL,))


# -- all of them


@pytest.mark.parametrize("mesh_shape", [(2,), (8,), (2, 2), (2, 4), (4, 2), (8, 4), (1, 1)])
@pytest.mark.parametrize("rule", [matmul(8, 4, 16), RESHAPE], ids=["matmul", "reshape"])
def test_strategies_are_distinct_and_fit(rule: Rule, mesh_shape) -> None:
    found = enumerate_strategies(rule, mesh_shape)
    assert len({(s.operands, s.results) for s in found}) == len(found)
    assert any(s.parallelism == 1 for s in found)
    shapes = [[_size(rule, own) for own in dims] for dims in (*rule.operands, *rule.results)]
    for strategy in found:
        for layout, shape in zip((*strategy.operands, *strategy.results), shapes, strict=True):
            assert fits(layout, shape, mesh_shape)


def _size(rule: Rule, factors: tuple[int, ...]) -> int:
    size = 1
    for factor in factors:
        size *= rule.sizes[factor]
    return size


def test_equal_layouts_keep_the_most_parallel_work() -> None:
    """A factor that no array has (a hidden reduction) changes the work, not the layouts."""
    rule = Rule((((0,),),), (((0,),),), (8, 4))
    found = {s.results: s for s in enumerate_strategies(rule, (4,))}
    assert found[((WHOLE,),)].parallelism == 4

"""Laws that interpolated times obey, whatever was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.measured import MeasuredCosts
from autopar.ir.profile import COLLECTIVES, CollectiveTime, MachineProfile, ProductTime, Timing

laws = settings(deadline=None, max_examples=50)
few = settings(deadline=None, max_examples=15)  # grids of four sizes take a moment
sizes = st.integers(1, 5_000).map(lambda n: 8 * n)  # see `test_rows_that_are_not_whole…`
seconds = st.floats(1e-6, 1e-1)
REL = 1 + 1e-9


def profile(**parts) -> MachineProfile:
    return MachineProfile("gpu", "any", 1, 8, {}, **{k: tuple(v) for k, v in parts.items()})


products = st.lists(
    st.builds(
        ProductTime,
        dtype=st.just("bfloat16"),
        batch=st.integers(1, 64),
        m=sizes,
        n=sizes,
        k=sizes,
        time=seconds.map(Timing),
    ),
    min_size=1,
    max_size=12,
)


@few
@given(products, st.tuples(st.integers(1, 64), sizes, sizes, sizes), st.data())
def test_more_work_is_never_cheaper(samples, shape, data) -> None:
    costs = MeasuredCosts(profile(products=samples))
    which = data.draw(st.integers(0, 3))
    larger = list(shape)
    larger[which] += data.draw(st.just(0) | sizes)
    less, more = costs.product_s("bfloat16", *shape), costs.product_s("bfloat16", *larger)
    assert less is not None and more is not None
    assert 0 < less <= more * REL


@few
@given(products, st.integers(128, 5_000), st.integers(0, 5_000))
def test_rows_that_are_not_whole_take_longer_by_their_samples(samples, half, more) -> None:
    """Without samples of them they cost what whole ones do, and never less."""
    whole = [sample for sample in samples if sample.n % 8 == 0 and sample.k % 8 == 0]
    costs = MeasuredCosts(profile(products=whole))
    shape = (1, 512, 2 * half + 1, 512 + more)
    plain = costs.product_s("bfloat16", *shape)
    assert costs.product_s("bfloat16", *shape, 2) == plain
    if plain is None:
        return
    for seconds in (3.0 * plain, 0.5 * plain):
        sample = ProductTime("bfloat16", 1, 512, 2 * half + 1, 512, Timing(seconds))
        costs = MeasuredCosts(profile(products=[*whole, sample]))
        at = costs.product_s("bfloat16", 1, 512, 2 * half + 1, 512)
        assert at is not None
        slow = costs.product_s("bfloat16", 1, 512, 2 * half + 1, 512, 2)
        assert slow == pytest.approx(max(seconds, at), rel=1e-6)
        assert costs.product_s("bfloat16", *shape) == plain


@pytest.mark.ci
@few
@given(products, st.tuples(st.integers(1, 64), sizes, sizes, sizes), st.integers(1, 10**6))
def test_nothing_beats_the_best_rate_or_the_shortest_time(samples, shape, factor) -> None:
    """Outside of all samples, too."""
    costs = MeasuredCosts(profile(products=samples))
    least = min(s.time.seconds for s in samples)
    best = max(s.flops / s.time.seconds for s in samples)
    for batch, m, n, k in (shape, tuple(factor * size for size in shape), (1, 1, 1, 1)):
        took = costs.product_s("bfloat16", batch, m, n, k)
        assert took is not None
        assert took * REL >= max(least, 2.0 * batch * m * n * k / best)


places = st.sampled_from([(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
noise = st.floats(0.3, 3.0)


@st.composite
def measured_collectives(draw) -> MeasuredCosts:
    """Some kinds, placements and sizes, with a lot of noise."""
    samples = []
    for kind in draw(st.lists(st.sampled_from(COLLECTIVES), min_size=1, unique=True)):
        for ranks, stride in draw(st.lists(places, min_size=1, unique=True)):
            for power in draw(st.lists(st.integers(10, 28), min_size=1, max_size=4, unique=True)):
                took = draw(noise) * (1e-5 + 2.0**power / 1e11)
                samples.append(CollectiveTime(kind, ranks, stride, ranks, 2.0**power, Timing(took)))
    return MeasuredCosts(profile(collectives=samples))


collectives = measured_collectives()
asked = st.tuples(st.sampled_from([2, 3, 4, 6, 8, 16, 64]), st.sampled_from([1, 2, 4, 8]))
num_bytes = st.floats(0, 1e11)


def ask(costs: MeasuredCosts, kind: str, place: tuple[int, int], size: float) -> float | None:
    ranks, stride = place
    return costs.collective_s(kind, ranks, stride, ranks, size)


@pytest.mark.representatives("all-gather", "all-to-all")
@pytest.mark.parametrize("kind", COLLECTIVES)
@laws
@given(collectives, asked, num_bytes, num_bytes)
def test_more_bytes_never_cost_less(kind, costs, place, some, more) -> None:
    some, more = sorted((some, more))
    less, greater = ask(costs, kind, place, some), ask(costs, kind, place, more)
    assert (less is None) == (greater is None)
    if less is not None and greater is not None:
        assert 0 < less <= greater * REL


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
@laws
@given(collectives, asked, st.sampled_from([2, 3, 4, 6, 8, 16, 64]), num_bytes)
def test_more_ranks_never_cost_less(kind, costs, place, ranks, size) -> None:
    (few, stride), many = (min(place[0], ranks), place[1]), max(place[0], ranks)
    less, greater = ask(costs, kind, (few, stride), size), ask(costs, kind, (many, stride), size)
    if less is not None and greater is not None:
        assert less <= greater * REL


@laws
@given(collectives, asked, num_bytes)
def test_halves_and_wholes(costs, place, size) -> None:
    reduce_s = ask(costs, "all-reduce", place, size)
    gather_s = ask(costs, "all-gather", place, size)
    scatter_s = ask(costs, "reduce-scatter", place, size)
    exchange_s = ask(costs, "all-to-all", place, size)
    if reduce_s is None or gather_s is None or scatter_s is None or exchange_s is None:
        assert reduce_s is gather_s is scatter_s is None, "any of these tells the others"
        return
    alpha = ask(costs, "all-gather", place, 0.0)
    assert alpha is not None
    assert scatter_s <= reduce_s * REL and gather_s <= reduce_s * REL
    assert exchange_s <= gather_s * REL
    assert reduce_s <= (scatter_s + gather_s + alpha) * REL
    assert scatter_s + gather_s <= 2 * reduce_s * REL


@pytest.mark.representatives("all-gather")
@pytest.mark.parametrize("kind", COLLECTIVES)
@laws
@given(collectives, asked, num_bytes, st.floats(0, 1))
def test_alpha_share_scales_alpha_alone(kind, costs, place, size, share) -> None:
    ranks, stride = place
    full = ask(costs, kind, place, size)
    part = costs.collective_s(kind, ranks, stride, ranks, size, share)
    if full is not None and part is not None:
        alpha = ask(costs, kind, place, 0.0)
        assert alpha is not None
        assert full - part == pytest.approx((1 - share) * alpha, rel=1e-9, abs=1e-12 * full)
        assert part >= -1e-15

"""The shipped profile of the H200 is what the correction makes of the measured one."""

from autopar.ir.profile import load_profile
from benchmarks.correct_h200 import (
    OVER_S,
    RAW,
    SHIPPED,
    _operand_bytes,
    corrected,
    is_possible,
    pass_rate,
)


def test_the_shipped_profile_is_the_corrected_one():
    raw, shipped = load_profile(RAW), load_profile(SHIPPED)
    assert shipped == corrected(raw)
    assert any("corrected" in note for note in shipped.notes)
    assert all(is_possible(s) for s in (*shipped.products, *shipped.convolutions, *shipped.streams))
    assert not all(is_possible(s) for s in raw.streams)


def test_a_pass_over_the_operand_is_taken_off():
    raw, shipped = load_profile(RAW), load_profile(SHIPPED)
    rate = pass_rate(raw)
    assert 3e12 < rate < 4e12
    sizes = (16384, 2048, 8192)
    before, after = (
        next(p for p in profile.products if p.dtype == "bfloat16" and (p.m, p.n, p.k) == sizes)
        for profile in (raw, shipped)
    )
    assert _operand_bytes(before) == 16384 * 8192 * 2
    wanted_s = before.time.seconds - 2 * 16384 * 8192 * 2 / rate + OVER_S
    assert abs(after.time.seconds - wanted_s) < 1e-9

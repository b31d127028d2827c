"""The traffic of made-up kernels: slices, gathers, scatters, and Fourier transforms."""

from __future__ import annotations

import re

import pytest

from autopar.ir.ffts import (
    ACROSS,
    CONVOLVED,
    HALF,
    PASS,
    PRIME,
    PRIME_SLOPE,
    SCALED,
    SMOOTH,
)
from autopar.measure.judge_kernels import seconds
from autopar.measure.judge_traffic import CACHE_SPEED, SWAP_S, Work
from tests.unit.measure.made_up_kernels import DEVICE, fusion, work

FUSIONS = {
    "a slice of a large array": (
        """%a = f32[800]{0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %s = f32[8]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={8}""",
        2 * 32 + 4,
    ),
    "every second element": (
        """%a = f32[800]{0} parameter(0)
        ROOT %s = f32[4]{0} slice(%a), slice={[0:8:2]}""",
        32 + 16,
    ),
    "every second row": (
        """%a = f32[8,100]{1,0} parameter(0)
        ROOT %s = f32[2,100]{1,0} slice(%a), slice={[0:4:2], [0:100:1]}""",
        2 * 800,
    ),
    "an update in place": (
        """%a = f32[800]{0} parameter(0)
        %u = f32[8]{0} parameter(1)
        %i = s32[] parameter(2)
        ROOT %s = f32[800]{0} dynamic-update-slice(%a, %u, %i)""",
        2 * 32 + 4,
    ),
    "an update in place, then a bitcast": (
        """%a = f32[800]{0} parameter(0)
        %u = f32[8]{0} parameter(1)
        %i = s32[] parameter(2)
        %s = f32[800]{0} dynamic-update-slice(%a, %u, %i)
        ROOT %b = f32[8,100]{1,0} bitcast(%s)""",
        2 * 32 + 4,
    ),
    "a slice, and all of it": (
        """%a = f32[800]{0} parameter(0)
        %s = f32[8]{0} slice(%a), slice={[0:8]}
        %n = f32[800]{0} negate(%a)
        ROOT %t = (f32[8]{0}, f32[800]{0}) tuple(%s, %n)""",
        3200 + 3200 + 32,
    ),
    "sums of rows in the cache: atomic updates count one and a half times": (
        """%a = f32[100,8]{1,0} parameter(0)
        %i = s32[8]{0} parameter(1)
        %u = f32[8,8]{1,0} parameter(2)
        ROOT %s = f32[100,8]{1,0} scatter(%a, %i, %u), update_window_dims={1}, to_apply=%add""",
        256 + 32 + 256 + 1.5 * 256 / CACHE_SPEED,
    ),
    "sums of single numbers touch a sector each": (
        """%a = f32[800]{0} parameter(0)
        %i = s32[8]{0} parameter(1)
        %u = f32[8]{0} parameter(2)
        ROOT %s = f32[800]{0} scatter(%a, %i, %u), update_window_dims={}, to_apply=%add""",
        32 + 32 + 32 + 1.5 * 8 * 32 / CACHE_SPEED,
    ),
    "sums in an array that no cache holds read and write a line each": (
        """%a = f32[9999999,4]{1,0} parameter(0)
        %i = s32[8]{0} parameter(1)
        %u = f32[8,4]{1,0} parameter(2)
        ROOT %s = f32[9999999,4]{1,0} scatter(%a, %i, %u), update_window_dims={1}, to_apply=%add""",
        128 + 32 + 8 * 64 + 1.5 * 8 * 64,
    ),
    "a pooling's gradient updates single numbers in the target's order": (
        """%a = f32[100,1000,300]{2,1,0} parameter(0)
        %i = s32[9000000,3]{1,0} parameter(1)
        %u = f32[9000000,1,1,1]{3,2,1,0} parameter(2)
        ROOT %s = f32[100,1000,300]{2,1,0} scatter(%a, %i, %u), update_window_dims={1,2,3},
            scatter_dims_to_operand_dims={0,1,2}, to_apply=%add""".replace(",\n            ", ", "),
        120e6 + 108e6 + 36e6 + 1.5 * 120e6,
    ),
    "a scatter of 16 bits swaps its numbers": (
        """%a = bf16[800]{0} parameter(0)
        %i = s32[8]{0} parameter(1)
        %u = bf16[8]{0} parameter(2)
        ROOT %s = bf16[800]{0} scatter(%a, %i, %u), update_window_dims={}, to_apply=%add""",
        16 + 32 + 16 + 38 * 8,
    ),
    "a largest number is swapped in too": (
        """%a = f32[800]{0} parameter(0)
        %i = s32[8]{0} parameter(1)
        %u = f32[8]{0} parameter(2)
        ROOT %s = f32[800]{0} scatter(%a, %i, %u), update_window_dims={}, to_apply=%largest""",
        32 + 32 + 32 + 38 * 8,
    ),
    "numbers that are gathered of a sum and of a slice": (
        """%a = f32[9999999]{0} parameter(0)
        %b = f32[9999999]{0} parameter(1)
        %c = f32[9999999]{0} add(%a, %b)
        %d = f32[9999998]{0} slice(%c), slice={[0:9999998]}
        %i = s32[8]{0} parameter(2)
        ROOT %g = f32[8]{0} gather(%d, %i), offset_dims={}, slice_sizes={1}""",
        2 * 8 * 64 / CACHE_SPEED + 32 + 32,
    ),
    "gathered rows of odd length lie in two lines now and then": (
        """%a = f32[20000000,7]{1,0} parameter(0)
        %i = s32[8]{0} parameter(1)
        ROOT %g = f32[8,7]{1,0} gather(%a, %i), offset_dims={1}, slice_sizes={1,7}""",
        8 * (64 + 28 - 4) + 32 + 224,
    ),
    "a gather of narrow rows reads a line of memory for each": (
        """%a = f32[20000000,2]{1,0} parameter(0)
        %i = s32[8]{0} parameter(1)
        ROOT %g = f32[8,2]{1,0} gather(%a, %i), offset_dims={1}, slice_sizes={1,2}""",
        8 * 64 + 32 + 64,
    ),
    "a gather of wide rows": (
        """%a = f32[20000000,16]{1,0} parameter(0)
        %i = s32[8]{0} parameter(1)
        ROOT %g = f32[8,16]{1,0} gather(%a, %i), offset_dims={1}, slice_sizes={1,16}""",
        512 + 32 + 512,
    ),
    "a gather that takes the rows of a small array often": (
        """%a = f32[4,16]{1,0} parameter(0)
        %i = s32[80]{0} parameter(1)
        ROOT %g = f32[80,16]{1,0} gather(%a, %i), offset_dims={1}, slice_sizes={1,16}""",
        5120 / CACHE_SPEED + 320 + 5120,
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_moves_what_it_touches(name: str) -> None:
    inner, expected = FUSIONS[name]
    lines = [line.strip() for line in inner.splitlines()]
    operands = [line.split(" ")[2] for line in lines if "parameter(" in line]
    result = next(line for line in lines if line.startswith("ROOT")).split(" = ")[1]
    result_type = re.match(r"(.*[)}]) [a-z]", result)
    assert result_type
    assert fusion(inner, result_type[1], *operands).num_bytes == expected


def test_scratch_memory_of_a_library_is_no_traffic() -> None:
    found = work(
        """%p = f32[8,16]{1,0} parameter(0)
        %q = f32[16,8]{1,0} parameter(1)
        ROOT %d = (f32[8,8]{1,0}, s8[100000]{0}) custom-call(%p, %q), """
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    assert found.num_bytes == 4 * (128 + 128 + 64) and found.flops == 2 * 8 * 8 * 16


def transform(operand: str, result: str, kind: str, lengths: str) -> float:
    found = work(
        f"""%p = {operand}{{2,1,0}} parameter(0)
        ROOT %t = {result}{{2,1,0}} fft(%p), fft_type={kind}, fft_length={{{lengths}}}"""
    )
    return found.num_bytes


@pytest.mark.parametrize(
    ("length", "passes"),
    [
        (64, 1),
        (96, SMOOTH),
        (59, PRIME + 59 * PRIME_SLOPE),
        (6 * 59, SMOOTH + PRIME + 59 * PRIME_SLOPE),
        (2 * 139, CONVOLVED),
    ],
)
def test_a_fourier_transform_passes_over_its_arrays(length: int, passes: float) -> None:
    array = f"c64[8,32,{length}]"
    once = PASS * 2 * 8 * 8 * 32 * length
    assert transform(array, array, "FFT", str(length)) == pytest.approx(passes * once)
    # Another dimension is another pass, and an inverse scales its result.
    two = transform(array, array, "FFT", f"32,{length}")
    assert two == pytest.approx((passes + ACROSS) * once)
    scaled = SCALED["IFFT"] * 2 * 8 * 8 * 32 * length
    inverse = transform(array, array, "IFFT", str(length))
    assert inverse == pytest.approx(passes * once + scaled)


@pytest.mark.parametrize(("length", "passes"), [(64, 1), (96, HALF), (75, 2 + SMOOTH)])
def test_real_numbers_are_packed_and_copied(length: int, passes: float) -> None:
    real, pairs = f"f32[8,32,{length}]", f"c64[8,32,{length // 2 + 1}]"
    real_bytes, pair_bytes = 4 * 8 * 32 * length, 8 * 8 * 32 * (length // 2 + 1)
    once = PASS * (real_bytes + pair_bytes)
    assert transform(real, pairs, "RFFT", str(length)) == pytest.approx(passes * once)
    back = transform(pairs, real, "IRFFT", str(length))
    expected = passes * once + 2 * pair_bytes + SCALED["IRFFT"] * 2 * real_bytes
    assert back == pytest.approx(expected)


def test_a_long_chain_is_read_once() -> None:
    """Random bits are made by chains of thousands of operations."""
    array = "f32[8]{0}"
    lines = [f"%a0 = {array} parameter(0)"]
    lines += [f"%a{n} = {array} negate(%a{n - 1})" for n in range(1, 3000)]
    lines.append(f"ROOT %r = {array} negate(%a2999)")
    assert fusion("\n".join(lines), array, array).num_bytes == 2 * 32


def scatter(rows: int, updates: int, dtype: str = "bf16", ending: str = "") -> Work:
    return work(
        f"""%a = {dtype}[{rows},64]{{1,0}} parameter(0)
        %i = s32[{updates}]{{0}} parameter(1)
        %u = {dtype}[{updates},64]{{1,0}} parameter(2)
        ROOT %s = {dtype}[{rows},64]{{1,0}} scatter(%a, %i, %u), update_window_dims={{1}}, """
        f"to_apply=%add{ending}"
    )


def test_updates_of_a_row_wait_for_each_other_where_numbers_are_swapped() -> None:
    assert scatter(32, 8192).waits_s == pytest.approx(255 * SWAP_S)
    assert scatter(8192, 8192).waits_s == scatter(32, 8192, "f32").waits_s == 0
    assert scatter(32, 8192, ending=", unique_indices=true").waits_s == 0
    assert seconds(scatter(32, 8192), 0.0, DEVICE) > 255 * SWAP_S
    inner = """%a = bf16[32,64]{1,0} parameter(0)
        %i = s32[8192]{0} parameter(1)
        %u = bf16[8192,64]{1,0} parameter(2)
        ROOT %s = bf16[32,64]{1,0} scatter(%a, %i, %u), update_window_dims={1}, to_apply=%add"""
    arrays = "bf16[32,64]{1,0}", "bf16[32,64]{1,0}", "s32[8192]{0}", "bf16[8192,64]{1,0}"
    assert fusion(inner, *arrays).waits_s == scatter(32, 8192).waits_s

"""The kernels of made-up programs: products in tiles and arithmetic of lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.measure.judge_kernels import (
    EXTRA_DEPTH,
    GROUPED,
    HELD_LOAD,
    IN_LANES,
    LAUNCH_S,
    LEAST_EXTRA,
    LIBRARY_32BIT,
    MEMORY,
    PRODUCT_S,
    ROWS_S,
    SCRATCH,
    SCRATCH_KERNELS,
    SINGLE_LOADS,
    SMOOTH,
    TRITON_32BIT,
    UNALIGNED,
    UNALIGNED_DEPTH,
    VECTOR,
    VECTOR_SHARE,
    seconds,
)
from autopar.measure.judge_lanes import ACCESS, COMPARISON, LOAD_IN_BRANCH, WHOLE_NUMBERS
from autopar.measure.judge_tiles import (
    CONVOLUTION_DEPTH,
    FILTER_GRADIENT,
    MULTIPROCESSORS,
    PRODUCTS,
    SPLITS,
    STRIDED_INPUT,
    WIDE_TILES,
    WIDE_VOLUME,
    WITH_HOLES,
    tiled_s,
)
from autopar.measure.judge_traffic import CACHE_SPEED, Work
from tests.unit.measure.made_up_kernels import DEVICE, fusion, work

# Products


def product(left: str, right: str, result: str, *, library: bool = False) -> Work:
    call = "dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    if library:
        dimensions = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
        config = f'{{"gemm_backend_config":{{"dot_dimension_numbers":{dimensions}}}}}'
        target = 'custom_call_target="__cublas$lt$matmul"'
        call = f"custom-call(%p, %q), {target}, backend_config={config}"
    return work(
        f"""%p = {left} parameter(0)
        %q = {right} parameter(1)
        ROOT %d = {result} {call}"""
    )


def test_full_waves_run_at_the_rate_of_products() -> None:
    rows = 128 * MULTIPROCESSORS
    found = product(f"bf16[{rows},4096]{{1,0}}", "bf16[4096,256]{1,0}", f"bf16[{rows},256]{{1,0}}")
    assert found.flops == 2 * rows * 4096 * 256
    expected = found.flops / (PRODUCTS * DEVICE.flops_16bit)
    assert found.products_s == pytest.approx(expected * (4096 + EXTRA_DEPTH[2]) / 4096)


@pytest.mark.parametrize(("library", "share"), [(True, LIBRARY_32BIT), (False, TRITON_32BIT)])
def test_float32_products_have_their_own_rate(library: bool, share: float) -> None:
    rows = 128 * MULTIPROCESSORS
    shapes = f"f32[{rows},4096]{{1,0}}", "f32[4096,256]{1,0}", f"f32[{rows},256]{{1,0}}"
    found = product(*shapes, library=library)
    expected = found.flops / (PRODUCTS * share * DEVICE.flops_32bit)
    assert found.products_s == pytest.approx(expected * (4096 + EXTRA_DEPTH[4]) / 4096)


def test_only_a_library_splits_a_contraction() -> None:
    shapes = "bf16[128,65536]{1,0}", "bf16[65536,128]{1,0}", "bf16[128,128]{1,0}"
    library, triton = (product(*shapes, library=by).products_s for by in (True, False))
    assert triton == pytest.approx(tiled_s(1, 128, 128, 65536, 1e15, 96, splits=(1,)))
    assert library == pytest.approx(tiled_s(1, 128, 128, 65536, 1e15, 96))
    assert library < triton / 4


@pytest.mark.parametrize(("depth", "extra"), [(16, LEAST_EXTRA), (64, 64), (512, EXTRA_DEPTH[2])])
def test_a_short_contraction_has_a_short_prologue(depth: int, extra: int) -> None:
    found = product(
        f"bf16[16384,{depth}]{{1,0}}", f"bf16[{depth},256]{{1,0}}", "bf16[16384,256]{1,0}"
    )
    assert found.products_s == pytest.approx(tiled_s(1, 16384, 256, depth, 1e15, extra))


def test_a_last_wave_that_is_nearly_empty_takes_as_long_as_a_full_one() -> None:
    full = tiled_s(MULTIPROCESSORS, 128, 128, 256, 1e15, 96)
    assert tiled_s(MULTIPROCESSORS + 1, 128, 128, 256, 1e15, 96) > 1.3 * full
    assert tiled_s(2 * MULTIPROCESSORS, 128, 128, 256, 1e15, 96) == pytest.approx(2 * full)


def test_a_long_contraction_is_split_among_idle_multiprocessors() -> None:
    depth = 32 * 512
    alone = 2 * 128 * 128 * depth * MULTIPROCESSORS / (PRODUCTS * 1e15)
    assert alone / MULTIPROCESSORS < tiled_s(1, 128, 128, depth, 1e15, 96) < alone / 8


@pytest.mark.parametrize(("length", "alignment"), [(1024, 16), (1026, 4), (1025, 2)])
def test_rows_that_are_not_aligned_slow_a_product(length: int, alignment: int) -> None:
    found = product(
        "bf16[16384,4096]{1,0}", f"bf16[4096,{length}]{{1,0}}", f"bf16[16384,{length}]{{1,0}}"
    )
    rate = UNALIGNED.get(alignment, 1.0) * DEVICE.flops_16bit
    assert found.products_s == pytest.approx(tiled_s(1, 16384, length, 4096, rate, 96))


def test_rows_are_those_of_the_layout() -> None:
    found = product("bf16[4096,4096]{1,0}", "bf16[4096,1025]{0,1}", "bf16[4096,1025]{0,1}")
    expected = tiled_s(1, 4096, 1025, 4096, DEVICE.flops_16bit, 96, splits=(1,))
    assert found.products_s == pytest.approx(expected)


def test_tiles_of_single_elements_move_slowly() -> None:
    inner = """%a = bf16[64,{0}]{{1,0}} parameter(0)
        ROOT %n = bf16[64,{0}]{{1,0}} negate(%a)"""

    def num_bytes(width: int) -> float:
        triton = ', backend_config={"fusion_backend_config":{"kind":"__triton"}}'
        array = f"bf16[64,{width}]{{1,0}}"
        return fusion(inner.format(width), array, array, kind="kCustom", config=triton).num_bytes

    assert num_bytes(198) == 2 * 2 * 64 * 198
    assert num_bytes(197) == SINGLE_LOADS * 2 * 2 * 64 * 197


def test_a_tile_that_sums_twice_takes_turns() -> None:
    """A softmax's gradient: its rows stay in registers between both sums."""

    def found(length: int, sums: int) -> Work:
        row, array = "f32[64]{0}", f"bf16[64,{length}]{{1,0}}"
        again = f"%s = {row} reduce(%b, %z), dimensions={{1}}, to_apply=%add" if sums > 1 else ""
        inner = f"""%a = {array} parameter(0)
            %z = f32[] constant(0)
            %r = {row} reduce(%a, %z), dimensions={{1}}, to_apply=%add
            %c = {array} broadcast(%r), dimensions={{0}}
            %b = {array} subtract(%a, %c)
            {again}
            %d = {array} broadcast({"%s" if sums > 1 else "%r"}), dimensions={{0}}
            ROOT %o = {array} multiply(%b, %d)"""
        config = ', backend_config={"fusion_backend_config":{"kind":"__triton"}}'
        return fusion(inner, array, array, kind="kCustom", config=config)

    once, twice = found(1024, 1), found(1024, 2)
    assert twice.in_turn and not once.in_turn
    alone = [replace(twice, lane_ops=0.0), replace(twice, reads={}, written=0.0)]
    both = seconds(twice, 0.0, DEVICE) - LAUNCH_S
    assert both == pytest.approx(sum(seconds(work, 0.0, DEVICE) - LAUNCH_S for work in alone))
    # Rows of an odd length are loaded and stored number by number, padded to a power of two.
    odd = found(1025, 2).lane_ops - found(1032, 2).lane_ops
    assert odd == pytest.approx(2048 / 1025 * HELD_LOAD * 2 * 64 * 1025, rel=0.02)


def convolution(
    target: str,
    left: str,
    right: str,
    result: str,
    rest: str = "",
    window: str = "size=3x3",
    scratch: int = 100,
) -> Work:
    return work(
        f"""%p = {left} parameter(0)
        %q = {right} parameter(1)
        ROOT %c = ({result}, u8[{scratch}]{{0}}) custom-call(%p, %q), window={{{window}}}, """
        f'dim_labels=b01f_o01i->b01f{rest}, custom_call_target="__cudnn$conv{target}"'
    )


IMAGES, WIDER = "bf16[16,32,32,128]{3,2,1,0}", "bf16[16,32,32,256]{3,2,1,0}"
KERNEL = "bf16[256,3,3,128]{3,2,1,0}"


def as_product(
    rows: float, columns: float, depth: float, share: float = 1.0, splits: tuple[int, ...] = (1,)
) -> object:
    rate = share * DEVICE.flops_16bit
    found = tiled_s(1, rows, columns, depth, rate, CONVOLUTION_DEPTH, WIDE_TILES, splits)
    return pytest.approx(found)


def test_a_convolution_is_the_product_it_stands_for() -> None:
    forward = convolution("Forward", IMAGES, KERNEL, WIDER)
    assert forward.flops == 2 * 16384 * 256 * 9 * 128
    assert forward.products_s == as_product(16384, 256, 9 * 128)
    backward = convolution("BackwardInput", WIDER, KERNEL, IMAGES)
    assert backward.products_s == as_product(16384, 128, 9 * 256)
    of_filter = convolution("BackwardFilter", IMAGES, WIDER, KERNEL)
    share = FILTER_GRADIENT[2]
    assert of_filter.products_s == as_product(9 * 128, 256, 16384, share=share, splits=SPLITS)
    assert forward.flops == backward.flops == of_filter.flops


def test_arrays_in_scratch_memory_are_copied_before_the_convolution() -> None:
    plain = convolution("Forward", IMAGES, KERNEL, WIDER)
    copied = convolution("Forward", IMAGES, KERNEL, WIDER, scratch=10**7)
    copies_s = SCRATCH_KERNELS * LAUNCH_S + SCRATCH * 1e7 / (MEMORY * DEVICE.memory_bandwidth)
    later_s, now_s = (seconds(found, 0.0, DEVICE) for found in (copied, plain))
    assert later_s == pytest.approx(now_s + copies_s)


def test_much_scratch_memory_holds_transforms_in_place_of_products() -> None:
    found = convolution("Forward", IMAGES, KERNEL, WIDER, scratch=10**9)
    assert found.products_s == 0.0 and found.flops > 0 and found.scratch == 1e9


def test_few_channels_cost_as_much_as_a_block_at_every_place_of_the_window() -> None:
    left, kernel = "bf16[16,32,32,3]{3,2,1,0}", "bf16[256,3,3,3]{3,2,1,0}"
    found = convolution("Forward", left, kernel, WIDER)
    assert found.flops == 2 * 16384 * 256 * 27
    assert found.lane_ops == 0 and found.products_s == as_product(16384, 256, 9 * 32)
    narrow = convolution("BackwardInput", WIDER, kernel, left)
    assert narrow.products_s == as_product(16384, 64, 9 * 256)  # no narrower tile


def test_a_strided_input_s_gradient_meets_a_part_of_the_window_at_every_position() -> None:
    larger = "bf16[16,64,64,128]{3,2,1,0}"
    found = convolution("BackwardInput", WIDER, KERNEL, larger, window="size=3x3 stride=2x2")
    assert found.products_s == as_product(4 * 16384, 128, 9 / 4 * 256, share=STRIDED_INPUT)


def test_a_stride_wider_than_the_window_leaves_positions_out() -> None:
    larger, kernel = "bf16[16,64,64,128]{3,2,1,0}", "bf16[256,1,1,128]{3,2,1,0}"
    found = convolution("BackwardInput", WIDER, kernel, larger, window="size=1x1 stride=2x2")
    assert found.products_s == as_product(16384, 128, 256, share=STRIDED_INPUT)


def test_few_tiles_of_a_convolution_leave_multiprocessors_idle() -> None:
    small, result = "bf16[1,8,8,1024]{3,2,1,0}", "bf16[1,8,8,64]{3,2,1,0}"
    kernel = "bf16[64,3,3,1024]{3,2,1,0}"
    found = convolution("Forward", small, kernel, result)
    alone = 2 * 64 * 64 * MULTIPROCESSORS * 9 * 1024 / (PRODUCTS * 0.5 * DEVICE.flops_16bit)
    assert found.products_s > alone


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_window_as_large_as_the_image_leaves_multiprocessors_idle(dtype: str) -> None:
    """The filter's gradient of a transposed convolution: a tile runs the whole contraction."""
    left, kernel = f"{dtype}[16,64,64,32]{{3,2,1,0}}", f"{dtype}[64,32,32,32]{{3,2,1,0}}"
    window = "size=32x32 pad=1_1x1_1 rhs_dilate=2x2 rhs_reversal=1x1"
    found = convolution("Forward", left, kernel, f"{dtype}[16,4,4,64]{{3,2,1,0}}", window=window)
    item = 4 if dtype == "f32" else 2
    rate = WITH_HOLES[item] * (DEVICE.flops_32bit if item == 4 else DEVICE.flops_16bit)
    tile = 2 * 128 * 128 * (32 * 32 * 32 + CONVOLUTION_DEPTH)  # each of two, side by side
    assert found.lane_ops == 0
    assert found.products_s == pytest.approx(tile * MULTIPROCESSORS / (PRODUCTS * rate))


def test_such_a_window_may_have_its_zeros_written_out() -> None:
    """As along one dimension. At a single place, it is a plain product."""

    def of(places: int) -> float:
        left = f"f32[64,{24000 + places - 1},64]{{2,1,0}}"
        found = work(
            f"""%p = {left} parameter(0)
            %q = f32[32,24000,64]{{2,1,0}} parameter(1)
            ROOT %c = (f32[64,{places},32]{{2,1,0}}, u8[0]{{0}}) custom-call(%p, %q), """
            "window={size=24000}, dim_labels=b0f_o0i->b0f, "
            'custom_call_target="__cudnn$convForward"'
        )
        return found.products_s

    tile = 2 * 128 * 128 * (24000 * 64 + CONVOLUTION_DEPTH) * MULTIPROCESSORS
    assert of(4) == pytest.approx(tile / (PRODUCTS * WITH_HOLES[4] * DEVICE.flops_32bit))
    assert of(1) < of(4) / 2


def test_such_a_window_in_three_dimensions_is_slower_and_reads_no_blocks_of_channels() -> None:
    def of(channels: int) -> float:
        found = work(
            f"""%p = f32[8,{channels},24,24,24]{{4,3,2,1,0}} parameter(0)
            %q = f32[16,{channels},22,22,22]{{4,3,2,1,0}} parameter(1)
            ROOT %c = (f32[8,16,3,3,3]{{4,3,2,1,0}}, u8[0]{{0}}) custom-call(%p, %q), """
            "window={size=22x22x22}, dim_labels=bf012_oi012->bf012, "
            'custom_call_target="__cudnn$convForward"'
        )
        return found.products_s

    tile = 2 * 128 * 128 * (22**3 * 6 + CONVOLUTION_DEPTH) * MULTIPROCESSORS
    expected = tile / (PRODUCTS * WIDE_VOLUME * DEVICE.flops_32bit)
    assert of(6) == pytest.approx(expected)
    assert of(1) < expected / 5


def test_a_small_window_with_holes_is_an_ordinary_product() -> None:
    window = "size=3x3 rhs_dilate=2x2"
    larger = "bf16[16,36,36,128]{3,2,1,0}"
    found = convolution("Forward", larger, KERNEL, WIDER, window=window)
    assert found.products_s == as_product(16384, 256, 9 * 128)


def test_a_contraction_along_such_rows_is_slower() -> None:
    found = product("bf16[4096,4098]{1,0}", "bf16[4098,1024]{1,0}", "bf16[4096,1024]{1,0}")
    rate = UNALIGNED_DEPTH[4] * DEVICE.flops_16bit
    assert found.products_s == pytest.approx(tiled_s(1, 4096, 1024, 4098, rate, 96))


def test_a_depthwise_convolution_runs_on_lanes() -> None:
    kernel = "bf16[128,3,3,1]{3,2,1,0}"
    found = convolution("Forward", IMAGES, kernel, IMAGES, ", feature_group_count=128")
    assert found.flops == 2 * 16 * 32 * 32 * 128 * 9
    assert found.products_s == 0 and found.lane_ops == found.flops / 2 / GROUPED[2]


def test_very_few_channels_run_on_lanes() -> None:
    images = "f32[64,64,64,1]{3,2,1,0}"
    found = convolution("Forward", images, "f32[1,3,3,1]{3,2,1,0}", images)
    assert found.products_s == 0
    assert found.lane_ops == pytest.approx(IN_LANES * found.flops / 2)
    assert convolution("Forward", IMAGES, "bf16[128,3,3,128]{3,2,1,0}", IMAGES).lane_ops == 0


# Arithmetic


def test_functions_take_more_than_sums() -> None:
    def of(op: str) -> float:
        inner = f"""%a = f32[1000]{{0}} parameter(0)
            ROOT %n = f32[1000]{{0}} {op}(%a)"""
        return fusion(inner, "f32[1000]{0}", "f32[1000]{0}").lane_ops

    assert of("negate") == 2000  # the load and the operation
    assert of("tanh") > of("exponential") > 3 * of("negate")


def test_a_value_is_computed_again_wherever_it_is_broadcast_to() -> None:
    inner = """%a = f32[12]{0} parameter(0)
        %e = f32[12]{0} tanh(%a)
        %b = f32[50,12]{1,0} broadcast(%e), dimensions={1}
        ROOT %n = f32[50,12]{1,0} negate(%b)"""
    once = "%a = f32[12]{0} parameter(0)\nROOT %e = f32[12]{0} tanh(%a)"
    many = fusion(inner, "f32[50,12]{1,0}", "f32[12]{0}").lane_ops
    assert many - 600 == pytest.approx(50 * fusion(once, "f32[12]{0}", "f32[12]{0}").lane_ops)


def test_users_at_one_index_share_a_value() -> None:
    inner = """%a = f32[100]{0} parameter(0)
        %e = f32[100]{0} tanh(%a)
        %n = f32[100]{0} negate(%e)
        %m = f32[100]{0} abs(%e)
        ROOT %t = f32[100]{0} add(%n, %m)"""
    alone = "%a = f32[100]{0} parameter(0)\nROOT %e = f32[100]{0} tanh(%a)"
    found = fusion(inner, "f32[100]{0}", "f32[100]{0}").lane_ops
    assert found == fusion(alone, "f32[100]{0}", "f32[100]{0}").lane_ops + 300


def test_neighbours_in_different_branches_wait_for_each_other() -> None:
    def of(padding: str, size: int) -> float:
        inner = f"""%a = bf16[100,{size}]{{1,0}} parameter(0)
            %z = bf16[] constant(0)
            %p = bf16[100,128]{{1,0}} pad(%a, %z), padding={padding}
            ROOT %n = bf16[100,128]{{1,0}} negate(%p)"""
        return fusion(inner, "bf16[100,128]{1,0}", f"bf16[100,{size}]{{1,0}}").lane_ops

    behind, between = of("0_0x0_64", 64), of("0_0_0x0_1_1", 64)
    assert between - behind >= (LOAD_IN_BRANCH - 4.0 / 2) * 100 * 128


def test_a_sum_across_rows_begins_later() -> None:
    def of(dimension: int) -> float:
        inner = f"""%a = f32[1024,1024]{{1,0}} parameter(0)
            %z = f32[] constant(0)
            ROOT %r = f32[1024]{{0}} reduce(%a, %z), dimensions={{{dimension}}}, to_apply=%add"""
        found = fusion(inner, "f32[1024]{0}", "f32[1024,1024]{1,0}", kind="kInput")
        return seconds(found, 0.0, DEVICE)

    assert of(0) - of(1) == pytest.approx(ROWS_S, rel=0.01)


def test_an_update_computes_what_it_writes() -> None:
    inner = """%a = f32[1000,64]{1,0} parameter(0)
        %u = f32[1,64]{1,0} parameter(1)
        %e = f32[1,64]{1,0} exponential(%u)
        %i = s32[] parameter(2)
        %z = s32[] constant(0)
        ROOT %d = f32[1000,64]{1,0} dynamic-update-slice(%a, %e, %i, %z)"""
    shapes = "f32[1000,64]{1,0}", "f32[1000,64]{1,0}", "f32[1,64]{1,0}", "s32[]"
    assert fusion(inner, *shapes).lane_ops < 20 * 64


def test_a_rotation_is_one_instruction() -> None:
    def lane_ops(other: str) -> float:
        array = "u32[1024]{0}"
        inner = f"""%a = {array} parameter(0)
            %b = {array} parameter(1)
            %n = {array} parameter(2)
            %l = {array} shift-left(%a, %n)
            %r = {array} shift-right-logical({other}, %n)
            ROOT %o = {array} or(%l, %r)"""
        return fusion(inner, array, array, array, array).lane_ops

    shifts = WHOLE_NUMBERS * 2 * 1024
    assert lane_ops("%b") - lane_ops("%a") == pytest.approx(shifts + 1024)  # and another load


def test_sizes_that_are_no_multiple_of_four_take_more_accesses() -> None:
    def of(size: int, kind: str = "kLoop") -> float:
        array = f"f32[{size}]{{0}}"
        inner = f"%a = {array} parameter(0)\nROOT %n = {array} negate(%a)"
        return fusion(inner, array, array, kind=kind).lane_ops

    assert of(1004) == 2 * 1004
    assert of(1001) == pytest.approx(2 * 1001 + 2 * 1001 * ACCESS)
    assert of(1002) == pytest.approx(2 * 1002 + 2 * 1002 * ACCESS / 2)
    assert of(1001, "kInput") == 2 * 1001


def test_a_sort_compares_in_a_network() -> None:
    def of(length: int) -> float:
        array = f"f32[8,{length}]{{1,0}}"
        text = f"ROOT %s = {array} sort(%p), dimensions={{1}}, to_apply=%largest"
        return work(f"%p = {array} parameter(0)\n{text}").lane_ops

    assert of(512) == pytest.approx(8 * 512 * 45 / 2 * COMPARISON)
    assert of(300) == pytest.approx(of(512))
    assert of(1) == 0


def test_exact_products_run_on_lanes() -> None:
    """Their tiles begin and end as fast as those of tensor cores: fewer elements of a depth that
    takes longer."""

    def of(precision: str) -> float:
        text = f"""%p = f32[1024,1024]{{1,0}} parameter(0)
        ROOT %d = f32[1024,1024]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}},
            rhs_contracting_dims={{0}}{precision}"""
        return work(text.replace("},\n", "}, ").replace("            rhs", "rhs")).products_s

    exact = of(", operand_precision={highest,highest}")
    rate = 2 * VECTOR * DEVICE.flops_16bit
    extra = EXTRA_DEPTH[4] * rate / DEVICE.flops_32bit
    assert exact == pytest.approx(tiled_s(1, 1024, 1024, 1024, rate, extra, splits=(1,)))
    assert 0 < extra < EXTRA_DEPTH[4] / 5 and exact > 2 * of("")


def test_other_calls_of_that_library_are_no_products() -> None:
    array = "f32[64,32,32]{2,1,0}"
    call = 'custom-call(%p, %p), custom_call_target="__cublas$triangularSolve"'
    found = work(f"%p = {array} parameter(0)\nROOT %s = {array} {call}")
    assert found.flops == 0 and found.products_s == 0


# Seconds


def test_the_slowest_kind_of_work_nearly_decides() -> None:
    second = MEMORY * DEVICE.memory_bandwidth
    lanes = VECTOR_SHARE * VECTOR * DEVICE.flops_16bit
    assert seconds(Work(), 0.0, DEVICE) == LAUNCH_S
    assert seconds(Work(written=second), 0.0, DEVICE) == pytest.approx(1 + LAUNCH_S)
    assert seconds(Work(lane_ops=lanes), 0.0, DEVICE) == pytest.approx(1 + LAUNCH_S)
    assert seconds(Work(products_s=1.0, written=0.3 * second), 0.0, DEVICE) < 1.01
    both = seconds(Work(products_s=1.0, written=second), 0.0, DEVICE)
    assert both == pytest.approx(2 ** (1 / SMOOTH) + LAUNCH_S + PRODUCT_S)


def test_cached_traffic_is_faster() -> None:
    second = MEMORY * DEVICE.memory_bandwidth
    found = seconds(Work(written=second), second / 2, DEVICE)
    assert found == pytest.approx(0.5 + 0.5 / CACHE_SPEED + LAUNCH_S)

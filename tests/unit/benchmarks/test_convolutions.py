"""Flops of cuDNN's convolutions, read from lines such as XLA writes."""

from __future__ import annotations

import pytest

from benchmarks.convolutions import read_convolution_flops

# 24 images of 8 × 8 with 16 channels, a 3 × 3 filter to 32, stride 2.
SHAPES = {"x": "24,8,8,16", "w": "32,3,3,16", "y": "24,4,4,32"}
FLOPS = 2 * 24 * 4 * 4 * 32 * 3 * 3 * 16


@pytest.mark.parametrize(
    ("kind", "operands", "result"),
    [("Forward", "xw", "y"), ("BackwardInput", "yw", "x"), ("BackwardFilter", "xy", "w")],
)
def test_all_three_convolutions_cost_the_same(kind: str, operands: str, result: str) -> None:
    lines = [f"  %{name} = bf16[{SHAPES[name]}]{{3,2,1,0}} parameter(0)" for name in operands]
    first, second = operands
    lines.append(
        f"  %conv.1 = (bf16[{SHAPES[result]}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%{first}, "
        f"%{second}), window={{size=3x3 stride=2x2}}, dim_labels=b01f_o01i->b01f, "
        f'custom_call_target="__cudnn$conv{kind}"'
    )
    assert read_convolution_flops("\n".join(lines)) == FLOPS

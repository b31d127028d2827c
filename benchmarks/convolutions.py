"""Flops of the convolutions of an HLO module that XLA compiled for GPUs.

There a convolution is a call of cuDNN. Its labels (`b01f_o01i->b01f`) are those of the forward
convolution whose output, or whose gradient of one operand, it computes; all three multiply every
element of the output by as many elements of the filter as belong to one output channel.
"""

from __future__ import annotations

import math
import re

_SHAPE = r"\(?[a-z]\w*\[([\d,]*)\]"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*{_SHAPE}")
_CALL = re.compile(r"custom-call\((.*?)\).*dim_labels=\w+_(\w+)->\w+.*__cudnn\$conv(\w+)")
_NAME = re.compile(r"%([\w.\-]+)")


def read_convolution_flops(hlo_text: str) -> float:
    """Flops on one device; convolutions in loops count once."""
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0.0
    for line in hlo_text.splitlines():
        own = _INSTRUCTION.match(line)
        if own is None:
            continue
        result = tuple(int(size) for size in own[2].split(",") if size)
        shapes[own[1]] = result  # of a tuple, that of its first part
        call = _CALL.search(line)
        if call is None:
            continue
        first, second = (shapes[name] for name in _NAME.findall(call[1])[:2])
        if call[3].startswith("BackwardFilter"):
            output, kernel = second, result
        elif call[3].startswith("BackwardInput"):
            output, kernel = first, second
        else:
            output, kernel = result, second
        total += 2.0 * math.prod(output) * math.prod(kernel) / kernel[call[2].index("o")]
    return total

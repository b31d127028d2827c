"""Splitting windowed dimensions: from the rule of a convolution or pooling to one with halos.

Shardy marks windowed dimensions as permutation factors: a device needs rows of its neighbours.
XLA's partitioner sends them, so such a factor need not be fixed; a `Halo` says what it costs. Row r
of the result reads the operand from row r · stride − low on. So the shards of operand and result
line up if the (dilated) operand is exactly stride times as long as the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax.core import ShapedArray

from autopar.ir.graph import Halo, Rule
from autopar.ir.program import Equation

_NO_FACTOR = -1
_POOLS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")


@dataclass(frozen=True)
class Window:
    """How a window reads one dimension: `dim` of the first operand, `result_dim` of the result."""

    dim: int
    result_dim: int
    length: int
    result_length: int
    size: int
    stride: int
    low: int
    dilation: int  # of the operand
    window_dilation: int

    @property
    def is_aligned(self) -> bool:
        return self.length * self.dilation == self.result_length * self.stride

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows of the operand a shard needs from before and after it."""
        reach = (self.size - 1) * self.window_dilation
        return self._rows(self.low, reach - self.low - (self.stride - 1))

    @property
    def is_product(self) -> bool:
        """A single window, of which every row meets one row of the operand: nothing is padded."""
        is_whole = self.result_length == 1 and self.length == self.size and self.low == 0
        return is_whole and self.dilation == self.window_dilation == 1

    @property
    def is_kernel_gradient(self) -> bool:
        """In the gradient of a kernel the window is as long as the operand and split with it; the
        result has a row for each position in the kernel, summed over shards."""
        return self.dilation == 1 and self.length == self.size * self.window_dilation

    @property
    def rows_of_sum(self) -> tuple[int, int]:
        """The same, where the rows are summed over."""
        return self._rows(*self._reach_of_sum)

    @property
    def padding_of_shard(self) -> tuple[int, int]:
        """The padding, below zero or none, of a shard that is summed over and has these rows."""
        before, after = self._reach_of_sum
        return min(before, 0), min(after, 0)

    @property
    def _reach_of_sum(self) -> tuple[int, int]:
        reach = (self.result_length - 1) * self.stride
        return self.low, reach - self.low - (self.window_dilation - 1)

    def _rows(self, before: int, after: int) -> tuple[int, int]:
        return max(-(-before // self.dilation), 0), max(-(-after // self.dilation), 0)


def with_halos(
    equation: Equation, rule: Rule, operands: Sequence[ShapedArray], result: ShapedArray
) -> Rule:
    """The rule with the windowed factors that XLA can split no longer fixed, and their halos."""
    fixed = set(rule.fixed)
    halos: list[Halo] = []
    only_with: list[tuple[int, frozenset[int]]] = []
    # XLA computes some splits wrongly (JAX 0.10.2 and 0.12): a convolution split along a window
    # and, over other devices, along the channels of its kernel; the gradient of a kernel split
    # along a window where devices hold the same part of it or parts of channels, which it then sums
    # as well; and so that of a kernel in groups, whatever is split, where devices hold the same
    # part. It dies where the channels of one group are split there.
    all_factors = frozenset(range(len(rule.sizes)))
    if equation.params.get("batch_group_count", 1) > 1:
        only_with += [(factor, all_factors) for factor in sorted(rule.reduction)]
        all_dims = (dim for dims in (*rule.operands, *rule.results) for dim in dims)
        fixed.update(factor for factors in all_dims for factor in factors[1:])
    beside_window = all_factors - (_kernel_factors(rule) - rule.reduction) | {_NO_FACTOR}
    for window in windows(equation, operands, result):
        read, written = rule.operands[0][window.dim], rule.results[0][window.result_dim]
        if read and written and read[0] == written[0] and read[0] in fixed:
            if window.is_aligned:
                fixed.remove(read[0])
                fixed.update(read[1:])
                halos.append(Halo(0, window.dim, window.rows))
                only_with.append((read[0], beside_window))
        elif read and read[0] in rule.reduction and not window.is_product:
            if window.is_kernel_gradient:
                halos.append(Halo(0, window.dim, window.rows_of_sum))
                only_with.append((read[0], rule.reduction))
            else:
                fixed.add(read[0])
    return replace(rule, fixed=frozenset(fixed), halos=tuple(halos), only_with=tuple(only_with))


def _kernel_factors(rule: Rule) -> frozenset[int]:
    """The factors of the kernel, if there is one."""
    return frozenset(f for dims in rule.operands[1:] for factors in dims for f in factors)


def windows(
    equation: Equation, operands: Sequence[ShapedArray], result: ShapedArray
) -> Iterator[Window]:
    params = equation.params
    if equation.name == "conv_general_dilated":
        dims = params["dimension_numbers"]
        for number, (dim, kernel_dim, result_dim) in enumerate(
            zip(dims.lhs_spec[2:], dims.rhs_spec[2:], dims.out_spec[2:], strict=True)
        ):
            yield Window(
                dim=dim,
                result_dim=result_dim,
                length=operands[0].shape[dim],
                result_length=result.shape[result_dim],
                size=operands[1].shape[kernel_dim],
                stride=params["window_strides"][number],
                low=params["padding"][number][0],
                dilation=params["lhs_dilation"][number],
                window_dilation=params["rhs_dilation"][number],
            )
    elif equation.name in _POOLS:
        for dim, size in enumerate(params["window_dimensions"]):
            if size > 1 or params["window_strides"][dim] > 1:
                yield Window(
                    dim=dim,
                    result_dim=dim,
                    length=operands[0].shape[dim],
                    result_length=result.shape[dim],
                    size=size,
                    stride=params["window_strides"][dim],
                    low=params["padding"][dim][0],
                    dilation=params["base_dilation"][dim],
                    window_dilation=params["window_dilation"][dim],
                )


def has_windows(equation: Equation) -> bool:
    return equation.name == "conv_general_dilated" or equation.name in _POOLS

"""Windows that may be split: from the rule of a convolution or pooling to one with halos.

Shardy marks the windowed dimensions as permutation factors: a device needs rows of its neighbours.
XLA's partitioner sends them, so such a factor need not be fixed; it has a price, which a `Halo`
tells. A result's row r reads the rows from r · stride − low on, so the parts of operand and result
lie beside each other if the (dilated) operand is exactly stride times as long as the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.graph import Halo, Rule
from autopar.ir.program import Equation

_NO_FACTOR = -1
_POOLS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")


@dataclass(frozen=True)
class _Window:
    """How one dimension is read. dim: of the first operand; result_dim: of the result."""

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
        """Rows of the operand that a part needs before and after its own."""
        reach = (self.size - 1) * self.window_dilation
        return self._rows(self.low, reach - self.low - (self.stride - 1))

    @property
    def is_summed_in_parts(self) -> bool:
        """In the gradient of a kernel the window is as long as the operand, and it is the window
        that is split with it; the result has a row for each place of the kernel."""
        return self.dilation == 1 and self.length == self.size * self.window_dilation

    @property
    def rows_of_sum(self) -> tuple[int, int]:
        reach = (self.result_length - 1) * self.stride
        return self._rows(self.low, reach - self.low - (self.window_dilation - 1))

    def _rows(self, before: int, after: int) -> tuple[int, int]:
        return max(-(-before // self.dilation), 0), max(-(-after // self.dilation), 0)


def with_halos(equation: Equation, rule: Rule, operands: Sequence[Any], result: Any) -> Rule:
    """The rule with the windowed factors free that XLA can split, and their halos."""
    fixed = set(rule.fixed)
    halos: list[Halo] = []
    only_with: list[tuple[int, frozenset[int]]] = []
    # Split along a window and, by more devices, along the kernel's own channels, a convolution is
    # computed wrongly; so is the gradient of a kernel where devices hold the same part of it, or
    # parts of channels: they are summed too (JAX 0.10.2 and 0.12).
    beside_window = _factors(rule) - (_own_factors(rule) - rule.reduction) | {_NO_FACTOR}
    for window in _windows(equation, operands, result):
        own, made = rule.operands[0][window.dim], rule.results[0][window.result_dim]
        if own and made and own[0] == made[0] and own[0] in fixed:
            if window.is_aligned:
                fixed.remove(own[0])
                fixed.update(own[1:])
                halos.append(Halo(0, window.dim, window.rows))
                only_with.append((own[0], beside_window))
        elif own and own[0] in rule.reduction and window.result_length > 1:
            if window.is_summed_in_parts:
                halos.append(Halo(0, window.dim, window.rows_of_sum))
                only_with.append((own[0], rule.reduction))
            else:
                fixed.add(own[0])
    return replace(rule, fixed=frozenset(fixed), halos=tuple(halos), only_with=tuple(only_with))


def _factors(rule: Rule) -> frozenset[int]:
    return frozenset(range(len(rule.sizes)))


def _own_factors(rule: Rule) -> frozenset[int]:
    """Factors of the kernel, if there is one."""
    return frozenset(f for dims in rule.operands[1:] for factors in dims for f in factors)


def _windows(equation: Equation, operands: Sequence[Any], result: Any) -> Iterator[_Window]:
    params = equation.params
    if equation.name == "conv_general_dilated":
        dims = params["dimension_numbers"]
        for number, (dim, kernel_dim, result_dim) in enumerate(
            zip(dims.lhs_spec[2:], dims.rhs_spec[2:], dims.out_spec[2:], strict=True)
        ):
            yield _Window(
                dim,
                result_dim,
                operands[0].shape[dim],
                result.shape[result_dim],
                operands[1].shape[kernel_dim],
                params["window_strides"][number],
                params["padding"][number][0],
                params["lhs_dilation"][number],
                params["rhs_dilation"][number],
            )
    elif equation.name in _POOLS:
        for dim, size in enumerate(params["window_dimensions"]):
            if size > 1 or params["window_strides"][dim] > 1:
                yield _Window(
                    dim,
                    dim,
                    operands[0].shape[dim],
                    result.shape[dim],
                    size,
                    params["window_strides"][dim],
                    params["padding"][dim][0],
                    params["base_dilation"][dim],
                    params["window_dilation"][dim],
                )


def has_windows(equation: Equation) -> bool:
    return equation.name == "conv_general_dilated" or equation.name in _POOLS

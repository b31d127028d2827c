"""The work of a sample on every device: from a profile's sample to a repeatable `Workload`.

A step maps its *carry* to the next and reads *constants*. A loop inside one program repeats it, so
each step must depend on the previous one, or XLA would compute it once. If the result has another
shape than the operand, the carry has both, *tied* before each step: on GPUs by an optimization
barrier, which is free; on CPUs, where XLA drops barriers too early, by writing one number of the
result into the operand in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # comes with JAX
import numpy as np
from jax import lax

from autopar.ir.profile import AttentionTime, ConvolutionTime, ProductTime, StreamTime

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Operand:
    """An array on every device, of integers below `limit` or, if None, of floats in −½ … ½."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    limit: int | None = None
    zeros: bool = False

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np_dtype(self.dtype).itemsize

    def values(self) -> np.ndarray:
        """Random numbers: on zeros, devices use less power and clock higher."""
        if self.zeros:
            return np.zeros(self.shape, np_dtype(self.dtype))
        if self.limit is not None:
            numbers = np.random.default_rng(1).integers(0, self.limit, self.shape)
            return numbers.astype(np_dtype(self.dtype))
        return _random(self.dtype, prod(self.shape)).reshape(self.shape)


@dataclass(frozen=True)
class Workload:
    """`flops`, `num_bytes`: of one step on one device. `is_tied`: the first of the carry must be
    tied to the second before each step. `kind`: of workloads whose estimates are off by about the
    same factor. `is_fusible`: XLA would fuse several steps of a trip."""

    kind: str
    step: Callable[[Arrays, Arrays], Arrays]
    carry: tuple[Operand, ...]
    constants: tuple[Operand, ...] = ()
    flops: float = 0.0
    num_bytes: float = 0.0
    is_tied: bool = False
    is_fusible: bool = False


def np_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


_numbers: dict[str, np.ndarray] = {}


def _random(dtype: str, count: int) -> np.ndarray:
    """`count` numbers, a million of them distinct; the longest array is cached."""
    if dtype not in _numbers:
        numbers = np.random.default_rng(0).random(2**20 - 3, np.float32) - 0.5
        _numbers[dtype] = numbers.astype(np_dtype(dtype))
    if _numbers[dtype].size < count:
        _numbers[dtype] = np.resize(_numbers[dtype], count)
    return _numbers[dtype][:count]


def tie(operand: jax.Array, result: jax.Array, platform: str) -> jax.Array:
    """The operand, such that it is there only when the result is. A barrier does that on GPUs at no
    cost; XLA for CPUs drops barriers, so there a number of the result is written into the operand.
    That number reads nothing of the operand, or XLA would write all of it: the first profile of an
    H200 was wrong by that."""
    if platform != "cpu":
        return lax.optimization_barrier((operand, first_of(result)))[0]
    value = 0.1 + 0.01 * first_of(result).astype(jnp.float32)
    value = value.astype(operand.dtype).reshape((1,) * operand.ndim)
    return lax.dynamic_update_slice(operand, value, (0,) * operand.ndim)


def first_of(array: jax.Array) -> jax.Array:
    return lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())


def product(sample: ProductTime) -> Workload:
    """Results of fp8 products are bfloat16, as in training."""
    batch = () if sample.batch == 1 else (sample.batch,)
    out = "bfloat16" if sample.dtype.startswith("float8") else sample.dtype
    left = Operand((*batch, sample.m, sample.k), sample.dtype)
    right = Operand((*batch, sample.k, sample.n), sample.dtype)
    result = Operand((*batch, sample.m, sample.n), out, zeros=True)
    axes = tuple(range(len(batch)))
    numbers = (((1 + len(batch),), (len(batch),)), (axes, axes))

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        x = carry[0]
        return x, lax.dot_general(x, constants[0], numbers, preferred_element_type=np_dtype(out))

    moved = left.num_bytes + right.num_bytes + result.num_bytes
    kind = f"product {sample.dtype}"
    return Workload(kind, step, (left, result), (right,), sample.flops, moved, is_tied=True)


def convolution(sample: ConvolutionTime) -> Workload:
    out_size = -(-sample.size // sample.stride)
    images = Operand((sample.images, sample.size, sample.size, sample.in_channels), sample.dtype)
    kernel = Operand(
        (sample.window, sample.window, sample.in_channels, sample.out_channels), sample.dtype
    )
    result = Operand((sample.images, out_size, out_size, sample.out_channels), sample.dtype)

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (sample.stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def of_images(carry: Arrays, constants: Arrays) -> Arrays:
        return carry[0], forward(carry[0], constants[0])

    def to_images(carry: Arrays, constants: Arrays) -> Arrays:
        dy = carry[0]
        like = jax.ShapeDtypeStruct(images.shape, np_dtype(sample.dtype))
        (dx,) = jax.linear_transpose(lambda x: forward(x, constants[0]), like)(dy)
        return dy, dx

    def to_kernel(carry: Arrays, constants: Arrays) -> Arrays:
        dy = carry[0]
        like = jax.ShapeDtypeStruct(kernel.shape, np_dtype(sample.dtype))
        (dw,) = jax.linear_transpose(lambda w: forward(constants[0], w), like)(dy)
        return dy, dw

    step, carry, constant = {
        "forward": (of_images, (images, result), kernel),
        "input-gradient": (to_images, (result, images), kernel),
        "kernel-gradient": (to_kernel, (result, kernel), images),
    }[sample.kind]
    moved = images.num_bytes + kernel.num_bytes + result.num_bytes
    return Workload(sample.kind, step, carry, (constant,), sample.flops, moved, is_tied=True)


ROW = 1024  # numbers per row of reductions, gathers and scatters


def stream(sample: StreamTime) -> Workload:
    """`sample.num_bytes` is the wanted size; the workload has the actual one."""
    wanted, dtype = sample.num_bytes / np_dtype(sample.dtype).itemsize, sample.dtype
    return _STREAMS[sample.kind](wanted, dtype)


def _copy(wanted: float, dtype: str) -> Workload:
    x = Operand((_at_least_one(wanted / 2),), dtype)
    return Workload("copy", lambda carry, _: (-carry[0],), (x,), num_bytes=2 * x.num_bytes)


def _elementwise(wanted: float, dtype: str) -> Workload:
    x = Operand((_at_least_one(wanted / 4),), dtype)

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        return (carry[0] * constants[0] + constants[1],)

    return Workload("elementwise", step, (x,), (x, x), num_bytes=4 * x.num_bytes)


def _reduced(dimension: int) -> Callable[[float, str], Workload]:
    def work(wanted: float, dtype: str) -> Workload:
        rows = _at_least_one(wanted / ROW)
        x = Operand((rows, ROW), dtype)
        y = Operand((rows if dimension == 1 else ROW,), dtype, zeros=True)

        def step(carry: Arrays, _: Arrays) -> Arrays:
            return carry[0], carry[0].sum(dimension)

        moved = x.num_bytes + y.num_bytes
        return Workload(f"reduce {dimension}", step, (x, y), num_bytes=moved, is_tied=True)

    return work


def _transpose(wanted: float, dtype: str) -> Workload:
    """A matrix plus its transpose, since XLA could make a transposition alone free by its layout.
    The tying number is carried separately, so nothing is copied."""
    side = max(8, int((wanted / 3) ** 0.5))
    x = Operand((side, side), dtype)

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        (x,) = constants
        y = x.T + x * (0.5 * carry[1]).astype(x.dtype)
        return y, first_of(y)

    empty = Operand((side, side), dtype, zeros=True)
    carry = (empty, Operand((), dtype))
    return Workload("transpose", step, carry, (x,), num_bytes=3 * x.num_bytes)


def _gather(wanted: float, dtype: str) -> Workload:
    rows = _at_least_one(wanted / 2 / ROW)
    table = Operand((2 * rows, ROW), dtype)
    numbers = Operand((rows,), "int32", limit=2 * rows)
    result = Operand((rows, ROW), dtype, zeros=True)

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        return carry[0], constants[0][carry[0]]

    moved = 2 * result.num_bytes + numbers.num_bytes
    return Workload(
        "gather",
        step,
        (numbers, result),
        (table,),
        num_bytes=moved,
        is_tied=True,
        is_fusible=True,
    )


def _scatter(wanted: float, dtype: str) -> Workload:
    """Rows added to a table in place: rows are read, the table read and written."""
    rows = _at_least_one(wanted / 3 / ROW)
    table = Operand((2 * rows, ROW), dtype)
    numbers = Operand((rows,), "int32", limit=2 * rows)
    added = Operand((rows, ROW), dtype)

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        chosen, rows = constants
        return (carry[0].at[chosen].add(rows),)

    moved = 3 * added.num_bytes + numbers.num_bytes
    return Workload("scatter", step, (table,), (numbers, added), num_bytes=moved)


_STREAMS: dict[str, Callable[[float, str], Workload]] = {
    "copy": _copy,
    "elementwise": _elementwise,
    "reduce-last": _reduced(1),
    "reduce-first": _reduced(0),
    "transpose": _transpose,
    "gather": _gather,
    "scatter": _scatter,
}


def attention(sample: AttentionTime, *, backward: bool) -> Workload:
    """With `backward`, the forward pass and the gradients of all three operands."""
    x = Operand((sample.batch, sample.length, sample.heads, sample.head_dim), sample.dtype)
    kind: Any = sample.implementation

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=sample.causal, implementation=kind)

    def step(carry: Arrays, constants: Arrays) -> Arrays:
        q = carry[0]
        if not backward:
            return q, forward(q, *constants)
        out, pull = jax.vjp(forward, q, *constants)
        return q, *pull(out)

    flops = 4.0 * prod(x.shape) * sample.length * (0.5 if sample.causal else 1.0)
    results = (x, x, x) if backward else (x,)
    return Workload(
        f"attention {sample.implementation}",
        step,
        (x, *results),
        (x, x),
        flops * (3.5 if backward else 1.0),
        (12 if backward else 4) * x.num_bytes,
        is_tied=True,
    )


def _at_least_one(numbers: float) -> int:
    return max(1, round(numbers))

"""Single operations, which the judge's constants may be chosen by: names → steps of some of them.

Sizes are drawn at random, odd ones among them, and are no model's. The operations of a step do not
read one another, so each is a kernel or a few of its own, and one profile times them all. A loop is
a step of its own. The step returns the arrays that it is given as its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.judge_h200.cases import Case
from benchmarks.judge_h200.rarer_operations import RARER
from benchmarks.judge_h200.sampling import (
    NUM,
    Index,
    Operation,
    bf16,
    c64,
    f32,
    made,
    of,
    some,
    some_type,
)
from tests.zoo.program import ZooStep

ELEMENTS = 3e7  # of an operation's largest array
_TINY = 1e-3


def _ffts(kind: str, rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """`kind`: of real numbers, back to real numbers, or complex. In every third two dimensions."""
    for place in range(NUM):
        rank = 1 + (place % 3 == 2)
        length = some(rng, 32, 4096 if rank == 1 else 512)
        if place % 2:
            length = 2 ** round(np.log2(length))
        rows = max(1, int(size * 2 ** rng.uniform(-3, 0) / length**rank))
        half, whole = (length,) * (rank - 1) + (length // 2 + 1,), (length,) * rank
        axes = tuple(range(-rank, 0))
        if kind == "real":
            yield partial(jnp.fft.rfftn, axes=axes), (of(rows, *whole),)
        elif kind == "inverse":
            yield partial(jnp.fft.irfftn, s=whole, axes=axes), (of(rows, *half, dtype=c64),)
        else:
            form = (jnp.fft.fftn, jnp.fft.ifftn)[place // 2 % 2]
            yield partial(form, axes=axes), (of(rows, *whole, dtype=c64),)


def _sums_by_index(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(2 * NUM):
        width, dtype = some(rng, 1, 2048), (f32, f32, bf16)[place % 3]
        rows = max(1, int(size * 2 ** rng.uniform(-3, 0) / width))
        targets = max(1, int(rows / rng.choice([0.5, 2, 8, 32])))
        combine = (jax.ops.segment_sum, jax.ops.segment_max)[place % 4 == 3]
        yield (
            lambda x, i, combine=combine, targets=targets: combine(x, i, targets),
            (of(rows, width, dtype=dtype), Index(rows, targets)),
        )


def _rows_by_index(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        width, dtype = some(rng, 1, 512), (f32, bf16)[place % 2]
        rows = max(1, int(size / width))
        held = max(1, rows // int(rng.choice([1, 4, 16])))
        yield lambda x, i: x[i], (of(held, width, dtype=dtype), Index(rows, held))


def _thin_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        dtype, k, n = (f32, bf16)[place % 2], some(rng, 16, 512, 8), some(rng, 16, 512, 8)
        m = max(8, int(size / max(k, n)) // 8 * 8)
        act = (jax.nn.relu, jnp.tanh, lambda x: x)[place % 3]
        yield lambda x, w, act=act: act(x @ w), (of(m, k, dtype=dtype), of(k, n, dtype=dtype))


def _deep_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """Contractions over the longest dimension, as in gradients of weights."""
    for place in range(NUM):
        dtype, m, n = (f32, bf16)[place % 2], some(rng, 16, 512, 8), some(rng, 16, 512, 8)
        k = max(8, int(size / max(m, n)) // 8 * 8)
        yield lambda x, y: x.T @ y, (of(k, m, dtype=dtype), of(k, n, dtype=dtype))


def _batched_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        dtype = (bf16, f32)[place % 2]
        m, n, k = (some(rng, 16, 512, 8) for _ in range(3))
        batch = max(1, int(size / max(m * k, k * n, m * n)))
        yield (
            lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y),
            (of(batch, m, k, dtype=dtype), of(batch, k, n, dtype=dtype)),
        )


def _rows(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    def norm(x: Any) -> Any:
        x = x.astype(f32)
        centred = x - x.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(bf16)

    forms = (jax.nn.softmax, norm, lambda x: jax.nn.logsumexp(x, -1), lambda x: jnp.argmax(x, -1))
    for place in range(NUM):
        length = some(rng, 16, 50000)
        rows = max(1, int(size / length))
        yield forms[place % 4], (of(rows, length, dtype=some_type(rng)),)


def _softmax_gradients(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    def of_results(p: Any, g: Any) -> Any:
        wide, g = p.astype(f32), g.astype(f32)
        return (wide * (g - (wide * g).sum(-1, keepdims=True))).astype(p.dtype)

    def whole(x: Any, g: Any) -> Any:
        return jax.vjp(lambda x: jax.nn.softmax(x.astype(f32), -1), x)[1](g.astype(f32))[0]

    def masked(x: Any, g: Any) -> Any:
        seen = jnp.arange(x.shape[-1])[None, :] <= jnp.arange(x.shape[-2])[:, None]
        return whole(jnp.where(seen, x, -1e9), g)

    for place in range(2 * NUM):
        length = some(rng, 64, 32768, 8)
        rows = max(1, int(size * 2 ** rng.uniform(-2, 0) / length))
        given = of(rows, length, dtype=some_type(rng))
        yield (of_results, whole, masked)[place % 3], (given, given)


def _columns(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        width, inner = some(rng, 8, 4096), (1, some(rng, 4, 64))[place % 2]
        rows = max(1, int(size / width / inner))
        yield (
            lambda x: x.astype(f32).sum(1),
            (of(inner, rows, width, dtype=some_type(rng)),),
        )


def _transposes(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    orders = ((1, 0, 2), (0, 2, 1), (2, 1, 0))
    for place in range(NUM):
        a, b = some(rng, 4, 1024), some(rng, 4, 1024)
        c = max(1, int(size / a / b))
        order = orders[place % 3]
        yield (
            lambda x, order=order: jnp.transpose(x, order) + 1,
            (of(a, b, c, dtype=some_type(rng)),),
        )


def _elementwise(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    forms = (
        jnp.tanh, jax.nn.gelu, jnp.sin, jnp.exp, lambda x: x / (1 + x * x), jax.nn.sigmoid,
        lambda x: jnp.abs(x) ** 2.5, lambda x: jnp.log1p(jnp.abs(x)), jax.lax.erf,
        lambda x: jnp.sqrt(jnp.abs(x)), lambda x: jnp.cos(jnp.sin(x)), jax.nn.softplus,
    )  # fmt: skip
    for place in range(NUM):
        yield forms[place], (of(int(size * rng.uniform(0.5, 1.5)), dtype=some_type(rng)),)


def _convolved(x: Any, w: Any, *, stride: int, transposed: bool) -> Any:
    rank = x.ndim - 2
    letters = "DHW"[-rank:]
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1,) * rank if transposed else (stride,) * rank,
        [(1, 1 + transposed)] * rank,
        lhs_dilation=(stride,) * rank if transposed else None,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )


def _convolutions(rank: int, rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM // 2):
        dtype, into, out = (f32, bf16)[place % 2], some(rng, 4, 256), some(rng, 8, 256, 8)
        side = some(rng, 8, 64 if rank == 2 else 24)
        images = max(1, int(size / 4 / side**rank / max(into, out)))
        stride, transposed = (1, 2)[place % 3 == 1], place % 3 == 2
        form = partial(_convolved, stride=2 if transposed else stride, transposed=transposed)
        shapes = (
            of(images, *(side,) * rank, into, dtype=dtype),
            of(*(3,) * rank, into, out, dtype=dtype),
        )
        gradient = jax.grad(lambda x, w, form=form: (form(x, w).astype(f32) ** 2).sum(), (0, 1))
        yield gradient, shapes


def _transposed(
    dtype: Any, rank: int, rng: np.random.Generator, size: float
) -> Iterator[Operation]:
    """Gradients of transposed convolutions with strides, padded as frameworks do it."""
    for _ in range(NUM // 2):
        into, out = some(rng, 8, 512), some(rng, 8, 512, 8)
        side = some(rng, 8, 64 if rank == 2 else 16)
        window = int(rng.integers(2, 6))
        images = max(1, int(size / 8 / side**rank / max(into, 2**rank * out)))
        shapes = (
            of(images, *(side,) * rank, into, dtype=dtype),
            of(*(window,) * rank, into, out, dtype=dtype),
            of(images, *(2 * side,) * rank, out, dtype=dtype),
        )

        def gradient(x: Any, w: Any, g: Any) -> Any:
            form = partial(jax.lax.conv_transpose, strides=(2,) * rank, padding="SAME")
            labels = ("NHWC", "HWIO", "NHWC") if rank == 2 else ("NDHWC", "DHWIO", "NDHWC")
            return jax.vjp(lambda x, w: form(x, w, dimension_numbers=labels), x, w)[1](g)

        yield gradient, shapes


def _loops(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """Recurrences of vectors, of matrices by products with them, and their gradients."""
    del size

    def decays(carry: Any, x: Any, w: Any) -> Any:
        return carry * jax.nn.sigmoid(x) + x * w[0]

    def multiplies(carry: Any, x: Any, w: Any) -> Any:
        return jnp.tanh(carry @ w + x)

    def gates(carry: Any, x: Any, w: Any) -> Any:
        gate = jax.nn.sigmoid(carry @ w + x)
        return gate * jnp.tanh(jnp.sin(carry) @ w.T) + (1 - gate) * carry

    def outer(carry: Any, x: Any, w: Any) -> Any:
        added = x[:, :, None] * jnp.roll(x, 1, -1)[:, None, :]
        return carry * jax.nn.sigmoid(w) + added

    def loop(xs: Any, w: Any, tick: Any, matrix: bool) -> Any:
        def trip(carry: Any, x: Any) -> tuple[Any, Any]:
            new = tick(carry, x, w)
            return new, jnp.einsum("bi,bij->bj", x, new) if matrix else new

        shape = (*xs.shape[1:], xs.shape[-1]) if matrix else xs.shape[1:]
        return jax.lax.scan(trip, jnp.zeros(shape, xs.dtype), xs)[1]

    for place in range(NUM):
        tick = (decays, multiplies, gates, outer)[place % 4]
        matrix = tick is outer
        width = some(rng, 32, 160, 8) if matrix else some(rng, 64, 1024, 8)
        rows = some(rng, 4, 256 if matrix else 64)
        form = partial(loop, tick=tick, matrix=matrix)
        shapes = (of(some(rng, 50, 400), rows, width), of(width, width))
        if place // 4 == 1:  # both passes
            yield (
                jax.grad(lambda xs, w, form=form: (form(xs, w) ** 2).sum(), (0, 1)),
                shapes,
            )
        else:
            yield form, shapes


_GROUPS: dict[str, Callable[[np.random.Generator, float], Iterator[Operation]]] = {
    "ffts": partial(_ffts, "real"),
    "inverse ffts": partial(_ffts, "inverse"),
    "complex ffts": partial(_ffts, "complex"),
    "sums by index": _sums_by_index,
    "rows by index": _rows_by_index,
    "thin products": _thin_products,
    "deep products": _deep_products,
    "batched products": _batched_products,
    "rows": _rows,
    "softmax gradients": _softmax_gradients,
    "columns": _columns,
    "transposes": _transposes,
    "elementwise": _elementwise,
    "convolutions": partial(_convolutions, 2),
    "convolutions in three dimensions": partial(_convolutions, 3),
    "transposed convolutions, float32": partial(_transposed, f32, 2),
    "transposed convolutions, bfloat16": partial(_transposed, bf16, 2),
    "transposed convolutions in three dimensions": partial(_transposed, f32, 3),
    **RARER,
    "loops": _loops,
}


def _step(name: str, only: int | None, tiny: bool) -> ZooStep:
    rng = np.random.default_rng(crc32(name.encode()))
    listed = list(_GROUPS[name](rng, ELEMENTS * (_TINY if tiny else 1.0)))
    if only is not None:
        listed = [listed[only]]

    def make_state() -> list[list[Any]]:
        return [[made(given) for given in arguments] for _, arguments in listed]

    def step(state: Any) -> tuple[Any, list[Any]]:
        return state, [fn(*given) for (fn, _), given in zip(listed, state, strict=True)]

    return ZooStep(step, make_state, lambda _: ())


def rarer_operations() -> Iterator[Case]:
    return (case for case in all_operations() if case.name in RARER)


def all_operations() -> Iterator[Case]:
    for name in _GROUPS:
        if name == "loops":  # steps of their own: between their kernels the device waits
            for place in range(NUM):
                yield Case(f"loop {place + 1}", False, partial(_step, name, place))
        else:
            yield Case(name, False, partial(_step, name, None))

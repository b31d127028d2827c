"""Operations that the first samples left out, or that tables of steps named as contradicted.

Convolutions with few channels, of small images, depthwise and along one dimension, each of the
three kinds by itself; transposes between dimensions that are not contiguous; elementwise work on
odd sizes; orders and running sums; many small products; products that are not rounded; small
equations; random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.judge_h200.sampling import NUM, Index, Operation, bf16, f32, of, some, some_type

FEW = (1, 3, 4, 8, 16, 32)
_LETTERS = "DHW"


def _convolved(x: Any, w: Any, *, stride: int, groups: int) -> Any:
    rank = x.ndim - 2
    letters = _LETTERS[-rank:]
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride,) * rank,
        "SAME",
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )


def _of_kind(kind: int, x: Any, w: Any, stride: int, groups: int = 1) -> Operation:
    """0: the convolution, 1: its input's gradient, 2: its kernel's."""
    form = partial(_convolved, stride=stride, groups=groups)
    if kind == 0:
        return form, (x, w)
    given = jax.eval_shape(form, x, w)
    if kind == 1:
        return lambda w, g: jax.linear_transpose(lambda x: form(x, w), x)(g)[0], (w, given)
    return lambda x, g: jax.linear_transpose(lambda w: form(x, w), w)(g)[0], (x, given)


def _few_channels(kind: int, rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """One side has few channels, in every third operation both."""
    for place in range(NUM):
        few = FEW[place % len(FEW)]
        other = some(rng, 16, 128, 8) if place % 3 else int(rng.choice(FEW))
        into, out = (few, other) if place // 6 else (other, few)
        dtype, stride = (f32, bf16)[place % 2], (1, 2, 1, 4)[place // 2 % 4]
        side, window = some(rng, 24, 160, 4), max(stride, int(rng.choice([3, 4, 5, 7])))
        images = max(1, int(size / 2 / side**2 / max(into, out)))
        x = of(images, side, side, into, dtype=dtype)
        yield _of_kind(kind, x, of(window, window, into, out, dtype=dtype), stride)


def _small_images(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        into, out = some(rng, 48, 768, 8), some(rng, 48, 768, 8)
        dtype, side = (f32, bf16)[place % 2], int(rng.integers(4, 18))
        images = max(1, int(size / 4 / side**2 / max(into, out)))
        x, window = of(images, side, side, into, dtype=dtype), (1, 3, 3, 5)[place // 3]
        w = of(window, window, into, out, dtype=dtype)
        yield _of_kind(place // 2 % 3, x, w, (1, 1, 2)[int(rng.integers(3))])


def _depthwise(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        channels, rank = some(rng, 32, 768, 8), 1 + (place % 4 != 3)
        dtype, side = (f32, bf16)[place % 2], some(rng, 14, 112) ** (3 - rank)
        window = int(rng.choice([3, 5, 7])) if rank == 2 else int(rng.choice([4, 31]))
        images = max(1, int(size / 2 / side**rank / channels))
        x = of(images, *(side,) * rank, channels, dtype=dtype)
        w = of(*(window,) * rank, 1, channels, dtype=dtype)
        yield _of_kind(place // 2 % 3, x, w, 1 + (place % 5 == 4), channels)


def _along_one(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        into = 1 if place % 6 == 0 else some(rng, 16, 512, 8)
        out, dtype = some(rng, 16, 512, 8), (f32, bf16)[place % 2]
        stride, length = (1, 2, 4, 5)[place // 3], some(rng, 400, 24000, 8)
        images = max(1, int(size / 4 / length / max(into, out)))
        x, window = of(images, length, into, dtype=dtype), max(2 * stride, 3)
        yield _of_kind(place % 3, x, of(window, into, out, dtype=dtype), stride)


def _outer_transposes(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """The last dimension stays, or moves with the one before it."""
    orders = ((1, 0, 2), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3), (2, 3, 0, 1), (0, 3, 2, 1))
    for place in range(NUM):
        order = orders[place % len(orders)]
        dims = [some(rng, 2, 128) for _ in order[:-1]]
        last = max(1, int(size / np.prod(dims)))
        shape = (*dims, last) if place % 2 else (last, *dims)
        form = partial(jnp.transpose, axes=order)
        yield lambda x, form=form: form(x) + 1, (of(*shape, dtype=some_type(rng)),)


def _odd_elementwise(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    forms = (
        lambda x, y: x + y, lambda x, y: x * jax.nn.sigmoid(y), lambda x, y: jnp.maximum(x, y) * 2,
        lambda x, y: x.astype(f32) * y.astype(f32),
    )  # fmt: skip
    for place in range(NUM):
        dtype, odd = (f32, bf16)[place % 2], 2 * int(rng.integers(1, 400)) + 1
        rows = max(1, int(size * rng.uniform(0.3, 1) / odd) | 1)
        shape = (rows * odd,) if place % 3 == 0 else (rows, odd)
        yield forms[place % 4], (of(*shape, dtype=dtype), of(*shape, dtype=dtype))


def _orders(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    forms: tuple[Callable[[Any], Any], ...] = (
        lambda x: jax.lax.top_k(x, 8), lambda x: jnp.sort(x, -1), lambda x: jnp.argsort(x, -1),
        lambda x: jnp.cumsum(x, -1), lambda x: jax.lax.cumlogsumexp(x, 1),
        lambda x: jnp.argmax(x, -1), lambda x: jax.lax.top_k(x, 40)[1], lambda x: jnp.cumsum(x, 0),
    )  # fmt: skip
    for place in range(NUM):
        length = some(rng, 64, 4096)
        rows = max(1, int(size / 4 * 2 ** rng.uniform(-3, 0) / length))
        yield forms[place % len(forms)], (of(rows, length),)


def _one_hots(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """Picked elements of rows, and what an index says, as products and as sums."""
    for place in range(NUM // 2):
        length = some(rng, 32, 32000)
        rows, dtype = max(1, int(size / length)), some_type(rng)
        given = of(rows, length, dtype=dtype)
        if place % 3 == 0:
            yield (
                lambda x, i: jnp.take_along_axis(x, i[:, None], -1),
                (given, Index(rows, length)),
            )
        elif place % 3 == 1:
            yield (
                lambda i, x: jax.nn.one_hot(i, x.shape[0], dtype=x.dtype) @ x,
                (Index(rows, 64), of(64, 256, dtype=dtype)),
            )
        else:
            yield (
                lambda x, i: (x * jax.nn.one_hot(i, x.shape[-1], dtype=x.dtype)).sum(-1),
                (given, Index(rows, length)),
            )


def _small_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    forms = ("bmk,bkn->bmn", "bmk,bnk->bmn", "bkm,bkn->bmn")
    for place in range(NUM):
        m, n, k = (some(rng, 8, 72) for _ in range(3))
        batch, dtype = max(1, int(size / 2 / max(m * k, k * n, m * n))), (f32, bf16)[place % 2]
        form = forms[place // 2 % 3]
        sizes = {"b": batch, "m": m, "n": n, "k": k}
        shapes = [[sizes[letter] for letter in part] for part in form.split("->")[0].split(",")]
        yield partial(jnp.einsum, form), tuple(of(*shape, dtype=dtype) for shape in shapes)


def _exact_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    """Of 32-bit numbers that are not rounded to 19 bits, and in three rounded parts."""
    for place in range(NUM):
        m, n, k = (some(rng, 64, 2048, 8) for _ in range(3))
        batch = 1 if place % 3 else some(rng, 8, 64)
        scale = min(1.0, (2e11 * size / 3e7 / (2.0 * batch * m * n * k)) ** (1 / 3))
        m, n, k = (max(8, round(scale * s / 8) * 8) for s in (m, n, k))
        precision = ("highest", "high")[place % 4 == 3]
        form = partial(jnp.einsum, "bmk,bkn->bmn", precision=precision)
        yield form, (of(batch, m, k), of(batch, k, n))


def _equations(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM // 2):
        side = some(rng, 8, 128, 8)
        batch = max(1, int(size / 16 / side**2))
        x = of(batch, side, side)

        def positive(x: Any) -> Any:
            return 0.01 * x @ x.swapaxes(1, 2) + jnp.eye(x.shape[-1])

        forms: tuple[Callable[[Any], Any], ...] = (
            lambda x: jnp.linalg.cholesky(positive(x)),
            lambda x: jax.lax.linalg.triangular_solve(positive(x), x, left_side=True, lower=True),
            lambda x: jnp.linalg.qr(x)[1],
        )
        yield forms[place % 3], (x,)


def _random_numbers(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    draws: tuple[Callable[[Any, tuple[int, ...]], Any], ...] = (
        jax.random.normal, jax.random.uniform, lambda k, s: jax.random.bernoulli(k, 0.1, s),
        jax.random.bits, lambda k, s: jax.random.randint(k, s, 0, 1000),
        lambda k, s: jax.random.normal(k, s, bf16),
    )  # fmt: skip
    for draw in draws:
        shape = (int(size * rng.uniform(0.3, 1)),)
        yield (
            lambda i, draw=draw, shape=shape: draw(jax.random.key(i[0]), shape),
            (Index(1, 100),),
        )


RARER: dict[str, Callable[[np.random.Generator, float], Iterator[Operation]]] = {
    "few channels": partial(_few_channels, 0),
    "few channels, gradients of inputs": partial(_few_channels, 1),
    "few channels, gradients of kernels": partial(_few_channels, 2),
    "small images": _small_images,
    "depthwise convolutions": _depthwise,
    "convolutions in one dimension": _along_one,
    "outer transposes": _outer_transposes,
    "odd elementwise": _odd_elementwise,
    "orders": _orders,
    "one-hots": _one_hots,
    "small products": _small_products,
    "exact products": _exact_products,
    "equations": _equations,
    "random numbers": _random_numbers,
}

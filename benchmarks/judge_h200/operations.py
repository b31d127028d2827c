"""Single operations, which the judge's constants may be chosen by: names → steps of some of them.

Sizes are drawn at random, odd ones among them, and are no model's. The operations of a step do not
read one another, so each is a kernel or a few of its own, and one profile times them all. The step
returns the arrays that it is given as its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.judge_h200.cases import Case
from tests.zoo.program import ZooStep

Operation = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments' shapes


@dataclass(frozen=True)
class _Index:
    """An argument: `size` places of an array of `num`."""

    size: int
    num: int


f32, bf16 = jnp.float32, jnp.bfloat16
NUM = 12  # operations of a step
ELEMENTS = 3e7  # of an operation's largest array
_TINY = 1e-3


def _some(rng: np.random.Generator, low: float, high: float, multiple: int = 1) -> int:
    """A number between these, most often one with many factors of two."""
    number = 2 ** rng.uniform(np.log2(low), np.log2(high))
    by = max(multiple, int(rng.choice([1, 8, 32])))
    return max(by, round(number / by) * by) if number > by else max(1, round(number))


def _of(*shape: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _type(rng: np.random.Generator) -> Any:
    return (f32, bf16)[int(rng.integers(2))]


def _ffts(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        length = _some(rng, 32, 2048)
        if place % 2:
            rows = max(1, int(size / length / 4))
            yield partial(jnp.fft.rfft), (_of(rows, length),)
        else:
            side = _some(rng, 32, 256)
            rows = max(1, int(size / side / side / 4))
            yield partial(jnp.fft.rfft2), (_of(rows, side, side),)


def _sums_by_index(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        width, dtype = _some(rng, 4, 512), (f32, f32, bf16)[place % 3]
        rows = max(1, int(size / width))
        targets = max(1, rows // int(rng.choice([2, 8, 32])))
        combine = (jax.ops.segment_sum, jax.ops.segment_max)[place % 4 == 3]
        yield (
            lambda x, i, combine=combine, targets=targets: combine(x, i, targets),
            (_of(rows, width, dtype=dtype), _Index(rows, targets)),
        )


def _rows_by_index(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        width, dtype = _some(rng, 1, 512), (f32, bf16)[place % 2]
        rows = max(1, int(size / width))
        held = max(1, rows // int(rng.choice([1, 4, 16])))
        yield lambda x, i: x[i], (_of(held, width, dtype=dtype), _Index(rows, held))


def _thin_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        dtype, k, n = (f32, bf16)[place % 2], _some(rng, 16, 512, 8), _some(rng, 16, 512, 8)
        m = max(8, int(size / max(k, n)) // 8 * 8)
        act = (jax.nn.relu, jnp.tanh, lambda x: x)[place % 3]
        yield lambda x, w, act=act: act(x @ w), (_of(m, k, dtype=dtype), _of(k, n, dtype=dtype))


def _batched_products(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        dtype = (bf16, f32)[place % 2]
        m, n, k = (_some(rng, 16, 512, 8) for _ in range(3))
        batch = max(1, int(size / max(m * k, k * n, m * n)))
        yield (
            lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y),
            (_of(batch, m, k, dtype=dtype), _of(batch, k, n, dtype=dtype)),
        )


def _rows(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    def norm(x: Any) -> Any:
        x = x.astype(f32)
        centred = x - x.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(bf16)

    forms = (jax.nn.softmax, norm, lambda x: jax.nn.logsumexp(x, -1), lambda x: jnp.argmax(x, -1))
    for place in range(NUM):
        length = _some(rng, 16, 50000)
        rows = max(1, int(size / length))
        yield forms[place % 4], (_of(rows, length, dtype=_type(rng)),)


def _columns(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM):
        width, inner = _some(rng, 8, 4096), (1, _some(rng, 4, 64))[place % 2]
        rows = max(1, int(size / width / inner))
        yield (
            lambda x: x.astype(f32).sum(1),
            (_of(inner, rows, width, dtype=_type(rng)),),
        )


def _transposes(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    orders = ((1, 0, 2), (0, 2, 1), (2, 1, 0))
    for place in range(NUM):
        a, b = _some(rng, 4, 1024), _some(rng, 4, 1024)
        c = max(1, int(size / a / b))
        order = orders[place % 3]
        yield (
            lambda x, order=order: jnp.transpose(x, order) + 1,
            (_of(a, b, c, dtype=_type(rng)),),
        )


def _elementwise(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    forms = (
        jnp.tanh, jax.nn.gelu, jnp.sin, jnp.exp, lambda x: x / (1 + x * x), jax.nn.sigmoid,
        lambda x: jnp.abs(x) ** 2.5, lambda x: jnp.log1p(jnp.abs(x)), jax.lax.erf,
        lambda x: jnp.sqrt(jnp.abs(x)), lambda x: jnp.cos(jnp.sin(x)), jax.nn.softplus,
    )  # fmt: skip
    for place in range(NUM):
        yield forms[place], (_of(int(size * rng.uniform(0.5, 1.5)), dtype=_type(rng)),)


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
        dtype, into, out = (f32, bf16)[place % 2], _some(rng, 4, 256), _some(rng, 8, 256, 8)
        side = _some(rng, 8, 64 if rank == 2 else 24)
        images = max(1, int(size / 4 / side**rank / max(into, out)))
        stride, transposed = (1, 2)[place % 3 == 1], place % 3 == 2
        form = partial(_convolved, stride=2 if transposed else stride, transposed=transposed)
        shapes = (
            _of(images, *(side,) * rank, into, dtype=dtype),
            _of(*(3,) * rank, into, out, dtype=dtype),
        )
        gradient = jax.grad(lambda x, w, form=form: (form(x, w).astype(f32) ** 2).sum(), (0, 1))
        yield gradient, shapes


def _loops(rng: np.random.Generator, size: float) -> Iterator[Operation]:
    for place in range(NUM // 2):
        width, rows = _some(rng, 64, 1024, 8), _some(rng, 1, 64)

        def trip(carry: Any, x: Any, w: Any, place: int = place) -> tuple[Any, Any]:
            new = jnp.tanh(carry @ w + x) if place % 2 else carry * jax.nn.sigmoid(x) + x
            return new, new

        def loop(xs: Any, w: Any, trip: Any = trip) -> Any:
            return jax.lax.scan(partial(trip, w=w), jnp.zeros_like(xs[0]), xs)[1]

        yield loop, (_of(128, rows, width), _of(width, width))


_GROUPS: dict[str, Callable[[np.random.Generator, float], Iterator[Operation]]] = {
    "ffts": _ffts,
    "sums by index": _sums_by_index,
    "rows by index": _rows_by_index,
    "thin products": _thin_products,
    "batched products": _batched_products,
    "rows": _rows,
    "columns": _columns,
    "transposes": _transposes,
    "elementwise": _elementwise,
    "convolutions": partial(_convolutions, 2),
    "convolutions in three dimensions": partial(_convolutions, 3),
    "loops": _loops,
}


def _scrambled(size: int, num: int) -> Any:
    """Numbers below `num` in an order without a pattern that caches like."""
    counted = jax.lax.iota(jnp.uint32, size)
    return ((counted * np.uint32(2654435761) >> 7) % num).astype(jnp.int32)


def _made(given: Any) -> Any:
    if isinstance(given, _Index):
        return _scrambled(given.size, given.num)
    return (_scrambled(prod(given.shape), 1024).reshape(given.shape) / 512 - 1).astype(given.dtype)


def _step(name: str, tiny: bool) -> ZooStep:
    rng = np.random.default_rng(sorted(_GROUPS).index(name))
    listed = list(_GROUPS[name](rng, ELEMENTS * (_TINY if tiny else 1.0)))

    def make_state() -> list[list[Any]]:
        return [[_made(given) for given in arguments] for _, arguments in listed]

    def step(state: Any) -> tuple[Any, list[Any]]:
        return state, [fn(*given) for (fn, _), given in zip(listed, state, strict=True)]

    return ZooStep(step, make_state, lambda _: ())


def all_operations() -> Iterator[Case]:
    for name in _GROUPS:
        yield Case(name, False, partial(_step, name))

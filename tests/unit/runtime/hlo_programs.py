"""Tiny programs on eight devices whose collectives and products are known in closed form.

`make_hlo_texts.py` compiles them with several versions of JAX; `test_hlo_texts.py` reads what the
compilers printed, and must find the closed form in every text. Collectives that XLA may not choose
otherwise are asked for by `shard_map`; the partitioner makes the others, which are forced by the
shardings of inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Groups = frozenset[tuple[int, ...]]

SHAPE = {"x": 2, "y": 4}
ALL = ("x", "y")


@dataclass(frozen=True)
class Collective:
    """`groups`: sorted devices; of a permutation, (source, target) pairs."""

    kind: str
    num_bytes: int
    groups: Groups
    trips: int = 1
    dtype: str = "f32"


@dataclass(frozen=True)
class Program:
    """`lower`: what is to be compiled, on the given devices. `dot_flops`: on one device."""

    lower: Callable[[Sequence[Any]], Any]
    collectives: tuple[Collective, ...] = ()
    dot_flops: float = 0.0
    platforms: tuple[str, ...] = ("cpu", "gpu")
    options: dict[str, Any] = field(default_factory=dict)


# -- closed forms


def along(*axes: str, shape: dict[str, int] = SHAPE) -> Groups:
    """Devices that differ in these axes of a mesh, and in no other."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(product(*map(range, shape.values()))):
        rest = tuple(n for n, axis in zip(at, shape, strict=True) if axis not in axes)
        groups.setdefault(rest, []).append(device)
    return frozenset(map(tuple, groups.values()))


def ring(*axes: str) -> Groups:
    """From each device of a group to the next, and from the last to the first."""
    return frozenset(
        (group[i], group[(i + 1) % len(group)]) for group in along(*axes) for i in range(len(group))
    )


# -- how programs are written


def mesh_of(devices: Sequence[Any], shape: dict[str, int] = SHAPE) -> Mesh:
    return Mesh(np.array(devices).reshape(*shape.values()), tuple(shape))


def array(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def on_each(mesh: Mesh, function: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """The function on every device, on arrays of these shapes there."""
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    size = mesh.devices.size
    arrays = [array(mesh, spec, size * first, *rest) for first, *rest in shapes]
    return jax.jit(mapped).lower(*arrays)


def ring_pairs(size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % size) for i in range(size)]


# -- programs


def kinds(*axes: str, order: Sequence[int] | None = None) -> Program:
    """One collective of every kind along axes. Devices are numbered by their place in the mesh,
    whatever `order` they have in it, which XLA takes for CPUs alone."""
    size = int(np.prod([SHAPE[axis] for axis in axes]))

    def lower(devices: Sequence[Any]) -> Any:
        def function(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
            return (
                lax.psum(a, axes),
                lax.all_gather(b, axes, tiled=True),
                lax.psum_scatter(c, axes, tiled=True),
                lax.all_to_all(d, axes, 0, 1, tiled=True),
                lax.ppermute(e, axes, ring_pairs(size)),
            )

        mesh = mesh_of([devices[i] for i in order] if order else devices)
        return on_each(mesh, function, (8,), (16,), (64,), (8, 8), (128,))

    return Program(
        lower,
        (
            Collective("all-reduce", 4 * 8, along(*axes)),
            Collective("all-gather", 4 * 16 * size, along(*axes)),
            Collective("reduce-scatter", 4 * 64 // size, along(*axes)),
            Collective("all-to-all", 4 * 8 * 8, along(*axes)),
            Collective("collective-permute", 4 * 128, ring(*axes)),
        ),
        platforms=("cpu",) if order else ("cpu", "gpu"),
    )


def several(devices: Sequence[Any]) -> Any:
    """A sum of three arrays, which XLA makes one collective of."""
    return on_each(mesh_of(devices), lambda *arrays: lax.psum(arrays, "y"), (8,), (16,), (2,))


def listed(devices: Sequence[Any]) -> Any:
    """Groups that are no axis of any mesh."""
    groups = [[0, 3], [1, 2], [4, 7], [5, 6]]
    return on_each(
        mesh_of(devices, {"d": 8}), lambda x: lax.psum(x, "d", axis_index_groups=groups), (8,)
    )


def part_of_an_axis(devices: Sequence[Any]) -> Any:
    """Rows and columns of a grid that one axis of eight devices holds, summed."""
    mesh = mesh_of(devices, {"d": 8})

    def function(x: Any) -> Any:
        grid = x.reshape(2, 4, 16)
        return grid.sum(1), grid.sum(0)

    whole = NamedSharding(mesh, P())
    return jax.jit(function, out_shardings=whole).lower(array(mesh, P("d"), 8, 16))


CUBE = {"x": 2, "y": 2, "z": 2}


def contracted(devices: Sequence[Any]) -> Any:
    """A product that is summed over two axes, named in another order than the mesh has them."""
    mesh = mesh_of(devices, CUBE)
    arrays = [array(mesh, spec, 64, 64) for spec in (P(None, ("z", "x")), P(("z", "x"), None))]
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P())).lower(*arrays)


def gathered(devices: Sequence[Any]) -> Any:
    """The inner of two axes that split the rows, gathered; once it is the outer one of the mesh."""
    mesh = mesh_of(devices)

    def function(a: Any, b: Any) -> Any:
        return 2 * a, 3 * b

    kept = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y"))
    return jax.jit(function, out_shardings=kept).lower(
        array(mesh, P(("x", "y")), 64, 16), array(mesh, P(("y", "x")), 64, 32)
    )


def resharded(devices: Sequence[Any]) -> Any:
    """From rows to columns along each axis of the mesh."""
    mesh = mesh_of(devices)

    def function(a: Any, b: Any) -> Any:
        return 2 * a, 2 * b

    turned = tuple(NamedSharding(mesh, P(None, axis)) for axis in ALL)
    arrays = [array(mesh, P(axis), 8, 8 * n) for axis, n in zip(ALL, (1, 2), strict=True)]
    return jax.jit(function, out_shardings=turned).lower(*arrays)


def looped(devices: Sequence[Any]) -> Any:
    """A product and a sum in a loop of 5, and a ring in a loop of 3 inside of one of 7."""

    def layer(w: Any) -> Any:
        return lambda h, _: (jnp.tanh(lax.psum(h @ w, "y")[:, :16]), None)

    def step(h: Any, _: Any) -> Any:
        return lax.ppermute(1.5 * h, "y", ring_pairs(SHAPE["y"])), None

    def round_(h: Any, _: Any) -> Any:
        return lax.psum(lax.scan(step, h, None, length=3)[0], "x") * 0.5, None

    def function(w: Any, x: Any, h: Any) -> Any:
        first, _ = lax.scan(layer(w), x, None, length=5)
        second, _ = lax.scan(round_, h, None, length=7)
        return first, second

    return on_each(mesh_of(devices), function, (16, 64), (16, 16), (8,))


def typed(devices: Sequence[Any]) -> Any:
    mesh = mesh_of(devices)

    def function(a: Any, b: Any) -> Any:
        return lax.psum(a, "y"), lax.ppermute(b, "y", [(0, 1), (1, 2), (2, 3)])

    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(ALL), out_specs=P(ALL), check_vma=False)
    arrays = [array(mesh, P(ALL), 64, dtype=dtype) for dtype in (jnp.int32, jnp.uint8)]
    return jax.jit(mapped).lower(*arrays)


def products(devices: Sequence[Any]) -> Any:
    """Split by rows, by the batch, and not at all; the last contracts the last dimensions."""
    mesh = mesh_of(devices)

    def function(a: Any, b: Any, c: Any) -> Any:
        return a @ b, jnp.einsum("bij,bjk->bik", c, c), jnp.einsum("ij,kj->ik", b, b)

    specs = P("x"), P("y"), P()
    return jax.jit(function, out_shardings=tuple(NamedSharding(mesh, s) for s in specs)).lower(
        array(mesh, P("x"), 64, 32), array(mesh, P(), 32, 128), array(mesh, P("y"), 8, 32, 32)
    )


PRODUCT_FLOPS = 2.0 * (32 * 128 * 32 + 2 * 32 * 32 * 32 + 32 * 32 * 128)


def convolutions(devices: Sequence[Any]) -> Any:
    """A convolution and its two gradients, split by images; that of the filter is summed up."""
    mesh = mesh_of(devices)
    numbers = ("NHWC", "HWIO", "NHWC")

    def forward(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def function(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(forward, x, w)
        return y, *pull(y)

    shardings = tuple(NamedSharding(mesh, spec) for spec in (P(ALL), P(ALL), P()))
    return jax.jit(function, out_shardings=shardings).lower(
        array(mesh, P(ALL), 16, 16, 16, 32, dtype=jnp.bfloat16),
        array(mesh, P(), 3, 3, 32, 64, dtype=jnp.bfloat16),
    )


def in_other_memory(devices: Sequence[Any]) -> Any:
    """Buffers of collectives in a memory space of their own, as layouts say."""

    def function(x: Any) -> Any:
        return lax.psum(2 * lax.all_gather(3 * x, "y", tiled=True), "x")

    return on_each(mesh_of(devices), function, (8,))


def on_a_stream(devices: Sequence[Any]) -> Any:
    """A product on a stream of its own: a computation that an asynchronous pair calls."""
    from jax.experimental.compute_on import compute_on

    stream = "gpu_stream:1"
    if jax.__version_info__ < (0, 11):
        product: Any = compute_on(stream)(jax.jit(jnp.matmul))
    else:
        device = jax.memory.Space.Device
        product = compute_on(jnp.matmul, compute_type=stream, out_memory_spaces=device)

    def function(a: Any, b: Any) -> Any:
        return product(a, b), jnp.sin(a) @ b

    return on_each(mesh_of(devices), function, (64, 32), (32, 64))


PROGRAMS = {
    "kinds along x": kinds("x"),
    "kinds along y": kinds("y"),
    "kinds along both": kinds("x", "y"),
    "devices in another order": kinds("x", order=(5, 0, 3, 6, 1, 7, 2, 4)),
    "several arrays": Program(several, (Collective("all-reduce", 4 * (8 + 16 + 2), along("y")),)),
    "listed groups": Program(
        listed, (Collective("all-reduce", 4 * 8, frozenset({(0, 3), (1, 2), (4, 7), (5, 6)})),)
    ),
    "part of an axis": Program(
        part_of_an_axis,
        (
            Collective("all-reduce", 4 * 16, along("y")),
            Collective("all-gather", 4 * 2 * 16, along("x")),
            Collective("all-reduce", 4 * 16, along("x")),
            Collective("all-gather", 4 * 4 * 16, along("y")),
        ),
    ),
    "contracted": Program(
        contracted,
        (Collective("all-reduce", 4 * 64 * 64, along("x", "z", shape=CUBE)),),
        dot_flops=2.0 * 64 * 64 * 16,
    ),
    "gathered": Program(
        gathered,
        (
            Collective("all-gather", 4 * 32 * 16, along("y")),
            Collective("all-gather", 4 * 16 * 32, along("x")),
        ),
    ),
    "resharded": Program(
        resharded,
        (
            Collective("all-to-all", 4 * 8 * 8 // 2, along("x")),
            Collective("all-to-all", 4 * 8 * 16 // 4, along("y")),
        ),
    ),
    "loops": Program(
        looped,
        (
            Collective("all-reduce", 4 * 16 * 64, along("y"), trips=5),
            Collective("collective-permute", 4 * 8, ring("y"), trips=3 * 7),
            Collective("all-reduce", 4 * 8, along("x"), trips=7),
        ),
        dot_flops=5 * 2.0 * 16 * 64 * 16,
    ),
    "other types": Program(
        typed,
        (
            Collective("all-reduce", 4 * 8, along("y"), dtype="s32"),
            Collective(
                "collective-permute",
                8,
                frozenset((4 * row + i, 4 * row + i + 1) for row in range(2) for i in range(3)),
                dtype="u8",
            ),
        ),
    ),
    "products": Program(products, dot_flops=PRODUCT_FLOPS),
    "products by cuBLAS": Program(
        products,
        dot_flops=PRODUCT_FLOPS,
        platforms=("gpu",),
        options={"xla_gpu_enable_triton_gemm": False},
    ),
    "convolutions by cuDNN": Program(
        convolutions,
        (Collective("all-reduce", 2 * 3 * 3 * 32 * 64, along("x", "y"), dtype="bf16"),),
        dot_flops=3 * 2.0 * (2 * 16 * 16 * 64) * (3 * 3 * 32),
        platforms=("gpu",),
    ),
    "another memory space": Program(
        in_other_memory,
        (
            Collective("all-gather", 4 * 8 * 4, along("y")),
            Collective("all-reduce", 4 * 8 * 4, along("x")),
        ),
        platforms=("gpu",),
        options={"xla_gpu_enable_nccl_user_buffers": True},
    ),
    "another stream": Program(on_a_stream, dot_flops=2 * 2.0 * 64 * 64 * 32, platforms=("gpu",)),
}

"""What gathering a convolution's patches takes on CPUs, measured and fitted.

    python -m benchmarks.convolution_patches [--number N] [--json FILE]

times single convolutions and their gradients of random sizes on one CPU device, by processor time.
To one half it fits what a call, a flop, a run of contiguous elements, an element gathered by
itself, an element of a window with holes and a transposed element take
(`autopar.cost.convolution_patches` says which convolution has how many). Outliers count less than
by their squares. The other half says how well these figures predict, and how well those do that the
planner has for CPU devices, which count no calls.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.optimize import least_squares

from autopar.cost.compute import rates
from autopar.cost.convolution_patches import Patches, patches_of, patches_s
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.spec import WHOLE, Layout
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from benchmarks.script import command_line, script_parser, write_json

_KINDS = ("forward", "input-gradient", "kernel-gradient")
FIGURES = ("call", "flop", *Patches._fields)
_FIRST_GUESS_S = (1e-4, 4e-11, 3e-9, 3e-9, 1e-8, 3e-9)
_LEAST_FLOPS, _MOST_FLOPS = 4e6, 4e8
_MESH = mesh_of_cluster(ClusterSpec(1, 1, "cpu"), (1,))
_SAMPLE_S, _SAMPLES = 0.02, 5


def random_convolutions(number: int, seed: int = 0) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Functions of one convolution with the shapes of their arguments. Every other one has few
    images and channels, so that XLA computes it by itself."""
    order = random.Random(seed)
    for index in range(number):
        kind, stride = _KINDS[index % 3], 1 + index // 3 % 2
        most_images, most_channels = ((24, 64), (16, 16))[index // 6 % 2]
        while True:
            images, size = order.randint(1, most_images), 4 * order.randint(2, 10)
            channels = [round(order.uniform(2, most_channels)) for _ in range(2)]
            window = order.choice((1, 3, 5, 7))
            flops = 2 * images * (size // stride) ** 2 * window**2 * channels[0] * channels[1]
            if _LEAST_FLOPS < flops < _MOST_FLOPS:
                break
        image = jax.ShapeDtypeStruct((images, size, size, channels[0]), jnp.float32)
        kernel = jax.ShapeDtypeStruct((window, window, *channels), jnp.float32)
        yield _convolution(kind, stride, image, kernel)


def _convolution(kind: str, stride: int, image: Any, kernel: Any) -> tuple[Callable[..., Any], Any]:
    def convolve(image: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    def of_image(result: Any, kernel: Any) -> Any:
        made_of = jax.linear_transpose(lambda one: convolve(one, kernel), image)
        return made_of(result)[0]

    def of_kernel(image: Any, result: Any) -> Any:
        return jax.linear_transpose(lambda one: convolve(image, one), kernel)(result)[0]

    result = jax.eval_shape(convolve, image, kernel)
    if kind == "forward":
        return convolve, (image, kernel)
    return (
        (of_image, (result, kernel)) if kind == "input-gradient" else (of_kernel, (image, result))
    )


def node_of(fn: Callable[..., Any], shapes: Any) -> tuple[Graph, Node]:
    graph = build_graph(trace_step(fn, shapes))
    (node,) = (one for one in graph.nodes if one.name == "conv_general_dilated")
    return graph, node


def counts_of(graph: Graph, node: Node) -> list[float]:
    """How many of each of `FIGURES` the convolution takes on one device."""
    gathered = patches_of(node, graph.values, _MESH, _whole(node), 1)
    assert gathered is not None
    return [1.0, node.flops, *gathered]


def planner_s(graph: Graph, node: Node) -> float:
    assert _MESH.device is not None
    flops_per_s, _ = rates(_MESH.device, "float32")
    return node.flops / flops_per_s + patches_s(node, graph.values, _MESH, _whole(node), 1)


def _whole(node: Node) -> list[Layout]:
    return [(WHOLE,)] * (len(node.operands) + len(node.results))


def processor_s(fn: Callable[..., Any], shapes: Any) -> float:
    """The shortest of several samples: other load only adds."""
    arguments = [jnp.ones(one.shape, one.dtype) for one in shapes]
    compiled = jax.jit(fn).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    samples = []
    for _ in range(_SAMPLES):
        number, started = 0, time.process_time()
        while (passed := time.process_time() - started) < _SAMPLE_S:
            jax.block_until_ready(compiled(*arguments))
            number += 1
        samples.append(passed / max(number, 1))
    return min(samples)


def fitted(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """Seconds of each of `FIGURES`, all positive: the least sum of |log(predicted / measured)|,
    squared where it is small."""
    table, measured = np.array(counts), np.array(seconds)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(table @ np.exp(logs) / measured)

    found = least_squares(residuals, np.log(_FIRST_GUESS_S), loss="soft_l1", f_scale=0.1)
    return np.exp(found.x)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--number", type=int, default=90, help="of convolutions")
    options = parser.parse_args()
    rows = []
    for fn, shapes in random_convolutions(options.number):
        graph, node = node_of(fn, shapes)
        assert node.work is not None
        rows.append(
            {
                "kind": node.work.kind,
                "shapes": [one.shape for one in shapes],
                "counts": counts_of(graph, node),
                "planner_s": planner_s(graph, node),
                "measured_s": processor_s(fn, shapes),
            }
        )
    half = len(rows) // 2
    counts = [row["counts"] for row in rows]
    measured = [row["measured_s"] for row in rows]
    figures = fitted(counts[:half], measured[:half])
    for name, seconds in zip(FIGURES, figures, strict=True):
        print(f"{name:<12}{1e9 * seconds:12.3f} ns")
    print("predicted over measured, the other half: quartiles")
    products = np.where(np.arange(len(FIGURES)) < 2, figures, 0.0)
    for name, predicted in (
        ("fitted", np.array(counts[half:]) @ figures),
        ("fitted, without patches", np.array(counts[half:]) @ products),
        ("planner", np.array([row["planner_s"] for row in rows[half:]])),
    ):
        quartiles = statistics.quantiles(predicted / np.array(measured[half:]), n=4)
        print(f"  {name:<26}" + "  ".join(f"{one:.2f}" for one in quartiles))
    about = {"command": command_line("benchmarks.convolution_patches", FILE=options.json)}
    by_name = dict(zip(FIGURES, figures, strict=True))
    write_json(options.json, {**about, "figures_s": by_name, "rows": rows})


if __name__ == "__main__":
    main()

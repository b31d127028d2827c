"""What is timed is what XLA really does: nothing is folded, fused away, hoisted or copied."""

import re

import jax
import numpy as np
import pytest

from autopar.ir.profile import (
    COLLECTIVES,
    CONVOLUTIONS,
    STREAMS,
    AttentionTime,
    CollectiveTime,
    ConvolutionTime,
    ProductTime,
    StreamTime,
)
from autopar.measure.profile import overheads, works
from autopar.measure.profile.links import collective_program, placements
from autopar.measure.profile.repeating import PACES, Bench
from autopar.measure.profile.samples import UNTIMED
from autopar.measure.profile.works import Workload
from autopar.runtime.hlo import read_collectives

TRIPS = 7


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tuple(jax.devices()), PACES["cpu", True])


def arrays(operands):
    return tuple(jax.numpy.asarray(operand.values()) for operand in operands)


def loop_text(bench: Bench, work: Workload) -> str:
    """The compiled loop's body, on one device."""
    alone = Bench(bench.devices[:1], bench.pace)
    program = alone.program(work, TRIPS)
    return body_of(program.lower(arrays(work.carry), arrays(work.constants)).compile().as_text())


class OnGpu(Bench):
    """The loops that GPUs get, on CPUs."""

    platform = "gpu"


def body_of(text: str) -> str:
    """All computations but the entry and the loop's condition; the loop itself must be there."""
    body = re.search(r"while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", text)
    assert body is not None, "XLA removed the loop"
    parts = re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text)
    kept = [p for p in parts if not p.startswith(("ENTRY", f"%{body[1]} ", "HloModule"))]
    return "\n".join(kept)


def ops(text: str, name: str) -> int:
    return len(re.findall(rf"= \S+ {name}\(", text))


def big_copies(text: str, least: int) -> list[str]:
    """Copies of arrays with so many numbers."""
    found = []
    for dims in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text):
        if np.prod([int(d) for d in dims.split(",")]) >= least:
            found.append(dims)
    return found


@pytest.mark.parametrize(("batch", "dtype"), [(1, "float32"), (4, "float32"), (1, "bfloat16")])
def test_one_product_per_trip(bench, batch, dtype):
    work = works.product(ProductTime(dtype, batch, 96, 64, 160, UNTIMED))
    text = loop_text(bench, work)
    assert ops(text, "dot") == 1
    if dtype == "float32":
        assert not big_copies(text, 64)


def test_products_depend_on_each_other(bench):
    """The result of n trips is that of n steps, each on what the one before left."""
    work = works.product(ProductTime("float32", 1, 8, 8, 8, UNTIMED))
    carry, constants = arrays(work.carry), arrays(work.constants)
    wanted = carry
    for _ in range(TRIPS):
        tied = works.tie(wanted[0], wanted[1], "cpu")
        wanted = work.step((tied, wanted[1]), constants)
    alone = Bench(bench.devices[:1], bench.pace)
    found = alone.program(work, TRIPS)(carry, constants)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert float(wanted[0][0, 0]) != float(work.carry[0].values()[0, 0])


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_one_convolution_per_trip(bench, kind):
    work = works.convolution(ConvolutionTime("float32", kind, 2, 8, 4, 6, 3, 2, UNTIMED))
    assert ops(loop_text(bench, work), "convolution") == 1


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_are_the_gradients_of_one_another(kind):
    work = works.convolution(ConvolutionTime("float32", kind, 2, 8, 4, 6, 3, 2, UNTIMED))
    carry, constants = arrays(work.carry), arrays(work.constants)
    operand, result = work.step(carry, constants)

    def forward(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers)

    if kind == "forward":
        wanted = forward(operand, constants[0])
    elif kind == "input-gradient":
        wanted = jax.vjp(lambda x: forward(x, constants[0]), carry[1])[1](operand)[0]
    else:
        wanted = jax.vjp(lambda w: forward(constants[0], w), carry[1])[1](operand)[0]
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_read_and_write_what_they_say(bench, kind):
    """Nothing is copied beside the work, and the operands' bytes are about those wanted."""
    wanted = 2**21
    work = works.stream(StreamTime(kind, "float32", wanted, UNTIMED))
    assert work.num_bytes == pytest.approx(wanted, rel=0.01)
    text = loop_text(bench, work)
    large = max(int(np.prod(operand.shape)) for operand in work.carry)
    if kind != "transpose":  # inside of its one fusion, that is what a transposition is
        assert not big_copies(text, large // 4)
    marks = {"gather": "gather", "scatter": "scatter", "elementwise": "multiply", "copy": "negate"}
    assert ops(text, marks.get(kind, "add")) >= 1


def test_attention_has_its_gradients():
    sample = AttentionTime("xla", "float32", 2, 8, 2, 4, True, UNTIMED, UNTIMED)
    for backward, num_results in ((False, 1), (True, 3)):
        work = works.attention(sample, backward=backward)
        results = jax.jit(work.step)(arrays(work.carry), arrays(work.constants))
        assert len(results) == len(work.carry) == 1 + num_results
        assert all(np.isfinite(result).all() for result in results)
        assert all(np.abs(result).max() > 0 for result in results)


def test_a_chain_has_as_many_kernels_as_it_is_long(bench):
    assert ops(loop_text(bench, overheads.chain(5)), "dot") == 5


def test_work_runs_on_all_devices(bench):
    work = works.product(ProductTime("float32", 1, 8, 8, 8, UNTIMED))
    timing = bench.time_work(work)
    assert timing.seconds > 0 and timing.num_samples >= bench.pace.num_samples
    text = bench.program(work, 3).lower(
        *(tuple(map(bench.on_all, own)) for own in (work.carry, work.constants))
    )
    assert f"num_partitions = {len(bench.devices)}" in text.as_text()


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_collective_per_trip_in_the_groups_of_its_placement(bench, kind):
    sample = CollectiveTime(kind, 4, 2, 4, 2.0**14, UNTIMED)
    program, carry = collective_program(sample, bench.devices, TRIPS)
    text = program.lower(*carry).compile().as_text()
    (op,) = read_collectives(text)
    assert (op.kind, op.trips) == (kind, TRIPS)
    if kind == "collective-permute":
        rings = [(0, 2), (2, 4), (4, 6), (6, 0), (1, 3), (3, 5), (5, 7), (7, 1)]
        assert sorted(op.groups) == sorted(rings)
    else:
        assert sorted(op.groups) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert not big_copies(body_of(text), 1024)


def test_placements_are_the_axes_of_meshes():
    assert list(placements(8, 4)) == [
        (2, 1, 2), (2, 2, 2), (2, 4, 1), (4, 1, 4), (4, 2, 2), (8, 1, 4),
    ]  # fmt: skip
    assert list(placements(1, 1)) == []
    assert list(placements(6, 6)) == [(2, 1, 2), (2, 3, 2), (3, 1, 3), (3, 2, 3), (6, 1, 6)]


@pytest.mark.parametrize("kind", ["product", "reduce-last", "scatter"])
def test_several_steps_of_a_trip_on_gpus_are_those_steps(bench, kind):
    """Short works are repeated within a trip, and the results of all of them are kept."""
    if kind == "product":
        work = works.product(ProductTime("float32", 1, 8, 8, 8, UNTIMED))
    else:
        work = works.stream(StreamTime(kind, "float32", 2**16, UNTIMED))
    gpu = OnGpu(bench.devices[:1], bench.pace)
    steps = gpu.steps_per_trip(work)
    assert steps > 1 and bench.steps_per_trip(work) == 1
    carry, constants = arrays(gpu.carry_of(work)), arrays(work.constants)
    assert len(carry) == (1 + 2 * steps if work.is_tied else len(work.carry))
    wanted = arrays(work.carry)
    for _ in range(TRIPS * steps):
        wanted = work.step(wanted, constants)
    lowered = gpu.program(work, TRIPS).lower(carry, constants)
    assert lowered.as_text().count("optimization_barrier") == steps
    found = lowered.compile()(carry, constants)
    last = found[steps] if work.is_tied else found[0]
    np.testing.assert_allclose(last, wanted[-1], rtol=1e-3, atol=1e-5)

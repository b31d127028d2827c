"""A GPU is measured: what is found is possible, and the loops hold nothing but the work.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import re

import jax
import pytest

from autopar.ir.devices import device_spec, preset_of
from autopar.ir.profile import AttentionTime, ProductTime, StreamTime
from autopar.measure.profile import overheads, works
from autopar.measure.profile.local import LocalMachine
from autopar.measure.profile.repeating import PACES, Bench
from autopar.measure.profile.samples import UNTIMED, PlannedSample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def machine() -> LocalMachine:
    made = LocalMachine(Bench((jax.devices()[0],), PACES["gpu", True]))
    made.launch()
    return made


def spec():
    first = jax.devices()[0]
    return device_spec(preset_of(first.platform, first.device_kind))


def take(machine: LocalMachine, group: str, sample):
    return machine.take(PlannedSample(0, group, sample))


@pytest.mark.parametrize("size", [1024, 4096])
def test_products_stay_below_the_peak(machine, size):
    taken = take(machine, "products", ProductTime("bfloat16", 1, size, size, size, UNTIMED))
    assert 0.1 < taken.flops / taken.time.seconds / spec().flops_16bit < 1.0


def test_the_large_operand_may_be_either(machine):
    """The loop does not touch its operands: a wide left one costs as much as a wide right one."""
    left = take(machine, "products", ProductTime("bfloat16", 1, 16384, 256, 4096, UNTIMED))
    right = take(machine, "products", ProductTime("bfloat16", 1, 256, 16384, 4096, UNTIMED))
    assert 0.6 < left.time.seconds / right.time.seconds < 1.6


@pytest.mark.parametrize("kind", ["copy", "elementwise", "reduce-last", "reduce-first"])
def test_large_streams_stay_below_the_bandwidth_of_memory(machine, kind):
    taken = take(machine, "streams", StreamTime(kind, "float32", 2.0**29, UNTIMED))
    assert 0.3 < taken.num_bytes / taken.time.seconds / spec().memory_bandwidth < 1.0


def test_attention_by_cudnn_is_measured_both_ways(machine):
    sample = AttentionTime("cudnn", "bfloat16", 4, 1024, 16, 64, True, UNTIMED, UNTIMED)
    taken = take(machine, "attentions", sample)
    assert 1.0 < taken.backward.seconds / taken.forward.seconds < 6.0


def test_a_kernel_costs_a_microsecond_or_some(machine):
    assert 3e-7 < overheads.measure_launch(machine.bench).seconds < 2e-5
    assert (machine.memory() or 0) > 1e9


@pytest.mark.parametrize("size", [1024, 8192])
def test_nothing_but_products_and_what_ties_them_is_in_the_loop(machine, size):
    bench = machine.bench
    work = works.product(ProductTime("bfloat16", 1, size, size, size, UNTIMED))
    carry, constants = (
        tuple(map(bench.on_all, own)) for own in (bench.carry_of(work), work.constants)
    )
    text = bench.program(work, 7).lower(carry, constants).compile().as_text()
    assert len(re.findall(r"gemm_fusion\S* = |cublas\S*matmul", text)) >= bench.steps_per_trip(work)
    assert not re.search(rf"= bf16\[{size},{size}\]\S* copy\(", text)

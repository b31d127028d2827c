"""Planned steps are timed with made-up inputs, on one mesh and as pipelines."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.ir.profile import Timing
from autopar.measure.time_step import synthetic_array, time_executable
from autopar.runtime.timing import spread_of
from autopar.session import cluster_of_devices
from examples.models import build


@pytest.mark.representatives("method0")
@pytest.mark.parametrize(
    "method",
    [
        autopar.DataParallel(),
        autopar.PipeshardParallel(num_micro_batches=2, stages=autopar.UniformStages(2)),
    ],
)
def test_a_step_is_timed(method):
    example = build("mlp-tiny")
    args = (jax.eval_shape(example.create_state), example.make_batch())
    devices = jax.devices()
    planned = plan_step(
        example.train_step, args, {}, cluster=cluster_of_devices(devices), method=method
    )
    timed = time_executable(
        make_executable(planned, devices), state=planned.traced.state, limit_s=0.1
    )
    assert timed.step is not None and timed.step.seconds > 0 and timed.step.num_samples >= 5
    assert timed.compile_s > 0 and timed.memory_bytes > 0 and not timed.failure


def test_out_of_memory_is_a_result_and_other_failures_are_errors():
    class Refuses:
        avals = ()
        input_shardings = ()

        def __init__(self, text):
            self.text = text

        def memory_bytes(self):
            return 1

        def __call__(self, leaves):
            raise jax.errors.JaxRuntimeError(self.text)

    timed = time_executable(Refuses("RESOURCE_EXHAUSTED: Out of memory\nmore"))
    assert timed.step is None and timed.failure == "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        time_executable(Refuses("INTERNAL: broken"))


def test_keys_are_created_as_keys():
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert synthetic_array(key.shape, key.dtype, place).dtype == key.dtype


def test_synthetic_values_are_scattered_and_never_negative():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    floats, numbers = (
        synthetic_array((64, 64), jnp.bfloat16, place),
        synthetic_array((256,), jnp.int32, place),
    )
    assert floats.dtype == jnp.bfloat16 and 0 <= floats.min() < 0.005 < 0.015 < floats.max() <= 0.02
    assert numbers.min() >= 0 and numbers.max() < 97 and len(set(numbers.tolist())) > 80
    assert set(synthetic_array((64,), jnp.bool_, place).tolist()) == {True, False}


def test_the_spread_is_that_of_the_middle_half():
    assert spread_of([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0 and spread_of([1.0, 2.0, 3.0, 9.0]) > 0.5
    assert not Timing(1.0, 0.02).is_noisy and Timing(1.0, 0.5).is_noisy
